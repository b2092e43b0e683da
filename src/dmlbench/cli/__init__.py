"""The command line, one thin module per sub-command."""

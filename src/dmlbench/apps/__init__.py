"""What is built from finished runs: pictures and reports."""

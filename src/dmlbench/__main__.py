"""``python -m dmlbench`` is the console script."""

from dmlbench.cli.main import main

main()

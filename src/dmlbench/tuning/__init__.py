"""Searching hyper-parameters: trials are runs under ``protocol=hpo``, drawn by Optuna, and the best is a recipe."""

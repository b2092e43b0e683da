"""Hyperparameter search by Optuna: trials are runs under ``protocol=hpo``, and the best becomes a recipe."""

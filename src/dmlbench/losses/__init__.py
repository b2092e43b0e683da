"""What is minimized: the objective that runs a loss (and its miner) on a model's output."""

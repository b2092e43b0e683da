"""Data sets, their splits and the batches that a training loop draws from them."""

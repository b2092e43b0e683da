"""From rows of a table to batches: samplers, transforms and loaders."""

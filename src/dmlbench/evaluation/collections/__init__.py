"""Rankings of every collection of fold models at once."""

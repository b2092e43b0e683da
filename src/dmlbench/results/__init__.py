"""Result files, the collections of fold models, and tables."""

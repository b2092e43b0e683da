"""Embedding of images, exact search and retrieval scores."""

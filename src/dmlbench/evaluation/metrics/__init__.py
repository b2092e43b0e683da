"""What is computed from a ranking or a whole set of embeddings."""

"""Sets of embeddings: computed from images, stored, or read from files of other code."""

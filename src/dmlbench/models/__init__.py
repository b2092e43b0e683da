"""Networks that turn images into embeddings: backbone, pooling, projection and the distance of the model."""

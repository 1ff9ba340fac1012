"""Images to embeddings: preprocessing, a vision tower, and a cache by content."""

"""The transformers backend: models without a family run transformers' modules over our KV cache."""

"""The paged KV cache and its prefix cache: page ids only, without torch or tensors."""

"""FlashInfer's kernels: a row of attention over the paged KV cache."""

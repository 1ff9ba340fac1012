"""The worker: the batching loop, the page pool, the model and its kernels."""

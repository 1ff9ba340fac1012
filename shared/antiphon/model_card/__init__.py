"""Reading of checkpoints: config files, headers, quantization, tokenizers and chat templates."""

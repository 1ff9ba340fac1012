"""Models that no family declares: modules of transformers over the paged cache."""

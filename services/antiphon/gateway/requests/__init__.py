"""From a parsed request to an open one: validation, sampling, tokenization, submission."""

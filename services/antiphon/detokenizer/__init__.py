"""The detokenizer: token ids to text, UTF-8-safe, with stop strings."""

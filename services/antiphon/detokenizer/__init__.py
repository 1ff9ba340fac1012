"""The detokenizer: ids to text, UTF-8-safe, and the end of a choice at a stop string."""

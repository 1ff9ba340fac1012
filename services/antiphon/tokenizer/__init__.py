"""The tokenizer: a conversation or text to token ids, off the event loop."""

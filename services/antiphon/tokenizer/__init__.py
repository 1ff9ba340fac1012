"""The tokenizer: conversations and text to token ids, off the event loop."""

"""Converts GGUF, SentencePiece and Mistral files to config.json, tokenizer.json and the like."""

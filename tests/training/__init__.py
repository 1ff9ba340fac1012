"""The recipe of the embedded model: its data, its tokenizer, its training and its score."""

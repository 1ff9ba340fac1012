"""config.json, tokenizer.json and their like, made of files that say the same in another form."""

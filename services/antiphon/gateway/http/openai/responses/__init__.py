"""OpenAI's Responses API, with storage and background responses."""

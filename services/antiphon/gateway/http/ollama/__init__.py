"""Ollama's API; bodies are converted to OpenAI's format."""

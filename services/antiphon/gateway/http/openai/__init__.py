"""OpenAI's APIs."""

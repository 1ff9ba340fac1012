"""OpenAI's /v1/responses: answers as items, stored, and made in the background."""

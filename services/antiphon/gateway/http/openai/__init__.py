"""The OpenAI family: bodies to asks, answers to its objects and chunks."""

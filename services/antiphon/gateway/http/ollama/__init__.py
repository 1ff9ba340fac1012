"""The Ollama family: bodies to asks by way of OpenAI's, answers to its objects, a line each."""

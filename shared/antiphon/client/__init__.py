"""A client over NATS, with the promises that HTTP clients have and without HTTP.

Print an answer while it is made:

    async with Client("nats://127.0.0.1:4222") as client:
        async for piece in client.generate("antiphon-small", "What colour is the sky?"):
            print(piece.text, end="")
"""

from antiphon.client.client import Client
from antiphon.client.embeddings import EmbedResult
from antiphon.client.stream import Completion, CompletionChunk

__all__ = ["Client", "Completion", "CompletionChunk", "EmbedResult"]

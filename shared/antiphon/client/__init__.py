"""A client over NATS, with the same guarantees as the HTTP API.

Print a completion as it is generated:

    async with Client("nats://127.0.0.1:4222") as client:
        async for chunk in client.generate("antiphon-small", "What colour is the sky?"):
            print(chunk.text, end="")

Ask about an image (`MediumInput` and `MessagePart` are in `antiphon.wire`):

    parts = (MessagePart(medium=0), MessagePart(text="What is this?"))
    turn = ChatMessage(role="user", content="", parts=parts)
    await client.complete("llava", [turn], media=(MediumInput(data=image),))
"""

from antiphon.client.client import Client, EmbedResult
from antiphon.client.stream import Completion, CompletionChunk

__all__ = ["Client", "Completion", "CompletionChunk", "EmbedResult"]

"""A streaming HTTP client of `/v1/chat/completions`."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0
"""Far more than an idle server needs, since a queued request is silent, too."""
JSON = {"Content-Type": "application/json"}


class ChatFailed(Exception):
    """There is no response, or it is incomplete. The message is for the user."""


class ChatTurn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class ChatRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request; unset fields take the server's defaults."""

    model: str
    messages: tuple[ChatTurn, ...]
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None


async def first_model(url: str, key: str = "", ca_certs: str | None = None) -> str:
    """Return the first model in `/v1/models` of a server.

    Raises:
        ChatFailed: The server cannot be reached, rejects the key, or is not compatible.
    """
    async with _session(key, ca_certs) as session:
        try:
            async with session.get(f"{url}/v1/models") as response:
                await _check(response)
                models = msgspec.json.decode(await response.read(), type=_Models)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        except msgspec.DecodeError as error:
            raise ChatFailed(f"{url} is not a compatible server: {error}") from error
    if not models.data:
        raise ChatFailed(f"{url} has no models")
    return models.data[0].id


async def complete(
    url: str,
    request: ChatRequest,
    on_text: Callable[[str], None],
    key: str = "",
    ca_certs: str | None = None,
) -> None:
    """Stream one response into `on_text`. Cancellation closes the connection, which aborts it.

    Raises:
        ChatFailed: The server rejected the request, failed, or closed the connection early.
    """
    body = msgspec.json.encode(request)
    async with _session(key, ca_certs) as session:
        try:
            address = f"{url}/v1/chat/completions"
            async with session.post(address, data=body, headers=JSON) as response:
                await _check(response)
                await _read_events(response, on_text)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        except msgspec.DecodeError as error:
            raise ChatFailed(f"{url} sent an invalid response: {error}") from error


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class _ServedModel(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_ServedModel, ...]


def _session(key: str, ca_certs: str | None) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        trusted = ssl.create_default_context(cafile=ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ChatFailed(f"--ca-certs {ca_certs}: {error}") from error
    connector = aiohttp.TCPConnector(ssl=trusted)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.read()
    try:
        reason = msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        reason = response.reason or "no reason given"
    raise ChatFailed(f"the server rejected the request ({response.status}): {reason}")


async def _read_events(response: aiohttp.ClientResponse, on_text: Callable[[str], None]) -> None:
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data, type=_Event)
        if event.error is not None:
            raise ChatFailed(f"server error: {event.error.message}")
        for choice in event.choices:
            on_text(choice.delta.content or "")
    raise ChatFailed("incomplete response: the server closed the connection")


def _unreachable(url: str, error: Exception) -> ChatFailed:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        text = f"the certificate of {url} is not trusted: {error}"
        return ChatFailed(f"{text}; set --ca-certs to its CA certificate")
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return ChatFailed(f"TLS handshake with {url} failed: {error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ChatFailed(f"no server responds at {url}; start one with: antiphon serve")
    reason = str(error) or type(error).__name__
    return ChatFailed(f"connection to {url} lost: {reason}")

"""`antiphon chat`: chat with a running server in the terminal, with streaming."""

from __future__ import annotations

import asyncio
import re
import readline
import ssl
import sys
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Meta
from rich.console import Console

from antiphon.config.errors import ConfigError
from antiphon.config.flags import Parser
from antiphon.config.gateway import Key
from antiphon.config.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_URL = re.compile(r"https?://[^/\s]+(/\S*)?")
KEY_VARIABLE = "ANTIPHON_ACCESS__API_KEY"
HELP = "Enter sends, /reset starts over, /help prints this, /exit quits, Ctrl-C stops a response."
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0
"""Far more than an idle server needs, since a queued request is silent, too."""
JSON = {"Content-Type": "application/json"}


class ChatOptions(msgspec.Struct, frozen=True):
    url: str = "http://127.0.0.1:30000"
    model: str | None = None
    message: str | None = None
    system: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    api_key: Key = ""
    ca_certs: str | None = None


class Conversation:
    def __init__(self, options: ChatOptions, model: str) -> None:
        self._options = options
        self._model = model
        self._turns: tuple[ChatTurn, ...] = ()
        self.reset()

    def reset(self) -> None:
        system = self._options.system
        self._turns = (ChatTurn("system", system),) if system else ()

    async def send(self, text: str, console: Console) -> None:
        """Send a user message and print the response as it is streamed.

        A cancelled or failed response is kept in the conversation as far as it was received; if
        nothing was received, the user message is dropped.
        """
        turns = (*self._turns, ChatTurn("user", text))
        received: list[str] = []

        def on_text(piece: str) -> None:
            received.append(piece)
            # Control characters in the model's output must not reach the terminal.
            console.out(CONTROL.sub("", piece), end="", highlight=False)

        try:
            await complete(self._options, self._request(turns), on_text)
        finally:
            if answer := "".join(received):
                self._turns = (*turns, ChatTurn("assistant", answer))
                console.out("")

    def _request(self, turns: tuple[ChatTurn, ...]) -> ChatRequest:
        return ChatRequest(
            model=self._model,
            messages=turns,
            stream=True,
            max_tokens=self._options.max_tokens,
            temperature=self._options.temperature,
        )


def main(argv: Sequence[str]) -> int:
    """Chat until the user quits, or send one `--message`; return the exit status."""
    options = _options(argv)
    console = Console()
    try:
        with asyncio.Runner() as runner:
            model = options.model or runner.run(first_model(options))
            conversation = Conversation(options, model)
            if options.message is not None:
                runner.run(conversation.send(options.message, console))
            else:
                print_notice(console, f"{model} at {options.url}. {HELP}", style="bold")
                _run_conversation(conversation, runner, console)
    except ChatFailed as error:
        print(f"antiphon chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def print_notice(console: Console, text: str, style: str = "dim") -> None:
    """Print text that is not the model's output; brackets in it are not markup."""
    console.print(text, style=style, markup=False, highlight=False)


def _run_conversation(conversation: Conversation, runner: asyncio.Runner, console: Console) -> None:
    readline.set_auto_history(True)  # importing readline gives `input` line editing and history
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match line:
            case "":
                continue
            case "/exit":
                return
            case "/help":
                print_notice(console, HELP)
            case "/reset":
                conversation.reset()
                print_notice(console, "a new conversation")
            case _ if line.startswith("/"):
                print_notice(console, f"unknown command. {HELP}")
            case _:
                _turn(conversation, line, runner, console)


def _turn(conversation: Conversation, line: str, runner: asyncio.Runner, console: Console) -> None:
    try:
        runner.run(conversation.send(line, console))
    except KeyboardInterrupt:  # the runner has cancelled the request
        print_notice(console, "stopped")
    except ChatFailed as error:
        print_notice(console, str(error), style="red")


def _options(argv: Sequence[str]) -> ChatOptions:
    parser = Parser("antiphon chat", f"Chat with a running server. {HELP}")
    parser.add_argument("--url", help="URL of the server [default http://127.0.0.1:30000]")
    for flag, metavar, text in (
        ("--model", "NAME", "model name; unset: the first one the server lists"),
        ("--message", "TEXT", "send this message, print the response and exit"),
        ("--system", "TEXT", "system prompt"),
        ("--max-tokens", "N", "maximum length of a response, in tokens"),
        ("--temperature", "X", "sampling temperature; 0 is greedy"),
        ("--api-key", "KEY", f"API key; unset: from {KEY_VARIABLE}"),
        ("--ca-certs", "FILE", "CA certificates of an https server; unset: the system's"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    plain = parser.parse(argv).plain
    plain.setdefault("api_key", load().settings.access.api_key)
    try:
        options = msgspec.convert(plain, ChatOptions, strict=False)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).partition(" - at `$.")
        raise ConfigError(f"--{name.rstrip('`').replace('_', '-')}: {reason}") from error
    return msgspec.structs.replace(options, url=server_url(options.url))


def server_url(text: str) -> str:
    """Normalize the URL of a server, which may lack `http://` or end in `/v1`."""
    url = text if "://" in text else f"http://{text}"
    if not _URL.fullmatch(url) or not _has_host(url):
        raise ConfigError(f"--url {text}: must be an HTTP URL, such as http://127.0.0.1:30000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class ChatFailed(Exception):
    """There is no response, or it is incomplete. The message is for the user."""


class ChatTurn(msgspec.Struct, frozen=True):
    role: str
    content: str


class ChatRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request; unset fields take the server's defaults."""

    model: str
    messages: tuple[ChatTurn, ...]
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None


async def first_model(options: ChatOptions) -> str:
    url = options.url
    async with _session(options) as session:
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
    options: ChatOptions, request: ChatRequest, on_text: Callable[[str], None]
) -> None:
    """Stream one response into `on_text`. Cancellation closes the connection, which aborts it."""
    url, body = options.url, msgspec.json.encode(request)
    async with _session(options) as session:
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


class _ServedModel(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_ServedModel, ...]


def _session(options: ChatOptions) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S
    )
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        trusted = ssl.create_default_context(cafile=options.ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ChatFailed(f"--ca-certs {options.ca_certs}: {error}") from error
    connector = aiohttp.TCPConnector(ssl=trusted)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.read()
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except msgspec.DecodeError:
        error = None
    reason = error.message if error else response.reason or "no reason given"
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

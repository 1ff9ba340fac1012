"""`antiphon chat`: a conversation in the terminal, streamed from a running server."""

from __future__ import annotations

import asyncio
import re
import readline
import sys
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from rich.console import Console

from antiphon.cli.completion import ChatFailed, ChatRequest, ChatTurn, complete, first_model
from antiphon.config.access import Key
from antiphon.config.errors import ConfigError
from antiphon.config.flags import Parser
from antiphon.config.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_URL = re.compile(r"https?://[^/\s]+(/\S*)?")
KEY_VARIABLE = "ANTIPHON_ACCESS__API_KEY"
HELP = "Enter sends, /reset starts over, /help prints this, /exit quits, Ctrl-C stops a response."


class ChatOptions(msgspec.Struct, frozen=True):
    """What the command line says."""

    url: str = "http://127.0.0.1:30000"
    model: str | None = None
    message: str | None = None
    system: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    api_key: Key = ""
    ca_certs: str | None = None


class Conversation:
    """The turns so far, and the server that they are with."""

    def __init__(self, options: ChatOptions, model: str) -> None:
        self._options = options
        self._model = model
        self._turns: tuple[ChatTurn, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Forget every turn but the system prompt."""
        system = self._options.system
        self._turns = (ChatTurn("system", system),) if system else ()

    async def send(self, text: str, console: Console) -> None:
        """Send one turn and print the answer as it comes.

        A cancelled or broken answer stays in the conversation as far as it was read; without any
        of it the turn is dropped.

        Raises:
            ChatFailed: There was no answer, or not all of it.
        """
        asked = (*self._turns, ChatTurn("user", text))
        heard: list[str] = []

        def hear(piece: str) -> None:
            heard.append(piece)
            # Whatever a model says, it does not steer the terminal.
            console.out(CONTROL.sub("", piece), end="", highlight=False)

        try:
            await complete(
                self._options.url,
                self._complete(asked),
                hear,
                self._options.api_key,
                self._options.ca_certs,
            )
        finally:
            answer = "".join(heard)
            if answer:
                self._turns = (*asked, ChatTurn("assistant", answer))
                console.out("")

    def _complete(self, turns: tuple[ChatTurn, ...]) -> ChatRequest:
        return ChatRequest(
            model=self._model,
            messages=turns,
            stream=True,
            max_tokens=self._options.max_tokens,
            temperature=self._options.temperature,
        )


def main(argv: Sequence[str]) -> int:
    """Talk until the user leaves, or answer one `--message`.

    Returns:
        0, or 1 if there is no server or it failed the one message.
    """
    options = _options(argv)
    console = Console()
    try:
        with asyncio.Runner() as runner:
            model = options.model or runner.run(
                first_model(options.url, options.api_key, options.ca_certs)
            )
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
    """Say something that is not the model's; brackets in it are no markup."""
    console.print(text, style=style, markup=False, highlight=False)


def _run_conversation(conversation: Conversation, runner: asyncio.Runner, console: Console) -> None:
    readline.set_auto_history(True)  # with it, `input` edits lines and recalls them
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
    except KeyboardInterrupt:  # the runner has cancelled the answer, and with it the request
        print_notice(console, "stopped")
    except ChatFailed as error:
        print_notice(console, str(error), style="red")


def _options(argv: Sequence[str]) -> ChatOptions:
    parser = Parser("antiphon chat", f"Chat with a running server. {HELP}")
    parser.add_argument("--url", help="URL of the server [default http://127.0.0.1:30000]")
    parser.add_argument(
        "--model", metavar="NAME", help="model name; unset: the first one the server lists"
    )
    parser.add_argument(
        "--message", metavar="TEXT", help="send this message, print the response and exit"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", metavar="N", help="maximum length of a response, in tokens")
    parser.add_argument("--temperature", metavar="X", help="sampling temperature; 0 is greedy")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key; unset: from {KEY_VARIABLE}")
    parser.add_argument(
        "--ca-certs", metavar="FILE", help="CA certificates of an https server; unset: the system's"
    )
    plain = parser.parse(argv).plain
    plain.setdefault("api_key", load().settings.access.api_key)
    try:
        options = msgspec.convert(plain, ChatOptions, strict=False)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).partition(" - at `$.")
        raise ConfigError(f"--{name.rstrip('`').replace('_', '-')}: {reason}") from error
    return msgspec.structs.replace(options, url=server_url(options.url))


def server_url(text: str) -> str:
    """Return the address of a server as it may be typed: `host:port`, or its `/v1`.

    Raises:
        ConfigError: It is no HTTP address.
    """
    url = text if "://" in text else f"http://{text}"
    if not _URL.fullmatch(url) or not _has_host(url):
        raise ConfigError(f"--url {text}: must be an HTTP URL, such as http://127.0.0.1:30000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _has_host(url: str) -> bool:
    """Whether a URL names a host, and a port that one can be."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False

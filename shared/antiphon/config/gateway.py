"""The door: HTTP, limits and deadlines."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.config.schema import Bytes, Config, Help, Host, Port, Requests, Seconds, Secret
from antiphon.config.template_kwargs import read_template_kwargs

_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*/?")


class PreferredSampling(msgspec.Struct, forbid_unknown_fields=True):
    """What `preferred_sampling` may hold, with the bounds of a request."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class GatewayConfig(Config):
    """The HTTP server and what it lets in."""

    host: Annotated[Host, Help("Address of the HTTP API.")] = "127.0.0.1"
    port: Annotated[Port, Help("Port of the HTTP API; taken means an error that names it.")] = 30000
    root_path: Annotated[
        str,
        Help(
            "Path prefix under which a proxy serves the API, such as /llm: paths are served with "
            "it and without it, and links and the OpenAPI document name it. Empty: none."
        ),
    ] = ""
    ssl_certfile: Annotated[
        str, Help("PEM file with the TLS certificate and its chain; empty: the API is plain HTTP.")
    ] = ""
    ssl_keyfile: Annotated[
        str, Help("PEM file with the key of the certificate; empty: it is in ssl_certfile.")
    ] = ""
    ssl_keyfile_password: Annotated[
        str, Help("Password of the key file; comes by environment only."), Secret()
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        Help(
            "PEM file with the authorities that certificates of clients are verified by; a client "
            "without a certificate is let in unless ssl_client_required is set."
        ),
    ] = ""
    ssl_client_required: Annotated[
        bool, Help("Whether each client must show a certificate of ssl_ca_certs (mutual TLS).")
    ] = False
    body_bytes_max: Annotated[Bytes, Help("Largest request body.")] = 8 * 1024 * 1024
    header_bytes_max: Annotated[
        Bytes, Help("Most bytes in the headers of a request together, and in its path.")
    ] = 16 * 1024
    # All of them stand in one message, twice a second, at 134 bytes each.
    requests_max: Annotated[Requests, Help("Most open requests; one more is a 503.")] = 1024
    unread_bytes_max: Annotated[
        Bytes,
        Help(
            "Most text and details that wait for a slow reader; then its request ends. Details of "
            "the prompt come at once, so they may be more for some seconds."
        ),
    ] = 1024 * 1024
    details_bytes_max: Annotated[
        Bytes,
        Help(
            "Most bytes of log-probabilities, ids and hidden states that the answers to one body "
            "may come to, counted from what it asks for before it runs; more is a 400."
        ),
    ] = 256 * 1024 * 1024
    request_timeout_s: Annotated[Seconds, Help("Deadline of a request that names none.")] = 600.0
    allow_auto_truncate: Annotated[
        bool,
        Help(
            "Whether a prompt that is longer than the context loses its end, and max_new_tokens "
            "is lowered to what the context leaves; else such a request is a 400."
        ),
    ] = False
    cache_report: Annotated[
        bool, Help("Whether the usage of an answer names the prompt tokens found in the cache.")
    ] = False
    stream_output: Annotated[
        bool, Help("Whether a stream of /generate tells what is new, not all so far.")
    ] = False
    stream_usage: Annotated[
        bool, Help("Whether OpenAI streams end with a usage chunk unless the request says no.")
    ] = False
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Help("Sampling parameters of requests that name none: the model's, or OpenAI's."),
    ] = "model"
    preferred_sampling: Annotated[
        str,
        Help(
            "Sampling defaults as a JSON object with temperature, top_p, top_k, min_p, "
            "repetition_penalty and max_new_tokens, for requests that do not set them; they win "
            "over the model's own."
        ),
    ] = "{}"
    chat_template_kwargs: Annotated[
        str,
        Help(
            "JSON object with variables of the chat template for every request; the "
            "chat_template_kwargs of a request replace them key by key."
        ),
    ] = "{}"
    tool_call_parser: Annotated[
        ToolParser,
        Help("How the model writes calls; auto sees it in the chat template where it is certain."),
    ] = ToolParser.AUTO
    reasoning_parser: Annotated[
        ReasoningParser,
        Help(
            "How the model marks its thinking; auto sees it in the chat template where it is "
            "certain, none leaves thinking in the content."
        ),
    ] = ReasoningParser.AUTO
    encode_hedge_s: Annotated[
        Seconds, Help("Pause before a second tokenizer is asked the same.")
    ] = 0.1
    open_list_s: Annotated[Seconds, Help("Pause between whole open lists.")] = 0.5

    def __post_init__(self) -> None:
        if _ROOT_PATH.fullmatch(self.root_path) is None:
            raise ValueError(
                f"root_path {self.root_path!r} is not a path such as /llm: a slash before each "
                "part, and parts of letters, digits, '.', '_', '~' and '-'"
            )
        try:
            msgspec.json.decode(self.preferred_sampling, type=PreferredSampling)
        except msgspec.DecodeError as error:
            raise ValueError(f"preferred_sampling: {error}") from error
        try:
            read_template_kwargs(self.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"chat_template_kwargs: {error}") from error

    @property
    def scheme(self) -> str:
        """How the address of the API begins."""
        return "https" if self.ssl_certfile else "http"

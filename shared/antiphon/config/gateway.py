"""Settings of the gateway: HTTP, limits and deadlines."""

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
    """Fields that `preferred_sampling` may set, with the bounds of a request."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class GatewayConfig(Config):
    """The HTTP server: addresses, TLS, limits and defaults of requests."""

    host: Annotated[Host, Help("Address of the HTTP API.")] = "127.0.0.1"
    port: Annotated[Port, Help("Port of the HTTP API; startup fails if it is in use.")] = 30000
    root_path: Annotated[
        str,
        Help(
            "Path prefix under which a proxy serves the API, such as /llm: paths are served with "
            "and without it, and links and the OpenAPI document include it. Empty: none."
        ),
    ] = ""
    ssl_certfile: Annotated[
        str, Help("PEM file with the TLS certificate and its chain; empty: plain HTTP.")
    ] = ""
    ssl_keyfile: Annotated[
        str,
        Help(
            "PEM file with the private key of the certificate; empty: the key is in ssl_certfile."
        ),
    ] = ""
    ssl_keyfile_password: Annotated[
        str, Help("Password of the private key file; read from the environment only."), Secret()
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        Help(
            "PEM file with the CA certificates that client certificates are verified against; "
            "clients without a certificate are accepted unless ssl_client_required is set."
        ),
    ] = ""
    ssl_client_required: Annotated[
        bool,
        Help("Whether clients must present a certificate signed by ssl_ca_certs (mutual TLS)."),
    ] = False
    body_bytes_max: Annotated[Bytes, Help("Maximum size of a request body, in bytes.")] = (
        8 * 1024 * 1024
    )
    header_bytes_max: Annotated[
        Bytes,
        Help("Maximum size of all request headers together, and of the request path, in bytes."),
    ] = 16 * 1024
    # All open requests are listed in one message, twice a second, at 134 bytes each.
    requests_max: Annotated[
        Requests, Help("Maximum number of open requests; further requests get a 503.")
    ] = 1024
    unread_bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum output buffered for a slow client, in bytes; beyond it the request is "
            "aborted. Prompt logprobs arrive at once and may exceed it for some seconds."
        ),
    ] = 1024 * 1024
    details_bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum size of the logprobs, token IDs and hidden states in the responses to one "
            "body, in bytes, estimated before the request runs; larger ones get a 400."
        ),
    ] = 256 * 1024 * 1024
    request_timeout_s: Annotated[Seconds, Help("Default deadline of a request, in seconds.")] = (
        600.0
    )
    allow_auto_truncate: Annotated[
        bool,
        Help(
            "Whether prompts longer than the context are truncated at the end, and max_new_tokens "
            "is lowered to fit; otherwise such requests get a 400."
        ),
    ] = False
    cache_report: Annotated[
        bool, Help("Whether usage includes the number of cached prompt tokens.")
    ] = False
    stream_output: Annotated[
        bool,
        Help("Whether streams of /generate send only new output instead of all output so far."),
    ] = False
    stream_usage: Annotated[
        bool,
        Help("Whether OpenAI streams end with a usage chunk by default; requests can turn it off."),
    ] = False
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Help(
            "Source of default sampling parameters: the model's generation config, or OpenAI's "
            "defaults."
        ),
    ] = "model"
    preferred_sampling: Annotated[
        str,
        Help(
            "Sampling defaults as a JSON object with temperature, top_p, top_k, min_p, "
            "repetition_penalty and max_new_tokens, for requests that do not set them; they "
            "override the model's defaults."
        ),
    ] = "{}"
    chat_template_kwargs: Annotated[
        str,
        Help(
            "JSON object with chat template variables for every request; the chat_template_kwargs "
            "of a request override them key by key."
        ),
    ] = "{}"
    tool_call_parser: Annotated[
        ToolParser,
        Help(
            "Parser of the model's tool calls; auto detects it from the chat template where the "
            "format is unambiguous."
        ),
    ] = ToolParser.AUTO
    reasoning_parser: Annotated[
        ReasoningParser,
        Help(
            "Parser of the model's reasoning; auto detects it from the chat template where the "
            "format is unambiguous, none leaves reasoning in the content."
        ),
    ] = ReasoningParser.AUTO
    encode_hedge_s: Annotated[
        Seconds, Help("Delay before the same text is sent to a second tokenizer, in seconds.")
    ] = 0.1
    open_list_s: Annotated[
        Seconds,
        Help("Interval between complete lists of open requests sent to the cluster, in seconds."),
    ] = 0.5

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
        """The URL scheme of the API."""
        return "https" if self.ssl_certfile else "http"

"""Settings of the gateway: HTTP, limits, access, request log, stored responses and sessions."""

from __future__ import annotations

import re
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.config.schema import Bytes, Config, Host, Port, Requests, Seconds, Secret

Replicas = Annotated[int, Meta(ge=1, le=5)]
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

    host: Host = "127.0.0.1"
    """Address of the HTTP API."""
    port: Port = 30000
    """Port of the HTTP API; startup fails if it is in use."""
    root_path: str = ""
    """Path prefix under which a proxy serves the API, such as /llm: paths are served with and
    without it, and links and the OpenAPI document include it. Empty: none."""
    ssl_certfile: str = ""
    """PEM file with the TLS certificate and its chain; empty: plain HTTP."""
    ssl_keyfile: str = ""
    """PEM file with the private key of the certificate; empty: the key is in ssl_certfile."""
    ssl_keyfile_password: Annotated[str, Secret()] = ""
    """Password of the private key file; read from the environment only."""
    ssl_ca_certs: str = ""
    """PEM file with the CA certificates that client certificates are verified against; clients
    without a certificate are accepted unless ssl_client_required is set."""
    ssl_client_required: bool = False
    """Whether clients must present a certificate signed by ssl_ca_certs (mutual TLS)."""
    body_bytes_max: Bytes = 8 * 1024 * 1024
    """Maximum size of a request body, in bytes."""
    header_bytes_max: Bytes = 16 * 1024
    """Maximum size of all request headers together, and of the request path, in bytes."""
    # All open requests are listed in one message, twice a second, at 134 bytes each.
    requests_max: Requests = 1024
    """Maximum number of open requests; further requests get a 503."""
    unread_bytes_max: Bytes = 1024 * 1024
    """Maximum output buffered for a slow client, in bytes; beyond it the request is aborted. Prompt
    logprobs arrive at once and may exceed it for some seconds."""
    resumable_max: Requests = 256
    """Maximum number of streams with X-Antiphon-Resume that are kept without a client, or after
    their end; beyond it the oldest cannot be resumed any more, and end."""
    resumable_bytes_max: Bytes = 64 * 1024 * 1024
    """Maximum size of such streams, in bytes: their prompts, and their token IDs, logprobs and
    hidden states when they were left or have ended."""
    details_bytes_max: Bytes = 256 * 1024 * 1024
    """Maximum size of the logprobs, token IDs and hidden states in the responses to one body, in
    bytes, estimated before the request runs; larger ones get a 400."""
    request_timeout_s: Seconds = 600.0
    """Default deadline of a request, in seconds."""
    allow_auto_truncate: bool = False
    """Whether prompts longer than the context are truncated at the end, and max_new_tokens is
    lowered to fit; otherwise such requests get a 400."""
    cache_report: bool = False
    """Whether usage includes the number of cached prompt tokens."""
    stream_output: bool = False
    """Whether streams of /generate send only new output instead of all output so far."""
    stream_usage: bool = False
    """Whether OpenAI streams end with a usage chunk by default; requests can turn it off."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Source of default sampling parameters: the model's generation config, or OpenAI's
    defaults."""
    preferred_sampling: str = "{}"
    """Sampling defaults as a JSON object with temperature, top_p, top_k, min_p, repetition_penalty
    and max_new_tokens, for requests that do not set them; they override the model's defaults."""
    chat_template_kwargs: str = "{}"
    """JSON object with chat template variables for every request; the chat_template_kwargs of a
    request override them key by key."""
    tool_call_parser: ToolParser = ToolParser.AUTO
    """Parser of the model's tool calls; auto detects it from the chat template where the format is
    unambiguous."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """Parser of the model's reasoning; auto detects it from the chat template where the format is
    unambiguous, none leaves reasoning in the content."""
    encode_hedge_s: Seconds = 0.1
    """Delay before the same text is sent to a second tokenizer, in seconds."""
    open_list_s: Seconds = 0.5
    """Interval between complete lists of open requests sent to the cluster, in seconds."""

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
        return "https" if self.ssl_certfile else "http"


class MediaConfig(Config):
    """Media in requests, what is fetched, and how much; and where long prompts are held."""

    images_max: Annotated[int, Meta(ge=0, le=256)] = 16
    """Maximum number of images of a request."""
    videos_max: Annotated[int, Meta(ge=0, le=256)] = 4
    """Maximum number of videos of a request."""
    audios_max: Annotated[int, Meta(ge=0, le=256)] = 16
    """Maximum number of audio files of a request; a transcription has one."""
    allowed_domains: str = ""
    """Source hosts of images, separated by commas or spaces: images are fetched from these and no
    others, whatever their addresses are; empty: any host with a public address."""
    claim_networks: str = ""
    """Source networks of media that NATS clients serve themselves, in CIDR notation, separated by
    commas or spaces; empty: claims of clients are rejected."""
    allowed_local_path: str = ""
    """Folder below which file URLs may name images; empty: file URLs are rejected."""
    file_bytes_max: Bytes = 32 * 1024**2
    """Maximum size of an image or an audio file, in bytes."""
    video_bytes_max: Bytes = 256 * 1024**2
    """Maximum size of a video, in bytes."""
    pixels_min: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Minimum number of pixels that images are scaled to, of models that keep their shape, if the
    request sets none; 0: the model's."""
    pixels_max: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Maximum number of pixels that images are scaled to, of models that keep their shape, if the
    request sets none, and at most the model's; 0: the model's."""
    fetches_max: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Maximum number of images fetched at once, and of videos."""
    fetch_timeout_s: Seconds = 10.0
    """Maximum time to fetch an image, redirects included, in seconds."""
    video_fetch_timeout_s: Seconds = 60.0
    """Maximum time to fetch a video, redirects included, in seconds."""
    named_bytes_max: Annotated[int, Meta(ge=0, extra={"unit": "bytes"})] = 64 * 1024**2
    """Maximum size of the images that a gateway keeps by their uuid, in bytes, so that a later
    request may send the uuid alone."""
    store_bytes_max: Bytes = 1024**3
    """Maximum size of the images, videos and long prompts of open requests, in bytes; a quarter of
    it is not for requests with videos. What is still fetched counts by the size that its server
    announces, or else as it comes; what finds no room within 5 s gets a 503."""
    host: Host = "127.0.0.1"
    """Address of the port that encoders fetch images from, and workers long prompts; if it is of
    this machine alone and the broker is on another one, prompts are sent over the bus."""
    advertise_host: str = ""
    """Host name announced to encoders and workers; empty: `host`, or this machine's name if it is
    0.0.0.0."""
    port: Port = 0
    """Port that encoders fetch images from, and workers long prompts; 0 takes any free port."""


class ResponsesConfig(Config):
    """Stored responses of /v1/responses, kept in JetStream."""

    store: bool = True
    """Whether responses are stored, which requires JetStream. Otherwise `store: true` is
    rejected."""
    keep_s: Seconds = 30 * 24 * 3600.0
    """Retention time of a stored response, in seconds."""
    bytes_max: Bytes = 1024 * 1024 * 1024
    """Maximum size of all stored responses in the cluster, in bytes; beyond it the oldest are
    deleted."""
    conversation_bytes_max: Bytes = 8 * 1024 * 1024
    """Maximum size of a stored conversation as JSON, in bytes; longer conversations require `store:
    false`."""
    replicas: Replicas = 1
    """Number of replicas of each stored response in a NATS cluster."""


class SessionsConfig(Config):
    """Sessions of /generate, kept in JetStream and available at every gateway."""

    store: bool = True
    """Whether sessions are stored on NATS, which requires JetStream. Otherwise each session lives
    in the memory of the gateway that opened it and is unknown to other gateways."""
    keep_s: Seconds = 24 * 3600.0
    """Retention time of the contents of a session, in seconds, whether they are used or not."""
    bytes_max: Bytes = 256 * 1024 * 1024
    """Maximum size of all stored sessions, in bytes; beyond it the oldest contents are deleted."""
    replicas: Replicas = 1
    """Number of replicas of each session in a NATS cluster."""


Key = Annotated[str, Meta(pattern="^[!-~]*$")]
"""Valid in a header: no spaces, ASCII only."""

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+")


class AccessConfig(Config):
    """API keys, tenants and CORS; see docs/access.md."""

    api_key: Annotated[Key, Secret()] = ""
    """API key required for all calls except probes, unless the call has another known key; empty:
    no key is required without a keys file."""
    admin_api_key: Annotated[Key, Secret()] = ""
    """API key of operators. If it is set, only calls with this key may flush, pause or abort."""
    reasoning_key: Annotated[Key, Secret()] = ""
    """Secret that encrypts the reasoning items clients of /v1/responses send back, identical at all
    gateways; empty: derived from admin_api_key, else random for each process."""
    keys_file: str = ""
    """TOML or JSON file with tenants, the hashes of their keys and their limits; reloaded when it
    changes. Empty: no tenants."""
    share_prefix_cache: bool = False
    """Whether tenants share cached prefixes. Otherwise each tenant only uses its own and cannot
    detect what others have sent by measuring latency."""
    allowed_origins: str = ""
    """Origins that may call the API from web pages (CORS), such as `https://a.example`,
    comma-separated, or `*`; empty: none."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                expected = "expected https://host:port or *"
                raise ValueError(f"allowed_origins: {origin!r} is not an origin; {expected}")

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(part.strip() for part in self.allowed_origins.split(",") if part.strip())


STDOUT = "stdout"
TARGETS_MAX = 8

LogLevel = Annotated[int, Meta(ge=0, le=3)]
LogFormat = Literal["text", "json"]


class RequestLogConfig(Config):
    """Request log, request metrics export and crash dumps of a gateway."""

    enabled: bool = False
    """Whether requests and their outputs are logged."""
    level: LogLevel = 2
    """Level of detail: 0 logs metadata, 1 also sampling parameters, 2 also input and output,
    truncated at 2048 characters, 3 everything."""
    format: LogFormat = "text"
    """Format of the request log: text, or one JSON object per line."""
    target: str = STDOUT
    """Targets of the request log: stdout, folders or both, separated by spaces or commas. Folders
    get one file per hour."""
    export_metrics: bool = False
    """Whether a JSON record of each finished request is written to export_folder."""
    export_folder: str = ""
    """Folder for the records of finished requests, one file per hour."""
    crash_dump_folder: str = ""
    """Folder for crash dumps: a gateway that crashes or receives SIGQUIT writes its unfinished
    requests and those of the last 300 s there, as JSON lines; empty: none."""
    queue_bytes_max: Bytes = 16 * 1024 * 1024
    """Maximum size of records waiting to be written, in bytes; further records are dropped."""
    held_bytes_max: Bytes = 64 * 1024 * 1024
    """Maximum size of inputs and outputs kept for logs and crash dumps, in bytes; beyond it the
    oldest finished requests are dropped first, then texts are truncated. It also limits the size of
    a crash dump."""

    def __post_init__(self) -> None:
        targets(self.target)
        if self.export_metrics and not self.export_folder:
            raise ValueError(
                "export_metrics requires export_folder; set --export-metrics-to-file-dir"
            )


def targets(text: str) -> tuple[str, ...]:
    if not (found := tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))):
        raise ValueError("target is empty; expected stdout, folders or both")
    if len(found) > TARGETS_MAX:
        raise ValueError(f"target has {len(found)} entries; the limit is {TARGETS_MAX}")
    return found


TEMPLATE_BYTES_MAX, TEMPLATE_KEYS_MAX, TEMPLATE_DEPTH_MAX = 8 * 1024, 64, 16
"""Limits of default template arguments: length of the JSON, variables, nesting of their values."""
_OF_REQUESTS = ("messages", "tools", "add_generation_prompt")
"""Variables that every request sets, so that a default would never be used."""
_KINDS = {"list": "a list", "str": "a string", "bool": "a boolean", "NoneType": "null"}


def read_template_kwargs(text: str) -> dict[str, object]:
    """Parse the JSON of default template arguments; `ValueError` says what is wrong with it."""
    size = len(text.encode())
    if size > TEMPLATE_BYTES_MAX:
        raise ValueError(f"the JSON has {size} bytes; the limit is {TEMPLATE_BYTES_MAX} bytes")
    try:
        found: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        kind = _KINDS.get(type(found).__name__, "a number")
        raise ValueError(f"expected a JSON object, such as {{}}, got {kind}")  # noqa: TRY004
    kwargs = cast("dict[str, object]", found)
    if len(kwargs) > TEMPLATE_KEYS_MAX:
        raise ValueError(
            f"the object has {len(kwargs)} keys; the limit is {TEMPLATE_KEYS_MAX} keys"
        )
    for name in _OF_REQUESTS:
        if name in kwargs:
            raise ValueError(f"{name!r} comes from each request and cannot have a default")
    for name, value in kwargs.items():
        if not _is_shallow(value, TEMPLATE_DEPTH_MAX):
            raise ValueError(f"{name!r} is nested deeper than {TEMPLATE_DEPTH_MAX} levels")
    return kwargs


def _is_shallow(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        inner = list(cast("dict[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return True
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)

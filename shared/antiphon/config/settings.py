"""All settings of a process, one struct per group; those of small groups are here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.config.cluster import ClusterConfig
from antiphon.config.gateway import (
    AccessConfig,
    GatewayConfig,
    MediaConfig,
    RequestLogConfig,
    ResponsesConfig,
    SessionsConfig,
)
from antiphon.config.metrics import MetricsConfig
from antiphon.config.model import LoadConfig, ModelConfig
from antiphon.config.parallel import ParallelConfig
from antiphon.config.schema import (
    Beats,
    Bytes,
    Config,
    Host,
    Pixels,
    Port,
    Processes,
    Ratio,
    Requests,
    Seconds,
    Secret,
    Threads,
)
from antiphon.config.speculation import SpeculationConfig
from antiphon.config.worker import BatchingConfig, CacheConfig, GrammarConfig, QueueConfig


class BusConfig(Config):
    """The connection to NATS."""

    url: str = ""
    """URLs of the NATS servers (`nats://host:port`), comma-separated; empty: serve starts a server
    of its own."""
    user: str = ""
    """User name for NATS; empty: no authentication."""
    password: Annotated[str, Secret()] = ""
    """Password for NATS; read from the environment only."""
    ping_interval_s: Seconds = 2.0
    """Interval between pings of the NATS connection, in seconds."""
    connect_timeout_s: Seconds = 2.0
    """Timeout of one connection attempt, in seconds."""
    reconnect_wait_s: Seconds = 0.2
    """Mean delay between reconnection attempts, in seconds; jitter is added."""
    payload_bytes_max: Bytes = 1024 * 1024
    """Maximum message size on NATS, in bytes. Prompts of more than a quarter of it, or of 256 KiB,
    are not sent: workers fetch them from their gateway."""

    def __post_init__(self) -> None:
        # The address is written to files and logs; the password must not be.
        if "@" in self.url:
            raise ValueError(
                "url must not contain a user; set bus.user and ANTIPHON_BUS__PASSWORD instead"
            )
        if any(url.strip().startswith(("ws://", "wss://")) for url in self.url.split(",")):
            raise ValueError("url: WebSocket is not supported; use NATS over TCP (nats://)")


class HealthConfig(Config):
    """The endpoint for `/healthz`, `/readyz` and `/metrics` of each process."""

    host: Host = "127.0.0.1"
    """Address of the health and metrics endpoint."""
    port: Port = 0
    """Port of the health and metrics endpoint; 0 takes a free one and announces it."""


class ServiceConfig(Config):
    """The run loop of every service."""

    heartbeat_s: Seconds = 0.5
    """Interval between heartbeats, in seconds."""
    drain_timeout_s: Seconds = 20.0
    """Maximum time a stopping process waits for accepted requests, in seconds."""
    slots: Requests = 64
    """Maximum number of calls handled concurrently."""
    backlog: Requests = 1024
    """Maximum number of queued calls; further calls are rejected."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


OtlpEndpoint = Annotated[
    str,
    Meta(pattern=r"^((grpcs?|https?)://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/\S*)?$"),
]


class TelemetryConfig(Config):
    """Logs and traces."""

    log_level: LogLevel = LogLevel.INFO
    """Minimum severity of log messages."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of log lines: text, or one JSON object per line."""
    traces: bool = False
    """Whether spans are sent to the OTLP collector."""
    otlp_endpoint: OtlpEndpoint = "localhost:4317"
    """Endpoint of the OTLP trace collector: gRPC as `host:4317` or `grpc(s)://host:port`, HTTP as
    `http(s)://host:4318`."""
    trace_ratio: Ratio = 1.0
    """Ratio of traced requests, among requests without a trace context of their own."""


Blocks = Annotated[int, Meta(ge=1, extra={"unit": "blocks of 64 tokens"})]
Weight = Annotated[float, Meta(ge=0)]


class SupervisorConfig(Config):
    """Processes started and monitored by `antiphon serve`."""

    workers: Processes = 1
    """Number of model workers, each with the whole model. They share cores, free memory,
    cache.bytes_max and batching.running_max evenly; other settings apply to each worker. With
    model.device = cuda each has a GPU of its own, by its number."""
    dp_attention: bool = False
    """Whether `workers` is the number of attention groups of one worker (data-parallel attention),
    which must divide parallel.tp_size, and not the number of workers."""
    tokenizers: Processes = 1
    """Number of tokenizers. Together they use no more threads than there are cores."""
    detokenizers: Processes = 1
    """Number of detokenizers."""
    schedulers: Processes = 1
    """Number of schedulers. One of them leads, and another takes over within some heartbeats when
    that one ends or freezes; with one alone, requests that come while it is frozen are refused."""
    encoders: Annotated[int, Meta(ge=0, extra={"unit": "processes"})] = 1
    """Number of encoders; with 0, those of other machines embed images. The content of an image
    selects its encoder, or the next one if that one is gone, silent or overloaded."""
    encoder_only: bool = False
    """Whether to run encoders alone, for a server that uses the same bus.url. Their names have the
    host's in them."""
    start_timeout_s: Seconds = 60.0
    """Maximum time until all services are ready, in seconds."""
    stop_timeout_s: Seconds = 25.0
    """Maximum time for a process to exit, in seconds."""
    hang_timeout_s: Seconds = 60.0
    """Maximum time without a response on its health port, in seconds, before a process is
    restarted."""
    nats_port: Port | None = None
    """Port of the NATS server started by serve; it must be free, and 0 takes any. Unset: 4222 if
    free, else any."""
    run_path: str = ""
    """Folder for the merged settings and the logs; empty: a temporary folder."""
    metrics_port_base: Port = 30100
    """First port for health and metrics of the processes; each process takes the next free one. 0
    takes any."""


class TokenizerConfig(Config):
    """Tokenization."""

    threads: Threads = 1
    """Number of encoding threads besides the event loop, and of processes for long texts."""
    batch_max: Requests = 32
    """Maximum number of texts encoded in one batch."""
    text_bytes_max: Bytes = 8 * 1024 * 1024
    """Maximum size of a rendered prompt, in bytes."""


class SchedulerConfig(Config):
    """Queueing and routing of requests, and liveness of workers."""

    queue_max: Requests = 1024
    """Maximum number of waiting requests, including those assigned to a worker ahead of time;
    further requests get a 503."""
    look_ahead: Requests = 2
    """Number of requests assigned to a worker beyond its running ones, to keep it busy."""
    suspect_beats: Beats = 3
    """Number of missed heartbeats after which a worker gets no new requests."""
    dead_beats: Beats = 5
    """Number of missed heartbeats after which a process is considered dead."""
    owner_silence_s: Seconds = 15.0
    """Maximum time without a heartbeat from a gateway, in seconds; after it the gateway's requests
    are aborted everywhere."""
    prefill_weight: Weight = 1.0
    """Weight of the prompt blocks that a worker would have to compute, when routing; 0 routes by
    load alone."""
    request_blocks: Weight = 4.0
    """Load weight: cost of one running request, in 64-token prompt blocks, when routing."""
    blocks_max: Blocks = 500_000
    """Maximum number of cached blocks tracked by the scheduler, over all workers; beyond it the
    least recently used ones are evicted."""
    tombstone_s: Seconds = 10.0
    """Time after its deadline for which the ID of an aborted request is still rejected, in
    seconds."""
    tenant_output_bytes_max: Bytes = 4 * 1024**3
    """Maximum size of the output of a tenant's open requests, in bytes: token IDs, text, logprobs
    and hidden states, estimated by max_new_tokens before a request runs; further requests get a
    503."""


class DetokenizerConfig(Config):
    """Detokenization."""

    requests_max: Requests = 8192
    """Maximum number of concurrent requests."""
    output_bytes_max: Bytes = 8 * 1024**3
    """Maximum size of the output of open requests for each detokenizer, in bytes: token IDs, text,
    logprobs and hidden states, estimated by max_new_tokens before a request runs; further requests
    get a 503."""


class EncoderConfig(Config):
    """Image embeddings."""

    model_path: str = ""
    """Folder of a CLIP or SigLIP model, or of one that takes images or audio; empty: that of the
    served model; if that takes neither, every call is rejected as `unsupported`."""
    threads: Threads | None = None
    """Number of compute threads of an encoder; unset: an even share of the cores among the encoders
    and workers that serve starts, or all cores of an encoder that is started alone."""
    decode_processes: Annotated[int, Meta(ge=1, le=256)] = 2
    """Number of child processes that decode images, and of others that decode videos."""
    cache_bytes_max: Bytes | None = None
    """Maximum size of the embedding cache, in bytes; entries are keyed by content hash. Unset: four
    of the model's largest embeddings, at most 1/8 of the free memory, and 256 MiB at least."""
    image_bytes_max: Bytes = 32 * 1024**2
    """Maximum size of an encoded image, or an audio file, in bytes."""
    video_bytes_max: Bytes = 256 * 1024**2
    """Maximum size of an encoded video, in bytes."""
    pixels_max: Pixels = 64 * 1000 * 1000
    """Maximum size of an image, or a frame of a video, before it is scaled down, in pixels."""
    video_frames_max: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 216_000
    """Maximum number of frames of a video, seen or not."""
    video_pixels_max: Annotated[int, Meta(ge=1, le=2**62)] = 16 * 10**9
    """Maximum size of a video: of all of its frames, in pixels."""
    video_seconds_max: Seconds = 3600.0
    """Maximum duration of a video, in seconds."""
    audio_seconds_max: Seconds = 3600.0
    """Maximum duration of an audio file, in seconds."""
    claims_bytes_max: Bytes = 1024**3
    """Maximum size of all results waiting to be fetched, in bytes."""
    claim_s: Seconds = 60.0
    """Time for which a result can be fetched, in seconds."""
    host: Host = "127.0.0.1"
    """Address of the port that results are fetched from."""
    advertise_host: str = ""
    """Host name announced to clients that fetch results; empty: `host`, or this machine's name if
    it is 0.0.0.0."""
    port: Port = 0
    """Port that results are fetched from; 0 takes any free port."""


class KvStorageConfig(Config):
    """Storage of KV pages outside the workers."""

    ram_bytes_max: Bytes = 1024**3
    """Maximum size of pages in memory, in bytes."""
    disk_path: str = ""
    """Folder for pages evicted from memory; empty: none."""
    disk_bytes_max: Bytes = 8 * 1024**3
    """Maximum size of pages on disk, in bytes."""
    page_bytes_max: Bytes = 64 * 1024**2
    """Maximum size of a stored page, in bytes."""
    lease_s_max: Seconds = 60.0
    """Maximum duration of a lease, in seconds."""
    host: Host = "127.0.0.1"
    """Address of the port that pages are fetched from."""
    advertise_host: str = ""
    """Host name announced to clients that fetch pages; empty: `host`, or this machine's name if it
    is 0.0.0.0."""
    port: Port = 0
    """Port that pages are fetched from; 0 takes any free port."""


class Settings(Config):
    """`--<group>-<field>` on the command line, `ANTIPHON_<GROUP>__<FIELD>` in the environment."""

    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    parallel: ParallelConfig = ParallelConfig()
    bus: BusConfig = BusConfig()
    service: ServiceConfig = ServiceConfig()
    health: HealthConfig = HealthConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    metrics: MetricsConfig = MetricsConfig()
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    request_log: RequestLogConfig = RequestLogConfig()
    access: AccessConfig = AccessConfig()
    responses: ResponsesConfig = ResponsesConfig()
    sessions: SessionsConfig = SessionsConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    batching: BatchingConfig = BatchingConfig()
    queue: QueueConfig = QueueConfig()
    cache: CacheConfig = CacheConfig()
    grammar: GrammarConfig = GrammarConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    detokenizer: DetokenizerConfig = DetokenizerConfig()
    encoder: EncoderConfig = EncoderConfig()
    kv_storage: KvStorageConfig = KvStorageConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

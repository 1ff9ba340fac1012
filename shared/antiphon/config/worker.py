"""Settings of the worker: batching, queue order, cache, and grammars."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.model import CacheDtype
from antiphon.config.schema import (
    Bytes,
    Config,
    Host,
    Port,
    Ratio,
    Requests,
    Seconds,
    Threads,
    Tokens,
)

ChunkTokens = Annotated[int, Meta(ge=-1, extra={"unit": "tokens"})]
Events = Annotated[int, Meta(ge=1, extra={"unit": "events"})]
Steps = Annotated[int, Meta(ge=1, extra={"unit": "steps"})]
Conservativeness = Annotated[float, Meta(ge=0)]
Threshold = Annotated[int, Meta(ge=0)]
Multiple = Annotated[float, Meta(gt=0)]
States = Annotated[int, Meta(ge=1, extra={"unit": "states"})]
WHITESPACE_MAX = 256
Characters = Annotated[int, Meta(ge=1, le=WHITESPACE_MAX, extra={"unit": "characters"})]
Entries = Annotated[int, Meta(ge=1, extra={"unit": "entries"})]
Properties = Annotated[int, Meta(ge=1, extra={"unit": "properties"})]


class Policy(StrEnum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """The longest cached prefix first."""
    DFS_WEIGHT = "dfs-weight"
    """Depth first through the prefix tree, subtrees with most waiting requests first."""
    LOF = "lof"
    """The largest max_new_tokens first."""
    RANDOM = "random"
    """In random order, chosen when a request arrives."""
    PRIORITY = "priority"
    """By priority, then first come, first served; equivalent to `queue.priority` with fcfs."""


class Eviction(StrEnum):
    """Which cached pages are evicted first."""

    LRU = "lru"
    """The least recently used."""
    LFU = "lfu"
    """The least frequently used."""


class BatchingConfig(Config):
    """Limits of a worker's batches, and watchdogs of its steps."""

    tokens_max: Tokens = 2048
    """Maximum number of tokens in one forward pass."""
    running_max: Requests = 64
    """Maximum number of running requests."""
    chunk_tokens: ChunkTokens | None = None
    """Maximum length of a prefill chunk, in tokens; -1 disables chunked prefill. Unset: chosen for
    the device, where it may be longer while there is no other request."""
    fill_tokens: Tokens | None = None
    """Maximum number of prefill tokens in one forward pass, not counting decode tokens; a chunk of
    the first request may be longer. Unset: chosen for the device."""
    prefill_max: Requests | None = None
    """Maximum number of prefilling requests in one forward pass; unset: no limit."""
    mixed: bool = True
    """Whether prefill chunks are mixed into decode batches (mixed chunked prefill) instead of
    alternating with them."""
    conservativeness: Conservativeness = 1.0
    """Conservativeness of admission: factor on the usual share of the KV cache reserved for the
    output of running requests."""
    stream_interval: Tokens = 1
    """Number of output tokens sent together when streaming."""
    hidden_states: bool = False
    """Whether requests may return hidden states."""
    media_window_bytes: Bytes = 64 * 1024**2
    """Maximum size of the embeddings that a prefill has at a time, in bytes, where prefill chunks
    may end within an image; what follows is fetched when the prefill has come so far."""
    media_bytes_max: Bytes = 1024**3
    """Maximum size of the embeddings of images that requests wait for or are prefilled with, in
    bytes, and at most a quarter of what weights and steps leave; further requests wait for room."""
    running_timeout_s: Seconds | None = None
    """Maximum running time of a request, in seconds; after it the request ends with an error."""
    stall_s: Seconds = 30.0
    """Time without a completed step, in seconds, after which a worker with unfinished requests is
    reported as stalled."""
    stall_limit_s: Seconds = 300.0
    """Maximum duration of a step, in seconds; a worker whose step takes longer exits and is
    restarted."""
    overlap: bool = True
    """Whether the next step is planned while the one before it is computed, by a GPU or in a thread
    of its own; a CPU worker measures at start whether that is faster."""
    graphs: bool = True
    """Whether a GPU replays what was captured at start (CUDA graphs)."""
    decode_graphs: bool = True
    """Whether decode steps are captured."""
    graph_sizes: str = ""
    """List of batch sizes of captured decode steps, separated by spaces; empty: chosen up to
    `graph_rows_max`."""
    graph_rows_max: Requests | None = None
    """Maximum batch size of captured decode steps; unset: the largest of `graph_sizes`, or 256."""
    graph_padding: bool = True
    """Whether decode steps are padded to the next captured batch size."""
    prefill_graphs: bool = True
    """Whether prefills are captured: what their layers compute between attentions, recurrences and
    sums over ranks."""
    prefill_graph_sizes: str = ""
    """List of numbers of tokens of captured prefills, separated by spaces; empty: chosen up to
    `prefill_graph_tokens_max`."""
    prefill_graph_tokens_max: Tokens | None = None
    """Maximum number of tokens of captured prefills; unset: the largest of `prefill_graph_sizes`.
    With neither none is captured."""
    decode_log_interval: Steps = 40
    """Interval between log lines of decode batches, in steps."""
    dump_folder: str = ""
    """Folder for the last step plans, written after a crash, after a hang or on command; empty:
    none."""

    def __post_init__(self) -> None:
        if self.chunk_tokens == 0:
            raise ValueError(
                "chunk_tokens must be positive, or -1 to disable chunked prefill; got 0"
            )
        if self.chunk_tokens is not None and self.chunk_tokens > self.tokens_max:
            raise ValueError(
                f"chunk_tokens = {self.chunk_tokens} exceeds tokens_max = {self.tokens_max}"
            )
        for name in ("graph_sizes", "prefill_graph_sizes"):
            try:
                captured_sizes(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name} = {error}") from error


def captured_sizes(text: str) -> tuple[int, ...]:
    """Parse a list of sizes, which come in any order; empty if the text is."""
    words = text.split()
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"'{text}': must be positive integers, separated by spaces")
    return tuple(sorted({int(word) for word in words}))


class QueueConfig(Config):
    """Order and limits of waiting requests, in the scheduler's queue and at the workers."""

    policy: Policy = Policy.FCFS
    """Order of waiting requests of equal priority, in the scheduler's queue and at a worker. In the
    scheduler, `lpm` and `dfs-weight` use the 64-token blocks known to be cached at workers; with
    more than 128 waiting requests both fall back to `fcfs`."""
    waiting_max: Requests = 256
    """Maximum number of choices waiting at a worker in addition to the running ones; further ones
    get a 503."""
    timeout_s: Seconds | None = None
    """Maximum time from submission to the start of a request, in seconds, wherever it waits; after
    it the request gets a 503."""
    hand_back_s: Seconds | None = 1.0
    """Time without a start, in seconds, after which a waiting request is requeued if another worker
    has capacity."""
    max_overtake_s: Seconds = 10.0
    """Maximum time for which later requests may overtake a request, in seconds, over all its waits.
    After it the request is next at its worker; in the scheduler's queue it takes turns with the
    requests ahead of it."""
    priority: bool = False
    """Enable priority scheduling, in the scheduler's queue and at the workers."""
    low_first: bool = False
    """Whether lower priority values are scheduled first."""
    preempt_threshold: Threshold = 10
    """Minimum priority difference for preemption, exclusive: a request preempts running ones whose
    priority is lower by more than this, and may be assigned to a full worker that has such
    requests."""
    refuse_priority: bool = False
    """Whether requests with a priority are rejected while priority scheduling is disabled."""

    @property
    def by_priority(self) -> bool:
        """Whether priority scheduling is enabled, by either setting."""
        return self.priority or self.policy is Policy.PRIORITY


class CacheConfig(Config):
    """KV cache, prefix cache and, for models that have them, recurrent states."""

    prefix: bool = True
    """Enable the prefix cache, which reuses the KV cache of shared prefixes."""
    dtype: CacheDtype = CacheDtype.AUTO
    """Data type of the KV cache; auto takes the model's. The fp8 types take half the memory of
    bfloat16; recurrent states are not affected."""
    scales: str = ""
    """File with per-layer scales of fp8 keys and values, in SGLang's format; empty: the
    checkpoint's scales, or 1.0."""
    eviction: Eviction = Eviction.LRU
    """Eviction policy of the prefix cache: least recently used (lru) or least frequently used
    (lfu)."""
    events: bool = True
    """Whether workers publish prefix cache events, which let the scheduler route prompts to the
    workers that have their prefix cached."""
    events_max: Events = 10_000
    """Maximum number of events kept for schedulers that missed some; a scheduler further behind
    gets a full snapshot."""
    tokens_max: Tokens | None = None
    """Size of the KV cache pool, in tokens; unset: from the free memory."""
    memory_ratio: Ratio | None = None
    """Ratio of the KV cache pool to the memory that weights and the largest step leave; unset: 0.25
    on the CPU, 0.9 on a GPU."""
    static_ratio: Ratio | None = None
    """Ratio of weights and KV cache pool together to the free memory, regardless of
    batching.running_max and cache.bytes_max; the worker does not start if its largest step does not
    fit in the rest."""
    bytes_max: Bytes | None = None
    """Maximum size of the KV cache pool when it is sized automatically, in bytes; unset: 2 GiB on
    the CPU, no limit on a GPU."""
    checkpoint_tokens: Tokens = 256
    """Interval between cached checkpoints of a recurrent state, in tokens; the end of a prompt is
    cached as well."""
    states_max: States | None = None
    """Number of recurrent states in the pool; unset: from the free memory."""
    states_ratio: Multiple = 0.9
    """Ratio of the memory of recurrent states to the memory of KV pages."""
    hierarchical: bool = False
    """Enable a level of the prefix cache outside the worker, which cache.storage chooses."""
    storage: Literal["none", "kv_storage"] = "none"
    """Storage of cached prefixes outside the worker: kv_storage copies each block of 64 tokens to
    the kv_storage service and fetches it from there, also after a restart; none disables it.
    Requires cache.hierarchical."""
    fetch_timeout_s: Seconds = 2.0
    """Maximum time for which a request waits for blocks from storage, in seconds; after it they are
    computed."""
    save_bytes_max: Bytes = 256 * 1024**2
    """Maximum size of blocks that wait to be copied to storage, in bytes; further ones are not
    stored."""
    host: Host = "127.0.0.1"
    """Address of the port that kv_storage fetches blocks from."""
    advertise_host: str = ""
    """Host name announced to kv_storage; empty: `host`, or this machine's name if it is 0.0.0.0."""
    port: Port = 0
    """Port that kv_storage fetches blocks from; 0 takes any free port."""


class GrammarConfig(Config):
    """Structured output: JSON schemas, regular expressions and grammars."""

    backend: Literal["xgrammar", "none"] = "xgrammar"
    """Backend that compiles grammars; none rejects requests with a grammar."""
    whitespace_max: Characters = 20
    """Maximum whitespace between two JSON tokens, in characters; without a limit, a model may
    generate whitespace forever."""
    compact_json: bool = False
    """Whether JSON is generated on one line, with one space after commas and colons and no other
    whitespace."""
    compile_timeout_s: Seconds = 10.0
    """Timeout of compiling a grammar, in seconds; a grammar that exceeds it is rejected for a
    while."""
    properties_max: Properties = 1000
    """Maximum number of properties in a JSON schema, over all its objects; checked before
    compilation."""
    follow_timeout_s: Seconds = 10.0
    """Timeout of advancing the grammar by one token, in seconds; a request that exceeds it ends as
    overloaded."""
    workers: Threads = 1
    """Number of grammars compiled concurrently, at low priority; one more is compiled for a tenant
    that has none in progress. Tenants take turns."""
    cache_entries: Entries = 256
    """Maximum number of cached compilation results, including errors."""
    cache_bytes: Bytes = 256 * 1024**2
    """Maximum memory of compiled grammars, in bytes (approximate)."""

"""Settings of the worker: batching, queue order, and cache."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.config.model import CacheDtype
from antiphon.config.schema import Bytes, Config, Help, Ratio, Requests, Seconds, Tokens

ChunkTokens = Annotated[int, Meta(ge=-1, extra={"unit": "tokens"})]
Events = Annotated[int, Meta(ge=1, extra={"unit": "events"})]
Steps = Annotated[int, Meta(ge=1, extra={"unit": "steps"})]
Conservativeness = Annotated[float, Meta(ge=0)]
Threshold = Annotated[int, Meta(ge=0)]
Multiple = Annotated[float, Meta(gt=0)]
States = Annotated[int, Meta(ge=1, extra={"unit": "states"})]


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

    tokens_max: Annotated[Tokens, Help("Maximum number of tokens in one forward pass.")] = 2048
    running_max: Annotated[Requests, Help("Maximum number of running requests.")] = 64
    chunk_tokens: Annotated[
        ChunkTokens | None,
        Help(
            "Maximum length of a prefill chunk, in tokens; -1 disables chunked prefill. Unset: "
            "chosen for the device."
        ),
    ] = None
    fill_tokens: Annotated[
        Tokens | None,
        Help(
            "Maximum number of prefill tokens in one forward pass, not counting decode tokens; a "
            "chunk of the first request may be longer. Unset: chosen for the device."
        ),
    ] = None
    prefill_max: Annotated[
        Requests | None,
        Help("Maximum number of prefilling requests in one forward pass; unset: no limit."),
    ] = None
    mixed: Annotated[
        bool,
        Help(
            "Whether prefill chunks are mixed into decode batches (mixed chunked prefill) instead "
            "of alternating with them."
        ),
    ] = True
    conservativeness: Annotated[
        Conservativeness,
        Help(
            "Conservativeness of admission: factor on the usual share of the KV cache reserved "
            "for the output of running requests."
        ),
    ] = 1.0
    stream_interval: Annotated[
        Tokens, Help("Number of output tokens sent together when streaming.")
    ] = 1
    hidden_states: Annotated[bool, Help("Whether requests may return hidden states.")] = False
    running_timeout_s: Annotated[
        Seconds | None,
        Help(
            "Maximum running time of a request, in seconds; after it the request ends with an "
            "error."
        ),
    ] = None
    stall_s: Annotated[
        Seconds,
        Help(
            "Time without a completed step, in seconds, after which a worker with unfinished "
            "requests is reported as stalled."
        ),
    ] = 30.0
    stall_limit_s: Annotated[
        Seconds,
        Help(
            "Maximum duration of a step, in seconds; a worker whose step takes longer exits and "
            "is restarted."
        ),
    ] = 300.0
    overlap: Annotated[
        bool,
        Help(
            "Whether the next step is launched while the previous one is processed, on devices "
            "that compute asynchronously."
        ),
    ] = True
    decode_log_interval: Annotated[
        Steps, Help("Interval between log lines of decode batches, in steps.")
    ] = 40
    dump_folder: Annotated[
        str,
        Help(
            "Folder for the last step plans, written after a crash, after a hang or on command; "
            "empty: none."
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.chunk_tokens == 0:
            raise ValueError(
                "chunk_tokens must be positive, or -1 to disable chunked prefill; got 0"
            )
        if self.chunk_tokens is not None and self.chunk_tokens > self.tokens_max:
            raise ValueError(
                f"chunk_tokens = {self.chunk_tokens} exceeds tokens_max = {self.tokens_max}"
            )


class QueueConfig(Config):
    """Order and limits of waiting requests, in the scheduler's queue and at the workers."""

    policy: Annotated[
        Policy,
        Help(
            "Order of waiting requests of equal priority, in the scheduler's queue and at a "
            "worker. In the scheduler, `lpm` and `dfs-weight` use the 64-token blocks known to be "
            "cached at workers; with more than 128 waiting requests both fall back to `fcfs`."
        ),
    ] = Policy.FCFS
    waiting_max: Annotated[
        Requests,
        Help(
            "Maximum number of choices waiting at a worker in addition to the running ones; "
            "further ones get a 503."
        ),
    ] = 256
    timeout_s: Annotated[
        Seconds | None,
        Help(
            "Maximum time from submission to the start of a request, in seconds, wherever it "
            "waits; after it the request gets a 503."
        ),
    ] = None
    hand_back_s: Annotated[
        Seconds | None,
        Help(
            "Time without a start, in seconds, after which a waiting request is requeued if "
            "another worker has capacity."
        ),
    ] = 1.0
    max_overtake_s: Annotated[
        Seconds,
        Help(
            "Maximum time for which later requests may overtake a request, in seconds, over all "
            "its waits. After it the request is next at its worker; in the scheduler's queue it "
            "takes turns with the requests ahead of it."
        ),
    ] = 10.0
    priority: Annotated[
        bool, Help("Enable priority scheduling, in the scheduler's queue and at the workers.")
    ] = False
    low_first: Annotated[bool, Help("Whether lower priority values are scheduled first.")] = False
    preempt_threshold: Annotated[
        Threshold,
        Help(
            "Minimum priority difference for preemption, exclusive: a request preempts running "
            "ones whose priority is lower by more than this, and may be assigned to a full worker "
            "that has such requests."
        ),
    ] = 10
    refuse_priority: Annotated[
        bool,
        Help(
            "Whether requests with a priority are rejected while priority scheduling is disabled."
        ),
    ] = False

    @property
    def by_priority(self) -> bool:
        """Whether priority scheduling is enabled, by either setting."""
        return self.priority or self.policy is Policy.PRIORITY


class CacheConfig(Config):
    """KV cache, prefix cache and, for models that have them, recurrent states."""

    prefix: Annotated[
        bool, Help("Enable the prefix cache, which reuses the KV cache of shared prefixes.")
    ] = True
    dtype: Annotated[
        CacheDtype,
        Help(
            "Data type of the KV cache; auto takes the model's. The fp8 types take half the "
            "memory of bfloat16; recurrent states are not affected."
        ),
    ] = CacheDtype.AUTO
    scales: Annotated[
        str,
        Help(
            "File with per-layer scales of fp8 keys and values, in SGLang's format; empty: the "
            "checkpoint's scales, or 1.0."
        ),
    ] = ""
    eviction: Annotated[
        Eviction,
        Help(
            "Eviction policy of the prefix cache: least recently used (lru) or least frequently "
            "used (lfu)."
        ),
    ] = Eviction.LRU
    events: Annotated[
        bool,
        Help(
            "Whether workers publish prefix cache events, which let the scheduler route prompts "
            "to the workers that have their prefix cached."
        ),
    ] = True
    events_max: Annotated[
        Events,
        Help(
            "Maximum number of events kept for schedulers that missed some; a scheduler further "
            "behind gets a full snapshot."
        ),
    ] = 10_000
    tokens_max: Annotated[
        Tokens | None, Help("Size of the KV cache pool, in tokens; unset: from the free memory.")
    ] = None
    memory_ratio: Annotated[
        Ratio,
        Help("Ratio of the KV cache pool to the memory that is left after loading the weights."),
    ] = 0.25
    static_ratio: Annotated[
        Ratio | None,
        Help(
            "Ratio of weights and KV cache pool together to the free memory, regardless of "
            "batching.running_max and cache.bytes_max; the worker does not start if its largest "
            "step does not fit in the rest."
        ),
    ] = None
    bytes_max: Annotated[
        Bytes, Help("Maximum size of the KV cache pool when it is sized automatically, in bytes.")
    ] = 2 * 1024**3
    checkpoint_tokens: Annotated[
        Tokens,
        Help(
            "Interval between cached checkpoints of a recurrent state, in tokens; the end of a "
            "prompt is cached as well."
        ),
    ] = 256
    states_max: Annotated[
        States | None, Help("Number of recurrent states in the pool; unset: from the free memory.")
    ] = None
    states_ratio: Annotated[
        Multiple, Help("Ratio of the memory of recurrent states to the memory of KV pages.")
    ] = 0.9

"""The worker's loop: how much one step holds, who goes first, and how many pages there are."""

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
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """The longest cached prefix first."""
    DFS_WEIGHT = "dfs-weight"
    """Depth first through the prefix tree, the subtrees most waited for first."""
    LOF = "lof"
    """The longest answer asked for first."""
    RANDOM = "random"
    """In random order, drawn when a request arrives."""
    PRIORITY = "priority"
    """By priority, then first come, first served; as `priority` does for the others."""


class Eviction(StrEnum):
    """Which cached pages are given up first."""

    LRU = "lru"
    """Those used longest ago."""
    LFU = "lfu"
    """Those found least often."""


class BatchingConfig(Config):
    """How many tokens and requests one step may hold."""

    tokens_max: Annotated[Tokens, Help("Most tokens in one forward pass.")] = 2048
    running_max: Annotated[Requests, Help("Most requests running at once.")] = 64
    chunk_tokens: Annotated[
        ChunkTokens | None,
        Help("Longest piece of a prompt in one pass; -1 never cuts one; unset: by device."),
    ] = None
    fill_tokens: Annotated[
        Tokens | None,
        Help(
            "Maximum number of new prompt tokens in one pass, decodes not counted; a chunk of the "
            "first prompt may be longer. Unset: by device."
        ),
    ] = None
    prefill_max: Annotated[
        Requests | None, Help("Most prompts in one pass; unset: as many as fit.")
    ] = None
    mixed: Annotated[
        bool, Help("Compute prompts in the passes of decodes, not in turns with them.")
    ] = True
    conservativeness: Annotated[
        Conservativeness,
        Help("How much is kept free for running answers, as a multiple of the usual share."),
    ] = 1.0
    stream_interval: Annotated[Tokens, Help("Tokens of an answer that are sent at once.")] = 1
    hidden_states: Annotated[
        bool, Help("Whether a request may be told the hidden states behind its tokens.")
    ] = False
    running_timeout_s: Annotated[
        Seconds | None, Help("A request that has run for longer ends with an error.")
    ] = None
    stall_s: Annotated[
        Seconds, Help("A worker with work and no step for this long is reported stalled.")
    ] = 30.0
    stall_limit_s: Annotated[
        Seconds, Help("A worker whose step takes this long ends, to be started again.")
    ] = 300.0
    overlap: Annotated[
        bool, Help("Launch a step while the one before is read, on devices that compute apart.")
    ] = True
    decode_log_interval: Annotated[
        Steps, Help("Decode batches between two of their log lines.")
    ] = 40
    dump_folder: Annotated[
        str, Help("Where a crash, a hang or a command leaves the last plans; empty: nowhere.")
    ] = ""

    def __post_init__(self) -> None:
        if self.chunk_tokens == 0:
            raise ValueError("chunk_tokens is 0, so no chunk could ever run")
        if self.chunk_tokens is not None and self.chunk_tokens > self.tokens_max:
            raise ValueError("chunk_tokens exceeds tokens_max, so no chunk could ever run")


class QueueConfig(Config):
    """Who waits, and who goes first: in the scheduler's queue, and at a worker once it is bound."""

    policy: Annotated[
        Policy,
        Help(
            "Order of waiting requests of one priority, in the scheduler's queue and at a worker. "
            "The scheduler's `lpm` and `dfs-weight` go by the blocks of 64 tokens that it knows "
            "the workers to hold; with over 128 waiting requests these two are `fcfs`."
        ),
    ] = Policy.FCFS
    waiting_max: Annotated[
        Requests, Help("Most choices that wait beside those that run; one more is a 503.")
    ] = 256
    timeout_s: Annotated[
        Seconds | None,
        Help("A request not started so long after its submit is a 503, wherever it waits."),
    ] = None
    hand_back_s: Annotated[
        Seconds | None,
        Help("A request not started by then is given back if another worker has room."),
    ] = 1.0
    max_overtake_s: Annotated[
        Seconds,
        Help(
            "How long later requests may go first, all its waits together; then it is next at "
            "its worker, and in the scheduler's queue takes turns with those that are ahead of it."
        ),
    ] = 10.0
    priority: Annotated[
        bool, Help("Whether the priority of a request counts, in the scheduler's queue too.")
    ] = False
    low_first: Annotated[bool, Help("Whether low priorities go first.")] = False
    preempt_threshold: Annotated[
        Threshold,
        Help(
            "A request preempts those whose priority is lower by more than this; it is given to a "
            "worker that runs such ones even if that is full."
        ),
    ] = 10
    refuse_priority: Annotated[
        bool, Help("Whether a request with a priority is refused where none counts.")
    ] = False

    @property
    def by_priority(self) -> bool:
        """Whether priorities count, by either name."""
        return self.priority or self.policy is Policy.PRIORITY


class CacheConfig(Config):
    """The pool of KV pages, and of recurrent states where a model has any."""

    prefix: Annotated[
        bool, Help("Keep what was computed, so that equal beginnings are computed once.")
    ] = True
    dtype: Annotated[
        CacheDtype,
        Help(
            "Number format of keys and values; auto takes what the model computes in. The fp8 ones "
            "take half of bfloat16's memory; recurrent states are left as they are."
        ),
    ] = CacheDtype.AUTO
    scales: Annotated[
        str,
        Help(
            "File with the scales of keys and values in fp8, a number a layer, as SGLang takes it; "
            "empty: the checkpoint's, or 1.0."
        ),
    ] = ""
    eviction: Annotated[Eviction, Help("Which kept pages are given up first.")] = Eviction.LRU
    events: Annotated[
        bool, Help("Tell schedulers what is kept, so that prompts go where their beginning is.")
    ] = True
    events_max: Annotated[
        Events, Help("Events kept for a scheduler that missed some; beyond, it is told everything.")
    ] = 10_000
    tokens_max: Annotated[
        Tokens | None, Help("Tokens that the pool holds; unset: from free memory.")
    ] = None
    memory_ratio: Annotated[
        Ratio, Help("Share of the memory left after the weights that the pool takes.")
    ] = 0.25
    static_ratio: Annotated[
        Ratio | None,
        Help(
            "Share of free memory for weights and pool, whatever batching.running_max and "
            "cache.bytes_max are; refused if the largest step does not fit beside it."
        ),
    ] = None
    bytes_max: Annotated[
        Bytes, Help("Most memory that the pool takes when its size is chosen for it.")
    ] = 2 * 1024**3
    checkpoint_tokens: Annotated[
        Tokens,
        Help("A recurrent state is kept for others each so many tokens, and at prompt ends."),
    ] = 256
    states_max: Annotated[
        States | None, Help("Recurrent states that the pool holds; unset: from free memory.")
    ] = None
    states_ratio: Annotated[
        Multiple, Help("Memory of recurrent states, as a multiple of that of pages.")
    ] = 0.9

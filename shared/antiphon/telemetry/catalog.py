"""Catalog of all metrics that describe a model rather than a process: names, labels and help.

Services record them in their own registries and publish them once a second; a gateway merges the
processes and serves each metric as `antiphon_<name>` and, if SGLang has it, as `sglang:<name>`.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial

import msgspec

GIB = 1024.0**3
MB = 1e6


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """How gauges of several processes are merged. Counters and histograms are added."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


class Side(StrEnum):
    REQUEST = "request"
    """Model name and custom labels of requests."""
    SCHEDULER = "scheduler"
    """Model name, engine type and ranks."""
    PLAIN = "plain"
    """No labels but the metric's own."""


class SglangMetric(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # name after `sglang:`, with `_total` for counters
    side: Side  # SGLang's label set of the metric
    labels: tuple[str, ...] = ()  # our labels that it keeps; it is summed over all others
    fixed: tuple[tuple[str, str], ...] = ()  # SGLang's labels that have a fixed value here
    scale: float = 1.0  # factor from our unit to SGLang's
    # A label of ours and the value to select; unset: all series.
    only: tuple[str, str] | None = None


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # name after `antiphon_`, with `_total` for counters
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # default upper bounds of a histogram
    merge: Merge = Merge.SUM
    custom: bool = False  # whether it has the custom labels of requests
    private: bool = False  # whether it names tenants, and so is for operators only
    sglang: tuple[SglangMetric, ...] = ()  # SGLang's forms of it

    @property
    def full_name(self) -> str:
        return f"antiphon_{self.name}"


_REQUEST, _SCHEDULER, _PLAIN = Side.REQUEST, Side.SCHEDULER, Side.PLAIN
_FIRST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0),
    *(40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
_TOKEN_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06),
    *(0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_REQUEST_S = (
    *(0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0),
    *(100.0, 200.0, 400.0, 600.0, 1200.0),
)
_STAGE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
_QUEUE_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COMPILE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LOADS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)
_IMAGE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


def _counter(
    name: str, help_: str, *labels: str, side: Side | None = None, private: bool = False
) -> MetricSpec:
    """Create a counter; with a `side`, SGLang has it with the same name and labels."""
    sglang = () if side is None else (SglangMetric(name=name, side=side, labels=labels),)
    return MetricSpec(
        name=name,
        kind=Kind.COUNTER,
        help=help_,
        labels=labels,
        custom=side is _REQUEST,
        private=private,
        sglang=sglang,
    )


_engine_counter = partial(_counter, side=_SCHEDULER)


def _gauge(
    name: str,
    help_: str,
    *labels: str,
    merge: Merge = Merge.SUM,
    side: Side | None = _SCHEDULER,
    others: tuple[SglangMetric, ...] = (),
) -> MetricSpec:
    sglang = () if side is None else (SglangMetric(name=name, side=side, labels=labels),)
    return MetricSpec(
        name=name,
        kind=Kind.GAUGE,
        help=help_,
        labels=labels,
        merge=merge,
        sglang=(*sglang, *others),
    )


def _histogram(
    name: str,
    help_: str,
    buckets: tuple[float, ...],
    side: Side | None = None,
    sglangs_name: str = "",
) -> MetricSpec:
    sglang = () if side is None else (SglangMetric(name=sglangs_name or name, side=side),)
    custom = side is _REQUEST
    return MetricSpec(
        name=name, kind=Kind.HISTOGRAM, help=help_, buckets=buckets, custom=custom, sglang=sglang
    )


# Requests, recorded by gateways.
NUM_REQUESTS = MetricSpec(
    name="num_requests_total",
    kind=Kind.COUNTER,
    help="Requests that have ended, by outcome.",
    labels=("outcome",),
    custom=True,
    sglang=(SglangMetric(name="num_requests_total", side=_REQUEST),),
)
NUM_REJECTED_REQUESTS = _counter(
    "num_rejected_requests_total", "Requests rejected before they were queued, by error.", "code"
)
NUM_ABORTED_REQUESTS = _counter(
    "num_aborted_requests_total", "Requests that were cancelled or aborted.", side=_REQUEST
)
NUM_SO_REQUESTS = _counter(
    "num_so_requests_total", "Requests with structured output.", side=_REQUEST
)
PROMPT_TOKENS = _counter("prompt_tokens_total", "Prompt tokens of ended requests.", side=_REQUEST)
GENERATION_TOKENS = _counter(
    "generation_tokens_total", "Generated tokens of ended requests.", side=_REQUEST
)
CACHED_TOKENS = _counter(
    "cached_tokens_total",
    "Prompt tokens of ended requests found in the prefix cache.",
    "cache_source",
    side=_REQUEST,
)
TENANT_REQUESTS = _counter(
    "tenant_requests_total",
    "Requests ended or rejected, by tenant.",
    "tenant",
    "outcome",
    private=True,
)
TENANT_TOKENS = _counter(
    "tenant_tokens_total", "Tokens of ended requests, by tenant.", "tenant", "kind", private=True
)
NUM_OPEN_REQS = _gauge("num_open_reqs", "Requests that have not ended.", side=None)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "Time to first token (TTFT), from the arrival of a request.",
    _FIRST_S,
    _REQUEST,
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    "Inter-token latency (ITL): time between two tokens of a request.",
    _TOKEN_S,
    _REQUEST,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "request_time_per_output_token_seconds",
    "Time per output token (TPOT): mean time per token of a request after its first.",
    _TOKEN_S,
    _REQUEST,
)
E2E_REQUEST_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    "End-to-end (E2E) latency: time from the arrival of a request to its end.",
    _REQUEST_S,
    _REQUEST,
)
PER_STAGE_LATENCY = MetricSpec(
    name="per_stage_req_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Time of a request in a stage: tokenize, api_server_dispatch (until the scheduler has "
    "accepted it), request_process (from then until its end).",
    labels=("stage",),
    buckets=_STAGE_S,
    sglang=(
        SglangMetric(name="per_stage_req_latency_seconds", side=_SCHEDULER, labels=("stage",)),
    ),
)
PROMPT_TOKENS_HISTOGRAM = _histogram(
    "request_prompt_tokens",
    "Prompt tokens of a request.",
    _TOKENS,
    _REQUEST,
    "prompt_tokens_histogram",
)
UNCACHED_PROMPT_TOKENS_HISTOGRAM = _histogram(
    "request_uncached_prompt_tokens",
    "Prompt tokens of a request not found in the prefix cache.",
    _TOKENS,
    _REQUEST,
    "uncached_prompt_tokens_histogram",
)
GENERATION_TOKENS_HISTOGRAM = _histogram(
    "request_generation_tokens",
    "Generated tokens of a request.",
    _TOKENS,
    _REQUEST,
    "generation_tokens_histogram",
)
HTTP_REQUESTS = _counter("http_requests_total", "HTTP requests.", "endpoint", "method", side=_PLAIN)
HTTP_RESPONSES = _counter(
    "http_responses_total", "HTTP responses.", "endpoint", "status_code", "method", side=_PLAIN
)
HTTP_REQUESTS_ACTIVE = _gauge(
    "http_requests_active", "HTTP requests in progress.", "endpoint", "method", side=_PLAIN
)
GET_LOADS = MetricSpec(
    name="get_loads_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time to respond to /v1/loads.",
    buckets=_LOADS_S,
    sglang=(SglangMetric(name="get_loads_duration_seconds", side=_REQUEST),),
)

# The queue, recorded by the scheduler; workers add their requests that have not started.
NUM_QUEUE_REQS = _gauge("num_queue_reqs", "Queued requests, in the scheduler and in workers.")
QUEUE_TIME = _histogram(
    "queue_time_seconds",
    "Time from the submission of a request to its assignment to a worker.",
    _QUEUE_S,
    _SCHEDULER,
)
SCHEDULER_LEADERS = _gauge("scheduler_leaders", "Schedulers that lead the queue.", side=None)
SCHEDULER_REQS = _gauge(
    "scheduler_num_reqs",
    "Requests accepted by the scheduler that have not ended.",
    merge=Merge.MAX,
    side=None,
)
SCHEDULED_REQS = _counter(
    "scheduler_scheduled_reqs_total", "Attempts of requests, by worker.", "worker"
)
REQUEUED_REQS = _counter(
    "scheduler_requeued_reqs_total",
    "Requests that a worker returned to the queue before they started.",
    "worker",
)
PROMPT_BLOCKS = _counter(
    "scheduler_prompt_blocks_total", "Blocks of 64 tokens of the scheduled prompts."
)
CACHED_PROMPT_BLOCKS = _counter(
    "scheduler_cached_prompt_blocks_total",
    "Scheduled prompt blocks known to be in the worker's prefix cache.",
)
KNOWN_BLOCKS = _gauge(
    "scheduler_known_blocks",
    "Blocks known to be in the workers' prefix caches.",
    merge=Merge.MAX,
    side=None,
)
KV_REPLAYS = _counter("scheduler_kv_replays_total", "Replays of KV events requested.")
FAILED_TERMS = _counter(
    "scheduler_failed_terms_total", "Terms that a leader ended because of an internal error."
)
SCHEDULER_REJECTED_REQS = _counter(
    "scheduler_rejected_reqs_total", "Submissions rejected, by error.", "reason"
)
LOST_REQS = _counter("scheduler_lost_reqs_total", "Requests reported lost to their gateways.")
WORKER_CAPACITY = _gauge(
    "scheduler_worker_capacity",
    "Requests that can still be assigned to a worker.",
    "worker",
    merge=Merge.MAX,
    side=None,
)

# The engine, recorded by workers.
NUM_RUNNING_REQS = _gauge("num_running_reqs", "Running requests.")
NUM_GRAMMAR_QUEUE_REQS = _gauge(
    "num_grammar_queue_reqs", "Requests waiting for their grammar to compile."
)
NUM_PAUSED_REQS = _gauge("num_paused_reqs", "Requests waiting while generation is paused.")
NUM_RETRACTED_REQS = _gauge("num_retracted_reqs", "Retracted requests waiting to resume.")
RETRACTED_INPUT_TOKENS = _engine_counter(
    "num_retracted_input_tokens_total", "Prompt tokens of retracted requests."
)
RETRACTED_OUTPUT_TOKENS = _engine_counter(
    "num_retracted_output_tokens_total", "Generated tokens of retracted requests."
)
NUM_RETRACTIONS = _counter("num_retractions_total", "Retractions of running requests.")
NUM_PREEMPTIONS = _counter("num_preemptions_total", "Preemptions by requests of higher priority.")
GEN_THROUGHPUT = _gauge("gen_throughput", "Generated tokens per second, over the last ten seconds.")
CACHE_HIT_RATE = _gauge(
    "cache_hit_rate",
    "Hit rate of the prefix cache in prompt tokens, over the last minute.",
    merge=Merge.MEAN,
)
TOKEN_USAGE = _gauge(
    "token_usage",
    "Share of the KV cache used by requests.",
    merge=Merge.MEAN,
    others=(SglangMetric(name="full_token_usage", side=_SCHEDULER),),
)
KV_USED_TOKENS = _gauge(
    "kv_used_tokens",
    "Tokens of KV cache used by requests, in whole pages.",
    others=(SglangMetric(name="num_used_tokens", side=_SCHEDULER),),
)
KV_AVAILABLE_TOKENS = _gauge("kv_available_tokens", "Free tokens of KV cache.")
KV_EVICTABLE_TOKENS = _gauge(
    "kv_evictable_tokens", "Tokens of KV cache held only by the prefix cache."
)
SWA_AVAILABLE_TOKENS = _gauge("swa_available_tokens", "Free tokens of sliding-window KV cache.")
SWA_EVICTABLE_TOKENS = _gauge(
    "swa_evictable_tokens", "Tokens of sliding-window KV cache held only by the prefix cache."
)
SWA_USED_TOKENS = _gauge(
    "swa_used_tokens", "Tokens of sliding-window KV cache used by requests, in whole pages."
)
SWA_TOKEN_USAGE = _gauge(
    "swa_token_usage", "Share of the sliding-window KV cache used by requests.", merge=Merge.MEAN
)
MAMBA_AVAILABLE = _gauge("mamba_available_tokens", "Free recurrent states.")
MAMBA_EVICTABLE = _gauge(
    "mamba_evictable_tokens", "Recurrent states held only by the prefix cache."
)
MAMBA_USED = _gauge("mamba_used_tokens", "Recurrent states used by requests.")
MAMBA_USAGE = _gauge(
    "mamba_usage", "Share of the recurrent states used by requests.", merge=Merge.MEAN
)
EVICTED_TOKENS = _engine_counter(
    "evicted_tokens_total", "Tokens evicted from the prefix cache for running requests."
)
DECODE_SUM_SEQ_LENS = _gauge("decode_sum_seq_lens", "Tokens of the running requests.")
UTILIZATION = _gauge("utilization", "Running requests as a share of the maximum.", merge=Merge.MEAN)
NEW_TOKEN_RATIO = _gauge(
    "new_token_ratio", "Share of max_tokens for which pages are reserved.", merge=Merge.MEAN
)
SPEC_ACCEPT_LENGTH = _gauge(
    "spec_accept_length",
    "Tokens accepted by a request in a verified step, the one after its drafts included.",
    merge=Merge.MEAN,
)
SPEC_ACCEPT_RATE = _gauge(
    "spec_accept_rate", "Share of draft tokens that were accepted.", merge=Merge.MEAN
)
MAX_TOTAL_NUM_TOKENS = _gauge("max_total_num_tokens", "Capacity of the KV cache in tokens.")
MAX_TOTAL_NUM_TOKENS_SWA = _gauge(
    "max_total_num_tokens_swa", "Capacity of the sliding-window KV cache in tokens."
)
NUM_PAGES = _gauge("num_pages", "Pages of the KV cache.")
PAGE_SIZE = _gauge("page_size", "Tokens per page.", merge=Merge.MAX)
CONTEXT_LEN = _gauge("context_len", "Maximum tokens of a request.", merge=Merge.MAX)
WEIGHT_BYTES = _gauge(
    "weight_memory_usage_bytes",
    "Memory of the weights.",
    side=None,
    others=(SglangMetric(name="weight_memory_usage_gb", side=_SCHEDULER, scale=1 / GIB),),
)
KV_CACHE_BYTES = _gauge(
    "kv_cache_memory_usage_bytes",
    "Memory of the KV cache.",
    side=None,
    others=(SglangMetric(name="kv_cache_memory_usage_gb", side=_SCHEDULER, scale=1 / GIB),),
)
REALTIME_TOKENS = _engine_counter(
    "realtime_tokens_total",
    "Prompt tokens computed, prompt tokens found in the prefix cache, and tokens generated.",
    "mode",
)
FORWARD_SECONDS = _engine_counter(
    "forward_execution_seconds_total",
    "Time of forward passes with prefill (extend) and without (decode).",
    "category",
)
STEP_SECONDS = _histogram("step_seconds", "Time of one forward pass with sampling.", _STEP_S)
NUM_GRAMMAR = _engine_counter("num_grammar_total", "Choices with a grammar received by a worker.")
NUM_GRAMMAR_CACHE_HIT = _engine_counter(
    "num_grammar_cache_hit_total", "Choices whose compiled grammar was cached."
)
NUM_GRAMMAR_ABORTED = _engine_counter(
    "num_grammar_aborted_total", "Choices rejected or ended before their grammar was compiled."
)
NUM_GRAMMAR_TIMEOUT = _engine_counter(
    "num_grammar_timeout_total", "Grammars whose compilation timed out."
)
GRAMMAR_COMPILATION = _histogram(
    "grammar_compilation_time_seconds", "Time to compile a grammar.", _COMPILE_S, _SCHEDULER
)
STARTUP_SECONDS = _gauge(
    "startup_time_seconds",
    "Startup time of a worker: loading the model, warmup, and total.",
    "phase",
    merge=Merge.MAX,
)
WEIGHT_LOAD_SECONDS = _gauge(
    "weight_load_duration_seconds",
    "Time to load the model, including its weights.",
    "source",
    merge=Merge.MAX,
)
COMPUTED_TOKENS = _counter("computed_tokens_total", "Tokens computed, including prompt tokens.")
FAILED_STEPS = _counter("failed_steps_total", "Failed forward passes, including retries.")
REFUSED_COMMANDS = _counter(
    "refused_commands_total", "Command batches rejected by a worker, by reason.", "reason"
)
STALLS = _counter("stalls_total", "Stalls of the batching loop.")
OVERRUN_TOKENS = _counter("overrun_tokens_total", "Tokens generated beyond a stop string.")
HELD_REQS = _gauge("held_reqs", "Requests whose token ids are stored for a resend.", side=None)
BATCH_SIZE = _gauge("batch_size", "Requests in the last forward pass.", side=None)
FREE_SLOTS = _gauge("free_slots", "Free slots of the batch.", side=None)
EMBEDDING_FETCH_SECONDS = _histogram(
    "embedding_fetch_seconds", "Time to fetch the embedding of an image from an encoder.", _IMAGE_S
)
PAUSED_WORKERS = _gauge("paused_workers", "Workers whose generation is paused.", side=None)

# The encoder.
ENCODER_SECONDS = _histogram(
    "encoder_request_e2e_latency_seconds",
    "Time to encode an image that is decoded.",
    _IMAGE_S,
    _SCHEDULER,
)
ENCODER_FETCH_SECONDS = _histogram(
    "encoder_fetch_seconds", "Time to fetch an image from its owner.", _IMAGE_S
)
ENCODER_DECODE_SECONDS = _histogram(
    "encoder_decode_seconds", "Time to decode and resize an image.", _IMAGE_S
)
ENCODER_RECEIVED = _engine_counter("encoder_requests_received_total", "Calls to encode an image.")
ENCODER_REQUESTS = _engine_counter("encoder_requests_total", "Calls that returned an embedding.")
ENCODER_FILES = _engine_counter("encoder_cache_total_files_total", "Images looked up in the cache.")
ENCODER_HITS = _engine_counter(
    "encoder_cache_hit_files_total", "Images whose embedding was cached."
)
ENCODER_TOKENS = _engine_counter(
    "encoder_cache_total_tokens_total", "Tokens of the encoded images."
)
ENCODER_HIT_TOKENS = _engine_counter(
    "encoder_cache_hit_tokens_total", "Tokens of the images whose embedding was cached."
)
SAVED_BLOCKS = _counter(
    "saved_blocks_total",
    "Blocks of 64 tokens that were copied to storage, by result: stored, or why not. Of several"
    " ranks each has its own.",
    "result",
)
FETCHED_BLOCKS = _counter(
    "fetched_blocks_total",
    "Blocks of 64 tokens that requests looked for in storage, by result: found or missed.",
    "result",
)
ENCODER_EVICTIONS = _engine_counter(
    "encoder_cache_evictions_total", "Embeddings evicted from the cache."
)
MEDIA_BYTES = _gauge(
    "media_bytes",
    "Size of the media and long prompts of open requests, at their gateway or on their way to it.",
)
ENCODER_ENTRIES = _gauge("encoder_cache_entries", "Embeddings in the cache.")
ENCODER_CACHE_BYTES = _gauge(
    "encoder_cache_bytes",
    "Memory of cached embeddings.",
    side=None,
    others=(SglangMetric(name="encoder_cache_size_mb", side=_SCHEDULER, scale=1 / MB),),
)

# Every process.
PROCESS_CPU = MetricSpec(
    name="component_cpu_seconds_total",
    kind=Kind.COUNTER,
    help="CPU time of a service's processes.",
    labels=("component",),
    sglang=(
        SglangMetric(name="process_cpu_seconds_total", side=_REQUEST, labels=("component",)),
        # SGLang's scheduler process runs the model, as a worker does here.
        SglangMetric(
            name="scheduler_process_cpu_seconds_total",
            side=_SCHEDULER,
            only=("component", "worker"),
        ),
    ),
)
GAPS = _counter("gaps_total", "Gaps detected in message sequences.", "route")
MESSAGES_REFUSED = _counter(
    "messages_refused_total", "Messages dropped, by reason.", "route", "reason"
)
BUS_ERRORS = _counter("bus_errors_total", "Messages that could not be sent, by kind.", "kind")

FAMILIES = {one.name: one for one in tuple(globals().values()) if isinstance(one, MetricSpec)}
"""All metrics by name."""

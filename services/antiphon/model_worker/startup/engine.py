"""Makes an engine that is ready to run: the model, its limits and its page pools."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.worker import Policy, QueueConfig
from antiphon.model_card.audio import read_audio, read_prompt_audio
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_card.served_model import draft_files, model_files, tokenizer_path
from antiphon.model_card.tower_digest import tower_digest
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_card.vocabulary import tokenizer_eos_ids
from antiphon.model_worker.batching.attention_groups import AttentionGroups
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import ForwardThread, InStream, InTurn, StreamRunner
from antiphon.model_worker.batching.state import EngineLimits
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.grammar.backend import GrammarCompiler, no_compiler, open_compiler
from antiphon.model_worker.grammar.executor import ThreadedMatcherExecutor
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.page_shards import PageShard, WorkerShards
from antiphon.model_worker.ranks.processes import RankProcesses, RankStart
from antiphon.model_worker.ranks.protocol import LeadRank, RankedLauncher
from antiphon.model_worker.speculation.ngram import open_drafter
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.model_worker.startup.checksums import content_digest, verify, verify_digest
from antiphon.resolve.device import INTERPRETER, HostDevice, detect_device
from antiphon.resolve.draft import DraftCard, check_draft_tokenizer, naming_draft
from antiphon.resolve.resolved_config import ResolvedConfig, resolve, table
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.service.startup import CannotStart
from antiphon.wire.command import KernelChoice
from antiphon.wire.digests import BLOCK_TOKENS
from antiphon.wire.namespaces import PageOrigin

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import EncoderConfig, Settings
    from antiphon.config.speculation import SpeculationConfig
    from antiphon.model_card.files import ModelFiles, ModelLocation
    from antiphon.model_worker.batching.plan import Launcher, PlanRunner
    from antiphon.model_worker.batching.step_core import StepCore
    from antiphon.model_worker.cache.codec import PageCodec
    from antiphon.model_worker.ranks.groups import RankGroups
    from antiphon.model_worker.runner.graphs import Captured
    from antiphon.model_worker.runner.model_runner import SampleExchange
    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.model_worker.speculation.ngram import NgramDrafter

log = logging.getLogger(__name__)

CAPTURE_LOG_S = 1.0
"""Between log lines while decode steps are captured."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|interpreter")


@dataclass(slots=True)
class Engine:
    """The engine core and the runner of the batching loop."""

    core: EngineCore
    """The engine core; of several attention groups, that of the first one."""
    runner: PlanRunner
    resolved: ResolvedConfig | None = None
    """The resolved configuration; None for an engine that runs no model."""
    open_compiler: Callable[[], GrammarCompiler] = no_compiler
    """Makes the grammar compiler."""
    lead: LeadRank | None = None
    """The runner, if there are other ranks."""
    shards: WorkerShards | None = None
    """Copies blocks of pages on all ranks, if they are stored outside the worker."""
    groups: AttentionGroups | None = None
    """The engine cores of all attention groups, if there are several."""
    kernels: tuple[KernelChoice, ...] = ()
    """The backend of each operation; of several ranks, on the first one."""

    @property
    def step_core(self) -> StepCore[Any]:
        """What the batching loop runs."""
        return self.groups or self.core

    @property
    def speculations(self) -> tuple[Speculation, ...]:
        """What chooses the drafts of each attention group; empty if none are made."""
        cores = (self.core,) if self.groups is None else self.groups.cores
        return tuple(core.speculation for core in cores if core.speculation is not None)

    @property
    def ahead(self) -> int:
        """Steps that are launched before an outcome is read, so that all stages are busy."""
        return self.core.limits.flights - 1

    @property
    def on_gpu(self) -> bool:
        """Whether the host only launches what another device computes."""
        return self.resolved is not None and self.resolved.device.value != "cpu"

    def captured(self, *, padded: bool) -> frozenset[int]:
        """Numbers of rows of decode steps that are replayed."""
        sizes = () if self.resolved is None else self.resolved.graph_sizes.value
        return frozenset(range(1, sizes[-1] + 1) if sizes and padded else sizes)

    @property
    def captured_tokens(self) -> int:
        """The most tokens of a prefill that is replayed."""
        sizes = () if self.resolved is None else self.resolved.prefill_graph_sizes.value
        return max(sizes, default=0)

    def in_turn(self) -> Launcher:
        """A launcher that computes plans when their outcomes are read.

        Of several ranks on devices it computes them at once: the others launch what is announced.
        If rank 0 launched it later, between reading two outcomes, its collectives would meet others
        of theirs.
        """
        if self.on_gpu and self.lead is not None:
            return self.overlapped()
        return self._ranked(InTurn(self.runner))

    def in_thread(self, *, shared: bool = False) -> Launcher:
        """A launcher that computes plans in a thread of its own.

        If shared, its kernels leave one of their threads to the batching loop, whose thread
        computes with them while it waits.
        """
        begin, seat = None, None
        if self.resolved is not None:
            import torch  # noqa: PLC0415 (it takes seconds, see `host_device`)

            from antiphon.kernels.cpu.extension import team_seat  # noqa: PLC0415

            seat = team_seat() if shared else None
            begin = partial(torch.set_num_threads, self.resolved.threads.value - int(shared))
        return self._ranked(ForwardThread(self.runner, begin, seat))

    def overlapped(self) -> Launcher:
        """A launcher that computes plans while the loop makes the next ones."""
        if not self.on_gpu:
            return self.in_thread()
        runner = self.runner if self.lead is None else self.lead.runner
        assert isinstance(runner, StreamRunner), "the runner of a device"
        return self._ranked(InStream(runner))

    def _ranked(self, launcher: Launcher) -> Launcher:
        return launcher if self.lead is None else RankedLauncher(launcher, self.lead)

    @property
    def ngrams(self) -> NgramDrafter | None:
        """The drafter that reads external corpora; None if speculative decoding is disabled."""
        drafter = None if self.core.speculation is None else self.core.speculation.drafter
        return drafter.ngrams if isinstance(drafter, RequestTexts) else None

    @property
    def numerics_digest(self) -> str:
        """Digest of the numerics, if inference is deterministic; else empty."""
        if self.resolved is None or not self.resolved.deterministic.value:
            return ""
        return self.resolved.bits.value


def open_engine(settings: Settings, ranks: RankProcesses | None = None) -> Engine:
    """Load the model and make its page pools. Blocks for seconds.

    Of several `ranks` this is the first one; the others load what it has resolved.
    """
    if settings.cache.hierarchical != (settings.cache.storage != "none"):
        raise CannotStart(
            "cache.hierarchical and cache.storage must be set together: "
            "--enable-hierarchical-cache --hicache-storage-backend kv_storage"
        )
    interpret(settings.model.device)
    try:
        files = model_files(settings)
        verify(files, settings.load, settings.model.path)
        verify_digest(files, settings.cluster.model_digest)
        card = read_card(files)
        eos_ids = {*card.eos_ids, *tokenizer_eos_ids(tokenizer_path(settings))}
        card = msgspec.structs.replace(card, eos_ids=tuple(sorted(eos_ids)))
        pooling = read_pooling(files, card, embedding=settings.model.embedding)
        implementation = _implementation(files, settings.model.implementation)
        draft_place = draft_files(settings)
        draft = None if draft_place is None else _draft_card(draft_place, settings)
        device = host_device(settings.model.device, len(settings.parallel.local_ranks))
        splices = implementation.value != "transformers"
        vision = read_vision(files.folder) if splices else None
        prompts = read_prompt_audio(files.folder) if splices else None
        audio = read_audio(files.folder)
        sees_any = any(each is not None for each in (vision, audio, prompts))
        resolved = resolve(settings, card, device, pooling, implementation, draft, sees=sees_any)
        if settings.cache.hierarchical:
            _check_stored(resolved)
        span_tokens = None if vision is None else vision.span_tokens
        _check_span(span_tokens, resolved)
    except ConfigError as error:
        raise CannotStart(str(error)) from error
    log.info("resolved", extra={"plan": "\n" + table(resolved)})
    if ranks is None:
        model, lead, ranked = load_resolved(files, resolved, draft_place), None, None
    else:
        start = RankStart.of(settings, resolved, device.arithmetic)
        model, lead, ranked = _load_with(ranks, files, start, draft_place)
    decoder = model.decoder
    if span_tokens is not None:
        reason = f"{decoder.reason}; by layer where the tokens of an image attend to each other"
        decoder = msgspec.structs.replace(decoder, reason=reason)
    resolved = msgspec.structs.replace(resolved, decoder=decoder)
    log.info("decoder", extra={"value": resolved.decoder.value, "reason": resolved.decoder.reason})
    resolved = capture(settings, resolved, model)
    pools, vocab_size = CachePools(model.groups), model.spec.vocabulary
    sees = None
    if audio is not None:
        sees = Sees(card.hidden_size, grids=False, span_tokens=None, source=audio.source_tokens)
    if prompts is not None:
        sees = Sees(card.hidden_size, grids=False, span_tokens=None)
    if vision is not None:
        width = vision.row_width(card.hidden_size)
        sees = Sees(width, grids=model.spec.position_axes, span_tokens=span_tokens)
    core = open_engine_core(settings, resolved, pools, vocab_size, model.kv_scales, sees=sees)
    groups = None
    if (count := resolved.attention_groups.value) > 1:
        others = [
            open_engine_core(
                settings,
                resolved,
                CachePools(model.groups),
                vocab_size,
                model.kv_scales,
                core,
                sees=sees,
            )
            for _ in range(1, count)
        ]
        groups = AttentionGroups([core, *others])
    compiler = _compiler(settings, resolved, core.limits)
    shards = None
    if settings.cache.hierarchical:
        shards = _open_shards(model.codec(), lead, ranked)
        places = [files] if draft_place is None else [files, draft_place]
        core.batch.prefixes.identify_weights(
            " ".join(map(content_digest, places)), stored_tower(settings.encoder)
        )
    runner, kernels = lead or model.runner, kernel_choices(model)
    return Engine(core, runner, resolved, compiler, lead, shards, groups, kernels)


def stored_tower(encoder: EncoderConfig) -> str:
    """What stands for the encoders' own model in the names of pages that outlive this process.

    Raises:
        CannotStart: Its files are not here, and no setting has their digest.
    """
    if encoder.model_digest or not encoder.model_path:
        return encoder.model_digest
    try:
        return tower_digest(Path(encoder.model_path).expanduser())
    except ConfigError as error:
        raise CannotStart(
            f"encoder.model_path: {error}; stored pages of prompts with images are named by the "
            "encoder's model: set encoder.model_digest where workers do not have it"
        ) from error


def kernel_choices(model: OpenModel) -> tuple[KernelChoice, ...]:
    """The backend of each operation of a model and of its draft model, as the log lists them."""
    own, draft = model.runner.choices, () if model.draft is None else model.draft.choices
    return tuple(
        KernelChoice(op=each.op, backend=each.backend, refused=dict(each.refused), draft=drafts)
        for choices, drafts in ((own, False), (draft, True))
        for each in choices
    )


def capture(settings: Settings, resolved: ResolvedConfig, model: OpenModel) -> ResolvedConfig:
    """Capture decode steps and prefills on a device, as resolved; says what that has cost.

    All ranks do so at once, since a step sums over them.
    """
    decodes, prefills, runner = resolved.graph_sizes, resolved.prefill_graph_sizes, model.runner
    if not (decodes.value or prefills.value):
        return resolved
    from antiphon.model_worker.runner.device_runner import DeviceRunner  # noqa: PLC0415 (see `host_device`)

    assert isinstance(runner, DeviceRunner), "the CPU has no graphs"
    if decodes.value:
        report, padded = _reporter("capturing decode steps"), settings.batching.graph_padding
        captured = runner.capture(decodes.value, padded=padded, report=report)
        sizes = _captured("graphs of decode steps", decodes.reason, captured)
        resolved = msgspec.structs.replace(resolved, graph_sizes=sizes)
    if prefills.value:
        captured = runner.capture_prefills(prefills.value, _reporter("capturing prefills"))
        sizes = _captured("graphs of prefills", prefills.reason, captured)
        resolved = msgspec.structs.replace(resolved, prefill_graph_sizes=sizes)
    return resolved


def _reporter(event: str) -> Callable[[int, int], None]:
    """Logs how much of a work is done, now and then and at its end."""
    reported_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported_s
        if done == total or time.monotonic() - reported_s > CAPTURE_LOG_S:
            reported_s = time.monotonic()
            log.info(event, extra={"done": done, "total": total})

    return report


def _captured(event: str, reason: str, captured: Captured) -> ResolvedValue[tuple[int, ...]]:
    """Log which sizes were captured, and what that has cost."""
    cost = "the attention of this model is not captured"
    if captured.sizes:
        mib = captured.size_bytes / 2**20
        cost = f"{reason}; captured in {captured.seconds:.1f} s, {mib:.0f} MiB"
    log.info(event, extra={"value": captured.sizes, "reason": cost})
    return ResolvedValue(captured.sizes, cost)


def _check_stored(resolved: ResolvedConfig) -> None:
    """Refuse a model whose blocks cannot be stored outside the worker."""
    if not resolved.prefix.value:
        raise ConfigError(f"cache.storage requires the prefix cache: {resolved.prefix.reason}")
    page_tokens = resolved.page_tokens.value
    if BLOCK_TOKENS % page_tokens:
        raise ConfigError(
            f"cache.storage: cluster.page_tokens = {page_tokens} must divide {BLOCK_TOKENS}"
        )


def _open_shards(
    codec: PageCodec, lead: LeadRank | None, groups: RankGroups | None
) -> WorkerShards:
    """The shards of all ranks, which have loaded, and open their links at once."""
    if lead is None or groups is None:
        return WorkerShards(PageShard(codec, RankLayout().shard(0)))
    own, *others = map(groups.layout.shard, range(groups.layout.ranks))
    shard = PageShard(codec, own)
    return WorkerShards(shard, others, groups.open_pages(), lead.request_pages)


def _load_with(
    ranks: RankProcesses, files: ModelLocation, start: RankStart, draft: ModelLocation | None
) -> tuple[OpenModel, LeadRank, RankGroups]:
    """Load the first rank's shard while the others load theirs."""
    groups, lead = ranks.meet(start.resolved.device.value)
    ranks.load(start)
    model = load_resolved(files, start.resolved, draft, ranks=groups, exchange=lead)
    lead.use(model.runner)
    ranks.loaded()
    return model, lead, groups


def _compiler(
    settings: Settings, resolved: ResolvedConfig, limits: EngineLimits
) -> Callable[[], GrammarCompiler]:
    if resolved.grammar.value == "none":
        return partial(no_compiler, resolved.grammar.reason)
    tokenizer = tokenizer_path(settings)
    return partial(open_compiler, tokenizer, limits.vocab_size, limits.end_ids, settings.grammar)


def interpret(device: str) -> None:
    """Prepare this process for its device. Before anything imports Triton, as transformers does."""
    if device == INTERPRETER:
        from antiphon.kernels.triton.interpreter import enable  # noqa: PLC0415 (it imports Triton)

        enable()


def host_device(name: str = "cpu", ranks: int = 1) -> HostDevice:
    """The device of that name in this machine, or the first of several `ranks`, and its numerics.

    Raises:
        CannotStart: There is none, or there are fewer GPUs than ranks.
    """
    # torch takes seconds to import; meanwhile the process reports that it is starting.
    from antiphon.kernels.cpu.extension import numerics_info, unavailable_reason  # noqa: PLC0415

    host = detect_device()
    if _DEVICE.fullmatch(name) is None:
        raise CannotStart(f"model.device = {name}: must be auto, cpu, cuda, or cuda:N")
    if name in ("auto", "cpu"):
        return msgspec.structs.replace(
            host, lacking=unavailable_reason(), arithmetic=numerics_info()
        )
    from antiphon.model_worker.startup.gpu import (  # noqa: PLC0415 (it imports torch)
        find_gpu,
        gpu_numerics,
        lacking_fp8,
        lacking_int8,
    )

    memory_bytes = host.memory_bytes if name == INTERPRETER else find_gpu(name, ranks)
    return msgspec.structs.replace(
        host,
        kind=name.partition(":")[0],
        memory_bytes=memory_bytes,
        lacking=f"model.device is {name}",
        arithmetic=gpu_numerics(name),
        lacking_fp8=lacking_fp8(name),
        lacking_int8=lacking_int8(name),
    )


def _implementation(files: ModelFiles, configured: str) -> ResolvedValue[str]:
    from antiphon.model_worker.model.errors import ModelLoadError  # noqa: PLC0415 (see `host_device`)
    from antiphon.model_worker.model.transformers_backend.support import implementation_of  # noqa: PLC0415

    try:
        return implementation_of(files, configured)
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error


def _draft_card(files: ModelFiles, settings: Settings) -> DraftCard:
    with naming_draft(settings.speculation.draft_model):
        card = DraftCard(read_card(files), _implementation(files, "auto"))
    check_draft_tokenizer(settings)
    return card


def load_resolved(
    place: ModelLocation,
    resolved: ResolvedConfig,
    draft: ModelLocation | None = None,
    *,
    ranks: RankGroups | None = None,
    exchange: SampleExchange | None = None,
) -> OpenModel:
    """Load a model and its draft model by the resolved configuration. Blocks for seconds.

    One of several `ranks` gets its tokens by an `exchange`, and has a device of its own.
    """
    import torch  # noqa: PLC0415 (it takes seconds, see `host_device`)

    from antiphon.kernels.op import KernelUnavailable  # noqa: PLC0415
    from antiphon.model_worker.model.errors import ModelLoadError  # noqa: PLC0415
    from antiphon.model_worker.runner.opening import open_model  # noqa: PLC0415

    torch.set_num_threads(resolved.threads.value)
    try:
        if ranks is None:
            return open_model(place, resolved, draft=draft)
        own = msgspec.structs.replace(resolved.device, value=ranks.device)
        return open_model(
            place,
            msgspec.structs.replace(resolved, device=own),
            draft=draft,
            tp=ranks.tensor,
            pp=ranks.pipeline,
            attention=ranks.attention,
            exchange=exchange,
        )
    except (ModelLoadError, KernelUnavailable) as error:
        raise CannotStart(str(error)) from error


class Sees(NamedTuple):
    """What the engine knows of a model that takes media: see `EngineLimits`."""

    width: int
    grids: bool
    span_tokens: int | None
    source: int | None = None
    """Tokens of a medium that is attended to beside the prompt."""


def _check_span(span_tokens: int | None, resolved: ResolvedConfig) -> None:
    """Check that an image whose tokens attend to each other fits into a prefill chunk."""
    if span_tokens is None or resolved.whole_prompts.value:
        return
    step = resolved.step_tokens.value // resolved.attention_groups.value
    if (chunk := min(resolved.chunk_tokens.value, step)) < span_tokens:
        raise ConfigError(
            f"a prefill chunk has at most {chunk} tokens, and an image {span_tokens}, which attend "
            "to each other in one pass: raise batching.chunk_tokens (--chunked-prefill-size) and "
            "batching.tokens_max"
        )


def open_engine_core(
    settings: Settings,
    resolved: ResolvedConfig,
    pools: CachePools,
    vocab_size: int,
    kv_scales: str = "",
    first: EngineCore | None = None,
    *,
    sees: Sees | None = None,
) -> EngineCore:
    """Make an engine core without requests; `kv_scales` is a digest of the cache's scales.

    The attention groups after the `first` one have its drafter and its log of cached blocks. `sees`
    is what there is of a model that takes media.
    """
    cache = settings.cache
    tracker = BlockTracker() if cache.events else None
    if first is not None:
        tracker = first.index.tracker
    index = (
        RadixIndex(pools, STRATEGIES[cache.eviction], tracker) if resolved.prefix.value else None
    )
    return EngineCore(
        _limits(settings, resolved, pools, vocab_size, sees),
        pools,
        index=index,
        rules=_rules(settings.queue),
        origin=PageOrigin(
            model_digest=settings.cluster.model_digest,
            cluster_salt=settings.cluster.hash_salt,
            tower=settings.encoder.model_digest or settings.encoder.model_path,
            weight_version=settings.model.weight_version,
            config_overrides=settings.load.config_overrides,
            dtype=resolved.cache_dtype.value,
            quantization=resolved.linear.value,
            arithmetic=resolved.bits.value,
            kv_scales=kv_scales,
            layout=f"{_layout(resolved)}, {pools.page_tokens} tokens",  # antiphon/kernels/kv.py
        ),
        matcher_executor=ThreadedMatcherExecutor(),
        speculation=_speculation(settings, resolved, first),
    )


def _layout(resolved: ResolvedConfig) -> str:
    return "words, values beside keys" if resolved.device.value == "cpu" else "rows"


def _speculation(
    settings: Settings, resolved: ResolvedConfig, first: EngineCore | None
) -> Speculation | None:
    config = settings.speculation
    if config.algorithm == "none":
        return None
    if first is not None and first.speculation is not None:
        drafter = first.speculation.drafter
    else:
        ngrams = open_drafter(config)
        drafter = None if ngrams is None else RequestTexts(ngrams)  # else a draft model
    return Speculation(drafter, drafts_max(config), resolved.running_max.value)


def drafts_max(config: SpeculationConfig) -> int:
    """Maximum number of draft tokens of a request in one step."""
    if config.draft_model and config.draft_steps is not None:
        return config.draft_steps
    return config.verify_tokens - 1


def _limits(
    settings: Settings,
    resolved: ResolvedConfig,
    pools: CachePools,
    vocab_size: int,
    sees: Sees | None,
) -> EngineLimits:
    batching, queue, pooling = settings.batching, settings.queue, resolved.pooling.value
    groups = resolved.attention_groups.value  # a step is shared by all
    running_max = max(1, resolved.running_max.value // groups)
    step_tokens = max(running_max, resolved.step_tokens.value // groups)
    chunk_tokens = min(resolved.chunk_tokens.value, step_tokens)
    return EngineLimits(
        step_tokens_max=step_tokens,
        chunk_tokens=None if resolved.whole_prompts.value else chunk_tokens,
        fill_tokens=min(resolved.fill_tokens.value, step_tokens),
        prefill_max=batching.prefill_max,
        mixed=resolved.mixed.value,
        running_max=running_max,
        queue_max=-(-queue.waiting_max // groups),
        context_tokens=min(resolved.context_tokens.value, pools.tokens_max),
        vocab_size=vocab_size,
        end_ids=frozenset(resolved.eos_ids.value),
        weights_digest=settings.cluster.model_digest,
        weight_version=settings.model.weight_version,
        stream_interval=batching.stream_interval,
        hidden_states=batching.hidden_states,
        pool_width=None if pooling is None else pooling.card.width,
        media_width=None if sees is None else sees.width,
        media_grids=sees is not None and sees.grids,
        span_tokens=None if sees is None else sees.span_tokens,
        source_shape=None if sees is None or sees.source is None else (sees.source, sees.width),
        flights=resolved.stages.value,
        queue_timeout_s=queue.timeout_s,
        running_timeout_s=batching.running_timeout_s,
        checkpoint_tokens=settings.cache.checkpoint_tokens,
        follow_timeout_s=settings.grammar.follow_timeout_s,
        conservativeness=batching.conservativeness,
    )


def _rules(queue: QueueConfig) -> QueueRules:
    return QueueRules(
        # The policy `priority` orders by arrival within one priority.
        policy=Policy.FCFS if queue.policy is Policy.PRIORITY else queue.policy,
        priority=queue.by_priority,
        low_first=queue.low_first,
        preempt_threshold=queue.preempt_threshold,
        refuse_priority=queue.refuse_priority,
        max_overtake_s=queue.max_overtake_s,
    )

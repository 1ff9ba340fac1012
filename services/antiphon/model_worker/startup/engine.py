"""Makes an engine that is ready to run: the model, its limits and its page pools."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.audio import read_audio, read_prompt_audio
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_card.served_model import draft_files, model_files, tokenizer_path
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_card.vocabulary import tokenizer_eos_ids
from antiphon.model_worker.batching.attention_groups import AttentionGroups
from antiphon.model_worker.batching.flights import ForwardThread, InStream, InTurn, StreamRunner
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.grammar.backend import GrammarCompiler, no_compiler, open_compiler
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.page_shards import PageShard, WorkerShards
from antiphon.model_worker.ranks.processes import RankProcesses, RankStart
from antiphon.model_worker.ranks.protocol import LeadRank, RankedLauncher
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.model_worker.startup.checksums import content_digest, verify, verify_digest
from antiphon.model_worker.startup.core import Sees, open_engine_core
from antiphon.model_worker.startup.host_device import host_device, interpret
from antiphon.model_worker.startup.loading import capture, kernel_choices, load_resolved
from antiphon.resolve.device import INTERPRETER
from antiphon.resolve.draft import DraftCard, check_draft_tokenizer, naming_draft
from antiphon.resolve.resolved_config import ResolvedConfig, resolve, table
from antiphon.service.startup import CannotStart
from antiphon.wire.digests import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import Settings
    from antiphon.model_card.files import ModelFiles, ModelLocation
    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.batching.plan import Launcher, PlanRunner
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.batching.step_core import StepCore
    from antiphon.model_worker.cache.codec import PageCodec
    from antiphon.model_worker.ranks.groups import RankGroups
    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.model_worker.speculation.ngram import NgramDrafter
    from antiphon.model_worker.speculation.policy import Speculation
    from antiphon.resolve.resolved_value import ResolvedValue
    from antiphon.wire.command import KernelChoice

log = logging.getLogger(__name__)


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
    prepare: Callable[[], bool] = lambda: False
    """Does a piece of work ahead of later steps, if there is any: see `Prefault`."""

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

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted: how long a step takes says nothing of others."""
        return self.resolved is not None and self.resolved.device.value == INTERPRETER

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
        of theirs. With a draft model all of them run a plan after the drafts of the one before.
        """
        drafts = self.resolved is not None and self.resolved.draft.value is not None
        if self.on_gpu and self.lead is not None and not drafts:
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
    sees = None
    if audio is not None:
        sees = Sees(
            card.hidden_size, source=audio.source_tokens, source_heads=model.spec.cross_heads
        )
    if prompts is not None:
        sees = Sees(card.hidden_size)
    if vision is not None:
        width = vision.row_width(card.hidden_size)
        sees = Sees(width, model.spec.position_axes, span_tokens)

    def open_core(first: EngineCore | None = None) -> EngineCore:
        pools, vocabulary = CachePools(model.groups), model.spec.vocabulary
        scales = model.kv_scales
        return open_engine_core(settings, resolved, pools, vocabulary, scales, first, sees=sees)

    core, groups = open_core(), None
    if (count := resolved.attention_groups.value) > 1:
        groups = AttentionGroups([core, *(open_core(core) for _ in range(1, count))])
    compiler = _compiler(settings, resolved, core.limits)
    shards = None
    if settings.cache.hierarchical:
        shards = _open_shards(model.codec(), lead, ranked)
        places = [files] if draft_place is None else [files, draft_place]
        core.batch.prefixes.identify_weights(" ".join(map(content_digest, places)))
    runner, kernels = lead or model.runner, kernel_choices(model)
    prepare = model.runner.prefault(core.pools).touch
    return Engine(core, runner, resolved, compiler, lead, shards, groups, kernels, prepare)


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

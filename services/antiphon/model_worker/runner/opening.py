"""Opens a model: loads it, checks what it asks of the kernels, and makes its runner."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.op import REFERENCE, BackendChoice, KernelUnavailable, table
from antiphon.kernels.stream import open_stream
from antiphon.model_card.files import ModelLocation, files_at
from antiphon.model_worker.cache.codec import PageCodec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.load import LoadedModel, load, scales_digest
from antiphon.model_worker.runner.context import BY_LAYER, STACK
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.device_stage_runner import DeviceStageRunner
from antiphon.model_worker.runner.draft_model import DraftHeadModel, DraftModel
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pooling import Pooler
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.model_worker.runner.stage_runner import StageRunner
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from antiphon.layers.weights import Pp, Tp
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.spec import ModelSpec
    from antiphon.model_worker.runner.model_runner import SampleExchange
    from antiphon.resolve.resolved_config import ResolvedConfig

log = logging.getLogger(__name__)

READER = "attention.paged"
"""The operation that reads the cache for every token."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A loaded model, ready to run plans whose page tables are in the order of `groups`.

    Attributes:
        groups: Those of the model, and last that of its draft model.
        kv_scales: Digest of the scales of an 8-bit KV cache; empty without scales.
    """

    runner: ModelRunner
    groups: tuple[CacheGroup, ...]
    spec: ModelSpec
    kv_scales: str = ""
    draft: DraftModel | None = None

    @property
    def decoder(self) -> ResolvedValue[str]:
        """Whether a step is one call of the kernels, and if not, why."""
        choice = next(each for each in self.runner.choices if each.op == STACK)
        if choice.backend != BY_LAYER:
            return ResolvedValue("fused", "all layers in one call of the kernels")
        return ResolvedValue(BY_LAYER, "; ".join(reason for _, reason in choice.refused))

    def codec(self) -> PageCodec:
        """Copies the blocks of all groups to bytes, and back."""
        return PageCodec(self.groups, self.runner.page_memories())


def open_model(
    place: ModelLocation,
    plan: ResolvedConfig,
    *,
    draft: ModelLocation | None = None,
    tp: Tp | None = None,
    pp: Pp | None = None,
    attention: Tp | None = None,
    exchange: SampleExchange | None = None,
) -> OpenModel:
    """Load a model as planned and allocate the pages and states of its cache groups.

    `draft` is the location of its draft model, which the plan must have. One of several ranks has a
    `tp` and a `pp`, those that attend to the same requests in `attention`, and gets its tokens by
    an `exchange`.

    Raises:
        ModelLoadError: The folder cannot be served; raised before anything runs.
        KernelUnavailable: This build does not support the device, deterministic mode or an 8-bit
            KV cache there.
    """
    # First, since it loads faster: what is wrong with it is found before the wait for the model.
    drafter = None if draft is None else load_draft_model(draft, plan, tp)
    model = load(place, plan, tp=tp, pp=pp, attention=attention)
    groups = cache_groups(
        model.spec,
        model.build,
        page_tokens=plan.page_tokens.value,
        pages=plan.cache_pages.value,
        states=plan.cache_states.value,
    )
    drafting = None
    if drafter is not None:
        drafting = open_draft_model(drafter, model, plan)
        groups = (*groups, drafting.group)
    pooling = plan.pooling.value
    pooler = None if pooling is None else Pooler.open(pooling, files_at(place).folder, model)
    deterministic = plan.deterministic.value
    if model.build.device_kind != "cpu":
        slots, positions = plan.running_max.value, plan.context_tokens.value
        stream = open_stream(model.build.device_kind, model.build.device)
        kind = DeviceRunner if model.build.is_last_stage else DeviceStageRunner
        runner = kind(
            model,
            groups,
            stream,
            forced=plan.forced,
            pooler=pooler,
            draft=drafting,
            slots=slots,
            positions=positions,
            deterministic=deterministic,
            exchange=exchange,
        )
    elif model.build.is_last_stage:
        runner = ModelRunner(
            model,
            groups,
            forced=plan.forced,
            pooler=pooler,
            deterministic=deterministic,
            draft=drafting,
            exchange=exchange,
            slots=plan.running_max.value,
        )
    else:
        assert exchange is not None, "an earlier stage samples nothing"
        runner = StageRunner(
            model, groups, exchange, forced=plan.forced, deterministic=deterministic
        )
    require_native_reads(model, runner.choices)
    log.info("kernels", extra={"table": "\n" + table(runner.choices)})
    return OpenModel(runner, groups, model.spec, scales_digest(model.kv_scales), drafting)


@contextmanager
def _naming_draft(plan: ResolvedConfig) -> Generator[None]:
    """Errors of a draft model do not say of which model they are, nor whose settings."""
    own = plan.draft.value
    assert own is not None, "a plan without a draft model"
    try:
        yield
    except (ModelLoadError, KernelUnavailable) as error:
        raise type(error)(f"speculation.draft_model = {own.model.value}: {error}") from error


def load_draft_model(
    place: ModelLocation, plan: ResolvedConfig, tp: Tp | None = None
) -> LoadedModel:
    """Load the draft model as planned, of several ranks this one's shard.

    Raises:
        ModelLoadError: It cannot be loaded.
        KernelUnavailable: This build does not support the device.
    """
    with _naming_draft(plan):
        return load(place, plan.of_draft(), tp=tp)


def open_draft_model(model: LoadedModel, served: LoadedModel, plan: ResolvedConfig) -> DraftModel:
    """Allocate the pages of a draft model, as many as the served model's.

    Raises:
        ModelLoadError: It cannot draft for this model.
        KernelUnavailable: This build does not support an 8-bit KV cache on the device.
    """
    page_tokens, pages = plan.page_tokens.value, plan.cache_pages.value
    with _naming_draft(plan):
        if model.spec.draft_head is None:
            draft = DraftModel(model, page_tokens=page_tokens, pages=pages)
        else:
            draft = DraftHeadModel(model, served, page_tokens=page_tokens, pages=pages)
        require_native_reads(model, draft.choices)
    log.info("kernels of the draft model", extra={"table": "\n" + table(draft.choices)})
    return draft


def require_native_reads(model: LoadedModel, choices: Iterable[BackendChoice[..., object]]) -> None:
    """8-bit KV cache: check that no operation of the model reads it through torch."""
    if model.build.cache_dtype is None:
        return
    for choice in choices:
        reads = choice.op == READER and choice.op in model.decoder.operations
        if reads and choice.backend == REFERENCE:
            raise KernelUnavailable(
                f"fp8 KV cache: {choice.op}, which this model needs, runs on torch, which converts "
                "fp8 ten times slower than attention reads it"
            )

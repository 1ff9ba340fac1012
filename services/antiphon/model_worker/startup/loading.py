"""Loads what was resolved: the model of a rank, and its captured graphs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.service.startup import CannotStart
from antiphon.wire.command import KernelChoice

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import Settings
    from antiphon.model_card.files import ModelLocation
    from antiphon.model_worker.ranks.groups import RankGroups
    from antiphon.model_worker.runner.graphs import Captured
    from antiphon.model_worker.runner.model_runner import SampleExchange
    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.resolve.resolved_config import ResolvedConfig

log = logging.getLogger(__name__)

CAPTURE_LOG_S = 1.0
"""Between log lines while decode steps are captured."""


def load_resolved(
    place: ModelLocation,
    resolved: ResolvedConfig,
    draft: ModelLocation | None = None,
    *,
    ranks: RankGroups | None = None,
    exchange: SampleExchange | None = None,
) -> OpenModel:
    """Load a model and its draft model by the resolved configuration. Blocks for seconds.

    One of several `ranks` gets its tokens by an `exchange`, and has a device of its own. They sum
    in their order if inference is deterministic.
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
        tensor, attention = ranks.tensor_groups(invariant=resolved.deterministic.value)
        return open_model(
            place,
            msgspec.structs.replace(resolved, device=own),
            draft=draft,
            tp=tensor,
            pp=ranks.pipeline,
            attention=attention,
            exchange=exchange,
        )
    except (ModelLoadError, KernelUnavailable) as error:
        raise CannotStart(str(error)) from error


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

"""The warm-up of a worker, before it accepts requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.service.sockets import CannotStart
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import BatchingLoop, StepReport


def warm_up(loop: BatchingLoop, *, pools: bool = False) -> StepReport:
    """Run a prefill and a decode step before the first request: the first of each kind is slow.

    A model that `pools` has prefill steps only.

    Raises:
        CannotStart: The model does not run.
    """
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    if pools:
        sampling = SamplingParams(max_new_tokens=0, pool=PoolParams())
    state = RequestState(
        request_id=RequestId("warm-up"),
        choice=0,
        prompt_ids=pack_ids([0, 0]),
        sampling=sampling,
        deadline_unix_ms=0,
    )
    # `WorkerOutput` counts its keys from 1.
    mail = Mail(runs=((ChoiceKey(0), state),))
    while True:
        report = loop.turn(mail)
        for news in report.progress:
            if news.finish is not None and news.finish.error is not None:
                raise CannotStart(f"warmup failed: {news.finish.error.message}")
            if news.finish is not None:
                return msgspec.structs.replace(report, progress=())
        mail = Mail()

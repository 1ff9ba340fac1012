"""The first steps of a worker, before anybody waits for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.request import ChoiceKey, RequestState
from antiphon.service.sockets import CannotStart
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import BatchingLoop, StepReport


def warm_up(loop: BatchingLoop, *, pools: bool = False) -> StepReport:
    """Run two steps before anybody waits for one: the first of each kind takes its time.

    A model that `pools` has one kind of step only.

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
    # The output machine counts its keys from 1.
    mail = Mail(runs=((ChoiceKey(0), state),))
    while True:
        report = loop.turn(mail)
        for news in report.progress:
            if news.finish is not None and news.finish.error is not None:
                raise CannotStart(f"warmup failed: {news.finish.error.message}")
            if news.finish is not None:
                return msgspec.structs.replace(report, progress=())
        mail = Mail()

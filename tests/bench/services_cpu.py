"""CPU use of the other services beside a worker that sends 600 tokens/s to 16 clients.

Expected before measuring: 37.5 steps/s. A step is a batch through the detokenizer (0.3 ms with 16
rows) and one through the gateway, which writes 16 events (16 x 40 us): a millisecond a step, so 4 %
of a core, and 1 % for heartbeats and open lists. The target is at most 10 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.bench.crowd.listeners import Listeners

if TYPE_CHECKING:
    from tests.bench.services import EchoStack

RUNNING, TOKENS_PER_S = 16, 600
STEP_S = RUNNING / TOKENS_PER_S
LISTENERS = Listeners(RUNNING, answer_tokens=100, settle_s=3.0, window_s=10.0)


class ServicesCpu(msgspec.Struct, frozen=True):
    """Shares of one core, in percent, at a measured rate."""

    tokens_per_s: float
    services_percent: dict[str, float]

    @property
    def total_percent(self) -> float:
        return sum(self.services_percent.values())


def measure(stack: EchoStack) -> ServicesCpu:
    """Keep 16 streams open, and read what each process but the worker uses of a core."""
    pids = {name: pid for name, pid in stack.pids.items() if name != "worker-0"}
    heard, used = LISTENERS.measure(stack, pids)
    shares = {name: round(100 * each / heard.seconds, 2) for name, each in used.items()}
    result = ServicesCpu(round(heard.events / heard.seconds, 1), shares)
    assert result.tokens_per_s > 0.8 * TOKENS_PER_S, f"the stream is too slow: {result}"
    return result

"""Token streams that only have one token more after a step, which is most of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.state import WIRE_IDS
from antiphon.wire.tokens import TokenColumns

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Longs
    from antiphon.model_worker.batching.state import SampledTokens
    from antiphon.model_worker.protocol.held_request import HeldChoice
    from antiphon.wire.ids import InstanceId


class PlainStreams:
    """Live choices of which everything was sent, by slot: their next tokens go into columns.

    So a step is sent by a few operations on arrays, whatever the number of its rows. How long the
    outputs of a choice are is known only here, until its stream is closed.

    Axes: S slots.
    """

    def __init__(self, slots_max: int) -> None:
        self._choices: dict[int, HeldChoice] = {}
        self._keys: Longs = np.zeros(slots_max, np.int64)  # (S,) 0: no plain stream
        self._lengths = np.zeros(slots_max, np.int32)  # (S,)
        self._has_logprobs = np.zeros(slots_max, np.bool_)  # (S,)
        self._channels = np.zeros(slots_max, np.int32)  # (S,) index of the detokenizer
        self._detokenizers: list[InstanceId] = []

    def open(self, choice: HeldChoice, detokenizer: InstanceId) -> None:
        """Begin with a choice of which everything was sent."""
        slot = choice.slot
        if (previous := self._choices.get(slot)) is not None:
            self.close(previous)  # it was retracted: the next progress names another slot
        if detokenizer not in self._detokenizers:
            self._detokenizers.append(detokenizer)
        self._choices[slot] = choice
        self._keys[slot] = choice.key
        self._lengths[slot] = choice.length
        self._has_logprobs[slot] = choice.has_logprobs
        self._channels[slot] = self._detokenizers.index(detokenizer)

    def close(self, choice: HeldChoice) -> None:
        """End a plain stream, before anything but the next token happens to its choice."""
        slot = choice.slot
        if self._choices.get(slot) is choice:
            del self._choices[slot]
            self._keys[slot] = 0
            choice.mark_sent(self._lengths.item(slot))

    def close_all(self) -> None:
        for choice in list(self._choices.values()):
            self.close(choice)

    def settle(self) -> None:
        """Write the lengths to the choices."""
        for slot, choice in self._choices.items():
            choice.mark_sent(self._lengths.item(slot))

    def take(
        self, sampled: SampledTokens
    ) -> tuple[dict[InstanceId, TokenColumns], SampledTokens | None]:
        """The columns for each detokenizer; and the tokens of those that are not plain, if any."""
        plain, others = self._keys.take(sampled.slots) == sampled.keys, None
        if np.count_nonzero(plain) < len(plain):
            others, sampled = sampled.take(~plain), sampled.take(plain)
            if not len(sampled):
                return {}, others
        self._lengths[sampled.slots] = sampled.offsets + 1
        if len(self._detokenizers) == 1:
            return {self._detokenizers[0]: self._columns(sampled)}, others
        channels = self._channels.take(sampled.slots)
        return {
            self._detokenizers[channel]: self._columns(sampled.take(channels == channel))
            for channel in set(channels.tolist())
        }, others

    def _columns(self, sampled: SampledTokens) -> TokenColumns:
        logprobs = sampled.logprobs
        if logprobs is not None and not (has := self._has_logprobs.take(sampled.slots)).all():
            sampled = sampled.take(np.argsort(~has, kind="stable"))
            logprobs = logprobs[has]
        return TokenColumns(
            streams=sampled.keys.astype("<i8", copy=False).tobytes(),
            offsets=sampled.offsets.astype(WIRE_IDS, copy=False).tobytes(),
            token_ids=sampled.ids.astype(WIRE_IDS, copy=False).tobytes(),
            logprobs=b"" if logprobs is None else logprobs.astype("<f4", copy=False).tobytes(),
        )

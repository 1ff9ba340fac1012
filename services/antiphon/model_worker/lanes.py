"""The ways that the tokens of steady steps take: one a detokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.state import WIRE_IDS, ChoiceKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from antiphon.model_worker.batching.steady import Drawn

    from antiphon.model_worker.protocol.held_request import HeldChoice, HeldRequest
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.tokens import TokenRow


LANE_ROWS_MAX = 256
"""Rows that surely fit into one batch, for their ids are as short as the rest of them."""


class Lane:
    """Choices of steady rows that one detokenizer hears of, and was sent all of.

    A step's ids pass through here as they were drawn. To go through all choices for them took most
    of what sending a step took, so they are written there by `settle`, for whoever looks at these.
    """

    __slots__ = ("_choices", "_indexes", "_passed", "detokenizer")

    def __init__(
        self,
        detokenizer: InstanceId,
        choices: Sequence[HeldChoice],
        indexes: Sequence[int] | None,
    ) -> None:
        """`indexes` tells which rows these are, if they are not all of them."""
        self.detokenizer = detokenizer
        self._choices = choices
        self._indexes = None if indexes is None else np.array(indexes, np.intp)
        self._passed: list[bytes] = []

    def __len__(self) -> int:
        return len(self._choices)

    def take(self, drawn: Drawn) -> bytes:
        """Take what a step drew for these, as sent."""
        ids = drawn.token_ids
        if self._indexes is not None:
            ids = np.frombuffer(ids, WIRE_IDS)[self._indexes].tobytes()
        self._passed.append(ids)
        return ids

    def rows(self) -> list[TokenRow]:
        """The rows of the step that was taken last."""
        self.settle()
        return [choice.last_row() for choice in self._choices]

    def settle(self) -> None:
        """Write to the choices what has passed."""
        if self._passed:
            columns = np.frombuffer(b"".join(self._passed), WIRE_IDS).reshape(-1, len(self))
            self._passed.clear()
            for choice, ids in zip(self._choices, columns.T, strict=True):
                choice.go_on(ids.tobytes())


class Lanes:
    """All lanes of the same steady rows.

    Attributes:
        keys: Of the rows, the same object in each step.
        each: The lanes.
    """

    __slots__ = ("each", "keys")

    def __init__(self, keys: tuple[ChoiceKey, ...], each: Sequence[Lane]) -> None:
        self.keys = keys
        self.each = each

    @classmethod
    def of(
        cls,
        keys: tuple[ChoiceKey, ...],
        choices: Mapping[ChoiceKey, tuple[HeldRequest, HeldChoice]],
    ) -> Lanes | None:
        """Find them.

        None if more of a choice is to be sent than what comes next, if there are too many for one
        detokenizer, or if it does not read steps.

        Args:
            keys: Of the rows.
            choices: Those that are live. Who has ended is drawn for in vain.
        """
        places: dict[InstanceId, list[tuple[int, HeldChoice]]] = {}
        for index, key in enumerate(keys):
            if key in choices:
                held, choice = choices[key]
                if not (held.steps and choice.even):
                    return None
                places.setdefault(held.detokenizer, []).append((index, choice))
        if any(len(lane) > LANE_ROWS_MAX for lane in places.values()):
            return None
        return cls(keys, [_lane(to, lane, len(keys)) for to, lane in places.items()])

    def settle(self) -> None:
        """Write to all choices what has passed."""
        for lane in self.each:
            lane.settle()


def _lane(detokenizer: InstanceId, places: Iterable[tuple[int, HeldChoice]], rows: int) -> Lane:
    indexes, choices = zip(*places, strict=True)
    return Lane(detokenizer, choices, None if len(indexes) == rows else indexes)

"""What a step does to the requests of its rows, once it is known what they drew."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.late import LateRow
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.batching.pooling import Vector
from antiphon.model_worker.batching.request import Finish
from antiphon.model_worker.batching.telling import Told
from antiphon.model_worker.batching.walking import Walk
from antiphon.wire.errors import Internal, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.model_worker.batching.builder import Row
    from antiphon.model_worker.batching.holdings import Holdings
    from antiphon.model_worker.batching.late import LateRows
    from antiphon.model_worker.batching.plan import Outcome
    from antiphon.model_worker.batching.request import Request
    from antiphon.wire.errors import EngineError


class Commits:
    """Writes outcomes to requests: tokens, pages, what others find of them, and their end."""

    def __init__(
        self,
        holdings: Holdings,
        late: LateRows,
        *,
        tell: Callable[[Request], None],
        end: Callable[[Request, Finish | None], None],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        """Make it.

        Args:
            holdings: Of the running requests.
            late: Rows whose guides have not arrived yet.
            tell: Reports what is new of a request, if that is worth a word yet.
            end: Frees a request, which ends by itself or with this.
            fail: Ends a request whose commit failed, and may be half done.
        """
        self._holdings = holdings
        self._late = late
        self._tell = tell
        self._end = end
        self._fail = fail

    def commit(self, rows: Sequence[Row], outcome: Outcome) -> None:
        """Apply what a plan produced. Rows whose requests went other ways are passed over."""
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        token_ids = outcome.token_ids.tolist()
        drawn = [token_ids[start:end] for start, end in pairwise(starts)]
        walks = self._walk(rows, drawn) if self._holdings.slots.steering.guided else _NO_WALKS
        tells = outcome.details is not None or outcome.vectors is not None
        for index, row in enumerate(rows):
            if not row.current:
                continue
            try:
                if status[index]:
                    self._end(row.request, Finish.failed(_failure(status[index])))
                    continue
                told = _told(outcome, index) if tells else None
                walk = walks.get(index)
                if walk is None:
                    self._commit_row(row, drawn[index], told)
                elif walk.done:
                    self._commit_row(row, drawn[index], told, walk.ends())
                else:
                    self._put_late(LateRow(row, drawn[index], told, walk))
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(row.request, error)

    def commit_late(self) -> None:
        """Commit the rows whose guides have arrived, as if their step had just ended."""
        for late in self._late.take_done():
            try:
                if late.row.current:
                    self._commit_row(late.row, late.accepted, late.told, late.walk.ends())
                elif late.row.request.guide is not None:  # it was retracted, and draws them again
                    late.row.request.guide.take_back()
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(late.row.request, error)

    def _walk(self, rows: Sequence[Row], drawn: Sequence[list[int]]) -> dict[int, Walk]:
        """Send guides over what their rows have drawn; which walk is a row's, by its index."""
        walks = {
            index: Walk(row.request.guide, drawn[index])
            for index, row in enumerate(rows)
            if row.request.guide is not None and drawn[index] and row.current
        }
        self._late.walk(list(walks.values()))
        return walks

    def _put_late(self, late: LateRow) -> None:
        self._late.put(late)
        request, table = late.row.request, late.row.request.table
        assert table is not None, "a running request has no pages"
        table.commit(late.row.end)
        request.computed = late.row.end
        if request.prefilling:  # whoever waits for its prompt need not wait for its grammar
            self._holdings.share(request)
            self._holdings.sharing.retire(request)

    def _commit_row(
        self,
        row: Row,
        accepted: list[int],
        told: Told | Vector | None,
        ends: Sequence[Finish | None] = (),
    ) -> None:
        request, table = row.request, row.request.table
        assert table is not None, "a running request has no pages"
        assert row.draws or not accepted, "a token was drawn in the middle of a prompt"
        length = request.length
        computed = row.end if accepted or not row.draws else self._again(row)
        table.commit(computed)
        if len(accepted) == row.draws:
            request.computed = computed
            request.ahead -= row.draws
        else:
            request.resume(computed)
        if accepted:
            request.accept(accepted, ends)
            self._holdings.slots.length[request.slot] = request.length
        if told is not None:
            told.tell(request, accepted=len(accepted), kept=request.length - length)
        self._settle(request, drew=bool(accepted))

    def _again(self, row: Row) -> int:
        """Where a row that should have drawn and did not goes on: it draws when it is run again.

        From its last token on; with states from its first one, for none is kept between.
        """
        return row.start if self._holdings.pools.states else row.end - 1

    def _settle(self, request: Request, *, drew: bool) -> None:
        """What a row changes beside the tokens: what others find, and what is told."""
        holdings = self._holdings
        if request.scores and request.computed == request.length:
            request.finish = Finish.at_length()
        if request.finish is not None:
            holdings.share(request)
            self._end(request, None)
            return
        if request.prefilling:
            holdings.share(request)
            if drew:
                request.prefilling = False
                holdings.sharing.retire(request)
        elif holdings.pools.states and holdings.keeps_state(request):
            holdings.share(request)
        elif holdings.pools.windows:
            holdings.slots.update(request)
        self._tell(request)


_NO_WALKS: Mapping[int, Walk] = {}
"""No guide is on its way."""


def _failure(status: int) -> EngineError:
    """What a row ends with that has drawn nothing, by its status."""
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("what the request allows leaves no token to go on with")
    return Internal("the model produced no finite number")


def _told(outcome: Outcome, row: int) -> Told | Vector | None:
    """What an outcome tells of a row beside the tokens that it drew."""
    if outcome.vectors is not None:
        return Vector.of(outcome.vectors, row)
    return None if outcome.details is None else Told.of(outcome.details, row)

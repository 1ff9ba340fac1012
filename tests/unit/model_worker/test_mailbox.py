"""The mailbox between the bus side and the batching loop."""

from __future__ import annotations

import threading

import pytest
from tests.support.worker import state

from antiphon.model_worker.batching.mailbox import COMMANDS_MAX, Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.wire.command import ContinueWorker, FlushCache, PauseWorker
from antiphon.wire.errors import Overloaded

A, B = ChoiceKey(1), ChoiceKey(2)
STATE = state()


def test_mail_is_taken_once_and_in_order() -> None:
    box = Mailbox(4)
    box.run(B, STATE)
    box.run(A, STATE)
    mail = box.take(wait=True)
    assert mail is not None
    assert mail == Mail(runs={B: (STATE, None), A: (STATE, None)})
    assert list(mail.runs) == [B, A]
    assert box.take(wait=False) == Mail()


def test_choice_dropped_before_it_was_taken_never_reaches_the_loop() -> None:
    box = Mailbox(1)
    box.run(A, STATE)
    box.drop(A)
    box.run(B, STATE)
    assert box.take(wait=True) == Mail(runs={B: (STATE, None)})


def test_choice_dropped_after_it_was_taken_is_dropped_in_the_loop() -> None:
    box = Mailbox(1)
    box.run(A, STATE)
    box.take(wait=True)
    box.drop(A, 3)
    assert box.take(wait=True) == Mail(drops={A: 3})


def test_full_mailbox_rejects_with_retry_after() -> None:
    box = Mailbox(1)
    box.run(A, STATE)
    with pytest.raises(Overloaded) as refused:
        box.run(B, STATE)
    assert refused.value.retry_after_s == 1.0


def test_commands_are_taken_once_and_in_order() -> None:
    box = Mailbox(1)
    orders = (PauseWorker(), FlushCache(), ContinueWorker(), FlushCache())
    for order in orders:
        box.submit_command(order)
    assert box.take(wait=True) == Mail(commands=list(orders))
    assert box.take(wait=False) == Mail()


def test_tower_is_the_last_one_that_was_posted() -> None:
    box = Mailbox(1)
    for tower in ("one", "two"):
        box.use_tower(tower)
    assert box.take(wait=True) == Mail(tower="two")
    box.use_tower("")  # as of encoders that announce none
    assert box.take(wait=False) == Mail(tower="")
    assert box.take(wait=False) == Mail()


def test_mailbox_bounds_pending_commands() -> None:
    box = Mailbox(1)
    for _ in range(COMMANDS_MAX):
        box.submit_command(FlushCache())
    with pytest.raises(Overloaded):
        box.submit_command(FlushCache())


def test_mailbox_take_returns_after_its_timeout() -> None:
    box = Mailbox(1)
    assert box.take(wait=True, timeout_s=0.0) == Mail()
    box.run(A, STATE)
    assert box.take(wait=True, timeout_s=0.0) == Mail(runs={A: (STATE, None)})


def test_mailbox_take_wakes_for_mail_and_close() -> None:
    box = Mailbox(1)
    taken: list[Mail | None] = []

    def loop() -> None:
        while (mail := box.take(wait=True)) is not None:
            taken.append(mail)
        taken.append(None)

    thread = threading.Thread(target=loop)
    thread.start()
    box.submit_command(FlushCache())
    box.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert taken[-1] is None

"""The channel's book-keeping: every micro-batch reaches the service exactly once, whatever breaks when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.pipeline.ledger import Ledger, Sending
from gpu_runtime.pipeline.session import ProtocolError


def sending(index: int) -> Sending:
    return Sending(place=(0, index), frames=(), num_bytes=1, queued_s=0.0, due_s=0.0)


def test_what_the_service_lacks_is_sent_again() -> None:
    ledger = Ledger()
    for index in range(3):
        ledger.add(sending(index))
    ledger.resume(0)
    ledger.num_sent += 3
    ledger.settle((0, 0))
    assert (ledger.num_unsent, ledger.next_unsent) == (0, None)
    ledger.resume(2)  # the third was lost with the connection
    assert ledger.next_unsent is not None
    assert ledger.next_unsent.place == (0, 2)
    assert (ledger.num_unsent, ledger.num_under_way, ledger.num_gradients) == (1, 2, 1)


@pytest.mark.parametrize("num_micro_batches", [-1, 0, 4])
def test_a_service_cannot_have_fewer_than_came_back_or_more_than_there_are(num_micro_batches: int) -> None:
    ledger = Ledger()
    for index in range(3):
        ledger.add(sending(index))
    ledger.num_sent = 3
    ledger.settle((0, 0))
    with pytest.raises(ProtocolError, match="1 have come back, 2 are under way"):
        ledger.resume(num_micro_batches)


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_gradients_come_in_order_or_not_at_all(place: tuple[int, int]) -> None:
    ledger = Ledger()
    ledger.add(sending(0))
    ledger.add(sending(1))
    with pytest.raises(ProtocolError, match="was not due"):
        ledger.settle((0, 0))  # it has not been sent
    ledger.num_sent = 2
    with pytest.raises(ProtocolError, match="was not due"):
        ledger.settle(place)


@given(st.lists(st.sampled_from(["add", "send", "arrive", "answer", "break"]), max_size=60))
def test_each_micro_batch_arrives_once_and_in_order(events: list[str]) -> None:
    """A service that takes what arrives, a wire that loses what is on it, in any order of events."""
    ledger, wire = Ledger(), []
    taken: list[int] = []
    num_added = answered = 0
    for event in events:
        if event == "add":
            ledger.add(sending(num_added))
            num_added += 1
        elif event == "send" and ledger.next_unsent is not None:
            wire.append(ledger.next_unsent.place[1])
            ledger.num_sent += 1
        elif event == "arrive" and wire:
            taken.append(wire.pop(0))
        elif event == "answer" and answered < len(taken):
            assert ledger.settle((0, taken[answered])).place == (0, answered)
            answered += 1
        elif event == "break":
            wire.clear()
            ledger.resume(len(taken))
    assert taken == list(range(len(taken)))
    assert ledger.num_gradients == answered
    assert ledger.num_under_way == num_added - answered

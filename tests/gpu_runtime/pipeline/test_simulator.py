"""The simulator by hand, where no formula says what comes out: shared servers and devices, links that change."""

import pytest
from pipeline_cases import even_cut

from gpu_runtime.pipeline.makespan import Affine
from gpu_runtime.pipeline.simulator import RateChange, SimulatedSession, simulate

UPLINK_ONLY = even_cut(0.0, uplink=Affine(call_s=1.0, example_s=1.0))


def test_two_clients_wait_for_one_server() -> None:
    cut = even_cut(0.0, server=Affine(call_s=3.0))
    timeline = simulate([SimulatedSession(client=client, cut=cut, steps=[(1, 1)]) for client in "ab"])
    # Served a, b, a, b: all four micro-batches came at 0 s, those of a client one after the other.
    assert timeline.step_ends_s == ((9.0,), (12.0,))
    assert timeline.busy_s("server") == 12.0
    assert timeline.idle_fraction("server") == 0.0


@pytest.mark.parametrize(
    ("order", "ends"), [("arrival", ((18.0,), (12.0, 24.0))), ("progress", ((21.0,), (12.0, 24.0)))]
)
def test_the_server_may_serve_who_is_behind(order: str, ends: tuple[tuple[float, ...], ...]) -> None:
    # One step of four micro-batches and two steps of two: a b a b, then a a b b or a b a b.
    cut = even_cut(0.0, server=Affine(call_s=3.0))
    sessions = [
        SimulatedSession(client="a", cut=cut, steps=[(1, 1, 1, 1)]),
        SimulatedSession(client="b", cut=cut, steps=[(1, 1), (1, 1)]),
    ]
    assert simulate(sessions, server_order=order).step_ends_s == ends


def test_a_late_client_finds_the_server_idle() -> None:
    cut = even_cut(0.0, server=Affine(call_s=3.0))
    timeline = simulate(
        [
            SimulatedSession(client="a", cut=cut, steps=[(1,)]),
            SimulatedSession(client="b", cut=cut, steps=[(1,)], start_s=4.0),
        ]
    )
    assert timeline.step_ends_s == ((3.0,), (7.0,))
    assert timeline.idle_fraction("server") == pytest.approx(1 / 7)


def test_tasks_of_a_client_share_its_links() -> None:
    sessions = [SimulatedSession(client="a", cut=UPLINK_ONLY, steps=[(1,)], task=task) for task in ("x", "y")]
    assert simulate(sessions).step_ends_s == ((2.0,), (4.0,))


def test_the_servers_update_comes_after_the_last_gradient_is_sent() -> None:
    cut = even_cut(1.0, server_update_s=5.0)
    timeline = simulate([SimulatedSession(client="a", cut=cut, steps=[(1,), (1,)])])
    # The update runs from 3 s to 8 s; the next micro-batch waits from 7 s.
    assert timeline.step_ends_s == ((5.0, 11.0),)
    assert [work.start_s for work in timeline.work if work.kind == "server-update"] == [3.0, 9.0]


@pytest.mark.parametrize(
    ("changes", "end_s"),
    [
        ([], 5.0),
        # 1 s fixed, 1 s at full rate, the other 3 examples at half of it.
        ([RateChange(at_s=2.0, uplink_factor=0.5)], 8.0),
        # The fixed second does not change.
        ([RateChange(at_s=0.0, uplink_factor=0.5)], 9.0),
        ([RateChange(at_s=2.0, uplink_factor=0.5), RateChange(at_s=4.0, uplink_factor=2.0)], 5.0),
        ([RateChange(at_s=2.0, downlink_factor=0.5)], 5.0),
    ],
)
def test_links_change_in_the_middle_of_a_message(changes: list[RateChange], end_s: float) -> None:
    session = SimulatedSession(client="a", cut=UPLINK_ONLY, steps=[(4,)])
    assert simulate([session], changes={"a": changes}).end_s == end_s


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="at_s"):
        RateChange(at_s=float("nan"))
    with pytest.raises(ValueError, match="downlink_factor"):
        RateChange(at_s=0.0, downlink_factor=0.0)
    for steps in ([], [()], [(1, 0)]):
        with pytest.raises(ValueError, match="steps"):
            SimulatedSession(client="a", cut=UPLINK_ONLY, steps=steps)
    session = SimulatedSession(client="a", cut=UPLINK_ONLY, steps=[(1,)])
    with pytest.raises(ValueError, match="'b', which has no session"):
        simulate([session], changes={"b": []})
    with pytest.raises(ValueError, match="server_order"):
        simulate([session], server_order="random")
    with pytest.raises(ValueError, match="order of time"):
        simulate([session], changes={"a": [RateChange(at_s=2.0), RateChange(at_s=1.0)]})

"""Emulated links: when messages arrive, on a clock that is set by hand; and what estimates make of it."""

import math
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from echo_host import EchoHost, activation, check_step, run_step, spec
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.contracts import Emulation, LinkChange
from gpu_runtime.pipeline.channel import GrpcChannel
from gpu_runtime.pipeline.link import EmulatedLink
from gpu_runtime.pipeline.rates import RateEstimate, probe_link
from gpu_runtime.pipeline.service import SplitServer


class HandClock:
    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def link(**fields: object) -> tuple[EmulatedLink, HandClock]:
    clock = HandClock()
    return EmulatedLink(Emulation(**fields), clock), clock  # type: ignore[arg-type]


def test_messages_go_one_after_the_other_and_latency_takes_no_throughput() -> None:
    """1,000 bytes a second, 0.25 s: each message of 500 bytes takes 0.5 s of the link and arrives 0.25 s later."""
    slow, clock = link(uplink_bytes_per_s=1000.0, latency_s=0.25)
    assert [slow.up(500) for _ in range(3)] == [100.75, 101.25, 101.75]
    clock.now_s = 105.0
    assert slow.up(500) == 105.75


def test_directions_do_not_wait_for_each_other() -> None:
    slow, _ = link(uplink_bytes_per_s=1000.0, downlink_bytes_per_s=2000.0)
    assert (slow.up(1000), slow.down(1000), slow.up(1000), slow.down(1000)) == (101.0, 100.5, 102.0, 101.0)


def test_a_message_occupies_the_link_whatever_its_size() -> None:
    slow, _ = link(uplink_bytes_per_s=1000.0, message_s=0.125)
    assert [slow.up(0), slow.up(0), slow.up(500)] == [100.125, 100.25, 100.875]


def test_unlimited_directions_cost_nothing() -> None:
    slow, clock = link(uplink_bytes_per_s=1000.0)
    assert slow.down(1 << 40) == 100.0
    late, _ = link(latency_s=0.5)
    assert [late.up(1 << 40), late.down(1 << 40)] == [100.5, 100.5]
    clock.now_s = 101.0
    assert slow.down(1) == 101.0


def test_rates_change_in_the_middle_of_a_message_counted_from_the_first_message() -> None:
    """1,000 bytes a second for 2 s, then 100, from 4 s on unlimited."""
    changes = (LinkChange(at_s=2.0, uplink_bytes_per_s=100.0), LinkChange(at_s=4.0))
    slow, clock = link(uplink_bytes_per_s=1000.0, changes=changes)
    clock.now_s = 500.0
    assert slow.up(1000) == 501.0
    assert slow.up(1050) == 502.5  # 1,000 in one second, 50 in half of one
    assert slow.up(10_000) == 504.0  # 150 until the link becomes unlimited
    clock.now_s = 510.0
    assert slow.up(1 << 30) == 510.0


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 5000)), min_size=1, max_size=20),
    st.floats(100, 1e5),
    st.floats(0, 1),
    st.floats(0, 0.1),
)
def test_a_link_never_carries_more_than_its_rate(
    messages: list[tuple[float, int]], rate: float, latency_s: float, message_s: float
) -> None:
    slow, clock = link(uplink_bytes_per_s=rate, latency_s=latency_s, message_s=message_s)
    before_s = -math.inf
    for pause_s, size in messages:
        clock.now_s += pause_s
        arrival_s = slow.up(size)
        needed_s = message_s + size / rate
        assert arrival_s >= clock.now_s + latency_s + needed_s - 1e-6
        assert arrival_s >= before_s + needed_s - 1e-6
        # It does not idle while something waits.
        assert arrival_s <= max(clock.now_s + latency_s, before_s) + needed_s + 1e-6
        before_s = arrival_s


def fed(rate: float, latency_s: float, offset_s: float, gap_s: float, count: int = 20) -> RateEstimate:
    """An estimate fed by an emulated link, with an arrival clock that is off by `offset_s`."""
    slow, clock = link(uplink_bytes_per_s=rate, latency_s=latency_s)
    estimate = RateEstimate()
    for _ in range(count):
        estimate.observe(clock.now_s, slow.up(10_000) + offset_s, 10_000)
        clock.now_s += gap_s
    return estimate


@given(st.floats(1e4, 1e8), st.floats(0, 0.5), st.floats(-1e4, 1e4), st.floats(0, 0.9))
def test_the_rate_of_a_busy_link_is_found_without_clocks_that_agree(
    rate: float, latency_s: float, offset_s: float, gap: float
) -> None:
    """Messages queued faster than the link takes them."""
    found = fed(rate, latency_s, offset_s, gap * 10_000 / rate).bytes_per_s
    assert found == pytest.approx(rate, rel=1e-2)


def test_a_link_with_nothing_to_wait_for_says_nothing_about_its_rate() -> None:
    estimate = fed(1e6, 0.1, 3.0, 0.011)
    assert estimate.bytes_per_s is None
    estimate.probed = 5.0
    assert estimate.bytes_per_s == 5.0


def test_a_rate_that_falls_tenfold_is_found_within_a_step() -> None:
    slow, clock = link(uplink_bytes_per_s=1e6, changes=(LinkChange(at_s=0.1, uplink_bytes_per_s=1e5),))
    estimate = RateEstimate()
    for _ in range(18):
        estimate.observe(clock.now_s, slow.up(10_000), 10_000)
    assert estimate.bytes_per_s == pytest.approx(1e5, rel=0.2)


def test_interruptions_and_small_messages_are_no_pairs() -> None:
    estimate = RateEstimate()
    for i in range(10):
        estimate.interrupt()
        estimate.observe(i, i * 10.0, 1 << 20)
    for i in range(10):
        estimate.observe(100 + i, 1000 + i * 10.0, 100)
    assert estimate.bytes_per_s is None


def ping_over(slow: EmulatedLink, clock: HandClock) -> Callable[[int, int], float]:
    def ping(bytes_up: int, bytes_down: int) -> float:
        began_s = clock.now_s
        clock.now_s = slow.up(bytes_up)
        clock.now_s = slow.down(bytes_down)
        return clock.now_s - began_s

    return ping


@pytest.mark.parametrize("message_s", [0.0, 0.02])
def test_the_probe_finds_rates_and_latency_in_a_short_time(message_s: float) -> None:
    slow, clock = link(uplink_bytes_per_s=1.25e6, downlink_bytes_per_s=3.125e6, latency_s=0.025, message_s=message_s)
    probed = probe_link(ping_over(slow, clock))
    assert probed.uplink_bytes_per_s == pytest.approx(1.25e6)
    assert probed.downlink_bytes_per_s == pytest.approx(3.125e6)
    assert probed.latency_s == pytest.approx(0.025 + message_s)
    assert clock.now_s - 100.0 < 1.0


def test_a_probe_that_is_interrupted_knows_nothing() -> None:
    probed = probe_link(lambda *_: None)
    assert (probed.latency_s, probed.uplink_bytes_per_s, probed.downlink_bytes_per_s) == (None, None, None)


def test_a_channel_over_an_emulated_link_takes_as_long_as_the_link_and_measures_it() -> None:
    """A step of 4 messages of 8,000 bytes over 400,000 bytes a second: at least 0.08 s, and the latency both ways."""
    slow = EmulatedLink(Emulation(uplink_bytes_per_s=4e5, downlink_bytes_per_s=8e5, latency_s=0.01))
    with (
        closing(SplitServer(EchoHost(), "token")) as server,
        closing(GrpcChannel(server.address, "token", link=slow)) as channel,
    ):
        channel.open(spec())
        probed = channel.statistics
        began_s = time.monotonic()
        for index in range(4):
            channel.send(activation(0, index, 4, torch.zeros(2000)))
        for _ in range(4):
            channel.receive()
        took_s = time.monotonic() - began_s
        check_step(run_step(channel, 1), 1)
    assert took_s >= 4 * 8000 / 4e5 + 8000 / 8e5 + 0.02
    # A busy machine makes rates and latency worse than they are, never better.
    assert probed.uplink_bytes_per_s is not None
    assert probed.uplink_bytes_per_s < 4.4e5
    assert probed.downlink_bytes_per_s is not None
    assert probed.downlink_bytes_per_s < 8.8e5
    assert probed.latency_s is not None
    assert probed.latency_s >= 0.01

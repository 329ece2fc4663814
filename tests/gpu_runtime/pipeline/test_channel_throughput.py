"""The throughput measurement itself: that it runs, with a process of its own that goes away."""

import psutil

from gpu_runtime.bench.channel_throughput import channel_throughput


def test_all_directions_are_measured_and_the_process_ends() -> None:
    before = set(psutil.Process().children())
    measured = channel_throughput(message_bytes=4096, seconds=0.02)
    assert measured.message_bytes == 4096
    assert min(measured.up_bytes_per_s, measured.down_bytes_per_s, measured.both_bytes_per_s) > 0
    assert set(psutil.Process().children()) <= before

"""Reports to the Chrome trace format (chrome://tracing, Perfetto): what ran when, on which lane of which client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu_runtime.contracts import MEASURED, DeviceSample, Report, Span

US_PER_S = 1e6


def chrome_trace(reports: Iterable[Report]) -> dict[str, Any]:
    """One process per client, one thread per lane, one complete event per span, one counter per reading of the device.

    Rounds follow each other as they were started: time 0 is the earliest start of all reports. Spans are measured
    seconds also where a report's own clock is virtual.
    """
    listed = list(reports)
    origin_s = min((report.started_at_s for report in listed), default=0.0)
    processes = {client: pid for pid, client in enumerate(sorted({report.client for report in listed}), start=1)}
    lanes = sorted({(report.client, span.lane) for report in listed for span in report.spans})
    threads = {lane: tid for tid, lane in enumerate(lanes, start=1)}
    events = [_name("process_name", client, pid, 0) for client, pid in processes.items()]
    events += [_name("thread_name", lane, processes[client], tid) for (client, lane), tid in threads.items()]
    for report in listed:
        offset_s = report.started_at_s - origin_s
        for span in report.spans:
            tid = threads[report.client, span.lane]
            events.append(_event(report, span, offset_s, processes[report.client], tid))
        for sample in report.samples:
            events += _counters(sample, offset_s, processes[report.client])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": MEASURED}}


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(report: Report, span: Span, offset_s: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.task,
        "cat": "task",
        "pid": pid,
        "tid": tid,
        "ts": (offset_s + span.start_s) * US_PER_S,
        "dur": max(0.0, span.end_s - span.start_s) * US_PER_S,
        "args": {"round": report.server_round},
    }


def _counters(sample: DeviceSample, offset_s: float, pid: int) -> list[dict[str, Any]]:
    readings: dict[str, tuple[str, float | int | None]] = {
        "device busy": ("fraction", sample.busy_fraction),
        "device memory": ("bytes", sample.memory_bytes),
        "device power": ("watts", sample.power_w),
    }
    ts = (offset_s + sample.time_s) * US_PER_S
    return [
        {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": {unit: value}}
        for name, (unit, value) in readings.items()
        if value is not None
    ]

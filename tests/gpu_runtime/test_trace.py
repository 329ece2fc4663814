"""Reports as a Chrome trace."""

from __future__ import annotations

import json

from runtime_fakes import hold, plan_of, start_arrays
from test_runtime import runtime

from gpu_runtime.contracts import MEASURED, VIRTUAL, DeviceSample, Report, Span
from gpu_runtime.trace import chrome_trace


def report(client: str, server_round: int, started_at_s: float, *spans: Span) -> Report:
    return Report(
        client=client,
        server_round=server_round,
        seconds=9.0,
        clock=VIRTUAL,
        tasks=(),
        started_at_s=started_at_s,
        spans=spans,
    )


def test_a_trace_by_hand() -> None:
    trace = chrome_trace(
        [
            report("b", 1, 1000.0, Span(task="digits", lane="core-0", start_s=0.5, end_s=1.0)),
            report("a", 1, 1002.0, Span(task="digits", lane="core-0", start_s=0.0, end_s=0.25)),
            report("b", 2, 1010.0, Span(task="boxes", lane="core-1", start_s=1.0, end_s=3.0)),
        ]
    )
    assert trace["otherData"] == {"clock": MEASURED}
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {
        ("process_name", 1, 0): "a",
        ("process_name", 2, 0): "b",
        ("thread_name", 1, 1): "core-0",
        ("thread_name", 2, 2): "core-0",
        ("thread_name", 2, 3): "core-1",
    }
    spans = [
        (e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]["round"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    assert spans == [
        ("digits", 2, 2, 0.5e6, 0.5e6, 1),
        ("digits", 1, 1, 2e6, 0.25e6, 1),
        ("boxes", 2, 3, 11e6, 2e6, 2),
    ]


def test_what_the_device_said_becomes_counters() -> None:
    samples = (
        DeviceSample(time_s=0.5, busy_fraction=0.75, memory_bytes=1024, power_w=300.0),
        DeviceSample(time_s=1.0, power_w=310.0),
    )
    first = Report(client="a", server_round=1, seconds=2.0, clock=MEASURED, tasks=(), started_at_s=1000.0)
    second = Report(
        client="b", server_round=1, seconds=2.0, clock=MEASURED, tasks=(), started_at_s=1001.0, samples=samples
    )
    events = [event for event in chrome_trace([first, second])["traceEvents"] if event["ph"] == "C"]
    assert events == [
        {"ph": "C", "name": "device busy", "pid": 2, "ts": 1.5e6, "args": {"fraction": 0.75}},
        {"ph": "C", "name": "device memory", "pid": 2, "ts": 1.5e6, "args": {"bytes": 1024}},
        {"ph": "C", "name": "device power", "pid": 2, "ts": 1.5e6, "args": {"watts": 300.0}},
        {"ph": "C", "name": "device power", "pid": 2, "ts": 2.0e6, "args": {"watts": 310.0}},
    ]


def test_no_reports() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_tasks_of_a_real_round_overlap() -> None:
    refs = ("pictures", "normed")
    plan = plan_of(*refs, num_examples=800, trace=True)
    result = runtime(2).train(plan, start_arrays(*refs), hold(*refs))
    events = [e for e in chrome_trace([result.report])["traceEvents"] if e["ph"] == "X"]
    assert json.dumps(events, allow_nan=False)
    assert any(
        a["name"] != b["name"] and a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
        for a in events
        for b in events
    )

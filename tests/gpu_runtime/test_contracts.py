"""The contracts' JSON: what is written is read back, what does not follow the contract is refused by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_runtime.contracts import (
    MAX_INTEGER,
    ContractError,
    NodeHoldings,
    Plan,
    Profile,
    Report,
    TaskPlan,
    TaskReport,
    array_key,
    from_json,
    from_mapping,
    one_line,
    split_key,
    to_json,
)

ROOT = Path(__file__).resolve().parents[2]
st.register_type_strategy(int, st.integers(-MAX_INTEGER, MAX_INTEGER))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

PLAN = Plan(client="a", server_round=3, seed=1, tasks=(TaskPlan(task="digits", num_examples=10, share=0.5),))


@pytest.mark.parametrize("kind", [Plan, Profile, Report, NodeHoldings])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read_back(kind: type, data: st.DataObject) -> None:
    value = data.draw(st.from_type(kind))
    assert from_json(kind, to_json(value)) == value


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(PLAN)) | changes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not json", "is not JSON"),
        ("[1]", "must be a JSON object"),
        (_changed(schema=1), "schema version 1"),
        (_changed(kind="Report"), "expected a Plan, got a 'Report'"),
        (_changed(colour="red"), r"unknown keys \['colour'\]"),
        (_changed(seed="7"), "Plan.seed must be int"),
        (_changed(seed=True), "Plan.seed must be int"),
        (_changed(deterministic=1), "Plan.deterministic must be bool"),
        (_changed(client=None), "Plan.client must be str"),
        (_changed(tasks={}), "Plan.tasks must be a list"),
        (_changed(tasks=[{"task": "digits"}]), r"Plan.tasks\[0\] lacks \['num_examples'\]"),
        (_changed(tasks=["digits"]), r"Plan.tasks\[0\] must be an object"),
        (_changed().replace('"seed": 1', '"seed": NaN'), "Plan.seed must be int, not nan"),
        (_changed().replace('"share": 0.5', '"share": NaN'), r"Plan.tasks\[0\].share must be finite, not nan"),
        (_changed().replace('"seed": 1', '"seed": ' + "9" * 5000), "Plan is not JSON: Exceeds the limit"),
        (_changed().replace('"share": 0.5', '"share": 1e999'), "must be finite"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_does_not_follow_the_contract_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ContractError, match=complaint):
        from_json(Plan, text)


def test_pairs_of_a_curve_have_two_entries() -> None:
    body = {"demand": 1.0, "solo_cost_s": 1.0, "speed_curve": [[0.5, 0.6, 0.7]]}
    from gpu_runtime.contracts import TaskCost

    with pytest.raises(ContractError, match=r"speed_curve\[0\] must have 2 entries, not 3"):
        from_mapping(TaskCost, body)


def test_missing_key_is_named() -> None:
    body = json.loads(to_json(PLAN))
    del body["seed"]
    with pytest.raises(ContractError, match=r"Plan lacks \['seed'\]"):
        from_json(Plan, json.dumps(body))


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ContractError, match="not finite"):
        to_json(dataclasses.replace(PLAN, deadline_s=float("inf")))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("  two\r\nlines\t here ", "two lines here"),
        ("\x1b[1;31mred\x1b[0m and \x1b]0;title\x07bell", "red and bell"),
        ("nul\x00 back\x08space \x9b31m", "nul back space 31m"),
        ("\u202eright to left\u2028line", "right to left line"),
        ("x" * 301, "x" * 297 + "..."),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert one_line(text).isprintable()


def test_array_keys() -> None:
    assert split_key(array_key("digits", "blocks.0/weight")) == ("digits", "blocks.0/weight")
    for key in ("weight", "/weight", "digits/"):
        with pytest.raises(ContractError, match="not of the form"):
            split_key(key)


def test_importing_the_contracts_loads_no_torch() -> None:
    code = "import sys, gpu_runtime.contracts, gpu_runtime.settings; print(*({'torch', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("field", ["num_examples", "seconds"])
def test_integers_beyond_64_bits_are_refused(field: str) -> None:
    report = TaskReport(task="a", num_examples=1, num_steps=1, seconds=1.0)
    body = {**json.loads(to_json(report)), field: 10**400}
    with pytest.raises(ContractError, match=f"{field} is beyond 64 bits"):
        from_json(TaskReport, json.dumps(body))

"""`python -m gpu_runtime profile | doctor | bench`: the runtime alone, without Flower and without a network.

Exit codes: 0 done, 1 something failed while running, 2 wrong arguments; every fault in one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from gpu_runtime.contracts import DataSpec, HeldTask, Profile
from gpu_runtime.signals import termination_interrupts
from gpu_runtime.work import one_line


class UsageError(ValueError):
    """Arguments that cannot be followed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    # Workload factories are found from the working directory, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        with termination_interrupts():
            return command(options)
    except KeyboardInterrupt as interruption:
        print(f"interrupted by {interruption}" if str(interruption) else "interrupted", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


def profile(options: argparse.Namespace) -> int:
    """Measure the named tasks and print a table of their costs."""
    from gpu_runtime.runtime import EmbeddedRuntime
    from gpu_runtime.settings import SharingSettings

    refs = [ref for ref in options.tasks.split(",") if ref]
    if not refs:
        raise UsageError("--tasks names no task")
    runtime = EmbeddedRuntime(options.factory, SharingSettings(cores=options.cores), budget_s=options.budget)
    held = [HeldTask(ref=ref, data=DataSpec(directory=options.data_dir)) for ref in refs]
    measured = runtime.profile("local", held)
    together = runtime.mix([task.task for task in measured.tasks])
    seen = {each.ref: runtime.operators(each) for each in held} if options.operators and not measured.errors else {}
    runtime.close()
    print(f"{measured.device}, {measured.num_cores} cores")
    _print_profile(measured)
    if together is not None:
        served = ", ".join(f"{name} {capacity:.2f}" for name, capacity in together.capacities.items())
        print(f"together: capacity {served}; auto takes {together.best}")
    for ref, found in seen.items():
        print(f"\n{ref}: {'operator':<45}{'ms/step':>10}{'fills':>8}")
        for each in found[: options.operators]:
            print(f"{' ' * (len(ref) + 2)}{each.name[:44]:<45}{each.seconds * 1e3:>10.3f}{each.filled:>8.2f}")
    extra = {"operators": {ref: [asdict(each) for each in found] for ref, found in seen.items()}} if seen else {}
    mix = {} if together is None else {"together": {"capacities": dict(together.capacities), "best": together.best}}
    _write_json(options.json, asdict(measured) | mix | extra)
    for error in measured.errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if measured.errors else 0


def doctor(options: argparse.Namespace) -> int:
    """Say what the device is and which backends work on it."""
    from gpu_runtime.device import CUDA, discover, read_nvml
    from gpu_runtime.lanes import BACKENDS, choose

    device = discover(options.cores)
    chosen = choose("auto", "competitive", device).name
    unit = "SMs" if device.kind == CUDA else "cores given"
    memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else "unknown"
    print(f"device    {device.name} ({device.kind}), {device.num_cores} {unit}, memory {memory}")
    print(f"driver    {device.driver or 'unknown'}")
    nvml = read_nvml(device.index)
    known = ", ".join(f"{name} {value}" for name, value in asdict(nvml).items() if value is not None)
    print(f"nvml      {known or 'nothing can be read'}")
    backends = {name: backend.unavailable(device) for name, backend in BACKENDS.items()}
    for name, reason in backends.items():
        state = f"not available: {reason}" if reason else f"available, bounds {BACKENDS[name].bounds}"
        print(f"backend   {name}: {state}{' (until measured)' if name == chosen else ''}")
    print("backend   auto: measures which of these serves the tasks of a client best, when it is asked for its profile")
    _write_json(options.json, {"device": asdict(device), "nvml": asdict(nvml), "unavailable": backends, "auto": chosen})
    return 0


def bench(options: argparse.Namespace) -> int:
    """Compare competitive sharing with every other way of running several trainings, on synthetic tasks."""
    from gpu_runtime.bench import competitive
    from gpu_runtime.bench.table import table
    from gpu_runtime.device import discover

    size = competitive.size_of(
        quick=options.quick,
        total_s=options.budget,
        seconds=options.seconds,
        pairs=options.pairs,
        trace_overhead=options.trace_overhead,
    )
    mixes = competitive.mixes_of(options.mixes)
    device = discover(options.cores, options.device)
    result = competitive.run(device, mixes, size=size, say=lambda text: print(text, file=sys.stderr))
    _write_json(options.json, result)
    print(table(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu_runtime", description="One device, several trainings.")
    commands = parser.add_subparsers(required=True, metavar="profile | doctor | bench")

    def add(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(command=run)
        command.add_argument("--cores", type=_at_least(0, int), default=0, help="CPU cores to use; 0: those given")
        command.add_argument("--json", metavar="FILE", default="", help="also write the result there")
        return command

    command = add("profile", profile)
    command.add_argument("--factory", default="tasks.registry:build", help="package.module:function(ref, data)")
    command.add_argument("--tasks", required=True, help="comma-separated task references")
    command.add_argument("--budget", type=_at_least(0.1, float), default=3.0, help="seconds for each task")
    command.add_argument("--data-dir", default="", help="directory of the tasks' data")
    command.add_argument(
        "--operators", type=_at_least(0, int), default=0, metavar="N", help="also the N longest operators"
    )
    add("doctor", doctor)
    command = add("bench", bench)
    command.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    command.add_argument("--mixes", default="", help="comma-separated; default: all")
    command.add_argument("--quick", action="store_true", help="at most 3 minutes instead of 45, with wider intervals")
    command.add_argument("--budget", type=_at_least(1, float), help="seconds for all of it")
    command.add_argument("--seconds", type=_at_least(0.05, float), help="of one baseline run of a mix")
    command.add_argument(
        "--trace-overhead", action="store_true", help="also what tracing costs; a full run has it anyway"
    )
    command.add_argument("--pairs", type=_at_least(5, int), help="interleaved repeats")
    return parser


def _at_least(minimum: float, kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not minimum <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {minimum:g}, not {text}")
        return value

    return read


def _print_profile(measured: Profile) -> None:
    print(f"{'task':<20}{'batch':>6}{'ms/example':>12}{'demand':>8}{'MiB':>8}  {'blocks':>6}  speed at share")
    for task in measured.tasks:
        cost = task.cost
        if cost is None:
            continue
        curve = " ".join(f"{speed:.2f}@{share:.2f}" for share, speed in cost.speed_curve)
        numbers = f"{task.batch_size:>6}{cost.solo_cost_s * 1e3:>12.3f}{cost.demand:>8.2f}"
        print(f"{task.task:<20}{numbers}{cost.peak_memory_bytes / 2**20:>8.1f}  {len(cost.blocks):>6}  {curve}")


def _write_json(path: str, value: Any) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())

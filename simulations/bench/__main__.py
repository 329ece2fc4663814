"""Command line of the benchmarks: `python -m simulations.bench NAME [--quick] [--json FILE] [options of NAME]`.

Progress goes to stderr, a readable table to stdout, the JSON object to FILE. Each benchmark is a module with
`add_arguments(parser)`, `run(options, say)` and `table(result)`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_runtime.signals import termination_interrupts

BENCHMARKS = {
    "competitive": "simulations.bench.competitive",
    "pipeline": "simulations.bench.pipeline",
    "synchronisation": "simulations.bench.synchronisation",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Exit code: 0 done, 1 it failed, 2 bad arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m simulations.bench", description="Run a benchmark.")
    names = parser.add_subparsers(required=True, metavar=" | ".join(BENCHMARKS), dest="name")
    for name, module in BENCHMARKS.items():
        command = names.add_parser(name)
        command.add_argument("--quick", action="store_true", help="at most 3 minutes instead of 45, wider intervals")
        command.add_argument("--json", metavar="FILE", type=Path, help="write the JSON object there")
        importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(argv)
    benchmark = importlib.import_module(BENCHMARKS[options.name])
    try:
        with termination_interrupts():
            result = benchmark.run(options, lambda text: print(text, file=sys.stderr))
    except KeyboardInterrupt as interruption:
        print(f"interrupted by {str(interruption) or 'SIGINT'}", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(benchmark.table(result))
    if options.json:
        try:
            options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: cannot write {options.json}: {error.strerror}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Command line of the benchmarks: `python -m simulations.bench NAME [--device cpu|cuda] [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {"competitive": "simulations.bench.competitive"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Exit code: 0 done, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m simulations.bench", description="Run a benchmark.")
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="at most 3 minutes, with wider intervals")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there as well")
    arguments = parser.parse_args(argv)
    benchmark = importlib.import_module(BENCHMARKS[arguments.name])
    try:
        result = benchmark.run(
            device=arguments.device, quick=arguments.quick, say=lambda text: print(text, file=sys.stderr)
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(result, indent=2, allow_nan=False)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

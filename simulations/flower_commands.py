"""A server of `flwr` commands: loads Flower's command line once, then forks for every command.

Started by `simulations.flower_home` as a script of its own. Reads one JSON object a line, {"number", "argv", "stdout",
"stderr"}, runs that `flwr` command with its output in the two files, and answers with the number and the exit code on
a line. A command costs milliseconds instead of the two seconds that a new process needs for its imports.

It also outlives a run wrapper that is killed outright: when its input ends without a goodbye (`null`), it ends the
run's processes and removes the run's directory in the wrapper's stead.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve commands until standard input ends."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="flwr")
    command_line = entry.load()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if request is None:
            return
        pid = os.fork()
        if pid == 0:
            _run(command_line, request)
        _, status = os.waitpid(pid, 0)
        try:
            print(request["number"], os.waitstatus_to_exitcode(status), file=answers, flush=True)
        except BrokenPipeError:  # the wrapper was killed while a command was under way
            break
    clean_up(sys.argv[1])


def clean_up(root: str) -> None:
    """End every process of the run whose private directory is `root`, and remove the directory."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from simulations.process_tree import ProcessTree, adopt_orphans, marker_of

    adopt_orphans()
    ProcessTree(marker_of(root)).end()
    shutil.rmtree(root, ignore_errors=True)


def _run(command_line: Any, request: dict[str, Any]) -> None:
    """Run one command in this (forked) process and end it."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    code = 1
    try:
        sys.argv = ["flwr", *request["argv"]]
        command_line()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

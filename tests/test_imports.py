"""What may import what: the table of docs/architecture.md, read from the source with `ast`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("server_app", "client_app", "strategies", "gpu_runtime", "tasks", "simulations")

ALLOWED = {
    "server_app": {"strategies", "tasks", "gpu_runtime"},
    "client_app": {"tasks", "gpu_runtime"},
    "strategies": {"gpu_runtime"},
    "gpu_runtime": set(),
    "tasks": {"gpu_runtime"},
    "simulations": set(ROOMS),
}
# Outside packages that a room must not know.
FORBIDDEN = {
    "gpu_runtime": {"flwr", "ray", "flwr_datasets"},
    "tasks": {"flwr", "ray"},
    "strategies": {"ray", "torch", "torchvision", "flwr_datasets"},
    "client_app": {"ray"},
    "server_app": {"ray"},
}
# Modules that only some parts of a room may see.
ONLY = {
    "tasks": {"gpu_runtime.contracts", "gpu_runtime.settings", "gpu_runtime.randomness"},
    "strategies": {
        "gpu_runtime.contracts",
        "gpu_runtime.allocator",
        "gpu_runtime.pipeline.cut_costs",
        "gpu_runtime.pipeline.halves",
        "gpu_runtime.pipeline.joint",
        "gpu_runtime.pipeline.makespan",
        "gpu_runtime.pipeline.planner",
        "gpu_runtime.pipeline.contention",
        "gpu_runtime.settings",
    },
}
FLWR_PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
LIGHT_MODULES = (
    "gpu_runtime.contracts",
    "gpu_runtime.settings",
    "gpu_runtime.allocator",
    "gpu_runtime.pipeline.joint",
    "gpu_runtime.pipeline.baselines",
    "gpu_runtime.pipeline.contention",
    "gpu_runtime.pipeline.simulator",
    "tasks.registry",
    "tasks.settings",
    "server_app.settings",
    "strategies.options",
)


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions and `if TYPE_CHECKING`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if not alias.name[0].isupper()}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    assert sources(room), f"{room} has no source"
    for path in sources(room):
        for name in imported(path):
            top = name.partition(".")[0]
            where = f"{path.relative_to(ROOT)} imports {name}"
            if top in ROOMS and top != room:
                virtual = room == "server_app" and path.name == "app.py" and top == "simulations"
                assert top in ALLOWED[room] or virtual, where
            assert top not in FORBIDDEN.get(room, ()), where
            if room in ONLY and top == "gpu_runtime":
                allowed = ONLY[room]
                assert any(name == part or name.startswith(part + ".") or part.startswith(name) for part in allowed), (
                    where
                )
            if top == "flwr" and path.name != "in_process_grid.py":
                assert name.startswith(FLWR_PUBLIC), f"{where}, which is private to Flower"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_no_pickle_anywhere() -> None:
    for room in ROOMS:
        for path in sources(room):
            names = imported(path)
            assert not names & {"pickle", "dill", "cloudpickle"}, path
            assert "torch.load(" not in path.read_text(), path

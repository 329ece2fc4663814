"""The code of the documentation works."""

import re
from pathlib import Path

import pytest

from simulations.fleet import parse_fleet
from tests.test_federation import federate

DOCS = Path(__file__).parents[1] / "docs"


def block(page: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found, f"{page} has no {language} block"
    return found.group(1)


def test_the_own_task_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("own-task.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    _, summary = federate(
        tmp_path / "run", tasks="tiny-digits,my_pkg.my_task:Wine", rounds=5, data__partitioner="dirichlet"
    )
    assert summary["final"]["wine"]["accuracy"] > 0.8
    assert any("my_pkg.my_task:Wine" in note or "wine" in note for note in summary["notes"])


def test_the_fleet_of_the_docs_parses_and_deals() -> None:
    fleet = parse_fleet("my-fleet", block("fleets.md", "toml"))
    clients = fleet.deal(fleet.num_clients, ("digits", "detection", "segmentation"))
    assert [client.name for client in clients] == ["server-room", "server-room-2", "phone", "phone-2", "phone-3"]
    assert "digits" not in [holding.ref for holding in clients[2].holdings]
    assert clients[2].dropout == 0.1


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"

"""Print the requirements of pyproject.toml, with those of the dev group, for `pip install -r`."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print("\n".join(project["project"]["dependencies"] + project["dependency-groups"]["dev"]))

"""Makes this folder's helpers importable whatever pytest's import mode."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# As one folder up: torch, numpy and pytest may be all there is.
if importlib.util.find_spec("hypothesis") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if "from hypothesis" in path.read_text()]

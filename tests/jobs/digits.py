"""The digits example, for torchrun's `--run-path`, which does not search the folder of a script for its imports."""

import runpy
import sys
from pathlib import Path

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"

sys.path[:0] = [str(DIGITS), str(Path(__file__).parent)]
runpy.run_path(str(DIGITS / "main.py"), run_name="__main__")

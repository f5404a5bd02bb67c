"""The benchmarks are not part of the installed package: they are found in the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

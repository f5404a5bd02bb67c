"""The names that a release promises: they go only after a deprecation (docs/reference/compatibility.md).

``python tests/test_public_names.py`` writes ``tests/public_names.txt`` again; what it loses needs a changelog entry.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hiercomm
from lightning_hiercomm.__main__ import main
from lightning_hiercomm.checkpoints import FORMAT
from lightning_hiercomm.schemes import SCHEMES

STORED = Path(__file__).with_name("public_names.txt")
COMPATIBILITY = Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"


def arguments_of(name: str) -> list[str]:
    """The arguments of a class that users construct, without those of Lightning and those that it does not take."""
    if name in ("Graph", "Scheme", "Topology"):
        return []
    found: list[str] = []
    for each in getattr(lightning_hiercomm, name).__mro__:
        if each.__module__.startswith("lightning_hiercomm") and "__init__" in vars(each):
            parameters = list(inspect.signature(each).parameters.values())
            found += [
                p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name[0] != "_"
            ]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break  # it passes nothing on to its bases
    return sorted(set(found))


def public_names() -> dict[str, list[str]]:
    """Every group of names, and every public class with its arguments."""
    registered = {*StrategyRegistry.available_strategies(), *STRATEGY_REGISTRY.available_strategies()}
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["--help"])
    return {
        "strategies": sorted(name for name in registered if name.startswith("hierarchical")),
        "schemes": sorted(SCHEMES),
        "commands": sorted(re.findall(r"^    (\w+)\b", printed.getvalue(), re.MULTILINE)),
        **{name: arguments_of(name) for name in sorted(lightning_hiercomm.__all__)},
    }


def written(names: dict[str, list[str]]) -> str:
    return "".join(f"{name}: {' '.join(values)}".rstrip() + "\n" for name, values in names.items())


def stored() -> dict[str, list[str]]:
    lines = (line.partition(":") for line in STORED.read_text().splitlines())
    return {name: values.split() for name, _, values in lines}


def test_promised_names_and_arguments_exist_and_every_public_class_is_promised():
    names, promised = public_names(), stored()
    assert list(promised) == list(names), "python tests/test_public_names.py"
    assert {name: {*values} - {*names[name]} for name, values in promised.items()} == {name: set() for name in names}


def test_documentation_names_the_checkpoint_format():
    assert f"reads and writes format {FORMAT}" in " ".join(COMPATIBILITY.read_text().split())


if __name__ == "__main__":
    STORED.write_text(written(public_names()))

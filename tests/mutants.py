"""What the tests would notice: small changes of the core, one at a time, and whether a test fails.

``python -m tests.mutants --sample 300 --seed 1 --seconds 3000 --keep mutants.json``, in a checkout, in an environment
with ``mutmut``, whose mutation operators these are, but for those of strings, which change messages. Every mutant is a
copy of the package with one change, in a fork that has imported torch and Lightning already. It meets, until one kills
it,

- ``own``: the tests of its module, and random combinations of everything,
- ``day``: the covering sets of tests/schemes/test_wires.py and test_diloco.py, and the rest of its folder's tests,
- ``night``: the cells of those files that only the nightly job runs.

What ``night`` kills is what covering sets lose. A call with the same file goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_hiercomm"
CORE = ("schemes", "comm", "batches", "checkpoints/companion.py")
ELSEWHERE = ("comm/streams.py", "comm/mpi.py")
"""Which a machine without GPU cannot run, and which needs a launch for every mutant."""
STAGES = ("own", "day", "night")
SECONDS = {"own": 150, "day": 400, "night": 400}
"""After which a mutant hangs, and is killed."""


def mutants() -> Iterator[dict[str, Any]]:
    """All of the core: where, and what becomes of it."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.mutators import mutation_operators, operator_string

    operators = [(kind, operator) for kind, operator in mutation_operators if operator is not operator_string]
    skipped = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom, libcst.Raise, libcst.BaseString)
    for path in sorted(path for part in CORE for path in _files(ROOT / PACKAGE / part)):
        name = str(path.relative_to(ROOT / PACKAGE))
        if name in ELSEWHERE:
            continue
        wrapper = MetadataWrapper(libcst.parse_module(path.read_text()))
        positions = wrapper.resolve(PositionProvider)
        nodes: list[libcst.CSTNode] = [wrapper.module]
        while nodes:
            node = nodes.pop()
            if isinstance(node, skipped):
                continue
            nodes.extend(reversed(node.children))
            for kind, operator in operators:
                if not isinstance(node, kind):
                    continue
                for mutated in operator(node):  # type: ignore[operator]
                    if wrapper.module.code_for_node(mutated) != wrapper.module.code_for_node(node):
                        line = positions[node].start.line
                        made = {"file": name, "line": line, "operator": operator.__name__}
                        yield {**made, "change": (wrapper.module, node, mutated)}


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [*path.rglob("*.py")]


def drawn(number: int, seed: int) -> list[dict[str, Any]]:
    """So many of them, in a random order, with the line before and after."""
    everything = [*mutants()]
    chosen = random.Random(seed).sample(everything, min(number, len(everything)))
    for mutant in chosen:
        module, node, mutated = mutant.pop("change")
        mutant["text"] = module.deep_replace(node, mutated).code
        before = (ROOT / PACKAGE / mutant["file"]).read_text().splitlines()
        after = mutant["text"].splitlines()
        changed = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
        mutant["before"], mutant["after"] = (line.strip() for line in changed[0]) if changed else ("", "")
    print(f"{len(chosen)} of {len(everything)} mutants")
    return chosen


def arguments_of(mutant: dict[str, Any], stage: str) -> list[str]:
    """What pytest is to run."""
    path = Path(mutant["file"])
    folder, stem = path.parts[0], path.stem
    large = ["tests/schemes/test_wires.py", "tests/schemes/test_diloco.py"]
    if stage == "night":
        return ["--nightly", "-m", "nightly", *large]
    own = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob(f"test_{stem}*.py") if folder in p.parts}
    beside = {"words": "agreement", "carriers": "agreement", "health": "nonfinite", "steps_delay": "steps_delay"}
    for part in path.parts[1:-1]:
        named = (ROOT / "tests" / folder).rglob(f"test_{beside[part]}*.py") if part in beside else ()
        own |= {str(p.relative_to(ROOT)) for p in named}
        if (ROOT / "tests" / folder / part).is_dir():
            own.add(f"tests/{folder}/{part}")
    if folder == "checkpoints":
        own.add("tests/checkpoints")
    elif folder in ("schemes", "comm"):
        own.add("tests/test_combinations.py" if folder == "schemes" else "tests/schemes/test_gradients.py")
    else:
        own |= {f"tests/batches/test_{name}.py" for name in ("partition", "sampler", "heterogeneous", "speed")}
    if stage == "own":
        return sorted(own)
    rest = {str(p.relative_to(ROOT)) for p in (ROOT / "tests" / folder).rglob("test_*.py")}
    return [*large, *sorted(rest - own - {*large})] if folder in ("schemes", "comm") else sorted(rest - own)


def outcome(mutant: dict[str, Any], stage: str) -> str:
    """``killed``, ``hung`` or ``survived``."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / PACKAGE / mutant["file"]).write_text(mutant["text"])
        tests = arguments_of(mutant, stage)
        if not tests:
            return "survived"
        child = os.fork()
        if child == 0:
            _run(Path(folder), tests)
        deadline = time.monotonic() + SECONDS[stage]
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hung"
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it left
        return "survived" if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else "killed"


def _run(folder: Path, tests: Sequence[str]) -> None:
    code = 1
    try:
        os.setsid()
        with open(folder / "said", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        import pytest

        quietly = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "--timeout=60")
        code = int(pytest.main([*quietly, *tests]))
    finally:
        os._exit(code)


def _prepare() -> None:
    """Import once what every fork needs, and nothing of the package."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "pytest", "hypothesis", "torchmetrics", "tqdm"):
        importlib.import_module(name)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    assert PACKAGE not in sys.modules
    gc.freeze()


def table(sample: Sequence[dict[str, Any]]) -> str:
    """Markdown: by part of the core, how many were killed by what."""
    lines = [
        "| part | mutants | killed by own tests | by the day's others | only by night | survived |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    counts: dict[str, Counter[str]] = {}
    for mutant in sample:
        for part in (mutant["file"].split("/")[0], "all"):
            counts.setdefault(part, Counter())[_fate(mutant)] += 1
    for part in sorted(counts, key=lambda part: (part == "all", part)):
        count = counts[part]
        if total := count.total() - count["untried"]:
            cells = [f"{count[name]}" for name in (*STAGES, "survived")]
            lines.append(f"| {part} | {total} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fate(mutant: dict[str, Any]) -> str:
    for stage in STAGES:
        if mutant.get(stage) in ("killed", "hung"):
            return stage
    return "survived" if "own" in mutant else "untried"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--keep", type=Path, default=Path("mutants.json"))
    arguments = parser.parse_args()
    began = time.monotonic()
    known = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else []
    fates = {(m["file"], m["line"], m["operator"], m["after"]): m for m in known}
    sample = [
        {**m, **fates.get((m["file"], m["line"], m["operator"], m["after"]), {})}
        for m in drawn(arguments.sample, arguments.seed)
    ]
    _prepare()
    for stage in arguments.stages:
        reached = [m for m in sample if _fate(m) in ("survived", "untried") and stage not in m]
        todo = [m for m in reached if all(m.get(before) == "survived" for before in STAGES[: STAGES.index(stage)])]

        def one(mutant: dict[str, Any], stage: str = stage) -> None:
            if time.monotonic() - began < arguments.seconds:
                mutant[stage] = outcome(mutant, stage)
                change = f"{mutant['before']}  ->  {mutant['after']}"
                print(f"{mutant[stage]:8} {stage:5} {mutant['file']}:{mutant['line']}  {change}", flush=True)
                kept = [{name: value for name, value in m.items() if name != "text"} for m in sample]
                arguments.keep.write_text(json.dumps(kept, indent=0))

        with ThreadPoolExecutor(arguments.jobs) as threads:
            [*threads.map(one, todo)]
    print(table(sample))


if __name__ == "__main__":
    main()

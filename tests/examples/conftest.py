"""Runs the examples' programs in forks that need not import Lightning; test_clusters.py starts Python itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forked import ForkedPython, stand_in_for_python
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Folder:
    examples = EXAMPLES
    digits = EXAMPLES / "digits"

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, script: str, *arguments: str | Path) -> str:
        """What ``python examples/script *arguments`` prints; ranks that it executes are forks, too."""
        environment, command = {**os.environ, "OMP_NUM_THREADS": "1"}, [self.examples / script, *arguments]
        process = ForkedPython(command, environment, self.path / "printed", self.path, stand_in_for_python())
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return output

    def fit_digits(self, *arguments: str | Path) -> str:
        """What the digits example prints with its configuration, and others laid over it."""
        return self.run("digits/main.py", "fit", "--config", self.digits / "config.yaml", *arguments)

    def make_imagenet(self, training: int, validation: int) -> Path:
        """So many pictures of each of two classes, in folders as ImageNet's."""
        root = self.path / "imagenet"
        for split, count in (("train", training), ("val", validation)):
            for kind, gray in (("dark", 30), ("light", 220)):
                (root / split / kind).mkdir(parents=True)
                for number in range(count):
                    Image.new("RGB", (48, 40), (gray,) * 3).save(root / split / kind / f"{number}.png")
        return root

    @staticmethod
    def accuracy(output: str) -> float:
        """The test accuracy that a run of it printed, in per cent."""
        found = re.search(r"Test accuracy of the averaged model: ([\d.]+)%", output)
        assert found is not None, output
        return float(found[1])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="session")
def all_reduce_accuracy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What the baseline, all-reduce at every step, reaches on the digits."""
    folder = Folder(tmp_path_factory.mktemp("all_reduce"))
    return folder.accuracy(folder.fit_digits("--config", folder.digits / "all_reduce.yaml"))

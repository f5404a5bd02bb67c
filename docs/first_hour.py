"""Walks a newcomer's path in a fresh virtual environment, and writes what was typed and printed to docs/first_hour.md.

python docs/first_hour.py        # needs a package index; some minutes
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
DIGITS = "examples/digits/main.py fit --config examples/digits/config.yaml"
SHORT = "--trainer.max_epochs=4 --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
TORCHRUN = (
    "{venv}/bin/torchrun --nnodes 2 --node-rank {node} --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29533"
    f" {DIGITS} --trainer.devices=2 --trainer.num_nodes=2 --trainer.strategy.init_args.ranks_per_node=null {SHORT}"
)
MODULE_OF_OTHERS = """\
import pytorch_lightning as pl  # as darts, neuralforecast, lightly and others do
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_hiercomm.pytorch_lightning import CommunicationMonitor, HierarchicalStrategy

if __name__ == "__main__":
    strategy = HierarchicalStrategy("gossip", ranks_per_node=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=2,
        callbacks=[CommunicationMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
"""
NOTEBOOK = """\
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("examples/notebook.ipynb", as_version=4)
NotebookClient(notebook, timeout=300).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        print(output.get("text", "").strip() or ("[a picture]" if "image/png" in data else data.get("text/plain", "")))
"""
NOISE = re.compile(
    r"^(GPU|TPU|HPU|💡|Initializing distributed|-{20,}|distributed_backend|All distributed processes|\*{20,}|\s*$)"
    r"|OMP_NUM_THREADS|does not have many workers|^W\d{4} |isinstance\(tree|warn\(|LeafSpec|FutureWarning|\[notice\]"
    r"|IPKernelApp"
)


class Walk:
    """Types commands, and takes down what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.lines: list[str] = []
        self.environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONNOUSERSITE": "1"}

    def say(self, text: str) -> None:
        self.lines += [text, ""]

    def run(self, *commands: str, shows: bool = True) -> None:
        """Run commands beside each other; the run ends if one fails."""
        began = time.monotonic()
        files = [(self.folder / f"output-{index}").open("w+", newline="") for index in range(len(commands))]
        processes = [
            subprocess.Popen(
                ["bash", "-c", command.format(venv=self.venv)],
                cwd=CHECKOUT,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for command, file in zip(commands, files, strict=True)
        ]
        for process in processes:
            process.wait(timeout=840)
        seconds = time.monotonic() - began
        self.lines.append("```console")
        for command, file, process in zip(commands, files, processes, strict=True):
            file.seek(0)
            printed = self._without_noise(file.read())
            typed = command.format(venv=".venv").replace(f"{self.folder}/", "").replace(sys.executable, "python3")
            self.lines.append(f"$ {typed}")
            self.lines += printed if shows or process.returncode else []
            if process.returncode:
                sys.exit("\n".join(self.lines) + f"\n{command} failed")
        self.lines += ["```", "", f"{seconds:.0f} s.", ""]
        print("\n".join(self.lines[-40:]), flush=True)

    def _without_noise(self, printed: str) -> list[str]:
        printed = (
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed).replace(str(self.folder), "").replace(str(CHECKOUT), ".")
        )
        last_states = [line.split("\r")[-1].rstrip() for line in printed.replace("\r\n", "\n").split("\n")]
        return [line for line in last_states if not NOISE.search(line)]


def main() -> None:
    """Walk, and write the page."""
    with tempfile.TemporaryDirectory() as name:
        walk = Walk(Path(name))
        python = f"{sys.executable} -m venv {{venv}}"
        walk.say("# A newcomer's first hour")
        where = f"{platform.system()}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
        walk.say(
            "What a newcomer types in a checkout, in a fresh virtual environment, and what the programs print; only"
            " what pip and Lightning say of themselves is left out. Written by `python docs/first_hour.py`, on"
            f" {where}, {time.strftime('%-d %B %Y')}; how long a run took, and waited, depends on what else the"
            " machine does."
        )
        walk.say("## Install")
        walk.run(f"{python} && {{venv}}/bin/pip install --quiet '.[cli,examples]' nbclient ipykernel", shows=False)
        walk.run("{venv}/bin/pip list | grep -iE '^(lightning|pytorch-lightning|lightning-hiercomm|torch) '")
        walk.say("## The quickstart")
        walk.say("Four processes play two nodes of two ranks, which average their parameters every 8 steps.")
        walk.run("{venv}/bin/python examples/quickstart.py")
        walk.say("## Another scheme, from the command line")
        walk.say("The configuration names `PeriodicAveraging(4)`;")
        walk.run(f"{{venv}}/bin/python {DIGITS} {SHORT}")
        walk.say("and the name of a scheme in its place stands for that scheme with its own defaults:")
        walk.run(f"{{venv}}/bin/python {DIGITS} {SHORT} --trainer.strategy.init_args.scheme=diloco")
        walk.say("## A notebook")
        program = walk.folder / "run_notebook.py"
        program.write_text(NOTEBOOK)
        walk.run(f"{{venv}}/bin/python {program}")
        walk.say("## A module of `pytorch_lightning`")
        program = walk.folder / "module_of_others.py"
        program.write_text(MODULE_OF_OTHERS)
        walk.say(f"```python\n{MODULE_OF_OTHERS}```")
        walk.run(f"{{venv}}/bin/python {program}")
        walk.say("## Two nodes, by two torchruns")
        walk.run(*(TORCHRUN.replace("{node}", str(node)) for node in (0, 1)))
        PAGE.write_text("\n".join(walk.lines).rstrip() + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()

"""Run the programs of the tutorials, and write what they print to `docs/tutorials/transcripts`.

    python docs/transcripts.py                # in a fresh virtual environment; needs a package index
    python docs/transcripts.py --venv .venv   # in one that has everything; minutes

Lines that Lightning and torch print about themselves are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TRANSCRIPTS = CHECKOUT / "docs" / "tutorials" / "transcripts"
DIGITS = "examples/digits/main.py fit --config examples/digits/config.yaml"
SHORT = "--trainer.max_epochs=4 --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
TORCHRUN = (
    "{bin}/torchrun --nnodes 2 --node-rank {node} --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29533"
    f" {DIGITS} --trainer.devices=2 --trainer.num_nodes=2 --trainer.strategy.init_args.ranks_per_node=null {SHORT}"
)
LIGHTHOUSE = "127.0.0.1:29577"
ELASTIC = (
    "{bin}/torchrun --nnodes 1 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --max-restarts 9"
)
NOISE = re.compile(
    r"^(GPU|TPU|HPU|💡|Initializing distributed|-{20,}|distributed_backend|All distributed processes|\*{20,}|\s*$)"
    r"|OMP_NUM_THREADS|does not have many workers|^[EWI]\d{4} |isinstance\(tree|warn\(|LeafSpec|FutureWarning"
    r"|Seed set|Loading `train_dataloader`|^Epoch|Modules in|Total (params|estimated|Flops)|rainable params"
    r"|^ *\| Name|^0 |\[notice\]|has waited|^Training: "
)


def without_noise(printed: str, folder: Path) -> list[str]:
    """Return the lines that this package and the examples print."""
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed).replace(str(folder), "").replace(str(CHECKOUT), ".")
    last_states = [line.split("\r")[-1].rstrip() for line in printed.replace("\r\n", "\n").split("\n")]
    return [line for line in last_states if not NOISE.search(line)]


class Session:
    """Runs commands in a virtual environment."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder, self.bin = folder, venv / "bin"
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
        self.environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONNOUSERSITE": "1"}

    def start(self, command: str, output: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command whose output goes to a file of the temporary folder."""
        with (self.folder / output).open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", "exec " + command.replace("{bin}", str(self.bin))],
                cwd=CHECKOUT,
                env=self.environment | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what was started and still runs."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def printed(self, output: str) -> str:
        """Return what a command has printed so far."""
        return (self.folder / output).read_text()

    def record(self, name: str, *commands: str) -> None:
        """Run commands at the same time, and write what the first one prints.

        Raises:
            RuntimeError: If a command fails.
        """
        processes = [self.start(command, f"output-{index}") for index, command in enumerate(commands)]
        for index, process in enumerate(processes):
            if process.wait(timeout=600):
                raise RuntimeError(f"{commands[index]} failed:\n{self.printed(f'output-{index}')}")
        self.write(name, self.printed("output-0"))

    def write(self, name: str, printed: str) -> None:
        """Write a transcript."""
        text = "\n".join(without_noise(printed, self.folder))
        (TRANSCRIPTS / f"{name}.txt").write_text(f"{text}\n")
        print(f"--- {name}\n{text}", flush=True)

    def wait_for(self, text: str, output: str) -> None:
        """Wait until a command has printed something.

        Raises:
            TimeoutError: After two minutes.
        """
        end = time.monotonic() + 120
        while text not in self.printed(output):
            if time.monotonic() > end:
                raise TimeoutError(f"{output} never printed {text!r}:\n{self.printed(output)}")
            time.sleep(0.1)

    def record_elastic(self) -> None:
        """Kill one of two elastic nodes while they train; write what the other one prints."""
        self.start(f"{{bin}}/python -m lightning_hiercomm lighthouse --dead-after 2 --bind {LIGHTHOUSE}", "light")
        self.wait_for("listens", "light")
        node = f"{ELASTIC} examples/elastic.py"
        a = self.start(node, "a", HIERCOMM_LIGHTHOUSE=LIGHTHOUSE, HIERCOMM_NODE="a")
        self.wait_for("of parameters", "a")
        b = self.start(node, "b", HIERCOMM_LIGHTHOUSE=LIGHTHOUSE, HIERCOMM_NODE="b")
        self.wait_for("node b", "a")
        time.sleep(5)
        children = Path(f"/proc/{b.pid}/task/{b.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        a.wait(timeout=300)
        self.write("elastic", self.printed("a"))

    def record_hang(self) -> None:
        """Write the report of a program in which ranks wait for each other."""
        program = self.start("{bin}/python docs/howto/hang.py", "hang")
        if program.wait(timeout=300) == 0:
            raise RuntimeError("docs/howto/hang.py did not hang")
        report = re.search(
            r"^lightning_hiercomm: no rank made progress[^\n]*: the ranks wait.*?^All ranks must[^\n]*",
            self.printed("hang"),
            re.M | re.S,
        )
        if report is None:
            raise RuntimeError(f"there is no report:\n{self.printed('hang')}")
        lines = textwrap.wrap(report[0].splitlines()[-1], 115, subsequent_indent="    ", break_on_hyphens=False)
        self.write("hang", "\n".join([*report[0].splitlines()[:-1], *lines]))


def main() -> None:
    """Record all transcripts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path)
    parser.add_argument(
        "--only", nargs="+", default=["quickstart", "digits", "digits_diloco", "torchrun", "elastic", "hang"]
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, venv = Path(name), arguments.venv
        if venv is None:
            venv = folder / "venv"
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            wanted = ".[cli,examples,elastic]"
            subprocess.run([venv / "bin/pip", "install", "--quiet", wanted], check=True, cwd=CHECKOUT)
        session = Session(folder, venv.absolute())
        commands = {
            "quickstart": ["{bin}/python examples/quickstart.py"],
            "digits": [f"{{bin}}/python {DIGITS} {SHORT}"],
            "digits_diloco": [f"{{bin}}/python {DIGITS} {SHORT} --trainer.strategy.init_args.scheme=diloco"],
            "torchrun": [TORCHRUN.replace("{node}", str(node)) for node in (0, 1)],
        }
        try:
            for each in arguments.only:
                if each in ("elastic", "hang"):
                    getattr(session, f"record_{each}")()
                else:
                    session.record(each, *commands[each])
        finally:
            session.close()


if __name__ == "__main__":
    main()

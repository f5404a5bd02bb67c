"""Virtual environments for the outside peers.

Each gets its own, made here. They see the packages of the environment that runs the benchmarks behind their own (one
``.pth`` line), so every contender computes with the same torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """An outside package: what pip installs, and the import that shows that it works."""

    requirements: tuple[str, ...]
    check: str


PEERS = {
    "accelerate": Peer(("accelerate>=1.10",), "from accelerate.local_sgd import LocalSGD"),
    "torchft": Peer(("torchft==0.2.0",), "import torchft.local_sgd, torchft.coordination"),
}


class PeerMissing(Exception):
    """The peer cannot be installed or imported here; the message has the reason."""


def home() -> Path:
    """Where the environments live; ``HIERCOMM_BENCHMARK_VENVS`` moves it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("HIERCOMM_BENCHMARK_VENVS", cache / "lightning-hiercomm-benchmarks"))


def interpreter(venv: str) -> str:
    """The Python of an environment, made if need be. Raises :class:`PeerMissing`."""
    if venv == "main":
        return sys.executable
    peer, folder = PEERS[venv], home() / venv
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        site = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(site) / "benchmarks-main.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements)
        _run(str(python), "-c", peer.check)
        (folder / "ready").touch()
    return str(python)


def _run(*argv: str) -> str:
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=600).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise PeerMissing(f"{' '.join(argv[1:4])} ...: {lines[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(str(error)) from error

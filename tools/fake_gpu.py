"""A GPU where there is none: ``FAKE_GPU=1 pytest -m gpu tests`` runs the GPU's variants of tests on it.

It computes with the CPU's kernels on a device of its own (``fake_device.cpp``, which a C++ compiler must be there
to make), so what forgets to move a tensor fails here, too, and streams are those of ``fake_streams.py``. What it
says nothing about: CUDA's own kernels, their last bits, and how long anything takes.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_streams import FakeDevice

NAME = "fake"


def is_wanted() -> bool:
    return os.environ.get("FAKE_GPU") == "1"


@cache
def library() -> Any:
    """What ``fake_device.cpp`` offers; compiled once for each version of torch."""
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(f"fake_{torch.__version__}", verbose=False))
    made = cpp_extension.load(
        "fake_device", [str(Path(__file__).with_name("fake_device.cpp"))],
        extra_cflags=["-O0", "-g0"], build_directory=str(folder),
    )  # fmt: skip
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    for name, stands_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_is_in_bad_fork": lambda: False,
        "device": lambda index: nullcontext(),
    }.items():
        setattr(module, name, stands_in)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return made


@contextmanager
def fake_gpu() -> Iterator[tuple[torch.device, FakeDevice]]:
    """The device, and what watches its streams; in the end nothing must have been used out of order."""
    made = library()
    with pytest.MonkeyPatch.context() as patch, FakeDevice().installed(lambda device: device.type == NAME) as seen:
        for name, stands_in in {
            "set_sync_debug_mode": lambda mode: made.forbid_waiting(mode == "error"),
            "memory_allocated": made.allocated,
            "max_memory_allocated": made.most_allocated,
            "reset_peak_memory_stats": made.forget_the_most,
            "make_graphed_callables": lambda module, samples: module,
        }.items():
            patch.setattr(torch.cuda, name, stands_in)
        patch.setattr(torch.nn.Module, "compile", lambda module: None)
        yield torch.device(NAME, 0), seen
    made.forbid_waiting(False)
    assert not seen.trouble, "\n".join(seen.trouble)

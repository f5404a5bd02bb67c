"""Triton kernels against PyTorch's operations, bit for bit: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
import threading

import harness
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import on_push

from lightning_hiercomm.comm import fused
from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.encoded_sum import EncodedSum
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld

triton = pytest.importorskip("triton", reason="comes with torch's CUDA wheels")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of NumPy, in the interpreter

NAMED = {"int8": Quantized(8), "int4": Quantized(4), "sparse2": LargestFour()}
ODD = [Quantized(8, block=2), Quantized(4, block=6), LargestFour(block=16), LargestFour(block=48)]
BY_NIGHT = [*NAMED.values(), *(pytest.param(codec, marks=pytest.mark.nightly) for codec in ODD)]
# not both: the interpreter changes Triton for the rest of the process
WHERE = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["interpreter"]

special = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 3.4e38, -(2.0**127), 1.0]
floats = st.one_of(st.floats(width=32), st.sampled_from(special), st.floats(-2, 2, width=32))
lengths = st.sampled_from([1, 2, 3, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2600])
vectors = st.tuples(st.lists(floats, min_size=1, max_size=20), lengths, st.integers(0, 2**32))
"""Some numbers that come first, a length, and a seed for the other numbers."""

many = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Recorded(fused.Runtime):
    """Runs kernels, and records their names."""

    def __init__(self, kernels=None):
        self.launched, self._kernels, self._lock = [], kernels, threading.Lock()

    def takes(self, device):
        return self.works and (self._kernels is not None or super().takes(device))

    def kernel(self, name):
        self.launched.append(name)
        if self._kernels is None:
            return super().kernel(name)
        kernel, lock = getattr(self._kernels, name), self._lock

        class OneAtATime:
            def __getitem__(self, grid):
                def launch(*arguments, **named):
                    with lock:  # the interpreter has one grid for all threads
                        kernel[grid](*arguments, **named)

                return launch

        return OneAtATime()


@pytest.fixture(params=WHERE)
def runtime(request, monkeypatch):
    """Kernels in Triton's interpreter, with tensors of the CPU, or on a GPU."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        recorded = Recorded()
    else:
        recorded = Recorded(_interpreted(monkeypatch))
    monkeypatch.setattr(fused, "runtime", recorded)
    return recorded


def _interpreted(monkeypatch):
    """The kernels, as the environment variable TRITON_INTERPRET would make them if it were set from the start."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (triton.language, triton.language.standard):
        for name, function in vars(module).copy().items():
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(function.fn))
    specification = importlib.util.find_spec("lightning_hiercomm.comm.kernels")
    kernels = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(kernels)
    return kernels


@pytest.fixture
def eager(monkeypatch, runtime):
    """Call a function with PyTorch's operations, on the CPU."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "runtime", type("Off", (), {"takes": lambda self, device: False})())
            return function()

    return call


def drawn(vector, number=0):
    first, numel, seed = vector
    generator = torch.Generator().manual_seed(seed + number)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    values[: len(first)] = torch.tensor(first, dtype=torch.float32)[:numel]
    return values


def here(*tensors):
    return [tensor.clone().to(harness.place.device) for tensor in tensors]


def assert_same_values(ours, theirs):
    """Equal bits, except of NaN, which differ between processors and between one and several elements at a time."""
    ours, theirs = ours.cpu(), theirs.cpu()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0).view(torch.int32), theirs.nan_to_num(0).view(torch.int32))


def assert_same_payload(ours, theirs, codec, numel):
    blocks = -(-numel // codec.block)
    scales = [each.cpu()[..., : 2 * blocks].contiguous().view(torch.bfloat16).float() for each in (ours, theirs)]
    assert_same_values(*scales)
    assert torch.equal(ours.cpu()[..., 2 * blocks :], theirs.cpu()[..., 2 * blocks :])


def empty_payload(codec, numel):
    return torch.full((codec.payload_numel(numel, torch.float32),), 255, dtype=torch.uint8)


def encode_with_feedback(codec, values, residual, payload, chunk=None):
    codec.encode(values, payload, chunk, residual)


@pytest.mark.parametrize("codec", BY_NIGHT, ids=str)
@given(vector=vectors)
@many
def test_encode_and_decode_give_the_bits_of_pytorch(codec, vector, runtime, eager):
    values = drawn(vector)
    expected = eager(lambda: codec.encode(values, empty_payload(codec, len(values))))
    payload = codec.encode(*here(values, empty_payload(codec, len(values))))
    assert_same_payload(payload, expected, codec, len(values))
    out = codec.decode(*here(expected, torch.empty_like(values)))
    assert_same_values(out, eager(lambda: codec.decode(expected, torch.empty_like(values))))
    assert {"encode", "decode"} <= {*runtime.launched}


@pytest.mark.parametrize("codec", BY_NIGHT, ids=str)
@given(vector=vectors, zeros=st.booleans())
@many
def test_feedback_gives_the_bits_of_pytorch_and_a_finite_residual(codec, vector, zeros, runtime, eager):
    values = drawn(vector) * (not zeros)
    residual = drawn(vector, 1).nan_to_num(0, 0, 0)
    expected = values.clone(), residual.clone(), empty_payload(codec, len(values))
    ours = here(*expected)
    eager(lambda: encode_with_feedback(codec, *expected))
    encode_with_feedback(codec, *ours)
    assert_same_values(ours[0], expected[0])
    assert_same_values(ours[1], expected[1])
    assert_same_payload(ours[2], expected[2], codec, len(values))
    assert ours[1].isfinite().all()
    assert runtime.launched[-1] == "encode"


@pytest.mark.parametrize("feedback", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("codec", BY_NIGHT, ids=str)
@given(vector=vectors, place=st.integers(0, 3))
@many
def test_sums_and_their_payloads_have_the_bits_of_pytorch(codec, vector, place, feedback, runtime, eager):
    own, *others = (drawn(vector, number) for number in range(4))
    payloads = eager(lambda: codec.encode(torch.stack(others)))
    expected, ours = own.clone(), here(payloads, own)
    eager(lambda: codec.add_decoded(payloads, expected, place))
    codec.add_decoded(*ours, place)
    assert_same_values(ours[1], expected)

    residual = drawn(vector, 4).nan_to_num(0, 0, 0) if feedback else None
    encoded, kept = empty_payload(codec, len(own)), None if residual is None else residual.clone()
    on_device = here(payloads, own, empty_payload(codec, len(own)))
    on_device.append(None if residual is None else here(residual)[0])
    eager(lambda: codec.add_and_encode(payloads, own, place, encoded, kept))
    codec.add_and_encode(*on_device[:2], place, *on_device[2:])
    assert_same_payload(on_device[2], encoded, codec, len(own))
    if feedback:
        assert_same_values(on_device[3], kept)
    assert runtime.launched[-2:] == ["add", "add_and_encode"]


@pytest.mark.pairwise
@pytest.mark.parametrize("numel", [1, 3, 700, 5 * 512, 5 * 512 + 7, 6 * 512])
@pytest.mark.parametrize("codec", NAMED.values(), ids=NAMED)
def test_chunks_of_a_tensor_are_encoded_by_one_launch(codec, numel, runtime, eager):
    values, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    chunk = min(numel, 2 * 512)
    payload = torch.zeros(8, codec.payload_numel(chunk, torch.float32), dtype=torch.uint8)  # with rows of no chunk
    expected = values.clone(), residual.clone(), payload
    ours = here(*expected)
    eager(lambda: encode_with_feedback(codec, *expected, chunk))
    encode_with_feedback(codec, *ours, chunk)
    for own, wanted in zip(ours, expected, strict=True):
        assert torch.equal(own.cpu(), wanted)
    out = codec.decode(ours[2], torch.empty_like(ours[0]), chunk)
    assert torch.equal(out, ours[0])
    assert runtime.launched == ["encode", "decode"]


@pytest.mark.parametrize(
    ("codec", "members"),
    [
        *((NAMED["int4"], members) for members in (2, 3)),
        *(pytest.param(NAMED[name], 3, marks=pytest.mark.nightly) for name in ("int8", "sparse2")),
    ],
    ids=str,
)
def test_a_sum_of_encoded_values_takes_at_most_three_kernels(members, codec, runtime, eager):
    numel, rounds = 1500, 2

    def sums(rank, world):
        connect = world.connect(rank, Meter())
        group = [range(members)]
        encoded_sum = EncodedSum(codec, connect(group, "inter"), connect(group, "inter"))
        with harness.place.rank():
            parts = [torch.randn(numel, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(rounds)]
            parts = here(*parts)
            feedback = encoded_sum.feedback(parts[0])
            for part in parts:
                encoded_sum.launch(part, feedback)()
        return [tensor.cpu() for tensor in (*parts, feedback.sender, feedback.reducer)]

    ours = ThreadWorld(members).run(sums)
    per_sum = ["encode", "add"] if members == 2 else ["add_and_encode", "decode", "encode"]
    assert sorted(runtime.launched) == sorted(per_sum * members * rounds)
    for own, expected in zip(ours, eager(lambda: ThreadWorld(members).run(sums)), strict=True):
        assert all(map(torch.equal, own, expected))


def test_a_kernel_that_does_not_compile_is_reported_once_and_replaced(monkeypatch, caplog):
    class Broken(fused.Runtime):
        def takes(self, device):
            return self.works

        def kernel(self, name):
            raise RuntimeError("PTX of this GPU is unknown")

    codec, values = Quantized(4), torch.randn(1000)
    expected = codec.encode(values)
    monkeypatch.setattr(fused, "runtime", Broken())
    with caplog.at_level(logging.WARNING):
        assert torch.equal(codec.encode(values), expected)
        assert torch.equal(codec.encode(values), expected)
    (record,) = caplog.records
    assert "Triton could not run the kernel 'encode'" in record.getMessage()
    assert "PTX of this GPU is unknown" in record.getMessage()


def test_tensors_of_the_cpu_take_no_kernel():
    codec, values = Quantized(8), torch.zeros(3)
    assert not fused.takes(codec, codec.encode(values), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_kernels_calculate_with_float32_only(dtype, runtime):
    values = torch.ones(600, dtype=dtype, device=harness.place.device)
    Quantized(8).decode(Quantized(8).encode(values), values)
    assert runtime.launched == []


COMPILE = """
import importlib.util
import sys
package = importlib.util.find_spec("lightning_hiercomm")
sys.modules[package.name] = importlib.util.module_from_spec(package)  # without __init__.py, which imports Lightning

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_hiercomm.comm import fused, kernels
from lightning_hiercomm.comm.wire import codec_named

name, wire, architecture = sys.argv[1:]
codec = codec_named(wire)
kernel = getattr(kernels, name)
known = {**fused.constants(codec), "BLOCKS": 1, "TOP": codec.top, "FEEDBACK": True}
known = {key: value for key, value in known.items() if key in kernel.arg_names}
types = dict.fromkeys(kernel.arg_names, "i32")
types |= dict.fromkeys(types.keys() & {"scales", "new_scales"}, "*i16")
types |= dict.fromkeys(types.keys() & {"codes", "new_codes"}, "*i8")
types |= dict.fromkeys(types.keys() & {"values", "residual", "own", "out"}, "*fp32")
types |= dict.fromkeys(known, "constexpr")
source = ASTSource(fn=kernel, signature=types, constexprs=known)
options = {"num_warps": 1, "enable_fp_fusion": False}
compiled = triton.compile(source, target=GPUTarget("cuda", int(architecture), 32), options=options)
assert compiled.asm["cubin"]
print(compiled.asm["ptx"])
"""


@pytest.mark.long("compiles for GPUs, which needs none")
@pytest.mark.parametrize("architecture", on_push((80, 90), 80))
@pytest.mark.parametrize("wire", on_push(NAMED, "int4"))
@pytest.mark.parametrize("name", on_push(("add_and_encode", "encode", "decode", "add"), "add_and_encode"))
def test_kernels_compile_without_a_gpu_and_without_approximations(name, wire, architecture, tmp_path):
    command = [sys.executable, "-c", COMPILE, name, wire, str(architecture)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}  # a home may be read-only
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert compiled.returncode == 0, compiled.stderr
    ptx = compiled.stdout
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):  # whose divisions take denormal numbers as zeros
        ptx = ptx.replace("div.rn.ftz", "div.rn")
    assert not re.findall(r"\b(?:fma|mad)\.\S*f32|\S*\.approx\S*|\S*\.ftz\S*|div\.full\S*", ptx)
    assert bool(re.search(r"div\.rn\.f32", ptx)) == ("encode" in name)

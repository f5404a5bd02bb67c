"""Which gradients of about 2 bits an element train like float32 ones, under error feedback?

Every way to encode climbs the ladder of learning rates of :mod:`benchmarks.papers.tuned` on MNIST-1D's CNN, and is
judged there by other seeds and other examples. Encoding follows
:class:`~lightning_hiercomm.comm.encoded_sum.EncodedSum`: each node's share is cut into a chunk for each node, and with
more than two nodes the sums are encoded again; both have a residual.

- ``int4`` and ``sparse2``: the codecs of these names;
- ``3 levels, by the maximum``: -1, 0 and 1 times the largest magnitude of a block of 256;
- ``3 levels, projected``: elements beyond 0.7 times the mean magnitude, as the mean of these (Li & Liu, "Ternary Weight
  Networks", 2016);
- ``2 of 8, linear``: the 2 largest of every 8 elements as integers from -15 to 15;
- ``14 %, two magnitudes``: the largest 14 % of a chunk, as a sign and one of two magnitudes (SparseLoCo, arXiv
  2508.15706).

    python -m benchmarks.studies.two_bits --nodes 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.papers import tuned
from benchmarks.papers.many import Arena, Method, State, Synchronous
from benchmarks.papers.paired import difference
from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.comm.wire import codec_named

Code = Callable[[Tensor], Tensor]
"""From rows of values to what arrives."""


class Encoded(Method):
    """All-reduce of encoded gradients, with error feedback.

    Args:
        code: Of a chunk, in rows.
    """

    def __init__(self, code: Code) -> None:
        self._code = code

    def begin(self, state: State) -> None:
        self._residual = torch.zeros_like(state.weights)
        self._of_sums = torch.zeros_like(state.weights[:, 0])

    def step(self, state: State, gradients: Tensor) -> None:
        nodes = state.arena.nodes
        wanted = self._residual.add_(gradients, alpha=1 / nodes)
        arrived = self._arrived(wanted, nodes)
        wanted.sub_(arrived)
        total = arrived.sum(1)
        if nodes > 2:
            wanted = self._of_sums.add_(total)
            total = self._arrived(wanted, nodes)
            wanted.sub_(total)
        state.descend(total.unsqueeze(1).expand_as(state.weights))

    def _arrived(self, values: Tensor, nodes: int) -> Tensor:
        numel = values.shape[-1]
        length = -(-numel // nodes) if nodes > 2 else numel
        padded = functional.pad(values, (0, -numel % length)).reshape(-1, length)
        return self._code(padded).view(*values.shape[:-1], -1)[..., :numel]


def by_codec(codec: Codec, values: Tensor) -> Tensor:
    """As one of the package's codecs does it."""
    return codec.decode(codec.encode(values), torch.empty_like(values))


def in_blocks(code: Callable[[Tensor], Tensor], block: int, values: Tensor) -> Tensor:
    """Each block by itself; the last one of a row may be shorter."""
    return torch.cat([code(part) for part in values.split(block, dim=1)], 1)


def three_levels(values: Tensor) -> Tensor:
    scale = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return (values / scale).round() * scale


def projected(values: Tensor) -> Tensor:
    magnitudes = values.abs()
    is_sent = magnitudes > 0.7 * magnitudes.mean(1, keepdim=True)
    scale = (magnitudes * is_sent).sum(1, keepdim=True) / is_sent.sum(1, keepdim=True).clamp_min(1)
    return values.sign() * is_sent * scale


def two_of_eight(values: Tensor) -> Tensor:
    scale = (values.abs().amax(1, keepdim=True) / 15).clamp_min(torch.finfo(values.dtype).tiny)
    numel = values.shape[1]
    groups = functional.pad(values, (0, -numel % 8)).unflatten(1, (8, -1))
    codes = (groups / scale.unsqueeze(1)).round()
    places = groups.abs().topk(2, 1).indices
    sent = torch.zeros_like(codes).scatter_(1, places, codes.gather(1, places))
    return sent.flatten(1)[:, :numel] * scale


def two_magnitudes(values: Tensor) -> Tensor:
    magnitudes = values.abs()
    least = magnitudes.topk(max(1, round(0.14 * values.shape[1])), 1).values[:, -1:]
    is_sent = magnitudes >= least
    size = ((magnitudes * is_sent).square().sum(1, keepdim=True) / is_sent.sum(1, keepdim=True)).sqrt()
    return values.sign() * is_sent * torch.where(magnitudes < size, 0.8, 1.3) * size


CODES: dict[str, Code] = {
    "int4": partial(by_codec, codec_named("int4")),
    "sparse2": partial(by_codec, codec_named("sparse2")),
    "3 levels, by the maximum": partial(in_blocks, three_levels, 256),
    "3 levels, projected": partial(in_blocks, projected, 512),
    "2 of 8, linear": partial(in_blocks, two_of_eight, 512),
    "14 %, two magnitudes": two_magnitudes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/two-bits"), help="what is there is kept")
    arguments = parser.parse_args()
    arena = Arena(f"two-bits-{arguments.optimizer}-{arguments.nodes}", arguments.nodes, 64 // arguments.nodes, 12)
    starts = -5
    if arguments.optimizer == "adamw":
        arena, starts = Arena(arena.name, arena.nodes, arena.batch, arena.epochs, "adamw"), -14
    contenders = (
        tuned.Contender("float32", lambda _: Synchronous(), "all-reduce", starts),
        *(tuned.Contender(name, _method(CODES[name]), f"encoded, {name}", starts) for name in arguments.codes),
    )
    comparison = tuned.Comparison(arena, contenders)
    tuned.climb(comparison, arguments.out)
    known = tuned.load(comparison, arguments.out)
    base = known["float32"].judged
    print("| gradients | accuracy | against float32 |\n|---|--:|--:|")
    for name, found in known.items():
        apart = difference(found.judged, base).text()
        accuracy = fmean(value or 0.0 for value in found.judged.values())
        print(f"| {name} | {accuracy:.1f} | {apart} |")


def _method(code: Code) -> Callable[[Arena], Method]:
    return lambda _: Encoded(code)


if __name__ == "__main__":
    main()

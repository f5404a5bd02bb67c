"""The command line: ``python -m lightning_hiercomm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_hiercomm.planning import quantities
from lightning_hiercomm.planning.commands import run


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    return run(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    description = "Check a cluster, measure it, predict every scheme on it, and recommend one."
    parser = _Parser(prog="python -m lightning_hiercomm", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="check versions, network and processes; also under a launcher")
    doctor.add_argument("--ranks-per-node", type=int, help="divide the ranks of a machine into nodes of this size")
    doctor.add_argument(
        "--elastic",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="check the lighthouse of an elastic run; default: HIERCOMM_LIGHTHOUSE",
    )

    probe = commands.add_parser(
        "probe", help="measure links and training steps; start it with torchrun, mpiexec or srun, one process per rank"
    )
    probe.add_argument("--out", default="profile.json", help="the file to write; default: %(default)s")
    probe.add_argument("--module", metavar="PACKAGE.MODULE:CLASS", help="your LightningModule")
    probe.add_argument("--module-args", metavar="JSON", help="arguments of its constructor")
    probe.add_argument(
        "--params",
        type=quantities.count,
        default="10m",
        help="without --module: size of a stand-in; default: %(default)s",
    )
    probe.add_argument(
        "--seconds",
        type=quantities.duration,
        default="5",
        help="seconds of training; each collective is repeated for 1/25 of it; default: %(default)s",
    )
    probe.add_argument("--ranks-per-node", type=int, help="divide the ranks of a machine into nodes of this size")

    plan = commands.add_parser("plan", help="predict every scheme on a cluster, and recommend one")
    plan.add_argument("--profile", metavar="FILE", help="a file of `probe`; the flags below override it")
    plan.add_argument("--nodes", type=int, help="number of nodes")
    plan.add_argument("--ranks-per-node", type=int, help="GPUs, or other training processes, per node; default: 1")
    plan.add_argument("--params", type=quantities.count, help="number of trained parameters: 1.3e9, 350m")
    plan.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of parameters; default: float32")
    plan.add_argument("--step-time", type=quantities.duration, help="of a rank, without communication: 0.4, 250ms")
    plan.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), help="for its memory; default: adam")
    plan.add_argument("--inter", type=quantities.bandwidth, help="bandwidth between nodes, per node: 10gbit")
    plan.add_argument(
        "--intra", type=quantities.bandwidth, help="bandwidth inside a node, per rank: 300gbyte; default: unlimited"
    )
    plan.add_argument("--latency", type=quantities.duration, help="between nodes; default: 50us")
    plan.add_argument("--intra-latency", type=quantities.duration, help="inside a node; default: 5us")
    plan.add_argument("--backend", choices=("nccl", "gloo"), help="of the collectives; default: nccl")
    plan.add_argument(
        "--memory", type=quantities.size, help="per rank: 80gbyte; settings that need more are not recommended"
    )
    plan.add_argument(
        "--wires",
        nargs="+",
        choices=("float32", "bfloat16", "int8", "int4", "top4"),
        help="values of wire_dtype to consider",
    )
    plan.add_argument("--target", type=float, default=0.05, help="accepted overhead of a step; default: %(default)s")
    plan.add_argument("--all", action="store_true", help="show all settings, not only the best of each scheme")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")

    simulate = commands.add_parser(
        "simulate", help="train up to 4096 replicas of your model on this machine, to see a scheme's accuracy"
    )
    simulate.add_argument("--task", metavar="PACKAGE.MODULE:NAME", required=True, help="your model and its examples")
    simulate.add_argument("--scheme", nargs="+", metavar="NAME", required=True, help="schemes besides all_reduce")
    simulate.add_argument("--scheme-args", metavar="JSON", help="arguments of a single --scheme")
    simulate.add_argument("--nodes", type=int, nargs="+", default=[4], help="numbers of nodes; default: 4")
    simulate.add_argument("--ranks-per-node", type=int, help="ranks of each node; default: 1")
    simulate.add_argument("--wire", choices=("bfloat16", "float16", "int8", "int4", "top4"), help="the wire_dtype")
    simulate.add_argument("--epochs", type=float, default=10.0, help="passes over the examples; default: 10")
    simulate.add_argument("--batch", type=int, help="examples per rank and step; default: the task's")
    simulate.add_argument("--seeds", type=int, default=1, help="runs of each; default: %(default)s")
    simulate.add_argument(
        "--inter", type=quantities.bandwidth, help="for the predicted time: bandwidth between nodes, such as 10gbit"
    )
    simulate.add_argument(
        "--step-time",
        type=quantities.duration,
        help="for the predicted time: a step without communication, such as 250ms",
    )
    simulate.add_argument(
        "--params", type=quantities.count, help="for the predicted time: parameters, such as 350m; default: the model's"
    )
    simulate.add_argument("--profile", metavar="FILE", help="for the predicted time: a file of `probe`")
    simulate.add_argument("--json", action="store_true", help="print everything as JSON")

    lighthouse = commands.add_parser("lighthouse", help="serve the nodes of an elastic run; start it once per run")
    lighthouse.add_argument("--min-nodes", type=int, default=1, help="nodes that training needs; default: 1")
    lighthouse.add_argument("--bind", metavar="HOST:PORT", help="the address to listen at; default: port 29510")
    lighthouse.add_argument(
        "--dead-after", type=float, default=5.0, help="seconds until a silent node is removed; default: %(default)s"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

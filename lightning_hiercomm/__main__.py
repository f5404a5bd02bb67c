"""``python -m lightning_hiercomm``: is this cluster set up rightly, what can it do, and which scheme pays on it?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_hiercomm.planning.commands import run


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return run(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lightning_hiercomm", description=__doc__.partition(":")[2].strip())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="check versions, network and processes; also under a launcher")
    doctor.add_argument("--ranks-per-node", type=int, help="let ranks play nodes of this size")
    doctor.add_argument(
        "--elastic",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="check what nodes that come and go need, at this lighthouse; default: HIERCOMM_LIGHTHOUSE",
    )
    doctor.add_argument(
        "--dead-after",
        type=float,
        metavar="SECONDS",
        help="of the elastic run: also see that the lighthouse counts a node as gone after as long",
    )

    probe = commands.add_parser(
        "probe", help="measure links and training steps; start it with torchrun, mpiexec or srun, one process per rank"
    )
    probe.add_argument("--out", default="profile.json", help="the profile; default: %(default)s")
    probe.add_argument("--module", metavar="PACKAGE.MODULE:CLASS", help="the LightningModule that will be trained")
    probe.add_argument("--module-args", metavar="JSON", help="arguments of its constructor")
    probe.add_argument("--params", default="10m", help="without --module: size of a stand-in; default: %(default)s")
    probe.add_argument(
        "--seconds",
        default="5",
        help="how long to train, and in proportion how often to repeat moves; default: %(default)s",
    )
    probe.add_argument("--ranks-per-node", type=int, help="let ranks play nodes of this size")

    plan = commands.add_parser("plan", help="predict every scheme on a cluster, and recommend one")
    plan.add_argument("--profile", metavar="FILE", help="what `probe` wrote; flags below take precedence")
    plan.add_argument("--nodes", type=int, help="number of nodes")
    plan.add_argument("--ranks-per-node", type=int, help="GPUs, or other processes that train, of a node")
    plan.add_argument("--params", help="trained parameters: 1.3e9, 350m")
    plan.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of parameters; default: float32")
    plan.add_argument("--step-time", help="of a rank, without communication: 0.4, 250ms")
    plan.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), help="for its memory; default: adam")
    plan.add_argument("--inter", help="bandwidth between nodes, of a node: 10gbit")
    plan.add_argument("--intra", help="bandwidth inside a node, of a rank: 300gbyte; default: it does not matter")
    plan.add_argument("--latency", help="between nodes: 50us; default: 50us")
    plan.add_argument("--intra-latency", help="inside a node; default: 5us")
    plan.add_argument("--backend", choices=("nccl", "gloo"), help="whose collectives; default: nccl")
    plan.add_argument("--memory", help="of a rank: 80gbyte; configurations that need more are not recommended")
    plan.add_argument(
        "--wires",
        nargs="+",
        choices=("float32", "bfloat16", "int8", "int4", "top4"),
        help="what may travel between nodes",
    )
    plan.add_argument("--target", type=float, default=0.05, help="accepted overhead of a step; default: %(default)s")
    plan.add_argument("--mtbf", help="how long one node lives on average: 3h, 2d; also shows what nodes that die cost")
    plan.add_argument("--price", type=float, help="with --mtbf: of a node for an hour, in any currency")
    plan.add_argument(
        "--egress", type=float, help="with --mtbf: of a gigabyte that a node sends to others, in the same"
    )
    plan.add_argument(
        "--restart-time",
        help="with --mtbf: from a node's death until its program runs again; default: 10min, as in Daly's examples",
    )
    plan.add_argument(
        "--checkpoint-time",
        help="with --mtbf: for which training waits for a checkpoint; default: its bytes at 1 GB/s, an assumption",
    )
    plan.add_argument("--dead-after", help="with --mtbf: as of the elastic run; default: 5s")
    plan.add_argument("--all", action="store_true", help="show all settings, not only the best of each scheme")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.add_argument("--plot", metavar="FILE.png", help="also draw it")

    simulate = commands.add_parser(
        "simulate",
        help="train up to 4096 replicas of your model on this machine, and see what a scheme costs in accuracy",
    )
    simulate.add_argument("--task", metavar="PACKAGE.MODULE:NAME", required=True, help="your model and its examples")
    simulate.add_argument("--scheme", nargs="+", metavar="NAME", required=True, help="these, and all_reduce")
    simulate.add_argument("--scheme-args", metavar="JSON", help="arguments of the one scheme of --scheme")
    simulate.add_argument("--nodes", type=int, nargs="+", default=[4], help="numbers of nodes; default: 4")
    simulate.add_argument("--ranks-per-node", type=int, help="of each node; default: 1")
    simulate.add_argument(
        "--wire", choices=("bfloat16", "float16", "int8", "int4", "top4"), help="what travels between nodes"
    )
    simulate.add_argument("--epochs", type=float, default=10.0, help="how often examples are seen; default: 10")
    simulate.add_argument("--batch", type=int, help="examples that a rank takes per step; default: the task's")
    simulate.add_argument("--seeds", type=int, default=1, help="runs of each; default: %(default)s")
    simulate.add_argument("--inter", help="for the clock: the bandwidth between nodes, such as 10gbit")
    simulate.add_argument("--step-time", help="for the clock: a step without communication, such as 0.4 or 250ms")
    simulate.add_argument("--params", help="for the clock: parameters, such as 350m; default: the model's own")
    simulate.add_argument("--profile", metavar="FILE", help="for the clock: what `probe` wrote")
    simulate.add_argument("--json", action="store_true", help="print everything as JSON")

    lighthouse = commands.add_parser("lighthouse", help="tell nodes that come and go who is there; once for each run")
    lighthouse.add_argument("--min-nodes", type=int, default=1, help="without so many, none goes on; default: 1")
    lighthouse.add_argument("--bind", metavar="HOST:PORT", help="where it listens; default: this machine's own, 29510")
    lighthouse.add_argument("--dead-after", type=float, default=5.0, help="seconds of silence; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())

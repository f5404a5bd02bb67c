"""The command line: ``python -m lightning_hiercomm``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from lightning_hiercomm.planning.doctor import examine
from lightning_hiercomm.planning.plan import OPTIMIZERS, Cluster, report


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; invalid arguments print one line on standard error."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"python -m lightning_hiercomm {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    description = "Check a cluster, choose a scheme for it, and serve an elastic run."
    parser = argparse.ArgumentParser(prog="python -m lightning_hiercomm", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    doctor = commands.add_parser("doctor", help="check versions, network and processes; also under a launcher")
    doctor.add_argument("--ranks-per-node", type=int, help="divide the ranks of a machine into nodes of this size")
    doctor.set_defaults(run=lambda arguments: examine(arguments.ranks_per_node))

    plan = commands.add_parser("plan", help="choose a scheme; doctor measures the network")
    plan.add_argument(
        "--step-time", type=positive_number, required=True, metavar="SECONDS", help="of a step on one node"
    )
    plan.add_argument("--params", type=positive_number, required=True, help="number of trained parameters: 1.3e9")
    plan.add_argument("--nodes", type=int, required=True, help="number of nodes")
    plan.add_argument(
        "--link", type=positive_number, required=True, metavar="GBIT/S", help="rate of a node's link to the others"
    )
    plan.add_argument(
        "--latency", type=positive_number, default=50e-6, metavar="SECONDS", help="between nodes; default: %(default)s"
    )
    plan.add_argument(
        "--ranks-per-node", type=int, default=1, help="GPUs, or other processes, of a node; default: %(default)s"
    )
    plan.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="whose accuracy to show; default: %(default)s"
    )
    plan.set_defaults(run=_plan)

    lighthouse = commands.add_parser("lighthouse", help="serve the nodes of an elastic run; start it once per run")
    lighthouse.add_argument("--bind", metavar="HOST:PORT", help="the address to listen at; default: port 29510")
    lighthouse.add_argument(
        "--dead-after", type=float, default=5.0, help="seconds until a silent node is removed; default: %(default)s"
    )
    lighthouse.set_defaults(run=_lighthouse)
    return parser


def positive_number(text: str) -> float:
    """Read a flag's number; argparse names the flag and this function in its error."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _lighthouse(arguments: argparse.Namespace) -> int:
    from lightning_hiercomm.elastic.lighthouse import serve

    return serve(arguments.bind, arguments.dead_after)


def _plan(given: argparse.Namespace) -> int:
    rate = 1e9 * given.link / 8
    cluster = Cluster(given.nodes, rate, given.latency, given.params, given.step_time, given.ranks_per_node)
    print(report(cluster, given.optimizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

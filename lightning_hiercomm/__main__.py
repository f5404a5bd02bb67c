"""The command line: ``python -m lightning_hiercomm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from lightning_hiercomm.planning import quantities
from lightning_hiercomm.planning.doctor import examine
from lightning_hiercomm.planning.network import Network, measured
from lightning_hiercomm.planning.plan import OPTIMIZERS, Cluster, report
from lightning_hiercomm.planning.ranks import cluster_environment, connected, meet

_PATIENCE = timedelta(seconds=60)
_LATENCY = 50e-6


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


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
    parser = _Parser(prog="python -m lightning_hiercomm", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="check versions, network and processes; also under a launcher")
    doctor.add_argument("--ranks-per-node", type=int, help="divide the ranks of a machine into nodes of this size")
    doctor.set_defaults(run=lambda arguments: examine(arguments.ranks_per_node))

    plan = commands.add_parser(
        "plan", help="choose a scheme; under a launcher it measures the network, otherwise give --nodes and --link"
    )
    plan.add_argument(
        "--step-time", type=quantities.duration, required=True, help="of a step on one node: 0.12s, 250ms"
    )
    plan.add_argument("--params", type=quantities.count, required=True, help="trained parameters: 125M, 1.3e9")
    plan.add_argument("--nodes", type=int, help="number of nodes")
    plan.add_argument("--link", type=quantities.bandwidth, help="rate of each node's link to the others: 10Gbit/s")
    plan.add_argument("--latency", type=quantities.duration, help="between nodes, with --link; default: 50us")
    plan.add_argument("--ranks-per-node", type=int, help="GPUs, or other training processes, of each; default: 1")
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


def _lighthouse(arguments: argparse.Namespace) -> int:
    from lightning_hiercomm.elastic.lighthouse import serve

    return serve(arguments.bind, arguments.dead_after)


def _plan(arguments: argparse.Namespace) -> int:
    nodes, ranks, is_first = arguments.nodes, arguments.ranks_per_node or 1, True
    if arguments.link is not None and nodes is not None:
        network = Network(arguments.link, _LATENCY if arguments.latency is None else arguments.latency)
    elif arguments.link is not None or nodes is not None:
        raise ValueError("--nodes and --link belong together: give both, or neither under a launcher")
    else:
        network, nodes, ranks, is_first = _measured(arguments.ranks_per_node)
    cluster = Cluster(nodes, network.rate, network.latency, arguments.params, arguments.step_time, ranks)
    if is_first:
        print(report(cluster, arguments.optimizer))
    return 0


def _measured(ranks_per_node: int | None) -> tuple[Network, int, int, bool]:
    """Measure the network between the nodes of a launcher: it, nodes, ranks of the smallest, and whether rank 0."""
    environment = cluster_environment()
    if environment.world_size() == 1:
        raise ValueError("give --nodes and --link, or start this on the nodes with torchrun, mpiexec or srun")
    meeting = meet(environment, _PATIENCE)
    meeting.gather(None)
    with connected(environment, meeting, ranks_per_node, _PATIENCE) as connection:
        topology = connection.topology
        network = measured(topology, connection.device)
    if network is None:
        raise ValueError("all ranks are one node, on which every scheme trains as DDP does")
    return network, topology.num_nodes, topology.num_shards, topology.rank == 0


if __name__ == "__main__":
    sys.exit(main())

"""Scheme and fields from YAML and from the command line, through LightningCLI."""

import copy
import inspect
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from pairwise import on_push
from torch.optim import AdamW

import lightning_hiercomm
from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    HierarchicalStrategy,
    PeriodicAveraging,
    RandomPermutation,
    Topology,
    Transport,
)
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Every
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce


def of(class_path, **init_args):
    return {"class_path": class_path, "init_args": init_args}


def configuration(scheme, **init_args):
    strategy = of("lightning_hiercomm.HierarchicalStrategy", scheme=scheme, **init_args)
    return yaml.dump({"trainer": {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy}})


PERIODIC = configuration(
    of("lightning_hiercomm.PeriodicAveraging", sync_every=7),
    **{"ranks_per_node": 1, "start_method": "fork", "find_unused_parameters": True},
)
ALL_REDUCE = """
trainer:
  strategy:
    init_args:
      scheme:
        class_path: lightning_hiercomm.AllReduce
"""
BY_NAME = configuration("all_reduce")
DILOCO = configuration(
    of(
        "lightning_hiercomm.DiLoCo",
        sync_every=7,
        fragments=["layer"],
        outer_optimizer=of("torch.optim.AdamW", lr=0.5),
    ),
    wire_dtype="int4",
)
NOLOCO = configuration(
    of(
        "lightning_hiercomm.ParameterSync",
        schedule=of("lightning_hiercomm.schemes.Every", period=5),
        reducer=of("lightning_hiercomm.RandomPermutation"),
        merge=of("lightning_hiercomm.schemes.OuterOptimizer", optimizer=of("torch.optim.SGD", lr=0.7, momentum=0.5)),
    )
)
SCHEME = "--trainer.strategy.init_args.scheme"


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])


@pytest.fixture
def strategy(tmp_path):
    """Builds the strategy from YAML texts and command line arguments."""

    def build(*yamls, args=()):
        configs = []
        for i, text in enumerate(yamls):
            path = tmp_path / f"{i}.yaml"
            path.write_text(text)
            configs += ["--config", str(path)]
        cli = LightningCLI(BoringModel, run=False, args=[*configs, *args], save_config_callback=None)
        assert isinstance(cli.trainer.strategy, HierarchicalStrategy)
        return cli.trainer.strategy

    return build


def test_grouped_options_from_yaml_and_from_the_command_line(strategy):
    text = PERIODIC.replace("ranks_per_node: 1", "transport:\n        bucket_mb: 60")
    built = strategy(text, args=["--trainer.strategy.init_args.transport.inter_node=gloo"])
    assert built._settings.transport == Transport("gloo", 60.0)  # noqa: SLF001
    assert strategy(PERIODIC)._settings.transport == Transport()  # noqa: SLF001


CPU = "--trainer.accelerator=cpu"
STRATEGY = "--trainer.strategy=lightning_hiercomm.HierarchicalStrategy"
PERIODIC_BY_NAME = [CPU, STRATEGY, f"{SCHEME}=PeriodicAveraging", f"{SCHEME}.sync_every=9"]
PERIODIC_BY_NAME += ["--trainer.strategy.ranks_per_node=1"]


@pytest.mark.parametrize(
    ("yamls", "args", "scheme"),
    [
        pytest.param([PERIODIC], [], PeriodicAveraging(7), id="fields from YAML"),
        pytest.param([PERIODIC], [f"{SCHEME}.init_args.sync_every=3"], PeriodicAveraging(3), id="overridden field"),
        pytest.param([PERIODIC], [f"{SCHEME}=daso"], DASO(), id="overridden by name: its defaults"),
        pytest.param([PERIODIC, ALL_REDUCE], [], AllReduce(), id="overridden by a second YAML"),
        pytest.param([BY_NAME], [], AllReduce(), id="by name"),
        pytest.param([], PERIODIC_BY_NAME, PeriodicAveraging(9), id="command line alone"),
        pytest.param([], [CPU, "--trainer.strategy=hierarchical_periodic"], PeriodicAveraging(), id="registered name"),
    ],
)
def test_a_scheme_comes_from_yaml_and_the_command_line(strategy, yamls, args, scheme):
    assert strategy(*yamls, args=args).scheme == scheme


DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits"
SCHEMES_OF_DIGITS = sorted(path.name for path in DIGITS.glob("*.yaml") if "scheme:" in path.read_text())


@pytest.mark.parametrize("other", on_push(SCHEMES_OF_DIGITS, "diloco.yaml"))
@pytest.mark.parametrize(
    "name", on_push(sorted({*SCHEMES_OF_DIGITS} - {"config.yaml"}), "all_reduce.yaml", "daso.yaml", "noloco.yaml")
)
def test_an_example_config_overrides_another(strategy, name, other):
    config, last = (DIGITS / "config.yaml").read_text(), (DIGITS / name).read_text()
    alone = described(strategy(config, (DIGITS / "all_reduce.yaml").read_text(), last).scheme)
    assert described(strategy(config, (DIGITS / other).read_text(), last).scheme) == alone


def described(scheme):
    arguments = inspect.signature(type(scheme)).parameters
    return type(scheme), [re.sub(" at 0x.*>", "", repr(getattr(scheme, argument, None))) for argument in arguments]


def test_an_outer_optimizer_from_yaml(strategy):
    built = strategy(DILOCO, args=[f"{SCHEME}.init_args.outer_optimizer.init_args.lr=0.25"])
    # one copy per optimizer, as a strategy makes them; and one for a spawned process
    for scheme in (copy.deepcopy(built.scheme), pickle.loads(pickle.dumps(built.scheme))):
        (seen,) = ThreadWorld(1).run(lambda rank, world, scheme=scheme: outer_optimizer(scheme, world))
        assert isinstance(seen.optimizer, AdamW)
        assert seen.optimizer.param_groups[0]["lr"] == 0.25


def outer_optimizer(scheme, world):
    """Return the outer optimizer that the scheme builds on one node."""
    meter = Meter()
    topology = Topology([[0]], 0, world.connect(0, meter), meter)
    replica = Replica([torch.nn.Parameter(torch.ones(3))])
    return scheme.merging.build(ShardedAllReduce(replica, topology, update_reference=scheme.merging.update_reference))


def test_a_composition_from_yaml(strategy):
    scheme = strategy(NOLOCO).scheme
    assert scheme.schedule == Every(5)
    assert isinstance(scheme.reducer, RandomPermutation)
    assert copy.deepcopy(scheme).merging.keep_local == 0.0


def test_a_copy_shares_the_factory_of_the_outer_optimizer(strategy):
    """LightningCLI's factory refers to the whole program, and parts of it cannot be copied in training."""

    class Unique:
        def __call__(self, parameters):
            return torch.optim.SGD(parameters, lr=0.1)

        def __deepcopy__(self, memo):
            raise AssertionError("it was copied")

    scheme = copy.deepcopy(DiLoCo(outer_optimizer=Unique()))
    one, other = (ThreadWorld(1).run(lambda rank, world: outer_optimizer(scheme, world))[0] for _ in range(2))
    assert one.optimizer is not other.optimizer


def test_an_outer_optimizer_from_the_command_line(strategy):
    outer = [f"{SCHEME}=DiLoCo", f"{SCHEME}.outer_optimizer=SGD", f"{SCHEME}.outer_optimizer.lr=1.0"]
    built = strategy(args=[CPU, STRATEGY, *outer])
    assert outer_optimizer(built.scheme, ThreadWorld(1)).optimizer.param_groups[0]["lr"] == 1.0


def test_help_documents_the_outer_optimizer(capsys, tmp_path):
    (tmp_path / "base.yaml").write_text(DILOCO)
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, run=False, args=["--config", str(tmp_path / "base.yaml"), f"{SCHEME}.help=DiLoCo"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--scheme.outer_optimizer" in help_text
    assert "Function that creates the outer optimizer" in help_text


REFUSED = [
    (("sync_every: 7", "sync_every: 0"), lambda: PeriodicAveraging(sync_every=0)),
    (("sync_every: 7", "sync_every: null\n          at_epoch_end: false"), lambda: PeriodicAveraging(None, False)),
    (("ranks_per_node: 1", "ranks_per_node: -1"), lambda: HierarchicalStrategy(ranks_per_node=-1)),
]


@pytest.mark.parametrize(("change", "in_python"), REFUSED, ids=[change[1] for change, _ in REFUSED])
def test_a_constructor_error_in_yaml_has_its_own_line(strategy, change, in_python):
    with pytest.raises(ValueError, match=r"must|needs") as refused:
        in_python()
    with pytest.raises(ValueError, match=r"must|needs") as left:
        strategy(PERIODIC.replace(*change))
    assert f"- {refused.value}" in map(str.strip, str(left.value).splitlines())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("sync_every: 7", "sync_every: four"), "Given value: four"),
        (("sync_every: 7", "sync_evry: 7"), "'sync_evry' is not "),
        (("ranks_per_node: 1", "ranks_per_nod: 1"), "'ranks_per_nod' is not "),
        (("ranks_per_node: 1", "wire_dtype: int3"), "Given value: int3"),
    ],
    ids=["type", "argument of a scheme", "argument of the strategy", "choice"],
)
def test_typing_errors_in_a_file_are_refused_by_name(strategy, capsys, change, named):
    with pytest.raises(SystemExit):
        strategy(PERIODIC.replace(*change))
    assert named in capsys.readouterr().err


def test_help_documents_the_fields_and_omits_refused_arguments(capsys):
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, run=False, args=["--trainer.strategy.help=lightning_hiercomm.HierarchicalStrategy"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--trainer.strategy.scheme" in help_text
    assert "--trainer.strategy.ranks_per_node" in help_text
    assert "--trainer.strategy.find_unused_parameters" in help_text
    assert "--trainer.strategy.health.hang_timeout HANG_TIMEOUT Seconds without progress" in help_text
    assert "--trainer.strategy.transport.inter_node {torch,gloo,mpi} The library" in help_text
    assert "--trainer.strategy.gradient_as_bucket_view" in help_text
    for refused in ("ddp_comm_hook", "model_averaging_period", "process_group", "device_mesh", "dim"):
        assert f"--trainer.strategy.{refused} " not in help_text


def _documentation(value):
    return "\n".join(map(inspect.getdoc, (value, value.__init__)))


PUBLIC = [
    each for each in map(vars(lightning_hiercomm).get, lightning_hiercomm.__all__) if "Args:" in _documentation(each)
]


@pytest.mark.parametrize("documented", PUBLIC)
def test_help_has_no_roles_of_restructured_text(documented):
    arguments = _documentation(documented).partition("Args:")[2].partition("Raises:")[0]
    assert arguments.strip()
    assert not re.search(r":\w+:`", arguments)

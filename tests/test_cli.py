"""Scheme and fields from YAML and from the command line, through LightningCLI."""

import contextlib
import inspect
import io
import re
import sys
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hiercomm import (
    DASO,
    AllReduce,
    CommunicationMonitor,
    HeterogeneousBatches,
    HierarchicalStrategy,
    PeriodicAveraging,
)

PERIODIC = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_hiercomm.HierarchicalStrategy
    init_args:
      ranks_per_node: 1
      start_method: fork
      find_unused_parameters: true
      scheme:
        class_path: lightning_hiercomm.PeriodicAveraging
        init_args:
          sync_every: 7
"""
ALL_REDUCE = """
trainer:
  strategy:
    init_args:
      scheme:
        class_path: lightning_hiercomm.AllReduce
"""
BY_NAME = """
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_hiercomm.HierarchicalStrategy
    init_args:
      scheme: all_reduce
"""
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


def test_scheme_and_fields_from_yaml(strategy):
    built = strategy(PERIODIC)
    assert isinstance(built.scheme, PeriodicAveraging)
    assert built.scheme.sync_every == 7


def test_field_from_the_command_line_overrides_yaml(strategy):
    built = strategy(PERIODIC, args=[f"{SCHEME}.init_args.sync_every=3"])
    assert built.scheme.sync_every == 3


def test_second_yaml_replaces_the_scheme(strategy):
    assert isinstance(strategy(PERIODIC, ALL_REDUCE).scheme, AllReduce)


@pytest.mark.parametrize("argument", ["=DASO", "=lightning_hiercomm.DASO", ".class_path=lightning_hiercomm.DASO"])
def test_a_class_given_over_a_config_keeps_what_both_take_and_we_warn_of_it(strategy, monkeypatch, argument):
    argument = SCHEME + argument
    monkeypatch.setattr(sys, "argv", ["program", argument])
    with pytest.warns(UserWarning, match="DASO, chosen on the command line, keeps sync_every=7 from the configuration"):
        kept = strategy(PERIODIC, args=[argument])
    assert kept.scheme.sync_every == 7
    both = [argument, f"{SCHEME}.init_args.sync_every=5"]
    monkeypatch.setattr(sys, "argv", ["program", *both])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*chosen on the command line")
        assert strategy(PERIODIC, args=both).scheme.sync_every == 5


def test_a_name_given_over_a_config_stands_for_the_defaults_of_its_scheme(strategy):
    assert described(strategy(PERIODIC, args=[f"{SCHEME}=daso"]).scheme) == described(DASO())


SCHEMES_OF_DIGITS = [f"{name}.yaml" for name in ("all_reduce", "daso", "gossip", "sgp", "steps_delay")]


@pytest.mark.parametrize("name", SCHEMES_OF_DIGITS)
def test_an_example_laid_over_another_means_what_it_says(strategy, name):
    folder = Path(__file__).resolve().parents[1] / "examples" / "digits"
    config, last = (folder / "config.yaml").read_text(), (folder / name).read_text()
    alone = described(strategy(config, (folder / "all_reduce.yaml").read_text(), last).scheme)
    for other in ["config.yaml", *SCHEMES_OF_DIGITS]:
        assert described(strategy(config, (folder / other).read_text(), last).scheme) == alone, other


def described(scheme):
    arguments = inspect.signature(type(scheme)).parameters
    return type(scheme), [re.sub(" at 0x.*>", "", repr(getattr(scheme, argument, None))) for argument in arguments]


def test_scheme_by_name(strategy):
    assert isinstance(strategy(BY_NAME).scheme, AllReduce)


def test_everything_from_the_command_line(strategy):
    built = strategy(
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.strategy=lightning_hiercomm.HierarchicalStrategy",
            f"{SCHEME}=PeriodicAveraging",
            f"{SCHEME}.sync_every=9",
            "--trainer.strategy.ranks_per_node=1",
        ]
    )
    assert built.scheme.sync_every == 9


def test_registered_name_from_the_command_line(strategy):
    built = strategy(args=["--trainer.accelerator=cpu", "--trainer.strategy=hierarchical_periodic"])
    assert isinstance(built.scheme, PeriodicAveraging)


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [(f"{SCHEME}=nonsense", "nonsense"), (f"{SCHEME}.init_args.sync_evry=3", "sync_evry")],
)
def test_typing_errors_are_refused_by_name(strategy, argument, complaint):
    printed = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stderr(printed):
        strategy(PERIODIC, args=[argument])
    assert complaint in printed.getvalue()


def test_help_documents_the_fields(capsys):
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, run=False, args=["--trainer.strategy.help=lightning_hiercomm.HierarchicalStrategy"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--trainer.strategy.scheme" in help_text
    assert "--trainer.strategy.ranks_per_node" in help_text
    assert "--trainer.strategy.find_unused_parameters" in help_text


@pytest.mark.parametrize("name", ["ddp_comm_hook", "model_averaging_period", "process_group", "device_mesh", "dim"])
def test_help_leaves_out_what_is_refused(capsys, name):
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, run=False, args=["--trainer.strategy.help=lightning_hiercomm.HierarchicalStrategy"])
    assert f"--trainer.strategy.{name} " not in capsys.readouterr().out


@pytest.mark.parametrize("documented", [CommunicationMonitor, HeterogeneousBatches, HierarchicalStrategy])
def test_help_has_no_roles_of_restructured_text(documented):
    arguments = inspect.getdoc(documented).partition("Args:")[2].partition("Raises:")[0]
    assert "progress_bar" in arguments or "batch" in arguments
    assert not re.search(r":\w+:`", arguments)

"""Whatever one gives to what is public works, or a ValueError or TypeError names it before ranks wait for others."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import InitVar
from typing import Any

import numpy
import pytest
from harness import on_nodes, steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentError, ArgumentParser, Namespace

import lightning_hiercomm as hiercomm
from lightning_hiercomm.arguments import checked_arguments
from lightning_hiercomm.schemes import SCHEMES
from lightning_hiercomm.schemes.components.merges import MERGES
from lightning_hiercomm.schemes.components.outer import OuterOptimizer
from lightning_hiercomm.schemes.components.schedules import Every, Staggered
from lightning_hiercomm.trainer.settings import Settings

REQUIRED: dict[str, dict[str, Any]] = {
    "HeterogeneousBatches": {"global_batch_size": 8},
    "Every": {"period": 2},
    "Staggered": {"period": 2},
}
MERGE_CLASSES = [merge for merge in MERGES.values() if inspect.signature(merge).parameters]
CLASSES = [
    *SCHEMES.values(),
    hiercomm.ParameterSync,
    hiercomm.DirectedExponential,
    hiercomm.RandomPermutation,
    hiercomm.HeterogeneousBatches,
    hiercomm.HierarchicalStrategy,
    hiercomm.HierarchicalModelParallelStrategy,
    hiercomm.Health,
    hiercomm.Transport,
    hiercomm.Plateau,
    hiercomm.Epochs,
    Every,
    Staggered,
    OuterOptimizer,
    *MERGE_CLASSES,
]
OTHERS = [hiercomm.Elastic, hiercomm.HierarchicalFabricStrategy]
LIGHTNINGS_OWN = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "kwargs"),
    *("process_group_backend", "timeout", "start_method", "gradient_as_bucket_view", "save_distributed_checkpoint"),
}
ARGUMENTS = [(cls, name) for cls in CLASSES for name in inspect.signature(cls).parameters if name not in LIGHTNINGS_OWN]
WORDS = ("node", "world", "leader", "sharded", "replace", "eq1", "delta", "glu", "sgd", "dc_asgd")
WORDS += ("elements", "parameters", "uniform", "cyclic", "roulette", "random_permutation", "ring", "full", "after_step")
WORDS += ("before_step", "all", "blocking", "int8", "bfloat16", "averaged", "replica", "auto", "measure", "x", "y")

NUMBERS = st.one_of(st.integers(-2, 9), st.integers(), st.floats(), st.sampled_from([0.0, 0.5, 1.0, 1e300, -1e300]))
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(WORDS), st.text(max_size=4))
ANYTHING = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.sampled_from(WORDS), PLAIN, max_size=2),
    st.builds(object),
    st.binary(max_size=3),
    st.complex_numbers(),
)
FEW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def refused_by_name(*names: str) -> Iterator[None]:
    """What is inside works, or is refused for what one of these arguments is."""
    try:
        yield
    except (ValueError, TypeError) as refusal:
        if not any(name in str(refusal) for name in names):
            raise AssertionError(f"this names none of {', '.join(names)}: {refusal}") from refusal


@settings(FEW, max_examples=300)
@given(which=st.sampled_from(ARGUMENTS), value=ANYTHING)
def test_any_value_of_any_argument_is_taken_or_refused_by_its_name(which, value):
    cls, name = which
    with refused_by_name(name):
        cls(**{**REQUIRED.get(cls.__name__, {}), name: value})


@st.composite
def schemes(draw):
    """Draw a scheme with some arguments, most of them not obviously wrong."""
    cls = draw(st.sampled_from([*SCHEMES.values(), hiercomm.ParameterSync]))
    sensible = st.one_of(st.integers(0, 4), st.sampled_from(WORDS), st.booleans(), st.floats(0, 1), st.none(), PLAIN)
    names = [*inspect.signature(cls).parameters]
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
    return cls, {name: draw(sensible) for name in chosen}


@settings(FEW, max_examples=150)
@given(drawn=schemes())
def test_a_valid_scheme_trains_or_is_refused_before_any_exchange(drawn):
    cls, arguments = drawn
    scheme = None
    with refused_by_name(*arguments):
        scheme = cls(**arguments)
    if scheme is not None:  # a CommunicationError would say that some ranks waited for others
        with refused_by_name(*inspect.signature(cls).parameters):
            on_nodes(steps(5), scheme, nodes=((0, 1), (2,)), shapes={"x": (3, 2), "y": (2,)}, timeout=5.0)


YAML_ARGUMENTS = [(cls, name) for cls, name in ARGUMENTS if cls in SCHEMES.values()]
PARSER = ArgumentParser(exit_on_error=False)
PARSER.add_subclass_arguments(hiercomm.Scheme, "scheme")


@settings(FEW, max_examples=60)
@given(which=st.sampled_from(YAML_ARGUMENTS), value=PLAIN)
def test_any_value_in_a_configuration_file_is_taken_or_refused_by_name(which, value):
    cls, name = which
    config = {"class_path": f"lightning_hiercomm.{cls.__name__}", "init_args": {name: value}}
    with refused_by_name(name):
        try:
            PARSER.instantiate_classes(PARSER.parse_object(Namespace(scheme=config)))
        except ArgumentError as error:
            raise ValueError(str(error)) from error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": "4"}, "number='4' must be int, not of type str"),
        ({"number": True}, "number=True must be int, not of type bool"),
        ({"number": 4.0}, "number=4.0 must be int"),
        ({"weights": [1, "2"]}, r"weights=\[1, '2'\] must be list\[float\] or None"),
        ({"weights": 3}, r"weights=3 must be list\[float\] or None"),
        ({"share": float("inf")}, "share=inf must be finite"),
        ({"share": numpy.float32("nan")}, "share=nan must be finite"),
        ({"unknown": 3}, r"make has no argument 'unknown'\. It takes number, weights, share\."),
        ({"numbr": 3}, r"make has no argument 'numbr'\. Did you mean 'number'\?"),
    ],
)
def test_type_errors_are_explained_in_words(given, message):
    @checked_arguments
    def make(number: int = 1, weights: list[float] | None = None, share: float = 0.5) -> None:
        pass

    make(3, (1, 2.5), 1)
    with pytest.raises((TypeError, ValueError), match=message):
        make(**given)


@pytest.mark.parametrize("cls", [*(c for c in CLASSES if inspect.signature(c).parameters), *OTHERS])
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(cls):
    name = next(iter(inspect.signature(cls).parameters))
    with pytest.raises(TypeError, match=rf"^{cls.__name__} has no argument '{name[:-1]}'\. Did you mean '{name}'\?$"):
        cls(**{**REQUIRED.get(cls.__name__, {}), name[:-1]: 2})


def test_python_3_10_evaluates_the_annotations_of_settings():
    """It raises a TypeError for an InitVar, so that no strategy could be made."""
    hints = typing.get_type_hints(inspect.unwrap(Settings.__init__))
    assert not [name for name, hint in hints.items() if isinstance(hint, InitVar)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hiercomm.AllReduce(4), "AllReduce: too many positional arguments. It takes no arguments."),
        (
            lambda: hiercomm.AllReduce(sync_every=4),
            r"AllReduce has no argument 'sync_every': write PeriodicAveraging\(sync_every=",
        ),
        (
            lambda: hiercomm.PeriodicAveraging(1, True, "after_step", *"abcdef"),
            r"PeriodicAveraging: too many positional .* It takes sync_every, at_ep",
        ),
        (
            lambda: hiercomm.PeriodicAveraging(4, wire_dtype="int8"),
            r"PeriodicAveraging has no argument 'wire_dtype': write HierarchicalStrategy\(wire_dtype=",
        ),
        (
            lambda: hiercomm.PeriodicAveraging(4, fragments=2),
            r"PeriodicAveraging has no argument 'fragments': write Gossip\(fragments=\.\.\.\) or DiLoCo\(fragments=",
        ),
        (lambda: Every(3, "run", 4), "Every: too many positional arguments. It takes period, of."),
    ],
)
def test_arguments_that_are_too_many_or_of_something_else_are_refused(make, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


def test_wrong_types_raise_type_error():
    with pytest.raises(TypeError) as refused:
        hiercomm.PeriodicAveraging(4.5)
    assert refused.type is TypeError  # in a traceback argparse's ArgumentTypeError means a command line

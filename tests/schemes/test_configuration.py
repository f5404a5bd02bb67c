"""A scheme is a value."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.schemes import (
    DASO,
    SCHEMES,
    AllReduce,
    Delta,
    DiLoCo,
    DirectedExponential,
    Epochs,
    Every,
    Full,
    Gossip,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    Plateau,
    RandomPermutation,
    Replace,
    Ring,
    Scheme,
    Staggered,
    StaleSum,
    StepsDelay,
)

WRITTEN: dict[str, Callable[[], Any]] = {
    "PeriodicAveraging(sync_every=50)": PeriodicAveraging,
    "PeriodicAveraging(sync_every=None, order='before_step')": lambda: PeriodicAveraging(None, order="before_step"),
    "AllReduce()": AllReduce,
    "DASO(sync_every=4)": DASO,
    "DASO(sync_every=8, merge='delta', plateau=None)": lambda: DASO(8, merge="delta", plateau=None),
    "DASO(sync_every=4, warmup=Epochs(epochs=2), plateau=Plateau(patience=2, threshold=0.1))": lambda: DASO(
        warmup=Epochs(2), plateau=Plateau(threshold=0.1)
    ),
    "DiLoCo(sync_every=100)": DiLoCo,
    "DiLoCo(sync_every=9, fragments=['a', 'b'], staleness=2)": lambda: DiLoCo(9, partial(AdamW, lr=1.0), ["a", "b"], 2),
    "Gossip(graph=RandomPermutation(sampling='uniform', seed=0))": Gossip,
    "Gossip(graph=Ring(), fragments=2, overlap=True)": lambda: Gossip("ring", 2, True),
    "StepsDelay(delay=4)": StepsDelay,
    "StepsDelay(delay=2, warmup_steps=0, local_update='sgd')": lambda: StepsDelay(2, 0, local_update="sgd"),
    "ParameterSync(schedule=Every(period=100, of='run'))": ParameterSync,
    (
        "ParameterSync(schedule=Staggered(period=6), fragments=2, merge=OuterOptimizer(SGD, keep_local=0.5),"
        " staleness=1)"
    ): lambda: ParameterSync(Staggered(6), 2, merge=OuterOptimizer(keep_local=0.5), staleness=1),
    (
        "ParameterSync(schedule=Every(period=3, of='run'), reducer=RandomPermutation(sampling='uniform', seed=1))"
    ): lambda: ParameterSync(3, reducer=RandomPermutation(seed=1)),
    "Replace(keep_local=0.4)": lambda: Replace(0.4),
    "Delta()": Delta,
    "StaleSum()": StaleSum,
    "OuterOptimizer(AdamW, keep_local=0.0)": lambda: OuterOptimizer(partial(AdamW, lr=0.1)),
    "Ring()": Ring,
    "Full()": Full,
    "DirectedExponential(peers=2)": lambda: DirectedExponential(2),
    "RandomPermutation(sampling='independent', seed=3)": lambda: RandomPermutation("independent", 3),
    "Every(period=5, of='epoch')": lambda: Every(5, of="epoch"),
    "Staggered(period=5)": lambda: Staggered(5),
}


def test_every_scheme_with_a_name_is_written_here():
    assert {type(make()) for make in WRITTEN.values()} >= set(SCHEMES.values())


@pytest.mark.parametrize("written", WRITTEN)
def test_a_value_equals_another_of_the_same_arguments_and_its_copies(written):
    value, again = WRITTEN[written](), WRITTEN[written]()
    for same in (again, copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert same == value
        assert hash(same) == hash(value)
        assert repr(same) == written
    assert [other for other in WRITTEN if WRITTEN[other]() == value] == [written]


@pytest.mark.parametrize("written", WRITTEN)
def test_reading_changes_no_value(written):
    value = WRITTEN[written]()
    for copied in (value, pickle.loads(pickle.dumps(value))):
        for name in ("sync_every", "period", "of_ones_own"):
            with pytest.raises(AttributeError) as refused:
                setattr(copied, name, 3)
            if isinstance(value, Value):
                assert str(refused.value) == f"{written} is configuration and does not change; write another one"
    assert value == WRITTEN[written]()


def test_arguments_that_the_scheme_does_not_print_count_all_the_same():
    assert DASO(plateau=Plateau(threshold=0.1)) != DASO()
    assert DiLoCo(outer_optimizer=partial(SGD, lr=0.5)) != DiLoCo(outer_optimizer=partial(SGD, lr=0.7))
    assert DiLoCo(outer_optimizer=partial(SGD, lr=0.5)) == DiLoCo(outer_optimizer=partial(SGD, lr=0.5))


def test_mutable_arguments_are_copied_into_the_value():
    class Sized(Value):
        def __init__(self, sizes: list[int], names: dict[str, int], what: object = None) -> None:
            self.sizes = sizes

    sizes = [1, 2]
    value = Sized(sizes, {"a": 1, "b": 2})
    before = hash(value)
    sizes.append(3)
    assert hash(value) == before
    assert value == Sized([1, 2], {"b": 2, "a": 1}) != Sized(sizes, {"a": 1, "b": 2})
    with pytest.raises(TypeError, match="unhashable"):
        hash(Sized([], {}, set()))
    assert Sized([], {}, set()) == Sized([], {}, set())


@pytest.mark.parametrize("hook", ["after_step", "step", "state_dict", "phase", "follow"])
def test_hook_on_the_wrong_class_is_refused(hook):
    with pytest.raises(TypeError, match=rf"Mine\.{hook} would never be called: .*RunningParameterSync.*Mine\.build"):
        type("Mine", (ParameterSync,), {hook: lambda self: None})
    with pytest.raises(TypeError, match=r"Mine\.\w+ would never be called: .*RunningScheme.*Mine\.build"):
        type("Mine", (Scheme,), {hook: lambda self: None})


def test_explicit_defaults_equal_implicit_ones():
    assert DASO(4, staleness=1) == DASO() == DASO(sync_every=4)
    assert len({DASO(4), DASO(), DASO(8), PeriodicAveraging(4)}) == 3


def test_a_scheme_of_ones_own_is_a_value_too_and_its_types_are_checked():
    class Own(PeriodicAveraging):
        def __init__(self, every: int, *, names: tuple[str, ...] = ()) -> None:
            super().__init__(every)
            self.every, self.names = every, names
            self.half = every // 2

    assert repr(Own(6, names=("a",))) == "Own(every=6, names=('a',))"
    assert Own(6) == Own(6) != Own(8)
    assert Own(6) != PeriodicAveraging(6)
    with pytest.raises(AttributeError, match=r"^Own\(every=6\) is configuration and does not change"):
        Own(6).half = 4
    with pytest.raises(TypeError, match="every='6' must be int"):
        Own("6")
    with pytest.raises(TypeError, match=r"^Own has no argument 'evry'\. Did you mean 'every'\?"):
        Own(evry=6)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        *(
            (kind, {"fragments": value}, message)
            for kind in (DiLoCo, Gossip, ParameterSync)
            for value, message in (
                (0, "fragments=0 must be a positive number, or a list"),
                (-3, "fragments=-3"),
                ([], r"fragments=\[\] must be a positive number, or a list"),
                ("layers", "fragments='layers' must be"),
            )
        ),
        *(
            (kind, {"warmup_steps": length}, f"warmup_steps={length} must be a number")
            for kind in (PeriodicAveraging, DiLoCo)
            for length in (-1, -0.5, 1.0, 1.5)
        ),
        (PeriodicAveraging, {"sync_every": 0}, "sync_every=0"),
        (PeriodicAveraging, {"sync_every": None, "at_epoch_end": False}, "at_epoch_end=True"),
        (PeriodicAveraging, {"order": "sideways"}, "order='sideways'"),
        (DASO, {"sync_every": 0}, "sync_every=0"),
        (DASO, {"sync_every": 2, "staleness": 3}, "staleness=3 must be from 0 to sync_every=2"),
        (DASO, {"staleness": -1}, "staleness=-1"),
        (DASO, {"warmup": -1}, "warmup=-1"),
        (DASO, {"cooldown": 1.5}, "cooldown=1.5"),
        (DASO, {"merge": "mean"}, "merge='mean'"),
        (DASO, {"reducer": "split"}, "reducer='split'"),
        (Plateau, {"threshold": 1.0}, "threshold="),
        (Plateau, {"threshold": -0.1}, "threshold="),
        (Plateau, {"patience": -1}, "patience="),
        (DiLoCo, {"sync_every": 0}, "sync_every=0 must be a positive number"),
        (DiLoCo, {"sync_every": 4, "fragments": 5}, "fragments=5 must not exceed sync_every=4"),
        (DiLoCo, {"sync_every": 4, "staleness": 4}, "staleness=4 must be from 0 to 3"),
        (DiLoCo, {"sync_every": 6, "fragments": 4, "staleness": 2}, "staleness=2 must be from 0 to 1"),
        (DiLoCo, {"staleness": -1}, "staleness=-1"),
        (DiLoCo, {"keep_local": 1.5}, "keep_local=1.5 must be a weight from 0"),
        (DiLoCo, {"keep_local": -0.1}, "keep_local=-0.1"),
        (Gossip, {"graph": "star"}, "graph='star' must be one of"),
        (DirectedExponential, {"peers": 0}, "peers=0"),
        (RandomPermutation, {"sampling": "fairly"}, "sampling='fairly'"),
        (ParameterSync, {"schedule": 0}, "schedule=0 must be a positive number of optimizer steps, or a schedule"),
        (ParameterSync, {"reducer": "unknown"}, "reducer='unknown' must be 'sharded', 'leader' or a Graph"),
        (ParameterSync, {"merge": "somehow"}, "merge='somehow' must be one of 'replace', 'eq1', 'delta', or a Merge"),
        (ParameterSync, {"staleness": -1}, "staleness=-1 must not be negative"),
        (
            ParameterSync,
            {"reducer": "leader", "merge": OuterOptimizer()},
            "reducer='leader' does not support OuterOptimizer",
        ),
        (Every, {"period": 0}, "period=0 must be a positive"),
        (Every, {"period": 3, "of": "day"}, "of='day' must be 'epoch' or 'run'"),
        (Staggered, {"period": 0}, "period=0 must be a positive"),
        (StepsDelay, {"delay": 0}, "delay=0"),
        (StepsDelay, {"delay": 3, "warmup_steps": 500}, "such as 498 or 501"),
        (StepsDelay, {"warmup_steps": -4}, "warmup_steps=-4"),
        (StepsDelay, {"local_lr_scale": 0.0}, "local_lr_scale=0.0"),
        (StepsDelay, {"local_update": "adam"}, "local_update='adam'"),
    ],
)
def test_bad_arguments_are_named(kind, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**arguments)

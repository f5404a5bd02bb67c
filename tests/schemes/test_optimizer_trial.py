"""Optimizers that cannot step parts of tensors are found by a trial, whatever their names."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from harness import Rank, on_nodes, steps

from lightning_hiercomm.schemes import DiLoCo, StepsDelay
from lightning_hiercomm.schemes.optimizer_trial import why_not_in_parts, why_not_without_gradient

CPU = torch.device("cpu")
TWO = ((0,), (1,))


class Plain(torch.optim.SGD):
    """Calls :meth:`way` for each parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.way(p, p.grad, self.state[p], group), alpha=float(group["lr"]))

    @staticmethod
    def way(p, grad, state, group):
        return grad


def norm_in_state(p, grad, state, group):
    state["norm"] = 0.9 * state.get("norm", 0.0) + grad.norm()
    return grad / state["norm"]


def number_in_group(p, grad, state, group):
    group["d"] = max(group.get("d", 1e-6), float(grad.norm()) * 1e-6)
    return grad * group["d"]


def rows_in_state(p, grad, state, group):
    state["rows"] = grad.square().mean(-1, keepdim=True) if p.dim() > 1 else grad.square()
    return grad / (state["rows"].sqrt() + 1e-8)


def clips_from_the_fourth_step_on(p, grad, state, group):
    state["step"] = state.get("step", 0) + 1
    return grad if state["step"] < 4 else grad / max(1.0, float(grad.norm()))


def buffers_in_state(p, grad, state, group):
    buffers = state.setdefault("buffers", {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)})
    return sum(buffer.mul_(beta).add_(grad) for beta, buffer in buffers.items())


def state_of_no_parameter(optimizer, closure=None):
    optimizer.state["k"] = optimizer.state.get("k", 0) + 1
    Plain.step(optimizer, closure)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"step": state_of_no_parameter}, "its state 'k' belongs to no parameter"),
        ({"way": lambda p, grad, *_: grad * (p.norm() / grad.norm())}, "its step depends on all elements of a tensor"),
        ({"way": clips_from_the_fourth_step_on}, "its step depends on all elements of a tensor"),
        (
            {"way": lambda p, grad, *_: grad - grad.mean(-1, keepdim=True) if p.dim() > 1 else grad},
            "its step depends on all elements of a tensor",
        ),
        ({"way": norm_in_state}, "its state 'norm' depends on all elements"),
        ({"way": number_in_group}, "its 'd' in param_groups depends on all elements"),
        ({"way": lambda p, grad, *_: grad @ grad.mT @ grad}, "a trial step of a flat shard raised RuntimeError"),
        ({"way": rows_in_state}, "its state 'rows' is neither one number nor one per element"),
        ({"way": buffers_in_state}, "its state 'buffers' is neither one number nor one per element"),
    ],
)
def test_an_optimizer_of_whole_tensors_is_found_whatever_its_name(own, reason):
    methods = {name: staticmethod(method) if name == "way" else method for name, method in own.items()}
    optimizer = type("Named", (Plain,), methods)
    assert reason in (why_not_in_parts(partial(optimizer, lr=0.1), CPU) or "")
    for scheme, inner in (
        (DiLoCo(2, partial(optimizer, lr=0.1)), partial(torch.optim.SGD, lr=0.1)),
        (StepsDelay(2, 2, local_update="sgd"), partial(optimizer, lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"Named cannot|cannot serve Named") as error:
            on_nodes(steps(1), scheme, TWO, inner=inner)
        assert reason in str(error.value)
        assert re.search("Use an elementwise one|Use AllReduce", str(error.value))


@pytest.mark.parametrize(
    "make",
    [
        *(partial(torch.optim.SGD, lr=0.0, momentum=0.9, **given) for given in ({"foreach": True}, {"nesterov": True})),
        *(partial(torch.optim.Adam, **given) for given in ({}, {"fused": True}, {"amsgrad": True}, {"foreach": True})),
        partial(torch.optim.AdamW, lr=torch.tensor(0.0)),
        *(getattr(torch.optim, name) for name in ("NAdam", "RAdam", "ASGD", "RMSprop", "Rprop", "Adagrad", "Adamax")),
    ],
)
def test_elementwise_optimizers_pass_the_trial(make):
    assert why_not_in_parts(make, CPU, keeps_attributes=True) is None
    assert why_not_without_gradient(make, CPU) is None


def test_a_trial_leaves_the_optimizer_and_random_numbers_alone():
    class Noisy(Plain):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            self.calls = []
            self.cache = [0, [torch.zeros(1)]]

        def step(self, closure=None):
            self.calls.append(1)
            self.cache[1][0].add_(1)
            torch.rand(3)
            super().step(closure)

    def work(rank: Rank) -> None:
        assert rank.optimizer.calls == []
        assert rank.optimizer.cache == [0, [torch.zeros(1)]]
        assert rank.optimizer.param_groups[0]["lr"] == 0.5

    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    on_nodes(work, StepsDelay(2, 2, local_update="sgd"), ((0,),), inner=partial(Noisy, lr=0.5))
    assert torch.equal(torch.rand(4), expected)


class NeedsGradient(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"]))


class Decays(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
        super().step()


class AdaptsInGroup(Plain):
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] = 0.9 * group.get("scale", 1.0)
        super().step(closure)


@pytest.mark.parametrize("nodes", [((0,),), TWO], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (NeedsGradient, "without gradients raised TypeError"),
        (Decays, "moves parameters that have no gradient"),
        (AdaptsInGroup, "it changes 'scale' in param_groups.*Use AllReduce"),
    ],
)
def test_steps_delay_refuses_other_optimizers_with_the_reason(optimizer, reason, nodes):
    with pytest.raises(ValueError, match=f"cannot serve {optimizer.__name__}.*{reason}"):
        on_nodes(steps(1), StepsDelay(2, 2, local_update="sgd"), nodes, inner=partial(optimizer, lr=0.1))


@pytest.mark.parametrize("said", ["no kernel\nfor this frame\nnor that", ""])
def test_what_a_trial_step_raises_is_one_line_of_the_reason(said):
    class Fails(Plain):
        def way(self, *_):
            raise RuntimeError(said)

    ends = f"raised RuntimeError: {said.partition(chr(10))[0]}"
    assert str(why_not_in_parts(partial(Fails, lr=0.1), CPU)).endswith(ends)


def test_each_param_group_is_tried():
    def make(parameters):
        return ByFlag([{"params": parameters[:1]}, {"params": parameters[1:], "norms": True}], lr=0.1)

    class ByFlag(Plain):
        def way(self, p, grad, state, group):
            return grad / (grad.norm() if group.get("norms") else 1.0)

    with pytest.raises(ValueError, match="cannot serve ByFlag"):
        on_nodes(steps(1), StepsDelay(2, 2, local_update="sgd"), TWO, inner=make, shapes=((2,), (3,)))


class CountsInAttribute(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.taken = 0

    def step(self, closure=None):
        self.taken += 1
        super().step(closure)


class RemembersTwo(Plain):
    @staticmethod
    def way(p, grad, state, group):
        older = state.setdefault("older", state["last"]) if "last" in state else grad
        state["last"] = grad.clone()
        return older


@pytest.mark.parametrize(
    ("outer", "reason"),
    [
        (partial(RemembersTwo, lr=0.1), "RemembersTwo cannot .*its state 'older' first exists after 2 steps"),
        (partial(AdaptsInGroup, lr=0.1), "AdaptsInGroup cannot .*changes 'scale' in param_groups"),
        (CountsInAttribute, "CountsInAttribute cannot .*changes its attribute 'taken'"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot .*evaluates the loss"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1),
            "SGD cannot .*several param groups",
        ),
    ],
)
def test_other_outer_optimizers_are_refused_with_the_reason(outer, reason):
    with pytest.raises(ValueError, match=reason):
        on_nodes(steps(1), DiLoCo(2, outer), TWO)


def test_ranks_that_are_threads_try_one_after_another():
    """torch crashes if dispatch modes of two threads look up a rule at once."""
    inside, most = [], []

    def make(parameters):
        inside.append(None)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return torch.optim.SGD(parameters, lr=0.1)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(why_not, make, CPU) for why_not in (why_not_in_parts, why_not_without_gradient)]
        assert [each.result() for each in found] == [None, None]
    assert set(most) == {1}

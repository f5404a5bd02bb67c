"""Many runs at once end where the schemes' own code ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairwise import on_push
from torch.nn.utils import parameters_to_vector

from benchmarks.papers.many import (
    Arena,
    Averages,
    Compressed,
    Delayed,
    Gossips,
    Outer,
    Stale,
    State,
    Synchronous,
    accuracies,
    crossover,
    data,
    push,
    ring,
    train,
)
from benchmarks.papers.networks import CHARACTERS, NORMALIZED, character_split
from benchmarks.papers.sites import SITES
from benchmarks.papers.wires import wire_named
from benchmarks.simulate.simulation import Experiment, simulate
from benchmarks.simulate.tasks import Batches
from benchmarks.tasks import adamw
from benchmarks.zoo import TASKS
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Gossip,
    PeriodicAveraging,
    Plateau,
    RandomPermutation,
    StepsDelay,
)

pytest.importorskip("mnist1d")

ARENA = Arena("small", 4, 100, 4)  # epochs of 10 steps

SAME = {
    "all-reduce": (lambda: Synchronous(), lambda: AllReduce()),
    "averages every 4 steps": (lambda: Averages(4), lambda: PeriodicAveraging(4)),
    "averages after a synchronous phase": (
        lambda: Averages(4, synchronous=0.3),
        lambda: PeriodicAveraging(4, warmup_steps=0.3),
    ),
    "averages at epoch ends": (lambda: Averages(None), lambda: PeriodicAveraging(None)),
    "DASO": (lambda: Stale(4, 2, 1, 1), lambda: DASO(4, 2, Epochs(1), Epochs(1), plateau=Plateau(patience=0))),
    "DASO, delta, B = S": (
        lambda: Stale(2, 2, 1, 0, "delta", adapts=False),
        lambda: DASO(2, 2, Epochs(1), 0, "delta", plateau=None),
    ),
    "Crossover-SGD": (crossover, lambda: Gossip()),
    "SGP": (push, lambda: Gossip("directed_exponential", fragments=1)),
    "a ring": (ring, lambda: Gossip("ring", fragments=1)),
    "DiLoCo": (lambda: Outer(12, 0.7, 0.9), lambda: DiLoCo(12)),
    "DiLoCo, late": (
        lambda: Outer(12, 0.7, 0.9, staleness=3, keep_local=0.5),
        lambda: DiLoCo(12, staleness=3, keep_local=0.5),
    ),
    "SSD-SGD": (lambda: Delayed(3, 0.25), lambda: StepsDelay(3, 12)),
}


@pytest.mark.long("a run of 40 steps by the scheme itself, to compare with three trained at once")
@pytest.mark.parametrize("name", on_push(SAME, "DiLoCo, late"))
def test_runs_of_many_rates_and_seeds_end_where_the_scheme_itself_does(name):
    ours, scheme = SAME[name]
    found = train(ARENA, ours(), [(0.3, 1), (0.02, 2), (0.02, 3)])
    experiment = Experiment(name, scheme(), 4, 40, 0.02, 100, TASKS["mnist1d"], seed=3, shards=True)
    expected = parameters_to_vector(simulate(experiment, SITES["000"], 1).parameters)
    torch.testing.assert_close(found[2], expected, atol=3e-4, rtol=0)


ENCODED = {
    "all-reduce": (lambda codec: Compressed(codec), lambda: AllReduce()),
    "averages": (lambda codec: Averages(4, codec), lambda: PeriodicAveraging(4)),
    "averages after a synchronous phase": (
        lambda codec: Averages(4, codec, 0.25),
        lambda: PeriodicAveraging(4, warmup_steps=0.25),
    ),
    "averages with momentum": (
        lambda codec: Averages(4, codec, 0.25, with_state=True),
        lambda: PeriodicAveraging(4, warmup_steps=0.25),
    ),
    "DASO": (
        lambda codec: Stale(4, 2, 1, 1, adapts=False, codec=codec),
        lambda: DASO(4, 2, Epochs(1), Epochs(1), plateau=None),
    ),
    "DiLoCo": (lambda codec: Outer(12, 0.7, 0.9, codec=codec), lambda: DiLoCo(12)),
    "gossip": (lambda codec: Gossips(RandomPermutation, 8, codec), lambda: Gossip()),
}


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("averages", "int4"),
        *(pytest.param(name, "sparse2", marks=pytest.mark.nightly) for name in ("all-reduce", "averages")),
        *(pytest.param(name, "int4", marks=pytest.mark.nightly) for name in ENCODED if name != "averages"),
        pytest.param("all-reduce", "bfloat16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("nodes", [pytest.param(4, marks=pytest.mark.nightly), 2])
def test_encoded_runs_end_where_the_scheme_does(name, wire, nodes):
    ours, scheme = ENCODED[name]
    arena = Arena("small", nodes, 400 // nodes, 3)
    found = train(arena, ours(wire_named(wire)), [(0.3, 1), (0.02, 3)])
    experiment = Experiment(
        name, scheme(), nodes, 30, 0.02, 400 // nodes, TASKS["mnist1d"], seed=3, shards=True, wire_dtype=wire
    )
    experiment = replace(experiment, average_optimizer_state=name == "averages with momentum")
    expected = parameters_to_vector(simulate(experiment, SITES["000"], 1).parameters)
    torch.testing.assert_close(found[1], expected, atol=6e-4, rtol=0)


@pytest.mark.parametrize("ours", on_push([Synchronous(), Compressed(wire_named("float32")), Averages(1)], Averages(1)))
def test_batchnorm_runs_end_where_the_scheme_does(ours):
    arena = replace(ARENA, model="batchnorm", epochs=2)
    found = train(arena, ours, [(0.1, 1), (0.02, 3)])
    scheme = PeriodicAveraging(1) if isinstance(ours, Averages) else AllReduce()
    curve = simulate(Experiment("it", scheme, 4, 20, 0.02, 100, NORMALIZED, seed=3, shards=True), SITES["000"], 1)
    expected = parameters_to_vector(curve.parameters)
    torch.testing.assert_close(found[1, : len(expected)], expected, atol=3e-4, rtol=0)
    (accuracy,) = accuracies(arena, found[1:], NORMALIZED.load()[1])  # with the running statistics
    assert accuracy == pytest.approx(100 * curve.points[-1].accuracy, abs=0.3)


def test_characters_that_tune_and_judge_do_not_overlap():
    (train_windows, train_next), (tuning, tuning_next), (judging, _) = character_split()
    assert len(train_windows) == len(train_next)
    (_, _), (inputs, targets) = CHARACTERS.load()
    text = torch.cat([inputs.flatten(), targets[-1:]])
    ends = 4 * (len(tuning) - 1) + 17  # characters that the tuning windows and their targets reach
    assert torch.equal(tuning[-1], text[ends - 17 : ends - 1])
    assert tuning_next[-1] == text[ends - 1]
    first = 4 * (len(text.unfold(0, 17, 4)) - len(judging))  # a text may repeat itself, so this cannot be searched
    assert torch.equal(judging[0], text[first : first + 16])
    assert first >= ends


def test_validations_in_mid_run_use_the_averaged_model():
    seen = []
    arena = replace(ARENA, epochs=1)
    end = train(arena, Averages(4), [(0.02, 1)], [5, 10], seen.append)
    assert len(seen) == 2
    assert not torch.equal(seen[0], end)
    assert torch.equal(seen[1], end)


def test_adamw_is_torchs():
    arena = replace(ARENA, optimizer="adamw")
    found = train(arena, Averages(4), [(0.01, 1), (0.002, 2)])
    experiment = Experiment(
        "it", PeriodicAveraging(4), 4, 40, 0.002, 100, TASKS["mnist1d"], seed=2, optimizer=adamw, shards=True
    )
    expected = parameters_to_vector(simulate(experiment, SITES["000"], 1).parameters)
    torch.testing.assert_close(found[1], expected, atol=3e-4, rtol=0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
def test_muon_is_torchs():
    model, arena = TASKS["mnist1d"].model(1), replace(ARENA, optimizer="muon")
    weights = parameters_to_vector(model.parameters()).detach()[None, None].clone()
    hidden = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Conv1d)][1:]
    kernels = [torch.nn.Parameter(weight.detach().flatten(1).clone()) for weight in hidden]
    others = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in hidden)]
    optimizers = [
        torch.optim.Muon(kernels, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01),
    ]
    state = State(arena, weights.clone(), torch.zeros_like(weights), torch.full((1, 1, 1), 0.01))
    for state.step in range(3):
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for kernel, weight in zip(kernels, hidden, strict=True):
            kernel.grad = weight.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        state.descend(torch.cat([gradient.flatten() for gradient in gradients])[None, None])
    with torch.no_grad():
        for kernel, weight in zip(kernels, hidden, strict=True):
            weight.copy_(kernel.view_as(weight))
    expected = parameters_to_vector(model.parameters())
    moved = (expected - weights[0, 0]).split([150, 1875, 25, 1875, 25, 1250, 10])
    for ours, theirs in zip(
        (state.weights - weights)[0, 0].split([150, 1875, 25, 1875, 25, 1250, 10]), moved, strict=True
    ):
        near = 0.02 if len(ours) == 1875 else 1e-5  # torch's Muon has eight bits
        assert (ours - theirs).norm() < near * theirs.norm()


def test_unequal_batches_follow_the_given_weighting():
    sizes, weights = (5, 15), (0.5, 0.5)
    arena = Arena("unequal", 2, 10, 1)
    found = train(arena, Synchronous(sizes, weights), [(0.02, 1)])
    experiment = Experiment(
        "it", AllReduce(), 2, 200, 0.02, 10, TASKS["mnist1d"], seed=1, batches=sizes, weights=weights, shards=True
    )
    expected = parameters_to_vector(simulate(experiment, SITES["000"], 1).parameters)
    torch.testing.assert_close(found[0], expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("model", ["cnn", "perceptron", "batchnorm", "characters"])
def test_scores_are_those_of_the_module(model):
    arena = replace(ARENA, model=model)
    models = [arena.task.model(seed) for seed in (0, 1)]
    inputs = torch.randint(0, 100, (2, 3, 16)) if model == "characters" else torch.randn(2, 3, 40)
    flat = torch.stack([parameters_to_vector(model.parameters()) for model in models])
    expected = torch.stack([model(own) for model, own in zip(models, inputs, strict=True)])
    torch.testing.assert_close(arena.scores(flat, inputs), expected)


def test_shards_of_an_epoch_share_no_example_and_miss_none():
    task = TASKS["mnist1d"]
    replicas = [Batches(task, rank, 100, seed=5, shard=(100 * rank, 400)) for rank in range(4)]
    epoch = torch.cat([replica.draw()[0] for _ in range(10) for replica in replicas])
    assert torch.equal(epoch.sort(0).values, task.load()[0][0].sort(0).values)
    second = torch.cat([replica.draw()[0] for _ in range(10) for replica in replicas])
    assert not torch.equal(epoch, second)


def test_tuning_judging_and_training_share_no_example():
    seen = [tuple(row) for examples, _ in data() for row in examples.tolist()]
    assert len(set(seen)) == len(seen) == 10_000


def test_a_run_that_has_diverged_has_no_accuracy():
    of_two = torch.stack([torch.full((5210,), torch.nan), torch.zeros(5210)])
    none, some = accuracies(ARENA, of_two, data()[1])
    assert none is None
    assert 0 < some < 100

"""Lightning's own way to parallelize a module, unchanged, on nodes that a scheme synchronizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import STEPS, LanguageModel, Meta, Resumable, TensorParallel
from pairwise import on_push, requested

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
)
from lightning_hiercomm.comm.dtensor import local

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(5),
    "diloco": lambda: DiLoCo(3, fragments=["net.w2"], staleness=1),
    "gossip": lambda: Gossip(fragments=["net.w1"]),
}
WITH_DASO = {**SCHEMES, "daso": lambda: DASO(4, 2, 0, 0, reducer="sharded")}
SAVED_AT = 4


def _fit(module, strategy, devices, resume=None, **arguments):
    run = trainer(strategy, devices, max_epochs=1, **arguments)
    run.fit(module, ckpt_path=resume)
    schemes = getattr(run.strategy, "schemes", [])
    return {
        "state": whole_state(module),
        "held_by": sorted({b.held_by for s in schemes for b in s.replica.buckets_of_parameters}),
        "losses": module.report,
        "inter_bytes": run.strategy.communication()["inter_bytes"] if hasattr(run.strategy, "communication") else 0,
    }


def _whole(scheme, ranks_per_node):
    """Nodes whose ranks hold all, and keep their own buffers, as FSDP2's do."""
    return HierarchicalStrategy(scheme(), ranks_per_node=ranks_per_node, broadcast_buffers=False)


def _on_eight(names, folder):
    """Two nodes, each FSDP2 over two groups of two tensor parallel ranks."""
    results = {
        name: _fit(
            TensorParallel("adamw", replicas=4),
            HierarchicalModelParallelStrategy(SCHEMES[name](), tensor_parallel_size=2, ranks_per_node=4),
            8,
        )
        for name in names
    }
    _fit_saving(folder, "file", save_distributed_checkpoint=False, max_steps=SAVED_AT)
    results["from file"] = _fit_saving(folder, "file", _saved(folder, "file"), save_distributed_checkpoint=False)
    return results


def _example_on(ranks):
    strategy = HierarchicalModelParallelStrategy(DiLoCo(4), tensor_parallel_size=2, ranks_per_node=ranks // 2)
    return lambda _: _fit_example(strategy, ranks)


def _resumed_on_eight(folder):
    return {
        "saved": _fit_saving(folder, "directory", checkpoint_replicas=True),
        "resumed": _fit_saving(folder, "directory", _saved(folder, "directory"), checkpoint_replicas=True),
    }


def _fit_example(strategy, devices):
    run = trainer(strategy, devices, max_epochs=1)
    with run.init_module(empty_init=True):
        module = LanguageModel()
    run.fit(module)
    last = [parameter.to_local() for parameter in module.parameters()]
    return {"first": module.first, "last": last, "losses": module.report}


def _fit_saving(folder, name, resume=None, max_steps=-1, **arguments):
    saves = ModelCheckpoint(folder / name, "{step}", every_n_train_steps=SAVED_AT, save_top_k=1)
    strategy = HierarchicalModelParallelStrategy(
        SCHEMES["diloco"](), tensor_parallel_size=2, ranks_per_node=4, **arguments
    )
    module = Resumable("adamw", replicas=4)
    return _fit(module, strategy, 8, resume, enable_checkpointing=True, callbacks=[saves], max_steps=max_steps)


def _saved(folder, name):
    return folder / name / f"step={SAVED_AT}.ckpt"


def _on_four(names, of_both, folder):
    results = {
        name: _fit(
            TensorParallel("adamw", replicas=2),
            HierarchicalModelParallelStrategy(WITH_DASO[name](), tensor_parallel_size="auto", ranks_per_node=2),
            4,
        )
        for name in names
    }
    results["plain"] = _fit(TensorParallel("adamw", replicas=2), ModelParallelStrategy(2, 2), 4)
    for name in of_both:
        results["whole", name] = _fit(TensorParallel("adamw", replicas=4), _whole(SCHEMES[name], ranks_per_node=2), 4)
    if _saved(folder, "file").exists():
        whole = _whole(SCHEMES["diloco"], ranks_per_node=2)
        results["whole, from file"] = _fit(Resumable("adamw", replicas=4), whole, 4, _saved(folder, "file"))
    results["meta"] = _begin_on_meta()
    return results


def _begin_on_meta():
    held = []

    class Watch(Meta):
        def on_train_start(self):
            held.append([local(parameter) for parameter in self.parameters()])
            held.append([tensor.clone() for tensor in held[0]])

    module = Watch("adamw")
    trainer(HierarchicalModelParallelStrategy(PeriodicAveraging(5), ranks_per_node=2), max_epochs=1).fit(module)
    after = [local(parameter) for parameter in module.parameters()]
    assert all(now is before for now, before in zip(after, held[0], strict=True))  # or synchronizations went elsewhere
    return {"first": held[1], "last": after, "losses": module.report}


def _on_two(names, _):
    return {
        name: _fit(TensorParallel("adamw", replicas=2), _whole(WITH_DASO[name], ranks_per_node=1), 2) for name in names
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def names(request):
    """Of the schemes whose runs tests ask for: on tensor parallel nodes, and on nodes of both kinds."""
    return [sorted(name for (name,) in requested(request, parameter)) for parameter in ("name", "of_both")]


@pytest.fixture(scope="module")
def on_eight(launch, folder, names):
    return launch(partial(_on_eight, names[1]), ranks=8, folder=folder)


@pytest.fixture(scope="module")
def resumed_on_eight(launch, folder):
    return launch(_resumed_on_eight, ranks=8, folder=folder)


@pytest.fixture(scope="module")
def on_four(launch, folder, names, request):
    if names[1]:
        request.getfixturevalue("on_eight")  # writes a file that is read here
    return launch(partial(_on_four, *names), folder=folder)


@pytest.fixture(scope="module")
def on_two(launch, names):
    return launch(partial(_on_two, names[0]), ranks=2)


def _same(ours, expected):
    for parameter, values in expected["state"].items():
        torch.testing.assert_close(ours["state"][parameter], values, rtol=0, atol=1e-5)


BY_NIGHT = pytest.mark.nightly  # what differs by scheme shows on threads


@pytest.mark.parametrize("name", on_push(WITH_DASO, "all_reduce", "diloco"))
def test_tensor_parallel_nodes_train_like_nodes_of_one_rank(on_four, on_two, name):
    for results in on_four:
        _same(results[name], on_two[0][name])
        assert results[name]["held_by"] == ["node", "rank"]  # the norm is whole on every rank


@BY_NIGHT  # eight ranks; a push has nodes of either kind
@pytest.mark.parametrize("of_both", SCHEMES)
def test_nodes_of_both_kinds_train_like_nodes_of_data_parallel_ranks(on_eight, on_four, of_both):
    for results in on_eight:
        _same(results[of_both], on_four[0]["whole", of_both])
        assert results[of_both]["held_by"] == ["rank", "tensor_parallel"]
    model = 4 * (2 * 6 + 3 * 6 * 16 - 5 * 16)  # bytes: norm, w1, w3, w2
    if of_both == "periodic":  # synchronizations of 6 steps, and the first values: no copy of a part travels twice
        sent = sum(results[of_both]["inter_bytes"] for results in on_eight)
        preflights, padding = 3 * 24 * 8, 4 * 8  # of two synchronizations, and at the end
        buffers = 8 * 4 * 2  # bytes: two on each of eight ranks
        assert sent <= (model + buffers) * (2 * 2 + 1) + preflights + padding


@BY_NIGHT
def test_nodes_of_both_kinds_resume_to_the_bit(resumed_on_eight):
    for results in resumed_on_eight:
        assert results["resumed"]["losses"] == results["saved"]["losses"][SAVED_AT:]
        for parameter, values in results["saved"]["state"].items():
            assert torch.equal(results["resumed"]["state"][parameter], values), parameter


@BY_NIGHT
def test_a_checkpoint_of_nodes_of_both_kinds_goes_to_ranks_that_hold_all(on_eight, on_four):
    assert len(on_four[0]["whole, from file"]["losses"]) == STEPS - SAVED_AT
    _same(on_four[0]["whole, from file"], on_eight[0]["from file"])


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=BY_NIGHT)])
def test_a_module_like_lightnings_example_trains_unchanged(launch, ranks):
    examples = launch(_example_on(ranks), ranks=ranks)
    for ours, theirs in zip(examples[: ranks // 2], examples[ranks // 2 :], strict=True):
        for place in ("first", "last"):  # the nodes drew other values each
            assert all(torch.equal(a, b) for a, b in zip(ours[place], theirs[place], strict=True))
        assert ours["losses"] != theirs["losses"]
        assert ours["losses"][-1] < 0.5 * ours["losses"][0]


def test_the_same_module_trains_under_lightnings_own_strategy(on_four):
    assert on_four[0]["plain"]["losses"][-1] < on_four[0]["plain"]["losses"][0]


def test_nodes_that_begin_on_the_meta_device_begin_equal(on_four):
    for one, other in ((0, 2), (1, 3)):
        first, second = on_four[one]["meta"], on_four[other]["meta"]
        assert any(not torch.equal(a, b) for a, b in zip(first["first"], first["last"], strict=True))
        for place in ("first", "last"):
            assert all(torch.equal(a, b) for a, b in zip(first[place], second[place], strict=True))
        assert first["losses"] != second["losses"]

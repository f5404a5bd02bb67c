"""Lightning's own way to parallelize a module, unchanged, on nodes that a scheme synchronizes."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import LanguageModel, Meta, Resumable, TensorParallel

from lightning_hiercomm import (
    AllReduce,
    DiLoCo,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
)
from lightning_hiercomm.comm.dtensor import local

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(5),
    "diloco": lambda: DiLoCo(3, fragments=["net.w2"], staleness=1),
}
ON_PUSH = ("all_reduce", "diloco")  # what differs by scheme shows on threads
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


def _on_eight(folder):
    """Two nodes, each FSDP2 over two groups of two tensor parallel ranks."""

    def sharded(name, **arguments):
        return HierarchicalModelParallelStrategy(SCHEMES[name](), tensor_parallel_size=2, ranks_per_node=4, **arguments)

    def saving(resume=None):
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=1)
        more = {"enable_checkpointing": True, "callbacks": [saves]}
        strategy = sharded("diloco", checkpoint_replicas=True)
        return _fit(Resumable("adamw", replicas=4), strategy, 8, resume, **more)

    trained = _fit(TensorParallel("adamw", replicas=4), sharded("periodic"), 8)
    return {"trained": trained, "saved": saving(), "resumed": saving(folder / f"step={SAVED_AT}.ckpt")}


def _fit_example():
    strategy = HierarchicalModelParallelStrategy(DiLoCo(4), tensor_parallel_size=2, ranks_per_node=2)
    run = trainer(strategy, 4, max_epochs=1)
    with run.init_module(empty_init=True):
        module = LanguageModel()
    run.fit(module)
    last = [parameter.to_local() for parameter in module.parameters()]
    return {"first": module.first, "last": last, "losses": module.report}


def _on_four(_):
    results = {
        name: _fit(
            TensorParallel("adamw", replicas=2),
            HierarchicalModelParallelStrategy(SCHEMES[name](), tensor_parallel_size="auto", ranks_per_node=2),
            4,
        )
        for name in ON_PUSH
    }
    return {**results, "meta": _begin_on_meta(), "example": _fit_example()}


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


def _on_two(_):
    return {name: _fit(TensorParallel("adamw", replicas=2), _whole(SCHEMES[name], 1), 2) for name in ON_PUSH}


@pytest.fixture(scope="module")
def on_eight(launch):
    return launch(_on_eight, ranks=8)


@pytest.fixture(scope="module")
def on_four(launch):
    return launch(_on_four)


@pytest.fixture(scope="module")
def on_two(launch):
    return launch(_on_two, ranks=2)


def _same(ours, expected):
    torch.testing.assert_close(ours["state"], expected["state"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ON_PUSH)
def test_tensor_parallel_nodes_train_like_nodes_of_one_rank(on_four, on_two, name):
    for results in on_four:
        _same(results[name], on_two[0][name])
        assert results[name]["held_by"] == ["node", "rank"]  # the norm is whole on every rank


@pytest.mark.nightly  # eight ranks; a push has nodes of either kind
def test_nodes_of_both_kinds_train_like_nodes_of_data_parallel_ranks(launch, on_eight):
    def whole(_):
        return _fit(TensorParallel("adamw", replicas=4), _whole(SCHEMES["periodic"], ranks_per_node=2), 4)

    expected = launch(whole)[0]
    for results in on_eight:
        _same(results["trained"], expected)
        assert results["trained"]["held_by"] == ["rank", "tensor_parallel"]
    model = 4 * (2 * 6 + 3 * 6 * 16 - 5 * 16)  # bytes: norm, w1, w3, w2
    # synchronizations of 6 steps, and the first values: no copy of a part travels twice
    sent = sum(results["trained"]["inter_bytes"] for results in on_eight)
    preflights, padding = 3 * 24 * 8, 4 * 8  # of two synchronizations, and at the end
    buffers = 8 * 4 * 2  # bytes: two on each of eight ranks
    assert sent <= (model + buffers) * (2 * 2 + 1) + preflights + padding


@pytest.mark.nightly
def test_nodes_of_both_kinds_resume_to_the_bit(on_eight):
    for results in on_eight:
        assert results["resumed"]["losses"] == results["saved"]["losses"][SAVED_AT:]
        torch.testing.assert_close(results["resumed"]["state"], results["saved"]["state"], rtol=0, atol=0)


def test_a_module_like_lightnings_example_trains_unchanged(on_four):
    first, second, *others = (results["example"] for results in on_four)
    for ours, theirs in zip((first, second), others, strict=True):
        for place in ("first", "last"):  # the nodes drew other values each
            assert all(torch.equal(a, b) for a, b in zip(ours[place], theirs[place], strict=True))
        assert ours["losses"] != theirs["losses"]
        assert ours["losses"][-1] < 0.5 * ours["losses"][0]


def test_nodes_that_begin_on_the_meta_device_begin_equal(on_four):
    for one, other in ((0, 2), (1, 3)):
        first, second = on_four[one]["meta"], on_four[other]["meta"]
        assert any(not torch.equal(a, b) for a, b in zip(first["first"], first["last"], strict=True))
        for place in ("first", "last"):
            assert all(torch.equal(a, b) for a, b in zip(first[place], second[place], strict=True))
        assert first["losses"] != second["losses"]

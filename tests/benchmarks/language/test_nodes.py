"""The nodes of a language model: threads of one process that compute what processes do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated import Simulated

from benchmarks.language import corpus
from benchmarks.language.model import SIZES, Transformer, loss_of
from benchmarks.language.nodes import Plan, held_out_loss, train
from benchmarks.simulate.tasks import Batches

STEPS = SIZES["toy"].steps
METHODS_WITH_STATE = ("five_levels", "power_sgd", "diloco16", "daso", "gossip", "steps_delay")


class Stopped(Exception):
    pass


def plan(method, nodes=2):
    return Plan("toy", method, 1e-2, seed=0, nodes=nodes)


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.pooled
def test_a_trainer_with_the_strategy_gives_the_same_parameters(fit):
    experiment = plan("int4").experiment()
    # DDP rebuilds its buckets after a step, except with this argument, and codecs depend on the order in a bucket
    strategy = {"scheme": experiment.scheme, "wire_dtype": "int4", "ranks_per_node": 1, "find_unused_parameters": True}
    reports = fit(Simulated(experiment), strategy, devices=2, gradient_clip_val=1.0)
    expected = train(plan("int4")).parameters
    for report in reports:
        assert_same(expected, report["state_dict"].values())


@pytest.mark.parametrize("method", METHODS_WITH_STATE)
def test_a_run_that_was_killed_continues_exactly(method, tmp_path):
    file = tmp_path / "run.checkpoint"
    whole = train(plan(method, nodes=4))

    def stop(step):
        if step == STEPS - 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(plan(method, nodes=4), file, stop)
    continued = train(plan(method, nodes=4), file)
    assert_same(whole.parameters, continued.parameters)
    assert continued.points == whole.points
    assert continued.sent == whole.sent
    assert (whole.parts, continued.parts) == (1, 2)


def test_nodes_draw_different_batches_and_seeds_give_different_models():
    first, other = train(plan("all_reduce")), train(replace(plan("all_reduce"), seed=1))
    assert not torch.equal(first.parameters[0], other.parameters[0])
    task = plan("all_reduce").experiment().task
    assert not torch.equal(Batches(task, 0, 2).draw()[0], Batches(task, 1, 2).draw()[0])


def test_targets_are_the_bytes_after_the_inputs():
    inputs, targets = Batches(plan("all_reduce").experiment().task, 0, 2).draw()
    assert inputs.shape == targets.shape == (2, SIZES["toy"].length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_held_out_loss_is_that_of_windows_over_the_whole_text():
    model, text = Transformer(SIZES["toy"]), corpus.load().judging
    length = SIZES["toy"].length
    losses = [loss_of(model, (text[at : at + length][None], text[at + 1 : at + 1 + length][None])) for at in (0, 341)]
    assert held_out_loss(model, text, 2, length) == pytest.approx(float(sum(losses)) / 2, rel=1e-5)


def test_narrower_payloads_send_fewer_bytes():
    sent = {
        method: train(plan(method)).sent
        for method in ("all_reduce", "bfloat16", "int8", "int4", "seven_levels", "five_levels", "sparse2", "four_of_32")
    }
    assert list(sent.values()) == sorted(sent.values(), reverse=True)
    assert sent["all_reduce"] / sent["seven_levels"] == pytest.approx(32 / 3.07, rel=0.05)

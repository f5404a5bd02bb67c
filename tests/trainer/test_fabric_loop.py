"""Loops on Fabric: epochs, and what a loop goes on with after a load."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainer.conftest import by_sgd, is_equal_on_all_ranks, linear, step

from lightning_hiercomm import DASO, DiLoCo, Epochs, HierarchicalFabricStrategy, PeriodicAveraging, Plateau, StepsDelay


def test_a_state_of_another_format_is_refused():
    strategy = HierarchicalFabricStrategy()
    with pytest.raises(ValueError, match="format") as raised:
        strategy.load_state_dict({"schedules": []})
    assert str(raised.value) == (
        "the strategy's entry in the checkpoint has no format number, but this version of lightning-hiercomm reads only"
        " format 5. Leave the strategy out of the state of fabric.load to continue from the parameters alone."
    )
    state = strategy.state_dict()
    strategy.load_state_dict(state)
    assert strategy.state_dict() == state


def half_without_epochs(fabric, strategy, path, resumes):
    torch.manual_seed(fabric.global_rank)
    model, optimizer = by_sgd(fabric, nn.Linear(3, 1))
    state = {"model": model, "optimizer": optimizer, "strategy": strategy}
    if resumes:
        fabric.load(path, state)
    (scheme,) = strategy.schemes
    synchronized_at = []
    for number in range(6 * resumes, 14):
        before = scheme.state.synchronizations
        step(fabric, model(torch.ones(2, 3)).square().mean(), optimizer)
        synchronized_at += [number + 1] * (scheme.state.synchronizations > before)
        if number == 5 and not resumes:
            fabric.save(path, state)
    return synchronized_at


@pytest.mark.parametrize("scheme", [PeriodicAveraging(4), DASO(4, 0, 0, 0)], ids=type)
def test_a_resumed_loop_without_epochs_keeps_its_schedule(launched, scheme, tmp_path):
    runs = [launched(scheme, half_without_epochs, tmp_path / "half.ckpt", resumes) for resumes in (False, True)]
    for whole, resumed in zip(*runs, strict=True):
        assert resumed == [at for at in whole if at > 6]
        assert len(resumed) >= 2


def left_and_begun_again(fabric, strategy):
    module = linear(1, 1, bias=False).float()
    model, optimizer = by_sgd(fabric, module, lr=1.0)
    seen = []
    for count in (2, 4):
        for _ in strategy.epochs(count, first=count - 2):
            seen.append(module.weight.item())
            step(fabric, -model(torch.full((1, 1), 1.0 + fabric.global_rank)).sum(), optimizer)
            break
    strategy.finish()
    assert [*seen, module.weight.item()] == [0.0, 2.5, 5.0]


def test_a_second_loop_starts_from_the_averaged_model_of_the_first(launched):
    launched(PeriodicAveraging(100), left_and_begun_again)


def unfrozen_half(fabric, strategy, path, resumes):
    module = linear(3, 2, weight=1.0).float()
    model, optimizer = by_sgd(fabric, module, lr=0.01)

    def train(numbers):
        for number in numbers:
            module.bias.requires_grad_(number >= 2)
            output = model(torch.full((2, 3), number + 1.0))
            step(fabric, (output - fabric.global_rank).square().mean(), optimizer)

    everything = {"model": model, "optimizer": optimizer, "schedule": strategy}
    if resumes:
        fabric.load(path, everything)
    else:
        train(range(4))
        fabric.save(path, everything)
    train(range(4, 8))
    strategy.finish()
    return module.state_dict()


@pytest.mark.parametrize("scheme", [DiLoCo(2), StepsDelay(2, 8)], ids=repr)
def test_a_loop_resumes_after_parameters_were_unfrozen(launched, scheme, tmp_path):
    path, settings = tmp_path / "half.ckpt", {"find_unused_parameters": True}
    whole, resumed = (launched(scheme, unfrozen_half, path, resumes, **settings) for resumes in (False, True))
    torch.testing.assert_close(resumed, whole)


def late_and_back(fabric, strategy, folder):
    """Sets up a second module in mid-run, reads a teacher, and goes back to an earlier state of all."""
    first, second, teacher = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    model, optimizer = by_sgd(fabric, first)
    more, phases, saved = [], [], {"model": model, "optimizer": optimizer, "schedule": strategy}
    fabric.save(folder / "teacher.ckpt", {"teacher": teacher})
    for epoch in strategy.epochs(4, steps=2):
        for _ in range(2):
            for each, stepper in [(model, optimizer), *more]:
                step(fabric, (each(torch.ones(1, 1)) - fabric.global_rank).square().sum(), stepper)
            if not more:
                more = [by_sgd(fabric, second)]
                saved |= {"more": more[0][0], "more_optimizer": more[0][1]}
        if epoch == 1:
            own = first.weight.item()
            fabric.save(folder / "good.ckpt", saved)  # touches nothing that trains
            fabric.load(folder / "teacher.ckpt", {"teacher": teacher})
            assert first.weight.item() == own
            with strategy.averaged_model():
                assert is_equal_on_all_ranks(fabric, first.weight)
        if epoch == 2:
            fabric.load(folder / "good.ckpt", saved)
            assert [scheme.state.steps for scheme in strategy.schemes] == [4, 3]
        phases.append([(scheme.phase, scheme.state.epoch) for scheme in strategy.schemes])
    names = ["warm-up", "cycling", "cycling", "cool-down"]
    assert phases == [[(name, epoch)] * 2 for epoch, name in enumerate(names)], phases


def test_a_loop_goes_on_with_a_later_module_and_after_a_load(launched, tmp_path):
    launched(DASO(4, 2, warmup=Epochs(1), cooldown=Epochs(1)), late_and_back, tmp_path)


def losing_patience(fabric, strategy, path, resumes):
    model, optimizer = by_sgd(fabric, nn.Linear(1, 1), lr=0.0)
    saved, periods = {"model": model, "optimizer": optimizer, "schedule": strategy}, []
    if resumes:
        fabric.load(path, saved)
    for epoch in strategy.epochs(6, first=2 * resumes):
        for _ in range(2):
            fabric.backward(model(torch.ones(1, 1)).sum() * 0.0 + 1.0)
            optimizer.step()
        periods.append(strategy.schemes[0].period)
        if epoch == 1 and not resumes:
            fabric.save(path, saved)
    return periods


def test_the_loss_before_a_save_counts_after_a_resume(launched, tmp_path):
    scheme, path = DASO(4, 2, 0, 0, plateau=Plateau(patience=2)), tmp_path / "half.ckpt"
    whole, resumed = (launched(scheme, losing_patience, path, resumes)[3] for resumes in (False, True))
    assert whole[0] != whole[-1]
    assert resumed == whole[2:]

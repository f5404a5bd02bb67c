"""Gradients that a program averages itself, or not at all, and communication hooks of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fits import outcome, outcomes
from problems import Manual, Quadratic

from lightning_hiercomm import AllReduce, PeriodicAveraging


class Plain(Manual):
    """Two optimizers; some backward passes are plain ones, which average nothing: ``how``."""

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.backbone, self.head)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.zero_grad()
        losses = [self.loss(batch[0], layer) for layer in (self.backbone, self.head)]
        if self.how in ("all", "averages itself"):
            sum(losses).backward()
        elif self.how == "second":
            self.manual_backward(sum(losses))
            first.step()
            self.zero_grad()
            self.loss(batch[0], self.head).backward()
        else:
            self.manual_backward(sum(losses))
            self.clip_gradients(first, 0.1, "norm")
        if self.how == "averages itself":
            for p in self.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if self.how != "second":
            first.step()
        second.step()


def test_gradients_that_ranks_should_share_and_do_not_are_named(borrow):
    for name, ranks in outcomes(borrow, {how: (Plain(how=how), AllReduce()) for how in ("all", "second")}):
        assert [error for error, _, _ in ranks] == ["", ""]
        assert [len(said) for _, said, _ in ranks] == [1, 0], name
        said = ranks[0][1][0]
        assert "SGD stepped with gradients that ranks 0, 1 should share, but that were not averaged" in said
        assert "call self.manual_backward(loss) instead of loss.backward()" in said


def test_gradients_that_are_averaged_in_any_way_are_right(borrow):
    ways = ("clips", "averages itself")
    layouts = ((AllReduce(), 1), (PeriodicAveraging(2), 2))
    fits = {f"{how}, {layout}": (Plain(how=how), *layout) for how in ways for layout in layouts}
    for name, ranks in outcomes(borrow, {**fits, "one rank per node": (Plain(how="all"), PeriodicAveraging(2), 1)}):
        said = [(error, [text for text in said if "one node" not in text]) for error, said, _ in ranks]
        assert said == [("", [])] * 2, name


def test_ranks_of_a_node_that_do_not_share_gradients_are_named(borrow):
    def program(folder):
        return outcome(folder, Plain(how="all"), PeriodicAveraging(2), 2, devices=4)

    said = [said for _, said, _ in borrow(program, ranks=4)]
    assert [len(each) for each in said] == [1, 0, 1, 0]
    assert "ranks 2, 3 should share" in said[2][0]


class Hooked(Quadratic):
    """Registers a communication hook of torch's besides the strategy's, as it would with DDP."""

    def on_fit_start(self):
        self.trainer.model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def test_a_communication_hook_of_the_program_is_refused_on_every_layout(borrow):
    for _, ranks in outcomes(borrow, {str(sizes): (Hooked(), AllReduce(), sizes) for sizes in (1, 2)}):
        for error, _, _ in ranks:
            assert error.startswith("register_comm_hook(")
            assert "FP16_COMPRESS" in error
            assert "DDP has one communication hook, and the hierarchical strategy averages gradients by it" in error
            assert "wire_dtype" in error

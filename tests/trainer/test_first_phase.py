"""A synchronous first phase under a Trainer: DDP spans all nodes in it, and the node afterwards."""

from __future__ import annotations

import pytest
import torch
from fits import fit_here, outcome, weights_of
from harness import TARGETS
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import Oracle, Quadratic, Stream, fitted
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, DiLoCo, HierarchicalFabricStrategy, HierarchicalStrategy, PeriodicAveraging

# targets 0, 2 and 4, 10: 4 by all, 1 and 7 by node; every step goes half of the way
PHASES = PeriodicAveraging(3, warmup_steps=2)


class Watched(Oracle):
    """Reports the parameter, and the size of DDP's process group; 1 where no gradients are shared."""

    def on_train_batch_end(self, *_):
        model = self.trainer.strategy.model
        size = model.process_group.size() if isinstance(model, DistributedDataParallel) else 1
        self.report.append((self.x.item(), size))


class TwoSteps(Watched):
    """Steps twice in each batch, by manual optimization."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_ranks_follow_the_table_to_the_digit(borrow):
    def main(folder):
        def report(module, scheme=PHASES, ranks_per_node=2, **arguments):
            arguments |= {"ranks_per_node": ranks_per_node, "devices": 4, "max_epochs": 1}
            fit_here(folder, module, scheme, **arguments)
            return module.report

        accumulated = report(Watched(10), accumulate_grad_batches=2)
        two_steps = report(TwoSteps(3), PeriodicAveraging(6, warmup_steps=3))
        return report(Watched(5)), report(Watched(5), ranks_per_node=1), accumulated, two_steps

    reports = borrow(main)
    for rank, (of_two, of_one, accumulated, two_steps) in enumerate(reports):
        # the third step ends in a mean, (2 + 5) / 2
        target = 1.0 if rank < 2 else 7.0
        third, fourth = 3.5, (3.5 + target) / 2
        expected = [2.0, 3.0, third, fourth, (fourth + target) / 2]
        assert [x for x, _ in of_two][:4] == expected[:4]
        assert [ranks for _, ranks in of_two] == [4, 4, 2, 2, 2]
        assert [ranks for _, ranks in of_one] == [4, 4, 1, 1, 1]
        assert [x for x, _ in of_one][:3] == [2.0, 3.0, 3.5]
        alone = (3.5 + TARGETS[rank]) / 2
        assert of_one[3][0] == alone
        assert [x for x, _ in accumulated][1::2][:4] == expected[:4]
        # three synchronous steps (2, 3, 3.5), then three of the node: DDP is made again with the third batch
        assert two_steps == [(3.0, 4), ((3.5 + target) / 2, 4), (3.9375, 2)]


class OnOneNode(Quadratic):
    """Uses its head on the first node only, and normalizes what it gets."""

    lr = 0.05

    def __init__(self) -> None:
        super().__init__(steps=4)
        self.norm = nn.BatchNorm1d(11, affine=False)

    def training_step(self, batch, batch_idx):
        layers = (self.backbone, self.head) if self.global_rank < 2 else (self.backbone,)
        return self.loss(self.norm(batch[0]), *layers)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def on_train_epoch_end(self):
        self.report = [p.detach().clone() for p in self.parameters()]


def test_the_phase_equals_all_reduce_also_where_one_node_uses_a_layer(borrow):
    def main(folder):
        found = []
        for scheme in (AllReduce(), PeriodicAveraging(3, warmup_steps=4), DiLoCo(3, warmup_steps=4)):
            strategy = HierarchicalStrategy(scheme, ranks_per_node=2, find_unused_parameters=True)
            found.append(fitted(folder, OnOneNode(), strategy, max_epochs=1)["state_dict"])
        return found

    for expected, *others in borrow(main):
        for values in others:
            for name, tensor in expected.items():
                assert torch.equal(values[name], tensor), name


@pytest.mark.parametrize(
    ("scheme", "wire"), [(PeriodicAveraging(3, warmup_steps=6), "int4"), (DiLoCo(3, warmup_steps=0.5), None)]
)
def test_resume_in_the_phase_and_at_its_end_changes_nothing(borrow, scheme, wire):
    class Adam(Quadratic):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    def fit(folder, *callbacks, path=None):
        own = {"ranks_per_node": 2, "checkpoint_replicas": True, "wire_dtype": wire, "callbacks": [*callbacks]}
        length = {"devices": 4, "max_epochs": 6, "enable_checkpointing": bool(callbacks)}
        fit_here(folder, module := Adam(steps=2), scheme, path, **own, **length)
        return torch.tensor(weights_of(module))

    def main(folder):
        # a file after every epoch of 2 steps: in the phase, at its end, after it
        saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
        whole = fit(folder, saves)
        return [(step, whole, fit(folder, path=folder / f"step={step}.ckpt")) for step in (4, 6, 8)]

    for found in borrow(main):
        for step, expected, resumed in found:
            assert torch.equal(resumed, expected), step


class Unsized(Quadratic):
    """Its epochs have an unknown length."""

    def train_dataloader(self):
        return DataLoader(Stream(torch.ones(4, 11)), batch_size=1, collate_fn=lambda rows: [torch.stack(rows)])


def test_a_share_of_an_unknown_number_of_steps_is_refused_by_name(borrow):
    def main(folder):
        found = []
        for module, arguments in (
            (Unsized(), {"max_epochs": 1}),
            (TwoSteps(2), {"max_epochs": 1}),
            (Quadratic(), {"max_epochs": -1}),
        ):
            error, *_ = outcome(folder, module, PeriodicAveraging(2, warmup_steps=0.5), **arguments)
            found.append((error, module.report or []))
        return found

    for found in borrow(main, ranks=2):
        assert len(found) == 3
        for message, report in found:
            assert "warmup_steps=0.5 is a fraction of the run, whose number of optimizer steps is unknown" in message
            assert report == []


def test_unsupported_uses_of_the_phase_are_refused_before_training():
    scheme = PeriodicAveraging(4, warmup_steps=8)
    with pytest.raises(ValueError, match="warmup_steps=8 averages gradients over all nodes at every step, so none may"):
        HierarchicalStrategy(scheme, elastic="localhost:29510")
    with pytest.raises(ValueError, match="warmup_steps=8 needs a Trainer"):
        HierarchicalFabricStrategy(scheme)

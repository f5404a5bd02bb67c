"""Ways to optimize."""

from __future__ import annotations

import pytest
import torch
from problems import Net, Normalized, Quadratic, same_bits
from torch import nn


class Gan(Net):
    """The discriminator steps at every batch, the generator at every second one."""

    def __init__(self) -> None:
        super().__init__(automatic_optimization=False)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch, batch_idx):
        discriminate, generate = self.optimizers()
        real = batch[0]
        fake = self.generator(real[:, :3])
        self.toggle_optimizer(discriminate)
        loss = (1 - self.layers(real)).relu().mean() + (1 + self.layers(fake.detach())).relu().mean()
        self.manual_backward(loss)
        discriminate.step()
        discriminate.zero_grad()
        self.untoggle_optimizer(discriminate)
        if batch_idx % 2 == 1:
            self.toggle_optimizer(generate)
            self.manual_backward(-self.layers(self.generator(real[:, :3])).mean())
            generate.step()
            generate.zero_grad()
            self.untoggle_optimizer(generate)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers.parameters(), lr=0.1), torch.optim.SGD(self.generator.parameters(), lr=0.2)]

    def on_train_end(self):
        schemes = getattr(self.trainer.strategy, "schemes", [])
        self.report = [(scheme.state.steps, len(scheme.replica.parameters)) for scheme in schemes]


@pytest.mark.feature("two optimizers (GAN), each on its own schedule")
def test_gan_with_toggled_optimizers(follows_one_device):
    strategy = {"find_unused_parameters": True}
    ours, one = follows_one_device(Gan, strategy=strategy, use_distributed_sampler=False)
    assert [report["report"] for report in ours] == [[(8, 4), (4, 4)]] * 4
    assert not torch.equal(one["state_dict"]["generator.0.bias"], Gan().generator[0].bias)


class UsedOnOneRank(Quadratic):
    """The head takes part on rank 1 only: on its node DDP averages with a zero, on the other node no rank uses it."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0], *((self.backbone, self.head) if self.global_rank == 1 else (self.backbone,)))


@pytest.mark.feature("unused parameters")
def test_parameters_used_on_one_rank_only(fit_on_ranks):
    reports = fit_on_ranks(UsedOnOneRank, strategy={"find_unused_parameters": True})
    same_bits(reports)
    assert not torch.equal(reports[3]["state_dict"]["head.bias"], Quadratic().head.bias)


@pytest.mark.feature("torch.compile")
@pytest.mark.long("imports torch's compiler, and compiles on every rank")
def test_compiled_module(compiler, follows_one_device):
    follows_one_device(lambda: torch.compile(Net(), backend="aot_eager"), use_distributed_sampler=False)


@pytest.mark.feature("BatchNorm statistics are averaged")
def test_batchnorm_statistics_are_those_of_first_ranks(fit_on_ranks):
    reports = fit_on_ranks(Normalized)
    same_bits(reports)
    assert reports[0]["state_dict"]["norm.running_mean"].abs().min() > 0.1


class Synced(Normalized):
    def training_step(self, batch, batch_idx):
        ranks = torch.distributed.get_process_group_ranks(self.norm.process_group)
        self.report = (type(self.norm).__name__, ranks)
        return self.loss(batch[0], self.backbone, self.head)


@pytest.mark.feature("SyncBatchNorm inside the node")
def test_sync_batchnorm_keeps_to_the_node(fit_on_ranks, monkeypatch):
    # where DDP refuses to run it on a CPU
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    reports = fit_on_ranks(Synced, sync_batchnorm=True, max_epochs=1)
    nodes = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [report["report"] for report in reports] == [("SyncBatchNorm", ranks) for ranks in nodes]


class Words(Quadratic):
    """Every rank looks up rows of its own."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 3, sparse=sparse)

    def training_step(self, batch, batch_idx):
        words = (batch[0][:, :4].abs() * 20).long() % 40
        return self.loss(batch[0], self.backbone, self.head) + self.rows(words).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, *_):
        self.report = self.rows.weight.grad.is_sparse


@pytest.mark.feature("sparse gradients: Embedding(sparse=True)")
def test_sparse_gradients_train_as_dense_ones_do(fit, scheme, scheme_name):
    sparse, dense = (fit(Words(sparse), {"scheme": scheme}, max_epochs=2) for sparse in (True, False))
    assert [report["report"] for report in sparse] == [scheme_name != "steps_delay"] * 4
    same_bits(sparse)
    assert not torch.allclose(dense[0]["state_dict"]["rows.weight"], Words(False).rows.weight, atol=1e-3)
    torch.testing.assert_close(sparse[0]["state_dict"], dense[0]["state_dict"])

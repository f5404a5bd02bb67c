"""The gossip examples, run the way their docstrings say."""

import pytest


def rows(out):
    """The cells of the printed table, by row name."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:2] == "| "]
    return {name: values for name, *values in cells[1:]}


def test_spectra_equal_those_of_the_paper_and_are_drawn(folder):
    out = rows(folder.run("gossip_spectra.py", "--ranks=16", "--steps=16", "--seeds=20"))
    at = {
        name: [tuple(map(float, cell.split(" / "))) for cell in cells] for name, cells in out.items()
    }  # k = 1, 2, ...
    fair, unfair = at["random permutation, uniform"], at["random without fairness"]
    exponential = at["directed exponential (SGP)"]
    assert fair[1][0] < exponential[1][0]  # faster at first,
    assert exponential[2] == (0, 0)  # but exact after log2(16) steps
    assert unfair[-1][1] > 50 * fair[-1][1]  # the imbalance stays without fairness,
    assert at["random without fairness, push-sum"][-1][1] < unfair[-1][1] / 5  # and goes with push-sum weights
    assert (folder.path / "gossip_spectra.png").stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.long("two epochs of the main job on four ranks, which have to learn")
@pytest.mark.parametrize("config", ["gossip.yaml", "sgp.yaml"])
def test_digits_train_with_gossip(folder, config):
    out = folder.fit_digits("--config", folder.digits / config, "--trainer.max_epochs=2")
    assert folder.accuracy(out) > 50

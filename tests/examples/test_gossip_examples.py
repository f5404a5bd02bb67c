"""The gossip examples, run the way their docstrings say."""

import re

import pytest


def rows(out):
    """The cells of the printed table, by row name."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:2] == "| "]
    return {name: values for name, *values in cells[1:]}


def test_spectra_show_what_the_paper_says_and_draw_the_plot(folder):
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


@pytest.mark.long("five schemes train one after the other")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "epochs", "batch", "accuracy"),
    [(4, 1, 32, 25), pytest.param(8, 3, 16, 70, marks=pytest.mark.nightly)],
)
def test_the_comparison_prints_one_row_per_scheme(folder, ranks, epochs, batch, accuracy):
    arguments = (f"--ranks={ranks}", f"--epochs={epochs}", f"--batch-size={batch}", "--seeds=1", "--optimizer=lars")
    printed = folder.run("digits/compare_gossip.py", *arguments)
    assert "run 1 of 5: all-reduce, seed 0\n" in printed
    assert re.search(r"run 5 of 5: hierarchical Crossover, 4 x 2, seed 0, about \d+ s left", printed)
    out = rows(printed)
    assert list(out) == [
        "all-reduce",
        "SGP",
        "Crossover without fairness",
        "Crossover",
        "hierarchical Crossover, 4 x 2",
    ]
    assert all(float(cells[0]) > accuracy for cells in out.values())
    assert all(cells[1] == "one seed" for cells in out.values()), "no spread is known of one run"
    sent = {name: float(cells[2]) for name, cells in out.items()}
    assert sent["SGP"] == sent["Crossover"] == sent["hierarchical Crossover, 4 x 2"]
    a_model = sent["all-reduce"] * ranks / (2 * (ranks - 1))
    assert sent["SGP"] == pytest.approx(a_model, rel=0.1)

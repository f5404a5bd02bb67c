"""The digits, run the way their configurations say; the main job, the way `make demo` does."""

import re

import pytest


@pytest.mark.long("two epochs of the main job on four ranks, with all that it writes and prints")
def test_short_run_trains_tests_and_reports(folder):
    out = folder.fit_digits("--trainer.max_epochs=2")
    assert folder.accuracy(out) > 50
    assert "Communication of 32 optimizer steps on 4 ranks" in out
    assert "synchronizations between nodes: 8" in out
    last = [line for line in out.splitlines() if not line.startswith("[W")][-3:]  # torch warns without a name server
    assert "times what was sent" in last[0]
    assert "cross entropy" in last[1]
    assert "in bytes" in last[2]
    assert list(folder.path.glob("runs/digits/version_0/events.*"))
    assert list(folder.path.glob("runs/digits/version_0/checkpoints/*.ckpt"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "said"), [("config.yaml", r"([5-9]|\d\d)\.\d times what was sent"), ("daso.yaml", "")]
)
def test_the_digits_are_learned_as_well_as_by_all_reduce(folder, all_reduce_accuracy, config, said):
    printed = folder.fit_digits("--config", folder.digits / config)
    assert folder.accuracy(printed) >= 97
    assert folder.accuracy(printed) >= all_reduce_accuracy - 1
    assert re.search(said, printed)

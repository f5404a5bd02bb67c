"""The README's first program."""

import re

import pytest


@pytest.mark.long("all 320 steps of the README's program on four ranks")
@pytest.mark.slow
def test_the_quickstart_trains_and_prints_the_bytes_saved(folder):
    out = folder.run("quickstart.py")
    assert "Communication of 320 optimizer steps on 4 ranks" in out
    assert float(re.search(r"([\d.]+) times what was sent", out)[1]) > 5

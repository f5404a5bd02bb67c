"""A process may open as many files as its ranks need connections, as far as it is allowed to."""

from __future__ import annotations

import resource

import pytest

from lightning_hiercomm.control import open_files


@pytest.mark.parametrize(
    ("soft", "hard", "files", "then", "enough"),
    [
        (1024, 1024, 1000, 1024, True),
        (1024, 4096, 2000, 2000, True),
        (1024, 4096, 5000, 4096, False),
        (1024, resource.RLIM_INFINITY, 5000, 5000, True),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 5000, resource.RLIM_INFINITY, True),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_lets_it(monkeypatch, soft, hard, files, then, enough):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    assert open_files.raise_limit(files) == enough
    assert limits[-1] == (then, hard)


@pytest.mark.parametrize(("ranks", "of_rank_0", "said"), [(512, True, True), (512, False, False), (8, True, False)])
def test_rank_0_says_whether_a_full_mesh_is_too_large_where_that_can_be(monkeypatch, ranks, of_rank_0, said):
    monkeypatch.setattr(open_files, "raise_limit", lambda files: files < 1024)
    assert open_files.mesh_is_too_large(ranks, lambda own: of_rank_0) == said

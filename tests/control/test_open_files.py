"""A process may open as many files as its ranks need connections, as far as it is allowed to."""

from __future__ import annotations

import resource

import pytest

from lightning_hiercomm.control import open_files


@pytest.mark.parametrize(
    ("soft", "hard", "files", "then"),
    [
        (1024, 1024, 1000, 1024),
        (1024, 4096, 2000, 2000),
        (1024, 4096, 5000, 4096),
        (1024, resource.RLIM_INFINITY, 5000, 5000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 5000, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_lets_it(monkeypatch, soft, hard, files, then):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    open_files.raise_limit(files)
    assert limits[-1] == (then, hard)


def test_ranks_beyond_a_full_mesh_open_two_files_each_at_the_store():
    assert [open_files.has_mesh(ranks) for ranks in (1, 64, 65, 4096)] == [True, True, False, False]
    assert [open_files.needed_files(ranks) for ranks in (64, 65)] == [320, 258]

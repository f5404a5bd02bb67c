"""The table of all messages is current, so that a change of a message shows in its review."""

from __future__ import annotations

import messages


def test_table_of_messages_is_current():
    assert messages.TABLE.read_text() == messages.table(), "run `python tools/messages.py`"


def test_messages_have_their_kind_and_values(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '''"""A docstring of five words."""
if x:
    raise ValueError(f"nodes={n} must be at least 1" + " in each run")
log.warning("rank %s is late by more than a step", rank)
parser.add_argument("--x", help="the number of all nodes")
'''
    )
    assert [*messages.messages(path)] == [
        ("ValueError", "nodes={n} must be at least 1 in each run"),
        ("log warning", "rank %s is late by more than a step"),
    ]

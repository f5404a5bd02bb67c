"""The table of all messages is current, so that a change of a message shows in its review."""

from __future__ import annotations

import messages


def test_table_of_messages_is_current():
    assert messages.TABLE.read_text() == messages.table(), "run `python tools/messages.py`"

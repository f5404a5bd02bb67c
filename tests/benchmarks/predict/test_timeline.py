"""Resources and links, against times worked out by hand."""

from __future__ import annotations

from benchmarks.predict.timeline import Timeline


def test_a_resource_is_sequential_and_resources_overlap():
    line = Timeline()
    first, second, other = line.add("a", 2.0), line.add("a", 3.0), line.add("b", 4.0)
    line.run()
    assert [(task.start, task.end) for task in (first, second, other)] == [(0, 2), (2, 5), (0, 4)]


def test_an_operation_waits_for_others():
    line = Timeline()
    sent = line.add("link", 3.0)
    line.add("training", 1.0)
    waited = line.add("training", after=[sent])
    last = line.add("training", 1.0)
    line.run()
    assert (waited.start, last.end) == (3, 4)
    assert line.busy("training", 0, 4) == 2


def test_a_delay_releases_the_resource():
    line = Timeline()
    messages = [line.add("link", 1.0, delay=5.0) for _ in range(2)]
    arrived = line.add("training", after=messages)
    line.run()
    assert [task.free for task in messages] == [1, 2]
    assert arrived.end == 7


def test_resources_share_a_link_in_order():
    line = Timeline()
    line.add("a", 2.0, link="inside")
    waits = line.add("training", 3.0)
    late = line.add("b", 2.0, after=[waits], link="inside")  # takes it from 3 to 5
    split = line.add("a", 2.0, link="inside")  # from 2 to 3, and from 5 to 6
    after = line.add("a", 1.0, link="inside")
    line.run()
    assert [task.end for task in (late, split, after)] == [5, 6, 7]


def test_operations_without_length_end_at_once():
    line = Timeline()
    a = line.add("a")
    b = line.add("b", after=[a])
    c = line.add("a", after=[b])
    line.run()
    assert c.end == 0

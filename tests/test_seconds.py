"""What is told about the tests' seconds."""

from __future__ import annotations

from seconds import read, report

XML = """<testsuites><testsuite>
<testcase classname="tests.run.test_averaged_model" name="test_one[a]" time="30.0"><properties>
<property name="fixture" value="20.00 9.50 ranks" /><property name="processor" value="12.5" /></properties></testcase>
<testcase classname="tests.run.test_averaged_model" name="test_two" time="2.0"><properties>
<property name="processor" value="1.5" /></properties></testcase>
<testcase classname="tests.schemes.test_daso" name="test_three" time="1.0" />
<testcase classname="tests.test_soak" name="test_four" time="9.0"><properties>
<property name="long" value="memory grows slowly" /></properties></testcase>
</testsuite></testsuites>"""


def test_seconds_are_summed_by_kind_file_and_fixture(tmp_path):
    (tmp_path / "seconds.xml").write_text(XML)
    lines = report(read(tmp_path / "seconds.xml"), longest=2).splitlines()
    for row in (
        "| fits on forked ranks | 2 | 32 | 14 |",
        "| threads and single processes | 1 | 1 | 0 |",
        "| all | 4 | 42 | 14 |",
        "| run/test_averaged_model | 2 | 32 | 14 |",
        "| ranks (run/test_averaged_model) | 1 | 20 | 10 |",
        "| run/test_averaged_model: test_one[a] | 1 | 30 | 12 |",
    ):
        assert row in lines
    assert "test_three" not in "".join(lines)  # only the longest


def test_a_long_test_that_does_not_say_why_is_told(tmp_path):
    (tmp_path / "seconds.xml").write_text(XML)
    *_, told, last = report(read(tmp_path / "seconds.xml"), longest=2).splitlines()
    assert told == "More than 5 s on its own, and does not say why:"
    assert last == "- run/test_averaged_model: test_one[a]: 10 s"

# SPDX-License-Identifier: Apache-2.0
"""The summary of all suites says which tests failed, and what they said."""

from __future__ import annotations

from pathlib import Path

import pytest

from count_tests import LINES, main

OF_PYTEST = """
<testsuites><testsuite>
  <testcase classname="tests.a" name="good"/>
  <testcase classname="tests.a" name="bad"><failure message="no">{}</failure></testcase>
  <testcase classname="tests.a" name="broken"><error message="no">no fixture</error></testcase>
</testsuite></testsuites>
"""
OF_CTEST = """
<testsuite>
  <testcase classname="Sum.Adds" name="Sum.Adds" status="run"><system-out>ok</system-out></testcase>
  <testcase classname="Sum.Fails" name="Sum.Fails" status="fail">
    <failure message=""/><system-out>expected 1, got 2</system-out>
  </testcase>
</testsuite>
"""


def test_failed_tests_are_listed_after_the_ends_of_their_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_pytest, of_ctest = tmp_path / "python.xml", tmp_path / "cpp.xml"
    of_pytest.write_text(OF_PYTEST.format("\n".join(map(str, range(LINES + 1)))))
    of_ctest.write_text(OF_CTEST)

    status = main([str(of_pytest), str(of_ctest)])

    listed = [
        "failed: python: tests.a.bad",
        "failed: python: tests.a.broken",
        "failed: cpp: Sum.Fails",
    ]
    assert status == 1
    assert capsys.readouterr().out.splitlines() == [
        listed[0],
        *(f"    {line}" for line in range(1, LINES + 1)),
        listed[1],
        "    no fixture",
        listed[2],
        "    expected 1, got 2",
        *listed,
        "2 passed, 3 failed",
    ]


def test_only_tests_that_lack_a_device_may_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "python.xml"
    results.write_text(
        '<testsuite><testcase classname="a" name="b"><skipped message="cuda: none"/></testcase>'
        '<testcase classname="a" name="c"><skipped message="tired"/></testcase></testsuite>'
    )

    assert main([str(results)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "skipped without need: python: a.c",
        "0 passed, 0 failed, 2 skipped",
    ]

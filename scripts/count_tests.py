#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Add up the test results in JUnit files and print them in a single line.

Exits with an error if a test failed, a test was skipped that needs neither a CUDA device nor
network namespaces, or one of the files contains no test.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

# What reasons to skip a test begin with.
MAY_BE_MISSING = ("cuda", "namespaces")

# The end of a failed test's output that is printed, for each of the first tests that failed.
LINES = 40
MOST_SHOWN = 10


def may_be_skipped(case: ElementTree.Element) -> bool:
    """Return whether a test needs what machines may lack, by ctest's label or pytest's reason."""
    labels = [
        label
        for item in case.iter("property")
        if item.get("name") == "cmake_labels"
        for label in item.get("value", "").split(";")
    ]
    reasons = [item.get("message", "") for item in case.iter("skipped")]
    return "cuda" in labels or any(reason.startswith(MAY_BE_MISSING) for reason in reasons)


def describe(case: ElementTree.Element) -> str:
    """Return the full name of a test case: ctest writes it into both attributes."""
    name, classname = case.get("name", ""), case.get("classname", "")
    return name if name == classname else f"{classname}.{name}"


def outcome(case: ElementTree.Element) -> str:
    """Return passed, failed or skipped."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    # For a test that could not be started, ctest writes the status to an attribute.
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return "failed" if case.get("status") == "fail" else "passed"


def end_of_output(case: ElementTree.Element) -> list[str]:
    """Return the last lines of a failed test: the traceback of pytest, or what ctest keeps."""
    for tag in ("failure", "error", "system-out"):
        text = (case.findtext(tag) or "").strip()
        if text:
            return [f"    {line}" for line in text.splitlines()[-LINES:]]
    return []


def main(arguments: Sequence[str]) -> int:
    """Print what failed tests say, the problems and the summary; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JUnit files of ctest and pytest")
    parser.add_argument(
        "--left-out", nargs="*", default=[], help="suites that did not run, for the last line"
    )
    given = parser.parse_args(arguments)
    results: list[Path] = given.results

    counts = {"passed": 0, "failed": 0, "skipped": 0}
    complaints, outputs = [], []
    for path in results:
        cases = list(ElementTree.parse(path).iter("testcase")) if path.exists() else []
        if not cases:
            complaints.append(f"no test ran: {path}")
        for case in cases:
            counts[outcome(case)] += 1
            if outcome(case) == "failed":
                complaints.append(f"failed: {path.stem}: {describe(case)}")
                outputs.append([complaints[-1], *end_of_output(case)])
            if outcome(case) == "skipped" and not may_be_skipped(case):
                complaints.append(f"skipped without need: {path.stem}: {describe(case)}")

    for output in outputs[:MOST_SHOWN]:
        print(*output, sep="\n")
    for complaint in complaints:
        print(complaint)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    left_out = f"; left out: {', '.join(given.left_out)}" if given.left_out else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}{left_out}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""The commands of the documents: those that can run do, and the others name what exists.

A block that begins with ```sh runs, in the root of the repository. A second word says why a block
does not run here:

    minutes     it takes long, or builds; make check and .ci/run do most of it
    network     it downloads
    gpu, hosts  it needs a GPU, or several hosts
    a path      the test that runs it

The languages of all other blocks are those of LANGUAGES; test_docs.py and tests/clients run Python.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, blocks_of, commands_in

TIMEOUT_SECONDS = 120  # some forty times what a block takes

REASONS = ("minutes", "network", "gpu", "hosts")
LANGUAGES = {
    "python",  # test_docs.py
    "python clients",  # tests/clients
    "python before",  # of another library alone
    "python ultralytics",  # a library that the tests do without
    "cpp",  # tests/consumer
    "cpp fragment",  # a part of a program
    "cmake",
    "diff",  # test_train.py
    "python train.py",  # files of the tutorial, and changes of them: test_docs.py
    "python load.py",
    "diff train.py",
    "text",  # output
}

SHELL = [
    (document, language, code)
    for document in DOCUMENTS
    for language, code in blocks_of(document)
    if language.split()[:1] == ["sh"]
]

MAKEFILE = (ROOT / "Makefile").read_text()
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "code"),
    [
        pytest.param(document, code, id=f"{document}: {code.splitlines()[0]}")
        for document, language, code in SHELL
        if language == "sh"
    ],
)
def test_shell_blocks_run(document: str, code: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )

    assert run.returncode == 0, (document, run.stderr)
    assert run.stdout


def test_each_block_is_of_a_known_kind() -> None:
    for document in DOCUMENTS:
        for language, code in blocks_of(document):
            kind, _, reason = language.partition(" ")
            if kind == "sh" and "/" in reason:
                named = (ROOT / reason).read_text()
                scripts = re.findall(r"\S+\.py", code)
                assert scripts, (document, language)
                assert all(Path(script).name in named for script in scripts), (document, code)
            elif kind == "sh":
                assert reason in ("", *REASONS), (document, language)
            else:
                assert language in LANGUAGES, (document, language)


def test_each_program_in_cpp_is_one_that_the_consumer_builds() -> None:
    consumer = (ROOT / "tests/consumer/CMakeLists.txt").read_text()
    sections = re.split(r"^## ", (ROOT / "docs/cpp.md").read_text(), flags=re.MULTILINE)

    programs = [section.splitlines()[0] for section in sections if "```cpp\n" in section]

    assert len(programs) == sum(language == "cpp" for language, _ in blocks_of("docs/cpp.md"))
    for heading in programs:
        assert re.search(rf'docs/cpp\.md "?{heading}"? ', consumer), heading


def targets() -> set[str]:
    (names,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    return set(names.replace("\\", "").split())


def recipe(target: str) -> str:
    """The lines of a target, of all its rules if it has several."""
    rule = rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:.*\n((?:\t.*\n)*)"
    found = re.findall(rule, MAKEFILE, re.MULTILINE)
    assert found, target
    return "".join(found)


def is_option_of(option: str, scripts: list[str]) -> bool:
    """Whether the source of a script, or of what lies next to it, has this option as a literal."""
    return any(
        f'"{option}"' in path.read_text()
        for script in scripts
        for path in (ROOT / script).parent.glob("*.py")
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_targets_files_and_options_that_exist(document: str) -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]

    for command in commands_in(document):
        words = re.split(r"\s+", command)
        if words[0] == "make":
            arguments = shlex.split(command)[1:]
            values = dict(word.split("=", 1) for word in arguments if "=" in word)
            goals = [word for word in arguments if re.fullmatch(r"[a-z][a-z-]*", word)]
            assert targets().issuperset(goals), command
            scripts = re.findall(r"(?<=\(python\) )\S+\.py", "".join(map(recipe, goals)))
            for option in OPTION.findall(values.get("ARGS", "")):
                assert is_option_of(option, scripts), command
        for script in re.findall(
            r"(?<!\S)(?:python3?|torchrun .*?) ((?:examples|benchmarks|scripts)/\S+\.py)", command
        ):
            assert (ROOT / script).is_file(), command
            for option in OPTION.findall(command.partition(script)[2]):
                assert option == "--help" or is_option_of(option, [script]), command
        if words[0] in ("cmake", "ctest"):
            for preset in re.findall(r"--preset (\w+)", command):
                assert preset in {each["name"] for each in presets}, command

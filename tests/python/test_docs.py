# SPDX-License-Identifier: Apache-2.0
"""The code in the documents runs, and the layers do what the pictures show.

Blocks that begin with ```python run in order, in one namespace per document, on the only rank of a
world. Blocks that need other libraries begin with ```python clients and run in tests/clients.
Blocks that begin with ```python before only contain another library's code, and do not run; neither
do those with ```python ultralytics. test_commands_in_docs.py covers the other languages. The blocks
of the tutorial are the files train.py and load.py, changes of them, and commands that run them.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from documents import DOCUMENTS, FENCED, ROOT, commands, run_blocks
from programs import output_of
from rank_pool import RankPool, module_of
from torch import distributed

import normscope
import performance_tables
import recommending_tables

# The deployment tools cause warnings about themselves and their dependencies.
DEPLOYING = pytest.param(
    "docs/deploying.md",
    marks=[
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        pytest.mark.filterwarnings("ignore::FutureWarning"),
        pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
        pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quant:UserWarning"),
    ],
)
RUNNING = (
    "README.md",
    "docs/scopes.md",
    "docs/recommending.md",
    "docs/scaling.md",
    "docs/migrating.md",
    "docs/faults.md",
    DEPLOYING,
)
TUTORIAL = "docs/tutorial.md"
TUTORIAL_SECONDS = 300  # some ten times what a command takes
MODULES = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),  # at a free port
}
# A layer and its scope.
PLANNED = re.compile(r"^(\d+) +\d+ +\d+ +[\d.]+ +([a-z]\S+)", re.MULTILINE)

LINK = re.compile(r"\]\((?P<target>[^)#:]*)(#(?P<heading>[^)]*))?\)")

# A scope in a picture and its samples: squares with the colour and the letter of a norm batch.
ROW = re.compile(r'class="scope"[^>]*>([^<]+)<(.*?)(?=<text class="scope"|</svg>)', re.DOTALL)
SQUARE = re.compile(r'fill="(#\w+)"/>\s*<text class="batch"[^>]*>(\w)<')
DRAWN = sorted(
    {
        (scope, tuple(SQUARE.findall(squares)))
        for picture in (ROOT / "docs/pictures").glob("*.svg")
        for scope, squares in ROW.findall(picture.read_text())
    }
)
RANKS, SAMPLES = 4, 2  # samples of each rank


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("document", RUNNING)
def test_python_blocks_run(document: str) -> None:
    assert run_blocks(document, ("python",))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_point_to_existing_files_and_headings(document: str) -> None:
    path = ROOT / document

    for link in LINK.finditer(FENCED.sub("", path.read_text())):
        target = path.parent / link["target"] if link["target"] else path
        assert target.exists(), link.group()
        if link["heading"]:
            assert link["heading"] in anchors(target.read_text()), link.group()


def test_each_change_of_the_tutorial_fits() -> None:
    followed = list(commands(TUTORIAL))

    for step in followed:
        for name, code in step.files.items():
            compile(code, name, "exec")
    assert len({step.files["train.py"] for step in followed}) == 4
    assert len(followed) == 5


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    for step in commands(TUTORIAL):
        for name, code in step.files.items():
            (tmp_path / name).write_text(code)
        program, *arguments = step.command.split()

        output = output_of(*MODULES[program], *arguments, seconds=TUTORIAL_SECONDS, folder=tmp_path)

        expected, got = accuracy(step.output), accuracy(output)
        # Five standard deviations of the accuracy of 360 guesses: convolutions round differently
        # on other machines.
        assert abs(got - expected) < 5 * (expected * (1 - expected) / 360) ** 0.5, output
        assert PLANNED.findall(output) == PLANNED.findall(step.output)


def accuracy(output: str) -> float:
    (told,) = re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)
    return float(told)


@pytest.mark.parametrize(("document", "end"), [("faults", "## Several"), ("semantics", "## Furt")])
def test_the_tests_named_for_each_rule_exist(document: str, end: str) -> None:
    table = (ROOT / f"docs/{document}.md").read_text().split(end)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    tests = "".join(
        path.read_text() for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cpp")
    )

    faults = module_of(str(ROOT / "tests/python/test_faults.py")).FAULTS

    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[-2])
        assert named, row
        for name in named:
            if name.endswith(".py"):
                assert (ROOT / "tests/python" / name).exists(), name
            else:
                is_test = f"def {name}(" in tests or f", {name})" in tests
                assert is_test or any(fault.startswith(name) for fault in faults), name


def anchors(text: str) -> set[str]:
    """Return the link anchors of all headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tables_of_speed_are_those_of_the_results() -> None:
    text = performance_tables.DOCUMENT.read_text()

    assert performance_tables.with_tables(text) == text


@pytest.mark.parametrize("document", recommending_tables.DOCUMENTS)
def test_tables_of_recommendations_are_those_of_the_results(document: str) -> None:
    text = (ROOT / document).read_text()

    tables = recommending_tables.DOCUMENTS[document]
    assert performance_tables.with_tables(text, tables) == text


def samples() -> torch.Tensor:
    """Return the samples of all ranks, with distinct means and several values per channel."""
    generator = torch.Generator().manual_seed(0)
    count = RANKS * SAMPLES
    x = torch.randn(count, 1, 3, dtype=torch.float64, generator=generator)
    return x + torch.arange(count).view(-1, 1, 1)


def normalize(scope: str) -> torch.Tensor:
    """Normalize this rank's samples, on two hosts with two ranks each as in the pictures."""
    rank = distributed.get_rank()
    os.environ["NORMSCOPE_NODE"] = str(rank // 2)
    layer = normscope.BatchNorm1d(1, affine=False, dtype=torch.float64, scope=scope)
    y: torch.Tensor = layer(samples()[rank * SAMPLES : (rank + 1) * SAMPLES])
    return y


@pytest.mark.parametrize(("scope", "squares"), DRAWN, ids=[scope for scope, _ in DRAWN])
def test_layers_share_statistics_as_drawn(
    ranks: RankPool, scope: str, squares: tuple[tuple[str, str], ...]
) -> None:
    got = torch.cat(ranks.run(RANKS, normalize, scope))

    assert len(squares) == len(got)
    for square in set(squares):
        norm_batch = [i for i, other in enumerate(squares) if other == square]
        expected = torch.nn.functional.batch_norm(samples()[norm_batch], None, None, training=True)
        # Numbers of order one, each off by a few dozen roundings of 1e-16.
        torch.testing.assert_close(got[norm_batch], expected, rtol=0, atol=1e-13)

# SPDX-License-Identifier: Apache-2.0
"""Modules import only what is before them, and importing them changes nothing in torch."""

import ast
import json
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from programs import output_of

import normscope

ROOT = Path(normscope.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"

# Members of every module that torch does not document.
PRIVATE_MEMBERS = {name for name in vars(torch.nn.Module()) if name.startswith("_")}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imports_of(tree: ast.Module) -> set[str]:
    """Return the modules of normscope that a module imports, also in functions and for types."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in TREES else node.module for full in names.values()}
    return found & TREES.keys()


IMPORTS = {name: imports_of(tree) for name, tree in TREES.items()}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """Return the private names of torch in a module, but not those that a class inherits."""
    found, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            bound |= {alias.name for alias in node.names if alias.name == "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_own = text == f"self.{node.attr}"
            if text.split(".")[0] in bound or (node.attr in PRIVATE_MEMBERS and not is_own):
                found.add(text)
    return {name for name in found if any(is_private(part) for part in name.split("."))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert "normscope._binding.ops" in IMPORTS["normscope.layers.scope"]
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError


def test_packages_depend_on_each_other_in_the_order_of_the_architecture() -> None:
    imports: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        others = {package_of(name) for name in names} - {package_of(module)}
        imports.setdefault(package_of(module), set()).update(others)
    packages = {f"normscope.{path.parent.name}" for path in ROOT.glob("*/__init__.py")}

    in_order = [name for name in TopologicalSorter(imports).static_order() if name in packages]

    arrows = "  <-  ".join(name.removeprefix("normscope.") for name in in_order)
    assert f"    {arrows}\n" in ARCHITECTURE.read_text()


def test_the_names_of_normscope_are_few_and_from_its_packages() -> None:
    packages = (normscope.layers, normscope.models, normscope.scopes, normscope.training)

    assert len(normscope.__all__) <= 25
    assert set(normscope.__all__) <= {name for package in packages for name in package.__all__}


PROGRAM = """
import copy, json, os, sys, torch
import torch._dynamo, torch.distributed.tensor  # which change classes of torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Parallel

def members():
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
    values = [value for module in modules for value in vars(module).values()]
    classes = {value for value in values if isinstance(value, type)}
    return {c: dict(vars(c)) for c in classes if c.__module__.partition(".")[0] == "torch"}

before = members()
import normscope
after = members()
print(len(before), "lightning" in sys.modules, [
    f"{c.__qualname__}.{name}"
    for c in before
    for name in before[c].keys() | after[c].keys()
    if before[c].get(name) is not after[c].get(name)
], flush=True)

def theirs():
    return [
        of_torch.__module__.partition(".")[0] == "torch" and not hasattr(of_torch, "__wrapped__")
        for of_torch in (Join.__enter__, Join.__exit__, Parallel._passing_sync_batchnorm_handle)
    ]

kept = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3)), "slices:2")
kept = [kept, copy.deepcopy(kept), normscope.BatchNormAct1d(3, scope="local")]
kept.append(normscope.functional.batch_norm(torch.ones(2, 3), None, None, scope="local"))
unchanged = theirs()
# Forks, because an import of torch takes seconds.
for made in sys.argv[1:]:
    if os.fork() == 0:
        exec(made)
        print(json.dumps([made, unchanged, theirs()]), flush=True)
        os._exit(0)
    os.wait()
"""

# What makes layers that need a change in torch, and whether Join and the check stay torch's.
MAKING = {
    "pass": [True, True, True],
    "normscope.BatchNorm1d(3)": [False, False, True],
    "kept[0][0].scope = 'group:2'": [False, False, True],
    "normscope.convert(torch.nn.BatchNorm1d(3))": [False, False, True],
    "normscope.functional.batch_norm(torch.ones(2, 3), None, None, training=True)": [
        False,
        False,
        True,
    ],
    "normscope.convert(torch.nn.SyncBatchNorm(3), 'local')": [True, True, False],
    "normscope.SyncBatchNorm(3)": [False, False, False],
}


def test_torch_is_changed_only_for_layers_that_need_it() -> None:
    of_import, *of_layers = output_of("-c", PROGRAM, *MAKING, seconds=120).splitlines()

    classes, lightning, changed = of_import.split(maxsplit=2)
    assert int(classes) > 1000
    assert lightning == "False"
    assert not hasattr(normscope, "ScopeSync")
    assert changed == "[]"
    assert list(map(json.loads, of_layers)) == [
        [made, [True, True, True], theirs] for made, theirs in MAKING.items()
    ]


TRAINING = """
import sys, torch, torch.distributed
before = "torch._dynamo" in sys.modules
import normscope
model = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU()), fuse=True)
x = torch.ones(2, 3)
model(x).sum().backward()
normscope.BatchNorm1d(3).eval()(x, mask=torch.ones(2, 1, dtype=torch.bool))
print(before, "torch._dynamo" in sys.modules)
"""


def test_layers_do_not_import_the_compiler_of_torch() -> None:
    before, after = output_of("-c", TRAINING, seconds=120).split()

    assert before == after


def test_private_names_of_torch_are_in_one_file() -> None:
    users = [name for name, tree in TREES.items() if private_names_of_torch(tree)]

    assert users == ["normscope._binding.torch_private"]

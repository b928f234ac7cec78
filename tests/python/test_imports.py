# SPDX-License-Identifier: Apache-2.0
"""The modules of the package can be read in one order, each after those that it imports."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import normscope

PACKAGE = Path(normscope.__file__).parent


def imports_of(module: Path) -> set[str]:
    """Return the modules of the package that one imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "normscope":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("normscope."):
            found.add(str(node.module).removeprefix("normscope."))
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {path.stem for path in PACKAGE.glob("*.py")}

    imports = {name: imports_of(PACKAGE / f"{name}.py") & names for name in names}

    assert "_library" in imports["modules"]
    TopologicalSorter(imports).prepare()  # raises CycleError

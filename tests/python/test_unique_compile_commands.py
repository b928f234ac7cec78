# SPDX-License-Identifier: Apache-2.0
"""The linter checks every source file exactly once."""

import json
from pathlib import Path

from unique_compile_commands import main


def test_of_several_commands_for_a_file_the_first_is_kept(tmp_path: Path) -> None:
    commands = [
        {"file": file, "directory": str(tmp_path), "command": f"c++ -D{macro} {file}"}
        for file, macro in (("a.cpp", "FIRST"), ("b.cpp", "ONLY"), ("a.cpp", "SECOND"))
    ]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands))

    main([str(tmp_path), str(tmp_path / "lint")])

    assert json.loads((tmp_path / "lint/compile_commands.json").read_text()) == commands[:2]

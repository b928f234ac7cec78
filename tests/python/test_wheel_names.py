# SPDX-License-Identifier: Apache-2.0
"""A wheel's version and requirements name the torch that it was compiled with."""

from __future__ import annotations

import email
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from name_wheel import main, rename, version_for

METADATA = """\
Metadata-Version: 2.4
Name: normscope
Version: 0.2.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.11

# normscope

Version: of the text, which stays.
"""


def write_wheel(directory: Path, torch: str | None = "2.13.0\n", metadata: str = METADATA) -> Path:
    """Write a small wheel with the layout of scikit-build-core; return its path."""
    path = directory / "normscope-0.2.0-py3-none-linux_x86_64.whl"
    files = {
        "normscope/__init__.py": "",
        "normscope-0.2.0.dist-info/METADATA": metadata,
        "normscope-0.2.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
        "Tag: py3-none-linux_x86_64\n",
        "normscope-0.2.0.dist-info/RECORD": "",
    }
    if torch is not None:
        files["normscope/torch_version.txt"] = torch
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        library = zipfile.ZipInfo("normscope/libnormscope.so.0.2")
        library.external_attr = 0o100755 << 16
        archive.writestr(library, b"\x7fELF")
    return path


@pytest.mark.parametrize(
    ("arguments", "version"), [([], "0.2.0+torch2.13"), (["--published"], "0.2.0.post213")]
)
def test_version_and_requirement_name_the_release_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], version: str
) -> None:
    main([*arguments, str(write_wheel(tmp_path))])

    new = Path(capsys.readouterr().out.strip())
    assert [path.name for path in tmp_path.iterdir()] == [new.name]
    assert parse_wheel_filename(new.name)[1] == Version(version)
    with zipfile.ZipFile(new) as archive:
        text = archive.read(f"normscope-{version}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Version"] == version
    assert metadata.get_all("Requires-Dist") == ["torch==2.13.0"]
    assert "Version: of the text, which stays." in metadata.get_payload()


def test_pip_prefers_the_wheel_for_the_newest_torch() -> None:
    torches = ["2.9.1", "2.11.0", "2.13.0", "3.0.0"]
    for published in (False, True):
        versions = [Version(version_for("0.2.0", t, published=published)) for t in torches]

        assert versions == sorted(versions)
        assert Version("0.2.0") < versions[0]
        assert versions[-1] < Version("0.2.1")
        assert all(version in SpecifierSet("~=0.2.0") for version in versions)


def test_wheels_that_cannot_be_renamed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a release of torch in normscope/torch_version"):
        rename(write_wheel(tmp_path, torch=None), published=False)
    with pytest.raises(ValueError, match=r"expected one version and one requirement of torch"):
        rename(
            write_wheel(tmp_path, metadata=METADATA.replace("torch>=2.11", "numpy")),
            published=False,
        )
    assert len(list(tmp_path.iterdir())) == 1
    named = rename(write_wheel(tmp_path), published=False)
    with pytest.raises(ValueError, match=r"wheel: expected normscope-<major>"):
        rename(named, published=False)

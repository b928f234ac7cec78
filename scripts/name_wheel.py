#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Name the torch that a wheel of normscope was compiled with, in its version and requirements.

A wheel works with one release of torch (docs/decisions/0029). The release is read from the wheel
itself, into which CMake wrote it. The script replaces the wheel and prints the path of the new one.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

TORCH_VERSION = "normscope/torch_version.txt"


def version_for(public: str, torch: str, *, published: bool) -> str:
    """Return the version of a wheel for one release of torch.

    Args:
        public: normscope's own version, such as 0.2.0.
        torch: The release that the wheel was compiled with, such as 2.13.0.
        published: Whether the wheel is for a package index, which accepts no local versions; the
            version is then a post-release.
    """
    major, minor = torch.split(".")[:2]
    return f"{public}.post{major}{int(minor):02}" if published else f"{public}+torch{major}.{minor}"


def rename(wheel: Path, *, published: bool) -> Path:
    """Write the wheel under its new version and remove the old file.

    Args:
        wheel: A file named normscope-<version>-<tags>.whl.
        published: See `version_for`.

    Returns:
        The new file, in the same directory.

    Raises:
        ValueError: If the file is no wheel of normscope, or its version already names a torch.
    """
    name = re.fullmatch(r"normscope-(\d+\.\d+\.\d+)-(\w+-\w+-[\w.]+\.whl)", wheel.name)
    if name is None:
        raise ValueError(
            f"wheel: expected normscope-<major>.<minor>.<patch>-<tags>.whl, got {wheel.name}"
        )
    public, tags = name.groups()
    with zipfile.ZipFile(wheel) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    torch = next((text.decode() for entry, text in entries if entry.filename == TORCH_VERSION), "")
    release = re.match(r"\d+\.\d+\.\d+", torch)
    if release is None:
        raise ValueError(
            f"{wheel.name}: expected a release of torch in {TORCH_VERSION}, got {torch!r}"
        )
    version = version_for(public, release.group(), published=published)

    old_folder, new_folder = f"normscope-{public}.dist-info/", f"normscope-{version}.dist-info/"
    record = f"{new_folder}RECORD"
    files: list[tuple[zipfile.ZipInfo, bytes]] = []
    for entry, content in entries:
        if entry.filename.startswith(old_folder):
            entry.filename = new_folder + entry.filename.removeprefix(old_folder)
        if entry.filename == f"{new_folder}METADATA":
            files.append((entry, _metadata(content.decode(), version, release.group()).encode()))
        elif entry.filename != record:
            files.append((entry, content))
    renamed = wheel.with_name(f"normscope-{version}-{tags}")
    with zipfile.ZipFile(renamed, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in files:
            archive.writestr(entry, content)
        archive.writestr(record, _record(files, record))
    wheel.unlink()
    return renamed


def _metadata(text: str, version: str, torch: str) -> str:
    """Return METADATA with another version and a requirement of one release of torch."""
    head, separator, description = text.partition("\n\n")
    head, versions = re.subn(r"(?m)^Version: .*$", f"Version: {version}", head)
    head, torches = re.subn(
        r"(?m)^Requires-Dist: torch\b.*$", f"Requires-Dist: torch=={torch}", head
    )
    if (versions, torches) != (1, 1):
        raise ValueError(
            "METADATA: expected one version and one requirement of torch, "
            f"got {versions} and {torches}"
        )
    return head + separator + description


def _hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _record(files: list[tuple[zipfile.ZipInfo, bytes]], own_name: str) -> str:
    """Return RECORD: the hash and the size in bytes of every file but itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for entry, content in files:
        writer.writerow((entry.filename, _hash(content), len(content)))
    writer.writerow((own_name, "", ""))
    return text.getvalue()


def main(arguments: Sequence[str]) -> None:
    """Rename the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--published", action="store_true", help="use a version that package indexes accept"
    )
    parsed = parser.parse_args(arguments)
    print(rename(parsed.wheel, published=parsed.published))


if __name__ == "__main__":
    main(sys.argv[1:])

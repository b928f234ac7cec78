# SPDX-License-Identifier: Apache-2.0
"""Gets a newer NCCL than torch's for `make gpu-check`, without the code for other GPUs.

From release 2.30 on, NCCL lets several ranks use one GPU. The library takes 340 MB. Here most code
for other architectures is removed, and the rest is compressed. If the folder becomes
larger than what can be carried, only the reason is written.
"""

from __future__ import annotations

import argparse
import lzma
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# CUDA's major version is that of torch on the machine with the GPU.
PACKAGE = "nvidia-nccl-cu13"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"

# What a machine with a GPU takes is 64 MiB, with the sources.
MOST_BYTES = 56 << 20

# A container of device code: magic, version 1, bytes of this header, bytes of its entries.
HEADER = 16
CONTAINER = re.compile(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, HEADER)))
CODE = 2  # the kind of an entry; 1 is PTX


def without_other_architectures(library: bytes, architecture: int) -> bytes:
    """Return the library with the device code that a GPU of an architecture runs, and less other.

    A container that has code for the architecture keeps only that, and then zeros. Containers stay
    where they are.

    Raises:
        ValueError: If no code for the architecture is in the library.
    """
    content = bytearray(library)
    found = False
    for container in CONTAINER.finditer(library):
        begin = container.start() + HEADER
        (size,) = struct.unpack_from("<Q", library, container.end())
        entries = _entries(library, begin, begin + size)
        kept = b"".join(code for kind, of, code in entries if (kind, of) == (CODE, architecture))
        if kept:
            found = True
            struct.pack_into("<Q", content, container.end(), len(kept))
            content[begin : begin + size] = kept.ljust(size, b"\0")
    if not found:
        raise ValueError(f"expected code for sm_{architecture}, found none")
    return bytes(content)


def _entries(library: bytes, begin: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, architecture and bytes of each entry of a container."""
    while begin < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, begin)
        (architecture,) = struct.unpack_from("<I", library, begin + 28)
        yield kind, architecture, library[begin : begin + header + size]
        begin += header + size


def download(folder: Path) -> tuple[str, bytes]:
    """Return the newest version in the package index, and its library without debug information."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, folder))
    subprocess.run(["strip", str(library)], check=True)
    return wheel.name.split("-")[1], library.read_bytes()


def carry(folder: Path, architecture: int) -> str:
    """Write the compressed library to the folder; return what to say about it."""
    target = folder / f"libnccl-sm_{architecture}.so.xz"
    target.unlink(missing_ok=True)
    others = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        with tempfile.TemporaryDirectory() as downloads:
            version, library = download(Path(downloads))
        compressed = lzma.compress(without_other_architectures(library, architecture), preset=2)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return f"left out: {error}"
    if others + len(compressed) > MOST_BYTES:
        return (
            f"left out: NCCL {version} takes {len(compressed) >> 20} MiB, other files "
            f"{others >> 20} MiB, and at most {MOST_BYTES >> 20} MiB can be carried"
        )
    target.write_bytes(compressed)
    return f"NCCL {version} for sm_{architecture}, {len(compressed) >> 20} MiB"


def main() -> None:
    """Write the library, and nccl.txt, which says what it is or why it was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    arguments = parser.parse_args()
    outcome = carry(arguments.folder, arguments.architecture)
    (arguments.folder / "nccl.txt").write_text(outcome + "\n")
    print(f"nccl: {outcome}")


if __name__ == "__main__":
    main()

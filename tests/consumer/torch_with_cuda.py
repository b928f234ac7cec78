# SPDX-License-Identifier: Apache-2.0
"""Copies the installed torch's CMake files, and changes them to those of a build with CUDA.

Its libraries and headers are linked, not copied. Prints the copy's prefix for CMake. A folder
`bin` has a program `nvcc` that is no compiler, as wrappers in PATH look to torch's search for a
toolkit.
"""

import shutil
import sys
from pathlib import Path

import torch

# Text of a build without CUDA, and of one with it.
CHANGES = {
    "Caffe2/Caffe2Config.cmake": [
        ("if(0)\n  # The file public/cuda.cmake", "if(1)\n  # The file public/cuda.cmake"),
        ("set(CAFFE2_USE_CUDA 0)", "set(CAFFE2_USE_CUDA 1)"),
        ("if( AND NOT CAFFE2_USE_CUDA)", "if(ON AND NOT CAFFE2_USE_CUDA)"),
    ],
    "Torch/TorchConfig.cmake": [("if(0)\n  if(MSVC)", "if(1)\n  if(MSVC)")],
}


def main() -> None:
    """Makes the copy in the folder that the command line names."""
    copy = Path(sys.argv[1])
    installed = Path(torch.__file__).parent
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(installed / "share" / "cmake", copy / "share" / "cmake")
    for name in ("include", "lib"):
        (copy / name).symlink_to(installed / name)
    if torch.version.cuda is None:
        for name, changes in CHANGES.items():
            file = copy / "share" / "cmake" / name
            text = file.read_text()
            for without, with_cuda in changes:
                if without not in text:
                    sys.exit(f"{file}: expected the text {without!r}, which torch 2.13 has")
                text = text.replace(without, with_cuda)
            file.write_text(text)
    nvcc = copy / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'release 13.0, V13.0.0'\n")
    nvcc.chmod(0o755)
    print(copy / "share" / "cmake")


if __name__ == "__main__":
    main()

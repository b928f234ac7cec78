# SPDX-License-Identifier: Apache-2.0
"""``python -m normscope``: what this installation can do on this machine."""

import platform

import torch
from torch import distributed

import normscope
from normscope import _library


def _backends() -> list[str]:
    """The backends of torch.distributed that this torch was built with."""
    if not distributed.is_available():
        return []
    is_built = {
        "gloo": distributed.is_gloo_available,
        "mpi": distributed.is_mpi_available,
        "nccl": distributed.is_nccl_available,
        "ucc": distributed.is_ucc_available,
    }
    return [name for name, available in is_built.items() if available()]


def main() -> None:
    """Print versions, kernels and communicators."""
    kernels, chosen = _library.available_kernels(), _library.default_kernels()
    print(f"normscope      {normscope.__version__}")
    print(f"torch          {torch.__version__}")
    print(f"python         {platform.python_version()}")
    print(f"kernels        {', '.join(kernels)}; in use: {chosen}")
    print(f"cuda           {_library.cuda()}")
    print(f"communicators  shared memory (ranks of one host), {', '.join(_backends())}")


if __name__ == "__main__":
    main()

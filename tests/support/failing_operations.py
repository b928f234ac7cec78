# SPDX-License-Identifier: Apache-2.0
"""Operations of torch that find no memory."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class FailingOperations(TorchDispatchMode):
    """Lets one of the operations that need memory raise, wherever it is called from.

    Args:
        failing: Which of them, as a number from 0; None for none.
    """

    def __init__(self, failing: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failing = failing
        self.seen = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        makes_tensors = any(returned.alias_info is None for returned in func._schema.returns)
        if func.namespace == "aten" and makes_tensors:
            self.seen += 1
            if self.seen - 1 == self.failing:
                raise RuntimeError(f"{func} found no memory")
        return func(*args, **(kwargs or {}))

"""Notes every operation that makes the host wait for a device, or whose result's shape depends on data.

On a CPU nothing waits, so that these are found by what is called: operations by a dispatch mode, and the methods that
read a CPU's memory without one (``tolist``, ``numpy``, ``cpu``) by stand-ins. Tensors that are made from numbers of the
host count too: on a device that is a copy which waits. A copy from one device to another is not seen here; a test on
CUDA adds ``torch.cuda.set_sync_debug_mode("error")``.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "aten::_local_scalar_dense",  # item, bool, int, float, a tensor as an index
    "aten::equal",
    "aten::lift_fresh",  # torch.tensor of numbers
    "aten::masked_select", "aten::nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
}  # fmt: skip
"""Operations that always count."""
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Those that do where an index is a mask."""
BYPASSING = ("tolist", "numpy", "cpu", "__array__")  # methods of tensors that are no operation on a CPU


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """What waits inside the block, each as "operation at file:line" of the package, in order."""
    found: list[str] = []

    def note(name: str) -> None:
        own = [frame for frame in traceback.extract_stack() if "subtoken_train/" in frame.filename]
        where = f" at {own[-1].filename.split('subtoken_train/')[-1]}:{own[-1].lineno}" if own else ""
        found.append(f"{name}{where}")

    def stand_in(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name)
            return method(self, *args, **kwargs)

        return noting

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name in READS or (name in INDEXED and _by_mask(args[1])) or (name == _REPEAT and _unsized(func, kwargs)):
                note(name)
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch:
        for name in BYPASSING:
            patch.setattr(torch.Tensor, name, stand_in(name))
        with Noting():
            yield found


_REPEAT = "aten::repeat_interleave"


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _unsized(func: Any, kwargs: dict[str, Any] | None) -> bool:
    return func._overloadname == "Tensor" and (kwargs or {}).get("output_size") is None


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result

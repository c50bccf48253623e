"""Devices that no CPU has: two shards that are numbers on the CPU, and a note of all that makes a host wait.

Nothing waits on a CPU, so that it is found by what is called: operations by a dispatch mode, and the methods that read
a CPU's memory without one (``tolist``, ``numpy``, ``cpu``) by stand-ins. Tensors made of the host's numbers count too.
A copy from one device to another is not seen; a test on CUDA adds ``torch.cuda.set_sync_debug_mode``.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subtoken_train.families.decoder import CACHE
from subtoken_train.families.family import Family

NAME = "shard"
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch takes no device that is written in Python", allow_module_level=True)


class _Module:
    """What torch asks a device's module for."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 2)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    manual_seed_all = staticmethod(lambda seed: None)


class Sharded(Tensor):
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> Sharded:
        assert not isinstance(raw, Sharded)
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=device, requires_grad=False, **layout)
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Sharded({self.raw!r}, {self.device})"

    def tolist(self):
        return self.raw.tolist()


def _run(func, args, kwargs):
    device, kwargs = kwargs.get("device"), dict(kwargs)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    places = {x.device for x in tensors if x.dim() or isinstance(x, Sharded)}
    if func is torch.ops.aten.copy_.default:
        args[0].raw.copy_(_raw(args[1])) if isinstance(args[0], Sharded) else args[0].copy_(_raw(args[1]))
        return args[0]
    if str(func) not in ("aten._to_copy.default", "aten.copy_.default") and len(places) > 1:
        index = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        if not (index and all(x.device.type == "cpu" for x in tensors[1:])):  # as on GPUs, indices may lie on the CPU
            raise RuntimeError(f"{func}: tensors on {sorted(map(str, places))}")
    if device is not None:
        kwargs["device"] = torch.device("cpu") if torch.device(device).type == NAME else device
    out = func(*pytree.tree_map(_raw, args), **pytree.tree_map(_raw, kwargs))
    place = torch.device(device) if device is not None else next(iter(places), torch.device("cpu"))
    if func._schema.is_mutable and isinstance(out, Tensor):
        return next(x for x in tensors if _raw(x) is out)
    if place.type != NAME:
        return out
    return pytree.tree_map(
        lambda x: Sharded(x, torch.device(NAME, place.index or 0)) if isinstance(x, Tensor) else x, out
    )


def _raw(value):
    return value.raw if isinstance(value, Sharded) else value


@cache
def shards() -> tuple[torch.device, torch.device]:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), dispatch_key="PrivateUse1")
    shards.library = library  # it acts while it is there
    _device_constructors()  # torch remembers which functions ``with torch.device(...)`` concerns
    for name in ("tensor", "arange", "eye", "linspace"):
        setattr(torch, name, _in_two_steps(getattr(torch, name)))
    return torch.device(NAME, 0), torch.device(NAME, 1)


def _in_two_steps(factory):
    """On a shard, what makes a tensor of a list or resizes what it made makes it on the CPU first."""

    def made(*args, device=None, **options):
        if device is None or torch.device(device).type != NAME:
            return factory(*args, **options, **({} if device is None else {"device": device}))
        return factory(*args, **options).to(device)

    return made


def spread(family: Family, first: int = 1) -> Family:
    """A family whose first layers lie on ``shard:0``, with all but norm and head; the others on ``shard:1``."""
    near, far = shards()
    model, stack = family.model, family.decoder
    names = {id(module): name for name, module in model.named_modules()}
    late = {names[id(module)] for module in (*stack.layers[first:], stack.norm, model.get_output_embeddings())}
    places = {}
    for name, _ in model.named_modules():
        inside = any(name.startswith(f"{done}.") for done in places)
        if not inside and not any(other.startswith(f"{name}.") or not name for other in late):
            places[name] = far if name in late else near
    dispatch_model(model, places, main_device=near, skip_keys=CACHE)
    model.hf_device_map = places
    return family


READS = {
    "aten::_local_scalar_dense",  # item, bool, int, float, a tensor as an index
    "aten::equal",
    "aten::lift_fresh",  # torch.tensor of numbers
    "aten::masked_select", "aten::nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
    "aten::bincount", "aten::_linalg_check_errors", "aten::_linalg_eigh",
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
            if waits(func, args, kwargs or {}):
                note(func._schema.name)
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch:
        for name in BYPASSING:
            patch.setattr(torch.Tensor, name, stand_in(name))
        with Noting():
            yield found


def waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host must wait for an operation's result, or its size."""
    name = func._schema.name
    marks = name in INDEXED and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    repeats = name == "aten::repeat_interleave" and func._overloadname == "Tensor"
    return name in READS or marks or (repeats and kwargs.get("output_size") is None)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result

"""Groups of tensors on another device."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on_device(parts: T, device: torch.device) -> T:
    """Tensors on a device: one, or those in a list, in the values of a dict, or in the fields of a dataclass.

    What is there already is not copied, and everything else is left as it is: where all is there, ``parts`` itself.
    """
    moved: Any = parts
    if isinstance(parts, Tensor):
        moved = parts.to(device)
    elif isinstance(parts, list):
        each = [on_device(part, device) for part in parts]
        moved = parts if all(a is b for a, b in zip(each, parts, strict=True)) else each
    elif isinstance(parts, dict):
        by_name = {name: on_device(part, device) for name, part in parts.items()}
        moved = parts if all(by_name[name] is parts[name] for name in parts) else by_name
    elif is_dataclass(parts) and not isinstance(parts, type):
        own = {field.name: getattr(parts, field.name) for field in fields(parts) if field.init}
        new = {name: on_device(part, device) for name, part in own.items()}
        moved = parts if all(new[name] is own[name] for name in own) else replace(parts, **new)
    placed: T = moved
    return placed

"""What a trained tensor is, from its name: the kind that a panel shows it under, and its layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_LORA = re.compile(r"\.layers\.(?P<layer>\d+)\..*\.(?P<kind>lora_[AB])\.")
_BANK = re.compile(r"\.bank\.(?P<part>selectors|gates)\.(?P<layer>\d+)\.")
_PARTS = {"selectors": "router", "gates": "gate"}

T = TypeVar("T")


def kind_and_layer(name: str) -> tuple[str, int]:
    """(``router`` | ``gate`` | ``lora_A`` | ``lora_B``, layer) of a trained tensor's name.

    Raises:
        ValueError: a name of another kind.
    """
    if found := _BANK.search(name):
        return _PARTS[found["part"]], int(found["layer"])
    if found := _LORA.search(name):
        return found["kind"], int(found["layer"])
    raise ValueError(f"trained tensor {name!r} belongs to no router, gate or LoRA")


def by_kind_and_layer(tensors: Mapping[str, T]) -> dict[tuple[str, int], list[T]]:
    """Trained tensors of the same kind and layer together (q, v and o; weights and biases)."""
    groups: dict[tuple[str, int], list[T]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(kind_and_layer(name), []).append(tensor)
    return groups

"""Chooses the path that attends over packed storage, and says why. Imports nothing heavy."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which

from subtoken_train.errors import pip_line, refuse

VARIABLE = "SUBTOKEN_KERNEL"  # environment variable that forces a path
PATHS = ("reference", "cpu", "triton")
"""Everything written out; for CPUs in C (``kernels/native.py``) and else in pure torch, anywhere; fused kernels."""


def compiler() -> str | None:
    """Return the path of the C compiler that decoding on a CPU uses; None: there is none."""
    return which(os.environ.get("CC") or "cc")


@dataclass(frozen=True)
class KernelChoice:
    """The attention path that was chosen, and why, in words that follow "because"."""

    path: str
    why: str
    forced: bool = False

    def __str__(self) -> str:
        return f"{self.path} ({self.why})"


def choose_kernel(device: str) -> KernelChoice:
    """Choose the path for storage on a type of device (``cuda``, ``cpu``, ...)."""
    asked = device, os.environ.get(VARIABLE), os.environ.get("TRITON_INTERPRET") == "1"
    if asked not in _choices:
        _choices[asked] = _chosen(*asked)
    return _choices[asked]


_choices: dict[tuple[str, str | None, bool], KernelChoice] = {}
"""Made once; a dictionary, because torch.compile traces through ``lru_cache`` and warns of it."""


def _chosen(device: str, forced: str | None, interpreted: bool) -> KernelChoice:
    there = find_spec("triton") is not None
    if forced:
        fused, elsewhere = forced == "triton", f"the cache lies on {device!r}, and these kernels run on CUDA"
        refuse(
            (forced not in PATHS, f"{VARIABLE}={forced}: no such path; use one of {', '.join(PATHS)}, or unset it"),
            (fused and not there, f"{VARIABLE}=triton: triton is not installed; {pip_line('gpu')}, or unset it"),
            (
                fused and device != "cuda" and not interpreted,
                f"{VARIABLE}=triton: {elsewhere}; unset it, or set TRITON_INTERPRET=1 to interpret them, slowly",
            ),
        )
        return KernelChoice(forced, f"{VARIABLE} says so", forced=True)
    if device != "cuda":
        found = compiler()
        beside = f"; in C by {found}" if found else "; no C compiler is here, so all is done by torch, slower"
        return KernelChoice("cpu", f"the device is {device}{beside if device == 'cpu' else ''}")
    return KernelChoice("triton", "the device is cuda") if there else KernelChoice("cpu", "triton is not installed")

"""``subtoken-train env``: versions and hardware for bug reports, read without importing any heavy library."""

from __future__ import annotations

import json
import os
import platform
import shutil
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.version import __version__

HELP = "Versions and hardware, for bug reports."

PACKAGES = (
    *("torch", "lightning", "transformers", "peft", "datasets", "torchmetrics"),
    *("bitsandbytes", "deepspeed", "triton"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def environment() -> dict[str, str | int | None]:
    """Return the facts that a bug report needs, by name; ``nvidia_smi`` is the driver tool's path, None without one.

    ``kernel`` is the path that decoding takes here (``kernels/choice.py``), taking a driver for a device.
    """
    found = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {
        "subtoken_train": __version__,
        "python": platform.python_version(),
        **found,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "nvidia_smi": (driver := shutil.which("nvidia-smi")),
        "kernel": str(choose_kernel("cuda" if driver else "cpu")),
    }


def run(args: Namespace) -> int:
    """Print the environment."""
    facts = environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:<{width}}  {'none found' if fact is None else fact}")
    return 0

"""The fused kernel compiles for GPUs that are not here: it fits a multiprocessor and spills next to nothing.

How fast it is, only a GPU says.
"""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.sampling import sampled

triton = pytest.importorskip("triton", reason="triton is not installed")
if not shutil.which(str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")):
    pytest.skip("this build of triton has no ptxas", allow_module_level=True)

SHARED = 99 * 1024  # bytes that a program may take on every GPU since Ampere
SPILLED = 64


@sampled(
    "shape",
    [
        {"piece": 8, "group": 4, "fixed": True},
        {"piece": 8, "dtype": torch.bfloat16, "cut": True, "padded": True, "window": True},
        {"width": 80, "piece": 5, "bits": 8},
        {"piece": 2, "dtype": torch.bfloat16, "filled": True},
        {"piece": 8, "bits": 4, "shared": 32},
    ],
    every=4,
    ids=["routed", "bf16-everything", "int8-d80", "filled", "kivi4"],
)
def test_it_fits(shape, tmp_path, monkeypatch):
    from tests.support.kernel_builds import build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = build(90, **shape)
    assert made["shared_bytes"] <= SHARED
    assert made["spilled_bytes"] <= SPILLED


@pytest.mark.slow
def test_every_shape_of_the_record_fits(tmp_path, monkeypatch):
    from tests.support.kernel_builds import CAPABILITIES, SHAPES, build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, shape in SHAPES.items():
        for capability in CAPABILITIES:
            made = build(capability, **shape)
            assert made["shared_bytes"] <= SHARED, (name, capability, made)
            assert made["spilled_bytes"] <= SPILLED, (name, capability, made)

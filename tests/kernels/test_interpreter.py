"""Fused kernels interpreted, and what compilers make of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.sampling import sampled

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
SHARES, DRAWN = 8, 40


def interpreted(file: str, **variables: str) -> None:
    """Run a file of tests under the interpreter; its output is shown where one fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/kernels/interpreted/{file}",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
    ]
    own = {name: value for name, value in os.environ.items() if name != "SUBTOKEN_KERNEL"}
    environment = own | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@sampled("share", range(SHARES), every=SHARES)
def test_drawn_layers(share):
    interpreted("test_drawn_layers.py", DRAWN_FIRST=str(share * DRAWN), DRAWN_COUNT=str(DRAWN))


@pytest.mark.slow
def test_named_layers():
    interpreted("test_named_layers.py")


@pytest.mark.slow
def test_compiled_steps():
    interpreted("test_compiled_steps.py")


@pytest.mark.slow
def test_the_equality_matrix():
    """Whole prompts and steps of tiny models, packed and decoded by the fused kernels, are the truth."""
    interpreted("test_packed_cells.py", SUBTOKEN_KERNEL="triton")


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

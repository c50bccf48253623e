"""Runs the fused kernels on the CPU in processes of their own, because Triton reads ``TRITON_INTERPRET`` only once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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

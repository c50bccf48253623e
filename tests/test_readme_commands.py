"""README's marked blocks, run in order in a fresh copy of the tree, as a reader would after ``make fit``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.readme_blocks import README, ROOT, blocks


def others(folder: str, names: list[str]) -> set[str]:
    """What a fresh checkout does not have."""
    found = {name for name in names if name == "__pycache__" or name.endswith("_cache")}
    if folder == str(ROOT):
        found |= {".git", ".venv", "runs", "results"}
    return found | {name for name in names if folder == str(ROOT / "data") and name.startswith(("scenes", "english_"))}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the tree with what ``make fit`` leaves, trained for a moment; a function that runs a program in it."""
    folder, programs = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT, folder, ignore=others)
    programs.mkdir()
    for name, further in (("python", ""), ("subtoken-train", "-m subtoken_train ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {further}"$@"\n')
        (programs / name).chmod(0o755)
    settings = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> str:
        environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    run("subtoken-train", "data", "scenes", "--train", "640", "--dev", "80", "--test", "400")
    run("subtoken-train", "fit", "--config", "recipes/tiny_fastv25_s16k4.yaml", "--trainer.max_steps=5")
    return run


@pytest.mark.slow
def test_they_run_as_written(checkout):
    for block in blocks(README):
        if block.mark == "run":
            program = ("python", "-c") if block.language == "python" else ("bash", "-euxo", "pipefail", "-c")
            said = checkout(*program, block.text)
            for noise in ("Traceback", "FutureWarning", "kernels-community", "max_length`", "is a language model is a"):
                assert noise not in said, f"{block.place}: {noise}\n{said}"

"""Marked blocks of README and of pages that say so, run in order in a fresh copy of the tree, as after ``make fit``."""

from __future__ import annotations

import shutil

import pytest

from tests.support.readme_blocks import DOCUMENTS, ROOT, Reader, blocks, runs_in_a_checkout

PAGES = [path for path in DOCUMENTS if runs_in_a_checkout(path)]


def others(folder: str, names: list[str]) -> set[str]:
    """What a fresh checkout does not have."""
    found = {name for name in names if name == "__pycache__" or name.endswith("_cache")}
    if folder == str(ROOT):
        found |= {".git", ".venv", "runs", "results"}
    return found | {name for name in names if folder == str(ROOT / "data") and name.startswith(("scenes", "english_"))}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the tree with what ``make fit`` leaves, trained for a moment; somebody who types in it."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT, folder, ignore=others)
    reader = Reader(folder, folder, tmp_path / "bin")
    reader.run("subtoken-train", "data", "scenes", "--train", "640", "--dev", "80", "--test", "400")
    reader.run("subtoken-train", "fit", "--config", "recipes/tiny_fastv25_s16k4.yaml", "--trainer.max_steps=5")
    return reader


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_they_run_as_written(checkout, page):
    for block in blocks(page):
        if block.mark == "run":
            said = checkout.type(block)
            for noise in ("Traceback", "FutureWarning", "kernels-community", "max_length`", "is a language model is a"):
                assert noise not in said, f"{block.place}: {noise}\n{said}"

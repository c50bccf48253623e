"""Pages, recipes' comments and docstrings name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from subtoken_train.resources import shipped_recipe
from tests.support.places import ROOT

PATH = re.compile(
    r"(?<![\w/.-])(?:docs|recipes|benchmarks|tests|checkpoints|notebooks|subtoken_train)/[\w./-]*\w"
    r"\.(?:py|md|yaml|jsonl\.xz|jsonl|json|csv|svg|png|ipynb|parquet)\b"
)
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = [
    path for room in ("subtoken_train", "benchmarks", "docs", "checkpoints") for path in (ROOT / room).rglob("*.py")
]
RECIPES = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".yaml", ".py")]

MADE = {"benchmarks/results/speed/gpu-suite.json", "recipes/catalogue.md"}
"""Written by a program that has not run here, or only in the site's build."""


def missing(text: str) -> list[str]:
    """Return the paths in a text that are neither files nor shipped recipes, placeholders (``NAME``) left out."""
    named = {name for name in PATH.findall(text) if not re.search(r"[A-Z]{3}", Path(name).stem) or "README" in name}
    return sorted(name for name in named - MADE if not (ROOT / name).exists() and not _is_recipe(name))


def _is_recipe(name: str) -> bool:
    return name.startswith("recipes/") and shipped_recipe(Path(name).stem) is not None


@pytest.mark.parametrize("files", [PAGES, SOURCES, RECIPES], ids=["pages", "sources", "recipes"])
def test_every_named_path_exists(files):
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert sum(len(PATH.findall(text)) for text in texts.values()) > 20
    assert {name: gone for name, text in texts.items() if (gone := missing(text))} == {}


def test_the_rule_itself():
    text = "`docs/nowhere.md`, recipes/tiny_fastv25_s16k4.yaml, tests/test_NAME.py, mine/docs/x.md; docs/index.md."
    assert missing(text) == ["docs/nowhere.md"]

"""Pages that a program writes are what it writes, paths that the architecture names exist, and shown code runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from benchmarks import trained_results
from subtoken_train import calibrations
from subtoken_train.artifact import config
from subtoken_train.evaluation import results
from subtoken_train.inference import cache_file
from subtoken_train.resources import shipped_recipe
from subtoken_train.training import checkpoints
from tests.kernels import test_interpreter
from tests.support.places import ROOT, real_folder, shown
from tests.support.readme_blocks import README, Reader, blocks
from tests.support.sampling import sampled
from tests.test_architecture import PACKAGE, RANK

DOCS = ROOT / "docs"
MADE = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
CODE = [block for name in ("python", "decoding") for block in blocks(DOCS / f"{name}.md") if block.mark == "run"]
REAL = [
    block
    for path in (README, DOCS / "python.md", DOCS / "tour.md")
    for block in blocks(path)
    if "smollm2" in (block.words or "")
]


def test_the_versions_of_files_are_those_that_are_written():
    said = (DOCS / "status.md").read_text(encoding="utf-8").partition("| file | version |")[2]
    versions = [int(number) for number in re.findall(r"^\| .+? \| (\d+) \|", said, re.MULTILINE)]
    assert versions == [
        *(config.SCHEMA_VERSION, cache_file.VERSION, checkpoints.SCHEMA_VERSION),
        *(results.SCHEMA_VERSION, calibrations.SCHEMA_VERSION),
    ]


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_what_is_made(name):
    assert (DOCS / name).read_text(encoding="utf-8") == MADE[name](), "run python docs/generate.py"


def test_readme_shows_the_records():
    assert shown(trained_results.PAGE, "front") == trained_results.table()


@sampled("block", CODE, every=4, ids=lambda block: block.place)
def test_its_code_runs(block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(block.text, block.place, "exec"), {})
    said = capsys.readouterr().out
    assert "KV" in said if "decoding" in block.place else said


@pytest.mark.slow
@pytest.mark.parametrize("block", REAL, ids=lambda block: block.place)
def test_code_on_a_real_model_runs(block, capsys, monkeypatch, tmp_path):
    """In a folder that holds the model and the samples, so that what it saves is nobody's."""
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/smollm2").symlink_to(real_folder("smollm2").resolve())
    (folder / "data").mkdir()
    (folder / "data/samples").symlink_to(ROOT / "data/samples")
    if block.language == "python":
        monkeypatch.chdir(folder)
        exec(compile(block.text, block.place, "exec"), {})
        said = capsys.readouterr().out
    else:
        said = Reader(folder, ROOT, tmp_path / "bin").type(block)
    assert "The capital of France is Paris." in said


def test_counts_of_decoding_are_those_of_the_tests():
    pytest.importorskip("triton", reason="triton is not installed")
    drawn = f"{test_interpreter.SHARES * test_interpreter.DRAWN} drawn layers"
    assert drawn in (DOCS / "decoding.md").read_text(encoding="utf-8")


def named_paths(page: str) -> set[str]:
    """What stands in backticks and is written as a file or folder."""
    return {word for word in re.findall(r"`([\w./-]+)`", page) if word.endswith((".py", ".md", "/"))}


def missing(page: str) -> list[str]:
    places = (ROOT / PACKAGE, ROOT)
    return sorted(path for path in named_paths(page) if not any((place / path).exists() for place in places))


def test_every_path_of_the_architecture_exists():
    assert len(named_paths(ARCHITECTURE)) > 40
    assert missing(ARCHITECTURE) == []
    assert missing("`types.py` and `engine/nowhere.py`, `nowhere/`") == ["engine/nowhere.py", "nowhere/"]


def test_the_picture_shows_every_room():
    shown = {word.rstrip("/") for word in re.findall(r"\b[a-z_]+/?", ARCHITECTURE.split("```")[1])}
    assert RANK.keys() - {"__main__"} <= shown


PATH = re.compile(
    r"(?<![\w/.-])(?:docs|recipes|benchmarks|tests|checkpoints|notebooks|subtoken_train)/[\w./-]*\w"
    r"\.(?:py|md|yaml|jsonl\.xz|jsonl|json|csv|svg|png|ipynb|parquet)\b"
)
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = [
    path for room in ("subtoken_train", "benchmarks", "docs", "checkpoints") for path in (ROOT / room).rglob("*.py")
]
RECIPES = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".yaml", ".py")]
MADE_names = {"benchmarks/results/speed/gpu-suite.json", "recipes/catalogue.md"}
"""Written by a program that has not run here, or only in the site's build."""


def missing_names(text: str) -> list[str]:
    """Return the paths in a text that are neither files nor shipped recipes, placeholders (``NAME``) left out."""
    named = {name for name in PATH.findall(text) if not re.search(r"[A-Z]{3}", Path(name).stem) or "README" in name}
    return sorted(name for name in named - MADE_names if not (ROOT / name).exists() and not _is_recipe(name))


def _is_recipe(name: str) -> bool:
    return name.startswith("recipes/") and shipped_recipe(Path(name).stem) is not None


@pytest.mark.parametrize("files", [PAGES, SOURCES, RECIPES], ids=["pages", "sources", "recipes"])
def test_every_named_path_exists(files):
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert sum(len(PATH.findall(text)) for text in texts.values()) > 20
    assert {name: gone for name, text in texts.items() if (gone := missing_names(text))} == {}

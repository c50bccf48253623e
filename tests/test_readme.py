"""Every code block of the documents is marked, its commands parse, and the files that they name are there."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from importlib.util import find_spec

import pytest

from subtoken_train.artifact.hub import MODELS
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.main import COMMANDS, command_module, main
from subtoken_train.resources import find_recipe, shipped_recipe
from tests.support.readme_blocks import DOCUMENTS, README, ROOT, Block, Reader, blocks, command_line, runs_in_a_checkout
from tests.support.sampling import sampled

BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
SHELL = [block for block in BLOCKS if block.mark != "shows" and not block.language]
LINES = [(block, words) for block in SHELL for words in block.commands()]
OURS = [(block.place, argv) for block, words in LINES if (argv := command_line(words)) is not None]
READERS = ("fit", "check", "preview")
RECIPES = sorted({tuple(word for word in argv[1:] if word != "--offline") for _, argv in OURS if argv[0] in READERS})
SHIPPED = re.compile(r"(?<![\w/.-])(?:recipes|checkpoints|data/samples)/[\w./-]+")
FETCHED = {f"checkpoints/{name}" for name in MODELS}
"""What ``subtoken-train data NAME`` leaves there."""


def test_there_are_commands_to_check():
    assert len(OURS) > 40
    assert {argv[0] for _, argv in OURS} == set(COMMANDS)
    assert sum(block.mark == "run" for block in BLOCKS) >= 20
    assert [block.mark for block in blocks(README)] == ["needs", "needs", "run"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_is_marked(block):
    assert block.mark is not None, f"{block.place}: write <!-- run -->, <!-- needs: ... --> or <!-- shows --> above it"


def test_what_runs_needs_no_placeholder():
    """Nothing that a reader would have to replace."""
    for block in BLOCKS:
        if block.mark == "run":
            assert re.findall(r"\b(?:DIR|PATH|FILE|NAME|OUT|RECIPE|ID)\b", block.text) == [], block.place


@pytest.mark.parametrize(("place", "argv"), OURS)
def test_options_are_known(place, argv):
    name, *rest = argv
    module = command_module(name)
    if hasattr(module, "run_raw"):
        return
    parser = Parser(prog=name)
    module.add_arguments(parser)
    check_options(parser, rest)
    parser.parse_args(rest)


@pytest.mark.parametrize(("block", "words"), LINES)
def test_shipped_files_are_there(block, words):
    for word in words:
        for name in SHIPPED.findall(word):
            assert name in FETCHED or find_recipe(ROOT / name), f"{block.place}: {name}"


@sampled("argv", RECIPES, every=4, ids=" ".join)
def test_recipes_pass_the_offline_check(argv, capsys):
    """Overlays, overrides and flags as they are written."""
    rest = list(argv)
    given = [rest[i + 1] for i, word in enumerate(rest) if word == "--config"]
    if not all(find_recipe(ROOT / name) or shipped_recipe(name) for name in given):
        # of a run, of init's, or the reader's own
        assert any(name in " ".join(rest) for name in ("runs/", "RECIPE", "_subtoken/"))
        return
    if "--count" in rest:  # of preview alone
        place = rest.index("--count")
        del rest[place : place + 2]
    assert main(["check", *rest, "--offline"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=lambda b: b.place)
def test_python_names_exist(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), block.place


def test_other_programs_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block, words in LINES:
        if words[0] == "make":
            assert words[1] in targets, block.place
        if words[0] == "python" and words[1] == "-m":
            package = words[2].split(".")[0]
            assert package == "lmms_eval" or find_spec(words[2]) is not None, block.place
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), block.place


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

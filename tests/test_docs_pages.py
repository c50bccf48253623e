"""Pages that a program writes are what it writes, paths that the architecture names exist, and shown code runs."""

import ast
import importlib
import re
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from subtoken_train import calibrations
from subtoken_train.artifact import config
from subtoken_train.artifact.hub import MODELS
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.main import COMMANDS, command_module, main
from subtoken_train.evaluation import results
from subtoken_train.inference import cache_file
from subtoken_train.resources import find_recipe, shipped_recipe
from subtoken_train.training import checkpoints
from tests.support.places import (
    DOCUMENTS,
    README,
    ROOT,
    Block,
    Reader,
    blocks,
    command_line,
    real_folder,
    runs_in_a_checkout,
)
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
    assert [int(number) for number in re.findall(r"^\| .+? \| (\d+) \|", said, re.MULTILINE)] == [
        *(config.SCHEMA_VERSION, cache_file.VERSION, checkpoints.SCHEMA_VERSION),
        *(results.SCHEMA_VERSION, calibrations.SCHEMA_VERSION),
    ]


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_what_is_made(name):
    assert (DOCS / name).read_text(encoding="utf-8") == MADE[name](), "run python docs/generate.py"


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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    runpy.run_path(str(path), run_name="__main__")
    assert "bytes" in capsys.readouterr().out


PRINTED = r"<!-- ([\w ]+):start -->.*?<!-- \1:end -->|^```.*?^```$|`[^`\n]*`"
"""What a program wrote, and code: no prose."""
NUMBER = r"(?:\d[\d.,]*|\b(?:twice|two|three|four|five|six|seven|eight|nine|ten|twenty|half|third|quarter|tenth))"
UNIT = "times|as (?:long|fast)|of the time|tokens a second|nats|points|seconds?|minutes?|hours?|days?|m?s|[KMGTk]i?B"
MEASURED = re.compile(
    r"\[[+-]?[\d.]+, [+-]?[\d.]+\]|± ?\d\S*|(?<![\w.])\+\d\S*|\d\S*e-\d+|(?<=\| )\d+\.\d+(?= \|)|n = \d+|"
    rf"{NUMBER}[ \n-](?:{UNIT})\b|{NUMBER} ?%(?!.{{1,11}}\binterval)|"
    r"(?<!\w)\d+\.\d+ (?:of|instead|beside|against|less|more)\b",
    re.DOTALL,
)
"""An interval, an error, a difference, a count of samples, a ratio, a number with a unit of quality, time or size."""
GIVEN = {
    "README.md": "17 GB",  # layers x heads x channels x tokens
    "data/README.md": "16 MiB",
    "docs/budgets.md": "0.15625, 0.15625, 0.1875, 0.15625, 0.25, 0.15625, 25 %",  # three ways to one size
    "docs/evaluation.md": "70 %",
    "docs/faq.md": "52 %, 15.6 %",  # of the first run's prompt, counted
    "docs/launch.md": "20 %, 80 GB, 1 GB, 1e-5",
    "docs/memory.md": "24 GB",
    "docs/reading_report.md": "1 %",
    "docs/real_models.md": "92 MB, 0.5 GB, 478 MB, 2.5 GB, 1,093 MB, 7.1 GB, 238 MB, 1.1 GB",  # sizes of files
    "docs/serving.md": "16 kB, 60 seconds, 60 seconds, 0.1 seconds, ten seconds",
    "docs/trained_arms.md": "7.8 %",
}
"""Settings, bounds and arithmetic that read as figures: what somebody chose, and nobody measured."""


def figures(text: str) -> list[str]:
    return MEASURED.findall(re.sub(PRINTED, "", text, flags=re.DOTALL | re.MULTILINE))


def test_what_was_measured_is_printed_by_a_program():
    """A page states by hand no figure but those that are given."""
    every = {*PAGES, *ROOT.glob("benchmarks/results/**/*.md")} - {ROOT / "benchmarks/results/packed_matrix.md"}  # made
    found = {path.relative_to(ROOT).as_posix(): figures(path.read_text(encoding="utf-8")) for path in every}
    assert {name: ", ".join(own) for name, own in found.items() if own} == GIVEN
    for words in ("0.93 of the time", "47.6 tokens a second", "three\nminutes", "within 7 %", "796 MiB", "2.8e-5"):
        assert len(figures(f"It took {words}, `0.93 of the time`, 4 groups of 16, a 95 % bootstrap interval.")) == 1


def test_pages_are_short():
    """Words of a page, words and figures of README, where its Python begins, words of a sentence, pages by hand."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    assert {path.name: words for path, text in texts.items() if (words := len(text.split())) > 1500} == {}
    assert len(texts[README].split()) <= 800
    assert len(texts[README].partition("```python")[0].split()) <= 250
    prose = re.sub(r"^```.*?^```$|\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", texts[README], flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"(?<![\w.:/-])\d[\d.,]*%?(?![\w-])", prose)) <= 25
    for path, text in texts.items():
        told = re.sub(rf"{PRINTED}|^[|#!<][^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
        sentences = re.findall(r"\w.*?[.:;?](?=\s)|\w.*?\n\n", told, re.DOTALL)
        assert sum(len(each.split()) for each in sentences) <= 20 * max(len(sentences), 1), path
    assert len([path for path in PAGES if DOCS in path.parents and ":::" not in texts[path]]) <= 45


def test_every_path_of_the_architecture_exists():
    """What stands in backticks and is written as a file or folder; and every module that the changelog sends to."""
    named = {word for word in re.findall(r"`([\w./-]+)`", ARCHITECTURE) if word.endswith((".py", ".md", "/"))}
    assert len(named) > 40
    assert [path for path in named if not ((ROOT / PACKAGE / path).exists() or (ROOT / path).exists())] == []
    sent_to = re.findall(r"^\| `([\w.]+)` \| `", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in sent_to if find_spec(f"{PACKAGE}.{name}") is None] == []


def test_the_picture_shows_every_room():
    shown = {word.rstrip("/") for word in re.findall(r"\b[a-z_]+/?", ARCHITECTURE.split("```")[1])}
    assert RANK.keys() - {"__main__"} <= shown


PATH = re.compile(
    r"(?<![\w/.-])(?:docs|recipes|benchmarks|tests|checkpoints|notebooks|subtoken_train)/[\w./-]*\w"
    r"\.(?:py|md|yaml|jsonl\.xz|jsonl|json|csv|svg|png|ipynb|parquet)\b"
)
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = [x for room in ("subtoken_train", "benchmarks", "docs", "checkpoints") for x in (ROOT / room).rglob("*.py")]
RECIPES = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".yaml", ".py")]


def missing_names(text: str) -> list[str]:
    """Return the paths in a text that are neither files nor shipped recipes, placeholders (``NAME``) left out."""
    named = {name for name in PATH.findall(text) if not re.search(r"[A-Z]{3}", Path(name).stem) or "README" in name}
    absent = sorted(name for name in named - {"recipes/catalogue.md"} if not (ROOT / name).exists())  # the site has it
    return [name for name in absent if not (name.startswith("recipes/") and shipped_recipe(Path(name).stem))]


@pytest.mark.parametrize("files", [PAGES, SOURCES, RECIPES], ids=["pages", "sources", "recipes"])
def test_every_named_path_exists(files):
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert sum(len(PATH.findall(text)) for text in texts.values()) > 20
    assert {name: gone for name, text in texts.items() if (gone := missing_names(text))} == {}


BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
SHELL = [block for block in BLOCKS if block.mark != "shows" and not block.language]
LINES = [(block, words) for block in SHELL for words in block.commands()]
OURS = [(block.place, argv) for block, words in LINES if (argv := command_line(words)) is not None]
OF_RECIPES = [argv[1:] for _, argv in OURS if argv[0] in ("fit", "check", "preview")]
COMMANDS_OF_RECIPES = sorted({tuple(word for word in argv if word != "--offline") for argv in OF_RECIPES})
FETCHED = {f"checkpoints/{name}" for name in MODELS}  # what ``subtoken-train data NAME`` leaves there


def test_there_are_commands_to_check():
    assert len(OURS) > 40
    assert {argv[0] for _, argv in OURS} == set(COMMANDS)
    assert sum(block.mark == "run" for block in BLOCKS) >= 20
    assert [block.mark for block in blocks(README)] == ["needs", "needs", "run"]


def test_every_block_is_marked_and_what_runs_holds_nothing_to_replace():
    for block in BLOCKS:
        assert block.mark, f"{block.place}: write <!-- run -->, <!-- needs: ... --> or <!-- shows --> above it"
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


@sampled("argv", COMMANDS_OF_RECIPES, every=4, ids=" ".join)
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


def test_shipped_files_and_other_programs_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block, words in LINES:
        for name in re.findall(r"(?<![\w/.-])(?:recipes|checkpoints|data/samples)/[\w./-]+", " ".join(words)):
            assert name in FETCHED or find_recipe(ROOT / name), f"{block.place}: {name}"
        if words[0] == "make":
            assert words[1] in targets, block.place
        if words[0] == "python" and words[1] == "-m":
            assert words[2].split(".")[0] == "lmms_eval" or find_spec(words[2]) is not None, block.place
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), block.place


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
@pytest.mark.parametrize("page", [path for path in DOCUMENTS if runs_in_a_checkout(path)], ids=lambda page: page.stem)
def test_they_run_as_written(checkout, page):
    for block in blocks(page):
        if block.mark == "run":
            said = checkout.type(block)
            for noise in ("Traceback", "FutureWarning", "kernels-community", "max_length`", "is a language model is a"):
                assert noise not in said, f"{block.place}: {noise}\n{said}"

"""Where the project keeps what tests read: the documents' code blocks, with their marks, and the commands in them.

A fenced block follows a mark on the line above it: ``<!-- run -->``, it runs as written, README's in a checkout after
``make fit`` and a page's in an empty folder (``<!-- run: in a checkout -->``: as README's; a test that is named runs it
itself); ``<!-- needs: WHAT -->``, a reader has to bring something; ``<!-- shows -->``, no code but what it leaves, or a
part of a file. Indented lines that start with the command count as ``needs``.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from subtoken_train.resources import read_names

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
ON_AN_INDEX = False
"""Whether ``pip install subtoken_train`` finds the package; until then a checkout, or REPOSITORY_URL, is installed."""


def recipe(name: str) -> Path:
    """Return the path of a run's recipe; no file lies there where the recipe is a name (``resources.recipe_text``)."""
    path = RECIPES / f"{name}.yaml"
    assert path.is_file() or name in read_names(RECIPES), f"no recipe {name}"
    return path


def run_recipes() -> list[Path]:
    """Return the paths of the recipes of runs, files and names: all but grids and overlays."""
    return sorted({*RECIPES.glob("*.yaml"), *(RECIPES / f"{name}.yaml" for name in read_names(RECIPES))})


def shown(page: Path, name: str) -> str:
    """Return what stands on a page between the marks ``NAME:start`` and ``NAME:end``."""
    return page.read_text(encoding="utf-8").split(f"<!-- {name}:start -->\n")[1].split(f"\n<!-- {name}:end -->")[0]


def real_folder(name: str) -> Path:
    folder = ROOT / "checkpoints" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"checkpoints/{name} is absent; `subtoken-train data {name}` fetches it")
    return folder


def real_model(name: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from subtoken_train import SubTokenModel

    folder = real_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return SubTokenModel(model, AutoTokenizer.from_pretrained(folder))


README = ROOT / "README.md"
PAGES = sorted(ROOT.glob("docs/**/*.md"))
DOCUMENTS = (README, *(ROOT / name / "README.md" for name in ("data", "checkpoints")), ROOT / "CONTRIBUTING.md", *PAGES)
_FENCE = re.compile(r"(?P<above>[^\n]*)\n```(?P<language>[a-z]*)\n(?P<text>.*?)\n```\n", re.DOTALL)
_MARK = re.compile(r"<!-- (run|shows|needs)(?:: ([^>]+))? -->")
_INDENTED = re.compile(r"^ {4}(subtoken-train .*(?:(?<=\\)\n.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: where it is, its mark (None: none), its language (empty: a shell's), its text, the mark's words."""

    place: str
    mark: str | None
    language: str
    text: str
    words: str | None = None

    def commands(self) -> list[list[str]]:
        """The words of its shell commands, comments and redirections left out, its own variables put in."""
        found: list[list[str]] = []
        variables: dict[str, str] = {}
        for line in self.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.replace("[--", "--").replace("]", ""), posix=True, punctuation_chars="<>|&;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in lexer:
                if set(word) <= set("<>|&;"):
                    found.append(words)
                    words = [word] if word == "<" else []
                elif "=" in word and not words and word.split("=")[0].isidentifier():
                    name, _, variables[name] = word.partition("=")
                else:
                    words.append(variables.get(word.removeprefix("$"), word) if word.startswith("$") else word)
            found.append(words)
        return [words for words in found if words]


def blocks(path: Path) -> list[Block]:
    """The blocks of a document, in order."""
    content = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    found = []
    for match in _FENCE.finditer(content):
        mark = _MARK.fullmatch(match["above"].strip())
        place = f"{name}:{content.count(chr(10), 0, match.start('text'))}"
        found.append(Block(place, mark and mark[1], match["language"], match["text"], mark and mark[2]))
    for match in _INDENTED.finditer(_FENCE.sub("\n", content)):
        found.append(Block(f"{name}: {match[1][:40]}", "needs", "", match[1]))
    return found


def runs_in_a_checkout(path: Path) -> bool:
    return path == README or any(block.words == "in a checkout" for block in blocks(path))


def command_line(words: list[str]) -> list[str] | None:
    """What ``subtoken-train`` gets, however it is called; None where something else is."""
    if words[0] == "subtoken-train":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "subtoken_train":
        return words[words.index("-m") + 2 :]
    return None


SHELL = ("bash", "-euxo", "pipefail", "-c")


class Reader:
    """Somebody who types a document's blocks in a folder; ``source``: the tree whose package runs."""

    def __init__(self, folder: Path, source: Path, programs: Path) -> None:
        self.folder = folder
        programs.mkdir()
        for name, further in (("python", ""), ("subtoken-train", "-m subtoken_train ")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {further}"$@"\n')
            (programs / name).chmod(0o755)
        settings = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "1"}

    def run(self, *argv: str) -> str:
        done = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def type(self, block: Block) -> str:
        return self.run(*("python", "-c") if block.language == "python" else SHELL, block.text)

"""The site builds without a warning, whole, and a reader's browser asks nobody else for anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from making.commands import command_help

from subtoken_train.cli.main import COMMANDS
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.reducers import REDUCERS
from tests.support.readme_blocks import ROOT

pytest.importorskip("mkdocs", reason="the site needs subtoken_train[docs]")
ADDRESS = "https://code.example/somebody/subtoken_train"


class Fetched(HTMLParser):
    """What a browser loads for a page, and the page's anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.places: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag in ("script", "img", "iframe", "source"):
            self.places.append(found.get("src") or "")
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.places.append(found.get("href") or "")


def test_it_builds_whole_and_asks_nobody(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": ADDRESS}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr

    pages = {path.relative_to(tmp_path).as_posix(): Fetched(path) for path in tmp_path.rglob("*.html")}
    assert len(pages) > 40
    assert [place for page in pages.values() for place in page.places if "//" in place] == []
    for sheet in tmp_path.rglob("*.css"):
        assert re.search(r"(?:url\(|@import)[\"' ]*(?:https?:)?//", sheet.read_text(encoding="utf-8")) is None, sheet

    assert pages["cli/index.html"].anchors >= set(COMMANDS)  # where each of them stood once
    assert pages["evictions/index.html"].anchors >= {*EVICTIONS, *WRAPPERS}
    assert pages["reducers/index.html"].anchors >= set(REDUCERS)
    assert "subtoken_train.inference.model.SubTokenModel.from_pretrained" in pages["api/index.html"].anchors
    for old in ("choose_budget", "equal_bytes"):  # old addresses still lead somewhere
        assert 'url=../budgets/"' in (tmp_path / old / "index.html").read_text(encoding="utf-8")
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert {"glossary/#slack", "faq/#flash-attention", "cli/fit/"} <= {each["location"] for each in index}
    searched = " ".join(each["text"] for each in index)
    options = {name for command in COMMANDS for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command_help(command))}
    assert len(options) > 80
    assert [name for name in sorted(options) if name not in searched] == []

    contributing = (tmp_path / "CONTRIBUTING" / "index.html").read_text(encoding="utf-8")
    assert 'href="../architecture/"' in contributing
    catalogue = (tmp_path / "recipes" / "catalogue" / "tiny" / "index.html").read_text(encoding="utf-8")
    assert f'href="{ADDRESS}/blob/HEAD/recipes/tiny_fastv25_s16k4.yaml"' in catalogue
    install = (tmp_path / "install" / "index.html").read_text(encoding="utf-8")
    assert "Needs a network, a checkout:" in install
    torn = [name for name in pages if "<p>|" in (tmp_path / name).read_text(encoding="utf-8")]
    assert torn == []  # tables that were read as text

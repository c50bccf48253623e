"""The site builds without a warning, whole, and a reader's browser asks nobody else for anything."""

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
from tests.support.places import ROOT

pytest.importorskip("mkdocs", reason="the site needs subtoken_train[docs]")
ADDRESS = "https://code.example/somebody/subtoken_train"


class Fetched(HTMLParser):
    """What a browser loads for a page, where the page leads, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.places: list[str] = []
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a":
            self.links.add((found.get("href") or "").partition("#")[0])
        if tag in ("script", "img", "iframe", "source"):
            self.places.append(found.get("src") or "")
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.places.append(found.get("href") or "")


def keys(schema):
    parts = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    named = schema.get("properties", ()) if isinstance(schema, dict) else ()
    return [*named, *(name for part in parts for name in keys(part))]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site once for all tests here, strictly."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": ADDRESS}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


def test_no_link_leads_nowhere(site):
    """Those to files that are no pages, too, of which a strict build says nothing."""
    dead = [
        (path.relative_to(site).as_posix(), link)
        for path in site.rglob("index.html")
        for link in Fetched(path).links
        if ":" not in link and not (path.parent / link).exists()
    ]
    assert dead == []


def test_every_picture_of_a_page_is_shown(site):
    """One that lies outside of ``docs/`` and is not added would leave its words alone."""
    named = [
        (page.stem, Path(picture).name)
        for page in (ROOT / "docs").rglob("*.md")
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 5
    shown = {
        ("index" if path.parent == site else path.parent.name, Path(place).name)
        for path in site.rglob("index.html")
        for place in Fetched(path).places
    }
    assert [each for each in named if each not in shown] == []


def test_it_is_whole_and_asks_nobody(site):
    pages = {path.relative_to(site).as_posix(): Fetched(path) for path in site.rglob("*.html")}
    assert len(pages) > 40
    assert [place for page in pages.values() for place in page.places if "//" in place] == []
    for sheet in site.rglob("*.css"):
        assert re.search(r"(?:url\(|@import)[\"' ]*(?:https?:)?//", sheet.read_text(encoding="utf-8")) is None, sheet

    assert pages["cli/index.html"].anchors >= set(COMMANDS)  # where each of them stood once
    assert pages["evictions/index.html"].anchors >= {*EVICTIONS, *WRAPPERS}
    assert pages["reducers/index.html"].anchors >= set(REDUCERS)
    assert "subtoken_train.inference.model.SubTokenModel.from_pretrained" in pages["api/index.html"].anchors
    caches = {name.rpartition(".")[2] for name in pages["api_caches/index.html"].anchors}
    assert caches >= {"Compression", "CompressionSettings", "PackedCache"}
    for old in ("choose_budget", "equal_bytes"):  # old addresses still lead somewhere
        assert 'url=../budgets/"' in (site / old / "index.html").read_text(encoding="utf-8")
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {"glossary/#slack", "faq/#flash-attention", "cli/fit/"} <= {each["location"] for each in index}
    searched = " ".join(each["text"] for each in index)
    options = {name for command in COMMANDS for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command_help(command))}
    assert len(options) > 80
    assert [name for name in sorted(options) if name not in searched] == []
    recipe, grid = (set(keys(json.loads((ROOT / f"recipes/{x}.schema.json").read_text()))) for x in ("recipe", "grid"))
    assert len(recipe) > 200
    assert [name for name in sorted(recipe | grid) if name not in searched] == []

    assert 'href="../architecture/"' in (site / "CONTRIBUTING" / "index.html").read_text(encoding="utf-8")
    catalogue = (site / "recipes" / "catalogue" / "tiny" / "index.html").read_text(encoding="utf-8")
    assert f'href="{ADDRESS}/blob/HEAD/recipes/tiny_fastv25_s16k4.yaml"' in catalogue
    assert "Needs a network, a checkout:" in (site / "install" / "index.html").read_text(encoding="utf-8")
    assert 'href="../glossary/#router" title="' in (site / "first_run/index.html").read_text(encoding="utf-8")
    torn = [name for name in pages if "<p>|" in (site / name).read_text(encoding="utf-8")]
    assert torn == []  # tables that were read as text

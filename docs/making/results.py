"""The page that leads to every committed table and plot, and shows the one that no other page has."""

import csv
import re
from pathlib import Path

from making.links import outside_code
from making.originals import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "docs/choosing.md": "which setting to take, by regime",
    "docs/real_text.md": "facts and text on real language models, every method",
    "docs/mini_suite.md": "shipped adapters, untrained controls and peers, on scenes and recall",
    "docs/trained_arms.md": "routers and evictions that are trained, on a real and on embedded models",
    "docs/speed.md": "decoding, prompts, training steps, beside kvpress",
    "docs/quality.md": "packed caches, originals, kvpress",
    "checkpoints/README.md": "the embedded models",
    "docs/trials.md": "what was tried, a line each",
}
"""What pages are about."""
HEAD = """# Results

Every committed table, with the section that says how it was made. Programs write them from the records in
`benchmarks/results/`, and tests compare. No 7B model was trained.

| page | what it is about | sections with tables or plots |
|---|---|---|
"""
ORIGINALS = """
## Beside the originals

Largest difference of every eviction to the original implementations' recorded outputs
([how](quality.md#originals)).

| method | case | largest difference |
|---|---|---|
"""


def results_page() -> str:
    """The text of the page."""
    rows = []
    for path, about in PAGES.items():
        rows.append(f"| [{_title(path)}](../{path}) | {about} | {_sections(path)} |\n")
    with TABLE.open(newline="") as file:
        cases = [f"| `{row['method']}` | {row['case']} | {row['max_difference']} |\n" for row in csv.DictReader(file)]
    return "".join([HEAD, *rows, ORIGINALS, *cases])


def _title(path: str) -> str:
    return _headings(path)[0][1]


def _headings(path: str) -> list[tuple[str, str, str]]:
    """(level, title, text below it) of every heading of a page, code left out."""
    text = outside_code((ROOT / path).read_text(encoding="utf-8"), lambda words: words.replace("```", ""))
    found = re.split(r"^(#{1,3}) (.+)\n", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.M)
    return list(zip(found[1::3], found[2::3], found[3::3], strict=True))


def _sections(path: str) -> str:
    """Links to the sections that hold a table or a plot."""
    held = [title for level, title, text in _headings(path) if level != "#" and re.search(r"^\|--|^!\[", text, re.M)]
    return ", ".join(f"[{title}](../{path}#{_anchor(title)})" for title in held)


def _anchor(title: str) -> str:
    """As code hosts and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

"""Put the tables that programs make into pages, between marks."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Write a text between the marks ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` of a page.

    Raises:
        ValueError: the page does not have each of them once.
    """
    start, end = f"<!-- {name}:start -->\n", f"\n<!-- {name}:end -->"
    before, rest = page.read_text(encoding="utf-8").split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{text}{end}{after}", encoding="utf-8")

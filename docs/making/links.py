"""Markdown as a code host reads it, made what the site's reader takes.

Three things differ. Links that leave ``docs/`` go to a page of the site where there is one, else to the repository. A
list may follow a line of text at once. And the marks of code blocks (``<!-- needs: ... -->``) are said to the reader.
"""

import posixpath
import re
from collections.abc import Callable, Collection
from pathlib import Path

_LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_LEFT_OUT = "docs/example_package/"  # by mkdocs.yml: a reader of the site is led to the repository
_ELSEWHERE = re.compile(r"[a-z]+:|#")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d+\.) ")
_NO_TEXT = re.compile(r"\s|#|\||<|$")
_MARK = re.compile(r"^<!-- (?:run(?:: [^>]+)?|shows|needs: (?P<what>[^>]+)) -->$", re.MULTILINE)


class Links:
    """Where the links of a page lead.

    Attributes:
        root: the repository.
        pages: files outside of ``docs/`` that are in the site, by path in the repository.
        address: the repository's; empty where it is not known, and links to it become their words.
    """

    def __init__(self, root: Path, pages: Collection[str], address: str) -> None:
        self.root, self.pages, self.address = root, pages, address.rstrip("/")

    def home(self, page: str) -> str:
        """Where a page of the site stands in the repository."""
        return page if page in self.pages else f"docs/{page}"

    def moved(self, page: str, match: re.Match[str]) -> str:
        """A link of a page, as it reads in the site."""
        words, target = match["words"], match["target"]
        if _ELSEWHERE.match(target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(self.home(page)), path))
        if file in self.pages or (file.startswith("docs/") and not file.startswith(_LEFT_OUT)):
            inside = posixpath.relpath(file.removeprefix("docs/"), posixpath.dirname(page) or ".")
            return f"{match['image']}[{words}]({inside}{'#' * bool(anchor)}{anchor})"
        if not (self.root / file).exists():
            return match[0]  # a strict build names it
        return f"[{words}]({self.address}/blob/HEAD/{file})" if self.address else words

    def page_text(self, page: str, text: str) -> str:
        """The text of a page for the site; ``page`` is its path there."""

        def rewritten(words: str) -> str:
            return _said(_separated(_LINK.sub(lambda match: self.moved(page, match), words)))

        return outside_code(text, rewritten)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything between its fenced blocks changed."""
    parts, place = [], 0
    for block in _FENCED.finditer(text):
        parts += [change(text[place : block.start()]), block[0]]
        place = block.end()
    return "".join([*parts, change(text[place:])])


def _separated(text: str) -> str:
    """A blank line between a line of text and a list that follows it."""
    lines: list[str] = []
    for line in text.split("\n"):
        above = lines[-1] if lines else ""
        if _ITEM.match(line) and not _ITEM.match(above) and not _NO_TEXT.match(above):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _said(text: str) -> str:
    """What a block needs, in words above it; other marks are for tests alone."""
    return _MARK.sub(lambda mark: f"*Needs {mark['what']}:*\n" if mark["what"] else "", text)

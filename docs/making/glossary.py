"""A private word leads to its definition where it first stands on a page of the site."""

import posixpath
import re
from functools import cache
from pathlib import Path

from making.links import outside_code

PAGE = "glossary.md"
_FORMS = {
    "entry": "(?:cache )?entries",
    "group": "value groups?",
    "index": "index bits",
    "region": None,
    "fill": "(?:mean|learned|stored) fill",
    "S16K4": r"S\d+K\d+",
    "rotated values": "rotated values",
}
"""Spellings of words that plain English has too; None: never linked."""
_KEPT = re.compile(r"(?P<link>!?\[[^\]]*\]\([^)]*\))|`[^`\n]*`|<[^>]*>|^#.*$|^\|.*\|\n\|[-| :]+\|$", re.MULTILINE)
_NOT_HERE = re.compile(r"glossary|api|cli|CHANGELOG|recipes/catalogue|papers/")


@cache
def definitions() -> dict[str, str]:
    """Return each word of the glossary with the first sentence of its definition."""
    parts = (Path(__file__).resolve().parents[1] / PAGE).read_text(encoding="utf-8").split("\n## ")[1:]
    told = {name: " ".join(text.split()) for name, _, text in (part.partition("\n") for part in parts)}
    return {name: re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", text).split(". ")[0] for name, text in told.items()}


@cache
def _pattern() -> re.Pattern[str]:
    forms = {name: _FORMS.get(name, f"{re.escape(name)}s?") for name in definitions()}
    ordered = sorted((name for name in forms if forms[name]), key=len, reverse=True)
    return re.compile("|".join(rf"(?<![\w-])({forms[name]})(?![\w-])" for name in ordered), re.IGNORECASE)


def with_definitions(page: str, text: str) -> str:
    """Return a page's text whose private words are links, each where it first stands, with the definition as title."""
    if _NOT_HERE.match(page):
        return text
    names = sorted((name for name in definitions() if _FORMS.get(name, name)), key=len, reverse=True)
    target, met = posixpath.relpath(PAGE, posixpath.dirname(page) or "."), set[str]()

    def linked(match: re.Match[str]) -> str:
        name = names[next(number for number, group in enumerate(match.groups()) if group)]
        if name in met:
            return match[0]
        met.add(name)
        title = definitions()[name].replace('"', "'").replace("|", "/").rstrip(".")
        return f'[{match[0]}]({target}#{name.lower().replace(" ", "-")} "{title}")'

    def of_prose(prose: str) -> str:
        parts, place = [], 0
        for kept in _KEPT.finditer(prose):
            parts += [_pattern().sub(linked, prose[place : kept.start()]), kept[0]]
            if kept["link"]:  # a link's own words say it
                met.update(name for name in names if re.search(rf"\b{re.escape(name)}", kept[0], re.IGNORECASE))
            place = kept.end()
        return "".join([*parts, _pattern().sub(linked, prose[place:])])

    return outside_code(text, of_prose)

"""Every path that ``docs/architecture.md`` names exists, and its rooms are those of the tree."""

import re

from tests.test_architecture import PACKAGE, RANK, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def named_paths(page: str) -> set[str]:
    """What stands in backticks and is written as a file or folder."""
    return {word for word in re.findall(r"`([\w./-]+)`", page) if word.endswith((".py", ".md", "/"))}


def missing(page: str) -> list[str]:
    places = (ROOT / PACKAGE, ROOT)
    return sorted(path for path in named_paths(page) if not any((place / path).exists() for place in places))


def test_every_path_exists():
    assert len(named_paths(PAGE)) > 40
    assert missing(PAGE) == []


def test_a_path_that_is_not_there_is_found():
    assert missing("`types.py` and `engine/nowhere.py`, `nowhere/`") == ["engine/nowhere.py", "nowhere/"]


def test_the_picture_shows_every_room():
    picture = PAGE.split("```")[1]
    shown = {word.rstrip("/") for word in re.findall(r"\b[a-z_]+/?", picture)}
    assert RANK.keys() - {"__main__"} <= shown

"""The pages' marked blocks, run in order from an empty folder, as a reader would who has installed the package."""

import re

import pytest

from tests.support.places import PAGES, ROOT, Reader, blocks

RUN = [path for path in PAGES if any(block.mark == "run" and block.words is None for block in blocks(path))]
"""Others say where they run: with README's, or in a test of their own."""


def words(text: str) -> str:
    """A text without its seconds and speeds, and without the width of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*(?= ?(s|ms|min|\w+/s)\b)", "#", text))


def test_start_and_do_are_among_them():
    assert {"install", "first_run", "budgets", "own_family", "tour"} <= {path.stem for path in RUN}


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_they_run_as_written_and_show_what_they_say(path, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    reader, said = Reader(folder, ROOT, tmp_path / "bin"), ""
    for block in blocks(path):
        if block.mark == "run":
            said = reader.type(block)
            assert "Traceback" not in said, block.place
        elif block.mark == "shows" and said and not block.language:  # else a part of a file
            for line in block.text.splitlines():
                assert words(line).strip() in words(said), f"{block.place}: {line}\n{said[-3000:]}"

"""Pages that a program writes are what it writes."""

import runpy

import pytest

from tests.support.places import ROOT

MADE = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_what_is_made(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == MADE[name](), "run python docs/generate.py"

"""Pages that a program writes are what it writes."""

import runpy

from tests.support.places import ROOT


def test_the_page_of_evictions():
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["write"]()
    assert (ROOT / "docs" / "evictions.md").read_text(encoding="utf-8") == made, "run python docs/generate.py"

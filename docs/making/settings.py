"""Tables of settings, made from their one declaration and put between marks in pages that people write."""

from __future__ import annotations

from pathlib import Path

from subtoken_train.plugins.harness import MODEL_SETTINGS
from subtoken_train.settings import ARM_SETTINGS, Setting

FOLDER = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- settings: docs/generate.py -->\n\n", "\n<!-- end of settings -->"
NAMES = {"reducers": "[list](reducers.md)", "evictions": "[list](evictions.md)", "wrappers": "wrappers"}
"""In the place of methods' names, which have pages of their own."""


def arms_page() -> str:
    """Return the page about grids with its table of an arm's keys."""
    return _filled("evaluation.md", "key", ARM_SETTINGS)


def arguments_page() -> str:
    """Return the page about harnesses with its table of model arguments."""
    return _filled("plugins.md", "argument", {name: each for name, each in MODEL_SETTINGS.items() if each.harness})


def _filled(page: str, heading: str, settings: dict[str, Setting]) -> str:
    before, _, rest = (FOLDER / page).read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [f"| `{name}` | {each.words.format(**NAMES)} |" for name, each in settings.items()]
    return before + BEGIN + "\n".join([f"| {heading} | meaning |", "|---|---|", *rows]) + "\n" + END + after

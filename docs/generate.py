"""Write ``docs/evictions.md`` from the eviction methods' own docstrings, settings and declarations.

    python docs/generate.py             # a test checks that the page is what it writes
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from subtoken_train.evictions import EVICTIONS
from subtoken_train.evictions.base import Eviction

PAGE = Path(__file__).resolve().parent / "evictions.md"
HEAD = """# KV evictions

<!-- made by `python docs/generate.py` from the docstrings in `subtoken_train/evictions/`; edit those -->

An eviction says, after the prompt's pass, which cached entries stay, per layer and head. What is evicted is not stored:
its bytes are freed, in `cache_report()` and in the process. Every method works on whole entries and on entries whose
value groups were routed, and chooses among the context (visual tokens, a text's context) unless `scope: all` is asked
for. In a recipe's arm, a grid, `--eviction` and `SubTokenModel.from_pretrained` a method has the same name.

| method | sets of a layer's heads | budget of a layer | passes over the context | blind to the question | what it is |
|---|---|---|---|---|---|
"""


def write() -> str:
    """The page's text."""
    methods = sorted((EVICTIONS.find(name) for name in EVICTIONS), key=lambda method: method.name)
    rows = [_row(method) for method in methods]
    return HEAD + "\n".join(rows) + "\n" + "".join(_card(method) for method in methods)


def _row(method: type[Eviction]) -> str:
    title, _ = _about(method)
    return f"| [`{method.name}`](#{method.name}) | {' | '.join(_facts(method).values())} | {title} |"


def _facts(method: type[Eviction]) -> dict[str, str]:
    """What the method declares, in words."""
    default = method()
    return {
        "sets": "one for all" if method.heads_share else "one each",
        "budget": "by all layers" if method.counts is not Eviction.counts else "its own",
        "passes": "2 where no question is there" if "second_pass" in method.needs else "1",
        "blind": "no" if default.reads_question else "yes",
    }


def _card(method: type[Eviction]) -> str:
    """A section: the module's docstring, the class's, and its settings."""
    title, text = _about(method)
    settings = _settings(method)
    lines = [f"\n## {method.name}\n", f"{title}\n" if title else "", text]
    if settings:
        lines += ["\n| setting | default | what it does |\n|---|---|---|", *settings]
    return "\n".join(line for line in lines if line) + "\n"


def _about(method: type[Eviction]) -> tuple[str, str]:
    """(first line, the rest) of the module's docstring, without its legend."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(method)))
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n")
    rest = re.sub(r"\n*Legend:.*\Z", "", rest, flags=re.DOTALL).strip()
    return _markdown(first), _markdown(rest)


def _settings(method: type[Eviction]) -> list[str]:
    """A table row for each field; a field of a base class is described there."""
    described: dict[str, str] = {}
    for kind in reversed(method.__mro__):
        described |= _attributes(kind.__doc__ or "")
    return [
        f"| `{field.name}` | `{field.default!r}` | {_markdown(described[field.name])} |"
        for field in dataclasses.fields(method)
    ]


def _attributes(docstring: str) -> dict[str, str]:
    """Settings and what an ``Attributes:`` section says of them."""
    section = re.search(r"Attributes:\n(.*?)(?=\n\s*\n|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    if section is None:
        return {}
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _markdown(text: str) -> str:
    """reStructuredText's code marks as Markdown's; a cell's bars do not end it."""
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(write(), encoding="utf-8")

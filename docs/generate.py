"""Write ``docs/evictions.md`` from the eviction methods' own docstrings, settings and declarations.

python docs/generate.py             # a test checks that the page is what it writes
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import torch

from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.evictions.base import Eviction
from subtoken_train.types import Region

ASKED = torch.tensor([[Region.CONTEXT, Region.CONTEXT, Region.QUERY]])
PAGE = Path(__file__).resolve().parent / "evictions.md"
HEAD = """# KV evictions

<!-- made by `python docs/generate.py` from the docstrings in `subtoken_train/evictions/`; edit those -->

An eviction says, after the prompt's pass, which cached entries stay, per layer and head. What is evicted is not stored:
its bytes are freed, in `cache_report()` and in the process (`quest_steps` alone stores all and reads less). It chooses
among the context (visual tokens, a text's context) unless `scope: all` is asked for, and works on whole entries and on
entries whose value groups were routed alike. In an arm, a grid, `--eviction` and `SubTokenModel.from_pretrained` a
method has the same name, and a wrapper is written around it: `ada(critical(expected_attention))`.

*Question*: `needed`: refused where the context is compressed before the question is read (`context_first`); `if there`:
attention of the question decides where it is there, other rows' where it is not; `never`: nobody's attention is read,
and a question that is there is rows like all others. *Chunks*: goes with `prefill_chunk`. *Decoding*: goes with
`eviction_every`.

| method | bytes | heads of a layer | budget of a layer | question | passes | chunks | decoding | what it is |
|---|---|---|---|---|---|---|---|---|
"""
WRAPPED = """
| wrapper | what it is |
|---|---|
"""


def write() -> str:
    """The page's text."""
    methods = [EVICTIONS[name] for name in sorted(EVICTIONS)]
    wrappers = [WRAPPERS[name] for name in sorted(WRAPPERS)]
    rows = [f"| {_link(each)} | {' | '.join(_facts(each))} | {_about(each)[0]} |\n" for each in methods]
    around = [f"| {_link(each)} | {_about(each)[0]} |\n" for each in wrappers]
    return "".join([HEAD, *rows, WRAPPED, *around, *map(_card, [*methods, *wrappers])])


def _link(method: type[Eviction]) -> str:
    return f"[`{method.name}`](#{method.name})"


def _facts(method: type[Eviction]) -> list[str]:
    """What the method declares, in words, at its default settings."""
    default = method()
    passes = "2 without a question" if "second_pass" in method.needs else "1"
    if default.second_pass(ASKED).any():
        passes = "2"
    question = "if there" if {"rows", "blocks"} & method.needs else "never"
    return [
        "read less" if method.reads else "freed",
        "one set" if method.heads_share else "a set each",
        "by all layers" if default.across_layers else "its own",
        "needed" if default.reads_question else question,
        passes,
        "no" if default.across_layers or "second_pass" in method.needs else "yes",
        "yes" if default.online else "no",
    ]


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
        if field.name != "base"
    ]


def _attributes(docstring: str) -> dict[str, str]:
    """Settings and what an ``Attributes:`` section says of them."""
    section = re.search(r"Attributes:\n(.*?)(?=\n\s*\n|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    if section is None:
        return {}
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _markdown(text: str) -> str:
    """Text of docstrings, with reStructuredText's code marks as Markdown's; a cell's bars do not end it."""
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(write(), encoding="utf-8")

"""Write the pages of evictions, reducers and families from their own docstrings, settings and declarations.

python docs/generate.py             # a test checks that the pages are what it writes
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import torch

from subtoken_train.errors import plain
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.evictions.base import Eviction
from subtoken_train.families import FAMILIES
from subtoken_train.families.family import Family
from subtoken_train.reducers import REDUCERS, build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Region

ASKED = torch.tensor([[Region.CONTEXT, Region.CONTEXT, Region.QUERY]])
FOLDER = Path(__file__).resolve().parent
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


REDUCERS_HEAD = """# Token reducers

<!-- made by `python docs/generate.py` from the docstrings in `subtoken_train/reducers/`; edit those -->

A token reducer decides which tokens stay, before routing and before any eviction; it has no gradient and acts alike in
training and at inference. `keep_ratio` is the share of the visual tokens (a text's context) that stays; at 1 nothing is
dropped. `round_up` is for matched anchors. A recipe names a reducer under `model.reducer`, an arm by `reducer` and
`reducer_options`.

*Acts in*: the vision `tower`; `embeds`, the input, shortened before layer 0; `decoder`, between layers; `context`,
every layer of a language model. *Ranks*: whether a `ranked` budget of the routers can follow it.

| reducer | acts in | ranks | what it is |
|---|---|---|---|
"""
FAMILIES_HEAD = """# Backbone families

<!-- made by `python docs/generate.py` from the declarations in `subtoken_train/families/`; edit those -->

A backbone is read by its `model_type`, in transformers' own format, without remote code. The models below are known by
name, so that `check --offline` and `evaluate --check` need no network; others of the same `model_type` load
alike. *Reducers* are those that fit the model (`none` and `random` always do).

| backbone | model_type | pictures | licence | reducers |
|---|---|---|---|---|
"""


def evictions_page() -> str:
    """The text of ``evictions.md``."""
    methods = [EVICTIONS[name] for name in sorted(EVICTIONS)]
    wrappers = [WRAPPERS[name] for name in sorted(WRAPPERS)]
    rows = [f"| {_link(each)} | {' | '.join(_facts(each))} | {_about(each)[0]} |\n" for each in methods]
    around = [f"| {_link(each)} | {_about(each)[0]} |\n" for each in wrappers]
    return "".join([HEAD, *rows, WRAPPED, *around, *map(_card, [*methods, *wrappers])])


def reducers_page() -> str:
    """The text of ``reducers.md``."""
    methods = [REDUCERS[name] for name in sorted(REDUCERS)]
    rows = [
        f"| {_link(each)} | {_sample(each).stage} | {'yes' if each.ranks else 'no'} | {_about(each)[0]} |\n"
        for each in methods
    ]
    return "".join([REDUCERS_HEAD, *rows, *map(_card, methods)])


def _sample(method: type[Reducer]) -> Reducer:
    """At settings under which it acts, if it ever does."""
    return build_reducer(method.name, 1.0 if method.name == "none" else 0.5)


def families_page() -> str:
    """The text of ``families.md``."""
    rows, kinds = [], dict.fromkeys(FAMILIES.values())
    for family in kinds:
        for name, make in family.published.items():
            config = make()
            licence = family.licences.get(name)
            said = "ask the backbone" if licence is None else licence.name or licence.identifier
            rows.append(
                f"| {name} | `{config.model_type}` | {_pictures(family)} | {said} | {_fitting(family, config)} |\n"
            )
    return "".join([FAMILIES_HEAD, *rows, *map(_family_card, kinds)])


def _pictures(family: type[Family]) -> str:
    if not family.sees_images:
        return "none"
    return "images, videos" if family.takes_videos else "images"


def _fitting(family: type[Family], config: object) -> str:
    """Reducers that fit a published model."""
    depth, fit = config.get_text_config(decoder=True).num_hidden_layers, []
    for name in sorted(set(REDUCERS) - {"none", "random"}):
        try:
            _sample(REDUCERS[name]).check_fit(family.name, family.sees_images, depth, family.tower_statistics(config))
        except ValueError:
            continue
        fit.append(f"`{name}`")
    return ", ".join(fit)


def _family_card(family: type[Family]) -> str:
    """A section: the module's docstring, and what the family declares."""
    title, text = _about(family)
    kinds = ", ".join(f"`{kind}`" for kind in FAMILIES if FAMILIES[kind] is family)
    inputs = ", ".join(f"`{name}`" for name in family.image_inputs) if family.sees_images else "none"
    facts = f"Read for `model_type` {kinds}. Inputs of pictures: {inputs}. LoRA on `{_markdown(family.lora_pattern)}`."
    return (
        "\n".join(part for part in (f"\n## {plain(family.name)}\n", f"{title}\n", text and f"{text}\n", facts) if part)
        + "\n"
    )


def _link(method: type[Eviction] | type[Reducer]) -> str:
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


def _card(method: type[Eviction] | type[Reducer]) -> str:
    """A section: the module's docstring, the class's, and its settings."""
    title, text = _about(method)
    settings = _settings(method)
    lines = [f"\n## {method.name}\n", f"{title}\n" if title else "", text]
    if settings:
        lines += ["\n| setting | default | what it does |\n|---|---|---|", *settings]
    return "\n".join(line for line in lines if line) + "\n"


def _about(method: type) -> tuple[str, str]:
    """(first line, the rest) of the module's docstring, without its legend."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(method)))
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n")
    rest = re.sub(r"\n*Legend:.*\Z", "", rest, flags=re.DOTALL).strip()
    return _markdown(first), _markdown(rest)


def _settings(method: type) -> list[str]:
    """A table row for each field; a field of a base class is described there."""
    described: dict[str, str] = {}
    for kind in reversed(method.__mro__):
        described |= _attributes(kind.__doc__ or "")
    return [
        f"| `{field.name}` | `{field.default!r}` | {_markdown(described[field.name])} |"
        for field in dataclasses.fields(method)
        if field.name not in ("base", "name")
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


PAGES = {"evictions.md": evictions_page, "reducers.md": reducers_page, "families.md": families_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")

"""The pages of evictions, token reducers and selectors."""

import csv
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from making.cards import about, card, class_words, link, setting_rows, setting_table
from making.kinds import CONTEXT_KIND, EVICTION_KINDS, REDUCER_KINDS, WRAPPER_KIND, Kind, page_of
from making.originals import beside_original
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.kvzip import TrainedGates
from subtoken_train.families import FAMILIES
from subtoken_train.families.family import Family, check_served
from subtoken_train.reducers import REDUCERS, build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import SELECTORS, RoutingConfig
from subtoken_train.routing.base import Selector
from subtoken_train.routing.shares import HeadShares
from subtoken_train.types import Region

ASKED = torch.tensor([[Region.CONTEXT, Region.CONTEXT, Region.QUERY]])
KINDS_HEAD = """
## {}

| page | what they have in common | methods |
|---|---|---|
"""
METHODS_HEAD = """# Methods

<!-- made by `python docs/generate.py` from docstrings -->

A name is the same in recipes, grids, commands and `SubTokenModel`. Bold rows: when to take a kind.
Settings and papers: the site's reference. [What to take first](choosing.md).
"""
SELECTORS_WORDS = """
## Selectors of value groups

The first three are trained; the others are controls:
`SubTokenModel(model, tokenizer, groups=(16, 12), selector="value_norm")`.

| method | what it is |
|---|---|
"""
EVICTIONS_HEAD = """# KV evictions

An eviction says, after the prompt's pass, which cached entries stay, per layer and head. What is evicted is not stored:
its bytes are freed, in `cache_report()` and in the process (`quest_steps` alone stores all and reads less). It chooses
among the context (visual tokens, a text's context) unless `scope: all` is asked for, and works on whole entries and on
entries whose value groups were routed alike. In an arm, a grid, `--eviction` and `SubTokenModel.from_pretrained` a
method has the same name, and a wrapper is written around it: `ada(critical(expected_attention))`.

*Question*: `needed`: refused where the context is compressed before the question is read (`context_first`); `if there`:
attention of the question decides where it is there, other rows' where it is not; `never`: nobody's attention is read,
and a question that is there is rows like all others. *Chunks*: goes with `prefill_chunk`. *Decoding*: goes with
`eviction_every`. *Threshold*: has absolute scores, so that
[a threshold](budgets.md#a-threshold-in-the-place-of-a-budget) can decide. *Beside the original*, on the cards: against
recorded outputs of the method's own code ([every case](quality.md#originals)).

| method | bytes | heads | budget of a layer | question | passes | chunks | decoding | threshold | what it is |
|---|---|---|---|---|---|---|---|---|---|
"""
WRAPPED = """
| wrapper | what it is |
|---|---|
"""
REDUCERS_HEAD = """# Token reducers

A token reducer decides which tokens stay, before routing and before any eviction; it has no gradient and acts alike in
training and at inference. `keep_ratio` is the share of the visual tokens (a text's context) that stays; at 1 nothing is
dropped. Counts are met to the token, and at least one stays. `round_up` and `matches` are for matched anchors. A recipe
names a reducer under `model.reducer`, an arm by `reducer` and `reducer_options`. What is dropped is not stored; every
one goes with routing and without.

*Acts in*: the vision `tower`; `embeds`, the input, shortened before layer 0; `decoder`, between layers; `context`,
every layer of a language model. *Ranks*: whether a `ranked` budget of the routers can follow it.
*Beside the original*, on the cards: against recorded outputs of the method's own code
([every case](quality.md#originals)).

| reducer | acts in | ranks | what it is |
|---|---|---|---|
"""
SERVED_HEAD = """
## Reducer and family

Asked of the code, of the first model of every family that is known by name ([all models](families.md)); a number is the
reason why not. `check` and every command say it before weights are read.

"""
SCENES = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "pruners_scenes.csv"
SCENES_HEAD = """
## Pruners on digit scenes

The embedded vision-language model under one LoRA that was trained without reduction, visual tokens pruned at evaluation
(`recipes/eval/pruners_scenes.yaml`, 150 questions of each task): scores in % and their mean; 95 % intervals reach
{:.0f} points to either side. `-`: every token stays. On LLaVA reducers in the tower count positions anew, as
released, which this model never saw in training: probably why their captions fail (not tested). A picture is 64 tokens,
most of them empty, and one seed was run: what to take is said by [real models](choosing.md) alone.

![Mean scores of visual pruners at two shares of the tokens](../benchmarks/results/pruners_scenes.svg)

"""
CONTEXT_LED = """
## Evictions of a text's context

An eviction is a reducer of a text's context by its own name:
[which ones, and their settings](reducers/context.md#evictions-of-a-texts-context).
"""
CONTEXT_HEAD = """
## Evictions of a text's context

An eviction's name under `reducer` trains LoRA and routers under its ranking: in every layer the context tokens stay
that its scores of the context put first, the mean over the heads deciding, as many in each layer. The question is not
read, in training or at inference, so `ask` and `context_first` go with it; a method that would look at the question's
rows looks at the context's last ones. An adapter trained so keeps the same tokens at inference. Wrappers are none,
and `random` is [the visual one](embeds.md#random); an eviction of another package is one by its entry point.

`kvzip` runs the context, and then what is repeated of it, before the pass that counts, without gradient. A training
step of SmolLM2 on 512 tokens, half of them context, takes 1.5 times the CPU seconds of Quest's (12.1 and 8.1 on one
thread of a busy machine); the larger the context's share, the more. `prefill_chunk` does not go with it.

| eviction | settings as a context reducer |
|---|---|
"""
SELECTORS_HEAD = """# Group selectors

A selector scores the value groups of every token that stays, in every layer, while the prompt is read; the budget turns
scores into a mask, and what the mask leaves out is not stored. *Learned* ones are routers, trained by a recipe; the
others are controls that choose without training, in the same bytes. A recipe names one under `model.routing`, an arm of
a grid by `selector`. A backbone alone takes a control with S and K:
`SubTokenModel(model, tokenizer, groups=(16, 12), selector="value_norm", layout="per_head")`, in `generate`, `evaluate`
and `benchmark` `--groups 16,12 --selector value_norm --layout per_head`, in a grid's arm the same words.

| selector | learned | what it is |
|---|---|---|
"""
SETTINGS_HEAD = """
## Settings

Of `model.routing`, whatever the selector; a setting that one does not have is refused. [Your own
router](own_router.md) declares its own.
"""


def methods_page() -> str:
    """The text of ``methods.md``: every method in one line, with its class."""
    parts = [METHODS_HEAD]
    for title, methods, kinds in (
        ("KV evictions", EVICTIONS, EVICTION_KINDS),
        ("Wrappers", WRAPPERS, (WRAPPER_KIND,)),
        ("Token reducers", REDUCERS, REDUCER_KINDS),
    ):
        parts.append(f"\n## {title}\n\n| method | what it is |\n|---|---|\n")
        for kind in kinds:
            short = re.sub("^(Evictions|Reducers) (that |made )?| around evictions", "", kind.title).capitalize()
            parts.append(f"| **{short}** | {kind.when} |\n{_in_short(methods, kind.names)}")
    trained = {"budget: delayed": TrainedGates, "byte_pool: learned": HeadShares}
    gates = _in_short(trained, trained)
    return "".join([*parts, SELECTORS_WORDS, _in_short(SELECTORS, SELECTORS), gates])


def _in_short(methods: Mapping[str, type], names: Iterable[str]) -> str:
    rows = [f"| `{name}` | {about(methods[name])[0]} |\n" for name in names]
    brief = re.sub(r"Router-free control( \(ours\))?: | \(paper,[^)]*\)| READING:.*?ours\.", "", "".join(rows))
    return re.sub(r" et al\., (\d{4})(, arXiv:[\d.v]+)?", r" \1", brief)


def evictions_page() -> str:
    """The text of ``evictions.md``."""
    methods = [EVICTIONS[name] for name in sorted(EVICTIONS)]
    wrappers = [WRAPPERS[name] for name in sorted(WRAPPERS)]
    rows = [
        f"| {_led(each.name, EVICTION_KINDS)} | {' | '.join(_declared(each))} | {about(each)[0]} |\n"
        for each in methods
    ]
    around = [f"| {_led(each.name, (WRAPPER_KIND,))} | {about(each)[0]} |\n" for each in wrappers]
    kinds = _kind_rows((*EVICTION_KINDS, WRAPPER_KIND))
    return "".join([EVICTIONS_HEAD, *rows, WRAPPED, *around, KINDS_HEAD.format("Kinds of evictions"), *kinds])


def _led(name: str, kinds: tuple[Kind, ...]) -> str:
    """Return a link to a method's card, with an anchor of its name: older addresses end in that."""
    return f'<a id="{name}"></a>{link(name, page_of(name, kinds))}'


def _kind_rows(kinds: tuple[Kind, ...]) -> list[str]:
    """Return a row for every kind of method."""
    return [
        f"| [{kind.title}]({kind.page}) | {kind.words} | {', '.join(f'`{name}`' for name in kind.names)} |\n"
        for kind in kinds
    ]


def eviction_cards(kind: Kind) -> str:
    """Return the text of a page of evictions."""
    return _head(kind, "evictions") + "".join(
        card(name, EVICTIONS[name], _facts(EVICTIONS[name]), setting_rows(EVICTIONS[name])) for name in kind.names
    )


def wrapper_cards() -> str:
    """Return the text of the page of wrappers."""
    return _head(WRAPPER_KIND, "evictions") + "".join(
        card(name, WRAPPERS[name], beside_original(name), setting_rows(WRAPPERS[name])) for name in WRAPPER_KIND.names
    )


def _head(kind: Kind, room: str) -> str:
    return f"# {kind.title}\n\n{kind.words} All [{room}](../{room}.md) in one table.\n"


def _declared(method: type[Eviction]) -> list[str]:
    """What the method declares, in words, at its default settings."""
    default = method()
    passes = "2 without a question" if "second_pass" in method.needs else "1"
    if default.second_pass(ASKED).any():
        passes = "2"
    question = "if there" if {"rows", "blocks"} & method.needs else "never"
    return [
        "read less" if method.reads else "freed",
        "one set" if default.heads_share else "a set each",
        "by all layers" if default.across_layers else "its own",
        "needed" if default.reads_question else question,
        passes,
        "no" if default.across_layers or "second_pass" in method.needs else "yes",
        "yes" if default.online else "no",
        "yes" if default.absolute else "no",
    ]


def _facts(method: type[Eviction]) -> str:
    """Where it acts, whether bytes are freed, whether it goes with routing, how near it is to its original."""
    acts = (
        "Acts in every step of decoding; no bytes are freed; not with routing."
        if method.reads
        else "Acts after the prompt; bytes are freed; with routing and without."
    )
    return f"{acts} {beside_original(method.name)}"


def reducers_page() -> str:
    """The text of ``reducers.md``."""
    methods = [REDUCERS[name] for name in sorted(REDUCERS)]
    rows = [
        f"| {_led(each.name, REDUCER_KINDS)} | {sample(each).stage} | {'yes' if each.ranks else 'no'} "
        f"| {about(each)[0]} |\n"
        for each in methods
    ]
    kinds = [KINDS_HEAD.format("Kinds of reducers"), *_kind_rows(REDUCER_KINDS)]
    return "".join([REDUCERS_HEAD, *rows, *kinds, CONTEXT_LED, *_served(), *_on_scenes()])


def reducer_cards(kind: Kind) -> str:
    """Return the text of a page of reducers."""
    return _head(kind, "reducers") + "".join(
        card(name, REDUCERS[name], beside_original(name), setting_rows(REDUCERS[name])) for name in kind.names
    )


def context_cards() -> str:
    """Return the text of the page of what shortens a text's context: its reducer, and evictions by their names."""
    return "".join([reducer_cards(CONTEXT_KIND), CONTEXT_HEAD, *_of_evictions()])


def _served() -> Iterator[str]:
    """The table of reducers and families, and the reasons that it numbers."""
    families, reasons = list(dict.fromkeys(FAMILIES.values())), []
    yield SERVED_HEAD + "".join(
        f"| {' | '.join(cells)} |\n"
        for cells in (["reducer", *(family.name for family in families)], ["---"] * (1 + len(families)))
    )
    for name in sorted(REDUCERS):
        cells = []
        for family in families:
            why = unfit(REDUCERS[name], family, next(iter(family.published.values()))())
            if why is not None and why not in reasons:
                reasons.append(why)
            cells.append("yes" if why is None else f"{reasons.index(why) + 1}")
        yield f"| {link(name, page_of(name, REDUCER_KINDS))} | {' | '.join(cells)} |\n"
    yield "\n" + "".join(f"{number}. {why}\n" for number, why in enumerate(reasons, 1))


def _on_scenes() -> Iterator[str]:
    """The table of the committed report, the best of each share first."""
    with SCENES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores: dict[tuple[float, str], dict[str, float]] = {}
    for row in rows:
        name, _, share = row["reducer"].partition(" ")
        own = scores.setdefault((-float(share or 1), name), {})
        own[row["task"].removeprefix("scenes_")] = 100 * float(row["value"])
    tasks = sorted(next(iter(scores.values())))
    wide = max(50 * (float(row["high"]) - float(row["low"])) for row in rows)
    head = ["reducer", "kept %", *tasks, "mean"]
    yield SCENES_HEAD.format(wide) + f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for (share, name), own in sorted(scores.items(), key=lambda each: (each[0][0], -sum(each[1].values()))):
        cells = [f"`{name}`", f"{-100 * share:g}", *(f"{own[task]:.1f}" for task in tasks)]
        yield f"| {' | '.join(cells)} | {sum(own.values()) / len(tasks):.1f} |\n"


def unfit(method: type[Reducer], family: type[Family], config: Any) -> str | None:
    """Why a reducer does not serve a model of a family, in the words of its refusal; None where it does."""
    try:
        check_served(sample(method), family, config)
    except ValueError as error:
        said = str(error).partition(";")[0].partition(", and this is")[0].replace(family.name, "the family")
        return said.removeprefix(f"reducer {method.name!r} ")
    return None


def _of_evictions() -> Iterator[str]:
    """A row for every eviction: its settings as a context reducer, or the reason why it is none."""
    for name in sorted(set(EVICTIONS) - {"random"}):
        card_link = link(name, f"../{page_of(name, EVICTION_KINDS)}")
        try:
            own = dataclasses.asdict(build_reducer(name, 0.5))
        except ValueError as error:
            reason = str(error).partition("no context reducer: it ")[2].partition("; evict with it")[0]
            yield f"| {card_link} | no: {reason} |\n"
            continue
        settings = [f"`{key}`" for key in own if key not in ("name", "keep_ratio", "round_up", "matches")]
        yield f"| {card_link} | {', '.join(settings) or 'yes, without settings'} |\n"


def sample(method: type[Reducer]) -> Reducer:
    """At settings under which it acts, if it ever does."""
    return build_reducer(method.name, 1.0 if method.name == "none" else 0.5)


def selectors_page() -> str:
    """The text of ``selectors.md``."""
    rows = [f"| {link(name)} | {_learned(SELECTORS[name])} | {about(SELECTORS[name])[0]} |\n" for name in SELECTORS]
    cards = [card(name, SELECTORS[name], _beside_title(SELECTORS[name]), []) for name in SELECTORS]
    settings = "\n".join(setting_table(setting_rows(RoutingConfig)))
    return "".join([SELECTORS_HEAD, *rows, *cards, SETTINGS_HEAD, settings, "\n"])


def _beside_title(method: type[Selector]) -> str:
    """The class's own docstring, where the card has not begun with it."""
    words = class_words(method)
    return "" if words.startswith(about(method)[0]) else words


def _learned(method: type[Selector]) -> str:
    return "yes" if method.learned else "no"

"""``subtoken-train recommend``: which compression of a text lost least in a budget of bytes, as it was measured."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from subtoken_train.errors import check_word, refuse, shell_words

HELP = """Which compression of a text lost least in a budget of bytes on real models, and how to write it.

The context is compressed before anything is asked of it. What keeps facts is ranked by facts in words, hidden in prose,
where they were asked, else by six codes in each of 60 contexts of WikiText. Text is what follows the context; RULER's
five tasks are longer (20 samples each). Losses are differences to the full cache with 95 % intervals; picking the best
of many overstates it slightly. docs/real_text.md has every method.

  subtoken-train recommend --budget 0.25
  subtoken-train recommend --budget 0.125 --model smollm2"""

FILE = Path(__file__).with_name("recommend.json")
"""Holds what lost least at any budget; ``benchmarks/real_frontier.py`` writes it from the records."""
GOALS = {
    "facts": "For facts that are asked for later",
    "text": "For text that goes on",
    "tasks": "For searches, chains and counts in longer contexts (five of RULER's tasks)",
}
COLUMNS = {
    "facts": ("nats a code", 1, 2),
    "codes": ("codes recalled, in points", 100, 1),
    "words": ("facts in words, in points", 100, 1),
    "text": ("nats a token of text", 1, 3),
    "tasks": ("points lost", 100, 1),
}
"""Head, scale and digits of what may be measured: one rule of rounding for commands and pages."""


@dataclass(frozen=True)
class MeasuredArm:
    """An arm in words, its settings as ``ArmSettings`` names them, and what it was measured to lose.

    Attributes:
        on: by model: ``bytes``, a share of the full bfloat16 cache; and beside the full cache a mean and the ends of
            its 95 % interval: ``facts`` and ``text``, nats lost a fact and a token, ``codes`` and ``words``, shares of
            facts recalled (None: not asked). Or by model and length ``tasks``, the share lost of RULER's scores.
        turned: whether the model is a copy that ``axes`` made.
    """

    arm: str
    settings: dict[str, Any]
    on: dict[str, dict[str, Any]]
    turned: bool = False

    def bytes_on(self, models: Collection[str]) -> float:
        """Return the largest share of bytes that the arm takes on one of the models."""
        return max(float(self.on[model]["bytes"]) for model in models)

    def cell(self, model: str, kind: str) -> str:
        """Write what was lost on a model, see ``interval_cell``."""
        (_, scale, digits), found = COLUMNS[kind], self.on[model][kind]
        return "not asked" if found is None else interval_cell([scale * each for each in found], digits)


def read_measured(of: str, model: str | None = None) -> tuple[dict[str, str], list[MeasuredArm]]:
    """Read what was measured of ``text`` or of ``tasks``: on which models, in words by name, and the arms."""
    read = json.loads(FILE.read_text(encoding="utf-8"))[of]
    names = {name: words for name, words in read["models"].items() if model in (None, name, name.partition("-")[0])}
    return names, [MeasuredArm(**each) for each in read["arms"]]


def measured_on(arms: Sequence[MeasuredArm], models: Collection[str], kind: str = "bytes") -> list[MeasuredArm]:
    """Return the arms that have records (of a kind) on all of the models."""
    return [each for each in arms if all(each.on.get(model, {}).get(kind) is not None for model in models)]


def least(arms: Sequence[MeasuredArm], models: Collection[str], budget: float, goal: str) -> MeasuredArm | None:
    """Return the arm in a budget (share) that loses least on the worst model, or None; of facts, words before codes."""
    fit = [each for each in measured_on(arms, models) if each.bytes_on(models) <= budget]
    asked = measured_on(fit, models, "words") if goal == "facts" else []

    def lost(arm: MeasuredArm) -> tuple[float, ...]:
        words = max(-arm.on[model]["words"][0] for model in models) if asked else 0.0
        return words, max(arm.on[model][goal][0] for model in models), arm.bytes_on(models)

    return min(asked or fit, key=lost, default=None)


def spellings(settings: dict[str, Any], model: str) -> Iterator[tuple[str, str]]:
    """Yield an arm as Python, a command line and a grid spell it."""
    given = ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    yield "Python", f"SubTokenModel.from_pretrained({json.dumps(model)}, {given}).ask(text, questions)"
    flags = ""
    for key, value in settings.items():
        flag = f" --{key.replace('options', 'option').replace('_', '-')} "
        several = [f"{name}={own}" for name, own in value.items()] if isinstance(value, dict) else [str(value)]
        flags += "".join(flag + each for each in several)
    yield "command", f"subtoken-train generate --backbone {shell_words(model)} --prompt -{flags} < FILE"
    yield "grid", re.sub(r'"(\w+)":', r"\1:", json.dumps({"arms": [{"backbone": model, **settings}]}))[1:-1]


def _unasked(arms: Sequence[MeasuredArm], models: Collection[str], budget: float) -> list[str]:
    smallest = min((each.bytes_on(models) for each in measured_on(arms, models, "words")), default=0.0)
    above = ceil(1000 * smallest) / 1000
    if smallest <= budget or (own := least(arms, models, above, "facts")) is None:
        return []
    said = "  facts in words: not asked in this budget, so codes rank it"
    return [said, f"  nearest above, by facts in words: {own.arm} ({own.bytes_on(models):.1%}), --budget {above:g}"]


def _lines(arm: MeasuredArm, models: dict[str, str], path: str) -> list[str]:
    kinds = [kind for kind in COLUMNS if all(kind in arm.on[model] for model in models)]
    rows = [["measured on", "bytes", *(COLUMNS[kind][0] for kind in kinds)]]
    for model, name in models.items():
        rows.append([name, f"{arm.on[model]['bytes']:.1%}", *(arm.cell(model, kind) for kind in kinds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if arm.settings.get("eviction") == "kvzap":
        nets = f"subtoken-train calibrate kvzap --backbone {shell_words(path)} --out nets.json --data TEXT"
        made.append(f"  first    {nets}")
    if arm.turned:
        made.append(f"  first    subtoken-train axes {shell_words(path, f'{path}-axes')} --data TEXT")
        path = f"{path}-axes"
    made += [f"  {kind:<8} {spelled}" for kind, spelled in spellings(arm.settings, path)]
    return [each.rstrip() for each in made]


def interval_cell(found: Sequence[float], digits: int) -> str:
    """Write a mean and its interval: ``+0.18 [+0.11, +0.25]``."""
    mean, low, high = (f"{each:+.{digits}f}" for each in found)
    return f"{mean} [{low}, {high}]"


def add_arguments(parser: ArgumentParser) -> None:
    share = "bytes, as a share of the full bfloat16 cache: 0.2"
    model = "a measured model: qwen05, smollm2 (default: what loses least on the one where it loses most)"
    parser.add_argument("--budget", type=float, required=True, metavar="B", help=share)
    parser.add_argument("--model", metavar="NAME", help=model)


def run(args: Namespace) -> int:
    if args.model is not None:
        check_word("model", args.model, read_measured("text")[0])
    names, arms = read_measured("text", args.model)
    places, asked = read_measured("tasks", args.model)
    smallest = min(each.bytes_on(names) for each in measured_on(arms, names))
    outside = f"--budget {args.budget:g} is outside what was measured on {' and '.join(names.values())}"
    share = f"give {ceil(1000 * smallest) / 1000:g} to 1, a share of the full bfloat16 cache's bytes"
    refuse((not smallest <= args.budget <= 1, f"{outside}: {share}"))
    path = f"checkpoints/{args.model or 'NAME'}"
    facts, text = (least(arms, names, args.budget, goal) for goal in ("facts", "text"))
    tasks = least(asked, places, args.budget, "tasks") if places else None
    assert facts is not None  # the budget holds the smallest
    assert text is not None
    titled = {"For facts and for text": facts} if facts is text else {GOALS["facts"]: facts, GOALS["text"]: text}
    for title, arm in titled.items():
        said = [f"{title}: {arm.arm}", *(_unasked(arms, names, args.budget) if arm is facts else [])]
        said += _lines(arm, names, path)
        same = [each for each in asked if (each.settings, each.turned) == (arm.settings, arm.turned)]
        found = [(each, place) for each in same for place in places if place in each.on]
        said += [f"  RULER's tasks, {places[at]}: {each.cell(at, 'tasks')} points lost" for each, at in found]
        print("\n".join([*said, ""]))
    said = [f"{GOALS['tasks']}: {'nothing was measured here' if tasks is None else tasks.arm}"]
    print("\n".join([*said, *([] if tasks is None else _lines(tasks, places, path)), ""]))
    if any(arm is not None and arm.settings.get("eviction") == "kvzip" for arm in (facts, text, tasks)):
        print("KVzip reads a context twice, so a prompt takes longer; KVzap, once its nets are learnt, reads it once.")
    print("Differences are to the full cache. Further methods: docs/real_text.md")
    return 0

"""``subtoken-train recommend``: which compression of a text lost least in a budget of bytes, as it was measured."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from subtoken_train.errors import check_word, shell_words

HELP = """Which compression of a text to take in a budget of bytes: what lost least on real models, and how to write it.

The context is compressed before anything is asked of it. Facts are six codes hidden in each of 60 contexts of WikiText,
text is what follows the context there. RULER's tasks are longer: 20 samples of each of five, of those the full cache
scores half of; the arm is what loses least at the length where it loses most. Losses are differences to the full
cache, with 95 % intervals; a winner among many is somewhat flattered. docs/real_text.md has every measured method.

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
    "facts": ("nats a fact", 1, 2),
    "codes": ("codes said, in points", 100, 1),
    "text": ("nats a token of text", 1, 3),
    "tasks": ("points lost", 100, 1),
}
"""Head, scale and digits of what may be measured."""


@dataclass(frozen=True)
class MeasuredArm:
    """An arm and what it was measured to lose.

    Attributes:
        arm: in words.
        settings: of the arm, as ``ArmSettings`` names them.
        on: by model: ``bytes``, a share of the full bfloat16 cache; and beside the full cache a mean and the ends of
            its 95 % interval: ``facts`` and ``text``, nats lost a fact and a token, and ``codes`` said, a share. Or by
            model and length ``tasks``, the share lost of RULER's scores.
        turned: whether the model is a copy that ``axes`` made.
    """

    arm: str
    settings: dict[str, Any]
    on: dict[str, dict[str, Any]]
    turned: bool = False

    def bytes_on(self, models: Collection[str]) -> float:
        """Return the largest share of bytes that the arm takes on one of the models."""
        return max(float(self.on[model]["bytes"]) for model in models)


def read_measured(of: str) -> tuple[dict[str, str], list[MeasuredArm]]:
    """Read what was measured of ``text`` or of ``tasks``: on which models, in words by name, and the arms."""
    read = json.loads(FILE.read_text(encoding="utf-8"))[of]
    return read["models"], [MeasuredArm(**each) for each in read["arms"]]


def measured_on(arms: Sequence[MeasuredArm], models: Collection[str]) -> list[MeasuredArm]:
    """Return the arms that have records on all of the models."""
    return [each for each in arms if each.on.keys() >= set(models)]


def least(arms: Sequence[MeasuredArm], models: Collection[str], budget: float, goal: str) -> MeasuredArm | None:
    """Return the arm in a budget that loses least, on several models: where it loses most; of equals the smallest.

    Args:
        arms: to choose from; those without a record on one of the models are left out.
        models: by folder.
        budget: share of the full cache's bytes that an arm may take on each model.
        goal: of ``GOALS``.
    """
    fit = [each for each in measured_on(arms, models) if each.bytes_on(models) <= budget]
    lost = {each.arm: max(float(each.on[model][goal][0]) for model in models) for each in fit}
    return min(fit, key=lambda each: (lost[each.arm], each.bytes_on(models)), default=None)


def spellings(settings: dict[str, Any], model: str) -> Iterator[tuple[str, str]]:
    """Yield an arm as Python, a command line and a grid spell it."""
    given = ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    yield "Python", f"SubTokenModel.from_pretrained({json.dumps(model)}, {given}).ask(text, questions)"
    flags = ""
    for key, value in settings.items():
        options = value.items() if isinstance(value, dict) else [("", value)]
        flag = f" --{key.replace('options', 'option').replace('_', '-')} "
        flags += "".join(flag + (f"{name}={own}" if name else f"{own}") for name, own in options)
    yield "command", f"subtoken-train generate --backbone {shell_words(model)} --prompt -{flags} < FILE"
    yield "grid", re.sub(r'"(\w+)":', r"\1:", json.dumps({"arms": [{"backbone": model, **settings}]}))[1:-1]


def lines(arm: MeasuredArm, models: dict[str, str], path: str, budget: float) -> list[str]:
    """Return what was measured of an arm on the models, and how it is written for the model at ``path``."""
    kinds = [kind for kind in COLUMNS if all(kind in arm.on[model] for model in models)]
    rows = [["measured on", "bytes", *(COLUMNS[kind][0] for kind in kinds)]]
    rows += [
        [name, f"{arm.on[model]['bytes']:.1%}", *(_cell(arm.on[model], kind) for kind in kinds)]
        for model, name in models.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if arm.settings.get("eviction") == "kvzap":
        made.append(
            f"  first    subtoken-train calibrate kvzap --backbone {shell_words(path)} --out nets.json --data TEXT"
        )
    if arm.turned:
        made.append(f"  first    subtoken-train axes {shell_words(path, f'{path}-axes')} --data TEXT")
        path = f"{path}-axes"
    made += [f"  {kind:<8} {spelled}" for kind, spelled in spellings(arm.settings, path)]
    if (keep := arm.settings.get("eviction_keep")) is not None:
        filled = int(1000 * keep * budget / arm.bytes_on(models)) / 1000
        if keep < filled < 1:
            made.append(f"  The budget holds eviction_keep={filled:g}, which was not measured.")
    return [each.rstrip() for each in made]


def read_on_tasks(model: str | None) -> tuple[dict[str, str], list[MeasuredArm]]:
    """Read what was measured of RULER's tasks, on one model or on all."""
    names, arms = read_measured("tasks")
    return {place: name for place, name in names.items() if model is None or place.startswith(f"{model}-")}, arms


def on_tasks(arm: MeasuredArm, model: str | None) -> list[str]:
    """Return what RULER's tasks lose in an arm that was chosen by text; nothing where they were not asked in it."""
    names, asked = read_on_tasks(model)
    same = [each for each in asked if (each.settings, each.turned) == (arm.settings, arm.turned)]
    return [
        f"  RULER's tasks, {name}: {_cell(each.on[place], 'tasks')} points lost"
        for each in same
        for place, name in names.items()
        if place in each.on
    ]


def _cell(own: dict[str, Any], kind: str) -> str:
    _, scale, digits = COLUMNS[kind]
    return interval_cell([scale * each for each in own[kind]], digits)


def interval_cell(found: Sequence[float], digits: int) -> str:
    """Write a mean and its interval: ``+0.18 [+0.11, +0.25]``."""
    mean, low, high = (f"{each:+.{digits}f}" for each in found)
    return f"{mean} [{low}, {high}]"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the budget, and optionally a model."""
    parser.add_argument(
        "--budget", type=float, required=True, metavar="B", help="bytes, as a share of the full bfloat16 cache: 0.2"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a measured model: qwen05, smollm2 (default: what loses least on the one where it loses most)",
    )


def run(args: Namespace) -> int:
    """Print for every goal what lost least in the budget."""
    names, arms = read_measured("text")
    if args.model is not None:
        check_word("model", args.model, names)
        names = {args.model: names[args.model]}
    smallest = min(each.bytes_on(names) for each in measured_on(arms, names))
    if not smallest <= args.budget <= 1:
        raise ValueError(
            f"--budget {args.budget:g} is outside what was measured on {' and '.join(names.values())}: give "
            f"{ceil(1000 * smallest) / 1000:g} to 1, a share of the full bfloat16 cache's bytes"
        )
    path = f"checkpoints/{args.model or 'NAME'}"
    chosen = {goal: least(arms, names, args.budget, goal) for goal in ("facts", "text")}
    same = chosen["facts"] is chosen["text"]
    for goal, arm in chosen.items():
        assert arm is not None  # the budget holds the smallest
        if goal == "facts" or not same:
            title = "For facts and for text" if same else GOALS[goal]
            own = [*lines(arm, names, path, args.budget), *on_tasks(arm, args.model)]
            print("\n".join([f"{title}: {arm.arm}", *own, ""]))
    chosen["tasks"] = _say_tasks(args.budget, args.model, path)
    if any(arm.settings.get("eviction") == "kvzip" for arm in chosen.values() if arm):
        print("KVzip reads a context twice, in three times the time; KVzap, once its nets are learnt, reads it once.")
    print("Differences are to the full cache. Further methods: docs/real_text.md")
    return 0


def _say_tasks(budget: float, model: str | None, path: str) -> MeasuredArm | None:
    """Print what loses least of RULER's tasks at the length where it loses most, or that none were asked."""
    names, arms = read_on_tasks(model)
    arm = least(arms, names, budget, "tasks") if names else None
    said = [f"{GOALS['tasks']}: {arm.arm if arm else 'nothing was measured here'}"]
    print("\n".join([*said, *(lines(arm, names, path, budget) if arm else []), ""]))
    return arm

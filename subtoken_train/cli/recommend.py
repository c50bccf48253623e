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

from subtoken_train.errors import check_word

HELP = """Which compression of a text to take in a budget of bytes: what lost least on real models, and how to write it.

The context is compressed before anything is asked of it. Facts are six codes hidden in each of 60 contexts of WikiText,
text is what follows the context there. Losses are differences to the full cache, with 95 % intervals; a winner among
many is somewhat flattered. docs/real_text.md has every measured method.

  subtoken-train recommend --budget 0.25
  subtoken-train recommend --budget 0.125 --model smollm2"""

FILE = Path(__file__).with_name("recommend.json")
"""Holds what lost least at any budget; ``benchmarks/real_frontier.py`` writes it from the records."""
CHAINS = """\
Half of the value groups loses chains of references: of RULER's variable tracking at 2,048 tokens qwen05 says 38 % with
them and no token dropped (full cache 67), with 12 of 16 groups 65. Whole values of more tokens in four bits say 67, and
are level with the full cache on five of RULER's tasks, in 12.4 % of the bytes:
SubTokenModel(..., eviction="kvzip", eviction_keep=0.466, kv_dtype="int4_rotated")."""
GOALS = {"facts": "For facts that are asked for later", "text": "For text that goes on"}


@dataclass(frozen=True)
class MeasuredArm:
    """An arm and what it was measured to lose.

    Attributes:
        arm: in words.
        settings: of the arm, as ``ArmSettings`` names them.
        on: by model: ``bytes``, a share of the full bfloat16 cache; and beside the full cache a mean and the ends of
            its 95 % interval: ``facts`` and ``text``, nats lost a fact and a token, and ``codes`` said, a share.
        turned: whether the model is a copy that ``axes`` made.
    """

    arm: str
    settings: dict[str, Any]
    on: dict[str, dict[str, Any]]
    turned: bool = False

    def bytes_on(self, models: Collection[str]) -> float:
        """Return the largest share of bytes that the arm takes on one of the models."""
        return max(float(self.on[model]["bytes"]) for model in models)


def read_measured() -> tuple[dict[str, str], list[MeasuredArm]]:
    """Read the measured models, names by folder, and the arms."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
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
        goal: ``facts`` or ``text``.
    """
    fit = [each for each in measured_on(arms, models) if each.bytes_on(models) <= budget]
    lost = {each.arm: max(float(each.on[model][goal][0]) for model in models) for each in fit}
    return min(fit, key=lambda each: (lost[each.arm], each.bytes_on(models)), default=None)


def spellings(settings: dict[str, Any], model: str) -> Iterator[tuple[str, str]]:
    """Yield an arm as Python, a command line and a grid spell it."""
    given = ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    yield "Python", f'SubTokenModel.from_pretrained("{model}", {given}).ask(text, questions)'
    flags = ""
    for key, value in settings.items():
        options = value.items() if isinstance(value, dict) else [("", value)]
        flag = f" --{key.replace('options', 'option').replace('_', '-')} "
        flags += "".join(flag + (f"{name}={own}" if name else f"{own}") for name, own in options)
    yield "command", f"subtoken-train generate --backbone {model} --prompt -{flags} < FILE"
    yield "grid", re.sub(r'"(\w+)":', r"\1:", json.dumps({"arms": [{"backbone": model, **settings}]}))[1:-1]


def lines(arm: MeasuredArm, models: dict[str, str], path: str, budget: float) -> list[str]:
    """Return what was measured of an arm on the models, and how it is written for the model at ``path``."""
    rows = [["measured on", "bytes", "nats a fact", "codes said, in points", "nats a token of text"]]
    for model, name in models.items():
        own = arm.on[model]
        lost = (own["facts"], 2), ([100 * each for each in own["codes"]], 1), (own["text"], 3)
        rows.append([name, f"{own['bytes']:.1%}", *(interval_cell(*each) for each in lost)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if arm.settings.get("eviction") == "kvzap":
        made.append(f"  first    subtoken-train calibrate kvzap --backbone {path} --out nets.json --data TEXT")
    if arm.turned:
        made.append(f"  first    subtoken-train axes {path} {path}-axes --data TEXT")
        path = f"{path}-axes"
    made += [f"  {kind:<8} {spelled}" for kind, spelled in spellings(arm.settings, path)]
    if (keep := arm.settings.get("eviction_keep")) is not None:
        filled = int(1000 * keep * budget / arm.bytes_on(models)) / 1000
        if keep < filled < 1:
            made.append(f"  The budget holds eviction_keep={filled:g}, which was not measured.")
    return [each.rstrip() for each in made]


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
    """Print for facts and for text what lost least in the budget."""
    names, arms = read_measured()
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
    chosen = {goal: least(arms, names, args.budget, goal) for goal in GOALS}
    same = chosen["facts"] is chosen["text"]
    for goal, arm in chosen.items():
        assert arm is not None  # the budget holds the smallest
        if goal == "facts" or not same:
            title = "For facts and for text" if same else GOALS[goal]
            print("\n".join([f"{title}: {arm.arm}", *lines(arm, names, path, args.budget), ""]))
    if any(arm.settings.get("eviction") == "kvzip" for arm in chosen.values() if arm):
        print("KVzip reads a context twice, in three times the time; KVzap, once its nets are learnt, reads it once.")
    if any(arm.settings.get("groups") == "16,8" for arm in chosen.values() if arm):
        print(CHAINS)
    print("Differences are to the full cache. Further methods: docs/real_text.md")
    return 0

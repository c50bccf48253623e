"""Which compression loses least of a real text at each size of the cache: a table and a picture of records.

    python -m benchmarks.real_frontier        # docs/choosing.md's table, results/real_text/frontier.svg, and what
                                              # the command recommend reads

Records are ``real_text.py``'s, of arms that compress a context before it is asked. The size is what was measured, as a
share of the full cache in bfloat16. A winner among many is somewhat flattered; intervals are of one arm against the
full cache.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from matplotlib.figure import Figure

from benchmarks.pages import put, svg_file
from benchmarks.pairs import markdown
from benchmarks.real_results import IN_WORDS, PAGE
from benchmarks.real_ruler import FULL, RECORDS, judges, words_of
from benchmarks.real_text import NAMES, OUT, ROOT, Arm, arms, by_arm, facts_above, read, text_above, turned_arms
from subtoken_train.cli.recommend import FILE, MeasuredArm, least, measured_on
from subtoken_train.evaluation.charts import COLORS, MARKERS, axes_in_a_row, styled
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import method_record

CHOOSING, SVG_FILE = ROOT / "docs/choosing.md", OUT / "frontier.svg"
SIZES = (0.27, 0.155, 0.102, 0.06)
"""Shares of the bytes of the table's rows."""
TASK_GRIDS = ("ruler_2k.yaml", "ruler_4k.yaml")
"""Of RULER's tasks, asked of the same arms."""
SERIES = {
    "KVzip and half of the value groups, 4 bits": r"(kvzip [0-9.]+% in )?int4_rotated( of everything)?, 8 of 16 .*",
    "KVzip, whole tokens, 4 bits": r"kvzip [0-9.]+% in int4_rotated",
    "KVzip, whole tokens, bfloat16": r"kvzip [0-9.]+%", "bits alone": r"(int8|int4_rotated|kivi2) of everything",
    "Compactor": r"compactor [0-9.]+%", "SnapKV": r"snapkv [0-9.]+%",
}  # fmt: skip
"""Lines of the picture, and the arms of each."""

Records = Mapping[str, Mapping[str, Any]]


def blind(model: str) -> dict[str, dict[str, Any]]:
    """Return a model's records but those that saw the question, and the controls of a choice of groups."""
    left_out = {arm.words for some in turned_arms(True).values() for arm in some}
    found = by_arm(OUT / f"{model}.jsonl.xz")
    return {arm: own for arm, own in found.items() if "question seen" not in arm and arm not in left_out}


def _size(own: Mapping[str, Any]) -> float:
    return float(np.mean(own["share"]))


def measured(models: Mapping[str, Records]) -> list[MeasuredArm]:
    """Return every arm with what it loses on the models that have its record, but for the full cache."""
    words = {arm: None for records in models.values() for arm in records if arm != "full cache"}
    known = {arm.words: arm for name in models for some in arms(name).values() for arm in some}
    on = {arm: {name: _figures(own[arm], name) for name, own in models.items() if arm in own} for arm in words}
    return [MeasuredArm(arm, settings(known[arm]), on[arm], known[arm].turned) for arm in words]


def settings(arm: Arm) -> dict[str, Any]:
    """Return an arm's settings as ``ArmSettings`` names them; a file of nets stands under a name of the user's."""
    own = arm.compression
    made: dict[str, Any] = {}
    if own.eviction is not None:
        options: dict[str, Any] = {"calibration": "nets.json"}
        if own.eviction.calibrated is None:
            usual, given = (method_record(each) for each in (build_eviction(own.eviction.name), own.eviction))
            options = {key: value for key, value in given.items() if value != usual[key]}
        made = {"eviction": own.eviction.name, "eviction_keep": round(own.keep, 4)}
        made |= {"eviction_options": options} if options else {}
    made |= {"kv_dtype": own.kv_dtype} if own.kv_dtype != "model" else {}
    made |= {"key_channels": own.key_channels} if own.key_channels < 1 else {}
    made |= {"key_axes": own.key_axes} if own.key_axes != "own" else {}
    return made | ({"groups": "{},{}".format(*arm.groups)} if arm.groups else {})


def _figures(own: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return an arm's bytes, and what it loses; of facts in words the full cache recalls all."""
    asked, arm = pd.read_csv(OUT / IN_WORDS[model], index_col="arm")[["value", "low", "high"]] - 1, own["arm"]
    words = asked.loc[PAGE[arm]].round(6).tolist() if PAGE.get(arm) in asked.index else None
    codes = np.array(own["exact"]).mean(1) - np.array(own["full"]["exact"]).mean(1)
    lost = {"facts": facts_above(own), "text": text_above(own), "codes": codes}
    intervals = {name: _mean_and_interval(each) for name, each in lost.items()}
    return {"bytes": round(_size(own), 5), **intervals, "words": words}


def _mean_and_interval(apart: npt.NDArray[np.float64]) -> list[float]:
    return [round(float(each), 6) for each in (apart.mean(), *bootstrap_interval(apart))]


def measured_on_tasks() -> tuple[dict[str, str], list[MeasuredArm]]:
    """Return where RULER's tasks were asked, in words by model and length, and the arms with what they lose there."""
    places, found = {}, dict[str, MeasuredArm]()
    for grid in TASK_GRIDS:
        asked = yaml.safe_load((ROOT / "recipes/real" / grid).read_text(encoding="utf-8"))
        model, length = Path(asked["arms"][0]["backbone"]).name, asked["tasks"][0]["length"]
        (record,) = read(RECORDS / f"{model}-{length}.jsonl.xz")
        places[f"{model}-{length}"] = f"{NAMES[model]}, {length:,} tokens"
        full, judged = np.array(record["arms"][FULL]["scores"]), np.isin(record["kinds"], judges(record))
        for given in asked["arms"]:
            own = record["arms"].get(words := words_of(given))
            if words == FULL or own is None:
                continue
            lost = _mean_and_interval((full - np.array(own["scores"]))[judged])
            arm = found.setdefault(words, MeasuredArm(words, _written(given), {}, given["backbone"].endswith("-axes")))
            arm.on[f"{model}-{length}"] = {"bytes": round(_size(own), 5), "tasks": lost}
    return places, list(found.values())


def _written(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grid's settings of an arm as a user writes them; a file of nets stands under a name of the user's."""
    own = {key: value for key, value in given.items() if key not in ("backbone", "dtype", "protocol", "selector")}
    return own | ({"eviction_options": {"calibration": "nets.json"}} if "eviction_options" in own else {})


def winners(found: Sequence[MeasuredArm], names: Sequence[str]) -> list[MeasuredArm]:
    """Return the arms that lose least at some budget, on one of the models or on all."""
    kept: dict[str, MeasuredArm] = {}
    for some in (*((name,) for name in names), tuple(names)):
        for budget in sorted(each.bytes_on(some) for each in measured_on(found, some)):
            for goal in ("facts", "text"):
                if (best := least(found, some, budget, goal)) is not None:
                    kept[best.arm] = best
    return sorted(kept.values(), key=lambda each: each.bytes_on(each.on))


def table(found: Sequence[MeasuredArm], names: Sequence[str]) -> str:
    """Write for each size and model the arms that lose least of facts and of text."""
    rows = []
    for size in SIZES:
        for name in names:
            cells = []
            for goal in (("facts", "words"), ("text",)):
                if (own := least(found, [name], size, goal[0])) is not None:
                    words = own.arm.replace("8 of 16 value groups by norm, values turned", "half of the value groups")
                    cells += [f"{words} ({own.on[name]['bytes']:.1%})", *(own.cell(name, kind) for kind in goal)]
            if cells:
                rows.append([f"{size:.1%}", NAMES[name], *cells])
    head = ["bytes, at most", "model", "for facts", "nats a code", "in words, points", "for text", "nats a token"]
    return markdown(head, rows)


def shipped(**parts: tuple[Mapping[str, str], Sequence[MeasuredArm]]) -> str:
    """Return what the command reads, an arm a line: of each part where it was measured, in words, and its arms."""
    written = []
    for part, (names, kept) in parts.items():
        lines = ",\n  ".join(json.dumps(vars(each)) for each in kept)
        written.append(f'"{part}": {{"models": {json.dumps(names)},\n "arms": [\n  {lines}]}}')
    return "{" + ",\n".join(written) + "}\n"


@styled
def figure(records: Records) -> Figure:
    """Draw the facts that one model recalls over the bytes of its cache."""
    made, (axes,) = axes_in_a_row(1, (5.4, 4.5))
    for number, (words, pattern) in enumerate(SERIES.items()):
        own = [(_size(each), np.mean(each["exact"])) for arm, each in records.items() if re.fullmatch(pattern, arm)]
        axes.plot(*zip(*sorted(own), strict=True), color=COLORS[number], marker=MARKERS[number], label=words)
    axes.axhline(np.mean(records["full cache"]["exact"]), color=COLORS[len(SERIES)], linestyle=":", label="full cache")
    axes.set(xlabel="bytes of the cache, share of bfloat16", ylabel="facts recalled", xscale="log", ylim=(0, 1.04))
    axes.set_xticks([0.06, 0.1, 0.22, 0.5], ["6 %", "10 %", "22 %", "50 %"])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.minorticks_off()
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.48, -0.13), ncols=2)
    return made


def picture(records: Records) -> str:
    """Return the picture as SVG."""
    words = "Facts that Qwen2.5-Coder-0.5B recalls from a compressed text, over the bytes of the cache"
    return svg_file(figure(records), "frontier", "Facts recalled against cache size", words)


def main() -> None:
    """Write the table, the picture and the command's file."""
    models = {name: blind(name) for name in NAMES}
    kept = winners(measured(models), list(NAMES))
    put(CHOOSING, "frontier", table(kept, list(NAMES)))
    SVG_FILE.write_text(picture(models["qwen05"]), encoding="utf-8")
    FILE.write_text(shipped(text=(NAMES, kept), tasks=measured_on_tasks()), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Trained arms on the embedded models: one table of all of them, and what their page shows; a test checks both.

python -m benchmarks.trained_results    # results/trained_arms.csv, tables of docs/trained_arms.md
"""

from typing import Any

import pandas as pd

from benchmarks.choosing import paired_gain
from benchmarks.choosing_page import GROUPS, RESULTS, ROOT
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import Arm, comparison_markdown, long_rows, read_records
from benchmarks.pages import put

PAGE, CSV = ROOT / "docs/trained_arms.md", RESULTS / "trained_arms.csv"
REGIMES = {"f2": "imprecise (FastV, L_f = 2)", "f4": "sharp (FastV, L_f = 4)", "vz": "blind (VisionZip)"}
BUDGETS = {"": ("15.6 %", "u25"), "7": ("7.8 %", "u12")}
"""By the end of an arm's name: the bytes, and the arm of the same tokens whole."""
ROLES = {"anchor": "anchor", "lead": "leading groups", "vn": "value norm", "best": "router"}
KEY = ["list", "arm", "less", "group", "measure"]
LISTS = ("two_stage", "recall", "routed_recall", "bytes")
"""Comparisons that the page shows arm by arm, by the beginning of their file's name."""


def table() -> str:
    """Scores in %, and the router's difference to its anchor, paired over seeds and questions.

    An arm that has other seeds than the row's says how many. The last column is measured, text and index included:
    anchor, groups, unrouted.
    """
    arms = read_records(RESULTS / "matched")
    beside = ("router less anchor", "unrouted", "kB of a prompt")
    head = ["ranking", "visual KV", "asked", "seeds", *ROLES.values(), *beside]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for stem, end in [(stem, end) for stem in REGIMES for end in BUDGETS]:
        found = {role: arms[name] for role in ROLES if (name := f"{stem}_{role}{end}") in arms}
        share, whole = BUDGETS[end][0], arms[f"{stem}_{BUDGETS[end][1]}"]
        seeds = set(found["best"].seeds) & set(found["anchor"].seeds)
        for group in GROUPS:
            scores = [_score(found[role], group, seeds) if role in found else "not asked" for role in ROLES]
            gain = paired_gain(found["best"], found["anchor"], group)
            assert gain is not None
            assert gain.seeds == len(seeds), "records of a seed are missing"
            told = [gain.words, _score(whole, group, seeds), _kilobytes(found, whole)]
            lines.append(f"| {' | '.join([REGIMES[stem], share, group, str(len(seeds)), *scores, *told])} |")
    return "\n".join(lines)


def _score(arm: Arm, group: str, seeds: set[int]) -> str:
    rows = [place for place, seed in enumerate(arm.seeds) if seed in seeds]
    few = "" if len(rows) == len(seeds) else f" (n = {len(rows)})"
    return f"{100 * arm.scores_of(group)[rows].mean():.1f}{few}"


def _kilobytes(found: dict[str, Arm], whole: Arm) -> str:
    """Of the anchor, of both arms of groups, and of the unrouted arm."""
    took = [arm.prompt_bytes for arm in (found["anchor"], found["best"], found["vn"], whole)]
    assert took[1] == took[2], "router and value norm store alike"
    return " / ".join(f"{each / 1000:.1f}" for each in (took[0], took[1], took[3]) if each is not None)


def listed(name: str) -> str:
    """Return one comparison's table, arm by arm."""
    comparison = read_comparison(ROOT / f"recipes/ablations/{name}_tiny.yaml")
    return comparison_markdown(read_records(RESULTS / comparison.folder), comparison)


def frame() -> pd.DataFrame:
    """Return every arm and paired difference of the comparisons, on every group of questions and measure.

    Records of ``matched`` keep measures beside the score where the page shows them; the others' are the table's own.
    """
    rows: list[dict[str, Any]] = []
    for name in ("matched", *LISTS):
        comparison = read_comparison(ROOT / f"recipes/ablations/{name}_tiny.yaml")
        rows += long_rows(name, read_records(RESULTS / comparison.folder), comparison)
    found, told = pd.DataFrame(rows), pd.read_csv(CSV, keep_default_na=False, na_values={"kv": [""]})
    known = pd.MultiIndex.from_frame(found[KEY])
    return pd.concat([found, told[(told["list"] == "matched") & ~pd.MultiIndex.from_frame(told[KEY]).isin(known)]])


def main() -> None:
    """Write the table and the page."""
    frame().to_csv(CSV, index=False, float_format="%.4g")
    put(PAGE, "front", table())
    for name in LISTS:
        put(PAGE, name, listed(name))


if __name__ == "__main__":
    main()

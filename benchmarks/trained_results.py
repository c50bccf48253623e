"""Trained arms on the embedded models in one table, what pages show of them, and the page of trials; tested.

python -m benchmarks.trained_results    # results/trained_arms.csv; tables of trained_arms.md, choosing.md and trials.md
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.choosing import Regime, choice_words, choose, paired_gain, seeds_of
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import Arm, comparison_markdown, long_rows, read_records
from benchmarks.pages import put
from benchmarks.pairs import markdown

ROOT, GROUPS = Path(__file__).resolve().parents[1], ("questions", "descriptions")
RESULTS = ROOT / "benchmarks/results"
PAGE, CSV = ROOT / "docs/trained_arms.md", RESULTS / "trained_arms.csv"
REGIMES = {"f2": "imprecise (FastV, L_f = 2)", "f4": "sharp (FastV, L_f = 4)", "vz": "without the question (VisionZip)"}
BUDGETS = {"": ("15.6%", "u25"), "7": ("7.8%", "u12")}
"""By the end of an arm's name: the bytes, and the arm of the same tokens whole."""
ROLES = {"anchor": "anchor", "lead": "leading groups", "vn": "value norm", "best": "router"}
KEY = ["list", "arm", "less", "group", "measure"]
LISTS = ("two_stage", "recall", "routed_recall", "bytes")
"""Comparisons beside ``matched``, by the beginning of their file's name."""
SHOWN = {"two_stage": ("25.0%", "15.6%"), "recall": ("21.9%",)}
BETWEEN = ("S8K2", "S8K6", "MLP")
"""Comparisons that the page shows arm by arm, at some sizes, and what names arms that it leaves out."""
TRIALS = ("first", "visionzip", "beyond", "fill", "screens")
"""Lists of exploratory comparisons, whose paired differences stand in the table of all arms."""


def table() -> str:
    """Scores of questions in %, the router's paired differences to its anchor; † marks one seed."""
    arms, rows = read_records(RESULTS / "matched"), []
    head = ["ranking", "visual KV", *ROLES.values(), "unrouted", "router less anchor", "the same, descriptions"]
    for stem, end in [(stem, end) for stem in REGIMES for end in BUDGETS]:
        found = {role: arms[f"{stem}_{role}{end}"] for role in ROLES}
        seeds = set(found["best"].seeds) & set(found["anchor"].seeds)
        scores = [_score(arm, GROUPS[0], seeds) for arm in (*found.values(), arms[f"{stem}_{BUDGETS[end][1]}"])]
        gains = [gain.words for group in GROUPS if (gain := paired_gain(found["best"], found["anchor"], group))]
        rows.append([REGIMES[stem], BUDGETS[end][0], *scores, *gains])
    return markdown(head, rows)


def choices() -> str:
    """Which arm to take in each regime, beside its anchor and trained value norm."""
    listed = read_comparison(ROOT / "benchmarks/ablations/matched_tiny.yaml").arms
    arms, rows = read_records(RESULTS / "matched"), []
    for stem, end in [(stem, end) for stem in REGIMES for end in BUDGETS]:
        names = tuple(f"{stem}_{one}{end}" for one in (("best", "fill") if end else ("s16k4", "best", "fill")))
        words = {name: listed[name].words.split(", ", 1)[1].split(" %, ")[-1] for name in names if name in listed}
        to_beat = (dict.fromkeys(names, f"{stem}_{role}{end}") for role in ("anchor", "vn"))
        regime = Regime(f"{REGIMES[stem]}, {BUDGETS[end][0]}", names, *to_beat, f"{stem}_{BUDGETS[end][1]}")
        made = {group: choose(arms, regime, group) for group in GROUPS}
        rows += [[regime.words, group, seeds_of(each), choice_words(each, words)] for group, each in made.items()]
    return markdown(["regime", "asked", "seeds", "take", "less its anchor", "less trained value norm"], rows)


def trials(topic: str) -> str:
    """Return one topic's trials without records, a line each."""
    own = pd.read_csv(RESULTS / "trials.csv", dtype=str).query("topic == @topic").drop(columns=["topic", "date"])
    return markdown(list(own.columns), own.itertuples(index=False))


def _score(arm: Arm, group: str, seeds: set[int]) -> str:
    rows = [place for place, seed in enumerate(arm.seeds) if seed in seeds]
    assert len(rows) in (1, 3), "the page says three seeds, or one"
    return f"{100 * arm.scores_of(group)[rows].mean():.1f}{'†' * (len(rows) == 1)}"


def listed(name: str) -> str:
    """Return one comparison's table, arm by arm, at the sizes that the page shows."""
    comparison = read_comparison(ROOT / f"benchmarks/ablations/{name}_tiny.yaml")
    rows = comparison_markdown(read_records(RESULTS / comparison.folder), comparison).splitlines()
    head, _, *cells = (row[2:-2].split(" | ") for row in rows)
    shown = (row for row in cells if row[1] in SHOWN[name] and not any(each in row[0] for each in BETWEEN))
    assert {row[2] for row in cells} <= {"3", "5"}, "the page says three seeds or more"
    return markdown(head[:2] + head[3:], [row[:2] + row[3:] for row in shown])


def frame() -> pd.DataFrame:
    """Return every arm and paired difference of the comparisons, on every group of questions and measure.

    Of trials the paired differences of scores alone. Records of ``matched`` keep measures beside the score where the
    page shows them; the others' are the table's own.
    """
    rows: list[dict[str, Any]] = []
    for name in ("matched", *LISTS, *TRIALS):
        comparison = read_comparison(ROOT / f"benchmarks/ablations/{name}_tiny.yaml")
        found = long_rows(name, read_records(RESULTS / comparison.folder), comparison)
        rows += [row for row in found if name not in TRIALS or (row["less"] and row["measure"] == "score")]
    made, told = pd.DataFrame(rows), pd.read_csv(CSV, keep_default_na=False, na_values={"kv": [""]})
    known = pd.MultiIndex.from_frame(made[KEY])
    return pd.concat([made, told[(told["list"] == "matched") & ~pd.MultiIndex.from_frame(told[KEY]).isin(known)]])


def main() -> None:
    """Write the table and the pages."""
    frame().to_csv(CSV, index=False, float_format="%.4g")
    put(PAGE, "front", table())
    for name in SHOWN:
        put(PAGE, name, listed(name))
    put(PAGE.with_name("choosing.md"), "matched", choices())
    for topic in pd.read_csv(RESULTS / "trials.csv")["topic"].unique():
        put(PAGE.with_name("trials.md"), topic, trials(topic))


if __name__ == "__main__":
    main()

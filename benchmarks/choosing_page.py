"""Write the table of ``docs/choosing.md`` from the committed comparison records; a test checks that it is this one.

python -m benchmarks.choosing_page
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.choosing import Regime, choice_words, choose, seeds_of
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import read_records

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "choosing.md"
START, END = "<!-- {}:start -->\n", "<!-- {}:end -->"
RESULTS = ROOT / "benchmarks" / "results"


def _embedded(words: str, stem: str, settings: tuple[str, ...], anchors: dict[str, str], end: str = "") -> Regime:
    """Routed arms ``<stem>_<setting><end>``: their anchors by name, value norm at the same S and K."""
    names = {setting: f"{stem}_{setting}{end}" for setting in settings}
    plain = {setting: f"{stem}_{setting.split('_')[0]}" for setting in settings}
    return Regime(
        words,
        tuple(names.values()),
        {name: anchors.get(setting, f"{stem}_s16k4{end}_anchor") for setting, name in names.items()},
        {name: f"{plain[setting]}_valuenorm{end}" for setting, name in names.items()},
        f"{stem}{end}",
    )


def _matched(words: str, stem: str, share: str, end: str) -> Regime:
    """Arms of ``matched_tiny.yaml``: the paper's router (15.6 %) and the finalists, beside anchor and value norm."""
    names = tuple(f"{stem}_{one}{end}" for one in (("best", "fill") if end else ("s16k4", "best", "fill")))
    return Regime(
        f"{words}, {share}",
        names,
        dict.fromkeys(names, f"{stem}_anchor{end}"),
        dict.fromkeys(names, f"{stem}_vn{end}"),
        f"{stem}_u12" if end else f"{stem}_u25",
    )


_GATED = dict.fromkeys(
    ("s16k4_gated", "s64k16_gated", "s64k16_prior_gated", "s64k16_global_prior_gated"),
    "tiny_fastv25_s16k4_gated_anchor",
)
_FINE = ("s64k16_gated", "s64k16_prior_gated", "s64k16_global_prior_gated")
_RECALL = ("tinylm_quest25_s16k12",)
GROUPS = ("questions", "descriptions")
MATCHED = tuple(
    (_matched(words, stem, share, end), "matched", GROUPS)
    for words, stem in (
        ("imprecise ranking (FastV, L_f = 2)", "f2"),
        ("sharp ranking (FastV, L_f = 4)", "f4"),
        ("ranking blind to the question (VisionZip)", "vz"),
    )
    for share, end in (("15.6 %", ""), ("7.8 %", "7"))
)
EXPLORATORY = (
    (
        _embedded("imprecise ranking (FastV, L_f = 2)", "tiny_fastv25", ("s16k4", "s16k4_gated", *_FINE), _GATED),
        "",
        GROUPS,
    ),
    (_embedded("sharp ranking (FastV, L_f = 4)", "tiny_fastv25", ("s16k4", *_FINE), {}, "_lf4"), "", GROUPS),
    (_embedded("ranking blind to the question (VisionZip)", "tiny_visionzip25", ("s16k4",), {}), "", GROUPS),
    (
        Regime(
            "text recall (Quest)",
            _RECALL,
            dict.fromkeys(_RECALL, "tinylm_quest25_s8k6_anchor"),
            {name: f"{name}_valuenorm" for name in _RECALL},
            "tinylm_lora_only",
        ),
        "recall",
        ("recall",),
    ),
)
"""Regime, the records' folder, and the groups of questions."""
TABLES = {"matched": MATCHED, "exploratory": EXPLORATORY}
"""By the name that marks the table on the page."""


def table(regimes: tuple[tuple[Regime, str, tuple[str, ...]], ...]) -> str:
    """One of the page's tables."""
    lines = [
        "| regime | asked | seeds | take | against its anchor | against trained value norm | against unrouted |",
        "|---|---|---|---|---|---|---|",
    ]
    listed = read_comparison(ROOT / "recipes/ablations/matched_tiny.yaml").arms
    records = {folder: read_records(RESULTS / folder) for folder in {folder for _, folder, _ in regimes}}
    for regime, folder, groups in regimes:
        arms = records[folder]
        words = {
            name: listed[name].words.split(", ", 1)[1].split(" %, ")[-1] if name in listed else f"`{name}`"
            for name in regime.candidates
        }
        for group in groups:
            choice = choose(arms, regime, group)
            lines.append(f"| {regime.words} | {group} | {seeds_of(choice)} | {choice_words(choice, words)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, regimes in TABLES.items():
        start, end = START.format(name), END.format(name)
        before, rest = PAGE.read_text(encoding="utf-8").split(start)
        PAGE.write_text(before + start + table(regimes) + end + rest.split(end)[1], encoding="utf-8")

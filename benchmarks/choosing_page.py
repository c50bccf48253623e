"""Write the table of ``docs/choosing.md`` from the committed comparison records; a test checks that it is this one.

python -m benchmarks.choosing_page
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.choosing import Regime, choice_words, choose
from benchmarks.comparison_tables import read_records

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "choosing.md"
START, END = "<!-- choosing:start -->\n", "<!-- choosing:end -->"
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


_GATED = dict.fromkeys(
    ("s16k4_gated", "s64k16_gated", "s64k16_prior_gated", "s64k16_global_prior_gated"),
    "tiny_fastv25_s16k4_gated_anchor",
)
_FINE = ("s64k16_gated", "s64k16_prior_gated", "s64k16_global_prior_gated")
_RECALL = ("tinylm_quest25_s16k12",)
REGIMES = (
    (
        _embedded("imprecise ranking (FastV, L_f = 2)", "tiny_fastv25", ("s16k4", "s16k4_gated", *_FINE), _GATED),
        "",
        ("questions", "descriptions"),
    ),
    (
        _embedded("sharp ranking (FastV, L_f = 4)", "tiny_fastv25", ("s16k4", *_FINE), {}, "_lf4"),
        "",
        ("questions", "descriptions"),
    ),
    (
        _embedded("ranking blind to the question (VisionZip)", "tiny_visionzip25", ("s16k4",), {}),
        "",
        ("questions", "descriptions"),
    ),
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


def table() -> str:
    """The page's table."""
    lines = [
        "| regime | asked | take | against its anchor | against trained value norm | against unrouted |",
        "|---|---|---|---|---|---|",
    ]
    for regime, folder, groups in REGIMES:
        arms = read_records(RESULTS / folder)
        words = {name: f"`{name}`" for name in regime.candidates}
        lines += [
            f"| {regime.words} | {group} | {choice_words(choose(arms, regime, group), words)} |" for group in groups
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END)[1], encoding="utf-8")

"""Write the table of ``docs/choosing.md`` from the committed comparison records; a test checks that it is this one.

python -m benchmarks.choosing_page
"""

from pathlib import Path

from benchmarks.choosing import Regime, choice_words, choose, seeds_of
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import read_records
from benchmarks.pages import put

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "choosing.md"
RESULTS = ROOT / "benchmarks" / "results"


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


GROUPS = ("questions", "descriptions")
MATCHED = tuple(
    (_matched(words, stem, share, end), "matched", GROUPS)
    for words, stem in (
        ("imprecise ranking (FastV, L_f = 2)", "f2"),
        ("sharp ranking (FastV, L_f = 4)", "f4"),
        ("ranking without the question (VisionZip)", "vz"),
    )
    for share, end in (("15.6 %", ""), ("7.8 %", "7"))
)
"""Regime, the records' folder, and the groups of questions."""


def table() -> str:
    """Return the page's table."""
    lines = [
        "| regime | asked | seeds | take | against its anchor | against trained value norm |",
        "|---|---|---|---|---|---|",
    ]
    listed = read_comparison(ROOT / "benchmarks/ablations/matched_tiny.yaml").arms
    records = {folder: read_records(RESULTS / folder) for folder in {folder for _, folder, _ in MATCHED}}
    for regime, folder, groups in MATCHED:
        arms = records[folder]
        words = {
            name: listed[name].words.split(", ", 1)[1].split(" %, ")[-1] if name in listed else f"`{name}`"
            for name in regime.candidates
        }
        for group in groups:
            choice = choose(arms, regime, group)
            lines.append(f"| {regime.words} | {group} | {seeds_of(choice)} | {choice_words(choice, words)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    put(PAGE, "matched", table())

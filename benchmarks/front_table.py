"""README's table: the comparison's arms at 15.6 % of the visual KV, from the committed records; a test checks it.

python -m benchmarks.front_table
"""

from __future__ import annotations

from benchmarks.choosing import paired_gain
from benchmarks.choosing_page import GROUPS, RESULTS, ROOT
from benchmarks.comparison_tables import Arm, read_records
from benchmarks.pages import put

PAGE = ROOT / "README.md"
REGIMES = {"f2": "imprecise (FastV, L_f = 2)", "f4": "sharp (FastV, L_f = 4)", "vz": "blind (VisionZip)"}
ROLES = {"anchor": "anchor", "vn": "value norm", "best": "router"}


def table() -> str:
    """Scores in %, and the router's difference to its anchor, paired over seeds and questions.

    Arms of equal keys and values share a row's seeds; the unrouted arm has more and says how many seeds it has. The
    last column is measured, text and index included: anchor, groups, unrouted.
    """
    arms = read_records(RESULTS / "matched")
    beside = ("router less anchor", "unrouted, 25 % (seeds)", "kB of a prompt")
    head = ["ranking", "asked", "seeds", *ROLES.values(), *beside]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for stem, words in REGIMES.items():
        found, whole = {role: arms[f"{stem}_{role}"] for role in ROLES}, arms[f"{stem}_u25"]
        seeds = set.intersection(*(set(arm.seeds) for arm in found.values()))
        for group in GROUPS:
            scores = [_score(arm, group, seeds) for arm in found.values()]
            gain = paired_gain(found["best"], found["anchor"], group)
            assert gain is not None
            assert gain.seeds == len(seeds), "records of a seed are missing"
            unrouted = f"{_score(whole, group, set(whole.seeds))} ({len(whole.seeds)})"
            cells = [words, group, str(len(seeds)), *scores, gain.words, unrouted, _kilobytes(found, whole)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _score(arm: Arm, group: str, seeds: set[int]) -> str:
    rows = [place for place, seed in enumerate(arm.seeds) if seed in seeds]
    return f"{100 * arm.scores_of(group)[rows].mean():.1f}"


def _kilobytes(found: dict[str, Arm], whole: Arm) -> str:
    """Of the anchor, of both arms of groups, and of the unrouted arm."""
    took = [arm.prompt_bytes for arm in (found["anchor"], found["best"], found["vn"], whole)]
    assert took[1] == took[2], "router and value norm store alike"
    return " / ".join(f"{each / 1000:.1f}" for each in (took[0], took[1], took[3]) if each is not None)


if __name__ == "__main__":
    put(PAGE, "front", table())

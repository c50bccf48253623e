"""Does a picture whose ranking is sharp want fewer tokens with more groups each? Settings at equal bytes, by sharpness.

    python -m benchmarks.sharpness            # ranks the dev questions; writes results/screens/sharpness.json
    python -m benchmarks.sharpness --table    # the table of docs/trials.md, from it and the screens' records

A rank that adapts to the sample (r and K by the ranking's sharpness, the bytes equal) can only win if sharp samples
prefer another (r, K) than dull ones. Sharpness is the share of its attention to the picture that FastV's row pays the
16 tokens that are kept, by the backbone alone, so that it is the same for every arm. The screens hold arms that were
trained at 14, 16 and 18 tokens of equal bytes and asked the same questions; the table has their paired differences in
the duller and the sharper half, and what a threshold that is chosen on one half of the questions, drawn by chance, wins
on the other.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import Arm, read_records, signed_cell
from benchmarks.tiny_comparison import ROOT, scene_questions
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_questions import DESCRIPTION_KINDS
from subtoken_train.engine.attention_rows import attention_row
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.inference.batched import in_batches
from subtoken_train.types import Region

RECORD = ROOT / "benchmarks/results/screens/sharpness.json"
LIST = ROOT / "recipes/ablations/screens_tiny.yaml"
START, END = "<!-- sharpness:start -->", "<!-- sharpness:end -->"
KEPT, LAYERS = 16, (2, 4)
PAIRS = {
    2: (("r_18_s64k7", "r_s64k16"), ("r_14_s64k27", "r_s64k16")),
    4: (("f4_18_vn", "f4_s64k16_vn"), ("f4_18_bilinear", "f4_bilinear")),
}
"""By L_f: (arm with another number of tokens, its twin with 16)."""

Figures = npt.NDArray[np.float64]


@torch.no_grad()
def sharpness() -> dict[int, Figures]:
    """Of every dev question, by L_f: the share of the picture's attention that the best ``KEPT`` tokens get."""
    asked = read_comparison(LIST).questions
    assert asked is not None
    records, family = InstructionRecords(scene_questions(asked)), load_family(BackboneConfig())
    collate, found = Collator(family, 512, generation=True), {layer: list[float]() for layer in LAYERS}
    for places in in_batches(range(len(records)), 64):
        batch = collate([records[place] for place in places])
        visible, positions = batch.regions_BN != Region.PADDING, family.positions(batch)
        hidden, ran = family.embed(batch), 0
        for layer in LAYERS:
            hidden = family.run_layers(hidden, visible, positions, start=ran, stop=layer - 1)
            ran = layer - 1
            row = attention_row(family, ran, hidden, visible, positions, batch.rank_position_B)
            visual = batch.regions_BN == Region.VISUAL
            paid = row.masked_fill(~visual, 0)
            best = paid.topk(KEPT, -1).values.sum(-1) / paid.sum(-1)
            found[layer] += best.tolist()
    return {layer: np.array(shares) for layer, shares in found.items()}


def table(record: dict[str, Any]) -> str:
    """Rows of the pairs that have records, for questions and for descriptions."""
    comparison, arms = read_comparison(LIST), read_records(ROOT / "benchmarks/results/screens/scenes")
    lines = ["| difference | questions of | duller half | sharper half | by a threshold |", "|---|---|---|---|---|"]
    for layer, pairs in PAIRS.items():
        sharp = np.array(record["sharpness"][str(layer)])
        for first, second in pairs:
            if first in arms and second in arms:
                words = " - ".join(comparison.arms[name].words for name in (first, second))
                lines += [f"| {words} | {group} | {_cells(arms, first, second, group, sharp)} |" for group in GROUPS]
    return "\n".join(lines)


GROUPS = ("questions", "descriptions")


def _cells(arms: dict[str, Arm], first: str, second: str, group: str, sharp: Figures) -> str:
    one, two = arms[first], arms[second]
    inside = np.isin(one.kinds, DESCRIPTION_KINDS) == (group == "descriptions")
    apart, sharp = 100 * (one.scores_sn[0] - two.scores_sn[0])[inside], sharp[inside]
    duller = sharp < np.median(sharp)
    return " | ".join(signed_cell(part) for part in (apart[duller], apart[~duller], by_threshold(apart, sharp)))


def by_threshold(apart: Figures, sharp: Figures) -> Figures:
    """What taking the first arm on one side of a threshold wins over always taking the better one, per question.

    Threshold and side are those that win most on one half of the questions, and are scored on the other; and the other
    way round. ``apart`` are the first arm's scores less the second's.
    """
    won, half = np.zeros_like(apart), np.random.default_rng(0).permutation(len(apart)) % 2
    for own in (0, 1):
        solve, score = half != own, half == own
        cuts = np.quantile(sharp[solve], np.linspace(0.1, 0.9, 9))
        rules = [(cut, side) for cut in cuts for side in (1, -1)]
        cut, side = max(rules, key=lambda rule: apart[solve][rule[1] * (sharp[solve] - rule[0]) > 0].sum())
        always = apart[solve].sum() > 0
        won[score] = np.where(side * (sharp[score] - cut) > 0, apart[score], 0) - (apart[score] if always else 0)
    return won


def main() -> None:
    """Rank, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        found = {str(layer): np.round(shares, 4).tolist() for layer, shares in sharpness().items()}
        RECORD.write_text(json.dumps({"kept": KEPT, "sharpness": found}, separators=(",", ":")) + "\n")
    print(table(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()

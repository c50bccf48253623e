"""Value groups per layer, solved from dev: has another split of the same bytes over the layers anything to win?

    python -m benchmarks.layer_budgets --work runs/comparison      # asks what has no record yet
    python -m benchmarks.layer_budgets --table                     # the record as the table of docs/trials.md

An adapter that ``tiny_comparison.py`` trained with K groups in every layer is asked the screens' dev questions with K_l
in layer l, sum of K_l = layers * K, so that the bytes stay equal. Of the first half of them the solver reads, layer by
layer, what half of K more or fewer costs; the layers that gain most then take from those that lose least, one pair,
two, three, and the best of these stands. The second half is scored only. Not retrained: an adapter trained with
K_l might gain more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.arm_training import Trainer, commit
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import signed_cell
from benchmarks.tiny_comparison import ROOT, scene_questions
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_questions import DESCRIPTION_KINDS
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.data_file import answer_records
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.state import RoutingState

RECORD = ROOT / "benchmarks/results/screens/layer_budgets.json"
LISTS = ROOT / "recipes/ablations"
START, END = "<!-- layer_budgets:start -->", "<!-- layer_budgets:end -->"
ARMS = (("f2_best7", 2), ("f2_vn7", 2), ("f4_fill", 1))
"""Arms of ``matched_tiny.yaml`` and the training seed whose adapter is asked."""

Figures = npt.NDArray[np.float64]


class LayerBudgets(RouterBank):
    """Routers that keep ``kept[l]`` groups of a routed token in layer l."""

    def __init__(self, config: RoutingConfig, hidden_size: int, shape: KVShape, kept: Sequence[int]) -> None:
        super().__init__(config, hidden_size, shape)
        self.kept = tuple(kept)
        assert len(self.kept) == shape.num_layers

    def _route(
        self, layer: int, hidden_BND: Tensor, value_BND: Tensor, state: RoutingState, routed_BN: Tensor
    ) -> Tensor:
        usual, self.config = self.config, replace(self.config, kept_groups=self.kept[layer])
        try:
            return super()._route(layer, hidden_BND, value_BND, state, routed_BN)
        finally:
            self.config = usual


@dataclass(frozen=True)
class Asked:
    """What an adapter says with some split: per question, and the share of the visual KV that is stored."""

    score: Figures
    log_likelihood: Figures
    realised: float


def with_budgets(backbone: CompressedBackbone, kept: Sequence[int]) -> CompressedBackbone:
    """The same adapter with ``kept[l]`` groups in layer l; the one that was given runs no more."""
    family, bank = backbone.family, backbone.bank
    assert bank is not None
    own = LayerBudgets(bank.config, family.hidden_size, family.shape, kept)
    own.load_state_dict(bank.state_dict())
    backbone.detach()
    return CompressedBackbone(family, backbone.reducer, own).eval()


def best_splits(costs: dict[tuple[int, int], float], kept: int, layers: int) -> list[list[int]]:
    """Splits with one, two, ... layers that took ``kept`` // 2 groups from as many others, best first by first order.

    Args:
        costs: loss of likelihood (lower is better) by (layer, groups more or fewer).
        kept: K.
        layers: how many.
    """
    step = kept // 2
    takers = sorted(range(layers), key=lambda layer: costs[layer, step])
    givers = sorted(range(layers), key=lambda layer: costs[layer, -step])
    splits, split = [], [kept] * layers
    for _ in range(layers // 2):
        free = [layer for layer in range(layers) if split[layer] == kept]
        pairs = [(t, g) for t in takers for g in givers if t != g and t in free and g in free]
        taker, giver = min(pairs, key=lambda pair: costs[pair[0], step] + costs[pair[1], -step])
        split = [*split]
        split[taker] += step
        split[giver] -= step
        splits.append(split)
    return splits


def solve(backbone: CompressedBackbone, data: Path) -> dict[str, Any]:
    """Ask with K everywhere, with every layer's neighbours, with the splits they promise; what the best of these says.

    A single layer's neighbour does not hold its bytes: it is a probe, and no answer that is reported.
    """
    bank = backbone.bank
    assert bank is not None
    kept, layers = bank.config.kept_groups, len(bank.selectors)
    described = np.isin(kinds_of(data), DESCRIPTION_KINDS)
    solving = np.arange(len(described)) < len(described) // 2
    uniform, current = [kept] * layers, backbone

    def ask(split: Sequence[int]) -> Asked:
        nonlocal current
        current = with_budgets(current, split)
        answers = answer_records(current, InstructionRecords(data), batch_size=128)
        forced = np.array(answers.measures["log_likelihood"], dtype=float)
        return Asked(np.array(answers.scores), forced, answers.realised)

    def loss(said: Asked) -> float:
        groups = (said.log_likelihood[solving & part].mean() for part in (described, ~described))
        return -float(sum(groups)) / 2

    plain, costs = ask(uniform), dict[tuple[int, int], float]()
    for layer in range(layers):
        for step in (kept // 2, -(kept // 2)):
            probe = [*uniform]
            probe[layer] += step
            costs[layer, step] = loss(ask(probe)) - loss(plain)
            print(f"  layer {layer} {step:+d}: {costs[layer, step]:+.4f}", flush=True)
    asked = [(split, ask(split)) for split in best_splits(costs, kept, layers)]
    split, best = min(asked, key=lambda pair: loss(pair[1]))
    assert plain.realised == best.realised
    print(f"  {split}: {loss(best) - loss(plain):+.4f}", flush=True)
    return {
        "kept": kept,
        "split": split,
        "costs": {f"{layer}{step:+d}": round(cost, 5) for (layer, step), cost in costs.items()},
        "solved": round(loss(best) - loss(plain), 5),
        "realised": [round(plain.realised, 6), round(best.realised, 6)],
        "described": described[~solving].astype(int).tolist(),
        "score": [np.round(said.score[~solving], 4).tolist() for said in (plain, best)],
        "log_likelihood": [np.round(said.log_likelihood[~solving], 4).tolist() for said in (plain, best)],
    }


def kinds_of(data: Path) -> npt.NDArray[np.str_]:
    """The questions' kinds, in the file's order."""
    records = InstructionRecords(data)
    return np.array([records[place].kind for place in range(len(records))])


def table(record: dict[str, Any]) -> str:
    """One row an arm: the split, and what it changes on the questions that the solver did not read, paired."""
    comparison = read_comparison(LISTS / "matched_tiny.yaml")
    lines = [
        "| arm, seed | K of each layer | solver's half: log-likelihood | questions | log-likelihood | descriptions "
        "| log-likelihood |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in record["arms"].items():
        arm, seed = name.rsplit("-seed", 1)
        described = np.array(found["described"], dtype=bool)
        cells = [
            signed_cell(scale * np.diff(np.array(found[measure])[:, part], axis=0), digits)
            for part in (~described, described)
            for measure, scale, digits in (("score", 100, 1), ("log_likelihood", 1, 3))
        ]
        split = " ".join(map(str, found["split"]))
        words = comparison.arms[arm].words
        lines.append(f"| {words}, {seed} | {split} | {-found['solved']:+.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Ask, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"arms": {}}
    questions = read_comparison(LISTS / "screens_tiny.yaml").questions
    assert questions is not None
    trainer = Trainer(arms := read_comparison(LISTS / "matched_tiny.yaml").arms, args.work)
    for arm, seed in () if args.table else ARMS:
        if (name := f"{arm}-seed{seed}") in record["arms"]:
            continue
        print(name, flush=True)
        backbone = read_adapter(trainer.adapter(arms[arm], seed)[0])[1]
        record["arms"][name] = {"commit": commit(), **solve(backbone, scene_questions(questions))}
        RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()

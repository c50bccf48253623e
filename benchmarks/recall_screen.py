"""Scorers and routing on key-value recall at equal bytes: a screen of many arms on dev, and finalists on test.

    python benchmarks/recall_screen.py --work runs/comparison            # asks what has no record yet
    python benchmarks/recall_screen.py --final --work runs/comparison    # finalists: three LoRA seeds, new contexts
    python benchmarks/recall_screen.py [--final] --table                 # the records as a table

The screen's adapters are those that ``tiny_comparison.py`` trained in ``--work`` (one training seed); an arm whose
adapter is not there is left out. The finalists stand on an adapter trained without reduction; what is missing is
trained. Contexts of the screen are of the ``dev`` split with a seed of their own, so that the test split stays
unopened; the finalists' are of ``test`` with a seed that nothing else asks. An arm is its adapter under other settings
at inference, where it says so: another reducer, groups kept (K of S = 16), tokens kept, key channels kept (ThinK), an
eviction; ``context_first`` compresses before the question is there. Shares of the context's KV are measured on packed
tensors: ``kv`` without the index of groups and channels, as the paper counts, ``kv_index`` with it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.arm_training import Trainer, commit
from benchmarks.comparison_lists import plain_arm
from benchmarks.comparison_tables import signed_cell
from benchmarks.recall_trials import FINAL, ROOT, SCREEN, Asked, Trial
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import Outcome, generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank

BATCH = 25
BY_NORM = RoutingConfig("value_norm", 16, 16, budget="global")
"""Of an adapter without routers, where groups are cut."""
PAGES = {"quest": {"page_size": 4, "window": 16}}
"""Settings of a reducer that an adapter was not trained under: those of the recipes for these contexts."""
KEY_WINDOW = 4
"""Last entries whose keys stay whole: those that Compactor keeps in any case."""


def backbone_of(trial: Trial, work: Path, seed: int = 0) -> CompressedBackbone | None:
    """The adapter under the trial's settings; None where it was not trained."""
    places = [work / f"{trial.recipe}-seed{seed}/adapter"]
    places += [ROOT / "checkpoints/adapters" / trial.recipe] if seed == 0 else []
    folder = next((place for place in places if place.exists()), None)
    if folder is None:
        return None
    backbone = read_adapter(folder)[1]
    family, bank = backbone.family, backbone.bank
    if trial.keep_ratio is None:
        return backbone
    if trial.kept_groups is not None and bank is None:
        bank = RouterBank(replace(BY_NORM, kept_groups=trial.kept_groups), family.hidden_size, family.shape)
    elif trial.kept_groups is not None and bank is not None:
        bank.config = replace(bank.config, kept_groups=trial.kept_groups)
    backbone.detach()
    reducer = backbone.reducer
    if trial.reducer is not None:
        reducer = build_reducer(trial.reducer, **PAGES.get(trial.reducer, {}))
    reducer = replace(reducer, keep_ratio=trial.keep_ratio)
    return CompressedBackbone(family, reducer, bank).eval()


def ask(trial: Trial, backbone: CompressedBackbone, asked: Asked, seed: int) -> dict[str, Any]:
    """The record of an arm: the share of its eight facts that each context's answer states."""
    records = RecallRecords(RecallTask(backbone.family.tokenizer), asked.split, asked.contexts, asked.seed)
    drawn = [records[i] for i in range(asked.contexts)]
    longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
    method = None if trial.eviction is None else build_eviction(trial.eviction)
    compression = Compression(method, trial.eviction_keep, key_channels=trial.key_channels, key_window=KEY_WINDOW)
    scores, measured, clock = list[float](), list[Outcome](), time.perf_counter()
    for start in range(0, asked.contexts, BATCH):
        part = drawn[start : start + BATCH]
        prompts = [replace(each.text, input_ids=each.text.input_ids[: each.text.prompt_length]) for each in part]
        outcomes = generate_batch(
            backbone,
            collate_text(prompts, padding_id(backbone.family.tokenizer)),
            max_new_tokens=longest + 4,
            compression=compression,
            protocol=trial.protocol,
        )
        scores += [recall_accuracy(said.text, each.codes) for said, each in zip(outcomes, part, strict=True)]
        measured += outcomes
    kept, index, dense = (
        sum(getattr(each, part) for each in measured) for part in ("region_bytes", "index_bytes", "region_dense_bytes")
    )
    return {
        "arm": trial.name,
        "recipe": trial.recipe,
        "seed": seed,
        "split": f"{asked.split}, seed {asked.seed}",
        "contexts": asked.contexts,
        "recall": round(sum(scores) / asked.contexts, 5),
        "kv": round((kept - index) / dense, 6),
        "kv_index": round(kept / dense, 6),
        "seconds": round(time.perf_counter() - clock, 1),
        "commit": commit(),
        "scores": [round(score, 3) for score in scores],
    }


Records = dict[str, list[dict[str, Any]]]


def table(records: Records, references: dict[str, str]) -> str:
    """Every arm with its paired difference from each of ``references`` (arm: words), over seeds and contexts."""
    beside = "".join(f" less {words} |" for words in references.values())
    lines = [f"| arm | seeds | KV | with index | recall |{beside}", "|---|---|---|---|---|" + "---|" * len(references)]
    for name, runs in records.items():
        shares = " | ".join(f"{np.mean([run[key] for run in runs]):.3%}" for key in ("kv", "kv_index"))
        cells = "".join(f" {_gain(records, name, reference)} |" for reference in references)
        lines.append(f"| {name} | {len(runs)} | {shares} | {100 * _scores(runs).mean():.1f} |{cells}")
    return "\n".join(lines)


def _gain(records: Records, name: str, reference: str) -> str:
    if name == reference:
        return ""
    return signed_cell(100 * (_scores(records[name]) - _scores(records[reference])))


def _scores(runs: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    return np.array([run["scores"] for run in runs])


def read_records(asked: Asked = SCREEN) -> Records:
    """Runs by the trial's name, in the order of the arms; those that have one for every training seed."""
    files = {trial.name: list(asked.files(trial).values()) for trial in asked.arms}
    whole = {name: paths for name, paths in files.items() if all(path.exists() for path in paths)}
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in whole.items()}


def main() -> None:
    """Ask, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--final", action="store_true", help="the finalists on test contexts, three training seeds")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    asked = FINAL if args.final else SCREEN
    for trial in () if args.table else asked.arms:
        for seed, file in asked.files(trial).items():
            if file.exists():
                continue
            if args.final:
                arm = plain_arm(trial.recipe, trial.name)
                Trainer({arm.name: arm}, args.work).adapter(arm, seed)
            if (backbone := backbone_of(trial, args.work, seed)) is None:
                continue
            asked.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(ask(trial, backbone, asked, seed)) + "\n")
            print(file.stem, flush=True)
    print(table(read_records(asked), asked.references))


if __name__ == "__main__":
    main()

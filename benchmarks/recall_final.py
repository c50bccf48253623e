"""Recall of key-value facts at equal bytes: Compactor's whole tokens beside value groups and cut key channels.

    python benchmarks/recall_final.py --work runs/comparison    # trains and asks what has no record yet
    python benchmarks/recall_final.py --table                   # prints the records as a table

Every arm stands on one LoRA that was trained without reduction (three training seeds) and is asked 400 contexts of the
test split under a seed that nothing else uses. An arm changes settings at inference: the reducer, groups kept (K of
S = 16), tokens kept, key channels kept (ThinK), an eviction; ``context_first`` compresses before the question is there.
Shares of the context's KV are measured on packed tensors: ``kv`` without the index of groups and channels, as the paper
counts, ``kv_index`` with it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.arm_training import Trainer, commit
from benchmarks.comparison_lists import plain_arm
from benchmarks.comparison_tables import signed_cell
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
from subtoken_train.types import Protocol

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks/results/matched/recall"
SPLIT, CONTEXTS_SEED, CONTEXTS, SEEDS = "test", 3, 400, (0, 1, 2)
BATCH = 25
BY_NORM = RoutingConfig("value_norm", 16, 16, budget="global")
"""Selects groups where an adapter without routers cuts them."""
KEY_WINDOW = 4
"""Last entries whose keys stay whole: Compactor always keeps them."""
REFERENCE = "lora_only-compactor-0.21875"
"""The peer: Compactor with a set of entries for each head."""
TWINS = {
    REFERENCE: "Compactor, sets per head",
    "lora_only-under_compactor-r0.21875-context_first": "one set for all heads",
    "lora_only-under_compactor-r0.28125-keys0.53125-context_first": "one set, keys cut",
}
"""The arms that every arm is compared with, and their words: the peer, and the token-only anchors."""


@dataclass(frozen=True)
class Trial:
    """One arm: the recipe that trained its adapter, and what is set otherwise at inference (None: nothing)."""

    recipe: str
    reducer: str | None = None
    keep_ratio: float | None = None
    kept_groups: int | None = None
    key_channels: float = 1.0
    eviction: str | None = None
    eviction_keep: float = 1.0
    protocol: Protocol = "query_aware"

    @property
    def name(self) -> str:
        """The name of its record."""
        said = [self.recipe.removeprefix("tinylm_")]
        said += [] if self.reducer is None else [f"under_{self.reducer}"]
        said += [] if self.keep_ratio is None else [f"r{self.keep_ratio:.6g}"]
        said += [] if self.kept_groups is None else [f"k{self.kept_groups}"]
        said += [] if self.key_channels == 1 else [f"keys{self.key_channels:.6g}"]
        said += [] if self.eviction is None else [self.eviction, f"{self.eviction_keep:.6g}"]
        return "-".join([*said, *(["context_first"] if self.protocol == "context_first" and not self.eviction else [])])


def finalists() -> list[Trial]:
    """Compactor as a peer, as token-only anchors, and under value groups and key channels, on one and the same LoRA."""
    blind: dict[str, Any] = {"protocol": "context_first"}
    return [
        Trial("tinylm_lora_only", eviction="compactor", eviction_keep=0.21875, **blind),
        *(
            Trial("tinylm_lora_only", "compactor", tokens / 512, kept, channels / 32, **blind)
            for tokens, kept, channels in (
                (112, None, 32), (144, None, 17), (128, 12, 32), (144, 12, 25), (160, 10, 24)
            )
        ),
    ]  # fmt: skip


def backbone_of(trial: Trial, work: Path, seed: int) -> CompressedBackbone:
    """Load the trained adapter and put the trial's settings on it."""
    places = [work / f"{trial.recipe}-seed{seed}/adapter"]
    places += [ROOT / "checkpoints/adapters" / trial.recipe] if seed == 0 else []
    folder = next((place for place in places if place.exists()), None)
    assert folder is not None, f"{trial.recipe} is not trained"
    backbone = read_adapter(folder)[1]
    family, bank = backbone.family, backbone.bank
    if trial.keep_ratio is None:
        return backbone
    if trial.kept_groups is not None and bank is None:
        bank = RouterBank(replace(BY_NORM, kept_groups=trial.kept_groups), family.hidden_size, family.shape)
    elif trial.kept_groups is not None and bank is not None:
        bank.config = replace(bank.config, kept_groups=trial.kept_groups)
    backbone.detach()
    reducer = backbone.reducer if trial.reducer is None else build_reducer(trial.reducer)
    return CompressedBackbone(family, replace(reducer, keep_ratio=trial.keep_ratio), bank).eval()


def ask(trial: Trial, backbone: CompressedBackbone, seed: int) -> dict[str, Any]:
    """Return an arm's record: the share of its eight facts that each context's answer states."""
    records = RecallRecords(RecallTask(backbone.family.tokenizer), SPLIT, CONTEXTS, CONTEXTS_SEED)
    drawn = [records[i] for i in range(CONTEXTS)]
    longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
    method = None if trial.eviction is None else build_eviction(trial.eviction)
    compression = Compression(method, trial.eviction_keep, key_channels=trial.key_channels, key_window=KEY_WINDOW)
    scores, measured, clock = list[float](), list[Outcome](), time.perf_counter()
    for start in range(0, CONTEXTS, BATCH):
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
        "split": f"{SPLIT}, seed {CONTEXTS_SEED}",
        "contexts": CONTEXTS,
        "recall": round(sum(scores) / CONTEXTS, 5),
        "kv": round((kept - index) / dense, 6),
        "kv_index": round(kept / dense, 6),
        "seconds": round(time.perf_counter() - clock, 1),
        "commit": commit(),
        "scores": [round(score, 3) for score in scores],
    }


Records = dict[str, list[dict[str, Any]]]


def table(records: Records) -> str:
    """Show every arm with its paired difference from each of ``TWINS``, over seeds and contexts."""
    beside = "".join(f" less {words} |" for words in TWINS.values())
    lines = [f"| arm | seeds | KV | with index | recall |{beside}", "|---|---|---|---|---|" + "---|" * len(TWINS)]
    for name, runs in records.items():
        shares = " | ".join(f"{np.mean([run[key] for run in runs]):.3%}" for key in ("kv", "kv_index"))
        cells = "".join(f" {_gain(records, name, reference)} |" for reference in TWINS)
        lines.append(f"| {name} | {len(runs)} | {shares} | {100 * _scores(runs).mean():.1f} |{cells}")
    return "\n".join(lines)


def _gain(records: Records, name: str, reference: str) -> str:
    if name == reference:
        return ""
    return signed_cell(100 * (_scores(records[name]) - _scores(records[reference])))


def _scores(runs: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    return np.array([run["scores"] for run in runs])


def files(trial: Trial) -> dict[int, Path]:
    """Return an arm's record files by training seed."""
    return {seed: OUT / f"{trial.name}-seed{seed}.json" for seed in SEEDS}


def read_records() -> Records:
    """Read the runs of every arm that has one for each training seed, by name and in the order of the arms."""
    paths = {trial.name: list(files(trial).values()) for trial in finalists()}
    whole = {name: found for name, found in paths.items() if all(path.exists() for path in found)}
    return {name: [json.loads(path.read_text()) for path in found] for name, found in whole.items()}


def main() -> None:
    """Train and ask what has no record, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for trial in () if args.table else finalists():
        arm = plain_arm(trial.recipe, trial.name)
        for seed, file in files(trial).items():
            if not file.exists():
                Trainer({arm.name: arm}, args.work).adapter(arm, seed)
                OUT.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(ask(trial, backbone_of(trial, args.work, seed), seed)) + "\n")
                print(file.stem, flush=True)
    print(table(read_records()))


if __name__ == "__main__":
    main()

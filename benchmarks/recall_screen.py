"""Scorers and routing on key-value recall at equal bytes: a screen of many arms on dev, and finalists on test.

    python benchmarks/recall_screen.py --work runs/comparison            # asks what has no record yet
    python benchmarks/recall_screen.py --final --work runs/comparison    # finalists: three LoRA seeds, unopened contexts
    python benchmarks/recall_screen.py [--final] --table                 # the records as a table

The screen's adapters are those that ``tiny_comparison.py`` trained in ``--work`` (one training seed); an arm whose
adapter is not there is left out. The finalists stand on an adapter trained without reduction; what is missing is
trained. Contexts of the screen are of the ``dev`` split with a seed of their own, so that the test split stays
unopened; the finalists' are of ``test`` with a seed that nothing else asks. An arm is its adapter under other settings at inference, where it says so: another reducer, groups kept (K of S = 16),
tokens kept, key channels kept (ThinK), an eviction; ``context_first`` compresses before the question is there. Shares
of the context's KV are measured on packed tensors: ``kv`` without the index of groups and channels, as the paper
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
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import Outcome, generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Protocol

ROOT = Path(__file__).resolve().parents[1]
BATCH = 25
REFERENCE = "lora_only-compactor-0.21875"
BY_NORM = RoutingConfig("value_norm", 16, 16, budget="global")
"""Of an adapter without routers, where groups are cut."""
KEY_WINDOW = 4
"""Last entries whose keys stay whole: those that Compactor keeps in any case."""
SCORERS = {"quest": "quest25_s8k6_anchor", "compactor": "compactor25_s16k12_anchor"}
SCORERS["expected_attention"] = "expected_attention25_s16k12_anchor"


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
        """Of its record."""
        said = [self.recipe.removeprefix("tinylm_")]
        said += [] if self.reducer is None else [f"under_{self.reducer}"]
        said += [] if self.keep_ratio is None else [f"r{self.keep_ratio:.6g}"]
        said += [] if self.kept_groups is None else [f"k{self.kept_groups}"]
        said += [] if self.key_channels == 1 else [f"keys{self.key_channels:.6g}"]
        said += [] if self.eviction is None else [self.eviction, f"{self.eviction_keep:.6g}"]
        return "-".join([*said, *(["context_first"] if self.protocol == "context_first" and not self.eviction else [])])


def trials() -> list[Trial]:
    """Evictions on an unreduced LoRA; each scorer's arms; keys cut beside groups at 21.875 %, on the same adapters."""
    evictions = ("compactor", "expected_attention")
    blind: dict[str, Any] = {"protocol": "context_first"}
    found = [Trial("tinylm_lora_only")]
    found += [
        Trial("tinylm_lora_only", eviction=method, eviction_keep=keep, **blind)
        for method in evictions
        for keep in (0.21875, 0.25)
    ]
    found += [Trial("tinylm_lora_only", method, keep) for method in evictions for keep in (0.21875, 0.25)]
    for scorer, anchor in SCORERS.items():
        found += [Trial(f"tinylm_{scorer}25{rest}") for rest in ("", "_s16k12", "_s16k12_valuenorm")]
        found += [Trial(f"tinylm_{anchor}")]
    adapter = "tinylm_compactor25_s16k12_valuenorm"
    for tokens, kept, channels in (
        (128, 16, 23), (128, 14, 26), (144, 12, 25), (160, 12, 20), (160, 10, 24), (176, 10, 20), (192, 10, 17),
        (192, 8, 21), (224, 8, 15), (144, 8, 32), (160, 6, 32),
    ):  # fmt: skip
        found.append(Trial(adapter, None, tokens / 512, kept, channels / 32, **blind))
    found += [Trial("tinylm_compactor25_s16k12_anchor", None, 144 / 512, None, 17 / 32, **blind)]
    for tokens, kept, channels in ((128, 12, 32), (160, 10, 24), (144, 12, 25), (144, None, 17), (128, None, 23)):
        found.append(Trial("tinylm_lora_only", "compactor", tokens / 512, kept, channels / 32, **blind))
    return found


@dataclass(frozen=True)
class Asked:
    """Which arms, with which training seeds, on which contexts; and the folder of their records."""

    arms: list[Trial]
    split: str
    seed: int
    contexts: int
    trained_seeds: tuple[int, ...]
    out: Path

    def files(self, trial: Trial) -> dict[int, Path]:
        """An arm's records by training seed."""
        only = len(self.trained_seeds) == 1
        return {seed: self.out / f"{trial.name}{'' if only else f'-seed{seed}'}.json" for seed in self.trained_seeds}


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


RESULTS = ROOT / "benchmarks/results"
SCREEN = Asked(trials(), "dev", 77, 200, (0,), RESULTS / "screens/recall")
FINAL = Asked(finalists(), "test", 3, 400, (0, 1, 2), RESULTS / "matched/recall")


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
    reducer = backbone.reducer if trial.reducer is None else build_reducer(trial.reducer)
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


def table(records: Records) -> str:
    """Every arm beside Compactor's own sets on the LoRA that was trained without reduction, context by context."""
    lines = ["| arm | seeds | KV | with index | recall | less Compactor at 21.875 % |", "|---|---|---|---|---|---|"]
    base = _scores(records[REFERENCE])
    for name, runs in records.items():
        scores = _scores(runs)
        apart = 100 * (scores - base[: len(scores)])
        low, high = bootstrap_interval(apart)
        difference = "" if name == REFERENCE else f"{apart.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
        shares = " | ".join(f"{np.mean([run[key] for run in runs]):.3%}" for key in ("kv", "kv_index"))
        lines.append(f"| {name} | {len(runs)} | {shares} | {100 * scores.mean():.1f} | {difference} |")
    return "\n".join(lines)


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
    print(table(read_records(asked)))


if __name__ == "__main__":
    main()

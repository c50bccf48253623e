"""The finalists of recall, and other scorers, on running text: bits a byte after a compressed context, at equal bytes.

    python benchmarks/text_screen.py --source DIR --work runs/comparison     # DIR: WikiText's test split as test.txt
    python benchmarks/text_screen.py --table                                 # the records as a table

A window is 192 words of context, 16 read in full, and 64 that are scored (``tasks/wikitext.py``). Arms, adapters
and their training seeds are those of ``recall_screen.py --final``, and ExpectedAttention and Quest beside Compactor;
what acts before the question there acts before the prefix here. Nothing was trained on text: ``text_routed.py`` does
that. Shares are measured on packed tensors. Lower is better.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.arm_training import Trainer, commit, sha256
from benchmarks.comparison_lists import plain_arm
from benchmarks.comparison_tables import signed_cell
from benchmarks.recall_screen import KEY_WINDOW, backbone_of
from benchmarks.recall_trials import RESULTS, ROOT, TWINS, Trial, finalists
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.batches import model_inputs
from subtoken_train.evaluation.runner.cell import answer_batch
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.wikitext import WikiText
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Protocol

OUT = RESULTS / "matched/text"
WORDS = {"context_words": 192, "prefix_words": 16, "query_words": 64}
WINDOWS, BATCH, SEEDS = 200, 20, (0, 1, 2)
WHOLE = Trial("tinylm_lora_only")
BLIND: dict[str, Any] = {"protocol": "context_first"}
OTHERS = [
    Trial("tinylm_lora_only", eviction="expected_attention", eviction_keep=0.21875, **BLIND),
    Trial("tinylm_lora_only", "expected_attention", 0.21875, **BLIND),
    Trial("tinylm_lora_only", "expected_attention", 0.25, 12, **BLIND),
    Trial("tinylm_lora_only", "quest", 0.21875),
    Trial("tinylm_lora_only", "quest", 0.25, 12),
]
"""ExpectedAttention and Quest, which reads the prefix, whole and under value groups."""
ARMS = [WHOLE, *finalists(), *OTHERS]
BESIDE = {
    **TWINS,
    OTHERS[1].name: "ExpectedAttention, one set",
    OTHERS[3].name: "Quest",
}


def ask(trial: Trial, work: Path, seed: int, samples: list[Sample]) -> dict[str, Any]:
    """The record of an arm and a training seed."""
    Trainer({trial.name: plain_arm(trial.recipe, trial.name)}, work).adapter(plain_arm(trial.recipe, trial.name), seed)
    backbone = backbone_of(trial, work, seed)
    assert backbone is not None
    method = None if trial.eviction is None else build_eviction(trial.eviction)
    compression = Compression(method, trial.eviction_keep, key_channels=trial.key_channels, key_window=KEY_WINDOW)
    return {"arm": trial.name, "seed": seed, **ask_windows(backbone, samples, compression, trial.protocol)}


def ask_windows(
    backbone: CompressedBackbone, samples: list[Sample], compression: Compression, protocol: Protocol
) -> dict[str, Any]:
    """Log-likelihood in nats of every window's scored text, and the context's measured share."""
    clock, outcomes = time.perf_counter(), []
    for some in in_batches(samples, BATCH):
        prompts, continuations = model_inputs(some, backbone.family, "text", None)
        outcomes += answer_batch(backbone, some, prompts, continuations, compression, protocol)
    kept, index, dense = (
        sum(getattr(each, part) for each in outcomes) for part in ("region_bytes", "index_bytes", "region_dense_bytes")
    )
    return {
        "kv": round((kept - index) / dense, 6),
        "kv_index": round(kept / dense, 6),
        "seconds": round(time.perf_counter() - clock, 1),
        "commit": commit(),
        "windows_sha256": sha256(json.dumps([sample.prompt + sample.choices[0] for sample in samples]).encode()),
        "text_bytes": [sample.reference["bytes"] for sample in samples],
        "nats": [round(each.logprobs[0], 4) for each in outcomes],
    }


def asked_windows(source: Path) -> list[Sample]:
    """What is asked: the first windows of WikiText's test split."""
    return WikiText(source=str(source), **WORDS).samples()[:WINDOWS]


Runs = dict[str, list[dict[str, Any]]]


def bits_a_byte(runs: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    """Of every run and window."""
    return -np.array([run["nats"] for run in runs]) / np.array(runs[0]["text_bytes"]) / math.log(2)


def read_runs(folder: Path = OUT, names: Iterable[str] = tuple(trial.name for trial in ARMS)) -> Runs:
    """Runs by the arm's name, in the order of ``names``; of the arms that have one for every training seed."""
    files = {name: [folder / f"{name}-seed{seed}.json" for seed in SEEDS] for name in names}
    whole = {name: paths for name, paths in files.items() if all(path.exists() for path in paths)}
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in whole.items()}


def table(runs: Runs) -> str:
    """Mean bits a byte of the windows, and the paired difference from the peer and the token-only arms."""
    beside = {name: words for name, words in BESIDE.items() if name in runs}
    heads = "".join(f" less {words} |" for words in beside.values())
    lines = [f"| arm | seeds | KV | with index | bits a byte |{heads}", "|---|---|---|---|---|" + "---|" * len(beside)]
    for name, own in runs.items():
        shares = " | ".join(f"{np.mean([run[key] for run in own]):.3%}" for key in ("kv", "kv_index"))
        cells = "".join(f" {apart(runs, name, other)} |" for other in beside)
        lines.append(f"| {name} | {len(own)} | {shares} | {bits_a_byte(own).mean():.4f} |{cells}")
    return "\n".join(lines)


def apart(runs: Runs, name: str, other: str) -> str:
    """The paired difference of two arms, over seeds and windows; empty for one and the same, or where one is absent."""
    if name == other or not {name, other} <= runs.keys():
        return ""
    return signed_cell(bits_a_byte(runs[name]) - bits_a_byte(runs[other]), 4)


def main() -> None:
    """Ask, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with WikiText's test split")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        if args.source is None:
            parser.error("--source DIR, or --table")
        samples = asked_windows(args.source)
        OUT.mkdir(parents=True, exist_ok=True)
        for trial in ARMS:
            for seed in SEEDS:
                if not (file := OUT / f"{trial.name}-seed{seed}.json").exists():
                    found = ask(trial, args.work, seed, samples)
                    file.write_text(json.dumps(found) + "\n", encoding="utf-8")
                    print(file.stem, found["kv_index"], f"{bits_a_byte([found]).mean():.4f}", flush=True)
    print(table(read_runs()))


if __name__ == "__main__":
    main()

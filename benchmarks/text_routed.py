"""Value groups under Compactor, ExpectedAttention and Quest on running text, trained on text: bits a byte at 21.9 %.

    python -m benchmarks.text_backbone --source DIR                # once: a backbone to which contexts matter
    python -m benchmarks.text_routed --source DIR                  # trains and asks what has no record yet
    python -m benchmarks.text_routed --table                       # the records as a table

DIR holds WikiText-2's ``valid.txt`` and ``test.txt``. LoRA and routers of every arm are trained alike, on the part of
the validation split that the backbone has not read; 200 windows of the test split are asked: 192 words of
context, 16 that are read in full and are there when the context is compressed, as in training, and 64 that are scored
(``tasks/wikitext.py``). Shares are measured on packed tensors. Lower is better.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.arm_training import commit, recipe_bytes, sha256
from benchmarks.comparison_lists import ArmPlan, Settings
from benchmarks.comparison_tables import signed_cell
from benchmarks.text_backbone import BLOCK, SCORED, part_of
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main as subtoken
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.cell import answer_batch, model_inputs
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.wikitext import WikiText
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.compression import Compression

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks/results/matched/text_routed"
WORDS = {"context_words": 192, "prefix_words": 16, "query_words": 64}
WINDOWS, BATCH, SEEDS = 200, 20, (0, 1, 2)
CONTEXT = 512
ANCHORS = {
    "compactor": "compactor25_s16k12_anchor",
    "expected_attention": "expected_attention25_s16k12_anchor",
    "quest": "quest25_s8k6_anchor",
}
"""The anchor's recipe of each scorer."""
FINE: Settings = {
    "model.routing.num_groups": 64,
    "model.routing.kept_groups": 48,
    "model.routing.score_prior": "value_norm",
    "model.routing.value_gate": True,
    "model.routing.balance_weight": 0.0,
}
"""What won on recall, at these bytes."""
SCORERS = {"compactor": "Compactor", "expected_attention": "ExpectedAttention", "quest": "Quest"}
COLUMNS = {"anchor": "21.9 % whole", "value_norm": "value norm", "unrouted": "25 % whole"}
"""Arms that the others of the same scorer are beside, and their words."""


def arms() -> dict[str, ArmPlan]:
    """By name, in the table's order: the full cache, then five of every scorer."""
    found = {"full": ArmPlan("full", "LoRA only, full KV", "tinylm_lora_only")}
    for scorer, words in SCORERS.items():
        recipe = f"tinylm_{scorer}25"
        for role, said, own, settings in (
            ("unrouted", "25 % whole", recipe, {}),
            ("anchor", "21.9 % whole (anchor)", f"tinylm_{ANCHORS[scorer]}", {}),
            ("value_norm", "25 % + S16K12 by value norm", f"{recipe}_s16k12_valuenorm", {}),
            ("router", "25 % + S16K12 linear router", f"{recipe}_s16k12", {}),
            ("fine", "25 % + S64K48 linear router, prior, gate", f"{recipe}_s16k12", FINE),
        ):
            found[f"{scorer}_{role}"] = ArmPlan(f"{scorer}_{role}", f"{words} {said}", own, settings)
    return found


def recipe_of(arm: ArmPlan, seed: int, work: Path) -> dict[str, Any]:
    """What the arm is trained by: its recipe with its settings, on the backbone of ``work`` and on text."""
    recipe: dict[str, Any] = yaml.safe_load(recipe_bytes(arm.recipe))
    recipe["seed_everything"] = seed
    recipe["model"]["backbone"]["path"] = str(work / "backbone")
    recipe["trainer"]["enable_progress_bar"] = False
    recipe["data"] = {
        "train": {"name": str(work / "adapters.txt")},
        "block_length": BLOCK,
        "context_length": CONTEXT,
        "prefix_tokens": BLOCK - CONTEXT - SCORED,
        "batch_size": 8,
        "seed": seed,
    }
    for key, value in arm.settings.items():
        *path, name = key.split(".")
        reduce(dict.__getitem__, path, recipe)[name] = value
    return recipe


def train(arm: ArmPlan, seed: int, source: Path, work: Path) -> Path:
    """The arm's adapter, trained unless it is there and of this very recipe."""
    folder = work / f"{arm.name}-seed{seed}"
    config, wanted = folder.with_suffix(".yaml"), yaml.safe_dump(recipe_of(arm, seed, work), sort_keys=False)
    if not ((folder / "adapter").exists() and config.exists() and config.read_text() == wanted):
        if folder.exists():
            shutil.rmtree(folder)  # before the recipe, which would speak for it
        (work / "adapters.txt").write_text(part_of(source, "adapters"), encoding="utf-8")
        config.write_text(wanted, encoding="utf-8")
        if subtoken(["fit", "--config", str(config), "--output_dir", str(folder)]) != 0:
            raise SystemExit(f"{arm.name} seed {seed} did not train")
    return folder / "adapter"


def ask(arm: ArmPlan, seed: int, source: Path, work: Path) -> dict[str, Any]:
    """The record of an arm and a training seed."""
    backbone = read_adapter(train(arm, seed, source, work))[1]
    weights = sha256((work / "backbone/model.safetensors").read_bytes())
    own = {"arm": arm.name, "recipe": arm.recipe, "settings": arm.settings, "seed": seed, "backbone_sha256": weights}
    return own | ask_windows(backbone, asked_windows(source))


def ask_windows(backbone: CompressedBackbone, samples: list[Sample]) -> dict[str, Any]:
    """Measure the log-likelihood in nats of every window's scored text, and the context's share."""
    clock, outcomes = time.perf_counter(), []
    for some in in_batches(samples, BATCH):
        prompts, continuations = model_inputs(some, backbone.family, "text", None)
        outcomes += answer_batch(backbone, some, prompts, continuations, Compression(), "query_aware")
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
    """Return the first windows of WikiText's test split."""
    return WikiText(source=str(source), **WORDS).samples()[:WINDOWS]


Runs = dict[str, list[dict[str, Any]]]


def bits_a_byte(runs: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    """Return bits a byte, [runs, windows]."""
    return -np.array([run["nats"] for run in runs]) / np.array(runs[0]["text_bytes"]) / math.log(2)


def read_runs() -> Runs:
    """Read the runs of every arm that has one for each training seed, by name and in the order of the arms."""
    files = {name: [OUT / f"{name}-seed{seed}.json" for seed in SEEDS] for name in arms()}
    whole = {name: paths for name, paths in files.items() if all(path.exists() for path in paths)}
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in whole.items()}


def table(runs: Runs) -> str:
    """Mean bits a byte of the windows; paired differences, over seeds and windows, from arms of the same scorer."""
    beside = "".join(f" less {words} |" for words in COLUMNS.values())
    lines = [f"| arm | KV | with index | bits a byte |{beside}", "|---|---|---|---|" + "---|" * len(COLUMNS)]
    for name, own in runs.items():
        shares = " | ".join(f"{np.mean([run[key] for run in own]):.3%}" for key in ("kv", "kv_index"))
        cells = "".join(f" {_beside(runs, name, role)} |" for role in COLUMNS)
        lines.append(f"| {arms()[name].words} | {shares} | {bits_a_byte(own).mean():.4f} |{cells}")
    return "\n".join(lines)


def _beside(runs: Runs, name: str, role: str) -> str:
    scorer = next((scorer for scorer in SCORERS if name.startswith(scorer)), None)
    return "" if scorer is None else apart(runs, name, f"{scorer}_{role}")


def apart(runs: Runs, name: str, other: str) -> str:
    """Show the paired difference of two arms, over seeds and windows; empty if they are one, or one is absent."""
    if name == other or not {name, other} <= runs.keys():
        return ""
    return signed_cell(bits_a_byte(runs[name]) - bits_a_byte(runs[other]), 4)


def main() -> None:
    """Train and ask, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with WikiText's valid.txt and test.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/text")
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        if args.source is None:
            parser.error("--source DIR, or --table")
        OUT.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for name in args.arms:
                if not (file := OUT / f"{name}-seed{seed}.json").exists():
                    found = ask(arms()[name], seed, args.source, args.work)
                    file.write_text(json.dumps(found) + "\n", encoding="utf-8")
                    print(file.stem, found["kv_index"], f"{bits_a_byte([found]).mean():.4f}", flush=True)
    print(table(read_runs()))


if __name__ == "__main__":
    main()

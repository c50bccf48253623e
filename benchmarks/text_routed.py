"""Value groups under Compactor, ExpectedAttention and Quest on running text, trained on text: bits a byte at 21.9 %.

    python -m benchmarks.text_backbone --source DIR                # once: a backbone to which contexts matter
    python -m benchmarks.text_routed --source DIR                  # trains and asks what has no record yet
    python -m benchmarks.text_routed --table                       # the records as a table

DIR holds WikiText-2's ``valid.txt`` and ``test.txt``. LoRA and routers of every arm are trained alike, on the part of
the validation split that the backbone has not read; windows of the test split are asked (``text_screen.py``). The
prefix of a window is there when its context is compressed, as in training. Lower is better.
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.arm_training import recipe_bytes, sha256
from benchmarks.comparison_lists import ArmPlan, Settings
from benchmarks.recall_trials import RESULTS, ROOT
from benchmarks.recall_trials import SCORERS as ANCHORS
from benchmarks.text_backbone import BLOCK, SCORED, part_of
from benchmarks.text_screen import SEEDS, Runs, apart, ask_windows, asked_windows, bits_a_byte
from benchmarks.text_screen import read_runs as text_runs
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main as subtoken
from subtoken_train.inference.compression import Compression

OUT = RESULTS / "matched/text_routed"
CONTEXT = 512
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
    return own | ask_windows(backbone, asked_windows(source), Compression(), "query_aware")


def read_runs() -> Runs:
    """Runs by the arm's name, in the order of the arms."""
    return text_runs(OUT, arms())


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

"""Value groups under KVzip on SmolLM2, trained on text: anchor, value norm and a linear router at equal bytes.

    python -m benchmarks.real_text_trained --source DIR            # trains and asks what has no record yet

DIR holds WikiText-2's ``valid.txt``, which LoRA and routers learn, and ``test.txt``, whose contexts are asked, see
``real_text.py``. Every arm trains by ``recipes/real/smollm2_kvzip25_s16k12.yaml`` under KVzip's ranking, one budget a
layer, in bfloat16 with fp32 adapters. It is asked twice: under that ranking (``own``), and with KVzip's one budget
for all layers and heads (``pooled``), which cannot be trained under. The loss is that of the text, or
(``distilled``) ten parts of the divergence from the uncompressed model's distributions to one of that.
"""

import argparse
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arm_training import commit, recipe_bytes, sha256
from benchmarks.bf16_products import has_unit, products
from benchmarks.real_text import CONTEXTS, Arm, add, contexts, measure, read
from subtoken_train.cli.main import main as subtoken
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import ModelPool
from subtoken_train.reducers import build_reducer

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks/results/real_text/trained/smollm2.jsonl.xz"
RECIPE = "smollm2_kvzip25_s16k12"
MIXED = ["--model.backbone.dtype", "bfloat16", "--trainer.precision", "bf16-mixed"]
ARMS = {
    "anchor": (0.21875, "21.9 % whole (anchor)", ["--anchor"]),
    "value_norm": (0.25, "25 % + S16K12 by value norm", ["--model.routing.selector", "value_norm"]),
    "router": (0.25, "25 % + S16K12 linear router", []),
}
"""By name: tokens kept, words, and what differs from the recipe."""
LOSSES = {"text": [], "distilled": ["--model.distillation.weight", "10"]}
WAYS = ("own", "pooled")


def train(loss: str, arm: str, seed: int, source: Path, work: Path) -> Path:
    """Train an arm's adapter unless it is there and of this very recipe; return its folder."""
    folder = work / f"{loss}-{arm}-seed{seed}"
    argv = [*MIXED, *LOSSES[loss], *ARMS[arm][2]]
    argv += ["--seed_everything", str(seed), "--data.seed", str(seed), "--data.train.name", str(source / "valid.txt")]
    fitted(folder, RECIPE, argv)
    return folder / "adapter"


def fitted(folder: Path, recipe: str, argv: list[str], data: str = "") -> None:
    """Run ``fit`` into a folder unless it holds what these very settings gave.

    Args:
        folder: of the run.
        recipe: of ``recipes/real``.
        argv: flags beside it.
        data: digest of what is learnt from, where the flags do not say it.
    """
    key = sha256(recipe_bytes(recipe) + json.dumps(argv).encode() + data.encode())
    note = folder / "trained.txt"
    if not (note.exists() and note.read_text() == key):
        shutil.rmtree(folder, ignore_errors=True)
        # an anchor is written into the folder's neighbour of this name
        run = folder if "--anchor" not in argv else folder.with_name(f"{folder.name}_anchor")
        flags = ["--config", str(ROOT / f"recipes/real/{recipe}.yaml"), *argv, "--output_dir", str(folder)]
        with products():
            failed = subtoken(["fit", *flags, "--trainer.enable_progress_bar", "false", "--overwrite"])
        if failed:
            raise SystemExit(f"{folder.name} did not train")
        if run != folder:
            run.rename(folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        note.write_text(key)


def asked_backbone(adapter: Path, way: str) -> CompressedBackbone:
    """Load an adapter under its own ranking, or without it."""
    return ModelPool().get(adapter, reducer=None if way == "own" else build_reducer("none"))


def ask(arm: str, way: str, adapter: Path, source: Path, count: int) -> dict[str, Any]:
    """Return what an adapter says of the contexts."""
    compression = Compression() if way == "own" else Compression(build_eviction("kvzip"), ARMS[arm][0])
    return said(asked_backbone(adapter, way), compression, source, count)


def said(backbone: CompressedBackbone, compression: Compression, source: Path, count: int) -> dict[str, Any]:
    """Return what a trained model says of the contexts in ``source``, see ``real_text.measure``."""
    asked = contexts(backbone.family.tokenizer, (source / "test.txt").read_text(encoding="utf-8"), count)
    with reading_packed(backbone.family.decoder.config), torch.no_grad(), products():
        return measure(backbone, [Arm("trained", compression)], asked)["trained"]


def main() -> None:
    """Train and ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with WikiText's valid.txt and test.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/real_text")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    done = {(each["seed"], each["loss"], each["arm"], each["way"]) for each in read(OUT)}
    cells = product(args.seeds, args.losses, args.arms, args.ways)
    for seed, loss, arm, way in [cell for cell in cells if cell not in done]:
        found = ask(arm, way, train(loss, arm, seed, args.source, args.work), args.source, CONTEXTS)
        own = {"loss": loss, "way": way, "arm": arm, "seed": seed}
        line = {**own, "commit": commit(), "dtype": "bfloat16", "bf16_unit": has_unit(), **found}
        add(OUT, line)
        print(*own.values(), f"{np.mean(found['facts']):.2f} nats, {np.mean(found['exact']):.1%} exact", flush=True)


if __name__ == "__main__":
    main()

"""The embedded comparisons: train every arm with several seeds, ask the test questions once, keep a record per run.

    subtoken-train data scenes --seed 1 --out data/scenes-seed1 --train 1 --dev 1     # the test questions
    python benchmarks/tiny_comparison.py --seeds 0 1 2 3 4 --out benchmarks/results
    python benchmarks/tiny_comparison.py --table            # recipes/README.md's table from the records
    python benchmarks/tiny_comparison.py --list recipes/ablations/two_stage_tiny.yaml     # another table's arms

Run two of these side by side with OMP_NUM_THREADS=1 and different --seeds on a 2-core machine. A run whose record
exists is skipped, and an adapter in --work that the same recipe trained is not trained again, so a second call goes on
where the first stopped. A stage-2 recipe starts from the adapter of the same seed; its stage 1 is trained when needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.comparison_tables import EMBEDDED, comparison_markdown, read_comparison, read_records
from benchmarks.recall_questions import recall_questions
from subtoken_train.cli.main import main as subtoken
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.data_file import Answers, answer_records, answer_samples
from subtoken_train.evaluation.metrics.string_match import RecallScore
from subtoken_train.evaluation.scores_file import RunRecord, write_record
from subtoken_train.inference.batched import in_batches
from subtoken_train.resources import shipped_recipe

ROOT = Path(__file__).resolve().parents[1]
TRAINED = "trained.json"
RECALL_CONTEXTS = 400  # of 8 questions each


def run_arm(arm: str, seed: int, data: Path, work: Path, out: Path) -> None:
    """Train one recipe with one seed and ask it; writes ``<out>/<arm>-seed<seed>.json``.

    Recipes on scenes answer ``data``; recipes on key-value recall answer RECALL_CONTEXTS held-out contexts, and their
    record goes to ``<out>/recall``.
    """
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.datasets.records import InstructionRecords

    recall = recall_settings(arm)
    target = (out if recall is None else out / "recall") / f"{arm}-seed{seed}.json"
    if target.exists():
        return
    adapter, trained = train_arm(arm, seed, work)
    _, backbone, _ = read_adapter(adapter)
    extra = {"seed": seed, "recipe_sha256": sha256(recipe_bytes(arm)), **trained}
    if recall is None:
        answers, asked = answer_records(backbone, InstructionRecords(data), batch_size=128), data.read_bytes()
        record = RunRecord.of(arm, backbone, answers, asked)
    else:
        answers = answer_recall(backbone, RecallTask(backbone.family.tokenizer, **recall), RECALL_CONTEXTS)
        asked = json.dumps({**recall, "split": "test", "contexts": RECALL_CONTEXTS}, sort_keys=True).encode()
        record = RunRecord.of(arm, backbone, answers, asked, recall["context_length"])
    write_record(record.content(**extra), target)


def answer_recall(backbone: CompressedBackbone, task: RecallTask, count: int, batch_size: int = 32) -> Answers:
    """Held-out contexts (the test split's English, facts drawn for them), each asked for several of its facts at once.

    The score of a context is the share of its asked facts whose code is stated exactly.
    """
    samples, collate = recall_questions(RecallRecords(task, "test", count))
    return answer_samples(backbone, samples, RecallScore(), list(in_batches(range(count), batch_size)), collate)


def recall_settings(arm: str) -> dict[str, int] | None:
    """Context length, facts and questions of a recipe on key-value recall; None for the others."""
    data = yaml.safe_load(recipe_bytes(arm)).get("data", {})
    names = ("context_length", "num_facts", "num_questions")
    return {name: data[name] for name in names} if "num_facts" in data else None


def train_arm(arm: str, seed: int, work: Path) -> tuple[Path, dict[str, Any]]:
    """The adapter of one recipe and seed, trained unless it is there, with the commit and seconds of its training."""
    folder, key = work / f"{arm}-seed{seed}", run_key(arm)
    note = folder / TRAINED
    if note.exists() and (found := json.loads(note.read_text())).pop("key") == key:
        return folder / "adapter", found
    argv = ["fit", "--config", str(recipe_path(arm)), "--seed_everything", str(seed), "--data.seed", str(seed)]
    argv += ["--output_dir", str(folder), "--overwrite", "--trainer.enable_progress_bar", "false"]
    if first := first_stage(arm):
        argv += ["--model.stage2.adapter", str(train_arm(first, seed, work)[0])]
    clock = time.perf_counter()
    if subtoken(argv) != 0:
        raise SystemExit(f"{arm} seed {seed} did not train")
    trained = {"commit": commit(), "train_seconds": round(time.perf_counter() - clock, 1)}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    note.write_text(json.dumps({"key": key, **trained}))
    return folder / "adapter", trained


def first_stage(arm: str) -> str | None:
    """The recipe whose run a stage-2 recipe starts from (``adapter: runs/NAME/adapter``); None for other recipes."""
    stage2 = yaml.safe_load(recipe_bytes(arm))["model"].get("stage2")
    return None if stage2 is None else Path(stage2["adapter"]).parent.name


def run_key(arm: str) -> str:
    """A digest of the recipe and of the one it starts from: an adapter with another key is trained anew."""
    first = first_stage(arm)
    return sha256(recipe_bytes(arm) + (b"" if first is None else run_key(first).encode()))


def recipe_path(arm: str) -> Path:
    """The file of a recipe that ships with the project."""
    path = shipped_recipe(arm)
    if path is None:
        raise SystemExit(f"no recipe has the name {arm}")
    return path


def recipe_bytes(arm: str) -> bytes:
    """What the recipe's file holds."""
    return recipe_path(arm).read_bytes()


def sha256(content: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def commit() -> str:
    """The commit that the working tree stands on."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Run arms x seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, help="a table's arms and pairs (default: the embedded comparison)")
    parser.add_argument("--arms", nargs="+", help="only these of the list")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--data", type=Path, default=ROOT / "data/scenes-seed1/test.json")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--table", action="store_true", help="print the table of the records in --out and stop")
    args = parser.parse_args()
    comparison = EMBEDDED if args.list is None else read_comparison(args.list)
    if unknown := set(args.arms or ()) - set(comparison.arms):
        parser.error(f"--arms {' '.join(sorted(unknown))}: not in the list, which has {' '.join(comparison.arms)}")
    if args.table:
        folder = args.out if any(recall_settings(arm) is None for arm in comparison.arms) else args.out / "recall"
        print(comparison_markdown(read_records(folder), comparison))
        return
    for seed in args.seeds:
        for arm in args.arms or comparison.arms:
            run_arm(arm, seed, args.data, args.work, args.out)


if __name__ == "__main__":
    main()

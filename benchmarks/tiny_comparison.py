"""The embedded comparison: train every arm with several seeds, ask the test questions once, keep a record per run.

    subtoken-train data scenes --seed 1 --out data/scenes-seed1 --train 1 --dev 1     # the test questions
    python benchmarks/tiny_comparison.py --seeds 0 1 2 3 4 --out benchmarks/results
    python benchmarks/tiny_comparison.py --table            # recipes/README.md's table from the records

Run two of these side by side with OMP_NUM_THREADS=1 and different --seeds on a 2-core machine. A run whose record
exists is skipped, so a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import time
from pathlib import Path

from subtoken_train.cli.main import main as subtoken
from subtoken_train.evaluation.comparison import ARMS, comparison_markdown, read_records

ROOT = Path(__file__).resolve().parents[1]


def run_arm(arm: str, seed: int, data: Path, work: Path, out: Path) -> None:
    """Train one recipe with one seed and answer ``data``; writes ``<out>/<arm>-seed<seed>.json``."""
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.answer import answer_all
    from subtoken_train.evaluation.report import arm_facts, run_record, write_record

    target = out / f"{arm}-seed{seed}.json"
    if target.exists():
        return
    recipe, folder = ROOT / "recipes" / f"{arm}.yaml", work / f"{arm}-seed{seed}"
    argv = ["fit", "--config", str(recipe), "--seed_everything", str(seed), "--data.seed", str(seed)]
    argv += ["--output_dir", str(folder), "--overwrite", "--trainer.enable_progress_bar", "false"]
    clock = time.perf_counter()
    if subtoken(argv) != 0:
        raise SystemExit(f"{arm} seed {seed} did not train")
    train_seconds = time.perf_counter() - clock
    _, backbone, _ = read_adapter(folder / "adapter")
    answers = answer_all(backbone, InstructionRecords(data), batch_size=128)
    extra = {
        "seed": seed,
        "recipe_sha256": hashlib.sha256(recipe.read_bytes()).hexdigest(),
        "commit": commit(),
        "train_seconds": round(train_seconds, 1),
    }
    write_record(run_record(arm_facts(arm, backbone, answers), answers, data, extra), target)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def commit() -> str:
    """The commit that the working tree stands on."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Run arms x seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--data", type=Path, default=ROOT / "data/scenes-seed1/test.json")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--table", action="store_true", help="print the table of the records in --out and stop")
    args = parser.parse_args()
    if args.table:
        print(comparison_markdown(read_records(args.out)))
        return
    for seed in args.seeds:
        for arm in args.arms:
            run_arm(arm, seed, args.data, args.work, args.out)


if __name__ == "__main__":
    main()

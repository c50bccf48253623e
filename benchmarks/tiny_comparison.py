"""The embedded comparisons: train every arm with several seeds, ask the test questions once, keep a record per run.

    python -m benchmarks.tiny_comparison --list benchmarks/ablations/two_stage_tiny.yaml --seeds 0 1 2
    python -m benchmarks.tiny_comparison --list benchmarks/ablations/two_stage_tiny.yaml --table    # from the records

Run two of these side by side with OMP_NUM_THREADS=1 and different --seeds on a 2-core machine. A run whose record
exists is skipped, and an adapter in --work that the same recipe trained is not trained again, so a second call goes on
where the first stopped. A stage-2 recipe starts from the adapter of the same seed; its stage 1 is trained when needed.
"""

import argparse
import hashlib
import json
from pathlib import Path

import yaml

from benchmarks.arm_training import Trainer, digest, recipe_bytes, recipe_path
from benchmarks.comparison_lists import ArmPlan, Questions, read_comparison
from benchmarks.comparison_tables import comparison_markdown, read_records
from benchmarks.recall_questions import recall_cell
from benchmarks.run_records import add_run, has_run
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.data_file import Run, answer_records, answer_samples, written_run
from subtoken_train.inference.batched import in_batches

ROOT = Path(__file__).resolve().parents[1]
FIRST_SCENES = Questions("test", 1, 4800)
FIRST_CONTEXTS = Questions("test", 0, 400)
"""What the first comparisons asked; a context is asked for 8 of its facts."""


def run_arm(arm: ArmPlan, seed: int, trainer: Trainer, asked: Questions | None, out: Path) -> None:
    """Train one arm with one seed and ask it; adds the run to the records in ``out`` unless it is there.

    Recipes on scenes answer questions on scenes; recipes on key-value recall answer held-out contexts. ``asked`` None:
    the questions of the first comparisons.
    """
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.datasets.records import InstructionRecords

    if has_run(out, arm.name, seed):
        return
    adapter, trained = trainer.adapter(arm, seed)
    _, backbone, _ = read_adapter(adapter)
    if arm.adapter_of is not None:
        backbone = reduced_at_evaluation(backbone, arm)
    extra = {"seed": seed, "recipe_sha256": digest(arm), **trained}
    recall = recall_settings(arm.recipe)
    if recall is None:
        data = scene_questions(asked or FIRST_SCENES)
        run, content = answer_records(backbone, InstructionRecords(data), batch_size=128), data.read_bytes()
    else:
        asked = asked or FIRST_CONTEXTS
        run = answer_recall(backbone, RecallTask(backbone.family.tokenizer, **recall), asked)
        drawn = recall | {"split": asked.split, "contexts": asked.count} | ({"seed": asked.seed} if asked.seed else {})
        content = json.dumps(drawn, sort_keys=True).encode()
    run = written_run(run, arm=arm.name, data_sha256=hashlib.sha256(content).hexdigest(), **extra)
    del run["predictions"]  # most of a record's bytes, and no table reads them
    add_run(out, run)


def reduced_at_evaluation(backbone: CompressedBackbone, arm: ArmPlan) -> CompressedBackbone:
    """A token-only adapter under the token reducer of the arm's recipe, which it was not trained under."""
    from subtoken_train.cli.recipe import RecipeCLI

    model = RecipeCLI(["--config", str(recipe_path(arm.recipe)), *arm.flags()]).model
    if backbone.bank is not None or model.routing_config is not None:
        raise SystemExit(f"{arm.name}: only a token-only adapter is reduced at evaluation")
    backbone.detach()
    return CompressedBackbone(backbone.family, model.reducer_config)


def scene_questions(asked: Questions) -> Path:
    """The file of some held-out questions on scenes, written where it is not there."""
    folder = ROOT / f"data/scenes-seed{asked.seed}"
    if asked != FIRST_SCENES:
        folder = folder.with_name(f"{folder.name}-{asked.split}{asked.count}")
    if not folder.exists():
        write_scenes(folder, **{"train": 1, "dev": 1, "test": 1, asked.split: asked.count}, seed=asked.seed)
    return folder / f"{asked.split}.json"


def answer_recall(backbone: CompressedBackbone, task: RecallTask, asked: Questions, batch_size: int = 32) -> Run:
    """Held-out contexts, each asked for several facts at once; score: the share of codes that is stated exactly."""
    records = RecallRecords(task, asked.split, asked.count, asked.seed)
    batches = list(in_batches(range(asked.count), batch_size))
    return answer_samples(backbone, recall_cell(records), batches, tokens=task.context_length)


def recall_settings(arm: str) -> dict[str, int] | None:
    """Context length, facts and questions of a recipe on key-value recall; None for the others."""
    data = yaml.safe_load(recipe_bytes(arm)).get("data", {})
    names = ("context_length", "num_facts", "num_questions")
    return {name: data[name] for name in names} if "num_facts" in data else None


def main() -> None:
    """Run arms x seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, required=True, help="arms and pairs: a file of benchmarks/ablations")
    parser.add_argument("--arms", nargs="+", help="only these of the list")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--work", type=Path, default=ROOT / "runs/comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--table", action="store_true", help="print the table of the records in --out and stop")
    args = parser.parse_args()
    comparison = read_comparison(args.list)
    if unknown := set(args.arms or ()) - set(comparison.arms):
        parser.error(f"--arms {' '.join(sorted(unknown))}: not in the list, which has {' '.join(comparison.arms)}")
    out = args.out / comparison.folder
    if args.table:
        print(comparison_markdown(read_records(out), comparison))
        return
    trainer = Trainer(comparison.arms, args.work)
    for seed in args.seeds:
        for name in args.arms or comparison.arms:
            run_arm(comparison.arms[name], seed, trainer, comparison.questions, out)


if __name__ == "__main__":
    main()

"""Every eviction at the routed arms' bytes, blind and question-aware: the peers that a routed arm has to beat.

    subtoken-train data scenes
    python benchmarks/peer_accuracy.py --task scenes --data data/scenes/dev.json  # every method, LoRA only
    python benchmarks/peer_accuracy.py --task recall --split dev
    python benchmarks/peer_accuracy.py --task scenes --arms DIR DIR                  # routed arms, anchors
    python benchmarks/peer_accuracy.py --table                                      # the page's tables from the records

The adapter was trained without compression. ``blind``: the context is compressed before the question is there.
``aware``: the method sees the question and acts after the prompt's pass, as it is served: one-word answers come from
the whole cache. ``reread``: it sees the question, and the question then reads what it kept (``replay.py``), as with
FastV and Quest: the sight and the loss of the routed arms. A line of JSON per cell in OUT/TASK/NAME.jsonl; a cell that
is there is not asked again, and a method that does not fit leaves the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.pages import put
from benchmarks.peer_methods import PEERS, peer_settings
from benchmarks.peer_tables import AWARENESS, peer_markdown, read_cells
from benchmarks.recall_questions import recall_questions
from benchmarks.replay import replayed
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.metrics.scene_scores import SceneScore
from subtoken_train.evaluation.metrics.string_match import RecallScore
from subtoken_train.evaluation.results import SampleRecord
from subtoken_train.evaluation.runner.arms import groups_words
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.runner.data_file import answer_samples, grouped
from subtoken_train.evaluation.tasks.embedded_tasks import instruction_samples
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import load_backbone
from subtoken_train.types import Batch

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks/results/screens/peers"
PAGE = OUT.parent / "README.md"
ADAPTERS = {"scenes": "tiny_lora_only", "recall": "tinylm_lora_only"}
SHARES = {"scenes": (0.15625, 0.078125), "recall": (0.21875, 0.109375)}
"""Of the visual tokens (64), or of the context (512): the anchors' whole tokens, and the routed arms' bytes."""
BATCH = {"scenes": 120, "recall": 20}


@dataclass(frozen=True)
class Questions:
    """What is asked on a task.

    Attributes:
        batches: samples that are answered together, and their prompts; made once for all cells.
        metric: of an answer.
        asked: names the questions in a record.
        region_tokens: of a context or an image.
    """

    batches: list[tuple[Sequence[Sample], Batch]]
    metric: TaskMetric
    asked: dict[str, Any]
    region_tokens: int


def scene_questions(backbone: CompressedBackbone, data: Path, limit: int) -> Questions:
    """The first ``limit`` short questions of a file of scenes, and a third as many descriptions."""
    every = instruction_samples(InstructionRecords(data))
    short = [sample for sample in every if sample.kind not in DESCRIPTION_KINDS][:limit]
    samples = short + [sample for sample in every if sample.kind in DESCRIPTION_KINDS][: limit // 3]
    family, digest = backbone.family, hashlib.sha256(data.read_bytes()).hexdigest()
    asked = {"data": data.name, "data_sha256": digest, "questions": len(samples)}
    batches = [(some, model_inputs(some, family, "image", None)[0]) for some in in_batches(samples, BATCH["scenes"])]
    return Questions(batches, SceneScore(), asked, family.visual_tokens())


def recall_contexts(backbone: CompressedBackbone, split: str, seed: int, limit: int) -> Questions:
    """Contexts of a split, drawn by a seed."""
    task = RecallTask(backbone.family.tokenizer)
    samples, collate = recall_questions(RecallRecords(task, split, limit, seed))
    asked = {"split": split, "seed": seed, "questions": limit, "context_tokens": task.context_length}
    batches = [(some, collate(some)) for some in in_batches(samples, BATCH["recall"])]
    return Questions(batches, RecallScore(), asked, task.context_length)


def ask(backbone: CompressedBackbone, questions: Questions, compression: Compression, awareness: str) -> dict[str, Any]:
    """One cell: scores by kind, what was stored, and the seconds it took."""
    clock, records = time.perf_counter(), list[SampleRecord]()
    protocol = "query_aware" if awareness == "aware" else "context_first"
    for some, prompts in questions.batches:
        own = replayed(backbone, prompts, compression) if awareness == "reread" else compression
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SubTokenWarning)  # emptied regions are counted below
            found = answer_samples(
                backbone,
                some,
                questions.metric,
                [range(len(some))],
                lambda _, prompts=prompts: prompts,  # type: ignore[misc]
                compression=own,
                protocol=protocol,
            )
        records += found.records
    scores = grouped([record.kind for record in records], [round(record.score, 3) for record in records])

    def total(name: str) -> int:
        return sum(getattr(record, name) for record in records)

    return {
        "measured": round((total("region_bytes") - total("index_bytes")) / total("region_dense_bytes"), 6),
        "with_index": round(total("region_bytes") / total("region_dense_bytes"), 6),
        "prompt_kv": round(total("kv_bytes") / total("dense_kv_bytes"), 6),
        "emptied": sum(bool(record.emptied) for record in records),
        "seconds": round(time.perf_counter() - clock, 1),
        "scores": scores,
    }


def is_there(target: Path, cell: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether a file of records has a cell.

    Raises:
        ValueError: the file's lines were asked other questions.
    """
    lines = read_cells(target)
    if any(line["asked"] != asked for line in lines):
        raise ValueError(f"{target} was asked {lines[0]['asked']}, this is {asked}; take another --out")
    return any(all(line[key] == value for key, value in cell.items()) for line in lines)


def add_cell(target: Path, line: dict[str, Any]) -> None:
    """Append a cell to its file, and say what it measured."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(target.stem, {key: value for key, value in line.items() if key not in ("asked", "scores")}, flush=True)


def run_peers(
    backbone: CompressedBackbone,
    adapter: str,
    questions: Questions,
    task: str,
    cells: Iterable[tuple[str, float, str]],
    out: Path,
) -> None:
    """Every cell: awareness, share, name of ``PEERS``."""
    scope = "visual" if task == "scenes" else "context"
    for awareness, share, name in cells:
        settings = peer_settings(task, name)
        cell = {"adapter": adapter, "settings": settings, "share": share, "awareness": awareness}

        target = out / task / f"{name}.jsonl"
        if not is_there(target, cell, questions.asked):
            try:
                method = build_eviction(PEERS[name], **settings)
                if method.reads:
                    raise ValueError(f"eviction {name!r} frees no bytes")
                compression = Compression(method, share, scope=scope)
                found = ask(backbone, questions, compression, awareness)
            except ValueError as error:
                found = {"refused": str(error)}
            add_cell(target, {**cell, "asked": questions.asked, **found})


def run_arm(backbone: CompressedBackbone, adapter: str, questions: Questions, task: str, out: Path) -> None:
    """A trained arm as it is: its own reducer and routers, question-aware."""
    share = backbone.promised_fraction([questions.region_tokens])
    cell = {"adapter": adapter, "groups": groups_words(backbone.active_routing), "share": share, "awareness": "aware"}
    target = out / task / f"arm-{adapter}.jsonl"
    if not is_there(target, cell, questions.asked):
        add_cell(target, {**cell, "asked": questions.asked, **ask(backbone, questions, Compression(), "aware")})


def main() -> None:
    """Ask peers or arms, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(ADAPTERS), help="without it: both tables, with --table")
    parser.add_argument("--adapter", type=Path, help="LoRA-only adapter that the peers act on (default: the committed)")
    parser.add_argument("--methods", nargs="+", choices=tuple(PEERS), metavar="NAME", default=list(PEERS))
    parser.add_argument("--awareness", nargs="+", choices=AWARENESS, default=AWARENESS)
    parser.add_argument("--arms", nargs="+", type=Path, metavar="DIR", help="ask these adapters as they are, no peers")
    parser.add_argument("--data", type=Path, default=ROOT / "data/scenes/dev.json", help="scenes: the questions")
    parser.add_argument("--split", default="dev", help="recall: split of the English")
    parser.add_argument("--seed", type=int, default=0, help="recall: of the facts")
    parser.add_argument(
        "--limit",
        type=int,
        help="scenes: short questions (180) and a third as many descriptions; recall: contexts of 8 facts (40)",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="the tables of the records in --out, and no asking")
    args = parser.parse_args()
    if args.table:
        print(made := peer_markdown(args.out))
        if args.out == OUT:
            put(PAGE, "peers", made)
        return
    if args.task is None:
        parser.error("--task scenes or --task recall")
    committed = ROOT / "checkpoints/adapters" / ADAPTERS[args.task]
    for folder in args.arms or [args.adapter or committed]:
        backbone = load_backbone(folder)
        if args.task == "scenes":
            questions = scene_questions(backbone, args.data, args.limit or 180)
        else:
            questions = recall_contexts(backbone, args.split, args.seed, args.limit or 40)
        if args.arms:
            run_arm(backbone, folder.name, questions, args.task, args.out)
        else:
            cells = product(args.awareness, SHARES[args.task], args.methods)
            run_peers(backbone, folder.name, questions, args.task, cells, args.out)


if __name__ == "__main__":
    main()

"""The paper's tables in small: grids over the embedded models' adapters, what they left, and printed rows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from subtoken_train.cli.main import main
from subtoken_train.evaluation.results import SampleRecord, read_samples
from subtoken_train.resources import resource
from tests.support.eval_runs import ADAPTERS
from tests.support.paper_folders import write_benchmarks

COLUMNS = {
    "mmbench": "MMBench", "textvqa": "TextVQA", "gqa": "GQA", "pope": "POPE", "mme": "MME", "scienceqa": "SciQA",
    "vqav2": "VQAv2",
}  # fmt: skip
"""The paper's, by task."""
MEANS = {"3-mean": ("mmbench", "textvqa", "gqa"), "7-mean": tuple(COLUMNS)}
LIMIT = 4
WHOLE, ANCHOR, ROUTED = "tiny_lora_only", "tiny_fastv25_s16k4_anchor", "tiny_fastv25_s16k4"
TEXT_WHOLE, TEXT_ANCHOR, TEXT_ROUTED = "tinylm_lora_only", "tinylm_quest25_s8k6_anchor", "tinylm_quest25_s16k12"
IMAGE_ARMS, TEXT_ARMS = (WHOLE, ANCHOR, ROUTED), (TEXT_WHOLE, TEXT_ANCHOR, TEXT_ROUTED)
PRINTED = dict(zip(COLUMNS.values(), [60.0, 50.0, 40.0, 80.0, 70.0, 65.0, 75.0], strict=True))


@dataclass(frozen=True)
class PaperRun:
    """What two calls of ``evaluate`` left.

    Attributes:
        grids: their files, images and text.
        out: the results folder of both.
        parquet: data root, in the Hub's layouts.
    """

    grids: tuple[Path, Path]
    out: Path
    parquet: Path

    def records(self, arm: str, task: str) -> list[SampleRecord]:
        return list(read_samples(self.out / f"{arm}-seed0" / task).values())

    def score(self, arm: str, task: str) -> float:
        return fmean(record.score for record in self.records(arm, task))

    def mean(self, arm: str, tasks: Iterable[str]) -> float:
        return fmean(self.score(arm, task) for task in tasks)

    def difference(self, arm: str, anchor: str, task: str) -> float:
        """Of the two arms' scores of the same samples, their mean."""
        mine, its = ({record.id: record.score for record in self.records(name, task)} for name in (arm, anchor))
        assert mine.keys() == its.keys()
        return fmean(mine[key] - its[key] for key in mine)


def paper_run(folder: Path) -> PaperRun:
    """Write the benchmarks and two grids, and evaluate both with a limit."""
    root = write_benchmarks(folder / "parquet", own=False)
    images = _grid(folder, root, "llava-1.5-7b-hf", "tiny-llava", IMAGE_ARMS, list(COLUMNS))
    texts = _grid(folder, root, "llama-2-7b-hf", "tiny-llama", TEXT_ARMS, ["mmlu"])
    for grid in (images, texts):
        assert main(["evaluate", "--config", str(grid), "--limit", str(LIMIT)]) == 0
    return PaperRun((images, texts), folder / "results", root)


def _grid(folder: Path, root: Path, name: str, checkpoint: str, adapters: Sequence[str], tasks: list[str]) -> Path:
    """A grid whose embedded backbone has a name of the paper's, so that the paper's rows find it."""
    (folder / name).symlink_to(resource(f"checkpoints/{checkpoint}"))
    arms = {"adapter": [f"{ADAPTERS}/{adapter}" for adapter in adapters], "backbone": str(folder / name)}
    content = {"out": str(folder / "results"), "data_root": str(root), "batch_size": 4, "tasks": tasks, "arms": [arms]}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))
    return path


def write_printed_tables(path: Path) -> Path:
    """Printed rows of the arms, with made-up numbers; the routed arm's 3-mean is none of its cells' means."""
    means = {"printed_3m": 50.0, "printed_7m": 62.86, "printed_d3": None, "printed_d7": None}
    given = {"table": "1", "line": 1, "model": "LLaVA-1.5-7B", "S": None, "K": None, "scores": PRINTED, **means}
    reduced = {"token_method": "FastV", "total_kv": 15.625}
    lower = {name: value - 1 for name, value in PRINTED.items()}
    image_rows = [
        {**given, **reduced, "method": "FastV25+S16K4", "token_keep": 25.0, "S": 16, "K": 4, "variant": "subtoken",
         "printed_3m": 55.0, "printed_d3": 6.0, "printed_d7": 1.0},
        {**given, **reduced, "method": "FastV15.625", "token_keep": 15.625, "variant": "token_only", "scores": lower},
        {**given, "method": "LoRA-only", "token_method": None, "total_kv": 100.0, "token_keep": 100.0,
         "variant": "lora_only"},
    ]  # fmt: skip
    language = {"table": "3", "line": 2, "model": "LLaMA-2-7B", "token_method": "Quest", "total_kv": 21.875}
    text_rows = [
        {**language, "method": "Quest25+S16K12", "token_keep": 25.0, "S": 16, "K": 12, "variant": "subtoken",
         "mmlu": 43.0, "printed_delta": 2.0},
        {**language, "method": "Quest21.875", "token_keep": 21.875, "S": None, "K": None, "variant": "token_only",
         "mmlu": 41.0, "printed_delta": None},
    ]  # fmt: skip
    path.write_text(json.dumps({"vlm_rows": image_rows, "llm_rows": text_rows}))
    return path

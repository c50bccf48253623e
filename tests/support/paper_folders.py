"""The paper's tables in small: eight benchmarks in both of their layouts, about digit scenes, and grids over them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import ask, draw_scene
from subtoken_train.evaluation.results import SampleRecord, read_samples
from subtoken_train.resources import resource
from tests.support import benchmark_folders as layouts
from tests.support.eval_runs import ADAPTERS
from tests.support.run_folders import encoded

ROWS = 6  # of each benchmark
HOW = "Answer the question using a single word or phrase."


@dataclass(frozen=True)
class Question:
    """A question about a scene; ``words`` can be read in its picture, ``image`` is a JPEG."""

    number: int
    text: str
    answer: str
    words: tuple[str, ...]
    image: bytes

    @property
    def cell(self) -> dict[str, Any]:
        return {"bytes": self.image, "path": None}


def questions(kind: str, seed: int, count: int = ROWS) -> list[Question]:
    found = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        scene = draw_scene(rng, "test")
        text, answer = ask(rng, scene.objects, kind)
        image = encoded(Image.fromarray(scene.pixels), "JPEG", quality=90, subsampling=0)
        words = tuple(str(item.digit) for item in scene.objects)
        found.append(Question(seed * 1000 + number, text, answer, words, image))
    return found


def choices(question: Question) -> tuple[str, dict[str, str]]:
    """``which is there ? A 3 B 7 C 1``: the question alone, and its options by letter."""
    asked, _, listed = question.text.partition(" ? ")
    words = listed.split()
    return f"{asked} ?", dict(zip(words[::2], words[1::2], strict=True))


def opinions(question: Question) -> list[str]:
    """Ten people's answers to a yes/no question, of whom two are wrong."""
    return [question.answer] * 8 + ["no" if question.answer == "yes" else "yes"] * 2


def mmbench(folder: Path, own: bool) -> Path:
    """Every question twice, its options rotated by one; in the Hub's form alone."""
    documents = []
    for question in questions("choice", 1, ROWS // 2):
        asked, options = choices(question)
        for turn in range(2):
            texts = list(options.values())
            turned = dict(zip(options, texts[turn:] + texts[:turn], strict=True))
            answer = next(name for name in turned if turned[name] == options[question.answer])
            index = question.number + 1_000_000 * turn
            documents.append({"index": index, "question": asked, **turned, "answer": answer, "image": question.cell})
    return layouts.mmbench_parquet(folder, documents)


def textvqa(folder: Path, own: bool) -> Path:
    asked = questions("exists", 2)
    answers = [opinions(question) for question in asked]
    if not own:
        return layouts.textvqa_parquet(
            folder,
            [
                {"question_id": q.number, "image_id": f"{q.number:016x}", "question": q.text, "answers": its,
                 "ocr_tokens": list(q.words), "set_name": "val", "image": q.cell}
                for q, its in zip(asked, answers, strict=True)
            ],
        )  # fmt: skip
    lines, data = [], []
    for question, its in zip(asked, answers, strict=True):
        name = f"{question.number:016x}"
        text = f"{question.text.capitalize()}\nReference OCR token: {', '.join(question.words)}\n{HOW}"
        lines.append({"question_id": name, "image": f"{name}.jpg", "text": text, "category": "default"})
        data.append({"question_id": question.number, "image_id": name, "question": question.text, "answers": its})
    return layouts.textvqa_llava(folder, lines, data, {f"{q.number:016x}": q.image for q in asked})


def gqa(folder: Path, own: bool) -> Path:
    """In the Hub's form alone."""
    asked = questions("exists", 3, ROWS // 2) + questions("color", 4, ROWS - ROWS // 2)
    pictures = {f"n{question.number}": question.image for question in asked}
    entries = {str(q.number): {"question": q.text, "answer": q.answer, "imageId": f"n{q.number}"} for q in asked}
    return layouts.gqa_parquet(folder, [{"id": name, **entry} for name, entry in entries.items()], pictures)


def pope(folder: Path, own: bool) -> Path:
    """A third of the questions in each category; their numbers start anew in each."""
    asked, categories = questions("exists_color", 5), ("adversarial", "popular", "random")
    each = ROWS // len(categories)
    documents = []
    for place, category in enumerate(categories):
        mine = list(enumerate(asked[place * each : (place + 1) * each], 1))
        names = [f"COCO_val2014_{question.number:012}.jpg" for _, question in mine]
        lines = [
            {"question_id": number, "image": name, "text": question.text, "label": question.answer}
            for (number, question), name in zip(mine, names, strict=True)
        ]
        if own:
            layouts.pope_own(folder, lines, category)
            layouts.write_files(folder, {f"val2014/{n}": q.image for n, (_, q) in zip(names, mine, strict=True)})
        documents += [
            {"question_id": str(number), "question": q.text, "answer": q.answer, "category": category, "image": q.cell}
            for number, q in mine
        ]
    return folder if own else layouts.pope_parquet(folder, documents)


def mme(folder: Path, own: bool) -> Path:
    """Two questions to an image: a right digit, and one that is not there; in the Hub's form alone."""
    documents = []
    for place, question in enumerate(questions("read", 6, ROWS // 2)):
        category = "existence" if place < ROWS // 4 + 1 else "count"
        absent = next(digit for digit in "0123456789" if digit not in question.words)
        pair = [
            {"question": f"is there a {digit} ? Please answer yes or no.", "answer": answer}
            for digit, answer in ((question.words[0], "Yes"), (absent, "No"))
        ]
        name = f"{category}/{question.number:04}.jpg"
        documents += [{"question_id": name, "category": category, "image": question.cell, **row} for row in pair]
    return layouts.mme_parquet(folder, documents)


def scienceqa(folder: Path, own: bool) -> Path:
    """In the Hub's form alone."""
    problems = []
    for question in questions("choice", 7):
        asked, options = choices(question)
        answer, named = "ABC".index(question.answer), {"hint": "", "subject": "natural science", "image": question.cell}
        problems.append({"question": asked, "choices": list(options.values()), "answer": answer, **named})
    return layouts.scienceqa_parquet(folder, problems)


def vqav2(folder: Path, own: bool) -> Path:
    """In the Hub's form alone."""
    asked = questions("exists_color", 8)
    texts = [{"question_id": q.number, "image_id": q.number, "question": q.text} for q in asked]
    notes = [
        {"question_id": q.number, "image_id": q.number, "answers": layouts.people(*opinions(q)),
         "answer_type": "yes/no", "question_type": "is there a", "multiple_choice_answer": q.answer}
        for q in asked
    ]  # fmt: skip
    rows = [{**text, **note, "image": q.cell} for text, note, q in zip(texts, notes, asked, strict=True)]
    return layouts.vqav2_parquet(folder, rows)


def mmlu(folder: Path, own: bool) -> Path:
    dev = [(f"What is {number}?", number % 4) for number in range(5)]
    test = [(f"What is {number} and {number}?", number % 3) for number in range(ROWS)]
    write = layouts.mmlu_letters if own else layouts.mmlu_parquet
    return write(folder, "abstract_algebra", {"dev": dev, "test": test})


_WRITERS = (mmbench, textvqa, gqa, pope, mme, scienceqa, vqav2, mmlu)
FOLDERS: Mapping[str, Callable[[Path, bool], Path]] = {write.__name__: write for write in _WRITERS}


def write_benchmarks(root: Path, own: bool) -> Path:
    for name, write in FOLDERS.items():
        write(root / name, own)
    return root


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


@dataclass(frozen=True)
class PaperRun:
    out: Path
    parquet: Path

    def records(self, arm: str, task: str) -> list[SampleRecord]:
        return list(read_samples(self.out / f"{arm}-seed0" / task).values())

    def score(self, arm: str, task: str) -> float:
        return fmean(record.score for record in self.records(arm, task))

    def mean(self, arm: str, tasks: Iterable[str]) -> float:
        return fmean(self.score(arm, task) for task in tasks)


def paper_run(folder: Path) -> PaperRun:
    root = write_benchmarks(folder / "parquet", own=False)
    for grid in (
        _grid(folder, root, "llava-1.5-7b-hf", "tiny-llava", IMAGE_ARMS, list(COLUMNS)),
        _grid(folder, root, "llama-2-7b-hf", "tiny-llama", TEXT_ARMS, ["mmlu"]),
    ):
        assert main(["evaluate", "--config", str(grid), "--limit", str(LIMIT)]) == 0
    return PaperRun(folder / "results", root)


def _grid(folder: Path, root: Path, name: str, checkpoint: str, adapters: Sequence[str], tasks: list[str]) -> Path:
    """A grid whose embedded backbone has a name of the paper's, so that the paper's rows find it."""
    (folder / name).symlink_to(resource(f"checkpoints/{checkpoint}"))
    arms = {"adapter": [f"{ADAPTERS}/{adapter}" for adapter in adapters], "backbone": str(folder / name)}
    content = {"out": str(folder / "results"), "data_root": str(root), "batch_size": 4, "tasks": tasks, "arms": [arms]}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))
    return path

"""The benchmarks by name. A new one is its file, its metric, and one line here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.tasks.base import Sample, Task
from subtoken_train.evaluation.tasks.chartqa import ChartQA
from subtoken_train.evaluation.tasks.coco_caption import CocoCaption
from subtoken_train.evaluation.tasks.docvqa import DocVQA, InfographicVQA
from subtoken_train.evaluation.tasks.gqa import GQA
from subtoken_train.evaluation.tasks.local import Local, LocalText
from subtoken_train.evaluation.tasks.mathvista import MathVista
from subtoken_train.evaluation.tasks.mmbench import MMBench
from subtoken_train.evaluation.tasks.mmbench_video import MMBenchVideo
from subtoken_train.evaluation.tasks.mme import MME
from subtoken_train.evaluation.tasks.mmlu import MMLU
from subtoken_train.evaluation.tasks.option_types import check_option
from subtoken_train.evaluation.tasks.pope import POPE
from subtoken_train.evaluation.tasks.recall import Recall
from subtoken_train.evaluation.tasks.ruler import Ruler
from subtoken_train.evaluation.tasks.ruler_synthetic import RulerSynthetic
from subtoken_train.evaluation.tasks.scenes import (
    ScenesCaption,
    ScenesGQA,
    ScenesMMBench,
    ScenesPope,
    ScenesTextVQA,
)
from subtoken_train.evaluation.tasks.scienceqa import ScienceQA
from subtoken_train.evaluation.tasks.textcaps import TextCaps
from subtoken_train.evaluation.tasks.textvqa import TextVQA
from subtoken_train.evaluation.tasks.video_tt import VideoTT
from subtoken_train.evaluation.tasks.vizwiz import VizWiz
from subtoken_train.evaluation.tasks.vqav2 import VQAv2
from subtoken_train.evaluation.tasks.wikitext import WikiText

TASKS: dict[str, type[Task]] = {
    "chartqa": ChartQA,
    "coco_caption": CocoCaption,
    "docvqa": DocVQA,
    "gqa": GQA,
    "infographicvqa": InfographicVQA,
    "local": Local,
    "local_text": LocalText,
    "mathvista": MathVista,
    "mmbench": MMBench,
    "mmbench_video": MMBenchVideo,
    "mme": MME,
    "mmlu": MMLU,
    "pope": POPE,
    "recall": Recall,
    "ruler": Ruler,
    "ruler_synthetic": RulerSynthetic,
    "scenes_caption": ScenesCaption,
    "scenes_gqa": ScenesGQA,
    "scenes_mmbench": ScenesMMBench,
    "scenes_pope": ScenesPope,
    "scenes_textvqa": ScenesTextVQA,
    "scienceqa": ScienceQA,
    "textcaps": TextCaps,
    "textvqa": TextVQA,
    "video_tt": VideoTT,
    "vizwiz": VizWiz,
    "vqav2": VQAv2,
    "wikitext": WikiText,
}


def build_task(name: str, source: str | Path | None = None, **options: Any) -> Task:
    """A task by its name, with some of its options changed.

    Args:
        name: of ``TASKS``.
        source: folder with its files, or a Hub id; None: its own Hub id.
        options: fields of the task, by name.

    Raises:
        ValueError: no such task or option, or a value that the task refuses.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    known = [field.name for field in dataclasses.fields(TASKS[name]) if field.name != "source"]
    hints = get_type_hints(TASKS[name])
    for option, value in options.items():
        if option not in known:
            raise unknown_name(f"option of task {name}", option, known)
        check_option(name, option, value, hints[option])
    return TASKS[name](source=source, **options)


__all__ = ["TASKS", "Sample", "Task", "build_task"]

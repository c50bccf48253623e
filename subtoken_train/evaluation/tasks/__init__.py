"""The benchmarks by name. A new one is its file, its metric, and one line here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.tasks.option_types import check_option
from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.evaluation.tasks.base import Task

TASKS: Registry[Task] = Registry(
    "task",
    group="subtoken_train.tasks",
    package=__name__,
    base="base:Task",
    named=True,
    builtin={
        "chartqa": "chartqa:ChartQA",
        "coco_caption": "coco_caption:CocoCaption",
        "docvqa": "docvqa:DocVQA",
        "gqa": "gqa:GQA",
        "infographicvqa": "docvqa:InfographicVQA",
        "local": "local:Local",
        "local_text": "local:LocalText",
        "mathvista": "mathvista:MathVista",
        "mmbench": "mmbench:MMBench",
        "mmbench_video": "mmbench_video:MMBenchVideo",
        "mme": "mme:MME",
        "mmlu": "mmlu:MMLU",
        "pope": "pope:POPE",
        "recall": "recall:Recall",
        "ruler": "ruler:Ruler",
        "ruler_synthetic": "ruler_synthetic:RulerSynthetic",
        "scenes_caption": "scenes:ScenesCaption",
        "scenes_gqa": "scenes:ScenesGQA",
        "scenes_mmbench": "scenes:ScenesMMBench",
        "scenes_pope": "scenes:ScenesPope",
        "scenes_textvqa": "scenes:ScenesTextVQA",
        "scienceqa": "scienceqa:ScienceQA",
        "textcaps": "textcaps:TextCaps",
        "textvqa": "textvqa:TextVQA",
        "video_tt": "video_tt:VideoTT",
        "vizwiz": "vizwiz:VizWiz",
        "vqav2": "vqav2:VQAv2",
        "wikitext": "wikitext:WikiText",
    },
)


def build_task(name: str, source: str | Path | None = None, **options: Any) -> Task:
    """A task by its name, with some of its options changed.

    Args:
        name: of ``TASKS``.
        source: folder with its files, or a Hub id; None: its own Hub id.
        options: fields of the task, by name.

    Raises:
        ValueError: no such task or option, or a value that the task refuses.
    """
    task = TASKS.find(name)
    known = [field.name for field in dataclasses.fields(task) if field.name != "source"]
    hints = get_type_hints(task)
    for option, value in options.items():
        if option not in known:
            raise unknown_name(f"option of task {name}", option, known)
        check_option(name, option, value, hints[option])
    return task(source=source, **options)

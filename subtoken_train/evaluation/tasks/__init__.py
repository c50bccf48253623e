"""The benchmarks by name. A new one is its file, its metric, and one line here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from subtoken_train.errors import unknown_name
from subtoken_train.registry import Registry
from subtoken_train.typed import checked

if TYPE_CHECKING:
    from subtoken_train.evaluation.tasks.task import Task

TASKS: Registry[Task] = Registry(
    "task",
    group="subtoken_train.tasks",
    package=__name__,
    base="task:Task",
    named=True,
    builtin={
        "ai2d": "image_choices:AI2D",
        "aime25": "math_problems:AIME25",
        "chartqa": "image_questions:ChartQA",
        "coco_caption": "captions:CocoCaption",
        "docvqa": "image_questions:DocVQA",
        "gqa": "vqa:GQA",
        "infographicvqa": "image_questions:InfographicVQA",
        "local": "local:Local",
        "local_text": "local:LocalText",
        "longbench": "longbench:LongBench",
        "longbench_v2": "longbench_v2:LongBenchV2",
        "math500": "math_problems:Math500",
        "mathvista": "mathvista:MathVista",
        "mmbench": "mmbench:MMBench",
        "mmbench_cn": "mmbench:MMBenchCN",
        "mmbench_video": "video:MMBenchVideo",
        "mme": "mme:MME",
        "mmlu": "mmlu:MMLU",
        "mmmu": "mmmu:MMMU",
        "mmstar": "image_choices:MMStar",
        "needle_map": "needle_map:NeedleMap",
        "ocrbench": "image_questions:OCRBench",
        "pope": "pope:POPE",
        "realworldqa": "image_choices:RealWorldQA",
        "recall": "embedded_tasks:Recall",
        "ruler": "ruler:Ruler",
        "ruler_synthetic": "ruler:RulerSynthetic",
        "scenes_caption": "embedded_tasks:ScenesCaption",
        "scenes_gqa": "embedded_tasks:ScenesGQA",
        "scenes_mmbench": "embedded_tasks:ScenesMMBench",
        "scenes_pope": "embedded_tasks:ScenesPope",
        "scenes_textvqa": "embedded_tasks:ScenesTextVQA",
        "scienceqa": "scienceqa:ScienceQA",
        "seedbench": "image_choices:SEEDBench",
        "textcaps": "captions:TextCaps",
        "textvqa": "vqa:TextVQA",
        "video_tt": "video:VideoTT",
        "vizwiz": "image_questions:VizWiz",
        "vqav2": "vqa:VQAv2",
        "wikitext": "wikitext:WikiText",
    },
)


def build_task(name: str, source: str | Path | None = None, **options: Any) -> Task:
    """Build a task by its name, with some of its options changed; without a source it is its own Hub id."""
    task = TASKS.find(name)
    known = [field.name for field in dataclasses.fields(task) if field.name != "source"]
    hints = get_type_hints(task)
    for option, value in options.items():
        if option not in known:
            raise unknown_name(f"option of task {name}", option, known)
        given = list(value) if isinstance(value, tuple) else value
        options[option] = checked(hints[option], given, f"option {option} of task {name}")
    return task(source=source, **options)

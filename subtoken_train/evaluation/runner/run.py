"""Run a grid: all arms on all tasks, one folder of records per pair; the same call again goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from subtoken_train.datasets.unknown_tokens import SomeTexts, say_unknown, spread
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.arms import Arm, load_arm, prepare, with_anchors
from subtoken_train.evaluation.runner.cell import Cell, write_manifest
from subtoken_train.evaluation.runner.processes import ONE, Processes, alone
from subtoken_train.evaluation.runner.spec import Grid
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.evaluation.tasks.whole_set import check_complete, check_samples
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prefill import who_drops
from subtoken_train.ledger.measure import emptied_words

Say = Callable[[str], None]
Counter = Callable[[str], Callable[[int, int], None]]


def run_grid(
    grid: Grid,
    *,
    device: str | None = None,
    say: Say = print,
    counter: Counter | None = None,
    processes: Processes = ONE,
) -> list[Path]:
    """Answer everything that the grid asks and that is not on disk yet; return the cells' folders, arm by arm.

    Tasks are read and arms loaded before the first answer, so that mistakes cost no time. One process of several
    answers every n-th batch; records of all processes count, whoever wrote them, so a restart may have another number
    of them. ``counter`` makes the progress display of a cell from its name; ``processes`` have met (``with
    Processes.from_environment()``). Without a device it is this process's GPU, or the CPU.

    Raises:
        ValueError: arms, tasks, data or settings that are wrong; an unreadable image, when its turn comes; records of
            other settings in the folder; or a run that is writing into it. What was answered before stays on disk.
    """
    with alone(grid.out, processes):
        tasks = read_tasks(grid)
        pool = ModelPool(processes.device(device))
        arms = prepare(grid.arms, pool)
        check_modalities(arms, [task for task, _ in tasks])
        notes: list[str] = []
        if grid.anchors == "auto":
            arms, notes = with_anchors(arms, pool)
        folders = []
        for line in [*notes, *too_late(arms, tasks)] if processes.first else ():
            say(line)
        for arm in arms:
            backbone = load_arm(arm.spec, pool)
            for task, samples in tasks:
                cell = Cell(arm, task, samples, grid.out / arm.facts.name / task.name, grid.batch_size, grid.max_length)
                if processes.first:
                    write_manifest(cell, backbone, processes)
                    _say_unknown(cell, backbone, say)
                name = f"{arm.facts.name} / {task.name}"
                cell.answer(backbone, processes, counter(name) if counter is not None and processes.first else None)
                if processes.first:
                    _say_emptied(cell, say)
                    task.write_for_others(cell.folder)
                folders.append(cell.folder)
        return folders


def _say_emptied(cell: Cell, say: Say) -> None:
    """Say how many of the cell's prompts lost a whole region in some layer."""
    found = [record.emptied for record in cell.finished().values()]
    if words := emptied_words(found, *who_drops(cell.arm.routing, cell.arm.facts.eviction)):
        say(f"{cell.arm.facts.name} / {cell.task.name}: {words}")


def _say_unknown(cell: Cell, backbone: CompressedBackbone, say: Say) -> None:
    """Say what of the cell's prompts and choices its tokenizer does not know."""
    asked = [cell.samples[place] for place in spread(len(cell.samples))]
    texts = ["\n".join([sample.prompt, *sample.choices]) for sample in asked]
    what = f"{cell.arm.facts.name} / {cell.task.name}"
    if line := say_unknown(backbone.family.tokenizer, SomeTexts(texts, len(cell.samples)), what):
        say(line)


def too_late(arms: Sequence[Arm], tasks: Sequence[tuple[Task, Sequence[Sample]]]) -> list[str]:
    """Return a note where evictions may be unable to change what is scored, because they act after the prompt's pass.

    A choice of several words has several tokens, and only the first of them comes from that pass.
    """
    scored = [task.name for task, samples in tasks if all(map(_one_word_choices, samples))]
    late = [arm.facts.name for arm in arms if arm.spec.eviction and arm.spec.protocol == "query_aware"]
    if not scored or not late:
        return []
    return [
        f"{', '.join(late)}: an eviction acts after the prompt's pass, so that choices of one token keep their "
        f"log-likelihoods ({', '.join(scored)}); protocol context_first compresses before the question"
    ]


def _one_word_choices(sample: Sample) -> bool:
    return bool(sample.choices) and all(len(choice.split()) <= 1 for choice in sample.choices)


def read_tasks(grid: Grid) -> list[tuple[Task, Sequence[Sample]]]:
    """Read the tasks with the samples that are asked.

    Raises:
        ValueError: a task that does not exist or that this machine cannot score, files that are missing or broken, or a
            set that is not complete while there is no ``limit``.
    """
    read = []
    for task in named_tasks(grid):
        task.check_requirements()
        samples = task.samples()
        check_complete(task, samples, grid.limit)
        asked = samples[: grid.limit]
        check_samples(task, asked)
        read.append((task, asked))
    return read


def named_tasks(grid: Grid) -> list[Task]:
    """Return the tasks with their options, and where their files are; nothing is read.

    Raises:
        ValueError: a task or an option that does not exist, or options that cannot be served together.
    """
    tasks = []
    for spec in grid.tasks:
        task = build_task(spec.name, spec.source, **spec.options)
        task.check_options()
        if spec.source is None:
            places = (grid.data_root / spec.name, *([] if task.made_in is None else [Path(task.made_in)]))
            task.source = next((str(place) for place in places if place.is_dir()), None)
        tasks.append(task)
    return tasks


def check_modalities(arms: Sequence[Arm], tasks: Sequence[Task]) -> None:
    """Raise a worded ``ValueError`` where a task asks what an arm's model cannot be asked."""
    for arm, task in product(arms, tasks):
        if task.modality != arm.modality:
            raise ValueError(
                f"task {task.name} asks about {task.modality}s, and the model of {arm.facts.name} reads "
                f"{arm.modality}s; run them apart"
            )
        if task.options.get("chat") is True and arm.chat_template is False:
            raise ValueError(
                f"task {task.name} has chat: true, and the tokenizer of {arm.facts.backbone} has no chat template; "
                "leave chat out, or use an instruct model"
            )

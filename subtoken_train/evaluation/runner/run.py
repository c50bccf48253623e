"""Run a grid: all arms on all tasks, one folder of records per pair; the same call again goes on where it stopped."""

from collections.abc import Callable, Sequence
from pathlib import Path

from subtoken_train.datasets.unknown_tokens import SomeTexts, say_unknown, spread
from subtoken_train.errors import in_a_grid
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.arms import load_arm, resolve_arms
from subtoken_train.evaluation.runner.cell import ONE, Processes, Progress, alone, make_cell, run_cell, write_manifest
from subtoken_train.evaluation.runner.spec import Grid
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.files import check_complete, check_samples
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prefill import who_drops
from subtoken_train.ledger.measure import emptied_words

Say = Callable[[str], None]
Counter = Callable[[str], Progress]


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
    answers every n-th batch; a restart may have another number of them. ``counter`` makes a cell's progress display
    from its name; ``processes`` have met. Without a device it is this process's GPU, or the CPU.
    """
    with alone(grid.out, processes):
        tasks = read_tasks(grid)
        pool = ModelPool(processes.device(device))
        arms, notes = resolve_arms(grid.arms, [task for task, _ in tasks], grid.anchors, pool)
        folders = []
        for line in notes if processes.first else ():
            say(line)
        for arm in arms:
            backbone = load_arm(arm.spec, pool)
            for task, samples in tasks:
                folder, name = grid.out / arm.facts.name / task.name, f"{arm.facts.name} / {task.name}"
                if processes.first:
                    sizes = grid.batch_size, grid.max_length, processes.count
                    printed = grid.paper.get(arm.spec.called, {}).get(task.name)
                    write_manifest(arm, task, samples, folder, backbone.family, *sizes, paper=printed)
                    asked = [samples[place] for place in spread(len(samples))]
                    texts = SomeTexts(["\n".join([each.prompt, *each.choices]) for each in asked], len(samples))
                    if unknown := say_unknown(backbone.family.tokenizer, texts, name):
                        say(unknown)
                progress = counter(name) if counter is not None and processes.first else None
                cell = make_cell(arm, task, samples, backbone.family, grid.max_length)
                run_cell(cell, folder, backbone, grid.batch_size, processes, progress)
                if processes.first:
                    found = [record.emptied for record in read_samples(folder).values()]
                    if words := emptied_words(found, *who_drops(arm.routing, arm.facts.eviction)):
                        say(f"{name}: {words}")
                    task.write_for_others(folder)
                folders.append(folder)
        return folders


def read_tasks(grid: Grid) -> list[tuple[Task, Sequence[Sample]]]:
    """Read the tasks with the samples that are asked."""
    read = []
    for task in named_tasks(grid):
        task.check_requirements()
        samples = task.samples()
        check_complete(task, samples, grid.limit)
        asked = samples[: grid.limit]
        check_samples(task, asked)
        read.append((task, asked))
    return read


@in_a_grid
def named_tasks(grid: Grid) -> list[Task]:
    """Return the tasks with their options, and where their files are; nothing is read."""
    tasks = []
    for spec in grid.tasks:
        task = build_task(spec.name, spec.source, **spec.options)
        task.check_options()
        if spec.source is None:
            places = (grid.data_root / spec.name, *([] if task.made_in is None else [Path(task.made_in)]))
            task.source = next((str(place) for place in places if place.is_dir()), None)
        tasks.append(task)
    return tasks

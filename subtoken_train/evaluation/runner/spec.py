"""Grids: arms, tasks, shared settings; files (``recipes/eval/*.yaml``), or suites, which make their own data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from subtoken_train.documents import parse_yaml
from subtoken_train.errors import at_place, check_range, check_word, in_a_grid, refuse, shell_words
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.inference.arm_spec import ArmSpec, Written
from subtoken_train.outputs import locked
from subtoken_train.resources import named_recipe, recipe_text, resource
from subtoken_train.settings import ARM_SETTINGS
from subtoken_train.typed import typed

Anchors = Literal["auto", "none"]
AXES = tuple(name for name, setting in ARM_SETTINGS.items() if setting.kind is not dict and name != "name")
"""Settings that may be a list in a grid's arm: every combination becomes an arm."""
SUITES = {"mini": ("mini_scenes", "mini_recall")}
"""The grids of a suite, from ``recipes/eval``: one per embedded model."""
SCENES = 800  # test questions of seed 1, the first of those that the tables of docs/trained_arms.md ask


@dataclass(frozen=True)
class TaskSpec:
    """A task by name, where its files are, and its options."""

    name: str
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """Everything that one ``evaluate`` runs.

    Attributes:
        data_root: folder with one folder per task; a task without one there is read from the Hub.
        limit: only the first samples of each task; without it a set that is not complete is refused.
        max_length: longest prompt in tokens, visual ones included; None: any.
        anchors: ``auto``: routed arms without a matched token-only anchor among the arms get the ledger's.
        paper: {ARM: {TASK: number}}, which a paper prints; ARM is an arm's name, else its run's or model's.
    """

    arms: tuple[ArmSpec, ...]
    tasks: tuple[TaskSpec, ...]
    out: Path
    data_root: Path = Path("data/benchmarks")
    limit: int | None = None
    batch_size: int = 16
    max_length: int | None = None
    anchors: Anchors = "auto"
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse((not self.arms or not self.tasks, f"a grid needs {'arms' if self.tasks else 'tasks'}; got none"))
        for name in ("limit", "batch_size", "max_length"):
            check_range(name, getattr(self, name), 1)
        check_word("anchors", self.anchors, get_args(Anchors))
        names = [task.name for task in self.tasks]
        for name in names:
            check_word("task", name, TASKS)
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"task {twice[0]!r} is listed twice; run its variants with --out folders of their own")
        for arm, printed in self.paper.items():
            check_word("arm of paper", arm, [each.called for each in self.arms])
            for task in printed:
                check_word(f"task of paper: {arm}", task, names)


@dataclass(frozen=True)
class _File:
    arms: list[Any]
    tasks: list[Any]
    out: str
    data_root: str | None = None
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    anchors: str | None = None
    paper: dict[str, dict[str, float]] | None = None


def expand_arms(content: object, written: Written = "key") -> list[ArmSpec]:
    """Return the arms of one entry of a grid, the last listed key changing fastest; ``written`` as in ``ArmSpec``."""
    if not isinstance(content, Mapping):
        raise ValueError(f"an arm must be a mapping, for instance {{adapter: DIR}}; got {content!r}")
    for key in content:
        check_word("key of an arm", key, ARM_SETTINGS)
    axes = {key: value for key, value in content.items() if key in AXES and isinstance(value, list | tuple)}
    if empty := [key for key, values in axes.items() if not values]:
        raise ValueError(f"{empty[0]} of an arm is an empty list; give values, or leave it out")
    if content.get("name") is not None and any(len(values) > 1 for values in axes.values()):
        raise ValueError(f"arm {content['name']!r} stands for several; leave name out: they are named by what they are")
    combinations = product(*axes.values())
    return [ArmSpec(**{**content, **dict(zip(axes, values, strict=True))}, written=written) for values in combinations]


@in_a_grid
def read_grid(path: Path, **overrides: Any) -> Grid:
    """Read a grid's YAML, keys as in ``Grid``; an override that is not None replaces what the file says."""
    content = parse_yaml(recipe_text(found := named_recipe(path, "grid")), str(found))
    instead = f"train it: subtoken-train fit --config {shell_words(path)}"
    is_recipe = isinstance(content, dict) and content.keys() >= {"model", "data"}
    refuse((is_recipe, f"{path} is a recipe, not a grid of arms and tasks; {instead}"))
    read = vars(typed(_File, content, str(path)))
    refuse((not read["out"], f"{path}: out must name the results folder"))
    settings = {key: value for given in (read, overrides) for key, value in given.items() if value is not None}
    settings |= {key: Path(settings[key]) for key in ("out", "data_root") if key in settings}
    with at_place(f"{path}: "):
        settings["arms"] = tuple(arm for entry in read["arms"] for arm in expand_arms(entry))
        settings["tasks"] = tuple(map(_task, read["tasks"]))
        return Grid(**settings)


def _task(entry: object) -> TaskSpec:
    if isinstance(entry, str):
        return TaskSpec(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValueError(f"a task is a name or {{name: NAME, option: value}}; got {entry!r}")
    options = dict(entry)
    name, source = options.pop("name"), options.pop("source", None)
    if source is not None and not isinstance(source, str):
        raise ValueError(f"source of task {name} must be a folder or a Hub id; got {source!r}")
    return TaskSpec(name, source, options)


def suite(name: str, out: Path, **overrides: Any) -> list[Grid]:
    """Return the grids of a suite, with one results folder for all; the scenes are written below it, once."""
    from subtoken_train.datasets.scenes import write_scene_split

    check_word("suite", name, SUITES)
    grids = [read_grid(resource(f"recipes/eval/{grid}.yaml"), out=out, **overrides) for grid in SUITES[name]]
    scenes = out / "data" / "scenes"
    scenes.parent.mkdir(parents=True, exist_ok=True)
    with locked(scenes.parent / ".lock"):  # of several processes one writes
        if not (scenes / "test.json").is_file():  # written after the images
            write_scene_split(scenes, "test", SCENES, seed=1)

    def placed(task: TaskSpec) -> TaskSpec:
        return replace(task, source=str(scenes)) if task.name.startswith("scenes_") else task

    return [replace(grid, tasks=tuple(map(placed, grid.tasks))) for grid in grids]

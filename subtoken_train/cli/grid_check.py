"""``subtoken-train evaluate --check``: tell what a grid would run; recipes stand in for untrained adapters."""

from __future__ import annotations

from pathlib import Path

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.documents import parse_yaml
from subtoken_train.engine.build import Stage2Config
from subtoken_train.errors import plain
from subtoken_train.evaluation.runner.dry_run import DryRun, PlannedArm, dry_run, samples_in_all
from subtoken_train.evaluation.runner.spec import Grid
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.lora import LoraSettings
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.reducers import DEFAULT_REDUCER, build_reducer
from subtoken_train.resources import named_recipe, recipe_text
from subtoken_train.routing import RoutingConfig
from subtoken_train.typed import typed
from subtoken_train.types import Identity

GIB = 2**30


def print_check(grid: Grid) -> int:
    """Print what a grid would run; 0 where it would, whatever has still to be fetched or trained."""
    checked = dry_run(grid, planned_adapter)
    for line in check_lines(grid, checked):
        print(plain(line))
    return 0


def check_lines(grid: Grid, checked: DryRun) -> list[str]:
    """Return lines about tasks, arms, memory, and what is missing."""
    total = samples_in_all(checked.tasks)
    cells = f"{len(checked.arms)} arms x {len(checked.tasks)} tasks"
    asked = "" if total is None else f", {len(checked.arms) * total:,} answers"
    lines = [f"{cells}{asked}; records would go to {grid.out}", "", "tasks"]
    for task in checked.tasks:
        options = ", ".join(f"{key}={value}" for key, value in task.task.options.items())
        count = "all its samples" if task.samples is None else f"{task.samples:,} samples"
        where = task.source or "not here yet"
        lines.append(f"  {task.task.name}: {count}, {where}" + (f" ({options})" if options else ""))
        lines.append(f"    asked: {task.task.asks}")
    lines += ["", "arms (KV: share of the compressed region that the ledger promises)"]
    lines += [f"  {_arm_words(arm)}" for arm in checked.arms]
    lines += ["", "memory (weights, and the nominal compressed region of one batch before and after compression)"]
    by_backbone: dict[str, list[PlannedArm]] = {}
    for arm in checked.arms:
        by_backbone.setdefault(arm.arm.facts.backbone, []).append(arm)
    lines += [f"  {_memory_words(arms, grid.batch_size)}" for arms in by_backbone.values()]
    lines += ["", *checked.notes] if checked.notes else []
    if not checked.wanted:
        return [*lines, "", "nothing is missing: this can run"]
    return [*lines, "", "wanted", *(f"  {what}: {how}" for what, how in checked.wanted)]


def _arm_words(planned: PlannedArm) -> str:
    facts = planned.arm.facts
    parts = [("reducer", facts.reducer), ("groups", facts.groups), ("eviction", facts.eviction)]
    words = [f"{name} {value}" for name, value in parts if value != "-"]
    kept = "by its budget" if planned.arm.compression().unit != "fraction" else share_words(facts.nominal_kv)
    words += [facts.protocol, f"KV {kept}", *([f"anchor {facts.anchor}"] if facts.anchor else [])]
    return f"{facts.name}: {facts.backbone}; {', '.join(words)}"


def _memory_words(arms: list[PlannedArm], batch_size: int) -> str:
    """Describe the memory of one backbone's arms: the largest weights, the dense cache, and the span of what stays."""
    first, sizes = arms[0].arm, [arm.kept for arm in arms]
    weights, dense, least, most = (
        f"{size / GIB:.2f}"
        for size in (
            max(arm.weights for arm in arms),
            batch_size * arms[0].dense,
            batch_size * min(sizes),
            batch_size * max(sizes),
        )
    )
    kept = least if least == most else f"{least} to {most}"
    tokens = f"{batch_size} x {first.tokens:,} tokens"
    return f"{first.facts.backbone}: weights {weights} GiB; {tokens}: {dense} GiB dense, {kept} GiB kept"


def planned_adapter(adapter: str) -> AdapterConfig | None:
    """Return what the recipe of a run (``runs/NAME`` or ``runs/NAME/adapter``) would train; None if it has no recipe.

    Raises:
        ValueError: the recipe is none.
    """
    path = Path(adapter)
    name = path.parent.name if path.name == "adapter" else path.name
    try:
        recipe = named_recipe(name, "recipe")
    except ValueError:
        return None
    content = parse_yaml(recipe_text(recipe), str(recipe))
    band = content.get("model", {}) if isinstance(content, dict) else {}
    place = f"{recipe}: model"
    reducer = dict(band.get("reducer") or {})
    routing, stage2 = band.get("routing"), band.get("stage2")
    return AdapterConfig(
        backbone=typed(BackboneConfig, band.get("backbone") or {}, f"{place}.backbone"),
        lora=typed(LoraSettings, band.get("lora") or {}, f"{place}.lora"),
        reducer=build_reducer(reducer.pop("name", DEFAULT_REDUCER), **reducer),
        routing=None if routing is None else typed(RoutingConfig, routing, f"{place}.routing"),
        identity=Identity(adapter, None, "", ""),
        training={"name": name},
        stage2=None if stage2 is None else typed(Stage2Config, stage2, f"{place}.stage2"),
    )

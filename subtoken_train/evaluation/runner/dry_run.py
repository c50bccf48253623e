"""A grid without weights: what it names, which files it wants, what its arms keep, and what the largest of them holds.

All that a run checks before its first answer is checked, on models that are laid out on the meta device. What is not
there yet (files of tasks, adapters, calibrations of evictions) is listed and no mistake; an adapter that was not
trained is taken from its recipe. A nominal prompt of text is as long as its task's option says, else 1,024 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.calibrations import Unmade
from subtoken_train.documents import parse_yaml, real_path
from subtoken_train.engine.build import Stage2Config, assemble
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import shell_words
from subtoken_train.evaluation.runner.arms import Arm, resolve_arms
from subtoken_train.evaluation.runner.run import named_tasks
from subtoken_train.evaluation.runner.spec import Grid
from subtoken_train.evaluation.tasks.task import Task
from subtoken_train.evictions.thresholds import threshold_file
from subtoken_train.families.backbone_config import BackboneConfig, is_hub_id
from subtoken_train.families.family import Family
from subtoken_train.families.load import check_weights, family_class, layout_family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.inference.arm_spec import ArmSpec, run_name
from subtoken_train.inference.pool import ModelPool, with_selection
from subtoken_train.ledger.flops import DecoderSize, TrainingFlops
from subtoken_train.ledger.kv_budget import entry_bytes, share_words
from subtoken_train.reducers import DEFAULT_REDUCER, build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.resources import recipe_text, shipped_recipe
from subtoken_train.routing import RoutingConfig
from subtoken_train.typed import typed
from subtoken_train.types import Identity, grouped

Planned = Callable[[str], AdapterConfig | None]
"""From an adapter's path to what its recipe would make of it; None where no recipe does."""
CALIBRATION = "calibration"
GIB = 2**30


@dataclass(frozen=True)
class LaidOut:
    """Size of a model: bytes as it is loaded, parameters, and its decoder's."""

    weights: int
    parameters: int
    decoder: DecoderSize


class LayoutPool(ModelPool):
    """Hands out models on the meta device, checked alike; ``planned`` is asked of adapters that are absent."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self._recipe = planned
        self.plans: dict[str, AdapterConfig] = {}
        self.laid_out: dict[tuple[str, str | None], LaidOut] = {}
        self._asked: tuple[str, dict[str, Any]] | None = None

    def _load(self, source: BackboneConfig, reducer: Reducer) -> Family:
        if not is_hub_id(source.path):
            check_weights(family_class(source), source)
        return layout_family(source)  # the compressed backbone around it says whether the reducer fits

    def folder(self, adapter: str) -> Path:
        """Return what the pool of models does; for a planned adapter, its own path."""
        if adapter not in self.plans and self.find(adapter) is None and (plan := self._recipe(adapter)) is not None:
            self.plans[adapter] = plan
        return Path(adapter) if adapter in self.plans else super().folder(adapter)

    def adapter(self, adapter: str) -> AdapterConfig:
        self.folder(adapter)
        return self.plans[adapter] if adapter in self.plans else super().adapter(adapter)

    def digest(self, adapter: str) -> str | None:
        return None if adapter in self.plans else super().digest(adapter)

    def get(self, path: str | Path, **options: Any) -> CompressedBackbone:
        if self._current is not None and self._asked == (str(path), options):
            return self._current  # arms that differ in their evictions alone
        loading = options.get("loading") or {}
        if (plan := self.plans.get(str(path))) is None:
            made = super().get(path, **options)
        else:
            choices = {name: options.get(name) for name in ("reducer", "selector", "seed", "byte_share")}
            changed, backbone = with_selection(plan, str(path), **choices), options.get("backbone")
            source = replace(plan.backbone, path=backbone) if isinstance(backbone, str) else plan.backbone
            laid_out = self._cleared(replace(source, **loading), changed.reducer)
            with torch.device("meta"):
                made, _ = assemble(laid_out, changed.lora, changed.reducer, changed.routing, changed.stage2)
            self._current = made.eval()
        self._asked, family, held = (str(path), options), made.family, list(made.parameters())
        self.laid_out[str(path), loading.get("dtype")] = LaidOut(
            sum(parameter.numel() * parameter.element_size() for parameter in held),
            sum(parameter.numel() for parameter in held),
            DecoderSize.of(family.decoder.config, family.shape.num_kv_heads, family.shape.head_dim),
        )
        return made


@dataclass(frozen=True)
class PlannedArm:
    """An arm of a grid: the longest task's ``tokens``, its cache's bytes (dense, kept), and operations by task."""

    arm: Arm
    laid_out: LaidOut
    tokens: int
    dense: int
    kept: int
    flops: tuple[float, ...]


@dataclass(frozen=True)
class DryRun:
    """Arms with anchors, tasks with samples that would be asked (None: unknown), and what is not there."""

    arms: list[PlannedArm]
    tasks: list[tuple[Task, int | None]]
    wanted: list[tuple[str, str]]
    notes: list[str]


def dry_run(grid: Grid, planned: Planned) -> DryRun:
    """Check a grid without weights and without reading its tasks' files."""
    tasks, pool = named_tasks(grid), LayoutPool(planned)
    without = [_marked(spec) for spec in grid.arms]
    arms, notes = resolve_arms([spec for spec, _ in without], tasks, grid.anchors, pool)
    wanted = []
    for name in pool.plans:
        found = recipe_of(name)
        recipe = found if found is not None and not found.is_absolute() else run_name(name)
        wanted.append((f"adapter {name}", f"subtoken-train fit --config {shell_words(recipe)}"))
    wanted += dict.fromkeys(missing for _, of_arm in without for missing in of_arm)
    lacking = [task.name for task in tasks if task.needs_files and task.source is None]
    wanted += [(f"files of {name}", f"subtoken-train data {name}") for name in lacking]
    planned_tasks = []
    for task in tasks:
        try:
            task.check_requirements()
        except ValueError as error:
            wanted.append((f"for {task.name}", str(error)))
        asked = [count for count in (grid.limit, task.expected_rows) if count is not None]
        planned_tasks.append((task, min(asked, default=None)))
    planned_arms = []
    for arm in arms:
        layers, adapter = arm.shape.num_layers, arm.spec.adapter
        path = str(arm.spec.backbone) if adapter is None else str(pool.folder(adapter))
        laid_out = pool.laid_out[path, arm.spec.dtype]
        lengths = [arm.tokens if task.length_option is None else getattr(task, task.length_option) for task in tasks]
        longest, work = max(lengths), TrainingFlops(laid_out.decoder, [0] * layers)
        dense = layers * entry_bytes(arm.shape) * longest
        flops = tuple(work.sample(arm.reducer.running_tokens(length, layers)) for length in lengths)
        planned_arms.append(PlannedArm(arm, laid_out, longest, dense, round(dense * arm.facts.nominal_kv), flops))
    return DryRun(planned_arms, planned_tasks, wanted, notes)


def _marked(spec: ArmSpec) -> tuple[ArmSpec, list[tuple[str, str]]]:
    """Return an arm with its missing calibrations marked as such (a threshold keeps all), and what makes each."""
    whose = shell_words(*(("--adapter", spec.adapter) if spec.backbone is None else ("--backbone", spec.backbone)))
    options, keep, wanted = dict(spec.eviction_options), spec.eviction_keep, list[tuple[str, str]]()
    for option, value in spec.eviction_options.items():
        method, _, name = option.rpartition(".")
        if name == CALIBRATION and isinstance(value, str) and not Path(value).is_file():
            wanted.append((value, f"{method or spec.eviction} {whose}"))
            options[option] = Unmade(value)
    threshold = threshold_file(keep)
    if threshold is not None and not Path(threshold).is_file():
        wanted.append((threshold, f"threshold {whose} --option eviction={spec.eviction}"))
        keep = 1.0
    made = [(f"calibration {to}", f"subtoken-train calibrate {how} --out {shell_words(to)}") for to, how in wanted]
    return replace(spec, eviction_options=options, eviction_keep=keep), made


def recipe_of(adapter: str) -> Path | None:
    """Find the recipe of a run's adapter: NAME.yaml here or in ``recipes/``, else the shipped one; None: no recipe."""
    name = run_name(adapter)
    shipped = shipped_recipe(name)
    own = filter(Path.is_file, (Path(f"{name}.yaml"), Path("recipes", f"{name}.yaml")))
    return next((path for path in own if shipped is None or real_path(path) != real_path(shipped)), shipped)


def check_lines(grid: Grid, checked: DryRun) -> list[str]:
    """Return lines about tasks, arms, memory, and what is missing."""
    sizes = []
    for backbone, arms in grouped((arm.arm.facts.backbone, arm) for arm in checked.arms).items():
        kept = [grid.batch_size * arm.kept for arm in arms]
        held = max(arm.laid_out.weights for arm in arms), grid.batch_size * arms[0].dense, min(kept), max(kept)
        sizes.append((backbone, arms[0].tokens, *(f"{size / GIB:.2f}" for size in held)))
    words, counts = [*map(_arm_words, checked.arms)], [samples for _, samples in checked.tasks]
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("check.txt.j2").read_text("utf-8"))
    return template.render(grid=grid, checked=checked, arms=words, counts=counts, sizes=sizes).rstrip().split("\n")


def _arm_words(planned: PlannedArm) -> str:
    facts, compression = planned.arm.facts, planned.arm.compression()
    words = [f"{name} {value}" for name in ("reducer", "groups", "eviction") if (value := getattr(facts, name)) != "-"]
    share = share_words(facts.nominal_kv)
    kept = "by its budget" if compression.share is None else share
    if compression.threshold is not None:
        kept = "known after a run: a threshold promises no size"
        if (record := compression.threshold.record) is not None:
            kept = f"measured, {share} on average of {record.data.samples:,} prompts of {record.data.name}"
    words += [facts.protocol, f"KV {kept}", *([f"anchor {facts.anchor}"] if facts.anchor else [])]
    return f"{facts.name}: {facts.backbone}; {', '.join(words)}"


def planned_adapter(adapter: str) -> AdapterConfig | None:
    """Return what the recipe of a run (``runs/NAME``, ``runs/NAME/adapter``) would train; None if it has no recipe."""
    if (recipe := recipe_of(adapter)) is None:
        return None
    content = parse_yaml(recipe_text(recipe), str(recipe))
    band = content.get("model", {}) if isinstance(content, dict) else {}
    reducer = dict(band.get("reducer") or {})

    def read(kind: type[Any], name: str, optional: bool = False) -> Any:
        given = band.get(name)
        return None if optional and given is None else typed(kind, given or {}, f"{recipe}: model.{name}")

    return AdapterConfig(
        backbone=read(BackboneConfig, "backbone"),
        lora=read(LoraSettings, "lora"),
        reducer=build_reducer(reducer.pop("name", DEFAULT_REDUCER), **reducer),
        routing=read(RoutingConfig, "routing", True),
        identity=Identity(adapter, None, "", ""),
        training={"name": run_name(adapter)},
        stage2=read(Stage2Config, "stage2", True),
    )

"""JSON schemas of recipes and grids, made from the types that read them; ``docs/generate.py`` writes them beside both.

They say which keys there are and of which type, not which settings go together: that is what ``check`` is for. No key
of a recipe is required, since a recipe may be laid over another one.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from subtoken_train.cli.recipe import recipe_plan
from subtoken_train.cli.recipe_source import KEYS
from subtoken_train.cli.trainer_parts import KINDS, Nameable
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.evaluation.runner.spec import AXES, Grid
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evictions import EVICTIONS
from subtoken_train.reducers import DEFAULT_REDUCER, REDUCERS
from subtoken_train.routing import SELECTORS, RoutingConfig
from subtoken_train.settings import ARM_SETTINGS, ArmSettings
from subtoken_train.training.loss import LOSSES
from subtoken_train.training.module import SubTokenModule
from subtoken_train.typed import SettingsPlan, group_of, plan_of

Schema = dict[str, Any]
_DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string", NoneType: "null"}
_NAMES: dict[tuple[Any, str], Iterable[str]] = {
    (RoutingConfig, "selector"): SELECTORS,
    (SubTokenModule, "loss"): LOSSES,
    (ArmSettings, "reducer"): (*REDUCERS, *EVICTIONS),
    (ArmSettings, "selector"): (*SELECTORS, "none"),
}
"""Texts that name a method, by their class and key; those of other packages are known where these are installed."""
_SAID = re.compile(r"^ +(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)


def recipe_schema() -> Schema:
    """Return the schema of a recipe or an overlay, over all reducers and kinds of data."""
    plan = recipe_plan(DEFAULT_REDUCER, InstructionDataModule)
    bands = {name: _of_key(plan, name) for name in KEYS}
    reducers = dict[str, Schema]()
    for name in dict.fromkeys((*REDUCERS, *EVICTIONS)):
        with suppress(ValueError):  # an eviction that scores no context ranks none
            reducers[name] = _group(plan_of(REDUCERS.find(name)))  # type: ignore[arg-type]  # a class is hashable
    for name, schema in reducers.items():
        schema["properties"]["name"] = {"enum": [name]}
    bands["model"]["properties"]["reducer"] = {"anyOf": list(reducers.values())}
    kinds = (InstructionDataModule, CorpusDataModule, RecallDataModule)
    bands["data"] = {"anyOf": [_group(plan_of(kind)) for kind in kinds]}
    trainer = bands["trainer"]["properties"]
    trainer |= {name: _named(kind) for name, kind in KINDS.items()}
    del trainer["plugins"], trainer["profiler"]
    return {"$schema": _DRAFT, "title": "a recipe of subtoken_train", **_object(bands)}


def grid_schema() -> Schema:
    """Return the schema of a grid."""
    hints, plan = get_type_hints(ArmSettings), plan_of(ArmSettings)
    listed = re.compile(r": \{\w+\}(; or \{\w+\} around one, '[^']*')?")
    said = {name: listed.sub("", setting.words) for name, setting in ARM_SETTINGS.items()}
    arm = {name: _of_key(plan, name) | {"description": said[name]} for name in hints}
    for name in AXES:
        one = {key: value for key, value in arm[name].items() if key not in ("description", "default")}
        rest = {key: value for key, value in arm[name].items() if key not in one}
        arm[name] = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}], **rest}
    known = {"enum": sorted(TASKS)}
    task = {"type": "object", "properties": {"name": known, "source": {"type": "string"}}, "required": ["name"]}
    own = {"arms": _list(_object(arm)), "tasks": _list({"anyOf": [known, task]})}
    grid = plan_of(Grid)
    keys = {name: own.get(name) or _of_key(grid, name) for name in grid.hints}
    return {"$schema": _DRAFT, "title": "a grid of subtoken_train", **_object(keys), "required": grid.required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _group(plan: SettingsPlan) -> Schema:
    return _object({name: _of_key(plan, name) for name in plan.hints})


def _of_key(plan: SettingsPlan, name: str) -> Schema:
    """Return the schema of one key: its type, default, and what the class's docstring says of it."""
    hint, names = plan.hints[name], _NAMES.get((plan.kind, name))
    schema = _of_type(hint if names is None else Literal[tuple(names)])
    default = plan.defaults.get(name)
    if name in plan.defaults and (group_of(hint) is None or default is None):
        plain = isinstance(default, str | int | float | list | Mapping | None)
        schema["default"] = list(default) if isinstance(default, tuple) else default if plain else str(default)
    kinds = reversed(plan.kind.__mro__) if inspect.isclass(plan.kind) else ()
    said = dict(pair for kind in kinds for pair in _SAID.findall(inspect.cleandoc(kind.__doc__ or "")))
    return schema | ({"description": " ".join(said[name].split())} if name in said else {})


def _of_type(hint: Any) -> Schema:
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, SettingsPlan) or dataclasses.is_dataclass(hint):
        return _group(hint if isinstance(hint, SettingsPlan) else plan_of(hint))  # type: ignore[arg-type]
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        parts = [_of_type(each) for each in inner]
        return (
            {"type": [each["type"] for each in parts]} if all(p.keys() == {"type"} for p in parts) else {"anyOf": parts}
        )
    if origin in (list, tuple):
        return {"type": "array", "items": _of_type(inner[0])}
    if origin in (dict, Mapping):
        return {"type": "object"}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def _named(kind: Nameable) -> Schema:
    """Return the schema of what a key of the trainer names: a name, or one with its settings; of some keys a list."""
    parts = {}
    for name in kind.names:
        built_in, settings = name in kind.names.builtin, {key: Schema() for key in kind.settings.get(name, ())}
        parts[name] = {"type": ["object", "null"], "properties": settings, "additionalProperties": not built_in}
    one = {"anyOf": [{"enum": [*kind.words, *kind.names]}, {**_object(parts), "maxProperties": 1}]}
    return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]} if kind.many else one

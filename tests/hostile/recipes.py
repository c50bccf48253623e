"""Recipes with odd values, keys and types, given to the commands that parse one."""

from __future__ import annotations

import random
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place, Reference
from tests.hostile.known import Format, change
from tests.hostile.pool import LM, VLM
from tests.hostile.references import same
from tests.hostile.values import HUGE, INFINITY, NAN, as_yaml, changed, shown, written

WORDS: tuple[Any, ...] = ("text", [1, "a"], {"a": 1}, "", NAN, INFINITY, -INFINITY)
"""Values that no number of a recipe takes."""
COUNT: tuple[Any, ...] = (*WORDS, 0, -1, 1.5, -HUGE)
SHARE: tuple[Any, ...] = (*WORDS, -0.5, 1.5, HUGE)
INVALID: dict[str, tuple[Any, ...]] = {
    "seed_everything": ("text", [1], -1, 2**70, HUGE),
    "output_dir": (5, [], {}),
    "model.backbone.path": ("", 5, [], "nowhere/at/all", "../beside", None),
    "model.backbone.dtype": ("float128", 5, "", [], None),
    "model.backbone.attention": ("magic", 5, []),
    "model.backbone.quantization": ("int0", 5, []),
    "model.lora.rank": COUNT,
    "model.lora.alpha": (*WORDS, -1, 0),
    "model.lora.dropout": (*SHARE, 1.0),
    "model.reducer.name": ("nope", 5, "", [], {}),
    "model.reducer.keep_ratio": (*SHARE, 0),
    "model.reducer.layer": (*WORDS, -1, 10**6, 1.5),
    "model.reducer.stage": ("nope", 5, []),
    "model.reducer.ranking": ("nope", 5, []),
    "model.reducer.merge_dropped": ("nope", 5, []),
    "model.reducer.page_size": COUNT,
    "model.reducer.window": (*WORDS, -1, 1.5),
    "model.reducer": (
        {"name": "compactor", "keep_ratio": 0.5, "chunk": 0},
        {"name": "compactor", "keep_ratio": 0.5, "sketch_seed": -1},
        {"name": "compactor", "keep_ratio": 0.5, "sinks": HUGE},
        {"name": "expected_attention", "keep_ratio": 0.5, "future": 0},
        {"name": "expected_attention", "keep_ratio": 0.5, "sinks": -1},
        {"name": "expected_attention", "keep_ratio": 0.5, "window": 4},
    ),
    "model.routing.selector": ("nope", 5, "", []),
    "model.routing.num_groups": (*COUNT, 7, 10**6),
    "model.routing.kept_groups": (*COUNT, 17, 10**6),
    "model.routing.budget": ("nope", 5, []),
    "model.routing.layout": ("nope", 5, []),
    "model.routing.balance_weight": (*WORDS, -1),
    "model.routing.balance_scope": ("nope", 5, []),
    "model.routing.features": ("nope", 5, ["nope"], ["norm", "norm"]),
    "model.routing.query_rank": COUNT,
    "model.routing.selector_options": (5, "text", [], {"rank": 3}),
    "model.routing.fill": ("nope", 5, []),
    "model.routing.temperature": (*WORDS, -1, 0),
    "model.optimizer.name": ("nope", 5, []),
    "model.optimizer.learning_rate": (*WORDS, -1),
    "model.optimizer.weight_decay": (*WORDS, -1),
    "model.optimizer.warmup_steps": (*WORDS, -1, 1.5),
    "model.optimizer.schedule": ("nope", 5, []),
    "model.optimizer.final_fraction": SHARE,
    "data.batch_size": COUNT,
    "data.num_workers": (*WORDS, -1, 1.5, 10**6, 2**40),
    "data.seed": ("text", [1], -1, 1.5, NAN),
    "trainer.max_steps": (*WORDS, -5, 1.5),
    "trainer.max_epochs": (*WORDS, -5, 1.5),
    "trainer.accumulate_grad_batches": COUNT,
    "trainer.gradient_clip_val": ("text", [1], NAN, -1, INFINITY),
    "trainer.gradient_clip_algorithm": ("nope", 5, []),
    "trainer.log_every_n_steps": (*WORDS, -1, 1.5),
    "trainer.devices": (0, -5, "text", {}, NAN),
    "trainer.num_nodes": COUNT,
    "trainer.precision": ("99", "text", []),
    "trainer.accelerator": ("abacus", 5, []),
    "trainer.strategy": ("nope", 5, []),
    "trainer.val_check_interval": ("text", [1], -1, NAN),
    "trainer.limit_train_batches": ("text", [1], -1, NAN, 1.5),
    "trainer.check_val_every_n_epoch": (0, -1, "text", 1.5),
    "trainer.max_time": ("text", [1], -1),
    "trainer.num_sanity_val_steps": (-5, "text", 1.5),
    "checkpoint.every_n_train_steps": COUNT,
    "checkpoint.keep_last": COUNT,
    "early_stopping": (5, "text", [], {"monitor": "nope"}, {"patience": -1}),
    "evaluation": (5, "text", [], {"every_n_steps": 0}),
    "push_to_hub": (5, [], {}),
}
OF_VLM = {"model.reducer.layer", "model.reducer.stage"}
OF_LM = {"model.reducer", "model.reducer.page_size", "model.reducer.window"}
SWEPT = "checkpoint.keep_last"
BUILT = ("model.", "early_stopping", "evaluation", SWEPT)
"""What is known of a value once the run is laid out (``check``, ``fit``); the other commands parse a recipe."""
UNKNOWN = (
    *("unknown", "model.unknown", "model.lora.rnak", "trainer.callback", "data.files", "__class__"),
    *("model.__init__", "trainer.model"),
)
FORM = Format(
    unsaid=("*", "*.*", "*.*.*"),
    typed=True,
    legal={
        "model.backbone.path": lambda value: isinstance(value, str),
        "output_dir": lambda value: isinstance(value, str),
        "data.train_file": lambda value: isinstance(value, str),
        "trainer.max_steps": lambda value: type(value) is int and value >= -1,
        "trainer.enable_*": lambda value: isinstance(value, bool | None),
        "data.group_by_length": lambda value: isinstance(value, bool),
        "trainer.log_every_n_steps": lambda value: type(value) is int and value >= 0,
    },
    exact=(
        *("model.backbone.dtype", "model.reducer.name", "model.reducer.stage", "model.routing.selector"),
        *("model.routing.budget", "model.optimizer.schedule", "trainer.accelerator"),
    ),
)
TENSORS = ("run/adapter/adapter_model.safetensors", "run/adapter/router.safetensors")
HARMLESS = (
    {},
    {"seed_everything": 5},
    {"model.optimizer.learning_rate": 1e-3},
    {"model.routing.kept_groups": 2},
    {"trainer.accumulate_grad_batches": 2},
    {"trainer.gradient_clip_val": 0.5},
    {"data.seed": 7},
    {"model.lora.rank": 4},
)


def read(place: Place, name: str) -> dict[str, Any]:
    """A valid recipe of the pool."""
    content: dict[str, Any] = yaml.safe_load((place.pool / f"{name}.yaml").read_text())
    return content


def with_key(recipe: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The recipe with a dotted key set, its groups made where they are absent."""
    *groups, last = key.split(".")
    recipe = changed(recipe, (next(iter(recipe)),), next(iter(recipe.values())))
    band = recipe
    for group in groups:
        band = band.setdefault(group, {})
    band[last] = value
    return recipe


def parsing(
    draw: random.Random, config: str, *further: str, train: bool = True, built: bool = False
) -> tuple[list[str], tuple[str, ...]]:
    """A command that parses a recipe, and what it may write; ``built``: one that lays the run out as well."""
    kinds = ["check", "check", "check", *(["fit"] if train else []), *([] if built else ["preview", "sweep"])]
    kind = draw.choice(kinds)
    if kind == "sweep":
        return ["sweep", "--config", config, "--set", f"{SWEPT}=1,2", "--dry-run", "--output_dir", "swept"], ()
    if kind == "preview":
        return ["preview", "--config", config, "--count", "1", *further], ()
    if kind == "fit":
        return ["fit", "--config", config, *further], ("run", "run.old", ".")
    return ["check", "--config", config, *draw.choice(((), ("--offline",))), *further], ()


def same_recipe(place: Place, words: list[str], recipe: dict[str, Any], name: str = "recipe.yaml") -> Reference:
    """The recipe must do what it does when it is written another way: as JSON, its keys turned round."""
    turned = {key: recipe[key] for key in reversed(recipe)}
    return same(place, words, TENSORS if words[0] == "fit" else (), {name: written(turned)})


def make(draw: random.Random, place: Place) -> Case:
    """A recipe with one thing wrong in it, or none."""
    name = draw.choice((VLM, VLM, LM))
    whole = read(place, name)
    recipe, kind = whole, draw.choice(("invalid",) * 5 + ("unknown", "any", "any", "override", "control"))
    further: list[str] = []
    expect, key = Expect.REFUSED, "model."
    if kind == "control":
        settings = draw.choice(HARMLESS)
        for key, value in settings.items():
            recipe = with_key(recipe, key, value)
        what, expect, whole, key = f"valid, with {settings}", Expect.TAKEN, recipe, ""
    elif kind == "unknown":
        key = draw.choice(UNKNOWN)
        recipe, what = with_key(recipe, key, draw.choice((1, "x", [], {}))), f"unknown key {key}"
    elif kind == "any":
        recipe, what, expect = change(draw, recipe, FORM)
    else:
        keys = [key for key in INVALID if key not in (OF_LM if name == VLM else OF_VLM)]
        if kind == "override":
            keys = [key for key in keys if any(isinstance(value, str | float) and value for value in INVALID[key])]
        key = draw.choice(keys)
        values = INVALID[key]
        if kind == "override":  # where 5 is a text, and nothing is nothing
            values = tuple(value for value in values if isinstance(value, str | float) and value != "")
        value = draw.choice(values)
        what = f"{key} is {shown(value)}"
        if kind == "override":
            further = [f"--{key}={value}"]
        else:
            recipe = with_key(recipe, key, value)
    place.write("recipe.yaml", as_yaml(recipe, draw))
    built = expect is Expect.REFUSED and (key.startswith(BUILT) or bool(further))
    words, writes = parsing(draw, "recipe.yaml", *further, built=built)
    return Case(f"{words[0]}: {what}", words, expect, writes, reference=same_recipe(place, words, whole))

"""Recipes and grids: odd values, keys and types, YAML that is none, class paths and callables where code could run."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import LM, VLM, Answer, Case, Expect, Place, Reference, both, same
from tests.hostile.grammar import YAML, Document, Format, change, is_text, misplaced, text_or_none
from tests.hostile.values import HUGE, INFINITY, NAN, as_yaml, changed, no_file, shown, written

WORDS: tuple[Any, ...] = ("text", [1, "a"], {"a": 1}, "", NAN, INFINITY, -INFINITY)
"""Values that no number of a recipe takes."""
COUNT = (*WORDS, 0, -1, 1.5, -HUGE)
SHARE = (*WORDS, -0.5, 1.5, HUGE)
CHOICE = ("nope", 5, [])
ODD: dict[str, tuple[Any, ...]] = {
    "seed_everything": ("text", [1], -1, 2**70, HUGE), "output_dir push_to_hub": (5, [], {}),
    "model.backbone.path": ("", 5, [], "nowhere/at/all", "../beside", None),
    "model.backbone.dtype": ("float128", 5, "", [], None),
    "model.backbone.attention model.backbone.quantization model.reducer.stage model.reducer.ranking": CHOICE,
    "model.reducer.merge_dropped model.routing.budget model.routing.layout model.routing.balance_scope": CHOICE,
    "model.routing.fill model.optimizer.name model.optimizer.schedule trainer.gradient_clip_algorithm": CHOICE,
    "trainer.accelerator trainer.strategy model.reducer.name model.routing.selector": CHOICE,
    "model.lora.rank model.reducer.page_size model.routing.query_rank data.batch_size": COUNT,
    "trainer.accumulate_grad_batches trainer.num_nodes checkpoint.every_n_train_steps checkpoint.keep_last": COUNT,
    "model.lora.dropout": (*SHARE, 1.0), "model.reducer.keep_ratio": (*SHARE, 0),
    "model.optimizer.final_fraction": SHARE, "model.reducer.layer": (*WORDS, -1, 10**6, 1.5),
    "model.reducer.window model.optimizer.warmup_steps trainer.log_every_n_steps": (*WORDS, -1, 1.5),
    "model.routing.balance_weight model.optimizer.learning_rate model.optimizer.weight_decay": (*WORDS, -1),
    "model.lora.alpha model.routing.temperature": (*WORDS, -1, 0),
    "model.reducer": (
        *({"name": "compactor", "keep_ratio": 0.5, key: value} for key, value in
          (("chunk", 0), ("sketch_seed", -1), ("sinks", HUGE))),
        *({"name": "expected_attention", "keep_ratio": 0.5, key: value} for key, value in
          (("future", 0), ("sinks", -1), ("window", 4))),
    ),
    "model.routing.num_groups": (*COUNT, 7, 10**6), "model.routing.kept_groups": (*COUNT, 17, 10**6),
    "model.routing.features": (*CHOICE[:2], ["nope"], ["norm", "norm"]),
    "model.routing.selector_options": (5, "text", [], {"rank": 3}),
    "data.num_workers": (*WORDS, -1, 1.5, 10**6, 2**40), "data.seed": ("text", [1], -1, 1.5, NAN),
    "trainer.max_steps trainer.max_epochs": (*WORDS, -5, 1.5),
    "trainer.gradient_clip_val": ("text", [1], NAN, -1, INFINITY), "trainer.devices": (0, -5, "text", {}, NAN),
    "trainer.precision": ("99", "text", []), "trainer.val_check_interval": ("text", [1], -1, NAN),
    "trainer.limit_train_batches": ("text", [1], -1, NAN, 1.5),
    "trainer.check_val_every_n_epoch": (0, -1, "text", 1.5), "trainer.max_time": ("text", [1], -1),
    "trainer.num_sanity_val_steps": (-5, "text", 1.5),
    "early_stopping": (5, "text", [], {"monitor": "nope"}, {"patience": -1}),
    "evaluation": (5, "text", [], {"every_n_steps": 0}),
}  # fmt: skip
OF_ONE = {VLM: {"model.reducer", "model.reducer.page_size", "model.reducer.window"},
          LM: {"model.reducer.layer", "model.reducer.stage"}}  # fmt: skip
"""Keys that the recipe does not know."""
SWEPT = "checkpoint.keep_last"
BUILT = ("model.", "early_stopping", "evaluation", "output_dir", SWEPT)
"""What is known of a value once the run is laid out (``check``, ``fit``): others parse it, or name their own place."""
UNKNOWN = (
    *("unknown", "model.unknown", "model.lora.rnak", "trainer.callback", "data.files", "__class__"),
    *("model.__init__", "trainer.model"),
)
OF_RECIPE = Format(
    unsaid=("*", "*.*", "*.*.*"),
    typed=True,
    legal={
        "model.backbone.path output_dir data.train_file": is_text,
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
HARMLESS: tuple[dict[str, Any], ...] = (
    {}, {"seed_everything": 5}, {"model.optimizer.learning_rate": 1e-3}, {"model.routing.kept_groups": 2},
    {"trainer.accumulate_grad_batches": 2}, {"trainer.gradient_clip_val": 0.5}, {"data.seed": 7},
    {"model.lora.rank": 4},
)  # fmt: skip


def read(place: Place, name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((place.pool / f"{name}.yaml").read_text())
    return content


def with_key(recipe: dict[str, Any], key: str, value: Any) -> Any:
    return changed(recipe, tuple(key.split(".")), value)


def parsing(
    draw: random.Random, config: str, *further: str, train: bool = True, built: bool = False
) -> tuple[list[str], tuple[str, ...]]:
    """A command that parses a recipe, and what it may write; ``built``: one that lays the run out as well."""
    kinds = ["check", "check", "check", *(["fit"] if train else []), *([] if built else ["preview", "sweep"])]
    kind = draw.choice(kinds)
    words = [kind, "--config", config]
    if kind == "sweep":
        return [*words, "--set", f"{SWEPT}=1,2", "--dry-run", "--output_dir", "swept"], ()
    if kind == "preview":
        return [*words, "--count", "1", *further], ()
    if kind == "fit":
        return [*words, *further], ("run", ".")
    return [*words, *draw.choice(((), ("--offline",))), *further], ()


def fields(draw: random.Random, place: Place) -> Case:
    name = draw.choice((VLM, VLM, LM))
    whole = recipe = read(place, name)
    kind = draw.choice(("odd",) * 5 + ("unknown", "any", "any", "override", "control"))
    further: list[str] = []
    expect, key = Expect.REFUSED, "model."
    if kind == "control":
        settings = draw.choice(HARMLESS)
        for key, value in settings.items():
            whole = recipe = with_key(recipe, key, value)
        what, expect, key = f"valid, with {settings}", Expect.TAKEN, ""
    elif kind == "unknown":
        key = draw.choice(UNKNOWN)
        recipe, what = with_key(recipe, key, draw.choice((1, "x", [], {}))), f"unknown key {key}"
    elif kind == "any":
        recipe, what, expect = change(draw, recipe, OF_RECIPE)
    else:
        odd = {key: values for keys, values in ODD.items() for key in keys.split() if key not in OF_ONE[name]}
        if kind == "override":  # where 5 is a text, and nothing is nothing
            odd = {key: tuple(each for each in odd[key] if isinstance(each, str | float) and each) for key in odd}
        key = draw.choice([key for key, values in odd.items() if values])
        changed_recipe, what, _ = misplaced(draw, recipe, {key: odd[key]})
        if kind == "override":
            value = changed_recipe
            for part in key.split("."):
                value = value[part]
            further = [f"--{key}={value}"]
        else:
            recipe = changed_recipe
    place.write("recipe.yaml", as_yaml(recipe, draw))
    built = expect is Expect.REFUSED and (key.startswith(BUILT) or bool(further))
    words, writes = parsing(draw, "recipe.yaml", *further, built=built)
    turned = {"recipe.yaml": written({key: whole[key] for key in reversed(whole)})}
    reference = same(place, words, TENSORS if words[0] == "fit" else (), turned)
    return Case(f"{words[0]}: {what}", words, expect, writes, reference=reference)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)
)
MAPS = "m0: &m0 {a: 1}\n" + "\n".join(
    f"m{i}: &m{i} {{{', '.join(f'k{j}: *m{i - 1}' for j in range(9))}}}" for i in range(1, 9)
)
TEXTS = {
    "an alias bomb": BOMB, "an alias bomb of mappings": MAPS, "lists 5000 deep": "a: " + "[" * 5000 + "]" * 5000,
    "mappings 3000 deep": "a: " + "{a: " * 3000 + "1" + "}" * 3000,
    "a block 900 deep": "\n".join(f"{' ' * i}a{i}:" for i in range(900)),
    "a number of 10,000 digits": "seed_everything: " + "9" * 10_000,
    "a float of thousands of digits": "x: 0." + "1" * 20_000, "a line of a million letters": "x: " + "a" * 1_000_000,
    "ten thousand keys": "\n".join(f"k{i}: {i}" for i in range(10_000)),
    **{text: text for text in (
        "model: &a\n  lora: *a", "a: &a [*a, *a]", "x: !!python/object/apply:os.system ['touch ../CANARY']",
        "x: !!python/module:hostile_canary", "x: !!python/name:hostile_canary.call",
        "x: !!python/object/new:hostile_canary.Callback []", "x: !include /etc/passwd", "model: {}\nmodel: {}",
        "model:\n  lora: {rank: 1, rank: 2}", "? [a, b]\n: 1", "? {a: b}\n: 1", "x: 2024-99-99", "2024-01-01: 1",
        "5: 1", "~: 1", "x: {<<: 5}", "x: &x {<<: *x}", "x: *nowhere", "model:\n\tlora: 1", 'x: "abc', "x: [1, 2",
        "x: !!binary '%%%'", "seed_everything: 190:20:30", "x: !!omap [a: 1, a: 2]", "x: !!set {a, b}", "x: \x07",
        "\x80\x04c",
    )},
}  # fmt: skip
ALONE = ("a: 1\n---\nb: 2", "%YAML 9.9\n---\na: 1", "only words", "- 1\n- 2", "5")
"""What is no recipe by itself, and would be something else behind one."""


def texts(draw: random.Random, place: Place) -> Case:
    content = whole = (place.pool / f"{draw.choice((VLM, LM))}.yaml").read_bytes()
    kind, expect = draw.choice(("text", "text", "text", "bytes", "bytes", "file", "whole")), Expect.REFUSED
    plain, odd = "recipe.yaml", ("re cipe.yaml", "[red]recipe.yaml", "recipe\x1b[31m.yaml", "réçipe.yaml")
    name = draw.choice((plain, plain, *odd))
    if kind == "text":
        what = draw.choice((*TEXTS, *ALONE))
        content = (b"" if draw.random() < 0.5 or what in ALONE else content) + TEXTS.get(what, what).encode() + b"\n"
        place.write(name, content)
    else:
        what, expect = Document(OF_RECIPE, notation=YAML).spoil(draw, place.write(name, content), kind)
    built = kind == "bytes" and expect is Expect.REFUSED
    words, writes = parsing(draw, name, train=kind != "bytes", built=built)
    reference = same(place, words, TENSORS if words[0] == "fit" else (), {name: whole})
    return Case(f"{words[0]} {name!r}: {what[:60]}", words, expect, writes, reference=reference)


TOUCH = "touch ../CANARY"
SHELL: dict[str, Any] = {"args": TOUCH, "shell": True}
CALLS: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(("subprocess.Popen", "subprocess.run", "Popen", "os.system"), SHELL),
    **dict.fromkeys(
        "hostile_canary.Callback hostile_canary.call hostile_canary evil.Callback ..evil.Callback work.evil.Callback "
        "HOSTILE_CANARY.Callback hostile_canary:Callback lightning.pytorch.callbacks.Callback "
        "lightning.pytorch.plugins.TorchCheckpointIO".split()
    ),
    "builtins.eval": {"source": "open('../CANARY', 'w')"}, "pathlib.Path.touch": {"self": "../CANARY"},
    "importlib.import_module": {"name": "hostile_canary"}, "runpy.run_path": {"path_name": "evil.py"},
    "shutil.rmtree": {"path": "../beside"}, "LambdaCallback": {"setup": "hostile_canary.call"},
    "lightning.pytorch.callbacks.ModelCheckpoint": {"dirpath": "../beside"},
    "lightning.pytorch.callbacks.Timer": {"duration": {"class_path": "hostile_canary.Callback"}},
    "lightning.pytorch.strategies.DDPStrategy": {"ddp_comm_hook": "hostile_canary.call"},
    "lightning.pytorch.strategies.FSDPStrategy": {"auto_wrap_policy": ["hostile_canary.Callback"]},
    "lightning.pytorch.loggers.CSVLogger": {"save_dir": {"class_path": "subprocess.Popen", "init_args": SHELL}},
    "yaml.unsafe_load": {"stream": "!!python/object/apply:os.system ['touch ../CANARY']"},
    "subtoken_train.cli.main.main": {"argv": ["recipes", "copy", "tiny_lora_only", "CANARY.yaml"]},
    "subtoken_train.artifact.whole_folder.whole_folder": {"folder": "../beside", "overwrite": True},
}  # fmt: skip
OUTER = (
    "subtoken_train.training.panels.run_progress.SampleLog", "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.callbacks.LearningRateMonitor", "lightning.pytorch.strategies.DDPStrategy",
)  # fmt: skip
SLOTS = (
    "trainer.strategy trainer.strategy trainer.logger trainer.callbacks trainer.callbacks trainer.plugins "
    "trainer.profiler trainer.accelerator trainer.devices trainer.max_time trainer.default_root_dir trainer.precision "
    "model.backbone.path model.lora model.reducer model.routing model.optimizer model data trainer checkpoint "
    "evaluation early_stopping data.train_file seed_everything data.train model.stage2 output_dir"
).split()
PATHS = ("output_dir", "trainer.default_root_dir", "data.train_file", "model.backbone.path")
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Callback:\n    pass\n"


def entry(draw: random.Random) -> tuple[Any, str]:
    path = draw.choice(list(CALLS))
    inner = {"class_path": path, "init_args": CALLS[path] or {}}
    form = draw.choice(("whole", "whole", "whole", "dict_kwargs", "bare", "text", "nested", "list"))
    if form == "nested":
        outer, key = draw.choice(OUTER), draw.choice(("folder", "save_dir", "logging_interval", "name"))
        return {"class_path": outer, "init_args": {key: inner}}, f"{path} inside {outer}"
    value = {
        "whole": inner, "dict_kwargs": {"class_path": path, "dict_kwargs": inner["init_args"]}, "text": path,
        "bare": {"class_path": path}, "list": [inner, inner],
    }[form]  # fmt: skip
    return value, f"{path}, {form}"


def named(draw: random.Random) -> tuple[str, Any, str]:
    """A place, what stands there and what it is: no text where a text belongs, no own class in its own place."""
    while True:
        (value, what), slot = entry(draw), draw.choice(SLOTS)
        text = isinstance(value, str) and slot in PATHS
        listed = what.startswith(("lightning.pytorch.callbacks.Model", "lightning.pytorch.strategies.DDP"))
        text = text or (isinstance(value, str) and value.startswith("lightning.") and slot.startswith("trainer."))
        if not text and not (listed and slot.startswith("trainer.")):  # with arguments of their own types
            return slot, value, what


def code(draw: random.Random, place: Place) -> Case:
    name = draw.choice((VLM, VLM, LM))
    slot, value, what = named(draw)
    if slot in ("trainer.callbacks", "trainer.plugins") and not isinstance(value, list):
        value = [value]
    place.write("evil.py", EVIL)
    way = draw.choice(("parse", "parse", "parse", "override", "resume", "export"))
    if way == "resume" and slot == "output_dir":  # which the command line says anew
        way = "export"
    if way in ("resume", "export"):
        path = place.copy("stopped", "run") / "recipe.yaml"
        path.write_text(yaml.safe_dump(with_key(yaml.safe_load(path.read_text()), slot, value), sort_keys=False))
        words, writes = ["export", "run", "out"], ("out",)
        if way == "resume":
            words, writes = place.words("fit --config run/recipe.yaml --output_dir run --resume"), ("run",)
    elif way == "override":
        shutil.copyfile(place.pool / f"{name}.yaml", place.work / "recipe.yaml")
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
        words, writes = parsing(draw, "recipe.yaml", f"--{slot}={text}", built=True)
    else:
        place.write("recipe.yaml", yaml.safe_dump(with_key(read(place, name), slot, value), sort_keys=False))
        words, writes = parsing(draw, "recipe.yaml", built=slot == "output_dir")
    return Case(f"{words[0]} {slot}: {what}", words, Expect.REFUSED, writes)


OF_ARM: dict[str, tuple[Any, ...]] = {
    "eviction": ("nope", 5, [], {}, "snapkv"), "eviction_keep": (0.5, "x", -1, []),
    "eviction_every": (0, -1, 1.5, "x", True, []), "keep_ratio": (0, -1, 2, "x", NAN, []),
    **dict.fromkeys(("reducer", "selector", "protocol", "kv_dtype", "scope"), CHOICE),
    "prefill_chunk": ("x", 0, -1, 1.5, True, []), "rerotate": ("x", 5, True, []),
    "name": (5, "../x", "a/b", "", ".", "..", []), "seed": ("x", 1.5, []), "unknown": (1,),
    "reducer_options": (5, {"layer": -1}, {"unknown": 1}, []), "eviction_options": (5, {"x": 1}, []),
}  # fmt: skip
GRID = Document(
    Format(
        legal={
            "batch_size": lambda value: type(value) is int and value > 0,
            "limit": lambda value: value is None or (type(value) is int and value > 0),
            "out": lambda value: isinstance(value, str) and value != "",
            "anchors": lambda value: value in ("none", "auto", "all"),
            "arms.0.backbone tasks.0.source": text_or_none,
            "arms.0.adapter": lambda value: isinstance(value, str | list), "arms.0.adapter.0": text_or_none,
            "tasks.0": lambda value: isinstance(value, str | dict),
            "arms tasks": lambda value: isinstance(value, list) and len(value) > 1,
        },
        exact=("tasks.0.name",),
        # an adapter names its backbone, a backbone without an adapter is an arm, and a default is null as well
        unsaid=("arms.0.backbone", "arms.0.adapter", "batch_size", "limit", "anchors"),
    ),
    {
        "batch_size limit": (0, -1, 1.5), "anchors": ("perhaps",), "out": ("",), "tasks arms": ([],),
        "tasks.0": ("nope", {"name": 5}, {}), "tasks.0.name": ("nope", "../x", "os.system"),
        "tasks.0.source": ("nowhere/at/all", "/dev/null", "", "x" * 5000, "\x00"), "arms.0": ({},),
        "arms.0.adapter": ("", "nowhere/at/all", [5], "x" * 5000, ["", ""]), "arms.0.backbone": ("", "nowhere/at/all"),
    },
    "odd odd odd changed changed bytes whole", YAML,
)  # fmt: skip
KEEPS = (0, 0.5, 1, 1.5, "0.5", "0", "20MB", "3tokens", "-3tokens", "NaN", "1e400", "", "5%", HUGE)
RIGHT = (0.5, 1, "0.5", "20MB", "3tokens")
EVICTIONS, SCOPES = ("snapkv", "knorm", "streaming_llm", "random", "kvcompose"), ("all", "context", "nope", None)


def grids(draw: random.Random, place: Place) -> Case:
    grid = yaml.safe_load((place.pool / "grid.yaml").read_text())
    grid["limit"] = 1
    grid["tasks"], grid["arms"][0]["adapter"] = grid["tasks"][:1], grid["arms"][0]["adapter"][:1]
    right = as_yaml(grid, draw)
    path, expect = place.write("grid.yaml", right), Expect.REFUSED
    kind = draw.choice((*["document"] * 7, "arm", "arm", "gone", "text", "eviction"))
    if kind == "document":
        what, expect = GRID.spoil(draw, path)
    elif kind == "arm":
        arm = Document(odd={f"arms.0.{key}": values for key, values in OF_ARM.items()}, notation=YAML)
        what, expect = arm.spoil(draw, path, "odd")
    elif kind == "gone":
        key = draw.choice(("tasks", "arms", "out"))
        place.write("grid.yaml", as_yaml({name: grid[name] for name in grid if name != key}, draw))
        what = f"{key} is gone"
    elif kind == "text":
        what = draw.choice((*TEXTS, *ALONE))
        place.write("grid.yaml", TEXTS.get(what, what))
    else:
        names = {"eviction": draw.choice(EVICTIONS), "eviction_keep": draw.choice(KEEPS), "scope": draw.choice(SCOPES)}
        grid["arms"][0] |= names
        what = ", ".join(map(shown, names.values()))
        expect = Expect.TAKEN if names["eviction_keep"] in RIGHT and names["scope"] != "nope" else Expect.REFUSED
        place.write("grid.yaml", right := as_yaml(grid, draw))
    if draw.random() < 0.05:
        what, expect = no_file(draw, path), Expect.REFUSED
    words = place.words("evaluate --config grid.yaml --out results")
    words = words[:3] if what.startswith("out") else words
    reference = same(place, words, ["results"], {"grid.yaml": right})
    if kind == "eviction":
        reference = both(reference, evicted(place.work))
    writes = (".",) if len(words) == 3 else ("results",)
    return Case(f"evaluate --config: {what[:60]}", words, expect, writes, reference=reference)


def evicted(work: Path) -> Reference:
    def difference(answer: Answer) -> str | None:
        arm = yaml.safe_load((work / "grid.yaml").read_text())["arms"][0]
        named = json.loads(next((work / "results").rglob("manifest.json")).read_text())["arm"]["eviction"]
        return None if arm["eviction"] in named or arm["eviction_keep"] == 1 else f"the manifest says {named!r}"

    return difference

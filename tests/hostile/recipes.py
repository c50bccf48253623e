"""Recipes and grids: odd values, keys and types, YAML that is none, class paths and callables where code could run."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import LM, VLM, Answer, Case, Expect, Place, Reference, read_by
from tests.hostile.grammar import HUGE, INFINITY, NAN, YAML, Document, as_yaml, changed, no_file, shown

WORDS: tuple[Any, ...] = ("text", [1, "a"], {"a": 1}, NAN, INFINITY)  # values that no number of a recipe takes
COUNT, SHARE, CHOICE = (*WORDS, 0, -1, 1.5, -HUGE), (*WORDS, -0.5, 1.5, HUGE), ("nope", 5, [])
ODD: dict[str, tuple[Any, ...]] = {
    "seed_everything data.seed": ("text", [1], -1), "output_dir push_to_hub": (5, [], {}),
    "model.backbone.path": ("", 5, [], "nowhere/at/all", "../beside", None),
    "model.backbone.dtype": ("float128", 5, "", [], None),
    "model.backbone.attention model.backbone.quantization model.reducer.ranking model.reducer.name": CHOICE,
    "model.reducer.merge_dropped model.routing.budget model.routing.layout model.routing.balance_scope": CHOICE,
    "model.routing.fill model.optimizer.name model.optimizer.schedule trainer.gradient_clip_algorithm": CHOICE,
    "trainer.accelerator trainer.strategy model.routing.selector": CHOICE,
    "model.lora.rank model.routing.query_rank data.batch_size checkpoint.keep_last": COUNT,
    "trainer.accumulate_grad_batches trainer.num_nodes checkpoint.every_n_train_steps": COUNT,
    "model.lora.dropout model.optimizer.final_fraction model.reducer.keep_ratio": SHARE,
    "model.optimizer.warmup_steps trainer.log_every_n_steps data.num_workers": (*WORDS, -1, 1.5),
    "model.routing.balance_weight model.optimizer.learning_rate model.optimizer.weight_decay": (*WORDS, -1),
    "model.lora.alpha model.routing.temperature": (*WORDS, -1, 0),
    "model.routing.num_groups model.routing.kept_groups": (*COUNT, 17, 10**6),
    "model.routing.features": (*CHOICE[:2], ["nope"], ["norm", "norm"]),
    "model.routing.selector_options": (5, "text", [], {"rank": 3}),
    "trainer.max_steps trainer.max_epochs": (*WORDS, -5, 1.5), "trainer.devices": (0, -5, "text", {}, NAN),
    "trainer.gradient_clip_val trainer.val_check_interval": ("text", [1], NAN, -1),
    "trainer.precision": ("99", "text", []), "trainer.limit_train_batches": ("text", [1], -1, NAN, 1.5),
    "trainer.check_val_every_n_epoch": (0, -1, "text", 1.5), "trainer.max_time": ("text", [1], -1),
    "early_stopping": (5, "text", [], {"monitor": "nope"}, {"patience": -1}),
    "evaluation": (5, "text", [], {"every_n_steps": 0}),
    "unknown model.unknown model.lora.rnak trainer.callback data.files __class__ model.__init__": (1, "x", [], {}),
}  # fmt: skip
RECIPE = Document(ODD, open="* *.* *.*.*", ways="odd odd odd odd odd odd changed changed whole", notation=YAML)
BUILT = ("fit --config recipe.yaml", *["check --config recipe.yaml"] * 3, "check --config recipe.yaml --offline")
PARSED = ("preview --config recipe.yaml --count 1", "sweep --config recipe.yaml --set data.seed=1,2 --dry-run")
"""Commands that lay a run out, and those that may do with less than that."""


def fields(draw: random.Random, place: Place) -> Case:
    path, text = place.copy(f"{draw.choice((VLM, VLM, LM))}.yaml", "recipe.yaml"), draw.choice(BUILT)
    if draw.random() > 0.15:
        return read_by(place, text, RECIPE.spoil(draw, path))
    key, values = draw.choice([(key, ODD[keys]) for keys in ODD if ODD[keys][0] == "text" for key in keys.split()])
    return with_setting(place, text, key, draw.choice([each for each in values if each != []]))


def with_setting(place: Place, text: str, key: str, value: Any) -> Case:
    """What a recipe may not hold, on the command line."""
    return Case(f"--{key} is {shown(value)}", [*place.words(text), f"--{key}={value}"], Expect.REFUSED)


BOMBS = {
    "an alias bomb": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)
    ),
    "an alias bomb of mappings": "m0: &m0 {a: 1}\n" + "\n".join(
        f"m{i}: &m{i} {{{', '.join(f'k{j}: *m{i - 1}' for j in range(9))}}}" for i in range(1, 9)
    ),
    "lists 5000 deep": "a: " + "[" * 5000 + "]" * 5000, "mappings 3000 deep": "a: " + "{a: " * 3000 + "1" + "}" * 3000,
    "a block 900 deep": "\n".join(f"{' ' * i}a{i}:" for i in range(900)),
    "a number of 10,000 digits": "seed_everything: " + "9" * 10_000,
    "a float of thousands of digits": "x: 0." + "1" * 20_000, "a line of a million letters": "x: " + "a" * 1_000_000,
    "ten thousand keys": "\n".join(f"k{i}: {i}" for i in range(10_000)),
}  # fmt: skip
TEXTS = (
    "model: &a\n  lora: *a", "a: &a [*a, *a]", "x: !!python/object/apply:os.system ['touch ../CANARY']",
    "x: !!python/module:hostile_canary", "x: !!python/name:hostile_canary.call",
    "x: !!python/object/new:hostile_canary.Callback []", "x: !include /etc/passwd", "model: {}\nmodel: {}",
    "model:\n  lora: {rank: 1, rank: 2}", "? [a, b]\n: 1", "? {a: b}\n: 1", "x: 2024-99-99", "2024-01-01: 1",
    "5: 1", "~: 1", "x: {<<: 5}", "x: &x {<<: *x}", "x: *nowhere", "model:\n\tlora: 1", 'x: "abc', "x: [1, 2",
    "x: !!binary '%%%'", "seed_everything: 190:20:30", "x: !!omap [a: 1, a: 2]", "x: !!set {a, b}", "x: \x07",
    "\x80\x04c", "a: 1\n---\nb: 2", "%YAML 9.9\n---\na: 1", "only words", "- 1\n- 2", "5",
)  # fmt: skip


def texts(draw: random.Random, place: Place) -> Case:
    path = place.copy(f"{draw.choice((VLM, LM))}.yaml", "recipe.yaml")
    kind = draw.choice(("text", "text", "text", "bytes", "bytes", "file", "whole"))
    spoilt = (yaml_text(draw, path), Expect.REFUSED) if kind == "text" else RECIPE.spoil(draw, path, kind)
    text = draw.choice(BUILT[1:] if kind == "bytes" else (*BUILT, *PARSED))
    case = read_by(place, text, spoilt)
    odd = draw.choice(("recipe.yaml", "re cipe.yaml", "[red]recipe.yaml", "recipe\x1b[31m.yaml", "réçipe.yaml"))
    if spoilt[1] is Expect.TAKEN or kind == "file":
        return case
    path.rename(path.with_name(odd))
    words = [odd if word == "recipe.yaml" else word for word in place.words(text)]
    return Case(f"{odd!r} {case.what}", words, case.expect)


def yaml_text(draw: random.Random, path: Path) -> str:
    what = draw.choice((*BOMBS, *TEXTS))
    path.write_bytes(BOMBS.get(what, what).encode() + b"\n")
    return what[:60]


TOUCH = "touch ../CANARY"
SHELL: dict[str, Any] = {"args": TOUCH, "shell": True}
CALLS: dict[str, dict[str, Any]] = {
    "subprocess.Popen": SHELL, "subprocess.run": SHELL, "Popen": SHELL, "os.system": SHELL,
    "hostile_canary.Callback": {}, "hostile_canary.call": {}, "hostile_canary": {}, "evil.Callback": {},
    "..evil.Callback": {}, "work.evil.Callback": {}, "HOSTILE_CANARY.Callback": {}, "hostile_canary:Callback": {},
    "lightning.pytorch.plugins.TorchCheckpointIO": {},
    "builtins.eval": {"source": "open('../CANARY', 'w')"}, "pathlib.Path.touch": {"self": "../CANARY"},
    "importlib.import_module": {"name": "hostile_canary"}, "runpy.run_path": {"path_name": "evil.py"},
    "shutil.rmtree": {"path": "../beside"}, "LambdaCallback": {"setup": "hostile_canary.call"},
    "lightning.pytorch.callbacks.Timer": {"duration": {"class_path": "hostile_canary.Callback"}},
    "lightning.pytorch.loggers.CSVLogger": {"save_dir": {"class_path": "subprocess.Popen", "init_args": SHELL}},
    "yaml.unsafe_load": {"stream": "!!python/object/apply:os.system ['touch ../CANARY']"},
    "subtoken_train.cli.main.main": {"argv": ["recipes", "copy", "tiny_lora_only", "CANARY.yaml"]},
    "subtoken_train.artifact.whole_folder.whole_folder": {"folder": "../beside", "overwrite": True},
}  # fmt: skip
SLOTS = (
    "trainer.strategy trainer.strategy trainer.logger trainer.callbacks trainer.callbacks trainer.plugins "
    "trainer.profiler trainer.accelerator trainer.devices trainer.max_time trainer.default_root_dir trainer.precision "
    "model.backbone.path model.lora model.reducer model.routing model.optimizer model data trainer checkpoint "
    "evaluation early_stopping data.train_file seed_everything data.train model.stage2"
).split()
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Callback:\n    pass\n"


def code(draw: random.Random, place: Place) -> Case:
    """A class or a function with its arguments, where a group, a list or a text belongs."""
    path, slot = draw.choice(list(CALLS)), draw.choice(SLOTS)
    inner = {"class_path": path, "init_args": CALLS[path]}
    outer = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor", "init_args": {"logging_interval": inner}}
    value = draw.choice((inner, inner, {"class_path": path}, {**inner, "dict_kwargs": CALLS[path]}, outer, [inner] * 2))
    place.write("evil.py", EVIL)
    way = draw.choice(("recipe", "recipe", "override", "resume", "export"))
    if way in ("resume", "export"):
        file = place.copy("stopped", "run") / "recipe.yaml"
        text = "export run out" if way == "export" else "fit --config run/recipe.yaml --output_dir run --resume"
    else:
        file, text = place.copy(f"{draw.choice((VLM, LM))}.yaml", "recipe.yaml"), draw.choice(BUILT)
    if way == "override":
        return with_setting(place, text, slot, yaml.safe_dump(value, default_flow_style=True, width=10**6).strip())
    file.write_text(as_yaml(changed(yaml.safe_load(file.read_text()), slot, value)))
    return read_by(place, text, (f"{slot}: {path}", Expect.REFUSED))


GRID = Document(
    {
        "batch_size limit": (0, -1, 1.5), "anchors": ("perhaps",), "out": ("",), "tasks arms": ([],),
        "tasks.0": ("nope", {"name": 5}, {}), "tasks.0.name": ("nope", "../x", "os.system"),
        "tasks.0.source": ("nowhere/at/all", "/dev/null", "", "x" * 5000, "\x00"), "arms.0": ({},),
        "arms.0.adapter": ("", "nowhere/at/all", [5], "x" * 5000, ["", ""]), "arms.0.backbone": ("", "nowhere/at/all"),
        "arms.0.eviction": ("nope", 5, [], {}, "snapkv"), "arms.0.eviction_keep": (0.5, "x", -1, []),
        "arms.0.eviction_every arms.0.prefill_chunk": (0, -1, 1.5, "x", True, []),
        "arms.0.keep_ratio": (0, -1, 2, "x", NAN, []), "arms.0.rerotate": ("x", 5, True, []),
        "arms.0.reducer arms.0.selector arms.0.protocol arms.0.kv_dtype arms.0.scope": CHOICE,
        "arms.0.name": (5, "../x", "a/b", "", ".", "..", []), "arms.0.seed": ("x", 1.5, []), "arms.0.unknown": (1,),
        "arms.0.reducer_options": (5, {"layer": -1}, {"unknown": 1}, []), "arms.0.eviction_options": (5, {"x": 1}, []),
    },
    loose="arms.0.adapter arms.0.backbone tasks.0", needed="tasks arms", notation=YAML,
    ways="odd odd odd odd changed changed bytes whole",
)  # fmt: skip
KEEPS = (0, 0.5, 1, 1.5, "0.5", "0", "20MB", "3tokens", "-3tokens", "NaN", "1e400", "", "5%", HUGE)
RIGHT = (0.5, 1, "0.5", "20MB", "3tokens")


def grids(draw: random.Random, place: Place) -> Case:
    path, kind = place.copy("small_grid.yaml", "grid.yaml"), draw.choice((*["document"] * 9, "text", "eviction"))
    text = "evaluate --config grid.yaml --out results"
    if kind == "document":
        spoilt = (no_file(draw, path), Expect.REFUSED) if draw.random() < 0.05 else GRID.spoil(draw, path)
        return read_by(place, text, spoilt)
    if kind == "text":
        return read_by(place, text, (yaml_text(draw, path), Expect.REFUSED))
    eviction, keep = draw.choice(("snapkv", "knorm", "streaming_llm", "random", "kvcompose")), draw.choice(KEEPS)
    grid = yaml.safe_load(path.read_text())
    grid["arms"][0] |= {"eviction": eviction, "eviction_keep": keep}
    path.write_text(as_yaml(grid))
    expect = Expect.TAKEN if keep in RIGHT else Expect.REFUSED
    reference = evicted(place.work, eviction, keep)
    return Case(f"{eviction} {shown(keep)}", text.split(), expect, ("results",), reference=reference)


def evicted(work: Path, eviction: str, keep: Any) -> Reference:
    def difference(answer: Answer) -> str | None:
        named = json.loads(next((work / "results").rglob("manifest.json")).read_text())["arm"]["eviction"]
        return None if eviction in named or keep == 1 else f"the manifest says {named!r}"

    return difference

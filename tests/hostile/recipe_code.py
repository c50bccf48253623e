"""Recipes that name code: class paths, callables and types at every key that could build one."""

from __future__ import annotations

import random
import shutil
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import LM, VLM
from tests.hostile.recipes import parsing, read, with_key

TOUCH = "touch ../CANARY"
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("subprocess.Popen", {"args": TOUCH, "shell": True}),
    ("subprocess.run", {"args": TOUCH, "shell": True}),
    ("os.system", {"command": TOUCH}),
    ("builtins.eval", {"source": "open('../CANARY', 'w')"}),
    ("builtins.exec", {"source": "import hostile_canary"}),
    ("hostile_canary.Callback", {}),
    ("hostile_canary.call", {}),
    ("hostile_canary", {}),
    ("pathlib.Path.touch", {"self": "../CANARY"}),
    ("pty.spawn", {"argv": ["touch", "../CANARY"]}),
    ("importlib.import_module", {"name": "hostile_canary"}),
    ("runpy.run_path", {"path_name": "evil.py"}),
    ("shutil.rmtree", {"path": "../beside"}),
    ("tempfile.TemporaryDirectory", {"dir": "."}),
    ("lightning.pytorch.callbacks.LambdaCallback", {"setup": "hostile_canary.call"}),
    ("lightning.pytorch.callbacks.Callback", {}),
    ("lightning.pytorch.callbacks.RichProgressBar",
        {"console_kwargs": {"file": {"class_path": "hostile_canary.Callback"}}}),
    ("lightning.pytorch.callbacks.Timer", {"duration": {"class_path": "hostile_canary.Callback"}}),
    ("lightning.pytorch.callbacks.EarlyStopping", {"monitor": {"class_path": "hostile_canary.Callback"}}),
    ("lightning.pytorch.callbacks.ModelCheckpoint", {"dirpath": "../beside"}),
    ("lightning.pytorch.strategies.DeepSpeedStrategy", {"config": {"class_path": "hostile_canary.Callback"}}),
    ("lightning.pytorch.strategies.DDPStrategy", {"process_group_backend": "hostile_canary.call",
        "ddp_comm_hook": "hostile_canary.call"}),
    ("lightning.pytorch.strategies.FSDPStrategy", {"auto_wrap_policy": "hostile_canary.call"}),
    ("lightning.pytorch.strategies.FSDPStrategy", {"auto_wrap_policy": ["hostile_canary.Callback"]}),
    ("lightning.pytorch.loggers.CSVLogger", {"save_dir": {"class_path": "subprocess.Popen",
        "init_args": {"args": TOUCH, "shell": True}}}),
    ("lightning.pytorch.loggers.WandbLogger", {"experiment": "hostile_canary.call"}),
    ("lightning.pytorch.plugins.TorchCheckpointIO", {}),
    ("lightning.pytorch.profilers.AdvancedProfiler", {"dirpath": {"class_path": "hostile_canary.Callback"}}),
    ("torch.load", {"f": "evil.pt", "weights_only": False}),
    ("yaml.unsafe_load", {"stream": "!!python/object/apply:os.system ['touch ../CANARY']"}),
    ("evil.Callback", {}),
    ("..evil.Callback", {}),
    ("work.evil.Callback", {}),
    ("subtoken_train.cli.main.main", {"argv": ["recipes", "copy", "tiny_lora_only", "CANARY.yaml"]}),
    ("subtoken_train.artifact.whole_folder.whole_folder", {"folder": "../beside", "overwrite": True}),
    ("HOSTILE_CANARY.Callback", {}),
    ("hostile_canary:Callback", {}),
    ("Popen", {"args": TOUCH, "shell": True}),
    ("LambdaCallback", {"setup": "hostile_canary.call"}),
)  # fmt: skip
SLOTS = (
    "trainer.strategy", "trainer.strategy", "trainer.logger", "trainer.callbacks", "trainer.callbacks",
    "trainer.plugins",
    "trainer.profiler", "trainer.accelerator", "trainer.devices", "trainer.max_time", "trainer.default_root_dir",
    "trainer.precision",
    "model.backbone.path", "model.lora", "model.reducer", "model.routing", "model.optimizer", "model", "data",
    "trainer", "checkpoint",
    "evaluation", "early_stopping", "data.train_file", "seed_everything", "data.train", "model.stage2", "output_dir",
)  # fmt: skip
PATHS = ("output_dir", "trainer.default_root_dir", "data.train_file", "model.backbone.path")
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Callback:\n    pass\n"


def entry(draw: random.Random) -> tuple[Any, str]:
    """A value that names code, in one of the forms that a parser may take."""
    path, arguments = draw.choice(CALLS)
    form = draw.choice(("whole", "whole", "whole", "dict_kwargs", "bare", "text", "nested", "list"))
    if form == "whole":
        return {"class_path": path, "init_args": arguments}, path
    if form == "dict_kwargs":
        return {"class_path": path, "dict_kwargs": arguments}, f"{path} by dict_kwargs"
    if form == "bare":
        return {"class_path": path}, f"{path} alone"
    if form == "text":
        return path, f"{path} as a text"
    inner = {"class_path": path, "init_args": arguments}
    if form == "list":
        return [inner, inner], f"{path} twice"
    outer = draw.choice((
        "subtoken_train.training.samples.SampleLog", "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.callbacks.LearningRateMonitor", "lightning.pytorch.strategies.DDPStrategy",
    ))  # fmt: skip
    return {
        "class_path": outer,
        "init_args": {draw.choice(("folder", "save_dir", "logging_interval", "name")): inner},
    }, f"{path} inside {outer}"


def named(draw: random.Random) -> tuple[str, Any, str]:
    """A place, what stands there and what it is: no text where a text belongs, no own class in its own place."""
    while True:
        (value, what), slot = entry(draw), draw.choice(SLOTS)
        text = isinstance(value, str) and slot in PATHS
        listed = what.startswith(("lightning.pytorch.callbacks.Model", "lightning.pytorch.strategies.DDP"))
        text = text or (isinstance(value, str) and value.startswith("lightning.") and slot.startswith("trainer."))
        if not text and not (listed and slot.startswith("trainer.")):  # with arguments of their own types
            return slot, value, what


def make(draw: random.Random, place: Place) -> Case:
    """A recipe, or a run's own recipe, that names code."""
    name = draw.choice((VLM, VLM, LM))
    slot, value, what = named(draw)
    recipe = read(place, name)
    if slot in ("trainer.callbacks", "trainer.plugins") and not isinstance(value, list):
        value = [value]
    place.write("evil.py", EVIL)
    way = draw.choice(("parse", "parse", "parse", "override", "resume", "export"))
    words: list[str]
    writes: tuple[str, ...]
    if way in ("resume", "export"):
        run = place.copy("stopped", "run")
        saved = yaml.safe_load((run / "recipe.yaml").read_text())
        (run / "recipe.yaml").write_text(yaml.safe_dump(with_key(saved, slot, value), sort_keys=False))
        words, writes = ["export", "run", "out"], ("out",)
        if way == "resume":
            words, writes = ["fit", "--config", "run/recipe.yaml", "--output_dir", "run", "--resume"], ("run",)
    elif way == "override":
        shutil.copyfile(place.pool / f"{name}.yaml", place.work / "recipe.yaml")
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
        words, writes = parsing(draw, "recipe.yaml", f"--{slot}={text}", built=True)
    else:
        place.write("recipe.yaml", yaml.safe_dump(with_key(recipe, slot, value), sort_keys=False))
        words, writes = parsing(draw, "recipe.yaml")
    return Case(f"{words[0]} {slot}: {what}", words, Expect.REFUSED, writes)

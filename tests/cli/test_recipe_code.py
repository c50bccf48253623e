"""A recipe cannot run code: nothing that it names is imported or built, by no way in and by no command."""

import sys

import pytest
import yaml

from subtoken_train.cli.main import main
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")
CANARY = "recipe_canary"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch SUNG", "shell": True}}
DDP = "lightning.pytorch.strategies.DDPStrategy"
RICH = "lightning.pytorch.callbacks.RichProgressBar"
ZERO = "zero3"
SPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"
CALLBACKS = "lightning.pytorch.callbacks"


@pytest.fixture
def sung(tmp_path, monkeypatch):
    """The file that runs once any of it has run; the current folder holds the canary module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    song = "import pathlib\npathlib.Path('SUNG').touch()\nclass Bird:\n    pass\ndef sing(*a, **k):\n    pass\n"
    (tmp_path / f"{CANARY}.py").write_text(song)
    sys.modules.pop(CANARY, None)
    yield tmp_path / "SUNG"
    sys.modules.pop(CANARY, None)


def at(key, value):
    """A recipe that holds one value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def of(path, **settings):
    return {"class_path": path, "init_args": settings}


WAYS = {
    "strategy by path": at("trainer.strategy", of(f"{CANARY}.Bird")),
    "strategy by text": at("trainer.strategy", f"{CANARY}.Bird"),
    "strategy in a text": at("trainer.strategy", "{class_path: recipe_canary.Bird}"),
    "strategy in a text only libyaml reads": at("trainer.strategy", "{class_path:\trecipe_canary.Bird}"),
    "a process as a setting": at("trainer.strategy", of(DDP, ddp_comm_state=POPEN)),
    "a function as a setting": at("trainer.strategy", of(DDP, ddp_comm_hook=f"{CANARY}.sing")),
    "a class as a setting": at("trainer.strategy", of(DDP, cluster_environment=f"{CANARY}.Bird")),
    "kwargs": at("trainer.strategy", {"class_path": DDP, "dict_kwargs": {"x": POPEN}}),
    "DeepSpeed's config": at("trainer.strategy", of(SPEED, config={"a": POPEN})),
    "our ZeRO's config": at("trainer.strategy", {ZERO: {"config": {"zero_optimization": {"a": POPEN}}}}),
    "our ZeRO's config in a text": at("trainer.strategy", {ZERO: {"config": yaml.safe_dump({"dump_state": POPEN})}}),
    "our ZeRO's config as a file": at("trainer.strategy", {ZERO: {"config": "hostile.yaml"}}),
    "what DeepSpeed loads": at("trainer.strategy", {ZERO: {"config": {"compression_training": {}}}}),
    "callbacks": at("trainer.callbacks", [of(f"{CANARY}.Bird")]),
    "one callback": at("trainer.callbacks", of(f"{CANARY}.Bird")),
    "callbacks, appended": at("trainer.callbacks+", [of(f"{CANARY}.Bird")]),
    "a callback of functions": at("trainer.callbacks", [of(f"{CALLBACKS}.LambdaCallback", setup=f"{CANARY}.sing")]),
    "settings that another group repeats": at(
        "trainer.strategy",
        {"class_path": DDP, "init_args": {"ddp_comm_state": POPEN}, "dict_kwargs": {"ddp_comm_state": None}},
    ),
    "console settings": at("trainer.callbacks", [of(RICH, console_kwargs={"file": POPEN})]),
    "a theme by text": at("trainer.callbacks", [of(RICH, theme=f"{CANARY}.Bird")]),
    "a theme": at("trainer.callbacks", [of(RICH, theme=POPEN)]),
    "a theme's colour": at(
        "trainer.callbacks",
        [of(RICH, theme=of(f"{CALLBACKS}.progress.rich_progress.RichProgressBarTheme", description=POPEN))],
    ),
    "summary settings": at("trainer.callbacks", [of(f"{CALLBACKS}.ModelSummary", summarize_kwargs=POPEN)]),
    "logger": at("trainer.logger", of(f"{CANARY}.Bird")),
    "loggers": at("trainer.logger", [of(f"{CANARY}.Bird")]),
    "tags": at("trainer.logger", of("lightning.pytorch.loggers.MLFlowLogger", tags={"a": POPEN})),
    "profiler": at("trainer.profiler", of(f"{CANARY}.Bird")),
    "profiler's function": at(
        "trainer.profiler", of("lightning.pytorch.profilers.PyTorchProfiler", on_trace_ready=f"{CANARY}.sing")
    ),
    "plugins": at("trainer.plugins", [of(f"{CANARY}.Bird")]),
    "one plugin": at("trainer.plugins", f"{CANARY}.Bird"),
    "accelerator": at("trainer.accelerator", f"{CANARY}.Bird"),
    "in the place of a number": at("trainer.max_steps", POPEN),
    "in the place of a time": at("trainer.max_time", POPEN),
    "the model": at("model", of(f"{CANARY}.Bird")),
    "a group of the model": at("model.backbone", of(f"{CANARY}.Bird")),
    "LoRA": at("model.lora", of(f"{CANARY}.Bird")),
    "LoRA in a text": at("model.lora", "{class_path: recipe_canary.Bird}"),
    "data": at("data", of(f"{CANARY}.Bird")),
    "early stopping": at("early_stopping", of(f"{CANARY}.Bird")),
    "evaluation by text": at("evaluation", f"{CANARY}.Bird"),
    "checkpoints": at("checkpoint", of(f"{CANARY}.Bird")),
    "the seed": {"seed_everything": POPEN},
    "the folder": {"output_dir": POPEN},
    "a dotted key": {"trainer.strategy": of(f"{CANARY}.Bird")},
    "a dotted key below": {"trainer": {"strategy.class_path": f"{CANARY}.Bird"}},
    "another file as config": {"config": "hostile.yaml"},
    "another file as trainer": {"trainer": "hostile.yaml"},
    "another file as strategy": at("trainer.strategy", "hostile.yaml"),
    "another file as callbacks": at("trainer.callbacks", "hostile.yaml"),
    "another file as model": {"model": "hostile.yaml"},
    "where it came from": {"__path__": "hostile.yaml"},
    "where it came from, below": at("trainer.strategy", {"__path__": "x", **of(f"{CANARY}.Bird")}),
    "allowed by the file": {"allow_code": True, **at("trainer.strategy", of(f"{CANARY}.Bird"))},
}


def hostile_file(folder, content):
    """The tiny recipe with ``content`` laid over it, and the file that some of it names."""
    (folder / "hostile.yaml").write_text(yaml.safe_dump({"class_path": f"{CANARY}.Bird", "strategy": POPEN}))
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for key, value in content.items():
        recipe[key] = (
            {**recipe[key], **value} if isinstance(value, dict) and isinstance(recipe.get(key), dict) else value
        )
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def assert_refused(capsys, argv, sung):
    code, err = main(argv), capsys.readouterr().err
    assert code == 2
    assert err.startswith("subtoken-train: error: ")
    assert err.count("\n") == 1
    assert len(err) <= 424
    assert not sung.exists()


@pytest.mark.parametrize("content", WAYS.values(), ids=WAYS.keys())
def test_nothing_that_a_recipe_names_runs(capsys, tmp_path, sung, content):
    assert_refused(capsys, ["check", "--offline", "--config", str(hostile_file(tmp_path, content))], sung)


@pytest.mark.parametrize("tag", ["!!pairs", "!!omap", "!<tag:yaml.org,2002:pairs>"])
def test_tags_that_hide_values_are_refused(capsys, tmp_path, sung, tag):
    config = f"{{dump_state: {tag} [a: {{class_path: {CANARY}.Bird}}]}}"
    (tmp_path / "recipe.yaml").write_text(f"trainer: {{strategy: {{{ZERO}: {{config: {config}}}}}}}\n")
    argv = ["check", "--offline", "--config", str(RECIPE)]
    assert_refused(capsys, [*argv, "--config", "recipe.yaml"], sung)
    assert_refused(capsys, [*argv, f"--trainer.strategy={{{ZERO}: {{config: {config}}}}}"], sung)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch SUNG']", "!include hostile.yaml"])
def test_tags_are_refused(capsys, tmp_path, sung, tag):
    (tmp_path / "recipe.yaml").write_text(f"trainer: {{strategy: {tag}}}\n")
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml"], sung)


OPTIONS = [
    ["--trainer.strategy=recipe_canary.Bird"],
    ["--trainer.strategy", "recipe_canary.Bird"],
    ["--trainer.strategy.class_path=recipe_canary.Bird"],
    ["--trainer.strategy", "{class_path: subprocess.Popen, init_args: {args: touch SUNG, shell: true}}"],
    ["--trainer.strategy", DDP, "--trainer.strategy.ddp_comm_hook", "recipe_canary.sing"],
    ["--trainer.strategy", "DDPStrategy", "--trainer.strategy.init_args.ddp_comm_hook=recipe_canary.sing"],
    ["--trainer.callbacks+=recipe_canary.Bird"],
    ["--trainer.callbacks+", "recipe_canary.Bird"],
    ["--trainer.callbacks+=LambdaCallback", "--trainer.callbacks.setup=recipe_canary.sing"],
    ["--trainer.callbacks=[{class_path: recipe_canary.Bird}]"],
    ["--trainer.logger.class_path", "recipe_canary.Bird"],
    ["--trainer.logger.help=recipe_canary.Bird"],
    ["--trainer.plugins+=recipe_canary.Bird"],
    ["--trainer", "hostile.yaml"],
    ["--model", "hostile.yaml"],
    ["--model.lora.class_path=recipe_canary.Bird"],
    ["--print_config", "--trainer.profiler=recipe_canary.Bird"],
    ["-chostile.yaml"],
    ["--allow-code", "--trainer.strategy=recipe_canary.Bird"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_nothing_that_an_option_names_runs(capsys, tmp_path, sung, options):
    hostile_file(tmp_path, {})
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml", *options], sung)


PARSING = {
    "check": ["check", "--config", "recipe.yaml"],
    "preview": ["preview", "--config", "recipe.yaml"],
    "sweep": ["sweep", "--dry-run", "--config", "recipe.yaml", "--set", "seed_everything=1,2"],
    "fit": ["fit", "--config", "recipe.yaml"],
    "resume": ["fit", "--config", "recipe.yaml", "--resume"],
    "overwrite": ["fit", "--config", "recipe.yaml", "--overwrite"],
    "export": ["export", ".", "OUT"],
}
ATTACKS = ("a process as a setting", "callbacks", "console settings")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", PARSING.values(), ids=PARSING.keys())
def test_every_command_that_reads_a_recipe(capsys, tmp_path, sung, command, attack):
    hostile_file(tmp_path, WAYS[attack])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "subtoken_config.json").write_text("{}")
    assert_refused(capsys, command, sung)


def test_the_values_of_a_sweep(capsys, tmp_path, sung):
    hostile_file(tmp_path, {})
    values = "trainer.strategy=auto,{class_path: recipe_canary.Bird}"
    assert_refused(capsys, ["sweep", "--dry-run", "--config", "recipe.yaml", "--set", values], sung)

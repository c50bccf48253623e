"""A recipe cannot run code: the names that it may give are closed lists, and nothing else is imported or built."""

import dataclasses
import inspect
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from lightning.pytorch import Trainer

from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI, recipe_plan
from subtoken_train.cli.recipe_source import BANDS, KEYS, read_source
from subtoken_train.cli.trainer_parts import KINDS, SETTINGS, named_parts
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.training.strategies import PRESETS
from subtoken_train.typed import SettingsPlan
from tests.support.places import recipe
from tests.support.refusals import refuses
from tests.support.sampling import sampled

RECIPE = recipe("tiny_fastv25_s16k4")
NAMES = [(key, name) for key, kind in KINDS.items() for name in kind.names]


def test_tables_are_complete():
    assert set(SETTINGS) == set(inspect.signature(Trainer).parameters)
    assert set(PRESETS) < set(KINDS["strategy"].names)
    assert set(recipe_plan("fastv", InstructionDataModule).hints) == {*KEYS, *FLAGS}
    assert set(BANDS) < set(KEYS)
    for key, name in NAMES:
        parameters = inspect.signature(KINDS[key].names[name].__init__).parameters
        free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        assert free or set(KINDS[key].settings.get(name, ())) <= set(parameters), name


def _leaves(hint: Any):
    if dataclasses.is_dataclass(hint):
        for inner in get_type_hints(hint).values():
            yield from _leaves(inner)
    elif get_origin(hint) is not Literal and get_args(hint):
        for inner in get_args(hint):
            yield from _leaves(inner)
    else:
        yield get_origin(hint) or hint


@pytest.mark.parametrize("data", [InstructionDataModule, CorpusDataModule, RecallDataModule])
def test_every_key_has_a_plain_type(data):
    """What stands as it is, is checked against a closed list."""
    plain = {int, float, str, bool, Path, NoneType, None, Literal, dict, list, tuple, ..., Any}
    bands = [recipe_plan("fastv", data)]
    for plan in bands:
        for name, hint in plan.hints.items():
            if isinstance(hint, SettingsPlan):
                bands.append(hint)
            else:
                assert (hint is Any) == (name in (*KINDS, "plugins", "profiler")), name
                assert set(_leaves(hint)) <= plain, name


@sampled(("key", "name"), NAMES, every=4, ids=[name for _, name in NAMES])
def test_a_saved_recipe_passes_again(tmp_path, monkeypatch, key, name):
    monkeypatch.setattr("subtoken_train.cli.recipe.find_spec", lambda package: True)
    overlay, saved = tmp_path / "overlay.yaml", tmp_path / "recipe.yaml"
    spec = {name: dict.fromkeys(KINDS[key].settings.get(name, ())[:1], 1)}
    spec = {name: {"config": {"steps_per_print": 1}}} if name.startswith("zero") else spec
    overlay.write_text(yaml.safe_dump({"trainer": {key: [spec] if KINDS[key].many else spec}}))
    first = RecipeCLI(["--config", str(RECIPE), "--config", str(overlay)])
    (tmp_path / "recipe.yaml.partial").symlink_to(overlay)
    before = overlay.read_text()
    first.save_recipe(saved)
    assert (overlay.read_text(), saved.is_symlink()) == (before, False)  # a link there leads nowhere
    assert RecipeCLI(["--config", str(saved)]).resolved() == first.resolved()


def test_recipes_of_version_0_1_are_read_and_flags_are_no_keys(tmp_path):
    text, old = RECIPE.read_text(encoding="utf-8"), tmp_path / "recipe.yaml"
    old.write_text(f"{text}\noverwrite: false\nresume: false\nprivate: false\npush_to_hub: null\n")
    assert RecipeCLI(["--config", str(old)]).resolved() == RecipeCLI(["--config", str(RECIPE)]).resolved()
    for flag in FLAGS:
        old.write_text(f"{text}\n{flag}: true\n")
        refuses(f"{flag}: True; that belongs on the command line", read_source, ["--config", str(old)])


UNLISTED = {
    "logger lightning.pytorch.loggers.WandbLogger": "write wandb",
    "strategy {class_path: lightning.pytorch.strategies.DDPStrategy}": "names no class; write auto, or give your own",
    "logger {wandb: {experiment: x}}": "experiment",
    "logger {wandb: {project: {a: b}}}": "one value",
    "logger [wandb, wandb]": "twice",
    "logger weights_and_biases": "unknown trainer.logger",
    "logger 3": "write a name",
    "logger tensorboard": "leave it out: every run logs to CSV",
    "callbacks {class_path: lightning.pytorch.callbacks.EarlyStopping}": "write the group early_stopping",
    "callbacks [rich_model_summary]": "'rich_model_summary'; write trainer.enable_model_summary: true",
    "strategy {zero2: {config: {gradient_clipping: 1}}}": "'gradient_clipping'; write it in trainer.gradient_clip_val",
}


@pytest.mark.parametrize("given", UNLISTED)
def test_what_is_not_listed_is_refused_with_what_to_write(given):
    refuses(UNLISTED[given], named_parts, given.partition(" ")[0], yaml.safe_load(given.partition(" ")[2]))


CANARY = "recipe_canary"
SINGER = f"{CANARY}.Bird"
BIRD = {"class_path": SINGER}
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch SUNG", "shell": True}}


@pytest.fixture
def sung(tmp_path, monkeypatch):
    """The file that stands once any of it has run; the current folder holds the canary module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    song = "import pathlib\npathlib.Path('SUNG').touch()\nclass Bird:\n    pass\ndef sing(*a, **k):\n    pass\n"
    (tmp_path / f"{CANARY}.py").write_text(song)
    sys.modules.pop(CANARY, None)
    yield tmp_path / "SUNG"
    assert CANARY not in sys.modules


WAYS = [
    *((f"trainer.{key}", BIRD) for key in ("strategy", "callbacks", "logger", "profiler", "plugins")),
    *((key, BIRD) for key in ("model", "model.backbone", "model.lora", "data", "early_stopping", "checkpoint")),
    *((key, POPEN) for key in ("trainer.max_steps", "trainer.max_time", "seed_everything", "output_dir")),
    *((key, "hostile.yaml") for key in ("trainer", "config", "__path__")),
    *(
        (key, SINGER)
        for key in ("trainer.strategy", "trainer.accelerator", "trainer.strategy.class_path", "evaluation")
    ),
    ("trainer.strategy", "{class_path:\trecipe_canary.Bird}"),
    ("trainer.strategy", {"ddp": {"ddp_comm_hook": f"{CANARY}.sing"}}),
    ("trainer.strategy", {"ddp": {"process_group_backend": POPEN}}),
    ("trainer.strategy", {"zero3": {"config": "hostile.yaml"}}),
    ("trainer.strategy", {"zero3": {"config": {"compression_training": {}}}}),
    ("trainer.callbacks", [BIRD]),
    ("trainer.callbacks", [{"learning_rate": {"logging_interval": POPEN}}]),
    ("trainer.logger", [{"mlflow": {"tracking_uri": POPEN}}]),
    ("model.lora", "{class_path: recipe_canary.Bird}"),
    ("allow_code", True),
    ("output_dir", "x" * 5000),
    ("output_dir", "[" * 3000),
]


def hostile_file(folder, key="allow_code", value=False):
    """The tiny recipe with a value laid over it, and the file that some values name."""
    (folder / "hostile.yaml").write_text(yaml.safe_dump(BIRD))
    content = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    if value is not False:
        *groups, last = key.split(".")
        band = content
        for group in groups:
            band = band.setdefault(group, {})
        band[last] = {**band[last], **value} if isinstance(value, dict) and isinstance(band.get(last), dict) else value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def assert_refused(capsys, argv, sung):
    code, err = main(argv), capsys.readouterr().err
    assert code == 2
    assert err.startswith("subtoken-train: error: ")
    assert err.count("\n") == 1
    assert len(err) <= 424
    assert not sung.exists()


CHECK = ["check", "--offline", "--config", "recipe.yaml"]


@pytest.mark.parametrize(("key", "value"), WAYS, ids=[f"{i} {key}" for i, (key, _) in enumerate(WAYS)])
def test_nothing_that_a_recipe_names_runs(capsys, tmp_path, sung, key, value):
    hostile_file(tmp_path, key, value)
    assert_refused(capsys, CHECK, sung)


LINES = (
    "preview --config recipe.yaml", "fit --config recipe.yaml --resume", "fit --config recipe.yaml --overwrite",
    "export . OUT", "sweep --dry-run --config recipe.yaml --set seed_everything=1,2",
    *(f"check --offline --config recipe.yaml {option}" for option in (
        f"--trainer.strategy={SINGER}", f"--trainer.callbacks+={SINGER}", f"--trainer.logger.help={SINGER}",
        "--trainer hostile.yaml", f"--model.lora.class_path={SINGER}", f"--print_config --trainer.profiler={SINGER}",
    )),
)  # fmt: skip
"""Commands that read a recipe with a class in its callbacks, and options that name one."""


@pytest.mark.parametrize("line", LINES)
def test_nothing_that_a_command_line_names_runs(capsys, tmp_path, sung, line):
    hostile_file(tmp_path, *(() if line.startswith("check") else ("trainer.callbacks", [BIRD])))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "subtoken_config.json").write_text("{}")
    assert_refused(capsys, line.split(), sung)

"""What ``fit`` says to a wrong recipe, option or value, and when training ends early; a recipe cannot run code."""

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from lightning.pytorch import Trainer

from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.fit_course import compare_recipes, train
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI, recipe_plan
from subtoken_train.cli.recipe_source import BANDS, KEYS, read_source
from subtoken_train.cli.trainer_parts import KINDS, SETTINGS, named_parts
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.outputs import write_whole
from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_checkpoints import RunStopped, interrupted
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import PRESETS
from subtoken_train.typed import SettingsPlan
from tests.hostile.grammar import changed
from tests.support import commands
from tests.support.chats import talk
from tests.support.places import recipe
from tests.support.refusals import refuses
from tests.support.sampling import sampled

RECIPE = recipe("tiny_fastv25_s16k4")


def refused(capsys, tmp_path, *argv, config=RECIPE):
    """Run a fit that must fail before it starts; the message without its prefix."""
    line = commands.refused(capsys, "fit", "--config", config, "--output_dir", tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()
    return line


IN_A_RECIPE = [
    ("output_dir:", "output_dirr:", "unknown key 'output_dirr'. Did you mean 'output_dir'?"),
    ("  reducer:", "  reducr:", "unknown key 'model.reducr'. Did you mean 'model.reducer'?"),
    (" learning_rate:", " lr:", "unknown key 'model.optimizer.lr'. Allowed in model.optimizer: final_fraction"),
    ("3.0e-3", "abc", "model.optimizer.learning_rate is 'abc'; it must be a number"),
    ("num_groups: 16", "num_groups: 1.5", "model.routing.num_groups is 1.5; it must be a whole number"),
    ("schedule: cosine", "schedule: cosin", "unknown model.optimizer.schedule 'cosin'. Did you mean 'cosine'?"),
    ("train_file:", "val_file:", "data.train_file is not set, and has no default"),
]


@pytest.mark.parametrize(("old", "new", "message"), IN_A_RECIPE)
def test_mistakes_in_a_recipe(capsys, tmp_path, old, new, message):
    text = RECIPE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new))
    line = refused(capsys, tmp_path, config=tmp_path / "mine.yaml")
    assert message in line
    assert line.endswith("'subtoken-train fit --help' lists the keys, with types and defaults")


NO_RECIPE = {
    "syntax": (b"model: [1, 2\ndata: 3\n", "line 2, column 5: invalid YAML (expected ',' or ']', but got ':')"),
    "empty": (b"", "has no keys; a recipe has the groups model, data and trainer"),
    "bytes": (b"\xff\xfe", "is not UTF-8 (byte 0)"),
}


@pytest.mark.parametrize(("content", "message"), NO_RECIPE.values(), ids=NO_RECIPE)
def test_files_that_are_no_recipe(capsys, tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    line = refused(capsys, tmp_path, config=path)
    assert line.startswith(str(path))
    assert message in line
    assert ("lists the keys" in line) == (message != "is not UTF-8 (byte 0)")


def ended(error, tmp_path, rank=0):
    """Training that ends with ``error`` in one process; its exit code."""

    def fit(*args, **kwargs):
        assert kwargs["weights_only"] is True
        raise error

    trainer = SimpleNamespace(fit=fit, is_global_zero=rank == 0, global_step=0)
    cli = SimpleNamespace(trainer=trainer, model=None, datamodule=None, output_dir=tmp_path)
    return train(cli, None, RunFolder(tmp_path))


FULL = OSError(28, "No space left on device", "m.csv")
ENDS = [
    (interrupted(2, "after step 5"), 130, "subtoken-train: SIGINT: stopped after step 5\n"),
    (interrupted(15, "after step 5"), 143, "subtoken-train: SIGTERM: stopped after step 5\n"),
    (RunStopped("the disk"), 1, "subtoken-train: the disk\n"),
    (FULL, 1, "stopped: No space left on device: m.csv; nothing was lost: make room, or"),
    (ConnectionError("api.wandb.ai"), 1, "subtoken-train: stopped: api.wandb.ai\n"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
def test_one_message_names_the_last_good_checkpoint(tmp_path, capsys, error, code, words):
    assert ended(error, tmp_path) == code
    said = capsys.readouterr().err
    assert words in said
    assert "no checkpoint was written; start again with the same command\n" in said
    seal(begin(tmp_path / "checkpoints", 3), Marker(3, 1, "X", {}))
    ended(error, tmp_path)
    said = capsys.readouterr().err
    assert f"last good checkpoint: {tmp_path}/checkpoints/step-3\n" in said
    assert f"continue with: subtoken-train fit --config {tmp_path}/recipe.yaml --resume\n" in said
    assert said.count("\n") == 4


def test_other_errors_keep_their_traceback_and_user_errors_their_words(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="bug"):
        ended(RuntimeError("bug"), tmp_path)
    assert "stopped by an error" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        ended(FileNotFoundError("a.png"), tmp_path)
    assert capsys.readouterr().err == ""


def test_the_other_processes_of_a_run_that_stops_say_nothing(tmp_path, capsys):
    assert ended(interrupted(15, "after step 5"), tmp_path, rank=1) == 0
    assert capsys.readouterr().err == ""
    assert ended(interrupted(15, "at once", alone=True), tmp_path, rank=1) == 143
    assert ended(FULL, tmp_path, rank=1) == 1


SAVED = {
    "seed_everything": 0,
    "output_dir": "runs/a",
    "model": {
        "backbone": {"path": "a", "dtype": "float32"},
        "routing": {"selector": "linear", "kept_groups": 4},
        "optimizer": {"learning_rate": 0.1},
        "reducer": {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 16},
    },
    "data": {"train_file": "a.json", "batch_size": 8, "seed": 0, "num_workers": 0},
    "trainer": {"max_steps": 10, "devices": 1, "precision": None, "accumulate_grad_batches": 1},
}


def compared(tmp_path, before, now):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    return compare_recipes(tmp_path / "recipe.yaml", yaml.safe_dump(now))


def test_what_may_change_and_what_is_noted(tmp_path):
    free = {"output_dir": "b", "trainer.devices": 2, "model.backbone.path": "x", "data.train_file": "x.json"}
    for key, value in {**free, "data.num_workers": 4, "data.batch_size": 4}.items():
        assert compared(tmp_path, SAVED, changed(SAVED, key, value)) == ""
    assert compared(tmp_path, SAVED, changed(SAVED, "trainer.max_steps", 20)) == "trainer.max_steps: 10, here 20"
    assert compared(tmp_path, {key: value for key, value in SAVED.items() if key not in ("model", "data")}, SAVED) == ""
    all_reducers = {**SAVED["model"]["reducer"], "stage": "embeds", "layer": 2, "seed": 0}
    assert compared(tmp_path, changed(SAVED, "model.reducer", all_reducers), SAVED) == ""  # as version 0.1 saved it


DECISIVE = {"seed_everything": 1, "model.backbone.dtype": "bfloat16", "model.optimizer.learning_rate": 0.2}
DECISIVE |= {"data.seed": 1, "trainer.precision": "bf16-mixed", "trainer.accumulate_grad_batches": 2}
DECISIVE |= {"model.reducer.page_size": 8}


@pytest.mark.parametrize(("key", "value"), DECISIVE.items())
def test_what_may_not(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"another recipe \({key}: .*, here {value}\); resume with .*recipe.yaml"):
        compared(tmp_path, SAVED, changed(SAVED, key, value))


def test_groups_that_are_off_and_many_differences(tmp_path):
    refuses(r"model.routing: set, here None", compared, tmp_path, SAVED, changed(SAVED, "model.routing", None))
    other = changed(SAVED, "model.routing", {"selector": 1, "kept_groups": 1})
    other |= {"seed_everything": 1, "data": {**SAVED["data"], "seed": 1}}
    other["model"]["backbone"]["dtype"] = "x"
    refuses("; and 1 more", compared, tmp_path, SAVED, other)


STARTED = "training would start here"
VALUES = """
    model.lora.rank=1000000 model.reducer.keep_ratio=.nan model.reducer.layer=99 data.max_length=0
    data.max_length=99999999999 data.batch_size=99999999999 data.num_workers=100000 trainer.limit_train_batches=0
    trainer.val_check_interval=2.5 trainer.devices=[0] trainer.devices=[0,0] trainer.strategy=zero2
    model.backbone.max_pixels=-1 model.reducer.window=-1 model.reducer.page_size=0 model.routing.seed=-1
    model.optimizer.router_learning_rate=.nan data.val_batch_size=0 trainer.max_epochs=0 trainer.min_steps=-1
    trainer.max_time=soon trainer.limit_val_batches=-1 trainer.num_sanity_val_steps=-2 trainer.profiler=fast
    trainer.precision=transformer-engine trainer.enable_checkpointing=false trainer.barebones=true
    early_stopping.monitor=val/loss private push_to_hub=no/such/name
"""
"""What the drawn recipes of tests/hostile do not try."""
GROUPS = ["early_stopping={monitor: eval/accuracy, patience: 0}", "evaluation={data: nowhere.json, limit: 0}"]
GROUPS += ["evaluation={data: nowhere.json}", "trainer.callbacks={learning_rate: {logging_interval: soon}}"]
REFUSED = [f"--{each}" for each in (*VALUES.split(), *GROUPS)]


def stopped(*args, **settings):
    raise ValueError(STARTED)


def said(capsys, words):
    code, err = main(words), capsys.readouterr().err
    return code, [line for line in err.splitlines() if line.startswith("subtoken-train: error")]


@sampled("value", REFUSED, every=8)
def test_both_refuse_it_in_the_same_words(capsys, tmp_path, monkeypatch, value):
    monkeypatch.setattr(Trainer, "fit", stopped)
    (tmp_path / "records.json").write_text(json.dumps([{"conversations": talk("is", "7")}] * 64))
    argv = ["--config", str(RECIPE), "--data.train_file=records.json", "--output_dir=run", value]
    (code, lines), (checked, same) = (said(capsys, [command, *argv]) for command in ("fit", "check"))
    assert (code, checked) == (2, 2)
    assert lines == same
    assert len(lines) == 1
    assert len(lines[0]) <= 424
    assert "Subtypes" not in lines[0]
    assert not Path("run").exists()


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
    write_whole(saved, first.recipe_text())
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


@pytest.mark.parametrize(("key", "value"), WAYS, ids=[f"{i} {key}" for i, (key, _) in enumerate(WAYS)])
def test_nothing_that_a_recipe_names_runs(capsys, tmp_path, sung, key, value):
    hostile_file(tmp_path, key, value)
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml"], sung)


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

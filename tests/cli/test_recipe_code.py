"""A recipe cannot run code: nothing that it names is imported or built, by no way in and by no command."""

import sys

import pytest
import yaml

from subtoken_train.cli.main import main
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")
CANARY = "recipe_canary"
BIRD = {"class_path": f"{CANARY}.Bird"}
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch SUNG", "shell": True}}


@pytest.fixture
def sung(tmp_path, monkeypatch):
    """The file that runs once any of it has run; the current folder holds the canary module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    song = "import pathlib\npathlib.Path('SUNG').touch()\nclass Bird:\n    pass\ndef sing(*a, **k):\n    pass\n"
    (tmp_path / f"{CANARY}.py").write_text(song)
    sys.modules.pop(CANARY, None)
    yield tmp_path / "SUNG"
    assert CANARY not in sys.modules


WAYS = {
    **dict.fromkeys(
        ("trainer.strategy", "trainer.callbacks", "trainer.logger", "trainer.profiler", "trainer.plugins"), BIRD
    ),
    "trainer.strategy ": f"{CANARY}.Bird",
    "trainer.strategy  ": "{class_path:\trecipe_canary.Bird}",
    "trainer.strategy   ": {"ddp": {"ddp_comm_hook": f"{CANARY}.sing"}},
    "trainer.strategy    ": {"ddp": {"process_group_backend": POPEN}},
    "trainer.strategy     ": {"zero3": {"config": "hostile.yaml"}},
    "trainer.strategy      ": {"zero3": {"config": {"compression_training": {}}}},
    "trainer.callbacks ": [BIRD],
    "trainer.callbacks  ": [{"rich_progress": {"theme": POPEN}}],
    "trainer.logger ": [{"mlflow": {"tracking_uri": POPEN}}],
    "trainer.accelerator": f"{CANARY}.Bird",
    "trainer.max_steps": POPEN,
    "trainer.max_time": POPEN,
    "trainer": "hostile.yaml",
    "trainer.strategy.class_path": f"{CANARY}.Bird",
    "model": BIRD,
    "model.backbone": BIRD,
    "model.lora": BIRD,
    "model.lora ": "{class_path: recipe_canary.Bird}",
    "data": BIRD,
    "early_stopping": BIRD,
    "evaluation": f"{CANARY}.Bird",
    "checkpoint": BIRD,
    "seed_everything": POPEN,
    "output_dir": POPEN,
    "config": "hostile.yaml",
    "__path__": "hostile.yaml",
    "allow_code": True,
}


def hostile_file(folder, key="allow_code", value=False):
    """The tiny recipe with a value laid over it, and the file that some values name."""
    (folder / "hostile.yaml").write_text(yaml.safe_dump(BIRD))
    content = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    if value is not False:
        *groups, last = key.strip().split(".")
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


@pytest.mark.parametrize(("key", "value"), WAYS.items(), ids=WAYS.keys())
def test_nothing_that_a_recipe_names_runs(capsys, tmp_path, sung, key, value):
    hostile_file(tmp_path, key, value)
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml"], sung)


@pytest.mark.parametrize("tag", ["!!pairs []", "!!python/object/apply:os.system ['touch SUNG']", "!include x.yaml"])
def test_tags_are_refused(capsys, tmp_path, sung, tag):
    (tmp_path / "recipe.yaml").write_text(f"trainer: {{strategy: {tag}}}\n")
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml"], sung)


OPTIONS = [
    ["--trainer.strategy=recipe_canary.Bird"],
    ["--trainer.strategy.class_path=recipe_canary.Bird"],
    ["--trainer.strategy", "{class_path: subprocess.Popen, init_args: {args: touch SUNG, shell: true}}"],
    ["--trainer.callbacks+=recipe_canary.Bird"],
    ["--trainer.callbacks=[{class_path: recipe_canary.Bird}]"],
    ["--trainer.logger.help=recipe_canary.Bird"],
    ["--trainer", "hostile.yaml"],
    ["--model.lora.class_path=recipe_canary.Bird"],
    ["--print_config", "--trainer.profiler=recipe_canary.Bird"],
    ["-chostile.yaml"],
    ["--allow-code", "--trainer.strategy=recipe_canary.Bird"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_nothing_that_an_option_names_runs(capsys, tmp_path, sung, options):
    hostile_file(tmp_path)
    assert_refused(capsys, ["check", "--offline", "--config", "recipe.yaml", *options], sung)


PARSING = {
    "check": ["check", "--config", "recipe.yaml"],
    "preview": ["preview", "--config", "recipe.yaml"],
    "sweep": ["sweep", "--dry-run", "--config", "recipe.yaml", "--set", "seed_everything=1,2"],
    "resume": ["fit", "--config", "recipe.yaml", "--resume"],
    "overwrite": ["fit", "--config", "recipe.yaml", "--overwrite"],
    "export": ["export", ".", "OUT"],
}


@pytest.mark.parametrize("command", PARSING.values(), ids=PARSING.keys())
def test_every_command_that_reads_a_recipe(capsys, tmp_path, sung, command):
    hostile_file(tmp_path, "trainer.callbacks", [BIRD])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "subtoken_config.json").write_text("{}")
    assert_refused(capsys, command, sung)


def test_the_values_of_a_sweep(capsys, tmp_path, sung):
    hostile_file(tmp_path)
    values = "trainer.strategy=auto,{class_path: recipe_canary.Bird}"
    assert_refused(capsys, ["sweep", "--dry-run", "--config", "recipe.yaml", "--set", values], sung)

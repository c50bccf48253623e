"""The package of CONTRIBUTING.md, installed: its methods are listed, not imported for a list, and run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evictions import EVICTIONS
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.load import load_family
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import find_recipe
from subtoken_train.types import Region
from tests.support.eval_runs import ADAPTERS
from tests.support.helpers import compress, make_batch

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (more_methods/\w+\.py)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
(ENTRIES,) = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
ADDED = {"oldest": EVICTIONS, "leading": REDUCERS, "arcee": FAMILIES, "capitals": TASKS}


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith("more_methods.")}


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    """``more_methods``, as pip would install it; nothing of it is known before and after."""
    root = tmp_path / "site"
    metadata = root / "more_methods-1.0.dist-info"
    (root / "more_methods").mkdir(parents=True)
    metadata.mkdir()
    (root / "more_methods" / "__init__.py").write_text("")
    for name, code in FILES.items():
        (root / name).write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: more_methods\nVersion: 1.0\n")
    entries = re.sub(r'\[project\.entry-points\."([\w.]+)"\]', r"[\1]", ENTRIES).replace('"', "")
    (metadata / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(root)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name, registry in ADDED.items():
        vars(registry).pop("_installed", None)
        registry._classes.pop(name, None)
    for name in ("more_methods", *imported()):
        sys.modules.pop(name, None)


def test_the_text_shows_one_of_each():
    assert {f"more_methods/{name}.py" for name in ADDED} == FILES.keys()


def test_names_are_listed_and_nothing_is_imported(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    assert "oldest" in out
    assert "leading" in out
    assert all(name in registry and name in list(registry) for name, registry in ADDED.items())
    assert main(["data", "capital"]) == 2
    assert "Did you mean 'capitals'?" in capsys.readouterr().err
    assert main(["data", "capitals", "--option", "time=3"]) == 2
    assert "unknown option of task capitals 'time'. Did you mean 'times'?" in capsys.readouterr().err
    assert imported() == {"more_methods.capitals"}


@pytest.mark.parametrize("line", ["eviction: oldst", "reducer: leadin"])
def test_a_misspelt_name_in_a_grid_leads_to_the_nearest(tmp_path, capsys, line):
    keep = "keep_ratio: 0.5" if line.startswith("reducer") else "eviction_keep: 0.5"
    arm = f"  - backbone: checkpoints/tiny-llava\n    {line}\n    {keep}\n"
    (tmp_path / "grid.yaml").write_text(f"arms:\n{arm}tasks: [capitals]\nout: {tmp_path / 'out'}\n")
    assert main(["evaluate", "--config", str(tmp_path / "grid.yaml")]) == 2
    near = {"eviction: oldst": "oldest", "reducer: leadin": "leading"}[line]
    assert f"Did you mean {near!r}?" in capsys.readouterr().err


def test_the_eviction_compresses_a_cache(capsys):
    prompt = "one two three four five six seven eight nine ten. " * 4
    argv = ["--backbone", "checkpoints/tiny-llama", "--prompt", prompt, "--max-new-tokens", "2"]
    assert main(["generate", *argv, "--eviction", "oldest", "--eviction-keep", "0.5"]) == 0, capsys.readouterr().err
    assert "oldest" not in capsys.readouterr().err


@pytest.mark.slow
@torch.no_grad()
def test_the_reducer_shortens_a_pass_and_is_checked_in_a_recipe(tiny_family, tmp_path):
    batch = make_batch([(1, 9)])
    kept = compress(tiny_family, name="leading", keep_ratio=0.25).run(batch).rows
    assert (batch.regions_BN == Region.VISUAL).sum() == 64
    assert (kept.regions_BM == Region.VISUAL).sum() == 16
    recipe = yaml.safe_load(find_recipe("tiny_fastv25_s16k4").read_text())
    recipe["model"]["reducer"] = {"name": "leading", "keep_ratio": 0.5, "last": True}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    cli = RecipeCLI(["--config", str(tmp_path / "mine.yaml")])
    assert cli.model.reducer_config == REDUCERS["leading"](keep_ratio=0.5, last=True)
    assert cli.resolved()["model"]["reducer"] == {**recipe["model"]["reducer"], "round_up": False}
    with pytest.raises(ValueError, match=r"Allowed in model.reducer: keep_ratio, last, matches, name, round_up"):
        RecipeCLI(["--config", str(tmp_path / "mine.yaml"), "--model.reducer.layer=2"])


def test_the_family_is_loaded_and_answers(tmp_path, capsys):
    from transformers import ArceeConfig, ArceeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1280, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "arcee"
    ArceeForCausalLM(ArceeConfig(**sizes, **heads)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("checkpoints/tiny-llama")) / name, folder)
    family = load_family(BackboneConfig(str(folder)))
    assert type(family) is FAMILIES["arcee"]
    assert family.shape.num_layers == 2
    argv = ["--backbone", str(folder), "--prompt", "a b c " * 30, "--max-new-tokens", "2"]
    assert main(["generate", *argv, "--eviction", "oldest", "--eviction-keep", "8tokens"]) == 0, capsys.readouterr().err


def test_the_task_is_answered_in_a_grid(tmp_path):
    arm = ArmSpec(adapter=f"{ADAPTERS}/tinylm_lora_only", eviction="oldest", eviction_keep=0.5)
    tasks = (TaskSpec("capitals", options={"times": 2}),)
    (folder,) = run_grid(Grid(arms=(arm,), tasks=tasks, out=tmp_path / "out", batch_size=2, anchors="none", limit=2))
    assert list(read_samples(folder)) == ["France", "Japan"]

"""Odd values of a recipe's keys: ``check`` and ``fit`` say the same, and nothing is touched."""

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from subtoken_train.cli.main import main
from tests.support.places import recipe
from tests.support.sampling import sampled

STARTED = "training would start here"
VALUES = {
    "seed_everything": "-1 false 99999999999",
    "model.lora.rank": "0 1000000",
    "model.lora.dropout": ".nan 1",
    "model.reducer.keep_ratio": f"{10**400} .nan 1.5",
    "model.reducer.layer": "0 99",
    "model.routing.balance_weight": ".nan -.inf",
    "model.optimizer.learning_rate": ".inf -1",
    "model.optimizer.weight_decay": "-1 .nan",
    "data.batch_size": "0 99999999999",
    "data.num_workers": "-1 100000",
    "data.max_length": "0 99999999999",
    "trainer.max_steps": "-5 0",
    "trainer.accumulate_grad_batches": "0 -2",
    "trainer.gradient_clip_val": ".nan -1",
    "trainer.limit_train_batches": "0 1.5 .nan",
    "trainer.val_check_interval": "0 2.5",
    "trainer.devices": "0 -3 [0] [0,0] x",
    "trainer.strategy": "dddp zero2",
}
OTHERS = """
    output_dir.x=1 model=5 model.reducer=[] model.unknown={} model.lora.rank= model.lora.alpha=0 data=[1]
    model.backbone.max_pixels=-1 model.reducer.window=-1 model.reducer.page_size=0 model.routing.kept_groups=0
    model.routing.seed=-1 model.optimizer.router_learning_rate=.nan model.optimizer.warmup_steps=-3
    model.optimizer.final_fraction=2 data.val_batch_size=0 data.seed=-1 checkpoint.every_n_train_steps=0
    checkpoint.keep_last=-1 trainer.max_epochs=0 trainer.min_steps=-1 trainer.max_time=soon
    trainer.gradient_clip_algorithm=mean trainer.limit_val_batches=-1 trainer.check_val_every_n_epoch=0
    trainer.num_sanity_val_steps=-2 trainer.log_every_n_steps=-1 trainer.num_nodes=0
    trainer.precision=transformer-engine trainer.accelerator=cpuu trainer.profiler=fast
    trainer.enable_checkpointing=false trainer.barebones=true early_stopping.monitor=val/loss
    private push_to_hub=no/such/name
"""
GROUPS = ["early_stopping={monitor: eval/accuracy, patience: 0}", "evaluation={data: nowhere.json, limit: 0}"]
GROUPS += ["evaluation={data: nowhere.json}"]
REFUSED = [f"--{key}={value}" for key, values in VALUES.items() for value in values.split()]
REFUSED += [f"--{each}" for each in (*OTHERS.split(), *GROUPS)]
TAKEN = """
    --trainer.max_steps=-1 --trainer.gradient_clip_val=0 --trainer.limit_train_batches=1.0
    --trainer.max_time=00:01:00:00 --trainer.devices=1 --trainer.callbacks=learning_rate
    --model.optimizer.learning_rate=1e-4 --model.lora=null --model.routing=null --trainer.gradient_clip_val=null
    --data.num_workers=64
"""


def stopped(*args, **settings):
    raise ValueError(STARTED)


@pytest.fixture
def argv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", stopped)
    turns = [{"from": "human", "value": "is"}, {"from": "gpt", "value": "7"}]
    (tmp_path / "records.json").write_text(json.dumps([{"conversations": turns}] * 64))
    return ["--config", str(recipe("tiny_fastv25_s16k4")), "--data.train_file=records.json", "--output_dir=run"]


def said(capsys, words):
    code, err = main(words), capsys.readouterr().err
    return code, [line for line in err.splitlines() if line.startswith("subtoken-train: error")]


@sampled("value", REFUSED, every=8)
def test_both_refuse_it_in_the_same_words(capsys, argv, value):
    (code, lines), (checked, same) = (said(capsys, [command, *argv, value]) for command in ("fit", "check"))
    assert (code, checked) == (2, 2)
    assert lines == same
    assert len(lines) == 1
    assert len(lines[0]) <= 424
    assert "Subtypes" not in lines[0]
    assert not Path("run").exists()


@sampled("value", TAKEN.split(), every=3)
def test_both_take_it(capsys, argv, value):
    assert main(["check", *argv, value]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ready: ")
    assert said(capsys, ["fit", *argv, value]) == (2, [f"subtoken-train: error: {STARTED}"])

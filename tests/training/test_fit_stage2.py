"""Two-stage fits on a random tiny LLaVA: stage 1 stays byte for byte, the rest trains, stops and goes on exactly."""

import csv
from pathlib import Path

import pytest
import torch

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from tests.support.commands import refused
from tests.support.helpers import interrupted_fit, last_state, save_backbone
from tests.support.run_folders import adapter_tensors, same_tensors
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.training_memory import save_language_model, text_recipe

OUTPUT = "--model.stage2.output_lora={rank: 4, alpha: 8, dropout: 0.1}"


@pytest.fixture
def second(tiny_run, tmp_path):
    """argv of a stage-2 fit on a stage 1 that has just been trained for two steps in ``<tmp>/first``."""
    assert main(tiny_run("--trainer.max_steps=2", "--model.routing=null", output="first")) == 0

    def argv(*extra: str, output: str = "second") -> list[str]:
        folder = tmp_path / "first" / "adapter"
        return tiny_run("--model.lora=null", f"--model.stage2.adapter={folder}", *extra, output=output)

    return argv


@sampled(
    ("extra", "lora_tensors", "router_tensors"),
    [
        ([], 0, 8),
        (["--model.routing.selector=mlp", "--model.gradient_checkpointing=true"], 0, 16),
        ([OUTPUT], 8, 8),
        ([OUTPUT, "--model.gradient_checkpointing=true", "--trainer.precision=bf16-mixed"], 8, 8),
        ([OUTPUT, "--model.reducer.stage=decoder", "--trainer.accumulate_grad_batches=2"], 8, 4),
        ([OUTPUT, "--model.routing.selector=value_norm"], 8, 0),
    ],
    every=6,
    ids=["linear", "mlp-checkpointing", "olora", "olora-checkpointing-bf16", "olora-decoder", "olora-value_norm"],
)
def test_what_trains_moves_and_stage_1_does_not(tiny_run, second, tmp_path, extra, lora_tensors, router_tensors):
    if "--model.reducer.stage=decoder" in extra:
        again = ["--trainer.max_steps=2", "--model.routing=null", "--overwrite", "--model.reducer.stage=decoder"]
        assert main(tiny_run(*again, output="first")) == 0
    first = tmp_path / "first" / "adapter" / "adapter_model.safetensors"
    before = first.read_bytes()
    assert main(second("--trainer.max_steps=3", "--checkpoint.every_n_train_steps=1", *extra)) == 0
    run = tmp_path / "second"
    assert first.read_bytes() == before
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == before
    state = last_state(run)["state_dict"]
    assert sum(".o_proj.lora_" in name for name in state) == lora_tensors
    assert sum(".bank." in name for name in state) == router_tensors
    assert len(state) == lora_tensors + router_tensors
    assert all(tensor.any() for name, tensor in state.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in state.items() if name.endswith("bias"))  # they start at zero
    _, parts, _ = read_adapter(run / "adapter")
    written = {f"compressed.{name}": parameter for name, parameter in parts.named_parameters()}
    assert all(torch.equal(tensor, written[name]) for name, tensor in state.items())


def test_stage_1_without_a_reducer_is_taken_and_said(tiny_run, tmp_path, capsys):
    """The other reading of section 4.4: fit says it, and the adapter's card keeps it."""
    first = [
        "--trainer.max_steps=1",
        "--model.routing=null",
        "--model.reducer.name=none",
        "--model.reducer.keep_ratio=1",
    ]
    assert main(tiny_run(*first, output="first")) == 0
    folder = tmp_path / "first" / "adapter"
    again = ["--trainer.max_steps=1", "--model.lora=null", f"--model.stage2.adapter={folder}"]
    assert main(tiny_run(*again, output="second")) == 0
    reading = "LoRA alone, without a token reducer"
    assert f"stage 2 on {folder}: {reading}" in capsys.readouterr().err
    assert f"reading {reading}" in (tmp_path / "second" / "adapter" / "README.md").read_text()


@pytest.mark.slow
def test_resume_on_another_stage_1_is_refused(tiny_run, second, capsys):
    assert main(second("--trainer.max_steps=1", "--checkpoint.every_n_train_steps=1")) == 0
    again = ["--trainer.max_steps=1", "--model.routing=null", "--overwrite"]
    assert main(tiny_run(*again, output="first")) == 0
    assert main(second("--resume")) == 2
    assert "model.stage2.adapter is not the one that the checkpoint was trained on" in capsys.readouterr().err


@sampled(
    ("mistake", "words"),
    [
        ("--model.reducer.keep_ratio=0.125", "reducer.keep_ratio 0.25 (the recipe has 0.125)"),
        ("--model.lora.rank=16", "lora.rank 8 (the recipe has 16)"),
        ("--model.routing=null", "set model.routing"),
        ("--model.stage2.adapter=nowhere", "nowhere does not exist"),
    ],
    every=4,
)
def test_mistakes_come_out_before_anything_is_written(second, tmp_path, capsys, mistake, words):
    assert words in refused(capsys, *second(mistake))
    assert not (tmp_path / "second").exists()


STEPS = 12
TEXT = ("llama", "qwen2")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}


def losses(folder: Path) -> list[float]:
    """The logged training loss of every step."""
    with (folder / "logs" / "csv" / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


@sampled(
    ("family", "kind"),
    [(family, kind) for family in ("llava", "qwen2", "qwen2_5_vl", "llama") for kind in ("nf4", "int8")],
    every=8,
)
def test_the_loss_falls_and_a_stop_changes_nothing(tiny_run, tmp_path, capfd, family, kind):
    pytest.importorskip("bitsandbytes")
    if family in TEXT:
        backbone = save_language_model(tmp_path / family, family, **SIZES)
        lora = {"rank": 8, "alpha": 16, "dropout": 0.1}
        argv = ["fit", *text_recipe(tmp_path / f"{family}.yaml", backbone, lora=lora)]
    else:
        argv = tiny_run("--data.batch_size=4", "--data.max_length=512")
    if family == "qwen2_5_vl":
        folder = save_backbone(qwen_family(), tmp_path / "qwen")
        argv += [f"--model.backbone.path={folder}", "--model.reducer.keep_ratio=0.5"]
    argv += [f"--model.backbone.quantization={kind}", "--model.backbone.dtype=bfloat16"]
    argv += ["--trainer.precision=bf16-mixed", f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1"]
    optimizer = {"name": "paged_adamw_8bit", "learning_rate": 0.01, "warmup_steps": 0}
    argv += [f"--model.optimizer.{name}={value}" for name, value in optimizer.items()]
    argv.append("--model.gradient_checkpointing=true")
    whole, parts = ([*argv, f"--output_dir={tmp_path / output}"] for output in ("whole", "parts"))
    assert main(whole) == 0
    curve = losses(tmp_path / "whole")
    assert len(curve) == STEPS
    assert sum(curve[-4:]) < 0.95 * sum(curve[:4])
    assert interrupted_fit(parts, after_step=5) == 130
    assert main([*parts, "--resume"]) == 0
    whole = adapter_tensors(tmp_path / "whole" / "adapter")
    assert same_tensors(whole, adapter_tensors(tmp_path / "parts" / "adapter"))
    assert all(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    said = capfd.readouterr().err
    assert not any(noise in said for noise in ("kernels", "MatMul8bitLt", "Paged optimizers"))

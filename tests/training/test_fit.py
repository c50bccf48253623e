"""The fit command, end to end on a random tiny LLaVA: what trains, what stays, what resumes; two stages."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.calibrations import read_calibration
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.evictions.kvzip import TokenScorers
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from tests.support.commands import refused
from tests.support.helpers import interrupted_fit, last_state, moved_by_fit, save_backbone
from tests.support.prompt_views import settings_for
from tests.support.run_folders import adapter_tensors, content, logged, same_tensors
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.training_memory import save_language_model, text_recipe


def weights(run: Path) -> dict[str, torch.Tensor]:
    return adapter_tensors(run / "adapter")


def test_fit_trains_adapters_only_and_logs(tiny_run, tmp_path):
    backbone_file = tmp_path / "backbone" / "model.safetensors"
    before = backbone_file.read_bytes()
    assert main(tiny_run()) == 0
    run = tmp_path / "run"
    trained = weights(run)
    # 4 layers x q/v x (A + B), 4 x router (weight + bias)
    assert len(trained) == 4 * 2 * 2 + 4 * 2
    assert all(tensor.abs().sum() > 0 for name, tensor in trained.items() if "lora_B" in name)
    assert backbone_file.read_bytes() == before
    with (run / "logs" / "csv" / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    for wanted in ("train/loss", "train/balance", "train/kv_fraction", "tokens_per_s/after"):
        assert wanted in columns
    assert "group_usage_entropy/layer_3" in columns
    assert list((run / "logs" / "tb").glob("events.*"))


@pytest.mark.slow
def test_accumulation_equals_one_large_batch(tiny_run, tmp_path):
    plain = ["--trainer.max_steps=3", "--model.lora.dropout=0.0", "--data.group_by_length=false"]
    assert main(tiny_run(*plain, "--data.batch_size=8", output="large")) == 0
    small = ["--data.batch_size=4", "--trainer.accumulate_grad_batches=2"]
    assert main(tiny_run(*plain, *small, output="small")) == 0
    large, accumulated = weights(tmp_path / "large"), weights(tmp_path / "small")
    for name, tensor in large.items():
        assert torch.allclose(tensor, accumulated[name], atol=2e-5), name


def test_resume_gives_the_weights_of_never_having_stopped(tiny_run, tmp_path):
    dropout = "--model.lora.dropout=0.1"
    assert main(tiny_run(dropout, output="whole")) == 0
    # the schedule must be the same, so the first part stops by signal, not by max_steps
    assert interrupted_fit(tiny_run(dropout, output="parts"), after_step=2) == 130
    assert main(tiny_run(dropout, "--resume", output="parts")) == 0
    assert same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    logs = tmp_path / "parts" / "logs"
    assert (logs / "csv" / "metrics.csv").exists()
    assert (logs / "csv-2" / "metrics.csv").exists()


@pytest.fixture
def finished(tiny_run, tmp_path):
    """A run of one step, and what lies in it."""
    assert main(tiny_run("--trainer.max_steps=1")) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_resume_with_another_recipe_is_refused(tiny_run, finished, capsys):
    before = content(finished)
    other = tiny_run("--trainer.max_steps=1", "--resume", "--model.routing.selector=mlp")
    assert "the run began with another recipe (model.routing.selector: linear, here mlp)" in refused(capsys, *other)
    (finished / "recipe.yaml").rename(finished / "moved.yaml")
    assert "trained tensors differ, first compressed.bank" in refused(capsys, *other)
    (finished / "moved.yaml").rename(finished / "recipe.yaml")
    assert content(finished) == before


@pytest.mark.slow
def test_a_longer_run_says_what_differs(tiny_run, finished, capsys):
    assert main(tiny_run("--resume", "--trainer.max_steps=2", "--data.num_workers=1")) == 0
    said = capsys.readouterr().err
    assert f"resuming from {finished / 'checkpoints' / 'step-1'}" in said
    assert "schedule: trainer.max_steps: 1, here 2" in said
    assert last_state(finished)["global_step"] == 2


BYTES = {"num_groups": 8, "kept_groups": 8, "budget": "bytes", "byte_share": 0.25, "sinks": 2, "window": 2}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A random tiny language model: two heads of 16 channels, so that a group is 4 of them."""
    return save_language_model(tmp_path_factory.mktemp("language-model"))


@pytest.fixture
def recipe(backbone, tmp_path):
    """Writes a recipe and returns the arguments of ``fit``."""

    def write(routing=BYTES, **bands):
        bands = {"reducer": {"name": "none"}, "routing": routing, **bands}
        return text_recipe(tmp_path / "recipe.yaml", backbone, **bands)

    return write


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--trainer.precision=bf16-mixed", "--model.gradient_checkpointing=true", "--model.routing.byte_pool=learned"],
        ["--model.routing.byte_pool=all", "--model.gradient_checkpointing=true", "--model.lora.dropout=0.1"],
    ],
)
def test_three_steps_move_exactly_the_trainables(recipe, extra):
    assert any(name.startswith("bank.") for name in moved_by_fit(RecipeCLI([*recipe(), *extra])))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"byte_share": 0.05}, "byte_share 0.05 of 64 tokens is 409 bytes for a layer, less than the 520 that sinks 2"),
        ({"selector": "value_norm"}, "budget 'bytes' needs a logit for every key"),
        ({"byte_share": 2}, "byte_share=2.0 must lie in (0, 1]"),
        ({"budget": "per_token"}, "is a setting of budget 'bytes', and the budget is 'per_token'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_check_and_fit(recipe, capsys, changed, words):
    argv = recipe({**BYTES, **changed})
    assert words in refused(capsys, "check", *argv)
    assert words in refused(capsys, "fit", *argv)


def test_a_router_starts_as_kvzap_s_nets_and_its_adapter_needs_them_no_more(recipe, backbone, tmp_path, capsys):
    family = load_family(BackboneConfig(str(backbone)))
    file = Path(shutil.copy(settings_for("kvzap", family)["calibration"], tmp_path / "nets.json"))
    nets = read_calibration(str(file), "kvzap", TokenScorers).numbers.nets
    argv = recipe({**BYTES, "byte_pool": "learned", "warm_start": str(file)})
    still = ["--model.optimizer.learning_rate=0", "--trainer.max_steps=1", "--trainer.precision=bf16-mixed"]
    assert main(["fit", *argv, *still]) == 0
    file.rename(tmp_path / "away.json")
    config, made, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.routing.warm_start == str(file)
    assert not any(own_h.any() for own_h in made.bank.shares)  # heads start alike
    for selector, (weight_hD, bias_h) in zip(made.bank.selectors, nets, strict=True):
        assert torch.equal(selector.token.weight[-2:], weight_hD)
        assert torch.equal(selector.token.weight[:4], weight_hD[:1].expand(4, -1))
        assert torch.equal(selector.token.bias, torch.cat([bias_h.repeat_interleave(4), bias_h]))
    words = f"kvzap calibration {file} is not a file"
    assert words in refused(capsys, "check", *argv)
    assert main(["check", *argv, "--offline"]) == 0
    assert "is a setting of budget 'bytes'" in refused(capsys, "check", *recipe({"warm_start": str(file)}))


def test_the_anchor_keeps_as_many_bytes_in_whole_tokens(recipe, tmp_path, capsys):
    argv = recipe(reducer={"name": "quest", "keep_ratio": 1.0, "page_size": 4, "window": 8})
    assert main(["recipes", "anchor", argv[1], str(tmp_path / "anchor.yaml")]) == 0
    anchor = yaml.safe_load((tmp_path / "anchor.yaml").read_text())
    assert anchor["model"]["reducer"]["keep_ratio"] == 0.25
    assert anchor["model"].get("routing") is None
    argv = recipe({**BYTES, "byte_share": 1.0})
    assert "and byte_share = 1), so it has no anchor" in refused(capsys, "recipes", "anchor", argv[1])


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
    curve = logged(tmp_path / "whole", "train/loss")
    assert len(curve) == STEPS
    assert sum(curve[-4:]) < 0.95 * sum(curve[:4])
    assert interrupted_fit(parts, after_step=5) == 130
    assert main([*parts, "--resume"]) == 0
    whole = adapter_tensors(tmp_path / "whole" / "adapter")
    assert same_tensors(whole, adapter_tensors(tmp_path / "parts" / "adapter"))
    assert all(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    said = capfd.readouterr().err
    assert not any(noise in said for noise in ("kernels", "MatMul8bitLt", "Paged optimizers"))

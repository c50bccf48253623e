"""Two processes give the losses and weights of one, under every strategy and with text-only batches on one of them."""

import json

import pytest
import torch

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.datasets.ordered import ResumableSampler
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.training.strategies import Fsdp2Strategy, check_parts
from subtoken_train.training.trained_tensors import trained_tensors
from tests.support.helpers import save_backbone
from tests.support.refusals import refuses
from tests.support.strategy_runs import GLOBAL_BATCH, Run, assert_same, run_fit
from tests.support.tiny.qwen import qwen_family
from tests.support.training_memory import save_language_model, text_recipe

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
SHORT = ["--trainer.max_steps=3", "--trainer.accumulate_grad_batches=2"]
# 11 micro-batches in a pass: windows of 4, 4 and 3, then a window of the next pass
WINDOWS = ["--trainer.max_steps=4", "--trainer.accumulate_grad_batches=4", "--checkpoint.every_n_train_steps=2"]
VISIONZIP = ["--trainer.max_steps=2", "--model.reducer.name=visionzip"]
ARMS = [
    "--trainer.max_steps=2",
    "--model.gradient_checkpointing=true",
    "--model.routing.selector=mlp",
    "--model.routing.query_conditioned=true",
    "--model.routing.score_prior=output_norm",
]
RESUMED = [
    "--trainer.max_steps=4",
    "--checkpoint.every_n_train_steps=2",
    "--trainer.accumulate_grad_batches=2",
    "--model.lora.dropout=0.2",
]
HALF = ["--trainer.max_steps=3", "--trainer.precision=bf16-mixed", "--model.backbone.dtype=bfloat16"]


def test_the_first_step_has_text_on_one_process_and_images_on_the_other(arena):
    records = json.loads((arena.folder / "mixed.json").read_text())
    half = GLOBAL_BATCH // 2
    first = [list(ResumableSampler(len(records), half, 0, rank=rank, world_size=2))[:half] for rank in (0, 1)]
    images = [["image" in records[index] for index in part] for part in first]
    assert images == [[False] * half, [True] * half]


def test_zero3_equals_one_process_and_its_adapter_is_whole(arena):
    run = arena.fit("zero3", "zero3", *SHORT)
    assert_same(run, arena.reference("one", *SHORT))
    assert SubTokenModel.from_pretrained(str(run.folder / "adapter")) is not None


EQUAL = [
    ("ddp", "one", SHORT, {"torchrun": True}),
    ("zero3_offload", "one", SHORT, {}),
    *((strategy, "one", SHORT, {"processes": 1}) for strategy in ("zero2", "zero3", "fsdp2")),
    *((strategy, "visionzip", VISIONZIP, {}) for strategy in ("zero3", "fsdp2")),  # reads the tower for texts, too
    *((strategy, "arms", ARMS, {}) for strategy in ("ddp", "zero2", "zero3")),  # reads weights out of place
    ("ddp", "distilled", [*WINDOWS, "--model.distillation={weight: 2.0, temperature: 2.0}"], {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name", "extra", "how"), EQUAL)
def test_it_equals_one_process(arena, strategy, name, extra, how):
    assert_same(arena.fit(strategy, f"{name}-{strategy}", *extra, **how), arena.reference(name, *extra))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_windows_equal_those_of_one_process(arena, strategy):
    reference = arena.reference("windows", *WINDOWS)
    run = arena.fit(strategy, f"windows-{strategy}", *WINDOWS)
    assert_same(run, reference)
    saved, ours = trained_tensors(run.state(4)), trained_tensors(reference.state(4))
    assert saved.keys() == ours.keys()
    assert all(tensor.dtype == torch.float32 and tensor.shape == ours[name].shape for name, tensor in saved.items())
    assert all(torch.allclose(tensor, ours[name], atol=1e-5, rtol=0) for name, tensor in saved.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_keeps_adapters_in_fp32(arena, strategy):
    run = arena.fit(strategy, f"half-{strategy}", *HALF)
    reference = arena.reference("half", *HALF)
    assert all(tensor.dtype == torch.float32 for tensor in run.weights.values())
    # products in bf16: the order of sums shows
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(reference.losses), atol=2e-2, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resuming_gives_the_weights_of_never_having_stopped(arena, strategy):
    whole = arena.fit(strategy, f"whole-{strategy}", *RESUMED)
    resumed = arena.resume(strategy, whole, 2, f"resumed-{strategy}", *RESUMED)
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_qwen(arena, strategy):
    backbone = arena.folder / "qwen"
    if not backbone.exists():
        save_backbone(qwen_family(), backbone)
    # large random weights: AdamW makes 2e-5 of the rounding of one gradient near zero
    extra = ["--trainer.max_steps=3", f"--model.backbone.path={backbone}"]
    assert_same(arena.fit(strategy, f"qwen-{strategy}", *extra), arena.reference("qwen-one", *extra), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_language_model(tmp_path, strategy):
    backbone = save_language_model(tmp_path / "llama")
    config = text_recipe(tmp_path / "recipe.yaml", backbone, optimizer={"learning_rate": 0.01})

    def argv(processes: int) -> list[str]:
        size, folder = f"--data.batch_size={4 // processes}", f"--output_dir={tmp_path / str(processes)}"
        return ["fit", *config, "--trainer.log_every_n_steps=1", size, folder]

    assert main(argv(1)) == 0
    done = run_fit([*argv(2), f"--trainer.strategy={strategy}"], processes=2)
    assert done.returncode == 0, done.stdout[-4000:]
    assert_same(Run(tmp_path / "2"), Run(tmp_path / "1"))


def test_fsdp2_is_refused_for_a_compressed_context(text_adapter):
    _, parts, _ = read_adapter(text_adapter)
    refuses("fsdp2 cannot train a language model", check_parts, Fsdp2Strategy, parts)

"""What a strategy cannot do is said before anything is loaded or written: one line, exit code 2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

from subtoken_train.cli.trainer_parts import build_parts
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.preflight import check_devices
from subtoken_train.training.strategies import PRESETS, Fsdp2Strategy, check_fit, check_kind
from subtoken_train.training.strategies.zero import ZeroStrategy, zero_settings
from tests.support.commands import refused
from tests.support.sampling import sampled


def module(
    quantization: str = "none",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    distillation: object = None,
    features: tuple[str, ...] = (),
) -> SimpleNamespace:
    return SimpleNamespace(
        backbone_config=SimpleNamespace(quantization=quantization),
        optimizer_config=SimpleNamespace(name=optimizer),
        gradient_checkpointing=checkpointing,
        routing_config=RoutingConfig(features=features),
        distillation_config=distillation,
        has_teacher=distillation is not None,
    )


def trainer(strategy) -> SimpleNamespace:
    return SimpleNamespace(strategy=strategy)


def test_unknown_strategy(arena, capsys):
    line = refused(capsys, *arena.argv("never", "--trainer.strategy=zero4"))
    assert line.startswith("unknown trainer.strategy 'zero4'. Did you mean 'zero")
    assert "fsdp2" in line
    assert not (arena.folder / "never").exists()


def test_lightnings_own_deepspeed_is_no_way_around(capsys, arena):
    assert "unknown trainer.strategy 'deepspeed_stage_2'" in refused(
        capsys, *arena.argv("never", "--trainer.strategy=deepspeed_stage_2")
    )


def test_zero_needs_a_gpu_and_nothing_is_made(arena, capsys):
    line = refused(capsys, *arena.argv("new", "--trainer.devices=1", strategy="zero2"))
    assert "ZeRO runs on CUDA GPUs; use trainer.strategy ddp or fsdp2" in line
    assert not (arena.folder / "new").exists()


def test_deepspeed_is_not_installed(arena, capsys, monkeypatch):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    line = refused(capsys, *arena.argv("never", "--trainer.devices=1", strategy="zero2"))
    assert "pip install 'subtoken_train[deepspeed]'" in line


def test_more_processes_than_cores(arena, capsys):
    line = refused(capsys, *arena.argv("never", "--trainer.devices=1000"))
    assert "trainer.devices asks for 1000 process(es)" in line
    assert not (arena.folder / "never").exists()


@pytest.mark.parametrize("devices", [3, "3", [0, 1, 2], "0,1,2"])
def test_more_processes_than_gpus(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"asks for 3 process\(es\), one per device, but this machine has 2 GPU\(s\)"):
        check_devices(devices, "gpu")
    check_devices(2, "gpu")
    check_devices("auto", "gpu")


@sampled(
    ("key", "value", "where"),
    [
        ("gradient_accumulation_steps", 4, "trainer.accumulate_grad_batches"),
        ("optimizer", {"type": "AdamW"}, "model.optimizer"),
        ("bf16", {"enabled": True}, "trainer.precision"),
    ],
    every=3,
)
def test_deepspeed_settings_that_the_recipe_has(tmp_path, capsys, arena, key, value, where):
    with pytest.raises(ValueError, match=f"{key!r}, which the recipe sets in {where}; remove it there"):
        zero_settings(2, False, {key: value})
    overlay = tmp_path / "overlay.yaml"
    settings = {"zero2": {"config": {key: value}}}
    overlay.write_text(f"trainer: {{strategy: {settings!r}}}".replace("True", "true"))
    argv = arena.argv("never")
    assert where in refused(capsys, *argv[:3], "--config", overlay, *argv[3:])


def test_deepspeed_settings_file(tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 7}, "steps_per_print": 5}')
    settings = zero_settings(3, True, str(path))
    assert settings["zero_optimization"]["stage3_param_persistence_threshold"] == 7
    assert settings["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert settings["steps_per_print"] == 5
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a JSON object"):
        zero_settings(3, False, str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        zero_settings(3, False, str(tmp_path / "nowhere.json"))
    with pytest.raises(ValueError, match="stage 4 is not one of"):
        zero_settings(4, False, None)


def test_fsdp2_recomputes_no_routers():
    with pytest.raises(ValueError, match=r"cannot train routers with model\.gradient_checkpointing"):
        check_fit(trainer(Fsdp2Strategy()), module(checkpointing=True))
    check_fit(trainer(Fsdp2Strategy()), module())


def test_a_teacher_is_not_for_weights_that_are_shared_out():
    for kind in (ZeroStrategy, Fsdp2Strategy):
        with pytest.raises(
            ValueError, match=r"model\.distillation runs every layer twice .* use trainer\.strategy ddp"
        ):
            check_kind(kind, "32-true", module(distillation=object()))
    check_kind(DDPStrategy, "32-true", module(distillation=object()))


@pytest.mark.parametrize("kind", [ZeroStrategy, Fsdp2Strategy])
def test_attention_as_a_feature_is_for_whole_weights(kind):
    with pytest.raises(ValueError, match=r"features attention .* use trainer\.strategy ddp, or leave attention out"):
        check_kind(kind, "32-true", module(features=("norm", "attention")))
    check_kind(kind, "32-true", module(features=("norm",)))


def test_an_eight_bit_optimiser_is_for_whole_tensors():
    with pytest.raises(ValueError, match=r"use adamw, or trainer\.strategy ddp"):
        check_fit(trainer(Fsdp2Strategy()), module(optimizer="paged_adamw_8bit"))


def test_precision_that_rounds_adapters():
    with pytest.raises(ValueError, match="would round LoRA and routers"):
        check_kind(ZeroStrategy, "bf16-true", module())


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, ModelParallelStrategy])
def test_lightnings_bare_classes(strategy):
    with pytest.raises(ValueError, match=f"{strategy.__name__} knows nothing of frozen weights"):
        check_fit(trainer(strategy()), module())


def test_names_give_strategies():
    (zero,) = build_parts("strategy", {"zero3": {"config": {"steps_per_print": 7}}}, **PRESETS)
    assert (zero.zero_stage_3, zero.config["steps_per_print"]) == (True, 7)
    assert [type(each) for each in build_parts("strategy", "fsdp2")] == [Fsdp2Strategy]

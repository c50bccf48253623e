"""What a strategy cannot do is said before anything is loaded or written: one line, exit code 2."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from subtoken_train.cli.main import main
from subtoken_train.cli.trainer_parts import build_parts, named_parts
from subtoken_train.errors import pip_line
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.module import see_blank_image
from subtoken_train.training.preflight import check_devices
from subtoken_train.training.strategies import PRESETS, Fsdp2Strategy, ZeroStrategy, check_fit, check_kind
from tests.support.commands import refused
from tests.support.helpers import compress, make_batch
from tests.support.refusals import refuses
from tests.support.sampling import sampled


def module(
    quantization: str = "none",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    distillation: object = None,
    **routing: object,
) -> SimpleNamespace:
    return SimpleNamespace(
        backbone_config=SimpleNamespace(quantization=quantization),
        optimizer_config=SimpleNamespace(name=optimizer),
        gradient_checkpointing=checkpointing,
        routing_config=RoutingConfig(**routing),
        distillation_config=distillation,
        has_teacher=distillation is not None,
    )


def trainer(strategy) -> SimpleNamespace:
    return SimpleNamespace(strategy=strategy)


@pytest.mark.parametrize(
    ("extra", "strategy", "words"),
    [
        (["--trainer.strategy=zero4"], None, ["unknown trainer.strategy 'zero4'. Did you mean 'zero", "fsdp2"]),
        (["--trainer.strategy=deepspeed_stage_2"], None, ["unknown trainer.strategy 'deepspeed_stage_2'"]),
        (["--trainer.devices=1"], "zero2", ["ZeRO runs on CUDA GPUs; use trainer.strategy ddp or fsdp2"]),
        (["--trainer.devices=1000"], None, ["trainer.devices asks for 1000 process(es)"]),
    ],
)
def test_what_a_machine_cannot_do_is_said_before_anything_is_made(arena, capsys, extra, strategy, words):
    line = refused(capsys, *arena.argv("never", *extra, **({} if strategy is None else {"strategy": strategy})))
    assert all(part in line for part in words)
    assert not (arena.folder / "never").exists()


def test_deepspeed_is_not_installed(arena, capsys, monkeypatch):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    assert pip_line("deepspeed") in refused(capsys, *arena.argv("never", "--trainer.devices=1", strategy="zero2"))


@pytest.mark.parametrize("devices", [3, "3", [0, 1, 2], "0,1,2"])
def test_more_processes_than_gpus(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuses(r"asks for 3 process\(es\), but this machine has 2 GPU\(s\)", check_devices, devices, "gpu")
    check_devices(2, "gpu")
    check_devices("auto", "gpu")


def test_a_cpus_devices_are_a_count(tmp_path, capsys):
    given = ["--trainer.accelerator", "cpu", "--trainer.devices", "[0]", "--output_dir", str(tmp_path / "run")]
    assert main(["fit", "--config", "tiny_fastv25_s16k4", *given]) == 2
    assert "trainer.devices is [0]; on a CPU it is a count of processes, or auto" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "optimizer", "bf16"])
def test_deepspeed_settings_that_the_recipe_has(key):
    with pytest.raises(ValueError, match=f"unknown setting of DeepSpeed '{key}'; write it in"):
        named_parts("strategy", {"zero2": {"config": {key: 1}}})


REFUSED = [
    (lambda: check_fit(trainer(Fsdp2Strategy()), module(checkpointing=True)), "cannot train routers with model.gradie"),
    (lambda: check_kind(ZeroStrategy, "32-true", module(distillation=object())), "distillation is not tried"),
    (lambda: check_kind(Fsdp2Strategy, "32-true", module(distillation=object())), "ddp, or leave it out"),
    (lambda: check_kind(ZeroStrategy, "32-true", module(features=("attention",))), "attention is not tried"),
    (lambda: check_kind(ZeroStrategy, "32-true", module(byte_pool="learned")), "byte_pool learned is not tried"),
    (lambda: check_fit(trainer(Fsdp2Strategy()), module(optimizer="paged_adamw_8bit")), "8bit is not tried"),
    (lambda: check_kind(ZeroStrategy, "bf16-true", module()), "would round LoRA and routers"),
    (lambda: check_fit(trainer(DeepSpeedStrategy()), module()), "DeepSpeedStrategy knows nothing of frozen weights"),
    (lambda: check_fit(trainer(ModelParallelStrategy()), module()), "ModelParallelStrategy knows nothing of frozen"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_strategy_cannot_do(call, words):
    refuses(re.escape(words), call)


def test_names_give_strategies():
    more = {"zero_optimization": {"stage3_param_persistence_threshold": 7}, "steps_per_print": 5}
    (zero,) = build_parts("strategy", {"zero3_offload": {"config": more}}, **PRESETS)
    assert (zero.zero_stage_3, zero.config["steps_per_print"]) == (True, 5)
    assert zero.config["zero_optimization"]["stage3_param_persistence_threshold"] == 7
    assert zero.config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert [type(each) for each in build_parts("strategy", "fsdp2")] == [Fsdp2Strategy]


REDUCERS = [
    {},
    {"name": "random", "keep_ratio": 0.5},
    {"name": "fastv", "keep_ratio": 0.25},
    {"name": "fastv", "keep_ratio": 0.25, "stage": "decoder"},
    {"name": "visionzip", "keep_ratio": 0.25},
    {"name": "visionzip", "keep_ratio": 1.0},
    {"name": "sparsevlm", "keep_ratio": 0.6},
]
ROUTING = RoutingConfig(num_groups=4, kept_groups=1)


def calls(parts, batch) -> list[str]:
    """Every module that a training pass calls, in order."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: seen.append(name))
        for name, module in parts.named_modules()
        if name and not list(module.children())
    ]
    see_blank_image(parts, batch)
    parts.logits(parts.run(batch))
    for hook in hooks:
        hook.remove()
    return seen


@sampled("reducer", REDUCERS, every=3, ids=lambda own: "-".join(map(str, own.values())) or "none")
def test_llava_calls(tiny_family, reducer):
    parts = compress(tiny_family, ROUTING, **reducer)
    with_images, text = make_batch([(1, 6), (2, 5)]), make_batch([(0, 7), (0, 4)])
    assert text.pixel_values is None
    assert calls(parts, text) == calls(parts, with_images)


def test_a_blank_image_changes_nothing(tiny_family):
    parts = compress(tiny_family, ROUTING, name="visionzip", keep_ratio=0.25)
    text = make_batch([(0, 7), (0, 4)])
    before = parts.logits(parts.run(text))
    see_blank_image(parts, text)
    assert torch.equal(parts.logits(parts.run(text)), before)

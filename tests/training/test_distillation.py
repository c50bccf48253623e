"""Distillation in training: what the teacher is, what a step's loss is, and that every arm trains under it."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.engine.build import assemble
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.lora import LoraSettings
from subtoken_train.functional.objective import IGNORE_INDEX, predicting_rows
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.training import loss as losses
from subtoken_train.training.module import SubTokenModule
from subtoken_train.types import Region
from tests.support.commands import refused
from tests.support.helpers import make_batch, only_sample
from tests.support.refusals import refuses
from tests.support.run_folders import put
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

MIXED = [(1, 7), (1, 5), (0, 6)]
ON = "--model.distillation={weight: 0.5, temperature: 2}"


def made(family, distillation=None, dropout=0.0, **reducer) -> SubTokenModule:
    """A module with LoRA that does something, outside of a run; ``logged`` collects."""
    settings = {
        "reducer": build_reducer(**{"name": "fastv", "keep_ratio": 0.25, **reducer}),
        "routing": RoutingConfig(),
    }
    module = SubTokenModule(backbone=BackboneConfig(), distillation=distillation, **settings)
    torch.manual_seed(0)
    module.compressed, _ = assemble(family, LoraSettings(4, 8, dropout), settings["reducer"], settings["routing"])
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    module.stub = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    module.trainer = module.stub
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.update({name: float(value)})
    return module.train()


def gradients(module: SubTokenModule, loss: Tensor) -> dict[str, Tensor]:
    """Of what trains; the module has none afterwards."""
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in module.trained().items()}
    module.zero_grad()
    return found


def plain_logits(model, batch) -> Tensor:
    """Transformers' own forward pass of an untouched model, one sample at a time: rows that predict a label."""
    rows = []
    for index in range(len(batch.labels_BN)):
        one = only_sample(batch, index)
        seen = one.regions_BN[0] != Region.PADDING
        pixels = {} if one.pixel_values is None else {"pixel_values": one.pixel_values}
        logits = model(input_ids=one.input_ids_BN[:, seen], **pixels).logits[0]
        rows.append(logits[predicting_rows(one.labels_BN[:, seen])[0][0]])
    return torch.cat(rows)


@sampled("pad_left", [False, True], every=2)
@torch.no_grad()
def test_the_teacher_is_the_backbone_as_it_was_loaded(tiny_family, pad_left):
    batch = make_batch(MIXED, pad_left)
    expected = plain_logits(copy.deepcopy(tiny_family.model), batch)
    module = made(tiny_family, dropout=0.5)
    enable_checkpointing(tiny_family, module.parts.bank)
    modes = [part.training for part in module.modules()]
    learns = [parameter.requires_grad for parameter in module.parameters()]
    assert torch.allclose(losses.Teacher(tiny_family).logits(batch), expected, atol=1e-4)
    assert modes == [part.training for part in module.modules()]
    assert learns == [parameter.requires_grad for parameter in module.parameters()]
    result = module.parts.run(batch)
    rows, _ = predicting_rows(result.labels(batch.labels_BN))
    assert (module.parts.logits(result, rows) - expected).abs().max() > 0.01


@sampled("reducer", [{}, {"stage": "decoder"}, {"name": "visionzip"}], every=3, ids=["embeds", "decoder", "tower"])
def test_a_step_adds_the_weighted_divergence_of_aligned_rows(tiny_family, reducer):
    """Against transformers' own pass of an untouched copy, with loops over answer tokens."""
    batch, weight, temperature = make_batch(MIXED), 0.5, 2.0
    with torch.no_grad():
        teacher = plain_logits(copy.deepcopy(tiny_family.model), batch)
    module = made(tiny_family, losses.DistillationConfig(weight, temperature), **reducer)
    loss = module.training_step((batch, 6, 1), 0)
    result = module.parts.run(batch)
    rows, targets = predicting_rows(result.labels(batch.labels_BN))
    logits, answer, divergence = module.parts.logits(result, rows), 0.0, 0.0
    assert len(targets) == len(teacher) == 6
    for ours, theirs, target in zip(logits, teacher, targets, strict=True):
        answer -= ours.log_softmax(-1)[target]
        p, q = (each / temperature for each in (theirs, ours))
        divergence += temperature**2 * (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()
    expected = answer / 6 + weight * divergence / 6 + 0.01 * result.state.mean_balance()
    assert divergence > 0.001
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert module.logged["train/distillation"] == pytest.approx(divergence.item() / 6, rel=1e-3)
    assert module.logged["train/loss"] == pytest.approx(answer.item() / 6, rel=1e-4)
    ours, theirs = gradients(module, loss), gradients(module, expected)
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], atol=1e-5), name


@pytest.mark.parametrize("kind", ["llama", "qwen2_window"])
@torch.no_grad()
def test_the_teacher_of_a_language_model_reads_all_context_with_whole_values(kind):
    """Its own layers run context splits for the student, of which the teacher's pass knows nothing."""
    family, batch = text_family(kind), text_batch([(24, 9, 2), (20, 7, 2)])
    batch.labels_BN = torch.where(batch.regions_BN == Region.QUERY, batch.input_ids_BN, IGNORE_INDEX)
    expected = plain_logits(copy.deepcopy(family.model), batch)
    assert made(family, name="quest", keep_ratio=0.5, page_size=4, window=8).parts.splits
    assert torch.allclose(losses.Teacher(family).logits(batch), expected, atol=1e-4)


def test_a_window_of_single_samples_is_one_batch(tiny_family):
    batch = make_batch(MIXED)
    module = made(tiny_family, losses.DistillationConfig(2.0, 3.0))
    whole = gradients(module, module.training_step((batch, 6, 1), 0))
    module.stub.accumulate_grad_batches = 3
    parts = [module.training_step((only_sample(batch, index), 6, 3), index) / 3 for index in range(3)]
    found = gradients(module, sum(parts))
    for name, gradient in whole.items():
        assert torch.allclose(found[name], gradient, atol=1e-5), name


def test_checkpointing_and_weight_zero_change_no_gradient(tiny_family):
    batch = make_batch(MIXED)
    module = made(tiny_family)
    plain = gradients(module, module.training_step((batch, 6, 1), 0))
    module.distillation_config = losses.DistillationConfig(0.0)
    logged_only = gradients(module, module.training_step((batch, 6, 1), 0))
    assert module.logged["train/distillation"] > 0
    assert all(torch.allclose(logged_only[name], plain[name], atol=1e-7) for name in plain)
    module.distillation_config = losses.DistillationConfig()
    distilled = gradients(module, module.training_step((batch, 6, 1), 0))
    enable_checkpointing(tiny_family, module.parts.bank)
    again = gradients(module, module.training_step((batch, 6, 1), 0))
    assert all(torch.allclose(again[name], distilled[name], atol=1e-6) for name in plain)
    assert any(not torch.allclose(plain[name], distilled[name], atol=1e-4) for name in plain)


@pytest.mark.slow
def test_stage_2_keeps_its_first_lora_frozen_and_says_what_it_learned(tiny_run, tmp_path):
    assert main(tiny_run("--trainer.max_steps=1", "--model.routing=null", output="first")) == 0
    first = tmp_path / "first" / "adapter"
    stage2 = ["--model.lora=null", f"--model.stage2.adapter={first}", "--trainer.max_steps=2", ON]
    assert main(tiny_run(*stage2, output="second")) == 0
    folder = tmp_path / "second" / "adapter"
    name = "adapter_model.safetensors"
    assert (folder / name).read_bytes() == (first / name).read_bytes()
    config, _, _ = read_adapter(folder)
    assert config.training["distillation"] == {"weight": 0.5, "temperature": 2.0}
    assert (
        "distilled from the uncompressed backbone (weight 0.5, temperature 2.0)" in (folder / "README.md").read_text()
    )
    put(folder, "subtoken_config.json", "training.distillation", "yes")
    refuses(r"training\.distillation", read_adapter, folder)


@sampled(
    ("value", "words"),
    [
        ("{weight: -1}", ["distillation weight is -1", "0 to"]),
        ("{weight: .nan}", ["model.distillation.weight is nan; it must be finite"]),
        ("{temperature: 0}", ["distillation temperature is 0", "0.01 to 1,000"]),
        ("{temprature: 1}", ["temprature"]),
        ("yes", ["model.distillation"]),
    ],
    every=2,
)
def test_wrong_settings_are_worded(tiny_run, capsys, value, words):
    line = refused(capsys, *tiny_run(f"--model.distillation={value}"))
    assert all(word in line for word in words)


@dataclass(frozen=True)
class Focal(losses.Loss):
    """Cross-entropy, less of what is known already."""

    name: ClassVar[str] = "focal"
    gamma: float = 2.0

    def summed(self, view):
        cross_L = F.cross_entropy(view.logits_LV.float(), view.targets_L, reduction="none")
        return ((1 - (-cross_L).exp()) ** self.gamma * cross_L).sum()


@dataclass(frozen=True)
class Asking(losses.Loss):
    """Remembers what it was given."""

    name: ClassVar[str] = "asking"
    reads_full_logits: ClassVar[bool] = True
    seen: ClassVar[list[losses.LossInput]] = []

    def summed(self, view):
        self.seen.append(view)
        return view.logits_LV.sum() * 0 + sum(scores.sum() for scores, _, _ in view.routing.choices.values())


@dataclass(frozen=True)
class Spoilt(Focal):
    """The same until a step, then what ``gives`` says."""

    name: ClassVar[str] = "spoilt"
    gives: str = "nan"
    after: int = 0
    calls: ClassVar[list[int]] = []

    def summed(self, view):
        self.calls.append(1)
        good = super().summed(view)
        if len(self.calls) <= self.after:
            return good
        return {"nan": good * float("nan"), "none": None, "vector": good[None], "detached": good.detach()}[self.gives]


@pytest.fixture(autouse=True)
def _there(monkeypatch):
    for loss in (Focal, Asking, Spoilt):
        monkeypatch.setitem(losses.LOSSES, loss.name, loss)
    Asking.seen.clear()
    Spoilt.calls.clear()


@pytest.mark.parametrize("pad_left", [False, True])
def test_a_loss_sees_labels_their_rows_the_whole_models_logits_and_the_routers(tiny_family, pad_left):
    batch = make_batch(MIXED, pad_left)
    with torch.no_grad():
        expected = plain_logits(tiny_family.model, batch)
    module = made(tiny_family)
    module.loss = losses.build_loss("asking", {})
    assert module.has_teacher
    found = gradients(module, module.training_step((batch, 6, 1), 0))
    (view,) = Asking.seen
    labels = [row[row != -100] for row in batch.labels_BN]
    assert torch.equal(view.targets_L, torch.cat(labels))
    assert view.rows_BM.nonzero()[:, 0].tolist() == [i for i, own in enumerate(labels) for _ in own]
    assert torch.allclose(view.full_logits(), expected, atol=1e-4)
    assert not view.full_logits().requires_grad
    assert set(view.routing.choices) == set(range(len(module.parts.bank.selectors)))
    assert all(gradient.any() for name, gradient in found.items() if name.endswith("token.bias"))
    with pytest.raises(ValueError, match="must declare it: reads_full_logits = True"):
        losses.LossInput(view.logits_LV, view.targets_L, view.rows_BM).full_logits()


def view_of(logits_LV) -> losses.LossInput:
    return losses.LossInput(logits_LV, torch.arange(len(logits_LV)), torch.ones(1, len(logits_LV), dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [0, 3])
def test_cross_entropy_and_own_losses_take_any_number_of_targets(targets, dtype):
    logits_LV = torch.randn(targets, 9, dtype=dtype, requires_grad=True)
    for loss in (losses.CrossEntropy(), Focal()):
        value = losses.checked_loss(loss, view_of(logits_LV))
        value.backward()
        assert value.dtype == torch.float32
        assert (targets > 0) == bool(value > 0) == bool(logits_LV.grad.any())


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ("nan", "gave NaN or infinity"),
        ("none", "gave no tensor but NoneType"),
        ("vector", r"gave a tensor of shape \[1\]"),
        ("detached", "gave a value without gradient"),
    ],
)
def test_what_is_no_loss_is_one_message(gives, words):
    view = view_of(torch.randn(3, 9, requires_grad=True))
    refuses(f"loss 'spoilt' {words}; it must give a finite scalar", losses.checked_loss, Spoilt(gives=gives), view)


def test_names_and_settings_are_worded():
    for name, options, words in (
        ("focl", {}, r"unknown loss 'focl'\. Did you mean 'focal'"),
        ("focal", {"gama": 1}, r"model\.loss_options: unknown key 'gama'\. Did you mean 'gamma'\? Allowed: gamma"),
        ("focal", {"gamma": "2"}, r"model\.loss_options: gamma is '2'; it must be a number"),
        ("cross_entropy", {"gamma": 2}, r"'cross_entropy' has no settings of its own, and model\.loss_options names"),
    ):
        refuses(words, losses.build_loss, name, options)


def test_a_recipe_names_it_check_shows_it_and_a_bad_one_stops_before_a_step(tiny_run, capsys):
    assert main(tiny_run("--model.loss=spoilt", "--model.loss_options={gives: none}")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "subtoken-train: error: loss 'spoilt' gave no tensor but NoneType; it must give a finite scalar tensor with "
        "gradient"
    )
    argv = tiny_run("--model.loss=focal", "--model.loss_options.gamma=3", output="never")
    assert main(["check", *argv[1:], "--offline"]) == 0
    assert "loss       focal, gamma 3.0" in capsys.readouterr().out
    line = refused(capsys, *tiny_run("--model.loss=focal", "--model.loss_options.gama=3"))
    assert "model.loss_options: unknown key 'gama'" in line

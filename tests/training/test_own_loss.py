"""Losses by name: what one is given and may return, beside plain references; a bad one loses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from subtoken_train.cli.main import main
from subtoken_train.training.loss import LOSSES, CrossEntropy, Loss, LossInput, build_loss, checked_loss
from tests.support.commands import refused
from tests.support.helpers import make_batch
from tests.training.test_distillation import gradients, made, plain_logits

MIXED = [(1, 7), (1, 5), (0, 6)]


@dataclass(frozen=True)
class Focal(Loss):
    """Cross-entropy, less of what is known already."""

    name: ClassVar[str] = "focal"
    gamma: float = 2.0

    def summed(self, view):
        cross_L = F.cross_entropy(view.logits_LV.float(), view.targets_L, reduction="none")
        return ((1 - (-cross_L).exp()) ** self.gamma * cross_L).sum()


@dataclass(frozen=True)
class Asking(Loss):
    """Remembers what it was given."""

    name: ClassVar[str] = "asking"
    reads_full_logits: ClassVar[bool] = True
    seen: ClassVar[list[LossInput]] = []

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
        monkeypatch.setitem(LOSSES, loss.name, loss)
    Asking.seen.clear()
    Spoilt.calls.clear()


def test_gamma_0_is_cross_entropy(tiny_family):
    batch, module = make_batch(MIXED), made(tiny_family)
    plain = gradients(module, module.training_step((batch, 6, 1), 0))
    module.loss = build_loss("focal", {"gamma": 0})
    zero = gradients(module, module.training_step((batch, 6, 1), 0))
    assert all(torch.allclose(zero[name], plain[name], atol=1e-6) for name in plain)
    module.loss = build_loss("focal", {})
    whole = gradients(module, module.training_step((batch, 6, 1), 0))
    assert any(not torch.allclose(whole[name], plain[name], atol=1e-3) for name in plain)


@pytest.mark.parametrize("pad_left", [False, True])
def test_a_loss_sees_labels_their_rows_the_whole_models_logits_and_the_routers(tiny_family, pad_left):
    batch = make_batch(MIXED, pad_left)
    with torch.no_grad():
        expected = plain_logits(tiny_family.model, batch)
    module = made(tiny_family)
    module.loss = build_loss("asking", {})
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
        LossInput(view.logits_LV, view.targets_L, view.rows_BM).full_logits()


def view_of(logits_LV) -> LossInput:
    return LossInput(logits_LV, torch.arange(len(logits_LV)), torch.ones(1, len(logits_LV), dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [0, 3])
def test_cross_entropy_and_own_losses_take_any_number_of_targets(targets, dtype):
    logits_LV = torch.randn(targets, 9, dtype=dtype, requires_grad=True)
    for loss in (CrossEntropy(), Focal()):
        value = checked_loss(loss, view_of(logits_LV))
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
    with pytest.raises(ValueError, match=f"loss 'spoilt' {words}; it must give the sum over the targets"):
        checked_loss(Spoilt(gives=gives), view)


def test_names_and_settings_are_worded():
    for name, options, words in (
        ("focl", {}, r"unknown loss 'focl'\. Did you mean 'focal'"),
        ("focal", {"gama": 1}, r"model\.loss_options: unknown key 'gama'\. Did you mean 'gamma'\? Allowed: gamma"),
        ("focal", {"gamma": "2"}, r"model\.loss_options: gamma is '2'; it must be a number"),
        ("cross_entropy", {"gamma": 2}, r"'cross_entropy' has no settings of its own, and model\.loss_options names"),
    ):
        with pytest.raises(ValueError, match=words):
            build_loss(name, options)


def test_a_recipe_names_it_check_shows_it_and_a_bad_one_stops_before_a_step(tiny_run, capsys):
    assert main(tiny_run("--model.loss=spoilt", "--model.loss_options={gives: none}")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "subtoken-train: error: loss 'spoilt' gave no tensor but NoneType; it must give the sum over the targets: a "
        "finite scalar tensor with gradient"
    )
    argv = tiny_run("--model.loss=focal", "--model.loss_options.gamma=3", output="never")
    assert main(["check", *argv[1:], "--offline"]) == 0
    assert "loss       focal, gamma 3.0" in capsys.readouterr().out
    line = refused(capsys, *tiny_run("--model.loss=focal", "--model.loss_options.gama=3"))
    assert "model.loss_options: unknown key 'gama'" in line


@pytest.mark.slow
def test_a_loss_that_breaks_after_a_step_leaves_the_run(tiny_run, capsys, tmp_path):
    """Even one that was to replace another run, whose place it has not taken."""
    assert main(tiny_run("--trainer.max_steps=1")) == 0
    options = ["--trainer.max_steps=4", "--checkpoint.every_n_train_steps=1", "--overwrite"]
    broken = ["--model.loss=spoilt", "--model.loss_options={after: 2}"]
    assert main(tiny_run(*options, *broken)) == 2
    said = capsys.readouterr().err
    assert "error: loss 'spoilt' gave NaN or infinity" in said
    assert "continue with: subtoken-train fit --config" in said
    assert list(tmp_path.rglob("checkpoints/step-2"))

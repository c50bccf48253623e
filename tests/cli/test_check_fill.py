"""``subtoken-train check`` of a recipe that fills dropped groups: what is said, trained and counted."""

import pytest

from tests.support.check_command import checked, refused
from tests.support.places import ROOT, recipe

TINY = ["--config", str(recipe("tiny_fastv25_s16k4")), "--offline"]
TINY += ["--model.backbone.path", str(ROOT / "checkpoints" / "tiny-llava"), "--model.routing.kept_groups=3"]


def test_a_stored_mean_is_counted(capsys):
    lines = checked(capsys, [*TINY, "--model.routing.fill=mean"])
    assert "routing S16K3 linear, contiguous, per_token budget, fill mean, balance weight 0.01" in lines
    assert "visual 64 16 8,192 2,048 32 15.625 %" in lines  # 16 tokens of 3 groups, and one vector
    assert any(line.startswith("matched anchor: 10 of 64 visual tokens") for line in lines)
    assert "routers (linear) 12 12,384" in lines


@pytest.mark.slow
def test_what_is_gone_is_refused_in_words(capsys):
    for setting in ("fill=learned", "temperature=0.5", "balance_scope=batch"):
        name, value = setting.split("=")
        words = refused(capsys, [*TINY, f"--model.routing.{setting}"])
        assert f"routing {name}" in words
        assert value in words
        assert "is gone" in words
        assert "or use version 0.2, which has it" in words
    neutral = ["--model.routing.temperature=1.0", "--model.routing.balance_scope=sample", "--model.routing.fill=zero"]
    said, plain = (
        [line for line in checked(capsys, argv) if not line.startswith("ready:")] for argv in ([*TINY, *neutral], TINY)
    )
    assert said == plain


@pytest.mark.slow
def test_nothing_dropped_is_nothing_to_fill(capsys):
    words = "fill 'mean' does nothing where kept_groups = num_groups = 16"
    assert words in refused(capsys, [*TINY, "--model.routing.fill=mean", "--model.routing.kept_groups=16"])

"""Two processes give what one gives for Qwen2.5-VL and for a language model too, where weights are shared out."""

from __future__ import annotations

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.training.strategies import Fsdp2Strategy, check_parts
from tests.support.cpu_fit import run_fit
from tests.support.helpers import save_backbone
from tests.support.strategy_runs import Run, assert_same
from tests.support.tiny.qwen import qwen_family
from tests.support.tiny_fits import save_language_model, text_recipe


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
    with pytest.raises(ValueError, match="fsdp2 cannot train a language model"):
        check_parts(Fsdp2Strategy, parts)

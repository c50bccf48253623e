"""What DeepSpeed is told in its own words, and which of them a user may not say: the recipe says them."""

from __future__ import annotations

from typing import Any

from subtoken_train.documents import read_json

BUCKET = 50_000_000
"""Elements that are communicated at once; Lightning's 200 million would reserve 800 MB for adapters of a tenth."""

_RECIPE_SAYS = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "gradient_clipping": "trainer.gradient_clip_val",
    "train_batch_size": "data.batch_size",
    "train_micro_batch_size_per_gpu": "data.batch_size",
    "optimizer": "model.optimizer",
    "scheduler": "model.optimizer.schedule",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "torch_autocast": "trainer.precision",
}


def zero_settings(stage: int, offload: bool, config: dict[str, Any] | str | None) -> dict[str, Any]:
    """DeepSpeed's JSON for a stage.

    Args:
        stage: 1, 2 or 3.
        offload: see ``ZeroStrategy``.
        config: more settings, or the path of a JSON file with them; they go on top.

    Raises:
        ValueError: another stage, a file that cannot be read, or a setting that is the recipe's.
    """
    extra = _read_settings(config) if isinstance(config, str) else config or {}
    for key, ours in _RECIPE_SAYS.items():
        if key in extra:
            raise ValueError(f"the DeepSpeed settings hold {key!r}, which the recipe says in {ours}; remove it there")
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage} is not one of 1, 2, 3")
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # offloaded states are updated by torch's AdamW too
        **extra,
        "zero_optimization": {**zero, **extra.get("zero_optimization", {})},
    }


def _read_settings(path: str) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"trainer.strategy: the DeepSpeed settings {path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"trainer.strategy: the DeepSpeed settings {path} are no JSON object")
    return settings

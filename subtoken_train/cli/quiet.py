"""Silence what libraries say that no user of ours can act on; our own messages and all errors stay."""

from __future__ import annotations

import logging
import os
import warnings

_NOISE = (
    "Tip: For seamless",
    "Restoring states",
    "Restored all states",
    "TPU available",
    "HPU available",
    "Seed set to",
    "Failed to load CPU gemm_4bit_forward",  # an optional package for CPUs; said at import, wanted or not
    "Setting accelerator to CPU",  # peft imports DeepSpeed where it is installed
    "MatMul8bitLt: inputs will be cast",  # at every product of an 8-bit layer
)
_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "DeepSpeed",
    "bitsandbytes.backends.cpu.ops",
    "bitsandbytes.autograd._functions",
)


def quiet_libraries() -> None:
    """Call before anything of ours that uses transformers or lightning."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for message in (
        "LightningCLI's args parameter is intended",  # we parse our own argument list
        ".*is_gradient_checkpointing. is deprecated",  # peft's call into transformers
        ".*gradient_checkpointing_enable. is deprecated",
        ".*treespec, LeafSpec",  # lightning's call into torch
        "Precision .* is not supported by the model summary",
        "Found .* module.s. in eval mode",  # the frozen backbone is meant to be
        "The 'train_dataloader' does not have many workers",
        "The 'val_dataloader' does not have many workers",
        "Total length of .* across ranks is zero",  # no validation file was given
        "Paged optimizers are not supported on CPU",  # bitsandbytes: plain ones are used, which is what a CPU has
        "When saving the DeepSpeed Stage 3 checkpoint",  # trained_tensors puts the parts together
        ".*all_gather_into_tensor. is deprecated",  # DeepSpeed's and FSDP2's calls into torch
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_useful)
    import datasets
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    datasets.disable_progress_bars()


def _is_useful(record: logging.LogRecord) -> bool:
    return not any(noise in record.getMessage() for noise in _NOISE)

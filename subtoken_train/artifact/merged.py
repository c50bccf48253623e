"""A folder with the LoRA merged into the backbone: a plain transformers checkpoint, and the routers beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from peft import PeftModel

from subtoken_train.artifact.card import CardSections
from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.artifact.folder import write_rest
from subtoken_train.artifact.whole_folder import whole_folder
from subtoken_train.engine.compressed_backbone import CompressedBackbone


def write_merged(
    folder: Path,
    config: AdapterConfig,
    backbone: CompressedBackbone,
    peft_model: PeftModel,
    overwrite: bool = False,
    sections: CardSections | None = None,
) -> Path:
    """Merge every LoRA into the weights and write model, processor, routers, configuration and card.

    The update is added in the dtype of the backbone's weights: exact to rounding in fp32, and rounded to bfloat16 in
    bfloat16. The model that was handed in has no LoRA afterwards.

    Raises:
        ValueError: the backbone is quantised, or the folder cannot be written; see ``write_adapter``.
    """
    check_mergeable(backbone)
    with whole_folder(folder, overwrite) as temporary:
        model = peft_model.merge_and_unload(safe_merge=True, adapter_names=list(peft_model.peft_config))
        model.save_pretrained(temporary)
        backbone.family.processor.save_pretrained(temporary)
        write_rest(temporary, replace(config, merged=True), backbone, sections)
    return folder


def check_mergeable(backbone: CompressedBackbone) -> None:
    """Raise a worded ``ValueError`` where a LoRA sits on weights that are no floating-point numbers."""
    for name, module in backbone.model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not base.weight.is_floating_point():
            kind = str(base.weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"cannot merge into a quantised backbone ({name} holds {kind}): rounding would change what was "
                "trained; export the adapter without --merge-lora, or name an unquantised copy with --backbone"
            )

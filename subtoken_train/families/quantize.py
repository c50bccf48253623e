"""A frozen backbone in 4 or 8 bits (bitsandbytes), as QLoRA trains on it: the decoder's linear layers, nothing else.

The vision tower keeps the recipe's dtype, as in LLaVA's own QLoRA training. Of peft's
``prepare_model_for_kbit_training`` only freezing is needed: it copies norms, embeddings and head to fp32 (one more GB
for a 7B model), and makes the embeddings ask for gradients, which only reentrant checkpointing needs.

Legend: B batch, N positions, I input width, O output width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subtoken_train.errors import check_package
from subtoken_train.functional.quantized import Quantization, dense_weight, is_quantised


def quantization_config(kind: Quantization, dtype: torch.dtype, skipped: tuple[str, ...]) -> Any | None:
    """Return what ``from_pretrained`` takes as ``quantization_config``, for products in a dtype; None for ``none``."""
    if kind == "none":
        return None
    check_package("bitsandbytes", "gpu", f"quantization {kind!r}", "set model.backbone.quantization: none")
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(skipped))
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(skipped),
    )


def prepare_quantised(model: nn.Module, decoder: nn.Module) -> None:
    """Make a freshly loaded quantised model ready for training; asserts that the decoder alone is quantised."""
    inside = {module for module in decoder.modules() if isinstance(module, nn.Linear)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert is_quantised(module.weight) == (module in inside)
    for module in inside:
        if module.weight.dtype == torch.int8:
            setattr(module, "forward", _Int8Forward(module, module.forward))  # noqa: B010
        else:
            # On some CPUs bitsandbytes repacks a 4-bit weight at its first pass without gradient (our scout's); the
            # repacked product is not differentiable, and the layers below would silently get no gradient.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


class _Int8Forward:
    """The forward of a frozen 8-bit layer: bitsandbytes' product.

    bitsandbytes' own autograd function holds the layer's input on the node, where checkpointing cannot reach it.
    """

    def __init__(self, layer: nn.Linear, product: Any) -> None:
        self.layer, self.product = layer, product

    def __call__(self, input_BNI: Tensor) -> Tensor:
        output: Tensor = _FrozenProduct.apply(input_BNI, self.layer, self.product)  # type: ignore[no-untyped-call]
        return output


class _FrozenProduct(torch.autograd.Function):
    """The gradient of the input alone, by the dequantised weight."""

    @staticmethod
    def forward(ctx: Any, input_BNI: Tensor, layer: nn.Linear, product: Any) -> Tensor:
        ctx.layer, ctx.dtype = layer, input_BNI.dtype
        output: Tensor = product(input_BNI)
        return output

    @staticmethod
    def backward(ctx: Any, gradient_BNO: Tensor) -> tuple[Tensor, None, None]:
        return gradient_BNO.to(ctx.dtype) @ dense_weight(ctx.layer, ctx.dtype), None, None

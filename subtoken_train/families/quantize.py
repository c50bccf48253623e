"""A frozen backbone in 4 or 8 bits (bitsandbytes), as QLoRA trains on it.

Quantised are the linear layers of the language model's decoder stack, nothing else: embeddings, norms, the output head
and, as in LLaVA's own QLoRA training, the vision tower and its projector keep the recipe's dtype; LoRA and routers are
added later and stay in fp32.

What peft's ``prepare_model_for_kbit_training`` does beyond freezing is left out: it copies norms, embeddings and head
to fp32 (one more GB for a 7B model) and makes the input embeddings ask for gradients, which only reentrant
checkpointing needs.

Legend: B batch, N positions, I input width, O output width.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from subtoken_train.errors import check_package, check_word
from subtoken_train.functional.quantized import Quantization, dense_weight, is_quantised


def quantization_config(kind: Quantization, dtype: torch.dtype, skipped: tuple[str, ...]) -> Any | None:
    """Return what ``from_pretrained`` takes as ``quantization_config``; None for ``none``.

    ``dtype``: of the products, and of what is not quantised (``skipped`` modules).
    """
    check_quantization(kind)
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


def check_quantization(kind: str) -> None:
    """Raise ``ValueError`` for an unknown kind."""
    check_word("quantization", kind, get_args(Quantization))


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
    """The forward of a frozen 8-bit layer: bitsandbytes' product, without what its backward keeps for nothing.

    Its autograd function holds the layer's input although the weight is frozen, on the node itself, where
    checkpointing cannot reach it: every input of every layer would stay until the backward pass.
    """

    def __init__(self, layer: nn.Linear, product: Any) -> None:
        self.layer, self.product = layer, product

    def __call__(self, input_BNI: Tensor) -> Tensor:
        """Map [B, N, I] to [B, N, O]."""
        output: Tensor = _FrozenProduct.apply(input_BNI, self.layer, self.product)  # type: ignore[no-untyped-call]
        return output


class _FrozenProduct(torch.autograd.Function):
    """``product(input)`` forward; the gradient of the input alone backward, by the dequantised weight."""

    @staticmethod
    def forward(ctx: Any, input_BNI: Tensor, layer: nn.Linear, product: Any) -> Tensor:
        ctx.layer, ctx.dtype = layer, input_BNI.dtype
        output: Tensor = product(input_BNI)
        return output

    @staticmethod
    def backward(ctx: Any, gradient_BNO: Tensor) -> tuple[Tensor, None, None]:
        return gradient_BNO.to(ctx.dtype) @ dense_weight(ctx.layer, ctx.dtype), None, None

"""LoRA by peft, with its matches counted, and a frozen backbone in 4 or 8 bits (bitsandbytes), as QLoRA trains on it.

Quantised are the decoder's linear layers, nothing else. Of peft's ``prepare_model_for_kbit_training`` only freezing is
needed: it copies norms, embeddings and head to fp32 (one more GB for a 7B model).

Legend: B batch, N positions, I input width, O output width.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from subtoken_train.errors import check_package, check_range
from subtoken_train.families.decoder import FUSED, QV
from subtoken_train.families.family import Family
from subtoken_train.functional.quantized import dense_weight
from subtoken_train.types import Quantization

MAIN_ADAPTER = "default"
OUTPUT_ADAPTER = "output"  # peft saves it into a folder of its name


@dataclass
class LoraSettings:
    """Adapter settings.

    Attributes:
        rank: LoRA rank.
        alpha: ``lora_alpha`` (the paper's "scaling"); the update is multiplied by alpha / rank.
        dropout: on the adapter's input.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05

    def __post_init__(self) -> None:
        check_range("lora rank", self.rank, 1, 2**16)
        check_range("lora alpha", self.alpha, 1, 10**6)
        check_range("lora dropout", self.dropout, 0, 0.99)


def add_lora(family: Family, settings: LoraSettings) -> PeftModel:
    """Put LoRA on q and v (of a fused projection, on k too) of every layer, in place, and freeze everything else."""
    fused = hasattr(family.decoder.layers[0].self_attn, FUSED)
    pattern = family.lora_pattern.replace(QV, FUSED) if fused else family.lora_pattern
    family.model.requires_grad_(False)
    with warnings.catch_warnings():
        # peft's own call into transformers, at every adapter
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        peft_model = get_peft_model(family.model, _peft_config(settings, pattern))
    modules, where = (1, "fused q, k and v") if fused else (2, "q and v")
    _settle(family, peft_model, MAIN_ADAPTER, pattern, modules, where)
    return peft_model


def add_output_lora(family: Family, peft_model: PeftModel, settings: LoraSettings) -> None:
    """Put a second adapter on ``o_proj`` of every layer, which starts at zero; both are active, only it trains."""
    pattern = family.lora_pattern.replace(QV, "o_proj")
    peft_model.add_adapter(OUTPUT_ADAPTER, _peft_config(settings, pattern))
    # the tuner takes several names, PeftModel only one; it also switches gradients on for all of them
    peft_model.base_model.set_adapter([MAIN_ADAPTER, OUTPUT_ADAPTER])
    for name, parameter in family.model.named_parameters():
        parameter.requires_grad_(name.endswith(f".{OUTPUT_ADAPTER}.weight"))
    _settle(family, peft_model, OUTPUT_ADAPTER, pattern, 1, "o_proj")


def remove_lora(family: Family) -> None:
    """Take every LoRA out again; the weights under it were never changed."""
    model = family.model
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    for trace in ("peft_config", "active_adapter"):
        if trace in vars(model):
            delattr(model, trace)


def _peft_config(settings: LoraSettings, pattern: str) -> LoraConfig:
    own = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    return LoraConfig(**own, target_modules=pattern, bias="none")


def _settle(family: Family, model: PeftModel, adapter: str, pattern: str, modules: int, where: str) -> None:
    config = model.peft_config[adapter]
    # of a model of experts peft rewrites what an adapter's file says, as it does when it reads one
    config.target_modules, config.target_parameters = pattern, None
    matched = [name for name, module in family.model.named_modules() if adapter in getattr(module, "lora_A", ())]
    if len(matched) != modules * (layers := family.shape.num_layers):
        raise ValueError(f"LoRA matched {len(matched)} modules, expected {modules * layers} ({where}): {matched[:2]}")
    for parameter in family.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def quantization_config(kind: Quantization, dtype: torch.dtype, skipped: tuple[str, ...]) -> Any | None:
    """Return what ``from_pretrained`` takes as ``quantization_config``, for products in a dtype; None for ``none``."""
    if kind == "none":
        return None
    check_package("bitsandbytes", "gpu", f"quantization {kind!r}", "set model.backbone.quantization: none")
    from transformers import BitsAndBytesConfig

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    chosen: dict[str, Any] = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, **nf4}
    return BitsAndBytesConfig(llm_int8_skip_modules=list(skipped), **chosen)


def prepare_quantised(model: nn.Module, decoder: nn.Module) -> None:
    """Make a freshly loaded quantised model ready for training; asserts that the decoder alone is quantised."""
    inside = {module for module in decoder.modules() if isinstance(module, nn.Linear)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert (module.weight.dtype in (torch.uint8, torch.int8)) == (module in inside)
    for module in inside:
        if module.weight.dtype == torch.int8:
            setattr(module, "forward", partial(_FrozenProduct.apply, module, module.forward))  # noqa: B010
        else:
            # On some CPUs bitsandbytes repacks a 4-bit weight at its first pass without gradient (our scout's); the
            # repacked product is not differentiable, and the layers below would silently get no gradient.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


class _FrozenProduct(torch.autograd.Function):
    """A frozen 8-bit layer: bitsandbytes' product, and the gradient of the input alone, by the dequantised weight.

    bitsandbytes' own autograd function holds the layer's input on the node, where checkpointing cannot reach it.
    """

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, product: Any, input_BNI: Tensor) -> Tensor:
        ctx.layer, ctx.dtype = layer, input_BNI.dtype
        output: Tensor = product(input_BNI)
        return output

    @staticmethod
    def backward(ctx: Any, gradient_BNO: Tensor) -> tuple[None, None, Tensor]:
        return None, None, gradient_BNO.to(ctx.dtype) @ dense_weight(ctx.layer, ctx.dtype)

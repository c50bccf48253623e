"""Find out whether a language model is built of the parts that are served here, by its modules and not by its name.

Served is what transformers builds on its attention interface: a stack with ``layers``, ``norm`` and ``rotary_emb``; in
every layer a ``self_attn`` with ``q_proj``, ``k_proj`` and ``v_proj`` (or one ``qkv_proj``, in that order) and
``o_proj``; queries and keys turned before the cache; one cache layer a layer. No weight is read. That such a model
computes what is computed here is shown once its weights are there (``families/proof.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from subtoken_train.families.decoder import FUSED
from subtoken_train.families.positions import LENGTH_DEPENDENT, rotary_kind

_STACK = ("layers", "norm", "rotary_emb")
_OWN = ("q_proj", "k_proj", "v_proj")


def check_structure(model: Any) -> None:
    """Raise ``ValueError`` unless a causal language model is built of the parts that are served, naming what differs.

    Args:
        model: of transformers, on any device (``meta`` too), without LoRA.
    """
    stack: Any = getattr(model, "model", None)
    if missing := [part for part in _STACK if not hasattr(stack, part)]:
        raise refusal(model, f"its decoder (model.model) has no {' and no '.join(missing)}")
    for why in _of_the_whole(model, stack.config):
        raise refusal(model, why)
    for number, layer in enumerate(stack.layers):
        for why in _of_a_layer(layer, number, stack.config):
            raise refusal(model, f"in layer {number} {why}")


def refusal(model: Any, why: str) -> ValueError:
    """Return the error for a model that is not served."""
    return ValueError(
        f"{model.config.model_type} ({type(model).__name__}) is not supported: {why}; use another backbone"
    )


def _of_the_whole(model: Any, config: Any) -> Iterator[str]:
    """Say what of a model is not served."""
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention does not go through transformers' attention interface, so it cannot read a packed cache"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "some of its layers read the keys and values of others, and a cache layer belongs to one layer here"
    if getattr(config, "attn_logit_softcapping", None):
        yield "it caps attention scores (attn_logit_softcapping), which the kernels here cannot do"
    if getattr(config, "use_bidirectional_attention", False):
        yield "it attends in both directions, and what is decoded here sees what came before"
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in model.model.layers]
    widths = sorted({int(each.head_dim) for each in attentions if hasattr(each, "head_dim")})
    if len(widths) > 1:
        several = " and ".join(map(str, widths))
        yield f"its layers have heads of {several} channels, and a packed cache has heads of one width"
    kinds = rotary_kind(model.model.rotary_emb).split(" and ")
    if len(kinds) > 1 and (found := set(kinds) & set(LENGTH_DEPENDENT)):
        yield f"the rotary frequencies of some layers depend on a sequence's length ({', '.join(found)})"


def _of_a_layer(layer: Any, number: int, config: Any) -> Iterator[str]:
    """Say what of a layer is not served."""
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        parts = ", ".join(name for name, _ in layer.named_children())
        yield f"there is no self_attn: {type(layer).__name__} is of {parts}"
        return
    fused = hasattr(attention, FUSED)
    missing = [part for part in (*(() if fused else _OWN), "o_proj") if getattr(attention, part, None) is None]
    if missing or not hasattr(attention, "head_dim") or not hasattr(attention, "scaling"):
        parts = ", ".join(name for name, _ in attention.named_children())
        yield f"self_attn is of {parts}; expected are q_proj, k_proj, v_proj (or one qkv_proj) and o_proj"
        return
    if hasattr(attention, "sinks"):
        yield "heads have sinks, a share of every softmax that goes nowhere, which the kernels here do not support"
    if getattr(attention, "layer_idx", None) != number:
        yield f"self_attn writes to cache layer {getattr(attention, 'layer_idx', None)}"
    width, kv_heads = attention.head_dim, config.num_key_value_heads
    queries, values = config.num_attention_heads * width, kv_heads * width
    wanted = {FUSED: queries + 2 * values} if fused else dict(zip(_OWN, (queries, values, values), strict=True))
    for part, channels in wanted.items():
        found = getattr(attention, part).out_features
        if found != channels:
            yield (
                f"{part} gives {found} channels, where {config.num_attention_heads} query heads and {kv_heads} "
                f"key-value heads of width {width} need {channels}"
            )

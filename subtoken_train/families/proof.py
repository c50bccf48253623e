"""Find out whether a language model that no test here knows is served: by its modules, then on random tokens.

``check_structure`` reads no weight. ``prove`` runs a few tokens by the model's own ``forward`` and as they run here,
windows narrowed and the last ones from a packed cache, and compares every layer's queries, keys and values.

Legend: B batch (1), N tokens, H query heads, h key-value heads, d head width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.families.decoder import FUSED, DecoderStack
from subtoken_train.families.positions import LENGTH_DEPENDENT, rotary_kind
from subtoken_train.forks import changed
from subtoken_train.functional.causal_attention import Seen, causal_attention
from subtoken_train.types import LayerPlan

_STACK = ("layers", "norm", "rotary_emb")
_OWN = ("q_proj", "k_proj", "v_proj")


def check_structure(model: Any) -> None:
    """Raise ``ValueError`` unless a causal language model without LoRA is built of the parts that are served."""
    stack: Any = getattr(model, "model", None)
    if missing := [part for part in _STACK if not hasattr(stack, part)]:
        raise refusal(model, f"its decoder (model.model) has no {' and no '.join(missing)}")
    own = (f"in layer {i} {why}" for i, layer in enumerate(stack.layers) for why in _of_a_layer(layer))
    for why in chain(_of_the_whole(model, stack.config), own):
        raise refusal(model, why)


def refusal(model: Any, why: str) -> ValueError:
    """Return the error for a model that is not served."""
    kind = type(model).__name__
    return ValueError(f"{model.config.model_type} ({kind}) is not supported: {why}; use another backbone")


def _of_the_whole(model: Any, config: Any) -> Iterator[str]:
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


def _of_a_layer(layer: Any) -> Iterator[str]:
    if (attention := getattr(layer, "self_attn", None)) is None:
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


NAME = "subtoken_proof"  # name of the attention function in transformers' table
PROMPT, AFTER, WINDOW = 18, 6, 9  # tokens that are packed, and decoded together, and the windows narrowed to
EXACT = 1e-4  # largest difference of a logit in fp32, over the largest logit where that is more than 1
ROUNDED, TIMES = 0.01, 2.0
"""Norm of the difference over that of the logits where a model rounds more (bf16, fp16, quantised weights): so much,
and so many times what its own answer changes by under ``eager`` attention: measured 0.004 to 0.2 in bf16, and packed
decoding's difference 0.1 to 1.1 times that.
"""
ALIKE = 0.05  # norm of the difference of a layer's states over their own; another way differs by 0.1 and more
_KNOWN = {"dropout", "sliding_window", "position_ids", "use_cache", "is_causal"}  # change nothing here


@torch.no_grad()
def prove(family: DecoderStack) -> None:
    """Raise ``ValueError`` unless a model (whose weights are all here) decodes from a packed cache as it does."""
    model = family.model
    if any(weight.is_meta or not weight.numel() or hasattr(weight, "ds_shape") for weight in model.parameters()):
        return
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids_BN = torch.randint(vocabulary, (1, PROMPT + AFTER), generator=generator).to(family.device)
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    with _narrowed(family):
        plain_BNV, bound = model(input_ids=ids_BN, use_cache=False).logits.float(), EXACT
        if not exact:
            with changed(family.decoder.config, _attn_implementation="eager"):
                other_BNV = model(input_ids=ids_BN, use_cache=False).logits.float()
            bound = ROUNDED + TIMES * float((other_BNV - plain_BNV).norm() / plain_BNV.norm())
        try:
            packed_BNV = _packed_logits(family, ids_BN).float()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            words = " ".join(str(error).split())[:160]
            why = f"its layers cannot be run the way they are run here ({type(error).__name__}: {words})"
            raise refusal(model, why) from error
    error_BNV = packed_BNV - plain_BNV.to(packed_BNV.device)
    if exact:
        found = float(error_BNV.abs().max() / plain_BNV.abs().max().clamp(min=1))
    else:
        found = float(error_BNV.norm() / plain_BNV.norm())
    if not found <= bound:  # NaN is not
        after = float(error_BNV[:, PROMPT:].norm() / error_BNV.norm())
        where = "decoded from a packed cache" if after > 0.99 else "run layer by layer"
        apart = f"(by {found:.2g}, at most {bound:.2g} is allowed)"
        raise refusal(model, f"{where}, the logits of random tokens differ from transformers' {apart}")


def _packed_logits(family: DecoderStack, ids_BN: Tensor) -> Tensor:
    """Return the logits of a prompt, and of tokens that are decoded after it from a packed cache, [1, N, V]."""
    position_BN = torch.arange(ids_BN.shape[1], device=ids_BN.device)[None]
    dense, cache = family.dense_cache(), PackedCache(family.shape.num_layers)
    with _noting(family, position_BN) as notes:
        states_BND, places_BN = family.token_states(ids_BN), position_BN[:, :PROMPT]
        prompt_BND = family.run_layers(states_BND[:, :PROMPT], torch.ones_like(places_BN), places_BN, dense)
        if notes.wrong:
            raise refusal(family.model, notes.wrong[0])
        for states, packed, window in zip(dense.layers, cache.layers, family.windows, strict=True):
            here_BN = torch.arange(PROMPT, device=states.keys.device)[None]
            plan = LayerPlan(here_BN if window is None else here_BN[:, PROMPT + 1 - window :])
            held = pack_layer(states.keys, states.values, plan, Packing(), None if window is None else here_BN)
            packed.store_prompt(held, PROMPT, states.keys)
            if window is not None:
                packed.window = window
                packed.begin_tail(here_BN[:, -1] + 1)
        cache.next_position = position_BN[:, PROMPT : PROMPT + 1]
        with cache.appending():
            after_BND = family.decode(states_BND[:, PROMPT:], position_BN[:, PROMPT:], cache)
    return family.logits(torch.cat([prompt_BND, after_BND], 1))


class _Notes:
    """The attention of the prompt's pass: causal, in the layer's window, and what of it is not as expected."""

    def __init__(self, family: DecoderStack, position_BN: Tensor) -> None:
        self.family, self.position_BN = family, position_BN
        self.inputs: dict[int, Tensor] = {}
        self.wrong = list[str]()

    def attend(self, layer: int, states: tuple[Tensor, Tensor, Tensor], scale: float, options: Any) -> Tensor:
        """Return a layer's attention, [1, H, N, d], and compare its states with those that are made here."""
        family, position_BN = self.family, self.position_BN[:, : states[0].shape[2]].to(states[0].device)
        normed_BND = family.attention_input(layer, self.inputs[layer])
        query, key = family.query_heads(layer, normed_BND, position_BN), family.key_heads(layer, normed_BND)
        query, key = family.rotate(layer, query, key, family.angles(layer, normed_BND, position_BN))
        value = family.projection(layer, "v")(normed_BND).reshape(1, key.shape[2], -1, key.shape[3]).transpose(1, 2)
        for name, own, given in zip(("queries", "keys", "values"), (query, key, value), states, strict=True):
            if own.shape != given.shape or not float((own - given).norm()) <= ALIKE * float(given.norm()):
                made = "its projection, its norm and its rotary embedding"
                self.wrong.append(f"the {name} of layer {layer} are not those of {made}")
        own_scale = float(family.decoder.layers[layer].self_attn.scaling)
        if abs(own_scale - scale) > 1e-6 * abs(scale):
            self.wrong.append(f"layer {layer} scales its scores by {scale:g}, and its scaling says {own_scale:g}")
        if unknown := sorted(name for name, value in options.items() if value is not None and name not in _KNOWN):
            unserved = f"{', '.join(unknown)}, which the kernels here do not support"
            self.wrong.append(f"layer {layer} hands its attention {unserved}")
        return causal_attention(*states, Seen(None, family.window(layer, position_BN)), scale, PROMPT)


_active: list[_Notes] = []


def _attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, PackedLayer):
        out = key.attend(query, scale)
    else:
        layer: int = module.layer_idx  # type: ignore[assignment]
        out = _active[-1].attend(layer, (query, key, value), scale, options)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _noting(family: DecoderStack, position_BN: Tensor) -> Iterator[_Notes]:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    notes = _Notes(family, position_BN)
    with ExitStack() as stack:
        stack.enter_context(changed(family.decoder.config, _attn_implementation=NAME))
        for number, layer in enumerate(family.decoder.layers):
            note = partial(lambda number, _, given: notes.inputs.update({number: given[0]}), number)
            stack.callback(layer.register_forward_pre_hook(note).remove)
        stack.callback(_active.clear)
        _active.append(notes)
        yield notes


@contextmanager
def _narrowed(family: DecoderStack) -> Iterator[None]:
    """Make the model's windows, where it has any, shorter than the tokens inside the block."""
    if not any(windows := family.windows):
        yield
        return
    size = min(WINDOW, *(each for each in windows if each is not None))
    narrow = [None if each is None else size for each in windows]
    with changed(family.decoder.config, sliding_window=size), changed(family, windows=narrow):
        yield

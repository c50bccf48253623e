"""The language model inside a backbone: its layers, their windows, heads and positions, and the loop over them.

One code for training and inference. What differs between models is read from their modules; other kinds of attention
are refused.

Legend: B batch, N positions, D model width, V vocabulary, H query heads, h key-value heads, d head width, n layers with
features of their own.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.families.positions import LENGTH_DEPENDENT, rotary_angles, rotary_kind
from subtoken_train.forks import changed
from subtoken_train.functional.causal_attention import Seen, SlidingWindow
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.functional.rotary import Rotation
from subtoken_train.ledger.kv_budget import KVShape

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""``cache`` from transformers 5.24 on, where the old name costs a warning a layer and step."""
PREFIX = "subtoken_"  # prefix of attention functions that also read packed storage
WINDOWED = ("mistral", "qwen2", "qwen3")  # language models whose windows are served inside a model that sees images
UNTURNED = ("cohere2", "exaone4")  # their layers of full attention turn nothing by position
QV, FUSED = "(q_proj|v_proj)", "qkv_proj"  # modules of the q/v LoRA in a pattern, and where they are fused
_STATEFUL = ("linear", "conv", "hybrid")  # kinds of layers that keep something else than keys and values
Side = Literal["q", "k", "v"]


@dataclass(frozen=True)
class Projection:
    """A layer's projection to queries, keys or values: a module of its own, or channels of a fused one's output."""

    module: nn.Module
    start: int = 0
    stop: int | None = None

    def of(self, output: Tensor) -> Tensor:
        """Return the channels of what the module gave; the same tensor where the module is its own."""
        return output if self.start == 0 and self.stop is None else output[..., self.start : self.stop]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.of(self.module(hidden))


def layer_windows(config: Any, mrope: bool = False) -> list[int | None]:
    """Return how many positions a row sees in each layer, its own included; None: all. A grid (mRoPE) has no window."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_hidden_layers", None) is None:
        raise ValueError(f"{text.model_type} is not supported: its configuration names no num_hidden_layers")
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or []
    if kinds and hasattr(type(text), "layer_types"):  # Qwen names a window that no layer may use
        slides = [kind == "sliding_attention" for kind in kinds]
    else:  # Mistral knows no kinds of layers: a window is every layer's
        slides = [window is not None] * text.num_hidden_layers
    if any(slides) and (mrope or not (text is config or text.model_type in WINDOWED)):
        seen = f"with images, they are supported only for {', '.join(WINDOWED)}"
        why = "places in a grid have no distance" if mrope else seen
        raise ValueError(f"{text.model_type} with windows (window {window}) is not supported: {why}; use another model")
    if any(slides) and (type(window) is not int or window < 1):
        raise ValueError(f"{text.model_type}: sliding_window={window!r} must be a whole number of at least 1")
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if not kinds and getattr(text, "attention_chunk_size", None) is not None:
        others = ["chunked_attention"]
    if others:
        why = "they do not see all that a packed cache keeps"
        if any(part in kind for kind in others for part in _STATEFUL):
            why = "they keep a state instead of keys and values, which is neither compressed nor counted here"
        raise ValueError(f"{text.model_type} with layers of {', '.join(others)} is not supported: {why}")
    return [window if slides_here else None for slides_here in slides]


def check_window_runs(windows: list[int | None], implementation: str | None) -> None:
    """Raise ``ValueError`` if layers have windows and run on something else than ``sdpa``."""
    sliding = next((window for window in windows if window is not None), None)
    if sliding is not None and implementation is not None and not implementation.endswith("sdpa"):
        raise ValueError(f"a sliding window ({sliding} positions) runs on attention: sdpa, not on {implementation!r}")


class DecoderStack:
    """A loaded model's language model. Families say where it is, if it is not where most have it."""

    model: Any
    windows: list[int | None]  # as ``layer_windows`` reads them
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    """Modules of the q/v LoRA, anchored (towers have a ``q_proj`` too); it ends in ``QV``."""
    _length: Tensor | None = None

    @property
    def decoder(self) -> Any:
        """Return the language model's stack: has ``layers``, ``norm``, ``rotary_emb``, ``config``."""
        return self.model.model.language_model

    def projection(self, layer: int, side: Side) -> Projection:
        """Return a layer's projection to queries, keys or values, any LoRA included."""
        attention = self.decoder.layers[layer].self_attn
        if not hasattr(attention, FUSED):
            return Projection(getattr(attention, f"{side}_proj"))
        width = self.shape.value_dim
        queries = self.decoder.config.num_attention_heads * self.shape.head_dim
        start, stop = {"q": (0, queries), "k": (queries, queries + width), "v": (queries + width, None)}[side]
        return Projection(getattr(attention, FUSED), start, stop)

    def attention_input(self, layer: int, hidden_BND: Tensor) -> Tensor:
        """Return what a layer's projections read of its input: normed, where it has a norm before its attention."""
        norm = getattr(self.decoder.layers[layer], "input_layernorm", None)
        return hidden_BND if norm is None else norm(hidden_BND)

    def token_states(self, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, [..., D], as they enter the first layer."""
        states: Tensor = self.model.get_input_embeddings()(ids)
        factor = getattr(self.decoder, "embedding_multiplier", None)
        return states if factor is None else states * factor

    @property
    def shape(self) -> KVShape:
        """Return the cache's geometry in the model's dtype."""
        config = self.decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        element = torch.empty((), dtype=self.model.dtype).element_size()
        return KVShape(config.num_hidden_layers, config.num_key_value_heads, head_dim, element)

    @property
    def hidden_size(self) -> int:
        """Return D, the width that routers read."""
        return int(self.decoder.config.hidden_size)

    def dense_cache(self) -> DynamicCache:
        """Return an empty cache that holds all rows of every layer, windowed layers included."""
        cache = DynamicCache(config=self.decoder.config)
        if any(self.windows):  # it would let go what left a window
            cache.layers = [DynamicLayer() for _ in self.windows]
        return cache

    def window(self, layer: int, position_BN: Tensor) -> SlidingWindow | None:
        """Return the window of rows at given positions in a layer; None: they see all before them."""
        size = self.windows[layer]
        return None if size is None else SlidingWindow(size, position_BN)

    @property
    def device(self) -> torch.device:
        """Return the device of prompts and positions: that of the token embeddings. Layers may lie elsewhere."""
        table = self.model.get_input_embeddings()
        place = getattr(getattr(table, "_hf_hook", None), "execution_device", None)
        return torch.device(table.weight.device if place is None else place)

    def turns(self, layer: int) -> bool:
        """Return whether a layer turns its queries and keys by their positions."""
        if self.decoder.config.model_type in UNTURNED and any(self.windows):
            return self.windows[layer] is not None
        return bool(getattr(self.decoder.layers[layer].self_attn, "use_rope", True))

    def rotate(
        self, layer: int, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Turn [B, H, N, d] queries and keys as a layer does; mRoPE's cos and sin hold all three axes."""
        if not self.turns(layer):
            return query, key
        cos, sin = (angles.to(query.device) for angles in position_embeddings)
        module = sys.modules[type(self.decoder.layers[0].self_attn).__module__]
        own: Callable[..., tuple[Tensor, Tensor]] = getattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
        return own(query, key, cos, sin)

    def angles(self, layer: int, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a layer's rotary embedding at position ids, see ``rotary_angles``."""
        return rotary_angles(self.decoder.rotary_emb, like, position_ids, self._length, self._rotary_of(layer))

    def _rotary_of(self, layer: int) -> str | None:
        by_kind = isinstance(getattr(self.decoder.rotary_emb, "rope_type", None), dict)
        return str(self.decoder.config.layer_types[layer]) if by_kind else None

    @property
    def length_dependent(self) -> bool:
        """Return whether the rotary embedding's frequencies depend on a sequence's length."""
        return rotary_kind(self.decoder.rotary_emb) in LENGTH_DEPENDENT

    def as_long_as(self, ends: Tensor | None) -> AbstractContextManager[None]:
        """Give all angles inside the block the frequencies of one sequence: ``ends`` is past each sample's last one.

        None: those of the rows that are turned, also inside such a block.
        """
        return changed(self, _length=ends.max() if ends is not None and self.length_dependent else None)

    @torch.no_grad()
    def rotation(self, layer: int, position_ids: Tensor) -> Rotation:
        """Return a layer's rotation of queries and keys at position ids [B, N], or [3, B, N] under mRoPE."""
        cos, sin = self.angles(layer, torch.empty((), dtype=torch.float32, device=position_ids.device), position_ids)
        if not self.turns(layer):
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        cos, sin = (each.to(position_ids.device).expand(position_ids.shape[-2], -1, -1) for each in (cos, sin))
        return Rotation(cos, sin, partial(self.rotate, layer))

    @torch.no_grad()
    def output_weight(self, layer: int) -> Tensor:
        """Return a layer's ``o_proj`` weight with any LoRA on it, dequantised, [D, H * d] in fp32."""
        projection = self.decoder.layers[layer].self_attn.o_proj
        base = getattr(projection, "base_layer", projection)
        if not is_readable(base):
            raise ValueError("o_proj is quantised in another way than nf4 or int8; use another eviction")
        weight = dense_weight(base, torch.float32)
        for adapter in getattr(projection, "active_adapters", ()):
            if adapter in projection.lora_A:
                weight = weight + projection.get_delta_weight(adapter).to(weight)
        return weight

    def query_heads(self, layer: int, normed_BND: Tensor, position_BN: Tensor | None = None) -> Tensor:
        """Return a layer's queries [B, H, N, d], before rotation; by position, stretched as Ministral 3's."""
        query_BHNd = self._heads(layer, "q", normed_BND)
        settings = getattr(self.decoder.config, "rope_parameters", None) or {}
        if position_BN is None or (beta := settings.get("llama_4_scaling_beta")) is None:
            return query_BHNd
        laps_BN = position_BN.to(query_BHNd.device) // settings["original_max_position_embeddings"]
        stretched: Tensor = query_BHNd * (1 + beta * torch.log(1 + laps_BN))[:, None, :, None].to(query_BHNd.dtype)
        return stretched

    def key_heads(self, layer: int, normed_BND: Tensor) -> Tensor:
        """Return a layer's keys [B, h, N, d], alike."""
        return self._heads(layer, "k", normed_BND)

    def _heads(self, layer: int, side: Side, normed_BND: Tensor) -> Tensor:
        attention = self.decoder.layers[layer].self_attn
        projected = self.projection(layer, side)(normed_BND)
        norm = getattr(attention, f"{side}_norm", None)
        by_head = norm is not None and norm.weight.shape[-1] == attention.head_dim
        if norm is not None and not by_head:  # OLMo's, of all heads together
            projected = norm(projected)
        heads = projected.reshape(*projected.shape[:2], -1, attention.head_dim)
        return (norm(heads) if norm is not None and by_head else heads).transpose(1, 2)

    def run_layers(
        self,
        hidden_BND: Tensor,
        attention_mask_BN: Tensor,
        position_ids: Tensor,
        cache: Cache | None = None,
        start: int = 0,
        stop: int | None = None,
        deep_nBND: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Run decoder layers ``start`` to ``stop`` (exclusive), without the final norm.

        The padding mask is always passed: without it, transformers takes jumps in position ids for packed sequences.
        ``position_ids`` are [B, N], or [3, B, N] under mRoPE; ``options`` reach every layer's attention function.
        """
        decoder = self.decoder
        given = {"inputs_embeds": hidden_BND, "attention_mask": attention_mask_BN, "layer_idx": start, CACHE: cache}
        text_positions = position_ids if position_ids.dim() == 2 else None
        full = create_causal_mask(config=decoder.config, position_ids=text_positions, **given)
        mask: Any = full
        if any(sizes := set(self.windows[start:stop])):
            assert attention_mask_BN.shape[1] == hidden_BND.shape[1]
            in_blocks = decoder.config._attn_implementation == f"{PREFIX}sdpa"
            mask = {size: _windowed(full, attention_mask_BN, position_ids, size, in_blocks) for size in sizes}
        return self.through(decoder.layers[start:stop], hidden_BND, mask, position_ids, cache, deep_nBND, **options)

    def decode(self, hidden_BqD: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Run all layers on new tokens after a packed prompt, which needs no mask, without the final norm."""
        return self.through(self.decoder.layers, hidden_BqD, None, position_ids, cache)

    def through(
        self,
        layers: Any,
        hidden: Tensor,
        mask: Any,
        position_ids: Tensor,
        cache: Cache | None,
        deep_nBND: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Run some layers under transformers' mask, or one mask, or ``Seen``, for each window; to where it was."""
        home, text_positions = hidden.device, position_ids if position_ids.dim() == 2 else None
        angles: dict[str | None, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            index = layer.self_attn.layer_idx
            if (kind := self._rotary_of(index)) not in angles:
                angles[kind] = self.angles(index, hidden, position_ids)
            own = mask[self.windows[index]] if isinstance(mask, dict) else mask
            seen = {"seen": own} if isinstance(own, Seen) else {}
            given = {"position_embeddings": angles[kind], "use_cache": cache is not None, CACHE: cache, **seen}
            given["attention_mask"] = None if seen else own
            hidden = layer(hidden, position_ids=text_positions, **given, **options)
            if deep_nBND is not None and index < len(deep_nBND):
                hidden = hidden + deep_nBND[index].to(hidden.device)
        return hidden.to(home)

    def logits(self, hidden_BND: Tensor) -> Tensor:
        """Apply the final norm, the language-model head and what the model does to its logits, [B, N, V]."""
        logits: Tensor = self.model.get_output_embeddings()(self.decoder.norm(hidden_BND))
        config = self.decoder.config
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.to(hidden_BND.device)


def _windowed(
    full: Tensor | None, visible_BN: Tensor, position_BN: Tensor, size: int | None, in_blocks: bool
) -> Tensor | Seen | None:
    """Return a layer's mask, bool [B, 1, N, N]; full if every row is in every window; ``in_blocks``: its parts."""
    visible_BN = visible_BN.bool()
    first_B = position_BN.masked_fill(~visible_BN, torch.iinfo(position_BN.dtype).max).amin(-1)
    extent_B = position_BN.masked_fill(~visible_BN, 0).amax(-1) - first_B + 1
    if size is None or bool((extent_B < size).all()):
        return full
    if in_blocks:  # of full attention there is no mask where nothing is padding
        return Seen(None if full is None else visible_BN, SlidingWindow(size, position_BN))
    rows_N = torch.arange(position_BN.shape[1], device=position_BN.device)
    allowed_BNN = SlidingWindow(size, position_BN).of_rows(0, len(rows_N)) & visible_BN[:, None]
    # a row of padding sees itself: one that sees nothing can turn NaN
    return (allowed_BNN & (rows_N[:, None] >= rows_N) | (rows_N[:, None] == rows_N))[:, None]

"""The language model inside a backbone: its layers, their windows, heads and positions, and the loop over them.

One code for training and inference. Windows are served for ``WINDOWED`` model types; other kinds of attention are
refused. Legend: B batch, N positions, D model width, V vocabulary, H query heads, h key-value heads, d head width,
n layers with features of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.families.positions import LENGTH_DEPENDENT, rotary_angles, rotary_kind
from subtoken_train.forks import undoing
from subtoken_train.functional.causal_attention import Seen
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.functional.rotary import Rotation
from subtoken_train.functional.window import SlidingWindow
from subtoken_train.ledger.kv_budget import KVShape

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""``cache`` from transformers 5.24 on, where the old name costs a warning a layer and step."""


PREFIX = "subtoken_"
"""Prefix of attention functions that also read packed storage."""
WINDOWED = ("mistral", "qwen2", "qwen3")
"""Language models whose windows are served."""
_GEMMA = "its windowed layers turn positions by a rotary base of their own, and one base for all layers is served here"
UNSERVED = {"gemma3": _GEMMA, "gemma3_text": _GEMMA}
"""Model types that people ask for, and what is missing."""


def layer_windows(config: Any, mrope: bool = False) -> list[int | None]:
    """Return how many positions a row sees in each layer, its own included; None: all before it.

    Args:
        config: a model's configuration; what its text model says counts.
        mrope: whether a row's position is a place in a grid, in which a window has no length.

    Raises:
        ValueError: a layer attends in a way that is not served, see the message.
    """
    text = config.get_text_config(decoder=True)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or []
    if text.model_type == "mistral":  # it has no kinds of layers: a window is every layer's
        slides = [window is not None] * text.num_hidden_layers
    else:  # Qwen names a window that no layer may use
        slides = [kind == "sliding_attention" for kind in kinds] or [window is not None] * text.num_hidden_layers
    if any(slides):
        _check_window(text.model_type, window, mrope)
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if not kinds and getattr(text, "attention_chunk_size", None) is not None:
        others = ["chunked_attention"]
    if others:
        raise ValueError(
            f"{text.model_type} with layers of {', '.join(others)} is not supported: they do not see all that a packed "
            "cache keeps; use a model with full attention, or sliding windows, in every layer"
        )
    return [window if slides_here else None for slides_here in slides]


def _check_window(model_type: str, window: Any, mrope: bool) -> None:
    if mrope or model_type not in WINDOWED:
        why = "places in a grid have no distance" if mrope else f"served are those of {', '.join(WINDOWED)}"
        raise ValueError(
            f"{model_type} with sliding-window attention (window {window}) is not supported: {why}; use a model, or a "
            "config.json, without it"
        )
    if type(window) is not int or window < 1:
        raise ValueError(f"{model_type}: sliding_window={window!r} must be a whole number of at least 1")


def check_window_runs(windows: list[int | None], implementation: str | None) -> None:
    """Raise ``ValueError`` if layers have windows and run on something else than ``sdpa``."""
    sliding = next((window for window in windows if window is not None), None)
    if sliding is not None and implementation is not None and not implementation.endswith("sdpa"):
        raise ValueError(
            f"a sliding window ({sliding} positions) runs on attention: sdpa, not on {implementation!r}, which counts "
            "rows instead of positions; set model.backbone.attention: sdpa"
        )


class DecoderStack:
    """A loaded model's language model. Families say where it is, if it is not where most have it."""

    model: Any
    windows: list[int | None]
    """Positions that a row sees in each layer, its own included; None where it sees all before it."""
    _length: Tensor | None = None

    @property
    def decoder(self) -> Any:
        """Return the language model's stack: has ``layers``, ``norm``, ``rotary_emb``, ``config``."""
        return self.model.model.language_model

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

    def rotate(self, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Apply Llama's rotary embedding to [B, H, N, d] queries and keys; mRoPE's cos and sin hold all three axes."""
        cos, sin = (angles.to(query.device) for angles in position_embeddings)
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, cos, sin)
        return rotated

    def angles(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary embedding at position ids, see ``rotary_angles``."""
        return rotary_angles(self.decoder.rotary_emb, like, position_ids, self._length)

    @property
    def length_dependent(self) -> bool:
        """Return whether the rotary embedding's frequencies depend on a sequence's length."""
        return rotary_kind(self.decoder.rotary_emb) in LENGTH_DEPENDENT

    @contextmanager
    def as_long_as(self, ends: Tensor) -> Iterator[None]:
        """Give all angles inside the block the frequencies of one sequence, of which only parts may run.

        Args:
            ends: one past the last position of each sample, of any shape; the largest counts.
        """
        with undoing(partial(setattr, self, "_length", self._length)):
            if self.length_dependent:
                self._length = ends.max()
            yield

    @torch.no_grad()
    def rotation(self, position_ids: Tensor) -> Rotation:
        """Return the rotation of queries and keys at position ids [B, N], or [3, B, N] under mRoPE."""
        like = torch.empty((), dtype=torch.float32, device=position_ids.device)
        cos, sin = self.angles(like, position_ids)
        batch = position_ids.shape[-2]
        return Rotation(*(angles.to(position_ids.device).expand(batch, -1, -1) for angles in (cos, sin)))

    @torch.no_grad()
    def output_weight(self, layer: int) -> Tensor:
        """Return a layer's ``o_proj`` weight with any LoRA on it, dequantised, [D, H * d] in fp32.

        Raises:
            ValueError: a weight that is quantised by other means than ``nf4`` and ``int8``.
        """
        projection = self.decoder.layers[layer].self_attn.o_proj
        base = getattr(projection, "base_layer", projection)
        if not is_readable(base):
            raise ValueError("o_proj is quantised by other means than nf4 and int8; take another eviction")
        weight = dense_weight(base, torch.float32)
        for adapter in getattr(projection, "active_adapters", ()):
            if adapter in projection.lora_A:
                weight = weight + projection.get_delta_weight(adapter).to(weight)
        return weight

    def query_heads(self, layer: int, normed_BND: Tensor) -> Tensor:
        """Return a layer's queries [B, H, N, d] of its normed input, before the rotary embedding, after any norm."""
        return self._heads(layer, "q", normed_BND)

    def key_heads(self, layer: int, normed_BND: Tensor) -> Tensor:
        """Return a layer's keys [B, h, N, d], alike."""
        return self._heads(layer, "k", normed_BND)

    def _heads(self, layer: int, side: str, normed_BND: Tensor) -> Tensor:
        attention = self.decoder.layers[layer].self_attn
        projected: Tensor = getattr(attention, f"{side}_proj")(normed_BND)
        heads = projected.reshape(*projected.shape[:2], -1, attention.head_dim)
        norm = getattr(attention, f"{side}_norm", None)
        return (heads if norm is None else norm(heads)).transpose(1, 2)

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

        The padding mask is always passed: without one, transformers takes jumps in the position ids (of shortened
        inputs) for packed sequences and silently cuts the attention between the pieces.
        ``position_ids`` are [B, N], or [3, B, N] under mRoPE; ``deep_nBND`` is added as in ``through``; ``options``
        reach every layer's attention function.
        """
        decoder = self.decoder
        full = create_causal_mask(
            config=decoder.config,
            inputs_embeds=hidden_BND,
            attention_mask=attention_mask_BN,
            position_ids=_text_positions(position_ids),
            layer_idx=start,
            **{CACHE: cache},
        )
        mask: Any = full
        if any(sizes := set(self.windows[start:stop])):
            assert attention_mask_BN.shape[1] == hidden_BND.shape[1]
            in_blocks = decoder.config._attn_implementation == f"{PREFIX}sdpa"
            mask = {size: _windowed(full, attention_mask_BN, position_ids, size, in_blocks) for size in sizes}
        return self.through(decoder.layers[start:stop], hidden_BND, mask, position_ids, cache, deep_nBND, **options)

    def decode(self, hidden_BqD: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Run all decoder layers on new tokens after a packed prompt, without the final norm.

        No mask is made: packed storage holds no padding, and new tokens see each other causally. ``position_ids`` are
        [B, q], or [3, B, q] under mRoPE.
        """
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
        """Run some decoder layers under transformers' mask, or under one mask for each window.

        Where an attention makes its own masks, ``Seen`` stands in a mask's place.

        ``deep_nBND``: what the first n layers of the model add to their outputs (``Rows.deep_nBMD``). Where the layers
        lie on several devices, what comes out lies where ``hidden`` did.
        """
        home = hidden.device
        position_embeddings = self.angles(hidden, position_ids)
        for layer in layers:
            own = mask[self.windows[layer.self_attn.layer_idx]] if isinstance(mask, dict) else mask
            seen = {"seen": own} if isinstance(own, Seen) else {}
            hidden = layer(
                hidden,
                attention_mask=None if seen else own,
                position_ids=_text_positions(position_ids),
                use_cache=cache is not None,
                position_embeddings=position_embeddings,
                **{CACHE: cache},
                **seen,
                **options,
            )
            if deep_nBND is not None and (index := layer.self_attn.layer_idx) < len(deep_nBND):
                hidden = hidden + deep_nBND[index].to(hidden.device)
        return hidden.to(home)

    def logits(self, hidden_BND: Tensor) -> Tensor:
        """Apply the final norm and the language-model head, [B, N, V]."""
        logits: Tensor = self.model.get_output_embeddings()(self.decoder.norm(hidden_BND))
        return logits.to(hidden_BND.device)


def _windowed(
    full: Tensor | None, visible_BN: Tensor, position_BN: Tensor, size: int | None, in_blocks: bool
) -> Tensor | Seen | None:
    """Return a layer's mask, bool [B, 1, N, N]; full attention's if every row is in every other's window.

    ``in_blocks``: what it would be made of, for an attention that has the mask of a block of rows at a time.
    """
    visible_BN = visible_BN.bool()
    last = torch.iinfo(position_BN.dtype).max
    first_B = position_BN.masked_fill(~visible_BN, last).amin(-1)
    extent_B = position_BN.masked_fill(~visible_BN, 0).amax(-1) - first_B + 1
    if size is None or bool((extent_B < size).all()):
        return full
    if in_blocks:  # of full attention there is no mask where nothing is padding
        return Seen(None if full is None else visible_BN, SlidingWindow(size, position_BN))
    rows_N = torch.arange(position_BN.shape[1], device=position_BN.device)
    allowed_BNN = SlidingWindow(size, position_BN).of_rows(0, len(rows_N)) & visible_BN[:, None]
    # a row of padding sees itself: one that sees nothing can turn NaN
    return (allowed_BNN & (rows_N[:, None] >= rows_N) | (rows_N[:, None] == rows_N))[:, None]


def _text_positions(position_ids: Tensor) -> Tensor | None:
    """Return position ids as transformers' layers take them; None under mRoPE."""
    return position_ids if position_ids.dim() == 2 else None

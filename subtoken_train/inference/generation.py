"""``generate`` of transformers on a packed cache: its loop, sampling, beams and streamers, with our two passes.

While ``compressed`` is active the model's ``forward`` is ours: its first call runs reducer, routers and eviction and
fills the cache, later ones decode. transformers checks its own settings; refused is what a packed cache cannot serve.

Legend: B batch, N positions, q appended tokens.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import broken_rows
from subtoken_train.errors import check_range, no_numbers, refuse, unknown_name
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.family import Family
from subtoken_train.forks import undoing
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, append_rest, decode, prefill
from subtoken_train.inference.prompt_inputs import IMAGE_INPUTS
from subtoken_train.types import Batch

_COUNTS = {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences"}
_TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id"}
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing", "use_mtp"), (False,)),
    **dict.fromkeys(("prefill_chunk_size", "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"), ()),
    **dict.fromkeys(("speculation_type", "custom_generate", "dola_layers", "constraints", "force_words_ids"), ()),
    **dict.fromkeys(("position_ids", "cache_position", "inputs", "inputs_embeds", "token_type_ids", "labels"), ()),
    **{"use_cache": (True,), "guidance_scale": (1,), "penalty_alpha": (0,), "num_beam_groups": (1,)},
    **{"trust_remote_code": (False,), "cache_implementation": ("hybrid",)},  # which transformers leaves out itself
}
"""Arguments under which the model would be called in another way, or would have to return more, and the values of each
that change nothing."""
_OWN = vars(GenerationConfig()).keys() | inspect.signature(GenerationMixin.generate).parameters.keys()
KNOWN = _OWN.union(REFUSED, IMAGE_INPUTS, ("input_ids", "attention_mask", "regions", "tokenizer")) - {"self", "kwargs"}
"""Everything that ``generate`` may be given."""


def check_arguments(call: str, given: Iterable[str], own: Collection[str] = ()) -> None:
    """Refuse what neither ``generate`` takes nor ``call``, which has ``own`` arguments."""
    for name in given:
        if name not in KNOWN and name not in own:
            hidden = vars(GenerationConfig()).keys() | {each for each, neutral in REFUSED.items() if not neutral}
            listed = ", ".join(sorted((KNOWN - hidden).union(own)))
            listed += ", and every setting of transformers' GenerationConfig"
            raise unknown_name(f"argument of {call}", name, KNOWN.union(own), listed)


def telling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call of the model without those that say nothing: None, ``use_cache=True``."""
    neutral = {**REFUSED, "return_dict": (True,), "logits_to_keep": (1,)}

    def says(name: str, value: Any) -> bool:
        return value is not None and not any(_same(value, each) for each in neutral.get(name, ()))

    return {name: value for name, value in given.items() if says(name, value) and not _untyped(name, value)}


def _untyped(name: str, value: Any) -> bool:
    """A tokenizer writes token types that are all 0 for models that read them."""
    return name == "token_type_ids" and isinstance(value, Tensor) and not bool(value.any())


def settings_used(given: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """Return the settings that transformers will use, each checked: given ones, their configuration's, the model's."""
    config = given.get("generation_config")
    other = config is not None and not isinstance(config, GenerationConfig)
    refuse((other, f"generation_config must be a transformers GenerationConfig, not {type(config).__name__}"))
    whole = {name: value for name, value in vars(own).items() if name[0] != "_"}
    further = {} if config is None else {k: v for k, v in vars(config).items() if v is not None and k[0] != "_"}
    # a copy of the model's configuration may hold what its authors wrote
    asked = {name: value for name, value in further.items() if not _same(value, whole.get(name))}
    asked |= {name: value for name, value in given.items() if value is not None or name == "use_cache"}
    check_arguments("generate", asked)
    for name, value in asked.items():
        if (name in _COUNTS and not isinstance(value, Integral)) or (name in _TOKENS and isinstance(value, str)):
            raise ValueError(f"{name}={value!r} must be a whole number")
    deaf = not hasattr(asked.get("streamer"), "put") and "streamer" in asked
    refuse((deaf, "streamer has no put; give one of transformers, as TextStreamer(tokenizer)"))
    for name, neutral in REFUSED.items():
        value = asked.get(name, whole.get(name))
        if (value is not None or name in asked) and not any(_same(value, each) for each in neutral):
            shown = f"={value!r}"[:60] if isinstance(value, bool | int | float | str) or value is None else ""
            place = "" if name in asked else "model.generation_config."
            why = "the cache is SubTokenModel's own, takes one new token at a time, and gives logits alone"
            raise ValueError(f"{place}{name}{shown} does not go with a compressed cache: {why}; leave it out")
    return {**whole, **further, **given}


def steered_from_outside(own: GenerationConfig) -> GenerationConfig:
    """Return a copy of a model's configuration without what ends, copies or searches answers on its own account."""
    made = copy.deepcopy(own)
    for name, neutral in REFUSED.items():
        if getattr(made, name, None) is not None:
            setattr(made, name, next(iter(neutral), None))
    made.max_time = made.stop_strings = made.return_dict_in_generate = None
    made.num_beams = made.num_return_sequences = 1
    return made


@dataclass(frozen=True)
class GenerateCall:
    """A call of ``generate``: its ids, their mask as it was given, and the settings that transformers will use."""

    ids_BN: Tensor
    mask: Any
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, given: dict[str, Any], model: Any) -> Self:
        """Check the arguments of a call on a model of transformers; what says nothing is taken out of them."""
        for name in [name for name, value in given.items() if _untyped(name, value)]:
            del given[name]
        settings = settings_used(given, model.generation_config)
        ids_BN = check_ids(given.get("input_ids"), model.get_input_embeddings().num_embeddings)
        for name in ("num_beams", "num_return_sequences"):
            check_range(name, settings.get(name), 1)
        return cls(ids_BN, given.get("attention_mask"), settings)

    @property
    def beams(self) -> int:
        """Running beams of each prompt."""
        return int(self.settings.get("num_beams") or 1)

    @property
    def copies(self) -> int:
        """Rows that transformers makes of each prompt."""
        return max(self.beams, int(self.settings.get("num_return_sequences") or 1))

    def room(self, held: int | None = None) -> int | None:
        """Return how many tokens a cache of ``held`` (None: all ids) may still receive; None if unknown."""
        new, whole = self.settings.get("max_new_tokens"), self.settings.get("max_length")
        if new is None and whole is None:
            return None
        given = self.ids_BN.shape[1]
        last: int = given + new if new is not None else cast("int", whole)
        return max(0, last - (given if held is None else held) - 1)

    @property
    def visible(self) -> Tensor:
        """Real tokens of prompts, bool [B, N]: by the mask, else as transformers infers them from padding."""
        if self.mask is None:
            tokens = (self.settings.get(name) for name in ("pad_token_id", "eos_token_id"))
            pad, end = ([] if each is None else torch.as_tensor(each).flatten().tolist() for each in tokens)
            pad = pad or end[:1]
            infers = bool(pad) and pad[0] not in end
            visible = self.ids_BN != pad[0] if infers else torch.ones_like(self.ids_BN, dtype=torch.bool)
        else:
            visible = _read_mask(self.mask, tuple(self.ids_BN.shape)).to(self.ids_BN.device)
        empty, row = not bool((shown_B := visible.any(-1)).all()), int(shown_B.int().argmin())
        refuse((empty, f"prompt {row} is all padding; every row of input_ids needs at least one token"))
        return visible

    def check_turn(self, cached_ids_BN: Tensor, cached: int) -> None:
        """Raise ``ValueError`` unless the ids go on from a cache of ``cached`` tokens: all so far, or the new ones."""
        ids_BN, mask, (rows, prompt) = self.ids_BN, self.mask, cached_ids_BN.shape
        again, held = "start again without past_key_values", f"past_key_values holds {rows} rows"
        copies = "num_beams and num_return_sequences make copies of prompts, which are in past_key_values"
        refuse(
            (self.copies > 1, f"{copies}; leave both out, or {again}"),
            (len(ids_BN) != rows, f"{held} and input_ids {len(ids_BN)}; give as many, or batch_select_indices"),
        )
        alone = isinstance(mask, Tensor) and mask.shape[-1:] != ids_BN.shape[-1:]
        total = cached + ids_BN.shape[1] if alone else ids_BN.shape[1]
        if mask is not None:
            _read_mask(mask, (rows, total))
        seen = f"past_key_values has seen {cached} tokens and input_ids end after {total}"
        refuse((total <= cached, f"{seen}; give everything so far and at least one new token"))
        other = not alone and not torch.equal(ids_BN[:, :prompt].to(cached_ids_BN.device).long(), cached_ids_BN.long())
        words = "input_ids do not begin with the prompt that past_key_values holds"
        refuse((other, f"{words}; give everything so far, or {again}"))


def check_ids(ids: Any, vocabulary: int) -> Tensor:
    """Return token ids, [B, N], once they are checked."""
    if not isinstance(ids, Tensor) or ids.numel() == 0:
        raise ValueError("generate needs input_ids with at least one token; pass the processor's whole output")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        words = f"input_ids must be whole numbers [batch, tokens], int64 or int32, not {_kind(ids)}"
        raise ValueError(f'{words}; a processor makes them with return_tensors="pt"')
    low, high = int(ids.min()), int(ids.max())
    held = f"input_ids hold {low if low < 0 else high}, but the model's tokens are 0 to {vocabulary - 1}"
    refuse((low < 0 or high >= vocabulary, f"{held}; use its own tokenizer"))
    return ids


def _same(value: Any, other: Any) -> bool:
    return type(value) is not Tensor and type(other) is not Tensor and bool(value == other)


def _read_mask(mask: Any, shape: tuple[int, ...]) -> Tensor:
    unlike = not isinstance(mask, Tensor) or tuple(mask.shape) != shape
    words = f"attention_mask must be {list(shape)} as input_ids are, not {_kind(mask)}"
    refuse((unlike, f"{words}; pass the processor's whole output"))
    other = not bool(((mask == 0) | (mask == 1)).all())
    refuse((other, "attention_mask holds other values than 0 (padding) and 1 (tokens)"))
    read: Tensor = mask.bool()
    return read


def _kind(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{list(thing.shape)} of {thing.dtype}".replace("torch.", "")
    return type(thing).__name__


ASKED = 32
"""Decoded tokens between two looks at a GPU for NaN among their logits."""
_serving: dict[int, object] = {}
"""Models that a call runs on, by identity, and the call."""


@contextmanager
def serving(family: Family) -> Iterator[None]:
    """Let one call at a time use a model, whose language model reads packed storage inside the block."""
    call, own = object(), id(family.model)
    if _serving.setdefault(own, call) is not call:  # in one step, whatever other threads do
        raise ValueError("this model is already generating, one call at a time: wait for the other, or load it twice")
    with undoing(partial(_serving.pop, own)), reading_packed(family.decoder.config):
        yield


@contextmanager
def compressed(
    backbone: CompressedBackbone,
    compression: Compression,
    prompts: Batch | None,
    cache: PackedCache,
    filled: Callable[[Prefill], None] | None,
    room: int | None = None,
) -> Iterator[None]:
    """Let ``backbone.model.generate`` run on packed caches inside the block.

    ``prompts`` are what the first call's input ids stand for, ``filled`` is called when they are in the ``cache``; both
    None: it is a branch of a context. ``room`` tokens are appended at most; None: not known.
    """
    model, watch = backbone.model, _LogitWatch()
    asks = filled is None  # a context, and what the first call appends to it is the question, as ``ask`` does
    if cache.holds_prompt and room is not None:
        cache.reserve(room)

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **further: Any) -> CausalLMOutputWithPast:
        nonlocal asks
        if further.get(CACHE) is not cache:
            words = "a logits processor or a stopping criterion must not run the model itself"
            raise ValueError(f"the model was called with another cache while it generated; {words}")
        if asks or (cache.holds_prompt and input_ids.shape[1] > 1):  # a generated token is one, whatever it is
            _check_append(backbone, input_ids, attention_mask, None if asks else cache.prompt_length)
        if asks:
            asks, padding = False, torch.zeros_like(input_ids, dtype=torch.bool)
            if attention_mask is not None:  # transformers leaves out one that is all ones
                padding = attention_mask[:, cache.prompt_length :] == 0
            logits = append_rest(backbone, input_ids, padding, cache, compression.prefill_chunk)
        elif cache.holds_prompt:
            logits = watch.looked_at(decode(backbone, input_ids, cache), at_once=cache.evictor is not None)
        else:
            assert prompts is not None
            assert filled is not None
            assert input_ids.shape[1] == prompts.input_ids_BN.shape[1]
            result = prefill(backbone, prompts, cache, compression)
            filled(result)
            copies = len(input_ids) // len(prompts.input_ids_BN)
            logits = result.logits_BV.repeat_interleave(copies, dim=0)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
            if room is not None:
                cache.reserve(room)
        return CausalLMOutputWithPast(logits=logits[:, None], **{CACHE: cache})

    # transformers checks generate's arguments against the signature
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    # a compiled forward and accelerate's hooks lie on the object; a compiled call would trace into ours
    with cache.answering(), _attributes(model, forward=forward, _compiled_call_impl=None):
        yield
    watch.check()


@contextmanager
def _attributes(model: nn.Module, **values: Any) -> Iterator[None]:
    """Attributes of the object itself for a while; then what was there, and nothing where nothing was."""
    held = vars(model)
    before = {name: held[name] for name in values if name in held}

    def undo() -> None:
        for name in values:
            held.pop(name, None)
        held.update(before)

    with undoing(undo):
        held.update(values)
        yield


@dataclass
class _LogitWatch:
    steps: int = 0
    broken: Tensor | None = None
    dtype: torch.dtype | None = None

    def looked_at(self, logits_BV: Tensor, at_once: bool) -> Tensor:
        """Return the logits; a row that chooses no token is 0, which every way of sampling takes."""
        broken_B = broken_rows(logits_BV)
        self.steps, self.dtype = self.steps + 1, logits_BV.dtype
        self.broken = broken_B.any() if self.broken is None else self.broken | broken_B.any()
        if at_once or self.steps % ASKED == 0 or logits_BV.device.type == "cpu":
            self.check()
        return logits_BV.masked_fill(broken_B[:, None], 0)

    def check(self) -> None:
        if self.broken is not None and bool(self.broken):
            raise no_numbers(f"in the first {self.steps + 1} tokens of an answer", self.dtype)


def _check_append(backbone: CompressedBackbone, ids_Bq: Tensor, mask_BN: Tensor | None, first: int | None) -> None:
    padded = first is not None and mask_BN is not None and not bool(mask_BN[:, first:].all())
    words = "the tokens after a compressed prompt are padded, and a packed cache stores no padding"
    shown = bool(backbone.family.is_visual(ids_Bq[:, 1:]).any())  # the first is the last generated one, whatever it is
    image = "the tokens after a compressed prompt hold an image, and reducer and eviction act on whole prompts"
    refuse(
        (shown, f"{image}; start again with all images, without past_key_values"),
        (padded, f"{words}; continue samples whose answers or new turns differ in length one by one"),
    )

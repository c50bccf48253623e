"""``SubTokenModel``: an adapter, or a plain backbone, that generates on a compressed cache."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pipelines import base

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import check_together, check_word, refuse
from subtoken_train.families.backbone_config import DTYPES, BackboneConfig
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.in_memory import family_in_memory
from subtoken_train.families.load import check_on_one_device
from subtoken_train.inference import prompt_inputs
from subtoken_train.inference.answer_stream import AnswerStream, answer_text, pieces, same_autocast
from subtoken_train.inference.cache_report import CacheReport, report, warn_of_emptied
from subtoken_train.inference.compressed_context import CompressedContext, asked_of, context_batches, questions_of
from subtoken_train.inference.compression import Compression, CompressionSettings, compression_of
from subtoken_train.inference.generation import GenerateCall, check_arguments, check_ids, compressed, serving, telling
from subtoken_train.inference.pool import device_of, load_backbone, loading_of
from subtoken_train.inference.prefill import Prefill, with_gates
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import untrained_routing
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch, Plan


@dataclass(repr=False)
class LastPrompt:
    """The last prompt that was compressed; ``prefill_seconds`` are 0 where the last call went on from the cache."""

    batch: Batch
    plan: Plan
    cache: PackedCache
    prefill_seconds: float
    decode_seconds: float = 0.0
    beams: int = 1


def _reducer_of(reducer: str | Reducer | None, keep_ratio: float | None) -> Reducer | None:
    if isinstance(reducer, str) and keep_ratio is not None:
        return build_reducer(reducer, keep_ratio)
    if isinstance(reducer, str) or keep_ratio is not None:
        words = f"reducer={reducer!r}, keep_ratio={keep_ratio!r}: a name needs a share that stays"
        raise ValueError(f"{words}, for instance reducer='fastv', keep_ratio=0.25")
    if not isinstance(reducer, Reducer | None):
        raise ValueError(f"reducer is of type {type(reducer).__name__}; give a name and keep_ratio, or a built reducer")
    return reducer


def _one_of(names: str, first: Any, second: Any) -> Any:
    refuse((first is not None and second is not None, f"{names} are two names for the same argument; give one of them"))
    return second if first is None else first


ANSWER_TOKENS = 64
"""Most tokens of an answer, unless the caller says."""
_OF_FAMILY = ("device", "processor", "tokenizer")
_OF_MODEL = (
    *("config", "dtype", "generation_config", "can_generate", "training", "parameters", "num_parameters"),
    *("hf_device_map", "input_modalities", "output_modalities", "name_or_path", "get_memory_footprint"),
)
for _task in ("text-generation", "image-text-to-text", ""):  # pipelines complain of a class that they do not know
    getattr(base, "SUPPORTED_PEFT_TASKS", {}).setdefault(_task, []).append("SubTokenModel")


def _keywords(call: Callable[..., Any]) -> list[str]:
    return [name for name, each in inspect.signature(call).parameters.items() if each.kind is each.KEYWORD_ONLY]


class SubTokenModel:
    """Generates with token reducer, routers and KV eviction on a cache that is as small as they promise.

    The router and the reducer run on prompts only; evictions act after a prompt's pass, so they cannot change the first
    token. A model object serves one call at a time; the model itself is not changed.

    Args:
        model: a transformers model of a family that is served, in evaluation mode.
        processor: the processor that was published with it (of a language model: its tokenizer).
        reducer: name of a token reducer, or one that is built (``build_reducer("fastv", 0.25)``); None: all stay.
        keep_ratio: of a reducer by name: tokens kept / tokens before, in (0, 1].
        groups: S and K: of every token that the reducer leaves, K of S value groups stay, chosen without training.
        selector: what chooses them: ``value_norm`` (None), ``output_norm``, ``random``, ``static`` or ``leading``.
        layout: of the groups: ``contiguous`` (None), pieces of the whole value vector, or ``per_head``, of every head.

    Attributes:
        last: the prompt that ``generate`` compressed last; None where ``ask`` was called since.
    """

    backbone: CompressedBackbone
    compression: Compression
    last: LastPrompt | None
    _context: CompressedContext | None

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        reducer: str | Reducer | None = None,
        keep_ratio: float | None = None,
        groups: tuple[int, int] | str | None = None,
        selector: str | None = None,
        layout: str | None = None,
        **settings: Unpack[CompressionSettings],
    ) -> None:
        compression = compression_of(settings, _keywords(type(self).__init__))
        routing = untrained_routing(groups, selector, layout)
        own, family = _reducer_of(reducer, keep_ratio) or build_reducer("none"), family_in_memory(model, processor)
        with reading_packed(family.decoder.config):
            bank = None if routing is None else RouterBank(routing, family.hidden_size, family.shape)
            self._take(CompressedBackbone(family, own, bank), compression)

    @classmethod
    def around(cls, backbone: CompressedBackbone, compression: Compression | None = None) -> Self:
        """Make a model around a compressed backbone, with a compression or without."""
        made = cls.__new__(cls)
        made._take(backbone, compression or Compression())
        return made

    def _take(self, backbone: CompressedBackbone, compression: Compression) -> None:
        compression = with_gates(backbone, compression)
        compression.check(backbone.family)
        self.backbone, self.compression = backbone.eval(), compression
        self.last, self._context = None, None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        backbone: BackboneConfig | str | None = None,
        reducer: str | Reducer | None = None,
        keep_ratio: float | None = None,
        device_map: str | int | torch.device | None = None,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        groups: tuple[int, int] | str | None = None,
        selector: str | None = None,
        layout: str | None = None,
        byte_share: float | None = None,
        **settings: Unpack[CompressionSettings],
    ) -> Self:
        """Load an adapter with the backbone that it names, or a backbone alone.

        Args:
            path: an adapter (folder or Hub id), or a backbone for published methods without an adapter. What comes from
                the Hub is cached, and read from the cache where HF_HUB_OFFLINE is set.
            revision: branch, tag or commit of a Hub id.
            backbone: for an adapter: where its backbone is, or how to load it; its identity is checked.
            device_map: a device (``cuda:0``), or ``auto``: the first GPU, or all if it does not hold the model; or CPU.
                ``device`` is the same.
            dtype: of the frozen weights; ``auto``: an adapter's own, of a backbone alone that of its files. Default: an
                adapter's own, of a backbone alone float32. ``torch_dtype`` is the same.
            groups: for a backbone alone, as ``selector`` and ``layout``: value groups without training.
            byte_share: what an adapter's routers with one byte budget keep; None: what they were trained to keep.
            settings: how caches are compressed, see ``CompressionSettings``.
        """
        compression = compression_of(settings, _keywords(cls.from_pretrained))
        routing, own = untrained_routing(groups, selector, layout), _reducer_of(reducer, keep_ratio)
        dtype = _one_of("dtype and torch_dtype", dtype, torch_dtype)
        place = _one_of("device and device_map", device, device_map)
        how: dict[str, Any] = {"loading": loading_of(path, revision, dtype), "routing": routing}
        loaded = load_backbone(path, revision, backbone, own, place, byte_share=byte_share, **how)
        return cls.around(loaded, compression)

    def to(
        self, device: str | int | torch.device | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move the model and its routers to a device, or to a dtype; caches of earlier calls are let go."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None:
            check_word("dtype", str(dtype).removeprefix("torch."), DTYPES)
        before = (self.device, self.dtype)
        place = before[0] if device is None else device_of(device)
        check_on_one_device(self.backbone.model, "a move")
        with serving(self.backbone.family):
            self.backbone.model.to(place, dtype)
            self.backbone.to(place)
        if (self.device, self.dtype) != before:
            self.last = self._context = None
        return self

    def eval(self) -> Self:
        """Return the model, which is in evaluation mode always."""
        return self

    def __repr__(self) -> str:
        own, routing = self.backbone, self.backbone.active_routing
        parts = [f"{type(own.model).__name__} on {self.device}"]
        parts += [] if own.reducer.keep_ratio == 1 else [f"{own.reducer.name} {own.reducer.keep_ratio:.6g}"]
        parts += [] if routing is None else [routing.words]
        parts += [] if self.compression.label == "-" else [self.compression.label]
        return f"SubTokenModel({', '.join(parts)})"

    def __getattr__(self, name: str) -> Any:
        """The backbone's ``device``, ``processor``, ``tokenizer``; what is read of its model, as ``config``."""
        if name in _OF_FAMILY:
            return getattr(self.backbone.family, name)
        if name in _OF_MODEL:
            return getattr(self.backbone.model, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *,
        past_key_values: PackedCache | None = None,
        cache: PackedCache | None = None,
        context_length: int | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Run a prompt, or the tokens after it (``cache=model.last.cache``), for a decoding loop of one's own.

        Args:
            input_ids: of the prompts, [B, N]; with a cache those that follow what is in it, alone.
            past_key_values: of the call before; None: ``input_ids`` are prompts, which are compressed.
            inputs: the rest of ``inputs`` or of the processor: masks and pictures of prompts.

        Returns:
            ``logits`` [B, 1, V] after the last token, without gradient, and the cache, which grows in place.
        """
        family, clock = self.backbone.family, time.perf_counter()
        ids, inputs = check_ids(input_ids, family.model.get_input_embeddings().num_embeddings), telling(inputs)
        for name in inputs:
            check_word("input", name, {"attention_mask", "regions", *prompt_inputs.IMAGE_INPUTS})
        past: PackedCache | None = _one_of("cache and past_key_values", cache, past_key_values)
        late = past is not None and ", ".join([*inputs, *["context_length"] * (context_length is not None)])
        refuse((late, f"with a cache the new ids alone are given; leave {late} out"))
        with serving(family):
            if past is None:
                call = GenerateCall(ids, inputs.get("attention_mask"), vars(family.model.generation_config))
                batch = prompt_inputs.batch_from_inputs(family, ids, call.visible, inputs, context_length)
                cache, self.last = PackedCache(family.shape.num_layers), None
            else:
                batch, cache = self._continued(past).batch, past
                if len(ids) != len(batch.input_ids_BN):
                    raise ValueError(f"{len(ids)} rows of ids for a cache of {len(batch.input_ids_BN)} prompts")
            with compressed(self.backbone, self.compression, batch, cache, self._noting(batch, cache, clock)):
                out: CausalLMOutputWithPast = family.model.forward(ids.to(self.device), **{CACHE: cache})
        return out

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        past_key_values: PackedCache | None = None,
        cache: PackedCache | None = None,
        context_length: int | None = None,
        **inputs: Any,
    ) -> Any:
        """Generate as ``generate`` of transformers does, with the same arguments and results.

        Args:
            past_key_values: the cache of an earlier call (``last.cache``), to go on with a longer prompt: what follows
                the cached tokens is appended in full. ``cache``: its name in transformers from 5.24 on.
            context_length: a language model's first tokens that are compressed, but for a chat's system prompt;
                default: in a chat see ``inputs``, else up to the last blank line of a few-shot prompt, else all but the
                last 64.
            inputs: the output of ``inputs`` or of the processor, and generation settings (``max_new_tokens``,
                ``num_beams``, ``streamer``, ...).
        """
        held: int | None = None
        family, clock = self.backbone.family, time.perf_counter()
        past: PackedCache | None = _one_of("cache and past_key_values", cache, past_key_values)
        inputs["input_ids"] = _one_of("inputs and input_ids", input_ids, inputs.pop("inputs", None))
        with serving(family):
            call = GenerateCall.read(inputs, family.model)
            beams = call.beams > 1 and f"num_beams={call.beams}"
            check_together((beams, self.compression.said["every"], "beams share entries"))
            prompt = {name: inputs.pop(name, None) for name in ("regions", *prompt_inputs.IMAGE_INPUTS)}
            if past is None:
                batch = prompt_inputs.batch_from_inputs(family, call.ids_BN, call.visible, prompt, context_length)
                cache, self.last = PackedCache(family.shape.num_layers), None
            else:
                last = self._continued(past)
                cache, batch, held = past, last.batch, past.get_seq_length()
                call.check_turn(batch.input_ids_BN[past.origin_B], held)
                last.prefill_seconds = 0.0  # this call runs none
            filled = self._noting(batch, cache, clock, call.beams)
            with compressed(self.backbone, self.compression, batch, cache, filled, call.room(held)):
                out = family.model.generate(**inputs, **{CACHE: cache})
            assert self.last is not None
            self.last.decode_seconds = time.perf_counter() - clock - self.last.prefill_seconds
        return out

    def _noting(self, batch: Batch, cache: PackedCache, clock: float, beams: int = 1) -> Callable[[Prefill], None]:
        def filled(result: Prefill) -> None:
            described = replace(batch, pixel_values=None)  # the cache stands for them
            self.last = LastPrompt(described, result.plan, cache, time.perf_counter() - clock, beams=beams)
            warn_of_emptied(self.backbone, self.compression, batch, result.plan)

        return filled

    def _continued(self, past: PackedCache) -> LastPrompt:
        if self.last is None or self.last.cache is not past:
            raise ValueError("past_key_values must be last.cache, the cache of this object's last call")
        past.check_holds_prompt()
        ran = "past_key_values was left by a beam search, whose rows are not the answers that were returned"
        refuse((self.last.beams > 1, f"{ran}; start again without past_key_values"))
        return self.last

    def inputs(
        self,
        prompt: prompt_inputs.Prompt | Sequence[prompt_inputs.Prompt],
        images: prompt_inputs.Pictures = (),
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """Encode a prompt in the backbone's chat format, as ``generate`` takes it; a list becomes a batch, padded left.

        In a language model's chat template the system prompt stays whole, what was said before the last question may be
        compressed, and so may the beginning of a long last question (``regions``). Without a template the text is read
        as it is.

        Args:
            prompt: what the user says, with ``<image>`` or ``<video>`` where one stands (else in front); or turns, the
                last without an answer; or OpenAI's messages, ``[{"role": "user", "content": "..."}]``. If the assistant
                speaks last, the answer goes on with it.
            images: an image (PIL) or a video (``Video(frames, fps)``), or a list of them in the order of their
                placeholders; turned upright as their EXIF says. Of several prompts those of each.
            raw: a language model's prompt without its chat template: a text to go on with.
            chat_template_kwargs: variables for a language model's chat template, as ``{"enable_thinking": False}``.
        """
        return prompt_inputs.inputs_of(self.backbone.family, prompt, images, raw, chat_template_kwargs)

    def chat(
        self,
        prompt: prompt_inputs.Prompt | Sequence[prompt_inputs.Prompt],
        images: prompt_inputs.Pictures = (),
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
        **settings: Any,
    ) -> Any:
        """Answer one prompt, or the last turn of a conversation, as text; see ``inputs`` and ``generate``.

        At most ``ANSWER_TOKENS`` new tokens unless the settings say otherwise. A list of prompts is answered by a list;
        with ``stream``, one prompt by an iterator over pieces of its answer. The model serves no other call until that
        is exhausted or closed.
        """
        check_arguments("chat", settings, ("prompt", "images", "context_length", *_keywords(self.chat)))
        several = prompt_inputs.is_several(prompt)
        refuse(
            (stream and several, "stream=True answers one prompt, and several are given; ask one by one"),
            (stream and settings.get("streamer"), "stream=True hands on the answer itself; leave streamer out"),
        )
        if not {"max_new_tokens", "max_length", "generation_config"} & set(settings):
            settings["max_new_tokens"] = ANSWER_TOKENS
        inputs: dict[str, Any] = self.inputs(prompt, images, raw=raw, chat_template_kwargs=chat_template_kwargs)
        if stream:
            autocast, given = same_autocast(self.device.type), settings.pop("stopping_criteria", None)

            def answer(stream: AnswerStream) -> None:
                criteria = StoppingCriteriaList([stream, *(given or ())])
                with autocast:
                    self.generate(**inputs, **settings, streamer=stream, stopping_criteria=criteria)

            return pieces(self.tokenizer, answer, prompt_inputs.goes_on(prompt, raw))
        rows = self.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
        prompts = prompt if several else [prompt]
        said = self.tokenizer.batch_decode(rows[:: len(rows) // len(prompts)], skip_special_tokens=True)
        asked = zip(said, prompts, strict=True)
        answers = [answer_text(text, prompt_inputs.goes_on(each, raw)) for text, each in asked]
        return answers if several else answers[0]

    def ask(
        self,
        context: Any = None,
        questions: Any = None,
        *,
        system: str | None = None,
        max_new_tokens: int = ANSWER_TOKENS,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Any:
        """Compress a context once, before any question is seen, and answer many questions about it, greedily.

        In a chat template context and question are one turn of the user, a blank line between them unless one of them
        has a line break there; without one, or ``raw``, the question follows the context as both are written. Of a
        model that sees images the images come first; all text belongs to the questions. Several contexts are compressed
        in one pass and answered together.

        Args:
            context: a text, or an image, a video or several of them; with lists of questions a list of such. None: the
                context that was compressed last, or loaded.
            questions: a list; for several contexts a list for each. An empty one compresses and asks nothing.
            system: what the system says first, for every context; it stays whole.
            stream: hand on the answer to one question, a text, while it is made, as ``chat`` does.

        Returns:
            An answer for each question, in the form of ``questions``; streamed, an iterator over pieces of the one.
        """
        kind = type(questions).__name__
        refuse((stream and kind != "str", f"stream=True answers one question, a text; questions are of type {kind}"))
        asked, family = questions_of([questions] if stream else questions, max_new_tokens), self.backbone.family
        if context is None:
            given = {"raw": raw, "system": system is not None, "chat_template_kwargs": chat_template_kwargs}
            late = "says how to read a context; give it with the context, or leave it out"
            refuse(*((there, f"{name} {late}") for name, there in given.items()))
        else:
            how = self.backbone, self.compression, asked_of(family, context, asked), raw, system
            ready = context_batches(*how, chat_template_kwargs=chat_template_kwargs)
        with serving(family):
            if context is not None:
                self._context = None  # its memory is free before the next one is read
                self._context = CompressedContext.of(self.backbone, self.compression, *ready, raw)
            asked.check_fits(len(self.cache.frames))
            self.last = None
            if not stream:
                answers = self.cache.answers(asked.of_each, max_new_tokens)
                return answers if asked.nested else answers[0]
        return self.cache.stream(questions, max_new_tokens)

    @property
    def cache(self) -> CompressedContext:
        """The context that ``ask`` compressed or ``load_cache`` read last; ``cache.save(path)`` writes it."""
        if self._context is None:
            raise ValueError("no context has been compressed yet; call ask(context, questions) or load_cache(path)")
        return self._context

    def load_cache(self, path: str | Path) -> CompressedContext:
        """Take a context that ``cache.save`` wrote; ``ask(None, questions)`` goes on with it."""
        self._context = CompressedContext.load(path, self.backbone, self.compression)
        self.last = None
        return self._context

    def cache_report(self) -> CacheReport:
        """Measure the last prompt's cache beside what was promised; after ``ask``, that of its contexts."""
        if (last := self.last) is None:
            if self._context is not None:
                return self._context.report
            raise ValueError("nothing has been generated yet; cache_report describes the last call's cache")
        last.cache.check_holds_prompt()
        return report(self.backbone, last.batch, last.plan, last.cache, self.compression)

"""``SubTokenModel``: an adapter, or a plain backbone, that generates on a compressed cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.backbones.base import Turn
from subtoken_train.backbones.load import BackboneConfig
from subtoken_train.cache.cache import PackedCache
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import Scope, build_eviction
from subtoken_train.functional.images import to_rgb
from subtoken_train.functional.ledger import KVBudget, nominal_ledger
from subtoken_train.functional.measure import measured_ledger
from subtoken_train.inference.compression import Compression, KeepUnit, KVDtype
from subtoken_train.inference.generation import check_settings, compressed
from subtoken_train.inference.loading import device_of, load_backbone
from subtoken_train.inference.prefill import Prefill
from subtoken_train.inference.prompts import batch_from_inputs
from subtoken_train.inference.report import CacheReport, report
from subtoken_train.reducers import ReducerConfig
from subtoken_train.types import Batch, Plan, Region

IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
"""What processors make of images; the model's own generate never sees it, because prompts run here."""


@dataclass
class LastPrompt:
    """The last prompt that was compressed: its batch, what its cache keeps, the cache, and seconds of its passes."""

    batch: Batch
    plan: Plan
    cache: PackedCache
    prefill_seconds: float
    decode_seconds: float = 0.0


class SubTokenModel:
    """Generates with token reducer, routers and KV eviction on a cache that is as small as they promise.

    The router and the reducer run on prompts only; evictions act after a prompt's pass, so they cannot change the first
    token. A model object serves one call at a time.

    Args:
        backbone: in evaluation mode.
        compression: eviction and precision.
    """

    def __init__(self, backbone: CompressedBackbone, compression: Compression | None = None) -> None:
        self.backbone = backbone.eval()
        self.compression = Compression() if compression is None else compression
        self.compression.check(backbone.family)
        self.last: LastPrompt | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        backbone: BackboneConfig | str | None = None,
        reducer: ReducerConfig | None = None,
        eviction: str | None = None,
        eviction_keep: float = 1.0,
        eviction_unit: KeepUnit = "fraction",
        eviction_options: dict[str, Any] | None = None,
        scope: Scope | None = None,
        kv_dtype: KVDtype = "model",
        device_map: str | None = None,
    ) -> SubTokenModel:
        """Load an adapter with the backbone that it names, or a backbone alone.

        Args:
            path: an adapter (folder or Hub id), or a backbone for published methods without an adapter. What comes from
                the Hub is cached, and read from the cache where HF_HUB_OFFLINE is set.
            revision: branch, tag or commit of a Hub id.
            backbone: for an adapter: where its backbone is, or how to load it (dtype, attention); its identity is
                checked.
            reducer: for a backbone alone: a token reducer; an adapter has its own.
            eviction: name of an eviction method; None: none.
            eviction_keep: what stays, see ``Compression.keep``.
            eviction_unit: of ``eviction_keep``: ``fraction``, ``tokens`` or ``bytes``.
            eviction_options: settings of the method, by name.
            scope: what the eviction compresses, ``visual`` or ``all``; None: the method's own.
            kv_dtype: ``model``, ``int8`` or ``int4``.
            device_map: a device (``cuda:0``, ``cpu``), or ``auto``: the first GPU where there is one. One device.

        Raises:
            ValueError: names, revisions or settings that do not exist, or that do not fit the backbone.
        """
        method = None if eviction is None else build_eviction(eviction, **(eviction_options or {}))
        compression = Compression(method, eviction_keep, eviction_unit, scope, kv_dtype)
        device = None if device_map is None else device_of(device_map)
        loaded = load_backbone(path, revision, backbone, reducer)
        if device is not None:
            loaded.to(device)
        return cls(loaded, compression)

    @property
    def processor(self) -> Any:
        """The backbone's processor (language models: its tokenizer)."""
        return self.backbone.family.processor

    @property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer."""
        return self.backbone.family.tokenizer

    def generate(
        self, *, past_key_values: PackedCache | None = None, context_length: int | None = None, **inputs: Any
    ) -> Any:
        """``generate`` of transformers: the same arguments and results.

        Args:
            past_key_values: the cache of an earlier call (``last.cache``), to go on with a longer prompt: what follows
                the cached tokens is appended in full.
            context_length: a language model's tokens that are compressed; default: up to the last blank line of a
                few-shot prompt, else all but the last 64.
            inputs: the processor's output, and generation settings (``max_new_tokens``, ``num_beams``, ``streamer``,
                ...).

        Raises:
            ValueError: what the prompt or the settings do not fit; the object serves the next call.
        """
        family, clock = self.backbone.family, time.perf_counter()
        if inputs.get("input_ids") is None or inputs["input_ids"].numel() == 0:
            raise ValueError("generate needs input_ids with at least one token; pass the processor's whole output")
        check_settings(inputs, inputs.get("generation_config") or family.model.generation_config)
        own = {name: inputs.pop(name, None) for name in IMAGE_INPUTS}
        if past_key_values is None:
            cache = PackedCache(family.shape.num_layers)
            batch = batch_from_inputs(family, inputs["input_ids"], inputs.get("attention_mask"), own, context_length)
            self.last = None
        else:
            if self.last is None or self.last.cache is not past_key_values:
                raise ValueError("past_key_values must be last.cache, the cache of this object's last call")
            cache, batch = past_key_values, self.last.batch
            self.last.prefill_seconds = 0.0  # this call runs none

        def filled(result: Prefill) -> None:
            self.last = LastPrompt(batch, result.plan, cache, time.perf_counter() - clock)

        with compressed(self.backbone, self.compression, batch, filled):
            out = family.model.generate(**inputs, past_key_values=cache)
        assert self.last is not None
        self.last.decode_seconds = time.perf_counter() - clock - self.last.prefill_seconds
        return out

    def inputs(self, prompt: str | Sequence[Turn], images: Sequence[Image.Image] = ()) -> dict[str, Tensor]:
        """A prompt in the backbone's chat format (language models: the text itself), as ``generate`` takes it.

        Args:
            prompt: what the user says, with ``<image>`` where an image stands (in front where it is left out), or the
                turns of a conversation whose last answer is None.
            images: in the order of their placeholders.

        Raises:
            ValueError: placeholders and images that do not match.
        """
        family = self.backbone.family
        device = family.model.device
        if isinstance(prompt, str) and not prompt.strip():
            raise ValueError("the prompt is empty; write what the model should answer or go on with")
        if family.image_token_id is None:
            if images or not isinstance(prompt, str):
                raise ValueError(f"{family.name} is a language model: give one text, and no images")
            return {name: tensor.to(device) for name, tensor in self.tokenizer(prompt, return_tensors="pt").items()}
        turns = prompt if not isinstance(prompt, str) else [Turn(_with_placeholders(prompt, len(images)))]
        rendered = family.render(turns)
        text, marker = rendered.text, rendered.image_marker
        parts = text.split(marker)
        if len(parts) - 1 != len(images):
            raise ValueError(
                f"{len(parts) - 1} image placeholders but {len(images)} images; write <image> once per image"
            )
        if not images:
            warnings.warn(
                f"the prompt has no image, so {family.name} answers from the text alone and no visual token is "
                "compressed; give one (--image FILE, or images=[...])",
                SubTokenWarning,
                stacklevel=2,
            )
        images = [to_rgb(image, f"image {i + 1}") for i, image in enumerate(images)]
        for i, image in enumerate(images):
            parts[i] += marker * family.visual_tokens((image.height, image.width))
        encoded = self.tokenizer("".join(parts), add_special_tokens=False, return_tensors="pt")
        made = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        if images:
            made["pixel_values"], grid = family.process_images(images)
            if grid is not None:
                made |= {
                    "image_grid_thw": grid,
                    "mm_token_type_ids": (made["input_ids"] == family.image_token_id).int(),
                }
        return {name: tensor.to(device) for name, tensor in made.items()}

    def chat(self, prompt: str | Sequence[Turn], images: Sequence[Image.Image] = (), **settings: Any) -> str:
        """Answer one prompt, or the last turn of a conversation, as text; see ``inputs`` and ``generate``."""
        inputs: dict[str, Any] = self.inputs(prompt, images)
        out = self.generate(**inputs, **settings)
        answer: str = self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answer.strip()

    def cache_report(self) -> CacheReport:
        """Bytes of the last prompt's cache, measured beside what was promised.

        Raises:
            ValueError: nothing was generated yet.
        """
        if self.last is None:
            raise ValueError("nothing was generated yet; cache_report describes the cache of the last call of generate")
        bank = self.backbone.bank
        routing = None if bank is None or not self.backbone.routes else bank.config
        budget = KVBudget() if routing is None else KVBudget(1.0, routing.num_groups, routing.kept_groups)
        layout = "contiguous" if routing is None else routing.layout
        shape, regions = self.backbone.family.shape, self.last.batch.regions_BN
        counts = ((regions == Region.VISUAL) | (regions == Region.CONTEXT)).sum(-1).tolist()
        kept = sum(self.backbone.reducer.kept_tokens(count) for count in counts if count)
        nominal = nominal_ledger(shape, {"visual": sum(counts)}, budget, self.backbone.reducer.cut_layer, kept)
        ledger = measured_ledger(self.last.plan, regions, shape, layout)
        return report(self.last.cache, ledger, nominal.fraction())


def _with_placeholders(prompt: str, images: int) -> str:
    """Images stand before a prompt that places none."""
    return prompt if "<image>" in prompt or not images else "<image>\n" * images + prompt

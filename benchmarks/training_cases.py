"""What ``training_cost.py`` trains: models, one batch of records each, and the settings of both sides.

Records are random tokens; what a step costs does not depend on them. Models are of the real classes: random ones of a
size that a CPU core steps through in about a second, the embedded VLM, and (for a GPU) the paper's at full size.

Legend: B batch, N positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig

from benchmarks.shaped import llama_config
from subtoken_train.families.backbone_config import resolve
from subtoken_train.families.family import Family
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import published_config
from subtoken_train.families.lora import LoraSettings
from subtoken_train.families.text import TextFamily
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Batch, Region

VOCABULARY, IMAGE_TOKEN = 2048, 5
PATCH = 14
SYSTEM, QUERY, ANSWER = 5, 8, 6
"""Text beside the image: the paper's 19 tokens."""
PREFIX = 64
"""Query tokens of a language model that choose and summarise, without loss."""
FASTV = build_reducer("fastv", keep_ratio=0.25)
QUEST_HALF = build_reducer("quest", keep_ratio=0.5, window=32)
QUEST = build_reducer("quest", keep_ratio=0.25)
UNREDUCED = build_reducer("none")
S16K4 = RoutingConfig()
S16K12 = RoutingConfig(kept_groups=12, budget="global", query_conditioned=True)
"""As the paper routes language models."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        text: what it is, for the table.
        config: makes the model's configuration.
        batch_size: B.
        compressed: visual tokens of the image, or context tokens.
        reducer: token reducer of the routed and the unrouted side.
        routing: of the routed side.
        rank: of the LoRA of all sides; without dropout, whose random numbers are no part of the comparison.
    """

    text: str
    config: Callable[[], Any]
    batch_size: int
    compressed: int
    reducer: Reducer
    routing: RoutingConfig
    rank: int = 16

    @property
    def lora(self) -> LoraSettings:
        """On q and v of every layer."""
        return LoraSettings(self.rank, 2 * self.rank, dropout=0.0)

    @property
    def vlm(self) -> bool:
        """Whether there is an image."""
        return self.reducer.name != "quest"

    def model(self, device: str, dtype: torch.dtype) -> Any:
        """The random model."""
        torch.manual_seed(0)
        kind = AutoModelForImageTextToText if self.vlm else AutoModelForCausalLM
        with torch.device(device):
            return kind.from_config(self.config(), dtype=dtype, attn_implementation="sdpa").eval()

    def family(self, device: str, dtype: torch.dtype) -> Family:
        """The same behind the family interface; there is nothing to tokenise."""
        return (LlavaFamily if self.vlm else TextFamily)(self.model(device, dtype), None)

    def records(self, count: int) -> list[Batch]:
        """``count`` records, each a batch of one."""
        return [(self._image if self.vlm else self._text)(number) for number in range(count)]

    def _image(self, number: int) -> Batch:
        """System text, an image, a question, its answer."""
        config, generator = self.config(), torch.Generator().manual_seed(number)
        parts = (
            (Region.SYSTEM, SYSTEM), (Region.VISUAL, self.compressed), (Region.QUERY, QUERY), (Region.ANSWER, ANSWER),
        )  # fmt: skip
        regions_N = torch.cat([torch.full((length,), int(region)) for region, length in parts])
        ids_N = _words(len(regions_N), generator).masked_fill(regions_N == Region.VISUAL, config.image_token_index)
        labels_N = ids_N.masked_fill(regions_N != Region.ANSWER, -100)
        side = config.vision_config.image_size
        pixels = torch.randn(1, 3, side, side, generator=generator)
        return _record(ids_N, labels_N, regions_N, SYSTEM + self.compressed + QUERY - 1, number, pixels)

    def _text(self, number: int) -> Batch:
        """As many context tokens as query tokens, of which the first ``PREFIX`` have no loss."""
        ids_N = _words(2 * self.compressed, torch.Generator().manual_seed(number))
        regions_N = torch.full_like(ids_N, int(Region.CONTEXT))
        regions_N[self.compressed :] = int(Region.QUERY)
        labels_N = ids_N.clone()
        labels_N[: self.compressed + PREFIX] = -100
        return _record(ids_N, labels_N, regions_N, self.compressed + PREFIX - 1, number, None)


def join(records: list[Batch]) -> Batch:
    """Records of one length as a batch."""
    joined: dict[str, Any] = {}
    for field in fields(Batch):
        values = [getattr(record, field.name) for record in records]
        joined[field.name] = torch.cat(values) if isinstance(values[0], Tensor) else values[0]
    joined["record_ids"] = [name for record in records for name in record.record_ids]
    return Batch(**joined)


def _words(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(10, 60, (length,), generator=generator)


def _record(ids: Tensor, labels: Tensor, regions: Tensor, rank: int, number: int, pixels: Tensor | None) -> Batch:
    images = torch.tensor([0 if pixels is None else 1])
    return Batch(ids[None], labels[None], regions[None], torch.tensor([rank]), pixels, images, [f"record-{number}"])


def _llava(layers: int, side: int) -> LlavaConfig:
    """A LLaVA whose tower is small (its cost is the same on all sides) and gives ``side`` x ``side`` tokens."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=side * PATCH,
        patch_size=PATCH, projection_dim=64,
    )  # fmt: skip
    text = llama_config(layers, positions=1024, vocabulary=VOCABULARY)
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


CASES = {
    "llava-reduced": Case("LLaVA, 144 visual tokens given", lambda: _llava(4, 12), 1, 144, UNREDUCED, S16K4),
    "llava-fastv": Case("LLaVA, FastV 576 to 144", lambda: _llava(4, 24), 1, 576, FASTV, S16K4),
    "llama-quest": Case(
        "Llama, Quest 128 to 64", lambda: llama_config(4, 1024, VOCABULARY), 1, 128, QUEST_HALF, S16K12
    ),
    "tiny-llava": Case(
        "tiny-llava (D = 128), FastV 64 to 16", lambda: AutoConfig.from_pretrained(resolve("checkpoints/tiny-llava")),
        32, 64, FASTV, S16K4, rank=8,
    ),
    "llava-7b": Case(
        "LLaVA-1.5-7B, FastV 576 to 144", lambda: published_config("llava-hf/llava-1.5-7b-hf"), 4, 576, FASTV, S16K4
    ),
    "llama-7b": Case(
        "LLaMA-2-7B, Quest 1024 to 256", lambda: published_config("meta-llama/Llama-2-7b-hf"), 1, 1024, QUEST, S16K12
    ),
}  # fmt: skip

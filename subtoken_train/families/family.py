"""The interface of a backbone family, processors without torchvision, and checks against its shapes.

Legend: B batch, N positions, D model width, I images, T visual tokens, n layers with features of their own.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from subtoken_train.calibrations import Calibration
from subtoken_train.families.chat import ChatFormat
from subtoken_train.families.decoder import DecoderStack, check_window_runs, layer_windows
from subtoken_train.families.images import UNCUT, Picture, Video
from subtoken_train.functional.gather import count_positions
from subtoken_train.functional.quantized import dense_shape
from subtoken_train.reducers.base import PositionPolicy, Reducer
from subtoken_train.resources import published_models
from subtoken_train.types import Batch, Frames, Licence, Region, RenderedPrompt, TowerStatistics, Turn, VisualStates


@dataclass(eq=False)
class PilProcessor:
    """A checkpoint's tokenizer and image processor; the same pixels with and without torchvision."""

    image_processor: Any
    tokenizer: Any
    image_token: str
    video_token: str

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both into a checkpoint folder."""
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class PilReader(NamedTuple):
    """Makes processors of a PIL image processor's class, whichever the checkpoint names, and placeholders of tokens."""

    image_reader: Any
    image_token: str
    video_token: str = ""

    def __call__(self, image_processor: Any, tokenizer: Any) -> PilProcessor:
        return PilProcessor(image_processor, tokenizer, self.image_token, self.video_token)

    def from_pretrained(
        self, source: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> PilProcessor:
        """Read both from a folder or the Hub."""
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        return self(self.image_reader.from_pretrained(source, revision=revision), tokenizer)


class GivenImages(NamedTuple):
    """Pictures of a batch, as ``Batch`` holds them: pixel values, layouts, how many each sample has, and seconds."""

    pixel_values: Tensor | None
    image_grid_I3: Tensor | None
    images_per_sample_B: Tensor
    seconds_I: Tensor | None = None


def published_of(*model_types: str) -> tuple[dict[str, Callable[[], Any]], dict[str, Licence]]:
    """Return ``published`` and ``licences`` of model types by the table of published models."""
    table = published_models()
    kinds = {name: row.get("own", table["parts"][row["text"]])["model_type"] for name, row in table["models"].items()}
    rows = {name: table["models"][name] for name, kind in kinds.items() if kind in model_types}
    licences = {name: Licence(*table["licences"][row["licence"]]) for name, row in rows.items()}
    return {name: partial(_published_config, row) for name, row in rows.items()}, licences


def _published_config(row: Mapping[str, Any]) -> Any:
    table = published_models()
    text = {**table["parts"][row["text"]], **dict(zip(table["sizes"], row["sizes"], strict=True))}
    if "own" not in row:
        return CONFIG_MAPPING[text["model_type"]](**text)
    # a size of the tower may be named after the text's
    vision = table["parts"][row["vision"]] if "vision" in row else {}
    tower = {key: text[size] if size in table["sizes"] else size for key, size in vision.items()}
    towers = {"vision_config": tower} if "vision" in row else {}
    return CONFIG_MAPPING[row["own"]["model_type"]](text_config=text, **towers, **row["own"])


class Family(DecoderStack, ABC):
    """A loaded Hugging Face model behind the interface that reducers, routers and training use."""

    name: str
    published: ClassVar[dict[str, Callable[[], Any]]] = {}
    """Hub ids whose configuration is known here, for checks without network; each is made when it is called."""
    licences: ClassVar[dict[str, Licence]] = {}
    """Licences of published backbones by their Hub ids, for model cards: an adapter's is the same."""
    sees_images: ClassVar[bool] = True
    takes_videos: ClassVar[bool] = False
    tells_frames: ClassVar[bool] = False
    """True where a batch tells videos from images, and their frames (``picture_frames``)."""
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.vision_tower", "model.multi_modal_projector")
    """Modules that quantisation leaves alone: all outside the decoder."""
    auto_model: Any = AutoModelForImageTextToText
    auto_processor: Any = AutoProcessor
    image_inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Outputs of its processor for pictures, by the names that transformers' ``generate`` takes."""
    tower_positions: PositionPolicy = "renumber"
    """Position ids of what a tower reducer leaves: counted anew, or (mRoPE) each row's own."""
    in_tiles: ClassVar[bool] = False
    """True where a picture's tokens are those of several tiles, which make no one grid."""
    nominal_image: tuple[int, int] | None = None
    """(height, width) in pixels that figures without an image are about; None where all images give as many tokens."""
    paper_text: ClassVar[dict[str, int]]
    """Text tokens beside the image in the paper's prompt (Table 8), by region."""
    chat: ChatFormat
    """Texts around what is said, for a family that does not write its own (``render``)."""
    chooses_chat: ClassVar[bool] = False
    """True where it has ``choose_chat``: the family was published with several chat formats."""
    may_pad: ClassVar[bool] = False
    """True where it has ``pad_images``, to show images as squares from then on."""

    def __init_subclass__(cls) -> None:
        """Take what the table of published models has of its model type."""
        if "published" not in vars(cls) and "name" in vars(cls):
            cls.published, cls.licences = published_of(cls.name)

    def __init__(self, model: Any, processor: Any) -> None:
        self.windows = layer_windows(model.config, self.tower_positions == "mrope")
        self.model = model
        self.processor = processor
        check_window_runs(self.windows, self.decoder.config._attn_implementation)

    @property
    def image_token_id(self) -> int | None:
        """Return the id of the placeholder that stands once per visual token; None for a text-only family."""
        return int(self.model.config.image_token_id) if self.sees_images else None

    def is_visual(self, ids: Tensor) -> Tensor:
        """Return which token ids are placeholders of visual tokens, bool."""
        return torch.zeros_like(ids, dtype=torch.bool) if self.image_token_id is None else ids == self.image_token_id

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write a conversation in the model's chat format, with the spans of its answers."""
        return self.chat.render(turns, self.processor.image_token, self.tokenizer)

    @abstractmethod
    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Return the visual tokens of an image of (height, width) pixels; ``together``: images of the same prompt."""

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        """Return the text that replaces ``marker`` for one picture: its placeholders and the words around them."""
        if isinstance(picture, Video):
            raise self.no_video()
        return marker * self.visual_tokens((picture.height, picture.width), together)

    @classmethod
    def no_video(cls) -> ValueError:
        """Return the error for a video where a family takes none."""
        takes = "images and no videos; give its frames as images, one <image> each" if cls.sees_images else "text alone"
        return ValueError(f"{cls.name} takes {takes}")

    def picture_frames(self, batch: Batch) -> list[Frames | None]:
        """Return the tokens of each video of a batch, in order; None for an image."""
        raise AssertionError("refused before the family is built")

    def video_frames(self, batch: Batch) -> list[list[Frames]]:
        """Return the tokens of each sample's videos."""
        pictures, found = iter(self.picture_frames(batch)), []
        for record, count in zip(batch.record_ids, batch.images_per_sample_B.tolist(), strict=True):
            found.append([video for video in islice(pictures, count) if video is not None])
            if len(found[-1]) < count:
                raise only_videos(record)
        return found

    def seconds(self, pictures: Sequence[Picture]) -> Tensor | None:
        """Return ``Batch.seconds_I`` of a batch's pictures; None if positions do not depend on time."""
        return None

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Return the tokens that stand once per visual token."""
        tokens = [getattr(self.processor, name, "") for name in ("image_token", "video_token")[: 1 + self.takes_videos]]
        return tuple(dict.fromkeys(filter(None, tokens))) if self.sees_images else ()

    @abstractmethod
    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Turn pictures into (pixel values, ``Batch.image_grid_I3``); ``together``: images of each one's prompt."""

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read a processor's output by the names ``image_inputs`` (some may be missing) into a batch's."""
        pixels = given.get("pixel_values")
        if pixels is not None and pixels.dim() != 4:
            raise ValueError(f"pixel_values of {self.name} must be [images, 3, height, width], {UNCUT}")
        return GivenImages(pixels, None, visual_BN.sum(-1) // self.visual_tokens())

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        """Return what ``process_images`` made by the names of ``image_inputs``: the inverse of ``read_images``."""
        return {"pixel_values": pixels}

    @abstractmethod
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return the tower's output for every image (there is one), without gradient, and a kind of statistics."""

    @classmethod
    def tower_statistics(cls, config: Any) -> frozenset[TowerStatistics]:
        """Return the kinds that ``visual_states`` gives for this configuration; none for a language model."""
        return frozenset({"received"} if cls.sees_images else ())

    def project(self, states_TC: Tensor) -> Tensor:
        """Project the tower's output to the language model's width, [T, D]."""
        features: Tensor = self.model.model.multi_modal_projector(states_TC)
        return features

    def image_bytes(self) -> int:
        """Return the bytes of one nominal image as a batch holds it (fp32); 0 for a language model."""
        return 0

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes of the tower's pass over images of ``pixel_bytes``; 0 for a language model."""
        return 0

    @property
    def nominal_text(self) -> dict[str, int]:
        """Return ``paper_text``, in the chosen chat format."""
        return self.paper_text

    def framed(self, image: Image.Image) -> Image.Image:
        """Return an image as it is before the processor scales it: padded to a square, or itself."""
        return image

    def limit_pixels(self, max_pixels: int) -> None:
        """Cap the pixels of an image."""
        raise ValueError(f"max_pixels={max_pixels}: {self.name} scales images to sizes of its own; remove max_pixels")

    @property
    def tokenizer(self) -> Any:
        """Return the processor's tokenizer (the processor itself for text-only families)."""
        return getattr(self.processor, "tokenizer", self.processor)

    def positions(self, batch: Batch) -> Tensor:
        """Return position ids of the unreduced batch: [B, N], padding not counted; [3, B, N] under mRoPE."""
        return count_positions(batch.regions_BN != Region.PADDING)

    @torch.no_grad()
    def embed(self, batch: Batch, states: VisualStates | None = None) -> Tensor:
        """Return input embeddings [B, N, D] with the visual features in place; ``states`` if the tower already ran."""
        if states is None and batch.pixel_values is not None:
            states = self.visual_states(batch)
        return self.place(batch, None if states is None else self.project(torch.cat(states.tokens)))

    def deep_features(self, batch: Batch, states: VisualStates | None) -> Tensor | None:
        """Return what the first n layers add to their outputs, [n, B, N, D], zero for text; None if nothing."""
        if states is None or states.deep is None:
            return None
        is_image_BN = self.is_visual(batch.input_ids_BN)
        deep_nTD = torch.cat(states.deep, 1).to(is_image_BN.device)
        batch.check_features(int(is_image_BN.sum()), deep_nTD.shape[1])
        deep_nBND = deep_nTD.new_zeros(len(deep_nTD), *is_image_BN.shape, deep_nTD.shape[-1])
        deep_nBND[:, is_image_BN] = deep_nTD
        return deep_nBND

    @torch.no_grad()
    def place(self, batch: Batch, features_TD: Tensor | None, keep_BN: Tensor | None = None) -> Tensor:
        """Return embeddings [B, N, D] with ``features`` at the image tokens (of ``keep_BN``, if given), in order."""
        embeds_BND = self.token_states(batch.input_ids_BN)
        if features_TD is None:
            return embeds_BND
        is_image = self.is_visual(batch.input_ids_BN) & (True if keep_BN is None else keep_BN)
        batch.check_features(int(is_image.sum()), len(features_TD))
        return embeds_BND.masked_scatter(is_image[..., None], features_TD.to(embeds_BND))


def shapes_digest(family: Family) -> str:
    """Return ``Identity.digest`` of a backbone, in hexadecimal."""
    own = [(name, each) for name, each in family.model.named_parameters() if ".lora_" not in name]
    # a weight that ZeRO-3 has split is empty, and knows its shape
    shapes = {name.replace(".base_layer.", "."): list(getattr(p, "ds_shape", dense_shape(p))) for name, p in own}
    config = family.model.config
    parts = [str(config.model_type), sorted(shapes.items())]
    if (axes := getattr(config, "value_axes", None)) is not None:  # values of other axes mean something else
        parts.append(str(axes))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_calibration(calibration: Calibration[Any] | None, family: Family) -> None:
    """Raise ``ValueError`` if a calibration meets another backbone than its own; None fits all."""
    if calibration is not None:
        shape, model_type = family.shape, str(family.model.config.model_type)
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        calibration.check_backbone(model_type, shapes_digest(family), *sizes)
        calibration.numbers.check_width(family.hidden_size)


def only_videos(record: str) -> ValueError:
    """Return the error for an image where a reducer chooses among frames."""
    return ValueError(f"record {record!r} shows an image, and its reducer chooses among the frames of videos; leave it")


def check_served(reducer: Reducer, family: type[Family], config: Any) -> None:
    """Raise ``ValueError`` if a reducer does not serve models of a family's configuration."""
    depth = config.get_text_config(decoder=True).num_hidden_layers
    reducer.check_fit(family.name, family.sees_images, depth, family.tower_statistics(config))
    if reducer.reads_frames and not family.tells_frames:
        why = "does not tell the frames of a video from images" if family.takes_videos else "takes no videos"
        raise ValueError(f"reducer {reducer.name!r} chooses among the frames of videos, and {family.name} {why}")

"""Shared words: the regions of a sequence, the plan of what a cache keeps, and values by key.

Legend: B batch, N sequence positions, S value groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")
Layout = Literal["contiguous", "per_head"]
"""Layout of value groups: pieces of the whole value vector, or the same piece of every head."""

Fill = Literal["zero", "mean"]  # value that a dropped value group reads as (``routing/bank.py``)

KeyAxes = Literal["own", "pca"]
"""Axes along which keys are cut: the channels that the model gives them, or their principal axes."""

Quantization = Literal["none", "nf4", "int8"]  # of a decoder's linear layers, by bitsandbytes

Protocol = Literal["query_aware", "context_first"]
"""Part of a prompt that its compression sees: all, or the context before its question (``inference/prefill.py``)."""


class EntryCosts(NamedTuple):
    """Bytes of one head's entry: of its key with what finds its value groups, of each group, and of a dense entry."""

    key: int
    group: int
    dense: int


class Region(IntEnum):
    """Content of a position of the sequence; PADDING is stored nowhere, and only VISUAL or CONTEXT is ever routed."""

    PADDING = 0
    SYSTEM = 1
    VISUAL = 2
    CONTEXT = 3
    QUERY = 4
    ANSWER = 5
    GENERATED = 6

    @property
    def label(self) -> str:
        """Lower-case word used in tables and reports."""
        return self.name.lower()


def in_compressed_region(regions: Tensor) -> Tensor:
    """Mark the rows of the region that is compressed, bool: a VLM's visual tokens, a language model's context."""
    return (regions == Region.VISUAL) | (regions == Region.CONTEXT)


def before_compressed_ends(regions: Tensor) -> Tensor:
    """Mark the rows up to the last of the compressed region, bool [B, N], but no PADDING; none where it is empty."""
    return (in_compressed_region(regions).flip(-1).cumsum(-1).flip(-1) > 0) & (regions != Region.PADDING)


@dataclass(frozen=True)
class Licence:
    """A licence by the Hub's identifier (``apache-2.0``, ``llama2``); one that is ``other`` has a name and a link."""

    identifier: str
    name: str | None = None
    link: str | None = None


APACHE, MIT = Licence("apache-2.0"), Licence("mit")


@dataclass(frozen=True)
class Identity:
    """A backbone's identity; ``digest`` covers model type and every parameter's name and shape, never its values."""

    path: str
    revision: str | None
    model_type: str
    digest: str


@dataclass
class KeyTurn:
    """A basis that a layer's keys are turned to (``functional/key_axes.py``).

    A centre, which is taken off all keys; r vectors of every head, at each of which keys and queries are reflected
    (both fp16); and in fp32 what makes one product of the reflections.
    """

    centre_Bh1d: Tensor
    mirrors_Bhdr: Tensor
    joint_Bhrr: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(part.nbytes for part in vars(self).values())


@dataclass
class CutKeys:
    """Entries of a layer's plan whose keys are cut, and the ``kept`` channels of each head that stay, bool.

    ``turn``: the basis in which all keys of the layer stand, and whose channels these are; None: their own.
    """

    entries_BN: Tensor
    kept: int
    channels_Bhd: Tensor | None = None  # None until the keys are known
    turn: KeyTurn | None = None


@dataclass
class LayerPlan:
    """Entries and groups that one layer keeps."""

    entries_BN: Tensor  # positions of the original sequence that stay, int64 [B, N_kept], ascending; -1 pads a row
    group_mask_BNS: Tensor | None = None  # kept value groups of each entry, bool; None: all
    heads_BNh: Tensor | None = None
    """Key-value heads that keep each entry, bool; None: all. Of a group a head stores the slice that is its own."""
    rows_BN: Tensor | None = None  # row of the prompt's pass that each came from, int64; None: the entry's number
    cut_keys: CutKeys | None = None  # None: every key is whole
    filled: bool = False  # pieces that are not stored read as a stored value vector per sample, of the whole width


@dataclass
class Plan:
    """Kept entries per layer and value groups per entry: the one currency of reducers, routers and caches."""

    layers: list[LayerPlan] = field(default_factory=list)
    layout: Layout = "contiguous"


@dataclass
class Batch:
    """A padded batch as the collator makes it; right- or left-padded."""

    input_ids_BN: Tensor  # int64; one image token per visual token
    labels_BN: Tensor  # ids to predict, int64; -100 where there is no loss (everything but answers)
    regions_BN: Tensor  # ``Region`` codes, int64; PADDING marks what the attention must not see
    rank_position_B: Tensor  # last prompt token of the turn that holds the last image, int64; -1 without an image
    pixel_values: Tensor | None
    """All images and videos in order, as the family's ``process_images`` makes them: [num_images, 3, H, W] (tiles
    alike), or flattened patches [num_patches, channels]; None for a text-only batch."""
    images_per_sample_B: Tensor  # images and videos, int64
    record_ids: list[str]
    image_grid_I3: Tensor | None = None
    """Layout of each image or video, int64: (time, height, width) in patches (Qwen), (tiles, height, width of the
    picture in pixels); None where all have one size."""
    seconds_I: Tensor | None = None
    """Seconds from one layer of an image's or video's grid to the next, fp32 (0 for an image); None where the family's
    positions do not depend on time."""
    followed: bool = False  # these are only the first tokens of prompts whose others come later (``context_first``)

    def check_features(self, image_tokens: int, features: int) -> None:
        """Raise a ``ValueError`` unless the tower made one feature per image token."""
        if image_tokens != features:
            counts = f"{image_tokens} image tokens but {features} visual features"
            raise ValueError(f"{counts} in the batch of records {', '.join(self.record_ids)}")


class Frames(NamedTuple):
    """The visual tokens of a video: number of its frames (Qwen: layers of two), tokens of each, and after the last."""

    number: int
    tokens: int
    after: int = 0

    @property
    def total(self) -> int:
        """Count them all."""
        return self.number * self.tokens + self.after


TowerStatistics = Literal["received", "class", "unsplit"]
"""Statistics that a tower reducer reads beside the tokens; each kind is computed for one layer of the tower.

``received``: attention from the class token, or from all patches where there is none, in the layer that made the
tokens (heads summed or averaged); keys averaged over heads. ``class``: the same, from a class token only. ``unsplit``:
from the class token, queries and keys being of one head as wide as the layer, in the tower's last layer; these keys.
"""


@dataclass
class VisualStates:
    """Output of the vision tower for a batch's images, before the projector; one entry per image, T tokens each."""

    tokens: list[Tensor]  # [T, C], in the order of the placeholders
    cls: list[Tensor] | None = None  # the class token, [C]; in tiles one for each, [tiles, C]; None: the tower has none
    received: list[Tensor] | None = None  # attention that each token receives, [T] in fp32, of the kind asked for
    keys: list[Tensor] | None = None  # what similarity is measured on, [T, d] in fp32, from the layer of ``received``
    deep: list[Tensor] | None = None
    """Added to the outputs of the first n layers of the language model, [n, T, D]; None for most towers."""
    tiles: list[Tensor] | None = None
    """The tile that each token is of, int64 [T], given with the statistics; -1: no patch (a newline), which receives no
    attention, has a key of zeros and is never merged. None for a tower that sees images whole; 0 for all where patches
    are scaled across tiles."""
    images_per_sample: list[int] | None = None  # images of each sample, which share its budget; None: one each


@dataclass
class MergedStates:
    """Tokens that a tower reducer leaves, [k, C] per image, and the placeholders that take them: bool [T], k True."""

    tokens: list[Tensor]
    slots: list[Tensor]


@dataclass(frozen=True)
class Turn:
    r"""One exchange: ``<image>`` marks each image or video, ``\<image>`` is text; an answer of None is to be generated.

    An answer that is not learnt has no loss.
    """

    prompt: str
    answer: str | None = None
    learnt: bool = True


class Asked(NamedTuple):
    """Characters of a prompt's last question: where its turn opens in the template, where it starts and ends."""

    opening: int
    start: int
    end: int


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model's text; all places count characters."""

    text: str
    answer_spans: list[tuple[int, int]]  # (start, end) of the answers, end-of-turn token included
    image_marker: str  # stands in the text once per image
    system_end: int = 0  # end of the chat template's beginning and of the system prompt; 0 where none is told apart
    asked: Asked | None = None  # the question that is to be answered, in a chat template; None elsewhere
    told: tuple[int, int] = (0, 0)  # what the system says first, in a chat template; (0, 0): nothing


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of every key, keys and values in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found

"""Backbone, anchor and routed model on one loaded backbone: asked in turn, answers as they are made."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from PIL import Image

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.picture import check_places, visual_grid
from subtoken_train.evaluation.runner.arms import groups_words
from subtoken_train.evictions.thresholds import threshold_file
from subtoken_train.families.family import Family
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.cache_report import CacheReport
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import ANSWER_TOKENS, SubTokenModel
from subtoken_train.inference.pool import ModelPool, adapter_backbone, family_named, in_one_place
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Batch, Plan


@dataclass(frozen=True)
class SideAnswer:
    """One model's finished answer, and what is left of its cache to look at.

    Attributes:
        method: reducer, groups and eviction, as tables name them; ``-`` where nothing is compressed.
        batch: the prompt, without pixels.
        decode_seconds: of everything after the prompt's pass.
        undrawn: why kept tokens cannot be drawn on the picture; None where they can.
        notes: warnings that came with the answer.
    """

    title: str
    method: str
    tokens: int
    image: Image.Image
    family: Family
    batch: Batch
    plan: Plan
    report: CacheReport
    prefill_seconds: float
    decode_seconds: float
    undrawn: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Spoken:
    """An answer of the side at a place, as far as it has come; the whole of it once it is finished."""

    place: int
    text: str
    answer: SideAnswer | None = None


def compressed_by(backbone: CompressedBackbone, compression: Compression) -> str:
    """Name what compresses: ``fastv 0.25, S16K4 linear, snapkv 0.5``; ``-`` if nothing does."""
    reducer = backbone.reducer
    parts = [f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "-"]
    parts += [groups_words(backbone.active_routing), compression.label]
    return ", ".join(part for part in parts if part != "-") or "-"


def why_undrawn(backbone: CompressedBackbone, batch: Batch) -> str | None:
    """Why kept tokens cannot be drawn on the picture; None where they can."""
    try:
        check_places(backbone)
        visual_grid(backbone.family, batch)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class ShownModel:
    """One of the models that are asked, and whether the page's eviction acts on it.

    ``load`` takes its turn on the loaded backbone; what was handed out before runs no more.
    """

    title: str
    load: Callable[[], CompressedBackbone]
    compresses: bool


class SideBySide:
    """Loads what an adapter names, and asks its sides (backbone, anchor where there is one, itself) one after another.

    The frozen backbone is in memory once: each side puts its LoRA, reducer and routers on it in its turn. Turns of
    several askers wait for each other. Without ``backbone`` it is where the adapters say; ``device`` is as
    ``ModelPool`` takes it.

    Raises:
        ValueError: no such adapter, one of a language model, or an anchor on another backbone.
    """

    def __init__(
        self, adapter: str, anchor: str | None = None, backbone: str | None = None, device: str | None = "auto"
    ) -> None:
        pool = ModelPool(device)
        config = pool.adapter(adapter)
        family = family_named(pool.folder(adapter), backbone)
        if not family.sees_images:
            raise ValueError(
                f"{adapter} is of a language model, and the page shows pictures; ask it with 'subtoken-train generate "
                f"--adapter {adapter} --prompt -'"
            )
        if anchor is not None:
            _check_backbones(pool, adapter, anchor, backbone)
        source = adapter_backbone(pool.folder(adapter), config, backbone)
        whole = partial(pool.get, source.path, revision=source.revision, backbone=source)
        if config.merged:  # its backbone is in these weights alone
            whole = partial(pool.get, adapter, reducer=build_reducer("none"), selector="none")
        own = "adapter" if config.routing is None else "routed model"
        self.sides = [ShownModel("backbone", whole, False)]
        if anchor is not None:
            self.sides.append(ShownModel("anchor", partial(pool.get, anchor, backbone=backbone), True))
        self.sides.append(ShownModel(own, partial(pool.get, adapter, backbone=backbone), True))
        self._turn = threading.Lock()
        for side in self.sides:  # mistakes show before anything is asked
            self._family = side.load().family
        self.num_layers = self._family.shape.num_layers

    def ask(self, image: Image.Image, question: str, eviction: str | None, keep: str) -> Iterator[Spoken]:
        """Every side's answer, piece by piece; an iterator that is closed stops after the next token.

        Eviction (None: none) and what it keeps are as they are written, and of all sides but the backbone. The question
        has no placeholder, or one ``<image>``. Settings, or a prompt, that a side refuses raise a ``ValueError``.
        """
        if eviction is not None and threshold_file(keep) is not None:  # which whoever sees the page would choose
            raise ValueError("eviction_keep of this page reads no file; write threshold:-4, or a share")
        spec = ArmSpec(backbone="-", eviction=eviction, eviction_keep=keep if eviction else None, written="argument")
        spec.compression().check(self._family)  # before the backbone answers for nothing
        stopped = threading.Event()
        try:
            for place, side in enumerate(self.sides):
                yield from self._answer(place, side, partial(self._asked, side, spec, image, question, stopped))
        finally:
            stopped.set()

    def _answer(
        self, place: int, side: ShownModel, asked: Callable[[Callable[[str], None]], SideAnswer]
    ) -> Iterator[Spoken]:
        """One side's answer, made in a thread of its own."""
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        future: Future[SideAnswer] = Future()

        def work() -> None:
            try:
                future.set_result(asked(pieces.put))
            except BaseException as error:  # raised again where it is waited for
                future.set_exception(error)
            finally:
                pieces.put(None)

        threading.Thread(target=work, name=f"answer of the {side.title}", daemon=True).start()
        text = ""
        while (piece := pieces.get()) is not None:
            text += piece
            yield Spoken(place, text)
        try:
            yield Spoken(place, text, future.result())
        except ValueError as error:
            # of the backbone, which compresses nothing, the prompt itself is refused
            raise ValueError(f"{side.title}: {error}" if side.compresses else str(error)) from None

    def _asked(
        self,
        side: ShownModel,
        spec: ArmSpec,
        image: Image.Image,
        question: str,
        stopped: threading.Event,
        say: Callable[[str], None],
    ) -> SideAnswer:
        """Wait for the turn, put the side on the backbone, and generate."""
        with self._turn, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", SubTokenWarning)
            backbone = side.load()
            compression = spec.compression(backbone.reducer.round_up) if side.compresses else Compression()
            model = SubTokenModel.around(backbone, compression)
            inputs: dict[str, Any] = model.inputs(question, [image])
            stream = AnswerStream(model.tokenizer, say, stopped.is_set)
            model.generate(
                **inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS, streamer=stream, stopping_criteria=[stream]
            )
            last = model.last
            assert last is not None
            return SideAnswer(
                side.title,
                compressed_by(backbone, compression),
                len(stream.token_ids),
                image,
                backbone.family,
                last.batch,
                last.plan,
                model.cache_report(),
                last.prefill_seconds,
                last.decode_seconds,
                why_undrawn(backbone, last.batch),
                tuple(str(note.message) for note in said if issubclass(note.category, SubTokenWarning)),
            )


def _check_backbones(pool: ModelPool, adapter: str, anchor: str, backbone: str | None) -> None:
    """Raise a worded ``ValueError`` unless two adapters share one loaded backbone."""

    def source(name: str) -> dict[str, Any]:
        config: AdapterConfig = pool.adapter(name)
        found = in_one_place(adapter_backbone(pool.folder(name), config, backbone))
        return {field.name: getattr(found, field.name) for field in fields(found)}

    own, other = source(adapter), source(anchor)
    differ = [f"{name} {own[name]} and {other[name]}" for name in own if own[name] != other[name]]
    if differ:
        raise ValueError(
            f"{adapter} and its anchor {anchor} are not on one backbone ({', '.join(differ)}); use an anchor that was "
            "trained on the same one"
        )

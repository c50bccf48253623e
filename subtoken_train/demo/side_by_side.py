"""Models on one loaded backbone, asked in turn about a picture or a text: answers as they are made."""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from PIL import Image

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning, at_place, refuse
from subtoken_train.evaluation.picture import check_places, visual_grid
from subtoken_train.evictions.thresholds import threshold_file
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.cache_report import CacheReport
from subtoken_train.inference.compressed_context import CompressedContext, context_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.generation import serving
from subtoken_train.inference.model import ANSWER_TOKENS, SubTokenModel
from subtoken_train.inference.pool import ModelPool, adapter_backbone, in_one_place
from subtoken_train.inference.prefill import reader_of_question
from subtoken_train.reducers import build_reducer
from subtoken_train.settings import KVDtype
from subtoken_train.types import Batch, Plan

Seen = Image.Image | str
"""Holds what is asked about: a picture, or a text."""
Say = Callable[[str], None]
"""Takes the next piece of an answer."""


class SideAnswer(NamedTuple):
    """One model's finished answer, and what is left of its cache: ``batch`` without pixels, ``image`` None for a text.

    ``method`` names what compresses; ``undrawn`` says why kept tokens cannot be drawn; ``notes`` are warnings.
    """

    title: str
    method: str
    tokens: int
    image: Image.Image | None
    family: Family
    batch: Batch
    plan: Plan
    report: CacheReport
    prefill_seconds: float
    decode_seconds: float
    undrawn: str | None
    notes: tuple[str, ...]


class Spoken(NamedTuple):
    """An answer of the side at a place, as far as it has come; the whole of it once it is finished."""

    place: int
    text: str
    answer: SideAnswer | None = None


def compressed_by(backbone: CompressedBackbone, compression: Compression) -> str:
    """Name what compresses: ``fastv 0.25, S16K4 linear, snapkv 0.5``; ``-`` if nothing does."""
    reducer, routing = backbone.reducer, backbone.active_routing
    parts = [f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "-"]
    parts += ["-" if routing is None else routing.words, compression.label]
    return ", ".join(part for part in parts if part != "-") or "-"


def why_undrawn(backbone: CompressedBackbone, batch: Batch) -> str | None:
    """Say why kept tokens cannot be drawn on the picture, or marked in the text; None where they can."""
    try:
        check_places(backbone)
        if backbone.family.sees_images:
            visual_grid(backbone.family, batch)
    except ValueError as error:
        return str(error)
    return None


class ShownModel(NamedTuple):
    """A model that is asked: ``load`` takes its turn on the backbone; ``eviction``: its own, whatever is chosen."""

    title: str
    load: Callable[[], CompressedBackbone]
    compresses: bool
    eviction: str | None = None


class SideBySide:
    """Loads what an adapter names, and asks its sides (backbone, anchor where there is one, itself) one after another.

    The frozen backbone is in memory once; several askers wait for each other. Without ``backbone`` it is where the
    adapters say; without ``adapter`` it is all sides: itself, under the page's compression, and under SnapKV.
    """

    def __init__(
        self,
        adapter: str | None = None,
        anchor: str | None = None,
        backbone: str | None = None,
        device: str | None = "auto",
    ) -> None:
        pool = ModelPool(device)
        self.sides = _of_adapter(pool, adapter, anchor, backbone) if adapter else _of_backbone(pool, anchor, backbone)
        self._turn = threading.Lock()
        for side in self.sides:  # mistakes show before anything is asked
            self._family = side.load().family
        self.num_layers, self.sees_images = self._family.shape.num_layers, self._family.sees_images

    def ask(
        self,
        about: Seen,
        question: str,
        eviction: str | None,
        keep: str,
        kv_dtype: KVDtype = "model",
        raw: bool = False,
    ) -> Iterator[Spoken]:
        """Yield every side's answer, piece by piece; an iterator that is closed stops after the next token."""
        if eviction is not None and threshold_file(keep) is not None:  # which whoever sees the page would choose
            raise ValueError("eviction_keep of this page reads no file; write threshold:-4, or a share")
        chosen = [side.eviction or eviction for side in self.sides]
        given: dict[str, Any] = {"backbone": "-", "kv_dtype": kv_dtype, "written": "argument"}
        specs = [ArmSpec(eviction=each, eviction_keep=keep if each else None, **given) for each in chosen]
        for spec in specs:
            spec.compression().check(self._family)  # before the backbone answers for nothing
        if isinstance(about, str):
            if not about.strip() or not question.strip():
                raise ValueError("text or question is empty; write both, or use the example")
            bound, length = position_bound(self._family.model.config), len(self._family.tokenizer(about)["input_ids"])
            words = f"the text has {length:,} tokens, and the model was made for {bound or 0:,}, its answer among them"
            refuse((bound is not None and length > bound - ANSWER_TOKENS, f"{words}; shorten the text"))
        stopped = threading.Event()
        try:
            for place, (side, spec) in enumerate(zip(self.sides, specs, strict=True)):
                yield from self._answer(place, side, partial(self._asked, side, spec, about, question, raw, stopped))
        finally:
            stopped.set()

    def _answer(self, place: int, side: ShownModel, asked: Callable[[Say], SideAnswer]) -> Iterator[Spoken]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # of an answer made in a thread of its own
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
        # of the backbone, which compresses nothing, the prompt itself is refused
        with at_place(f"{side.title}: " if side.compresses else ""):
            said = future.result()
        yield Spoken(place, text, said)

    def _asked(
        self, side: ShownModel, spec: ArmSpec, about: Seen, question: str, raw: bool, stopped: threading.Event, say: Say
    ) -> SideAnswer:
        with self._turn, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", SubTokenWarning)
            warnings.filterwarnings("ignore", "a raw prompt")  # the page says so itself
            backbone = side.load()
            compression = spec.compression(backbone.reducer.round_up) if side.compresses else Compression()
            stream = AnswerStream(backbone.family.tokenizer, say, stopped.is_set)
            model = SubTokenModel.around(backbone, compression)
            tokens = ANSWER_TOKENS // 4 if raw else ANSWER_TOKENS  # a text has no end
            how = {"do_sample": False, "max_new_tokens": tokens, "streamer": stream, "stopping_criteria": [stream]}
            if isinstance(about, str) and reader_of_question(backbone, compression) is None:
                made = _blind(model, about, question, raw, how)
            else:
                made = _whole(model, about, question, raw, how)
            image = None if isinstance(about, str) else about
            notes = tuple(str(note.message) for note in said if issubclass(note.category, SubTokenWarning))
            own = side.title, compressed_by(backbone, compression), len(stream.token_ids), image, backbone.family
            return SideAnswer(*own, *made, why_undrawn(backbone, made[0]), notes)


Generated = tuple[Batch, Plan, CacheReport, float, float]
"""A prompt without pixels, what its cache keeps and takes, and the seconds of the prompt and of the answer."""


def _whole(model: SubTokenModel, about: Seen, question: str, raw: bool, how: dict[str, Any]) -> Generated:
    prompt = (f"{about}\n\n{question}",) if isinstance(about, str) else (question, [about])
    inputs: dict[str, Any] = model.inputs(*prompt, raw=raw)
    model.generate(**inputs, **how)
    last = model.last
    assert last is not None
    return last.batch, last.plan, model.cache_report(), last.prefill_seconds, last.decode_seconds


def _blind(model: SubTokenModel, text: str, question: str, raw: bool, how: dict[str, Any]) -> Generated:
    clock = time.perf_counter()
    batch, frames = context_batches(model.backbone, model.compression, [text], raw)
    with serving(model.backbone.family):
        context = CompressedContext.of(model.backbone, model.compression, batch, frames)
    took = time.perf_counter() - clock
    cache = context.packed.branch()
    context.generate(context.question_ids(f"\n\n{question}" if raw else question), cache, **how)
    assert context.plan is not None
    return batch, context.plan, context.report_of(cache), took, time.perf_counter() - clock - took


def _of_backbone(pool: ModelPool, anchor: str | None, backbone: str | None) -> list[ShownModel]:
    if backbone is None:
        raise ValueError("name an adapter (--adapter DIR), or a backbone to compress (--backbone PATH)")
    refuse((anchor is not None, f"anchor {anchor} needs --adapter DIR to compare with; add it, or leave --anchor out"))
    refuse((pool.find(backbone) is not None, f"--backbone {backbone} is an adapter; write --adapter {backbone}"))
    load = partial(pool.get, backbone)
    chosen = [ShownModel("backbone", load, False), ShownModel("compressed", load, True)]
    return [*chosen, ShownModel("SnapKV", load, True, "snapkv")]


def _of_adapter(pool: ModelPool, adapter: str, anchor: str | None, backbone: str | None) -> list[ShownModel]:
    config = pool.adapter(adapter)
    source = adapter_backbone(pool.folder(adapter), config, backbone)
    if anchor is not None:
        other = vars(in_one_place(adapter_backbone(pool.folder(anchor), pool.adapter(anchor), backbone)))
        own = vars(in_one_place(source)).items()
        differ = [f"{name} {value} and {other[name]}" for name, value in own if value != other[name]]
        words = f"{adapter} and its anchor {anchor} are not on one backbone ({', '.join(differ)})"
        refuse((differ, f"{words}; use an anchor that was trained on the same one"))
    whole = partial(pool.get, source.path, revision=source.revision, backbone=source)
    if config.merged:  # its backbone is in these weights alone
        whole = partial(pool.get, adapter, reducer=build_reducer("none"), selector="none")
    title = "adapter" if config.routing is None else "routed model"
    sides = [ShownModel("backbone", whole, False)]
    sides += [ShownModel("anchor", partial(pool.get, anchor, backbone=backbone), True)] if anchor is not None else []
    return [*sides, ShownModel(title, partial(pool.get, adapter, backbone=backbone), True)]

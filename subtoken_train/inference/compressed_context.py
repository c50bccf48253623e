"""Contexts that are compressed before any question: made a batch, held in one cache, asked on branches of it.

Legend: B contexts, N positions, q tokens of a question.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.documents import check_characters
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import panics_in_words, refuse
from subtoken_train.families.chat_template import checked_variables
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture, Video
from subtoken_train.families.literal_marks import picture_marks, tokenise
from subtoken_train.functional.gather import on_device
from subtoken_train.functional.hashing import digest_of
from subtoken_train.inference import text_prompts as texts
from subtoken_train.inference.answer_stream import AnswerStream, answer_text, pieces, same_autocast
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.cache_file import CacheHeader, made_by, read_cache, shape_of, write_cache
from subtoken_train.inference.cache_report import CacheReport, held_bytes, report, warn_of_emptied
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.generation import GenerateCall, check_ids, compressed, serving, settings_used
from subtoken_train.inference.prefill import append_rest, check_before_prefill, contexts_of, prefill, reader_of_question
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of, joined_batches
from subtoken_train.types import Batch, Plan

Context = str | Sequence[Picture]
"""The subject of questions: a text, or the pictures of one prompt."""


@panics_in_words()
def context_batches(
    backbone: CompressedBackbone,
    compression: Compression,
    contexts: Sequence[Context],
    raw: bool = False,
    system: str | None = None,
    by_system: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Batch, list[texts.QuestionFrame]]:
    """Encode contexts as one batch that a prefill takes, and return the frames of their questions.

    ``system``: what the system says before each; ``by_system``: the contexts are what the system says.
    """
    family, reads = backbone.family, reader_of_question(backbone, compression)
    refuse((reads, f"ask compresses before any question is seen, but {reads}; use generate or chat"))
    texts.check_raw(family, raw)
    unsaid = system is not None and not isinstance(system, str)
    refuse((unsaid, f"system is of type {type(system).__name__}; give the system prompt as a text"))
    check_characters(system, "the system prompt")
    variables = checked_variables(None if raw or family.sees_images else family.tokenizer, chat_template_kwargs)
    if family.sees_images:
        made = [_pictures(family, context, system) for context in contexts]
    else:
        told = partial(texts.system_frame, family) if by_system else partial(texts.text_frame, family, system=system)
        head = None if raw or not family.tokenizer.chat_template else partial(told, **variables)
        made = [_text(family, context, head, system or "") for context in contexts]
    batch = joined_batches([each for each, _ in made], padding_id(family.tokenizer))
    check_ids(batch.input_ids_BN, family.model.get_input_embeddings().num_embeddings)
    check_before_prefill(backbone, batch, compression)
    return batch, [frame for _, frame in made]


def _text(
    family: Family,
    context: Context,
    frame_of: Callable[[str], tuple[str, int, texts.QuestionFrame]] | None,
    system: str,
) -> tuple[Batch, texts.QuestionFrame]:
    if not isinstance(context, str) or not context.strip():
        got = "empty" if isinstance(context, str) else f"{type(context).__name__}, not text"
        raise ValueError(f"{family.name} reads texts, and a context is {got}; give the text that is asked about")
    check_characters(context, "a context")
    if frame_of is None:
        (ids, whole), frame = texts.told_ids(family, system, context), texts.RAW_FRAME
    else:
        head, system_end, frame = frame_of(context)
        ids, starts = tokenise(family.tokenizer, head)
        whole = texts.tokens_before(starts, system_end)
    # a prompt must ask: its last token does, and goes again
    prompt = texts.text_batch(family, [texts.EncodedText((*ids, ids[-1]), len(ids) - whole, system_length=whole)])
    return _named(contexts_of(prompt), family), frame


def _pictures(family: Family, context: Context, system: str | None) -> tuple[Batch, texts.QuestionFrame]:
    words = f"{family.name} sees images: a context is an image or a list of images, and text belongs to the questions"
    if isinstance(context, str) or not context:
        raise ValueError(words)
    marked = system is not None and picture_marks(system)
    refuse((marked, "the system prompt contains <image> or <video>, which stand for pictures; leave them out"))
    inputs = inputs_of(family, texts.picture_messages(context, "?", system), context)
    prompt = batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    return _named(contexts_of(prompt), family), texts.picture_frame(family, context, system)


def _named(batch: Batch, family: Family) -> Batch:
    """On the model's device, with its digest as its name, so that random choices do not depend on the batch."""
    names = ("input_ids_BN", "pixel_values", "image_grid_I3", "seconds_I")
    digest = digest_of("", ((name, part) for name in names if (part := getattr(batch, name)) is not None))
    return replace(on_device(batch, family.device), record_ids=[digest.hexdigest()])


@dataclass(frozen=True)
class Questions:
    """The questions about every context; ``nested``: they were given as a list for each."""

    of_each: list[list[str]]
    nested: bool

    def check_fits(self, contexts: int) -> None:
        """Raise ``ValueError`` unless there are questions of as many contexts."""
        given = f"{len(self.of_each)} lists of questions" if self.nested else "one list of questions"
        form = "give a list for each: ask([context, context], [[question], []])"
        refuse((len(self.of_each) != contexts, f"{given} for {contexts} contexts; {form}"))


def questions_of(questions: Any, max_new_tokens: Any) -> Questions:
    """Return the questions as lists, one for each context; a single context may come with a plain list of texts."""
    got = "none" if questions is None else type(questions).__name__
    whole = type(max_new_tokens) is int and max_new_tokens >= 1
    refuse(
        (not whole, f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1"),
        (not _listed(questions), f"questions must be a list of texts, not {got}: ask(context, [question, question])"),
    )
    nested = bool(questions) and all(map(_listed, questions))
    lists = [list(own) for own in questions] if nested else [list(questions)]
    for each in (question for own in lists for question in own):
        forms = "questions are a list of texts, or for several contexts a list of texts for each"
        text = isinstance(each, str)
        refuse(
            (not text, f"a question is of type {type(each).__name__}, not a text; {forms}"),
            (text and not each.strip(), "a question is empty; write what the model should answer"),
        )
        check_characters(each, "a question")
    return Questions(lists, nested)


def _listed(thing: Any) -> bool:
    return isinstance(thing, Sequence) and not isinstance(thing, str | bytes)


def asked_of(family: Family, context: Any, questions: Questions) -> list[Context]:
    """Return the contexts that questions are about, in the form that the model reads."""
    given = context if (questions.nested or not family.sees_images) and _listed(context) else [context]
    questions.check_fits(len(given))
    if not family.sees_images:
        return list(given)
    alone = [[each] if isinstance(each, Image.Image | Video) else each for each in given]
    return [list(each) if _listed(each) else "" for each in alone]  # what is no picture is refused as a text is


@dataclass(frozen=True, eq=False, repr=False)
class CompressedContext:
    """One or more contexts in one cache, which never changes: every question is answered on a branch of it."""

    backbone: CompressedBackbone
    compression: Compression
    packed: PackedCache
    frames: list[texts.QuestionFrame]
    digests: list[str]
    report: CacheReport
    plan: Plan | None = None
    goes_on: bool = False

    @classmethod
    def of(
        cls,
        backbone: CompressedBackbone,
        compression: Compression,
        batch: Batch,
        frames: list[texts.QuestionFrame],
        goes_on: bool = False,
        between: Callable[[], None] | None = None,
    ) -> Self:
        """Compress contexts in one pass, which all of them share; ``between`` as ``prefill`` has it."""
        cache = PackedCache(backbone.family.shape.num_layers)
        plan = prefill(backbone, batch, cache, compression, between).plan
        warn_of_emptied(backbone, compression, batch, plan)
        took = report(backbone, replace(batch, pixel_values=None), plan, cache, compression)
        return cls(backbone, compression, cache, frames, batch.record_ids, took, plan, goes_on)

    def __repr__(self) -> str:
        return f"CompressedContext({len(self.frames)} of {self.packed.prompt_length:,} tokens; {self.report})"

    @panics_in_words()
    def answers(
        self,
        questions: Sequence[Sequence[str]],
        max_new_tokens: int,
        ended: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> list[list[str]]:
        """Answer the questions of every context greedily."""
        family = self.backbone.family
        asked = [[frame.ids(family, each) for each in own] for frame, own in zip(self.frames, questions, strict=True)]
        found: list[list[str]] = [[] for _ in asked]
        for turn in range(max(map(len, asked), default=0)):
            rows, cache = [row for row, own in enumerate(asked) if turn < len(own)], self.packed.branch()
            if len(rows) < len(self.frames):
                cache.batch_select_indices(torch.tensor(rows))
            ids_Bq, padding_Bq = self._rows([asked[row][turn] for row in rows])
            logits_BV = append_rest(self.backbone, ids_Bq, padding_Bq, cache, self.compression.prefill_chunk)
            tokens_BT, count_B = greedy_tokens(self.backbone, cache, logits_BV, max_new_tokens, ended)
            for row, ids, count in zip(rows, tokens_BT.tolist(), count_B.tolist(), strict=True):
                text = family.tokenizer.decode(ids[:count], skip_special_tokens=True)
                found[row].append(answer_text(text, self.goes_on))
        return found

    def generate(self, asked: list[int], cache: PackedCache, **settings: Any) -> Tensor:
        """Answer a question of the one context by ``generate`` of transformers, which samples, streams and stops.

        ``asked`` stands between the context and the answer; ``cache`` is a branch of ``packed``, which grows. Returns
        the ids of question and answer, [1, N].
        """
        family = self.backbone.family
        used, (ids_Bq, _) = settings_used(settings, family.model.generation_config), self._rows([asked])
        call = GenerateCall(ids_Bq, None, used)
        copies = "num_beams and num_return_sequences do not go with a question of a context: leave both out"
        refuse((call.copies > 1, copies))
        mask_BN = ids_Bq.new_ones(1, cache.get_seq_length() + len(asked))
        with serving(family), compressed(self.backbone, self.compression, None, cache, None, call.room(0)):
            out: Tensor = family.model.generate(input_ids=ids_Bq, attention_mask=mask_BN, **{CACHE: cache}, **settings)
        return out

    def report_of(self, cache: PackedCache) -> CacheReport:
        """Measure a branch of one row after its answer, of which tokens may have been evicted."""
        appended = (cache.get_seq_length() - self.packed.get_seq_length()) * self.backbone.family.shape.token_bytes
        return replace(self.report, dense_bytes=self.report.dense_bytes + appended, **held_bytes(cache))

    @panics_in_words()
    def question_ids(self, question: str) -> list[int]:
        """Return the token ids between the one context and the answer."""
        return self.frames[0].ids(self.backbone.family, question)

    def _rows(self, asked: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return what is asked, padded on the left, and which of it is padding, [B, q]."""
        device, width = self.backbone.family.device, max(map(len, asked))
        for ids in asked:
            check_ids(torch.tensor([ids]), self.backbone.model.get_input_embeddings().num_embeddings)
        pad = padding_id(self.backbone.family.tokenizer)
        ids_Bq = torch.tensor([[pad] * (width - len(ids)) + ids for ids in asked], device=device)
        missing_B1 = torch.tensor([[width - len(ids)] for ids in asked], device=device)
        return ids_Bq, torch.arange(width, device=device) < missing_B1

    def stream(self, question: str, max_new_tokens: int) -> Iterator[str]:
        """Yield the greedy answer of one context to one question in pieces."""
        autocast = same_autocast(self.backbone.family.device.type)  # of who asks, whenever it runs

        def answer(stream: AnswerStream) -> None:
            stream.put(torch.empty(0))  # what was asked is not handed on

            def ended(steps: list[Tensor]) -> Tensor:
                stream.put(steps[-1])
                return stream(steps[-1][:, None], None)

            with autocast, serving(self.backbone.family):
                self.answers([[question]], max_new_tokens, ended)

        return pieces(self.backbone.family.tokenizer, answer, self.goes_on)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the compressed contexts into one safetensors file, whole or not at all."""
        every = self.compression.every
        notes = "later evictions cannot be saved; leave eviction_every out"
        refuse((every is not None, f"a cache with eviction_every={every} is not saved: {notes}"))
        header = CacheHeader(*made_by(self.backbone, self.compression), self.frames, self.digests, self.report)
        shape = shape_of(len(self.frames), self.backbone, self.compression)
        return write_cache(Path(path), header, self.packed, shape, overwrite)

    @classmethod
    def load(cls, path: str | Path, backbone: CompressedBackbone, compression: Compression) -> Self:
        """Read such a file for the model and the settings that it was written with."""
        header, packed = read_cache(Path(path), backbone, compression)
        took = replace(header.report, kernel_bytes=packed.kernel_bytes)  # of this machine's kernels
        raw = bool(backbone.family.tokenizer.chat_template) and texts.RAW_FRAME in header.frames
        return cls(backbone, compression, packed, header.frames, header.contexts, took, goes_on=raw)

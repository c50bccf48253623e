"""Records to padded batches: the one place that makes ids, labels and regions. Legend: B batch, N positions."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from operator import and_
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from subtoken_train.datasets.image_sources import MAX_FRAMES, MAX_PIXELS, open_picture
from subtoken_train.datasets.records import Record
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.errors import at_place, refuse
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture, count_images
from subtoken_train.families.literal_marks import hidden_turn, tokenise
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region, RenderedPrompt


def all_masked(length: int, max_length: int) -> ValueError:
    """Return the error for a sample with nothing to learn."""
    cause = "no token starts inside an answer; the chat format and the tokenizer disagree"
    if length > max_length:
        cause = f"its {length} tokens were cut to max_length {max_length} before the first learnt answer; raise it"
    return ValueError(f"all labels masked, {cause}")


@dataclass(frozen=True)
class EncodedSample:
    """One record as the model sees it, unpadded."""

    input_ids: list[int]  # one image token per visual token
    labels: list[int]  # the same ids at tokens of answers that are learnt, -100 elsewhere
    regions: list[int]  # ``Region`` codes
    rank_position: int  # last prompt token of the turn that holds the last image; -1 without an image
    num_images: int  # images and videos of the record
    record_id: str

    @property
    def needed(self) -> int:
        """Tokens up to the end of the last question about an image and to the first one that is learnt: never cut."""
        learnt = next((place for place, label in enumerate(self.labels) if label != IGNORE_INDEX), 0)
        return max(self.rank_position, learnt) + 1


def encode(
    record: Record, family: Family, max_length: int, images: Sequence[Picture], generation: bool = False
) -> EncodedSample:
    """Tokenise a conversation and mark its tokens, cut at the right; ``generation``: without its last answer."""
    with at_place(f"record {record.id!r}: "):
        return _encoded(record, family, max_length, images, generation)


def _encoded(
    record: Record, family: Family, max_length: int, images: Sequence[Picture], generation: bool
) -> EncodedSample:
    turns = [*record.turns[:-1], replace(record.turns[-1], answer=None)] if generation else record.turns
    rendered = family.render([hidden_turn(family, turn) for turn in turns])  # only pictures have marks
    together = count_images(images)
    shown = [family.picture_text(image, rendered.image_marker, together) for image in images]
    rendered = _expand_images(rendered, shown)
    ids, starts = tokenise(family.tokenizer, rendered.text)
    visual = family.is_visual(torch.tensor(ids)).tolist() if images else [False] * len(ids)
    said = [turn.learnt for turn in turns if turn.answer is not None]
    learnt_spans = [span for span, learnt in zip(rendered.answer_spans, said, strict=False) if learnt]
    answer, learnt = (starts_within(starts, spans, rendered.text) for spans in (rendered.answer_spans, learnt_spans))
    written, expected = (sum(map(text.count, family.placeholders)) for text in (rendered.text, "".join(shown)))
    last_image = len(ids) - 1 - visual[::-1].index(True) if any(visual) else None
    after = -1 if last_image is None else next((i for i in range(last_image, len(ids)) if answer[i]), len(ids))
    rank_position = -1 if last_image is None else after - 1
    needed = len(ids) if generation else rank_position + 1
    what = "its prompt" if generation else "its images and their question"
    made, (both, either) = sum(visual), (joint.join(map(repr, family.placeholders)) for joint in (" and ", " or "))
    made_words = f"{written} visual tokens were written but the tokenizer made {made} image tokens of them"
    late = f"{len(ids)} tokens, and {what} end at token {needed}, past max_length {max_length}"
    refuse(
        (made != written, f"{made_words}; make {both} special tokens of the tokenizer"),
        (written != expected, f"its text holds {either}, a visual token; write <image> where a picture stands"),
        (any(map(and_, visual, answer)), f"an answer holds {rendered.image_marker!r}; images belong in prompts"),
        (needed > max_length, f"{late}; raise max_length to {len(ids)} or drop the record"),
    )
    if not generation and not any(learnt[:max_length]):
        raise all_masked(len(ids), max_length)
    ids, visual, answer = ids[:max_length], visual[:max_length], answer[:max_length]
    # the system region ends at the first image (text-only: after the BOS)
    system_end = visual.index(True) if any(visual) else int(ids[:1] == [family.tokenizer.bos_token_id])
    others = [Region.SYSTEM] * system_end + [Region.QUERY] * (len(ids) - system_end)
    marks = zip(visual, answer, others, strict=True)
    return EncodedSample(
        input_ids=ids,
        labels=[token if is_learnt else IGNORE_INDEX for token, is_learnt in zip(ids, learnt, strict=False)],
        regions=[int(Region.VISUAL if image else Region.ANSWER if own else other) for image, own, other in marks],
        rank_position=rank_position,
        num_images=len(images),
        record_id=record.id,
    )


def answer_tokens(record: Record, family: Family) -> list[int]:
    """Return the last answer's token ids as ``encode`` labels them, end of turn included; no image is opened."""
    if not record.turns[-1].answer:
        return []
    rendered = family.render([hidden_turn(family, turn) for turn in record.turns])
    ids, starts = tokenise(family.tokenizer, rendered.text)
    return list(compress(ids, starts_within(starts, rendered.answer_spans[-1:], rendered.text)))


def starts_within(starts: Sequence[int], spans: Sequence[tuple[int, int]], text: str) -> list[bool]:
    """Return whether each token begins in one of some spans of a text, or holds the first letter of one (`` yes``)."""
    begun = {begin for begin, end in spans if begin < end and not text[begin].isspace()}
    return [
        any(begin <= start < end for begin, end in spans) or any(start < begin < after for begin in begun)
        for start, after in pairwise([*starts, len(text)])
    ]


def _expand_images(rendered: RenderedPrompt, texts: list[str]) -> RenderedPrompt:
    marker = rendered.image_marker
    places = [match.start() for match in re.finditer(re.escape(marker), rendered.text)] if marker else []
    if len(places) != len(texts):
        raise ValueError(f"{len(places)} {marker!r} in its prompt but {len(texts)} image(s); write one per image")
    pieces, end, grown = [], 0, [0]
    for place, text in zip(places, texts, strict=True):
        pieces += [rendered.text[end:place], text]
        end = place + len(marker)
        grown.append(grown[-1] + len(text) - len(marker))
    pieces.append(rendered.text[end:])
    ends = [[place + grown[bisect_right(places, place)] for place in span] for span in rendered.answer_spans]
    return RenderedPrompt("".join(pieces), [(start, stop) for start, stop in ends], marker)


class Collator:
    """Turns records into a ``Batch``; ``max_length`` counts visual tokens; on the ``left`` the last answer is out."""

    def __init__(
        self,
        family: Family,
        max_length: int,
        padding_side: Literal["left", "right"] = "right",
        generation: bool = False,
        max_pixels: int = MAX_PIXELS,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        self.family, self.max_length, self.padding_side = family, max_length, padding_side
        self.generation, self.max_pixels, self.max_frames = generation, max_pixels, max_frames

    def __call__(self, records: Sequence[Record]) -> Batch:
        """Encode and pad."""
        limits = self.max_pixels, self.max_frames
        images = [[open_picture(source, record.id, *limits) for source in record.images] for record in records]
        pairs = zip(records, images, strict=True)
        samples = [encode(each, self.family, self.max_length, own, self.generation) for each, own in pairs]
        flat = [image for own in images for image in own]
        together = [count_images(own) for own in images for _ in own]
        pixel_values, grid = self.family.process_images(flat, together) if flat else (None, None)
        batch = self._pad(samples)
        return replace(batch, pixel_values=pixel_values, image_grid_I3=grid, seconds_I=self.family.seconds(flat))

    def _pad(self, samples: list[EncodedSample]) -> Batch:
        width = max(len(sample.input_ids) for sample in samples)
        shifts = [width - len(sample.input_ids) if self.padding_side == "left" else 0 for sample in samples]

        def padded(name: str, fill: int) -> torch.Tensor:
            rows = [torch.tensor(getattr(sample, name)) for sample in samples]
            return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=self.padding_side)

        ranks = [s.rank_position + shift if s.num_images else -1 for s, shift in zip(samples, shifts, strict=True)]
        return Batch(
            input_ids_BN=padded("input_ids", padding_id(self.family.tokenizer)),
            labels_BN=padded("labels", IGNORE_INDEX),
            regions_BN=padded("regions", int(Region.PADDING)),
            rank_position_B=torch.tensor(ranks),
            pixel_values=None,
            images_per_sample_B=torch.tensor([sample.num_images for sample in samples]),
            record_ids=[sample.record_id for sample in samples],
        )

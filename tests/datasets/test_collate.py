"""Token ids, labels and regions against sequences written by hand."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from subtoken_train.datasets.collate import Collator, answer_tokens, encode
from subtoken_train.datasets.records import Record
from subtoken_train.types import Region, Turn
from tests.support.chats import byte_tokenizer
from tests.support.refusals import refuses

VISUAL = 64  # of the tiny LLaVA
IMAGE = Image.new("RGB", (120, 60), (200, 10, 10))
S, V, Q, A = Region.SYSTEM, Region.VISUAL, Region.QUERY, Region.ANSWER


def record(*turns: Turn, images: int = 0, name: str = "r") -> Record:
    return Record(name, [f"{name}-{i}.jpg" for i in range(images)], list(turns))


ONE_IMAGE = record(Turn("<image>\nwhere is the 7 ?", "B3"), images=1, name="one")
TEXT_ONLY = record(Turn("what is there ?", "none"), name="text")
TWO_TURNS = record(
    Turn("<image>\nhow many red ?", "2"), Turn("what is <image> ?", "a 7"), Turn("list .", "no"), images=2, name="two"
)


@pytest.fixture
def bpe_family(tiny_family):
    """The tiny family with a byte-level BPE tokenizer, whose tokens carry their leading spaces."""
    special, text = ["<pad>", "<s>", "</s>", "<image>"], "USER: where is the 7? ASSISTANT: a red square"
    named = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False))
    named["additional_special_tokens"] = special[3:]
    tiny_family.processor.tokenizer = byte_tokenizer(special, 320, text, **named)
    tiny_family.model.config.image_token_id = 3
    return tiny_family


def expect(family, *parts):
    """(text or image count, region) pairs to (ids, labels, regions)."""
    ids, labels, regions = [], [], []
    for content, region in parts:
        new = [family.image_token_id] * VISUAL * content if region == V else family.tokenizer(content)["input_ids"]
        ids += new
        labels += new if region == A else [-100] * len(new)
        regions += [region] * len(new)
    return ids, labels, regions


def parts_of(sample):
    return sample.input_ids, sample.labels, sample.regions


def test_text_only_has_the_bos_as_system_region(tiny_family):
    sample = encode(TEXT_ONLY, tiny_family, 512, [])
    prompt = ("USER: what is there ? ASSISTANT:", Q)
    assert parts_of(sample) == expect(tiny_family, ("<s>", S), prompt, ("none </s>", A))
    assert sample.rank_position == -1


def test_several_images_in_several_turns(tiny_family):
    sample = encode(TWO_TURNS, tiny_family, 512, [IMAGE, IMAGE])
    first = [("<s> USER:", S), (1, V), ("how many red ? ASSISTANT:", Q), ("2 </s>", A), ("USER:", Q), (1, V)]
    rest = [("what is ? ASSISTANT:", Q), ("a 7 </s>", A), ("USER: list . ASSISTANT:", Q), ("no </s>", A)]
    assert parts_of(sample) == expect(tiny_family, *first, *rest)
    assert sample.input_ids[sample.rank_position + 1 :][:2] == tiny_family.tokenizer("a 7")["input_ids"]
    cut = encode(TWO_TURNS, tiny_family, len(sample.input_ids) - 5, [IMAGE, IMAGE])
    assert parts_of(cut) == tuple(part[:-5] for part in parts_of(sample))
    assert cut.rank_position == sample.rank_position


def test_text_before_the_first_image_is_system_but_its_answer_stays_labelled(tiny_family):
    late = record(Turn("a ?", "no"), Turn("<image> where ?", "A1"), images=1)
    parts = ("<s> USER: a ? ASSISTANT:", S), ("no </s>", A), ("USER:", S), (1, V), ("where ? ASSISTANT:", Q)
    assert parts_of(encode(late, tiny_family, 512, [IMAGE])) == expect(tiny_family, *parts, ("A1 </s>", A))


def test_byte_level_tokens_with_leading_spaces(bpe_family):
    turns = Turn("<image>\nwhere is the 7?", "a red square, größer"), Turn("is the 7 red?", "a 7")
    sample = encode(record(*turns, images=1), bpe_family, 512, [IMAGE])
    first = [("<s>USER: ", S), (1, V), ("\nwhere is the 7? ASSISTANT:", Q), (" a red square, größer</s>", A)]
    assert parts_of(sample) == expect(bpe_family, *first, ("USER: is the 7 red? ASSISTANT:", Q), (" a 7</s>", A))
    labelled = [token for token in sample.labels if token != -100]
    assert bpe_family.tokenizer.decode(labelled) == " a red square, größer</s> a 7</s>"


def test_generation_leaves_the_last_answer_out(tiny_family):
    sample = encode(TWO_TURNS, tiny_family, 512, [IMAGE, IMAGE], generation=True)
    full = encode(TWO_TURNS, tiny_family, 512, [IMAGE, IMAGE])
    assert sample.input_ids == full.input_ids[:-2]
    assert sample.rank_position == full.rank_position
    last = encode(ONE_IMAGE, tiny_family, 512, [IMAGE], generation=True)
    assert last.rank_position == len(last.input_ids) - 1
    assert set(last.labels) == {-100}
    assert A not in last.regions
    assert ONE_IMAGE.turns[0].answer == "B3"
    assert len(encode(TEXT_ONLY, tiny_family, 7, [], generation=True).input_ids) == 7  # whole


SPOKEN = record(Turn("what ?", "<image>"), name="spoken")
MOVED = record(Turn("what ?", "<image>"), images=1, name="moved")  # as many as images, but in the answer
CUT = "record 'one': 74 tokens, and its images and their question end at token 72, past max_length"
REFUSED = [
    *((ONE_IMAGE, cut, 1, False, f"{CUT} {cut}; raise max_length to 74 or drop") for cut in (20, VISUAL + 2, 71)),
    (TEXT_ONLY, 6, 0, True, "record 'text': 7 tokens, and its prompt end at token 7, past max_length 6"),
    (ONE_IMAGE, 72, 1, False, "record 'one': all labels masked, its 74 tokens were cut to max_length 72"),
    (TEXT_ONLY, 5, 0, False, r"record 'text': all labels masked, .* cut to max_length 5"),
    (SPOKEN, 512, 0, False, "record 'spoken': 1 '<image>' in its prompt but 0 image"),
    (MOVED, 512, 1, False, "record 'moved': an answer holds '<image>'"),
    (ONE_IMAGE, 512, 2, False, "record 'one': 1 '<image>' in its prompt but 2 image"),
]


@pytest.mark.parametrize(("one", "max_length", "images", "generation", "words"), REFUSED)
def test_what_cannot_be_encoded(tiny_family, one, max_length, images, generation, words):
    refuses(words, encode, one, tiny_family, max_length, [IMAGE] * images, generation)


def test_a_chat_format_and_image_tokens_that_disagree_with_the_tokenizer(tiny_family, bpe_family, monkeypatch):
    bpe_family.model.config.image_token_id = 2
    with pytest.raises(ValueError, match="64 visual tokens were written but the tokenizer made 1 image tokens"):
        encode(ONE_IMAGE, bpe_family, 512, [IMAGE])
    rendered = tiny_family.render(TEXT_ONLY.turns)
    monkeypatch.setattr(tiny_family, "render", lambda turns: replace(rendered, answer_spans=[]))
    with pytest.raises(ValueError, match=r"all labels masked, .* the chat format and the tokenizer disagree"):
        encode(TEXT_ONLY, tiny_family, 512, [])


@pytest.fixture
def on_disk(tmp_path):
    """The three records with their images on disk, each image of its own colour."""
    rows = []
    for row, base in ((ONE_IMAGE, 10), (TEXT_ONLY, 0), (TWO_TURNS, 100)):
        paths = [tmp_path / name for name in row.images]
        for i, path in enumerate(paths):
            Image.new("RGB", (96, 96), (base + 50 * i, 0, 0)).save(path.with_suffix(".png"))
        rows.append(replace(row, images=[path.with_suffix(".png") for path in paths]))
    return rows


@pytest.mark.parametrize("generation", [False, True])
def test_padding_sides_hold_the_same_samples(tiny_family, on_disk, generation):
    right = Collator(tiny_family, 512, generation=generation)(on_disk)
    left = Collator(tiny_family, 512, padding_side="left", generation=generation)(on_disk)
    real, real_left = right.regions_BN != Region.PADDING, left.regions_BN != Region.PADDING
    assert torch.equal(real, real_left.flip(1))
    for name in ("input_ids_BN", "labels_BN", "regions_BN"):
        assert torch.equal(getattr(right, name)[real], getattr(left, name)[real_left])
    for batch, mask in ((right, real), (left, real_left)):
        assert set(batch.input_ids_BN[~mask].tolist()) == {tiny_family.tokenizer.pad_token_id}
        assert set(batch.labels_BN[~mask].tolist()) == {-100}
    assert right.rank_position_B[1] == left.rank_position_B[1] == -1
    assert torch.equal((left.rank_position_B - right.rank_position_B)[[0, 2]], (~real).sum(1)[[0, 2]])
    colon = tiny_family.tokenizer.convert_tokens_to_ids("ASSISTANT:")
    for batch in (left, right):
        assert set(batch.input_ids_BN[[0, 2], batch.rank_position_B[[0, 2]]].tolist()) == {colon}


def test_a_mixed_batch(tiny_family, on_disk):
    batch = Collator(tiny_family, 512)(on_disk)
    assert batch.images_per_sample_B.tolist() == [1, 0, 2]
    assert batch.record_ids == ["one", "text", "two"]
    assert ((batch.pixel_values[:, 0] * 0.5 + 0.5) * 255).mean((1, 2)).round().tolist() == [10, 100, 150]
    assert tiny_family.embed(batch).shape == (*batch.input_ids_BN.shape, 128)
    assert (batch.regions_BN == Region.VISUAL).sum(1).tolist() == (batch.images_per_sample_B * VISUAL).tolist()


@pytest.mark.parametrize("family_name", ["tiny_family", "bpe_family"])
@pytest.mark.parametrize("one", [ONE_IMAGE, TEXT_ONLY, TWO_TURNS], ids=lambda one: one.id)
def test_answer_tokens_are_the_labels_of_the_last_answer(request, family_name, one):
    """And what follows the prompt that is generated from."""
    family = request.getfixturevalue(family_name)
    images = [IMAGE] * len(one.images)
    whole, prompt = (encode(one, family, 2048, images, generation) for generation in (False, True))
    expected = whole.labels[max(i for i, label in enumerate(whole.labels) if label == -100) + 1 :]
    assert answer_tokens(one, family) == expected
    assert prompt.input_ids + expected == whole.input_ids
    assert answer_tokens(replace(one, turns=[*one.turns[:-1], Turn(one.turns[-1].prompt)]), family) == []

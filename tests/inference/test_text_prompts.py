"""Texts as ids and log-likelihoods of lm-evaluation-harness, long prompts without their middle, regions of prompts."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import context_tokens
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.inference.batched import in_batches, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.inference.text_prompts import EncodedText, encode_text, in_chat, text_batch, without_middle
from subtoken_train.types import Region
from tests.support.helpers import compress, gqa_family, make_batch, only_sample
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records
from tests.support.truth_models import family_of, prompts

TEXT = "The old man saw a ship.  It was far away, and the sea was calm.\n\nWhere was it?"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}>"


@cache
def small():
    return load_family(BackboneConfig(path="checkpoints/tiny-llama"))


def joint(family, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, continuation = prompt[:-spaces], prompt[-spaces:] + continuation
    whole, start = family.tokenizer.encode(prompt + continuation), family.tokenizer.encode(prompt)
    return start, whole[len(start) :]


@pytest.mark.parametrize("prompt", [TEXT, TEXT + " ", TEXT + "\n\n ", "A", "<s>" + TEXT])
def test_pairs_are_encoded_together(prompt):
    family, words = small(), [" far away", "out at sea", "\n", " 7"]
    got = encode_text(family, prompt, words)
    for word, ids in zip(words, got.continuations, strict=True):
        start, rest = joint(family, prompt, word)
        assert (list(got.input_ids), list(ids)) == (start[prompt.startswith("<s>") :], rest)
    assert got.input_ids.count(family.tokenizer.bos_token_id) == 1
    if prompt == TEXT + " ":  # without continuations nothing is stripped
        assert list(encode_text(family, prompt).input_ids) == family.tokenizer.encode(prompt) != list(got.input_ids)


@pytest.mark.parametrize("characters", range(0, len(TEXT), 3))
def test_a_token_across_the_boundary_asks(characters):
    family = small()
    got = encode_text(family, TEXT, context_characters=characters)
    inside = [end <= characters for _, end in family.tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]]
    assert inside == sorted(inside, reverse=True)
    assert got.context_length == (sum(inside) if characters else 0)
    decoded = family.tokenizer.decode(got.input_ids[: got.context_length], skip_special_tokens=True)
    assert TEXT[:characters].startswith(decoded)


def test_a_prompt_may_take_its_positions_and_no_more():
    family = small()
    full = encode_text(family, TEXT, [" one two three"], context_characters=40)
    fits = len(full.input_ids) + len(full.continuations[0]) - 1
    assert encode_text(family, TEXT, [" one two three"], 40, max_length=fits) == full
    with pytest.raises(ValueError, match=f"needs {fits} positions, but there are {fits - 3}"):
        encode_text(family, TEXT, [" one two three"], 40, max_length=fits - 3)


REFUSED = {
    "empty": (lambda: encode_text(small(), "", [" A"]), "the prompt is empty"),
    "blank": (lambda: encode_text(small(), " \n", [" A"]), "the prompt is empty"),
    "continuation": (lambda: encode_text(small(), "A", [" B", ""]), "continuation '' adds no token"),
    "characters": (lambda: encode_text(small(), "A b", (), 3), "context_characters=3 must lie between 0 and 2"),
    "negative": (lambda: encode_text(small(), "A b", (), -1), "context_characters=-1 must lie"),
    "images": (lambda: encode_text(family_of("llava"), "A"), "llava is not a language model"),
    "slow": (lambda: encode_text(small(), TEXT, context_characters=5), "no character offsets"),
    "room": (lambda: without_middle(small(), words(900), 100, None, 1024), "room for 0 tokens .* beside 1024 of its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_worded(name, monkeypatch):
    call, said = REFUSED[name]
    if name == "slow":
        monkeypatch.setattr(type(small().tokenizer), "is_fast", False)
    refuses(said, call)


@pytest.fixture
def trained(shared):
    golden, folder = shared / "golden_eval" / "lm_loglikelihood" / "set_a.jsonl", shared / "realdata/tinystories/hf"
    if not golden.is_file() or not folder.is_dir():
        pytest.skip("the recorded log-likelihoods or their model are absent")
    return load_family(BackboneConfig(path=str(folder))), [json.loads(x) for x in golden.read_text().splitlines()]


@sampled("batch_size", [1, 24], every=2)
def test_choices_have_the_log_likelihoods_of_lm_eval(trained, batch_size):
    family, cases = trained
    cases, backbone = [case for case in cases if case["kind"] == "multiple_choice"], compress(family).eval()
    encoded, outcomes = [encode_text(family, case["context"], case["continuations"]) for case in cases], []
    for part in in_batches(encoded, batch_size):
        outcomes += score_batch(backbone, text_batch(family, part), [x.continuations for x in part])
    assert outcomes
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.logprobs == pytest.approx(case["loglikelihood"], abs=1e-4)
        assert outcome.greedy == case["is_greedy"]


def rolling(family, text):
    """A whole text as windows that score every token once: disjoint, the last one filled up with older tokens."""
    ids = [family.tokenizer.bos_token_id, *family.tokenizer.encode(text)]
    width, windows = family.decoder.config.max_position_embeddings, []
    for first in range(1, len(ids), width):
        last = min(first + width, len(ids))
        prompt = ids[max(0, last - 1 - width) : first]
        windows.append(EncodedText(tuple(prompt), 0, (tuple(ids[first:last]),), f"window {first}"))
    return windows


def test_whole_texts_have_the_log_likelihoods_of_lm_eval(trained):
    family, cases = trained
    cases = [case for case in cases if case["kind"] == "rolling"]
    assert cases
    for case in cases:
        windows = rolling(family, case["text"])
        found = score_batch(compress(family).eval(), text_batch(family, windows), [w.continuations for w in windows])
        # the recorded sums of several hundred terms are in fp32
        assert sum(x.logprobs[0] for x in found) == pytest.approx(case["loglikelihood"], abs=1e-4, rel=2e-7)


@pytest.fixture
def family():
    found = text_family("llama")
    found.processor = build_tokenizer()
    found.model.config.max_position_embeddings = 64
    return found


def words(count):
    return " ".join(f"w{i % 7}" for i in range(count))


def length(family, text):
    return len(family.tokenizer(text)["input_ids"])


def test_both_ends_stay_of_a_prompt_that_does_not_fit(family):
    context, asked, tokenizer = words(60), " Who ran?", family.tokenizer
    ids = tokenizer(context + asked)["input_ids"]
    text, kept = without_middle(family, context + asked, len(context), 21, 4)
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:10], ids[-10:]))
    assert text == first + last
    assert (text[kept:], text[:kept].startswith(first)) == (asked, True)
    fits = words(8)
    for most in (length(family, fits), None):
        assert without_middle(family, fits, 5, most, 4) == (fits, 5)


def test_a_question_longer_than_its_half_is_all_that_asks(family):
    context, asked = words(10), " " + words(60)
    text, kept = without_middle(family, context + asked, len(context), 20, 4)
    assert text[kept:] == family.tokenizer.decode(family.tokenizer(context + asked)["input_ids"][-10:])


@sampled(("given", "new_tokens"), [(None, 4), (1000, 4), (None, 40)], every=3)
def test_the_answer_has_room(family, given, new_tokens):
    text, _ = without_middle(family, words(300), 100, given, new_tokens)
    assert 64 - new_tokens - 4 <= length(family, text) <= 64 - new_tokens


def test_chat_templates(family):
    bos = family.tokenizer.bos_token
    refuses(r"has no chat template; ask without one \(chat: false\)", in_chat, family, "x", 1)
    family.tokenizer.chat_template = TEMPLATE
    text, kept = in_chat(family, "  some text Who? ", 11)
    assert (text, text[:kept].endswith("[some text")) == (f"{bos}[some text Who?]>", True)
    assert in_chat(family, "Who?", None) == (f"{bos}[Who?]>", None)
    long, kept = without_middle(family, words(300), 1200, None, 8, chat=True)
    assert length(family, in_chat(family, long, kept)[0].removeprefix(bos)) <= 64 - 8


def test_samples_become_batches_of_their_regions(family):
    family.tokenizer.chat_template = TEMPLATE
    context, asked = words(200), " Who ran?"
    sample = Sample("a", context + asked, {}, context_characters=len(context), max_new_tokens=8, cut_middle=True)
    for chat in (False, True):
        batch, _ = model_inputs([replace(sample, chat=chat)], family, "text", 30)
        told = batch.regions_BN[0]
        query = batch.input_ids_BN[0, told == Region.QUERY]
        assert family.tokenizer.decode(query).strip() == ("Who ran?]>" if chat else "Who ran?")
        assert 24 <= len(told) <= 40
    with pytest.raises(ValueError, match=r"sample 'a': the prompt needs \d+ positions, but there are 30"):
        model_inputs([replace(sample, cut_middle=False)], family, "text", 30)


def inputs_of(batch):
    mask = batch.regions_BN != Region.PADDING
    return batch.input_ids_BN, mask, {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_I3}


@pytest.mark.parametrize("pad_left", [False, True])
def test_llava_regions(tiny_family, pad_left):
    expected = make_batch([(1, 6), (2, 9), (0, 5)], pad_left)
    batch = batch_from_inputs(tiny_family, *inputs_of(expected), None)
    regions = expected.regions_BN.masked_fill(expected.regions_BN == Region.ANSWER, int(Region.QUERY))
    text = expected.images_per_sample_B == 0  # nothing comes before an image that is not there
    regions[text] = regions[text].masked_fill(regions[text] == Region.SYSTEM, int(Region.QUERY))
    assert torch.equal(batch.regions_BN, regions)
    assert batch.images_per_sample_B.tolist() == [1, 2, 0]
    assert batch.rank_position_B[2] == -1
    assert batch.rank_position_B[:2].tolist() == [int((row != Region.PADDING).nonzero().max()) for row in regions][:2]
    assert (batch.labels_BN == -100).all()


@pytest.mark.parametrize("pad_left", [False, True])
def test_qwen_regions_and_images(tmp_path, pad_left):
    family = qwen_family()
    expected = qwen_batch(family, qwen_records(tmp_path), pad_left=pad_left, generation=True)
    batch = batch_from_inputs(family, *inputs_of(expected), None)
    for region in (Region.VISUAL, Region.PADDING):
        assert torch.equal(batch.regions_BN == region, expected.regions_BN == region)
    assert torch.equal(batch.rank_position_B, expected.rank_position_B)
    assert batch.images_per_sample_B.tolist() == [1, 2, 0]
    backbone = compress(family, name="fastv", keep_ratio=0.5)
    assert torch.equal(*[prefill(backbone, x, PackedCache(4), Compression()).logits_BV for x in (batch, expected)])


def text_ids(lengths, pad_left):
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 0), torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if pad_left else slice(0, length)
        ids[row, span] = torch.randint(10, 60, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, span] = 1
    return ids, mask


@pytest.mark.parametrize("pad_left", [False, True])
def test_text_regions_split_each_sample(pad_left):
    ids, mask = text_ids([100, 70], pad_left)
    for length, expected in ((None, [36, 6]), (10, [10, 10])):
        batch = batch_from_inputs(text_family(), ids, mask, {}, length)
        assert (batch.regions_BN == Region.CONTEXT).sum(-1).tolist() == expected
        for row in range(2):
            real = batch.regions_BN[row][mask[row]].tolist()
            assert real == [Region.CONTEXT] * expected[row] + [Region.QUERY] * (len(real) - expected[row])
        assert torch.equal(batch.regions_BN == Region.PADDING, mask == 0)
        assert batch.rank_position_B.tolist() == ([99, 99] if pad_left else [99, 69])


SHOTS = "Q: how many legs has a spider?\nA: eight\n\n" * 6 + "Q: how many has a bee?\nA:"
ASKS_64 = ["one line of words " * 40, "a\n\n" + "words after a heading " * 40, "words and words " * 40 + "\n\n"]


def test_few_shot_prompts_ask_after_their_last_blank_line_and_others_with_64_tokens():
    family = text_family()
    family.processor = build_tokenizer()
    ids = [family.tokenizer(text)["input_ids"] for text in (SHOTS, *ASKS_64)]
    context = family.tokenizer.decode(ids[0][: context_tokens(family, ids[0])])
    assert context.rstrip("\n") == "<s>" + SHOTS.rpartition("\n\n")[0]
    assert [len(own) - context_tokens(family, own) for own in ids[1:]] == [64] * 3


SEES = family_of("llava")
IDS, MASK = text_ids([20], pad_left=False)
PIXELS = {"pixel_values": torch.zeros(1, 3, 96, 96)}
PICTURES = inputs_of(make_batch([(1, 6)]))[:2]
UNFIT = {
    "negative": (text_family(), IDS, MASK, {}, -1, "context_length=-1 must lie between 0 and 19: prompt 0 has 20"),
    "all": (text_family(), IDS, MASK, {}, 20, "context_length=20 must lie between 0 and 19"),
    "half": (text_family(), IDS, MASK, {}, 3.5, "context_length=3.5 must be a whole number of tokens"),
    "pixels": (text_family(), IDS, MASK, PIXELS, None, "pixel_values were given, but a language model sees no images"),
    "unshown": (SEES, IDS, MASK, PIXELS, None, "0 image tokens in the prompt but some pixel_values"),
    "no pixels": (SEES, *PICTURES, {}, None, r"\d+ image tokens in the prompt but no pixel_values"),
    "context": (SEES, IDS, MASK, {}, 4, "context_length is for language models; llava compresses the visual tokens"),
    "list": (SEES, IDS, MASK, {"pixel_values": [1]}, None, "pixel_values must be a tensor, not list"),
    "kinds": (SEES, IDS, MASK, {"mm_token_type_ids": torch.ones_like(IDS)}, None, "mm_token_type_ids do not mark the"),
}
test_inputs_that_do_not_fit_the_backbone = refusing(UNFIT, batch_from_inputs)


@pytest.mark.parametrize("kind", ["llava", "qwen"])
def test_images_of_another_form_are_worded(kind, tmp_path):
    if kind == "llava":
        family, batch = gqa_family(), make_batch([(1, 6), (2, 9)])
        wrong = {"llava takes pixel_values; leave it out": [{"image_grid_thw": torch.ones(3, 3).long()}]}
        wrong |= {r"must be \[images, 3, height, width\]": [{"pixel_values": batch.pixel_values[0]}]}
    else:
        family = qwen_family()
        batch = qwen_batch(family, qwen_records(tmp_path), generation=True)
        grid = batch.image_grid_I3
        grids = [{"image_grid_thw": x} for x in (None, grid.float(), grid[:1], grid[0])]
        grids.append({"pixel_values": batch.pixel_values[None]})
        wrong = {r"must be \[patches, channels\] with image_grid_thw": grids}
    ids, mask, images = inputs_of(batch)
    for said, changes in wrong.items():
        for change in changes:
            refuses(said, batch_from_inputs, family, ids, mask, images | change, None)
    assert batch_from_inputs(family, ids.int(), mask, images, None).input_ids_BN.dtype == torch.int64


A, V, P = int(Region.ANSWER), int(Region.VISUAL), int(Region.PADDING)
REDUCTIONS = {
    "fastv": {"stage": "embeds", "layer": 2},
    "fastv-decoder": {"stage": "decoder", "layer": 1},
    **{name: {} for name in ("visionzip", "random", "uniform", "cdpruner", "vispruner", "prunesid")},
    "dart": {"stage": "decoder", "layer": 1},
}


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_answers_after_an_image_are_predicted_from_its_last_row(name, reduction, pad_left):
    """In training too: the image's last token stays, inside the budget, and the answer keeps its positions."""
    family, reducer = family_of(name), reduction.partition("-")[0]
    batch = prompts(family, "last", pad_left)
    answer = torch.full((3, 2), 11)
    joined = [torch.cat(pair, 1) for pair in ((batch.input_ids_BN, answer), (batch.regions_BN, torch.full((3, 2), A)))]
    if not pad_left:  # the answer stands right after the prompt
        for i, count in enumerate((batch.regions_BN != P).sum(-1).tolist()):
            for each in joined:
                each[i] = torch.cat([each[i, :count], each[i, -2:], each[i, count:-2]])
    batch.input_ids_BN, batch.regions_BN = joined
    batch.labels_BN = torch.where(batch.regions_BN == A, batch.input_ids_BN, -100)
    backbone = compress(family, name=reducer, keep_ratio=0.25, **REDUCTIONS[reduction]).eval()
    result = backbone.run(batch, pad_left=pad_left)
    own, anew = family.positions(batch), name == "llava" and reducer in ("visionzip", "vispruner", "prunesid")
    for i in range(3):
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        visual = int((batch.regions_BN[i] == V).sum())
        assert int((batch.regions_BN[i, kept] == V).sum()) == backbone.reducer.kept_tokens(visual) or visual > 16
        if anew:
            continue
        place = kept.tolist().index(int((batch.regions_BN[i] == A).long().argmax()))
        assert kept[place - 1] == kept[place] - 1
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)

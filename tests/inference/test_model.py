"""``SubTokenModel``: what it loads, generates, streams and reports, and that mistakes leave it usable."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, pipeline

from subtoken_train import SubTokenModel
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.families.images import Video
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Turn
from tests.support.chats import byte_level
from tests.support.places import ROOT
from tests.support.refusals import refuses

PICTURE = Image.new("RGB", (120, 80), (200, 40, 40))
QUESTION = "is there a 0 ?"
TEXT = "the bee and the spider met in the garden. " * 12
FIRST = {"eviction": "first", "eviction_keep": 0.5}
KNORM = {"eviction": "knorm", "eviction_keep": 0.5}
BUILT = {"eviction": build_eviction("snapkv"), "eviction_options": {"window": 8}}
ASKED = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
STOPS = {"ile": "what is a f", "\n\n": "what is a file", "USER|is a": "what", "what": "", "x|": None}


@pytest.fixture(scope="module")
def vlm(vlm_adapter):
    return SubTokenModel.from_pretrained(vlm_adapter, device_map="cpu")


@pytest.fixture(scope="module")
def llm(text_adapter):
    return SubTokenModel.from_pretrained(text_adapter)


def tokens(model, images=(PICTURE,), prompt=QUESTION, **settings):
    inputs = model.inputs(prompt, images)
    out = model.generate(**inputs, **{"max_new_tokens": 5, "do_sample": False, **settings})
    return out[:, inputs["input_ids"].shape[1] :]


def test_an_adapter_reports_its_budget(vlm):
    tokens(vlm)
    report = vlm.cache_report()
    assert report.nominal_fraction == report.realised_fraction == 0.25 * (1 + 1 / 4) / 2
    assert report.payload_bytes == report.ledger.bytes_of(with_index=False)
    assert report.dense_bytes == (vlm.last.batch.input_ids_BN.shape[1] + 4) * vlm.backbone.family.shape.token_bytes
    assert report.tail_bytes == 4 * vlm.backbone.family.shape.token_bytes
    assert report.slack_bytes == 0  # room is made for just these
    held = report.total_bytes - report.slack_bytes
    assert f"KV {held:,} bytes in float32, {2 * held / report.dense_bytes:.1%} of the full cache in bf" in str(report)
    assert len(report.table().splitlines()) == 2 + 3 * 3
    assert vlm.last.prefill_seconds > 0 < vlm.last.decode_seconds


def test_a_picture_is_turned_as_its_file_says(vlm):
    exif, content = Image.Exif(), io.BytesIO()
    exif[274] = 6
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    upright.transpose(Image.Transpose.ROTATE_90).save(content, "PNG", exif=exif)
    with Image.open(content) as image:
        assert torch.equal(vlm.inputs(QUESTION, image)["pixel_values"], vlm.inputs(QUESTION, upright)["pixel_values"])


def test_a_region_that_keeps_nothing_is_said(vlm_adapter, recwarn):
    """The last three entries hold no picture; the default scope leaves a fourth of it, whatever the window."""
    path = vlm_adapter.parent / "backbone"
    settings = {"eviction_options": {"sinks": 0}, "eviction_keep": "3tokens", "scope": "all"}
    model = SubTokenModel.from_pretrained(path, eviction="streaming_llm", **settings)
    with pytest.warns(SubTokenWarning, match=r"^streaming_llm 3 tokens all: .*: system .*, visual \(1 of 1 prompts\)"):
        tokens(model)
    recwarn.clear()
    model = SubTokenModel.from_pretrained(path, eviction="snapkv", eviction_keep=0.25)
    tokens(model)
    assert [str(each.message) for each in recwarn] == []
    assert model.cache_report().realised_fraction == 0.25


def test_a_prompt_too_short_to_be_compressed_says_so(text_adapter):
    model = SubTokenModel.from_pretrained(text_adapter.parent / "backbone", eviction="snapkv", eviction_keep=0.25)
    tokens(model, (), "a bee")
    report = model.cache_report()
    assert "no visual token and no context to compress" in str(report)
    assert "compressed region" not in str(report)
    assert report.payload_bytes == report.ledger.dense_bytes()


def test_chat_is_the_decoded_answer(vlm):
    how = {"max_new_tokens": 5, "do_sample": False}
    answer = vlm.chat(QUESTION, [PICTURE], **how)
    assert answer == vlm.tokenizer.decode(tokens(vlm)[0], skip_special_tokens=True).strip()
    assert answer == vlm.chat(f"<image>\n{QUESTION}", PICTURE, **how)  # which is given as it is
    assert torch.equal(tokens(vlm, [PICTURE.convert("RGBA")]), tokens(vlm))
    assert isinstance(vlm.chat([Turn(f"<image>\n{QUESTION}", "no"), Turn(QUESTION)], [PICTURE], max_new_tokens=2), str)
    tokens(vlm, num_beams=3)  # which store their prompt as a dense cache would
    report = vlm.cache_report()
    assert report.payload_bytes == 3 * report.ledger.bytes_of(with_index=False)
    assert report.dense_bytes == 3 * report.ledger.dense_bytes() + report.tail_bytes


def test_a_report_describes_the_samples_that_are_left(llm):
    ids = llm.inputs(TEXT)["input_ids"]
    both = torch.nn.functional.pad(torch.stack([ids[0], ids[0].flip(0)]), (8, 0))
    mask = torch.ones_like(both)
    mask[0, :8] = 0
    for samples in ([0], [1], [1, 0], [1, 1, 1], [0, 1, 1]):
        llm.generate(input_ids=both, attention_mask=mask, max_new_tokens=2, context_length=64)
        whole = llm.cache_report()
        llm.last.cache.batch_select_indices(torch.tensor(samples))
        report = llm.cache_report()
        tokens = sum(int(mask[sample].sum()) for sample in samples)
        assert report.dense_bytes == (tokens + len(samples)) * llm.backbone.family.shape.token_bytes
        assert report.nominal_fraction == report.realised_fraction == 0.5 * (1 + 1 / 4) / 2
        held, all_held = ((each.total_bytes - each.slack_bytes) / each.dense_bytes for each in (report, whole))
        assert held == pytest.approx(all_held, rel=0.05)
        if len(set(samples)) == 1:
            assert report.payload_bytes == len(samples) * report.ledger.bytes_of(with_index=False)


@pytest.mark.parametrize("side", ["vlm", "llm"])
def test_a_loop_of_ones_own_says_what_generate_says(side, request):
    model = request.getfixturevalue(side)
    inputs = model.inputs(QUESTION, [PICTURE]) if side == "vlm" else model.inputs(TEXT)
    expected = model.generate(inputs.pop("input_ids"), **inputs, max_new_tokens=5, do_sample=False)
    length = expected.shape[1] - 5
    logits, said = model(expected[:, :length], **inputs).logits, []
    for _ in range(5):
        said.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = model(said[-1], cache=model.last.cache).logits
    assert torch.equal(torch.cat(said, 1), expected[:, length:])
    assert model.cache_report().tail_bytes == 5 * model.backbone.family.shape.token_bytes


def test_methods_are_given_by_name_or_built():
    named = {"reducer": "fastv", "keep_ratio": 0.25, "eviction": "snapkv", "eviction_keep": 0.5}
    built = {"reducer": build_reducer("fastv", 0.25), "eviction": build_eviction("snapkv"), "eviction_keep": 0.5}
    one, other = (SubTokenModel.from_pretrained("checkpoints/tiny-llava", **each) for each in (named, built))
    assert repr(one) == repr(other) == "SubTokenModel(LlavaForConditionalGeneration on cpu, fastv 0.25, snapkv 0.5)"
    assert torch.equal(tokens(one), tokens(other))
    assert (one.device, one.dtype) == (torch.device("cpu"), torch.float32)


def test_a_streamed_answer_is_the_answer_and_is_made_under_the_autocast_of_who_asks():
    model, asked = SubTokenModel.from_pretrained("checkpoints/tiny-llama", **KNORM), "what did they do ?"
    whole = model.ask(TEXT, [asked], max_new_tokens=8)
    pieces = list(model.ask(TEXT, asked, max_new_tokens=8, stream=True))
    assert len(pieces) > 1
    assert "".join(pieces) == whole[0]
    assert repr(model.cache).startswith("CompressedContext(1 of ")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = model.ask(TEXT, asked, max_new_tokens=8, stream=True)
    seen = []
    hook = model.backbone.model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert "".join(stream)
    hook.remove()
    assert set(seen) == {torch.bfloat16}


def test_a_stream_that_is_left_ends_and_errors_reach_the_reader():
    model = SubTokenModel.from_pretrained("checkpoints/tiny-llama", **KNORM)
    stream = model.ask(TEXT, "what ?", max_new_tokens=400, stream=True)
    next(stream)
    refuses("already generating", model.ask, TEXT, ["what ?"], max_new_tokens=2)
    stream.close()
    assert model.ask(None, ["what ?"], max_new_tokens=2)
    refuses("a question is empty", model.ask, None, " ", stream=True)
    refuses("one question, a text", model.ask, None, ["what ?"], stream=True)


TINY = "checkpoints/tiny-llava"
CUDA = "unknown device of this machine 'cuda:99'.* Allowed: auto, cpu"
WRONG_SETTINGS = {
    "options": (
        "llm",
        {"eviction": "snapkv", "eviction_options": "window=3"},
        "eviction_options='window=3' must be a dict",
    ),
    "no such device": ("vlm", {"device_map": "cuda:99"}, CUDA),
    "own reducer": ("vlm", {"reducer": build_reducer("fastv", 0.5)}, "is an adapter with its own token reducer; leave"),
    "options alone": ("llm", {"eviction_options": {"window": 3}}, "eviction_options=.* need an eviction, for instance"),
    "image": ("llm", FIRST | {"eviction": "first_visual"}, "'first_visual' reads the attention between"),
    "ratio": (TINY, {"reducer": "fastv"}, "reducer='fastv', keep_ratio=None: a name needs a share"),
    "reducer": (TINY, {"reducer": {"name": "fastv"}}, "reducer is of type dict"),
    "eviction": (TINY, {"eviction": 3}, "eviction is of type int"),
    "built": (TINY, BUILT, "snapkv is built, with settings"),
    "backbone": (TINY, {"backbone": "x"}, r"is not an adapter folder .*; backbone='x' needs one"),
    "folder": ("tests", {}, r"is neither a folder with a config\.json nor .*'subtoken-train data"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_are_refused_before_weights_are_read(name, vlm_adapter, text_adapter, dummy_evictions):
    path, settings, words = WRONG_SETTINGS[name]
    refuses(words, SubTokenModel.from_pretrained, {"vlm": vlm_adapter, "llm": text_adapter}.get(path, path), **settings)


def truncated():
    buffer = io.BytesIO()
    Image.effect_noise((96, 96), 60).save(buffer, "PNG")
    return Image.open(io.BytesIO(buffer.getvalue()[:2000]))


def goes_on(model, rows=1, **given):
    own = {name: model.last.cache if value == "own" else value for name, value in given.items()}
    return model(torch.ones(rows, 1, dtype=torch.long), **own)


MISTAKES = {
    "setting": (lambda m: tokens(m, max_newtokens=3), "'max_newtokens'. Did you mean 'max_new_tokens'"),
    "no ids": (lambda m: m.generate(max_new_tokens=3), "generate needs input_ids with at least one token"),
    "too few images": (lambda m: m.chat("<image> <image>\nhi", [PICTURE]), "2 image placeholders but 1 images"),
    "no pixels": (lambda m: m.generate(input_ids=m.inputs("a", [PICTURE])["input_ids"]), "but no pixel_values"),
    "corrupt": (lambda m: m.chat("hi", [PICTURE, truncated()]), "image 2 cannot be read .*; replace the file"),
    "video": (lambda m: m.inputs(QUESTION, Video([PICTURE])), "images and no videos"),
    "path": (lambda m: m.chat(QUESTION, Path("a.png")), r"^images='a.png' is a path, .* images=\[PIL.Image.o"),
    "none": (lambda m: m.inputs(QUESTION, None), "^images of type NoneType; give an image"),
    "arrays": (lambda m: m.chat(QUESTION, [np.zeros((4, 4, 3), np.uint8)]), "^image 1 is not an image; open"),
    "cache": (lambda m: tokens(m, past_key_values=object()), r"past_key_values must be last\.cache"),
    "two caches": (lambda m: tokens(m, cache=m.last, past_key_values=m.last), "two names for the same argument; give"),
    "streamer": (lambda m: tokens(m, streamer=print), "streamer has no put; give one of transformers"),
    "end": (lambda m: tokens(m, eos_token_id="</s>"), "eos_token_id='</s>' must be a whole number"),
    "context": (lambda m: m.chat(QUESTION, PICTURE, context_length=999), "context_length is for language models"),
    "two ids": (lambda m: tokens(m, inputs=torch.ones(1, 1)), "inputs and input_ids are two names for the same"),
    "input": (lambda m: goes_on(m, past_key_value=1), "unknown input 'past_key_value'"),
    "mask": (lambda m: goes_on(m, cache="own", attention_mask=torch.ones(1, 1)), "leave attention_mask out"),
    "rows": (lambda m: goes_on(m, 2, cache="own"), "2 rows of ids for a cache of 1 prompts"),
    "report": (lambda m: SubTokenModel.around(m.backbone).cache_report(), "nothing has been generated yet"),
}


@pytest.mark.parametrize(("call", "words"), MISTAKES.values(), ids=MISTAKES)
def test_after_a_mistake_the_model_serves_the_next_call(vlm, call, words):
    expected = tokens(vlm)
    refuses(words, call, vlm)
    assert torch.equal(tokens(vlm), expected)


def test_texts_are_answered_as_by_generate():
    reader = SubTokenModel.from_pretrained(ROOT / "checkpoints" / "tiny-llama", eviction="knorm", eviction_keep=0.3)
    pipe = pipeline("text-generation", model=reader, tokenizer=reader.tokenizer)
    prompts = ["The code of baran is amber falcon. " * n + "\n\nThe code of baran is" for n in (12, 7)]
    answers = [found[0]["generated_text"] for found in pipe(prompts, **ASKED)]
    assert reader.cache_report().kept_entries == pytest.approx(0.3, abs=0.02)
    assert answers == [found[0]["generated_text"] for found in pipe(prompts, batch_size=2, **ASKED)]
    for prompt, answer in zip(prompts, answers, strict=True):
        given = reader.inputs(prompt)
        out = reader.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert answer == reader.tokenizer.decode(out, skip_special_tokens=True)
    (whole,) = pipe(prompts[0], max_new_tokens=8, do_sample=False, context_length=10)
    assert whole["generated_text"].startswith(prompts[0])
    assert reader.cache_report().ledger.bytes_of("context") < reader.cache_report().ledger.bytes_of("query")


TOKENIZER = byte_level()
WORDS = "what is do n't a file , ein Bär ? it 's . we 're ! 've"


def of_words(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes no space before the first word, or that joins words with their marks."""
    named = {"special_tokens": ["<unk>"], "show_progress": False}
    if kind == "metaspace":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **named)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(vocab_size=90, **named)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)


TOKENIZERS = {"bytes": TOKENIZER, "metaspace": of_words("metaspace"), "wordpiece": of_words("wordpiece")}


def test_a_long_answer_is_decoded_in_parts(monkeypatch):
    """Not wholly with every token: its end alone, whatever characters tokens are cut in."""
    text = "what is ein Bär: 東京 🦀 in a file ?\n\n" * 40
    decoded, decode = [], TOKENIZER.decode
    monkeypatch.setattr(TOKENIZER, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    pieces, stream = streamed(text)
    assert "".join(pieces) == text.strip()
    assert len(stream.token_ids) > 1000
    assert max(decoded[:-1]) < 64
    assert decoded[-1] == len(stream.token_ids)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*WORDS.split(), "é", "🦀"]) | st.text(max_size=3), min_size=30, max_size=60),
    size=st.integers(1, 4),
    kind=st.sampled_from(["bytes", "metaspace", "wordpiece"]),
)
def test_what_was_said_is_the_beginning_of_all(parts, size, kind):
    """At every token it is what the tokens so far say together, for tokenizers that join and tidy words too."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(" ".join(parts), add_special_tokens=False)
    stream = AnswerStream(tokenizer, lambda piece: None)
    for start in range(0, len(ids), size):
        stream.token_ids += ids[start : start + size]
        assert stream._grown() == tokenizer.decode(stream.token_ids, skip_special_tokens=True)


def streamed(text, stops=(), size=1, stopped=lambda: False):
    """The pieces of a text that is said some tokens at a time, until the stream ends it."""
    pieces, ids = [], TOKENIZER.encode(text, add_special_tokens=False)
    stream = AnswerStream(TOKENIZER, pieces.append, stopped, stops)
    stream.put(torch.tensor([[7, 8, 9]]))
    for start in range(0, len(ids), size):
        stream.put(torch.tensor(ids[start : start + size]))
        if bool(stream(torch.zeros(1, 4, dtype=torch.long), None)):
            break
    stream.end()
    return pieces, stream


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text", ["a tag", "  what is\n\n a file ? \n", "ein Bär: 東京 🦀!", "", " \n "])
def test_joined_pieces_are_the_stripped_answer(text, size):
    pieces, stream = streamed(text, size=size)
    assert "".join(pieces) == stream.text == text.strip()
    assert all(pieces)
    assert "\N{REPLACEMENT CHARACTER}" not in stream.text
    assert not stream.ended


@pytest.mark.parametrize("stops", STOPS)
def test_a_stop_text_and_what_follows_is_never_said(stops):
    text, said = "what is a file\n\nUSER: a tag", STOPS[stops]
    pieces, stream = streamed(text, stops.split("|"))
    assert "".join(pieces) == (text if said is None else said)
    assert stream.ended == (said is not None)
    assert stops != "ile" or TOKENIZER.decode(stream.token_ids) == "what is a file"  # no token more than it takes


def test_whoever_is_asked_stops_it_and_special_tokens_are_counted_and_not_said():
    asked = itertools.count()
    _, stream = streamed("a tag in a file", stopped=lambda: next(asked) == 2)
    assert (len(stream.token_ids), stream.ended) == (3, False)
    pieces, stream = streamed("a tag</s>")
    assert ("".join(pieces), stream.token_ids[-1]) == ("a tag", TOKENIZER.eos_token_id)

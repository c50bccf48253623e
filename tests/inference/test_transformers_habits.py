"""What users of transformers write goes with a ``SubTokenModel``: the same tokens where nothing is compressed."""

import subprocess
import sys

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.pipelines import base

import subtoken_train
from subtoken_train import SubTokenModel
from subtoken_train.inference.compression import CompressionSettings
from tests.support.chats import CHATML
from tests.support.generation_cells import SERVED_CALLS
from tests.support.places import ROOT
from tests.support.refusals import refuses

LLAMA = ROOT / "checkpoints" / "tiny-llama"
WORDS = "The code of baran is amber falcon. " * 6 + "\n\nThe code of baran is"
SHORT = "the bee and the spider met in the garden ."
TALKS = [[{"role": "user", "content": words}] for words in (WORDS, SHORT)]
GREEDY, DRAWN = ({"max_new_tokens": 8, "do_sample": drawn} for drawn in (False, True))
TEMPLATED = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
QUESTIONS = ("is there a 7 ?", "what is at C4 ?")
ASKED, ANSWERS = f"<image>\n{QUESTIONS[0]}", {"return_full_text": False}
PADDED = {"return_tensors": "pt", "padding": True, "padding_side": "left"}


def ids(reader, words=WORDS):
    return reader(words, return_tensors="pt")["input_ids"]


def seeded(call):
    hf.set_seed(3)
    return call()


def streamed(model, reader):
    streamer = hf.TextIteratorStreamer(reader, skip_prompt=True)
    model.generate(ids(reader), streamer=streamer, **GREEDY)
    return list(streamer)


def loop(model, reader):
    out, said = model(**reader(WORDS, return_tensors="pt"), use_cache=True, return_dict=True, position_ids=None), []
    for _ in range(5):
        said.append(out.logits[:, -1:].argmax(-1))
        out = model(input_ids=said[-1], past_key_values=out.past_key_values, use_cache=True, output_attentions=False)
    return torch.cat(said, 1)


def served(**settings):
    return lambda m, r: seeded(lambda: m.generate(ids(r, SHORT), tokenizer=r, **{"max_new_tokens": 5, **settings}))


def writer(model, reader, **settings):
    return hf.pipeline("text-generation", model=model, tokenizer=reader, **settings)


TEXT = {
    "ids alone": lambda m, r: m.generate(ids(r), **GREEDY),
    "ids by name": lambda m, r: m.generate(input_ids=ids(r), **GREEDY),
    "ids as inputs": lambda m, r: m.generate(inputs=ids(r), **GREEDY),
    "all of the tokenizer": lambda m, r: m.generate(**r(WORDS, return_tensors="pt"), **GREEDY),
    "left padding": lambda m, r: m.generate(**r([WORDS, SHORT], **PADDED), **GREEDY),
    "config": lambda m, r: m.generate(ids(r), generation_config=hf.GenerationConfig(**GREEDY, pad_token_id=0)),
    "whole length": lambda m, r: m.generate(ids(r), max_length=ids(r).shape[1] + 4, do_sample=False),
    "beams": lambda m, r: m.generate(ids(r), num_beams=3, num_return_sequences=2, **GREEDY),
    "sampled": lambda m, r: seeded(lambda: m.generate(ids(r), **DRAWN, top_p=0.9)),
    "cached": lambda m, r: m.generate(ids(r), use_cache=True, **GREEDY),
    "inference mode": lambda m, r: torch.inference_mode()(m.generate)(ids(r), **GREEDY),
    "streamer": streamed,
    "loop": loop,
    "chat template": lambda m, r: m.generate(**r.apply_chat_template(TALKS[0], **TEMPLATED), **GREEDY),
    "moved": lambda m, r: m.to("cpu").eval().generate(ids(r).to(m.device), **GREEDY),
    "read": lambda m, r: [m.config, m.dtype, m.device, m.can_generate(), m.training, m.generation_config.eos_token_id],
    "parameters": lambda m, r: [next(m.parameters()).dtype, m.num_parameters(), m.get_memory_footprint()],
    "pipeline": lambda m, r: writer(m, r)(WORDS, **GREEDY),
    "pipeline of a list": lambda m, r: writer(m, r)([WORDS, SHORT], batch_size=2, **GREEDY),
    "pipeline of a stream": lambda m, r: list(writer(m, r)((words for words in (WORDS, SHORT)), **GREEDY)),
    "pipeline of a chat": lambda m, r: writer(m, r, device="cpu")(TALKS[0], **GREEDY),
    "pipeline of chats": lambda m, r: writer(m, r, device=-1)(TALKS, return_full_text=False, **GREEDY),
    "pipeline, sampled": lambda m, r: seeded(lambda: writer(m, r)(WORDS, max_new_tokens=8, num_return_sequences=2)),
    "pipeline, ids": lambda m, r: writer(m, r)(WORDS, return_tensors=True, **GREEDY),
    "pipeline by its class": lambda m, r: hf.TextGenerationPipeline(model=m, tokenizer=r)(WORDS, **GREEDY),
    "pipeline with settings": lambda m, r: writer(m, r, **GREEDY)(WORDS, stop_sequence="a"),
    **{f"with {name}": served(**settings) for name, settings in SERVED_CALLS.items()},
}


def picture():
    return Image.open(ROOT / "data" / "samples" / "a.png")


def asked(words):
    return [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": words}]}]


def said(found):
    return [said(each) if isinstance(each, list) else each["generated_text"] for each in found]


def seer(model, reader, **settings):
    return hf.pipeline("image-text-to-text", model=model, processor=reader, **settings)


def shown(reader):
    return reader(images=picture(), text=ASKED, return_tensors="pt")


PICTURES = {
    "all of the processor": lambda m, r: m.generate(**shown(r), **GREEDY),
    "beams": lambda m, r: m.generate(**shown(r), num_beams=2, **GREEDY),
    "pipeline of chats": lambda m, r: said(seer(m, r)(text=list(map(asked, QUESTIONS)), **ANSWERS, **GREEDY)),
    "pipeline of a picture": lambda m, r: said(seer(m, r, device="cpu")(images=picture(), text=ASKED, **GREEDY)),
    "read": lambda m, r: [m.config, m.dtype, m.device, m.can_generate(), m.input_modalities],
}


@pytest.fixture(scope="module")
def text():
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-llama")
    tokenizer.chat_template = CHATML
    return hf.AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / "tiny-llama"), tokenizer


@pytest.fixture(scope="module")
def pictures():
    path = ROOT / "checkpoints" / "tiny-llava"
    return hf.AutoModelForImageTextToText.from_pretrained(path), hf.AutoProcessor.from_pretrained(path)


def same(got, wanted):
    if isinstance(got, dict):
        pairs = (zip(got[kind], wanted[kind], strict=True) for kind in ("scores", "logits"))
        assert all((ours - theirs).abs().max() < 1e-4 for each in pairs for ours, theirs in each)
        got, wanted = got["sequences"], wanted["sequences"]
    return torch.equal(got, wanted) if isinstance(got, torch.Tensor) else str(got) == str(wanted)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(("kind", "habit"), [*(("text", it) for it in TEXT), *(("pictures", it) for it in PICTURES)])
def test_a_habit_gives_what_transformers_gives(kind, habit, request, monkeypatch):
    plain, reader = request.getfixturevalue(kind)
    call = {"text": TEXT, "pictures": PICTURES}[kind][habit]
    wanted = call(plain, reader)
    monkeypatch.setattr(base.logger, "error", pytest.fail)  # "The model ... is not supported"
    assert same(call(SubTokenModel(plain, reader), reader), wanted)


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_list_of_chats_is_answered_as_a_batch(kind, request):
    plain, reader = request.getfixturevalue(kind)
    model, tight = SubTokenModel(plain, reader), SubTokenModel(plain, reader, eviction="knorm", eviction_keep=0.5)
    if kind == "text":
        prompts, beside, mixed = TALKS, (), [WORDS, TALKS[1]]
        told = reader.apply_chat_template(TALKS, padding=True, padding_side="left", **TEMPLATED)
    else:
        prompts, beside, mixed = QUESTIONS, [picture(), [picture()]], [asked(words) for words in QUESTIONS]
        told = model.inputs(prompts, beside)
    rows = plain.generate(**told, **GREEDY)[:, told["input_ids"].shape[1] :]
    wanted = [words.strip() for words in model.tokenizer.batch_decode(rows, skip_special_tokens=True)]
    assert model.chat(prompts, beside, **GREEDY) == wanted == model.chat(mixed, **GREEDY)
    assert len(model.last.batch.record_ids) == 2
    alone = list(zip(prompts, beside or [()] * 2, strict=True))
    assert [model.chat(*each, **GREEDY) for each in alone] == wanted
    assert tight.chat(prompts, beside, **GREEDY) == [tight.chat(*each, **GREEDY) for each in alone]


def test_a_streamed_chat_is_the_chat(text):
    model = SubTokenModel(*text, eviction="knorm", eviction_keep=0.5)
    whole = model.chat(WORDS, **GREEDY)
    pieces = list(model.chat(WORDS, stream=True, **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    left = model.chat(WORDS, stream=True, max_new_tokens=400)
    next(left)
    left.close()
    assert model.chat(WORDS, stopping_criteria=[lambda ids, scores: torch.tensor([True])], stream=True) is not None
    assert model.chat(WORDS, **GREEDY) == whole


def test_dtype_and_device_are_named_as_in_transformers(tmp_path):
    half = hf.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(LLAMA)
    tokenizer.save_pretrained(tmp_path)
    for given in ({"dtype": "auto"}, {"dtype": torch.bfloat16}, {"torch_dtype": "bfloat16"}):
        for place in ({}, {"device": "cpu"}, {"device": torch.device("cpu")}, {"device_map": -1}):
            model = SubTokenModel.from_pretrained(tmp_path, **given, **place)
            assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    prompt = ids(tokenizer)  # whose logits are compared: in so few bits later tokens are near ties
    assert torch.equal(model(prompt).logits[:, -1], half(prompt).logits[:, -1])
    assert SubTokenModel.from_pretrained(tmp_path).dtype == torch.float32
    moved = SubTokenModel.from_pretrained(LLAMA)
    moved.ask(WORDS, [])
    assert moved.to("cpu").cache is moved.cache
    wanted = hf.AutoModelForCausalLM.from_pretrained(LLAMA).to(torch.bfloat16)(prompt).logits[:, -1]
    assert torch.equal(moved.to(torch.bfloat16)(prompt).logits[:, -1], wanted)
    with pytest.raises(ValueError, match="no context has been compressed yet"):
        _ = moved.cache
    adapter = ROOT / "checkpoints" / "adapters" / "tiny_fastv25_s16k4"
    assert SubTokenModel.from_pretrained(adapter, dtype="auto").dtype == torch.float32
    made = SubTokenModel.from_pretrained(adapter, dtype="bfloat16"), SubTokenModel.from_pretrained(adapter)
    for model in (made[0], made[1].to("cpu", torch.bfloat16)):
        assert (model.dtype, model.chat(QUESTIONS[0], picture())) == (torch.bfloat16, "yes")


OWN = {*CompressionSettings.__optional_keys__, "reducer", "keep_ratio", "groups", "selector", "layout"}
LOADED = OWN | {"device", "device_map", "dtype", "torch_dtype", "revision", "backbone"}
EVERY = "and every setting of transformers' GenerationConfig"
MISTAKES = {
    "setting": (lambda m, r: SubTokenModel(m, r, evict=1), "unknown setting 'evict'. Did you mean 'eviction'?", OWN),
    "loading": (lambda m, r: SubTokenModel.from_pretrained(LLAMA, evict=1), "unknown setting 'evict'", LOADED),
    "chat": (
        lambda m, r: SubTokenModel(m, r).chat("a", imags=()),
        "unknown argument of chat 'imags'. Did you mean 'images'?",
        {"images", "raw", "stream", "chat_template_kwargs", "streamer", EVERY},
    ),
    "generate": (
        lambda m, r: SubTokenModel(m, r).generate(ids(r), max_newtokens=1),
        "'max_newtokens'. Did you mean 'max_new_tokens'?",
        {"generation_config", "attention_mask", "regions", EVERY},
    ),
    "two devices": (
        lambda m, r: SubTokenModel.from_pretrained(LLAMA, device="cpu", device_map="cpu"),
        "device and device_map are two names for the same argument",
        (),
    ),
    "dtype": (lambda m, r: SubTokenModel.from_pretrained(LLAMA, dtype="float8"), "unknown dtype 'float8'", ()),
    "moved": (lambda m, r: SubTokenModel(m, r).to(torch.float64), "unknown dtype 'float64'", ("bfloat16",)),
    "nowhere": (lambda m, r: SubTokenModel(m, r).to("cuda:99"), "unknown device of this machine 'cuda:99'", ("cpu",)),
    "streams": (lambda m, r: SubTokenModel(m, r).chat(TALKS, stream=True), "several are given; ask one by one", ()),
    "pictures": (lambda m, r: SubTokenModel(m, r).chat(TALKS, [picture()]), "2 prompts, but pictures for 1; give", ()),
    "call": (lambda m, r: SubTokenModel(m, r)(ids(r), use_cache=False), "unknown input 'use_cache'", ()),
}


@pytest.mark.parametrize(("call", "words", "listed"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_all_settings(call, words, listed, text):
    said = refuses(r"\S", call, *text)
    assert words in said
    assert [each for each in listed if each not in said.partition("Allowed: ")[2]] == []


def test_dir_shows_the_names_without_torch():
    code = "import subtoken_train, sys; print(*dir(subtoken_train)); sys.exit('torch' in sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert names == sorted(subtoken_train.__all__)
    assert {"SubTokenModel", "build_eviction", "build_reducer"} < set(names)
    assert all(getattr(subtoken_train, name) for name in names)

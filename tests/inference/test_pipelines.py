"""Pipelines of transformers that are handed a ``SubTokenModel``: its answers, from its cache."""

import pytest
from PIL import Image
from transformers import pipeline

from subtoken_train import SubTokenModel
from tests.support.places import ROOT

ASKED = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}


@pytest.fixture
def reader() -> SubTokenModel:
    return SubTokenModel.from_pretrained(ROOT / "checkpoints" / "tiny-llama", eviction="knorm", eviction_keep=0.3)


def test_texts_are_answered_as_by_generate(reader):
    pipe = pipeline("text-generation", model=reader.backbone.model, tokenizer=reader.tokenizer)
    prompts = ["The code of baran is amber falcon. " * n + "\n\nThe code of baran is" for n in (12, 7)]
    plain = [found[0]["generated_text"] for found in pipe(prompts, **ASKED)]
    pipe.model = reader
    answers = [found[0]["generated_text"] for found in pipe(prompts, **ASKED)]
    assert reader.cache_report().kept_entries == pytest.approx(0.3, abs=0.02)
    batched = [found[0]["generated_text"] for found in pipe(prompts, batch_size=2, **ASKED)]  # padded on the left
    assert answers == batched != plain
    for prompt, answer in zip(prompts, answers, strict=True):
        given = reader.inputs(prompt)
        out = reader.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert answer == reader.tokenizer.decode(out, skip_special_tokens=True)
    (whole,) = pipe(prompts[0], max_new_tokens=8, do_sample=False, context_length=10)
    assert whole["generated_text"].startswith(prompts[0])
    assert reader.cache_report().ledger.bytes_of("context") < reader.cache_report().ledger.bytes_of("query")


def test_pictures_are_answered_as_by_chat():
    model = SubTokenModel.from_pretrained(ROOT / "checkpoints" / "adapters" / "tiny_fastv25_s16k4")
    pipe = pipeline("image-text-to-text", model=model.backbone.model, processor=model.processor)
    pipe.model = model
    picture = Image.open(ROOT / "data" / "samples" / "a.png")
    for question in ("is there a 7 ?", "what is at C4 ?"):
        talk = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]
        (found,) = pipe(text=talk, **ASKED)
        assert model.cache_report().realised_fraction == 0.25 * 0.625
        assert found["generated_text"].strip() == model.chat(question, [picture], max_new_tokens=8)

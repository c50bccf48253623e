"""Every way of generating with a language model, on SmolLM2 uncompressed: the tokens are those of transformers.

How ``SubTokenModel`` and what stands on it are called; settings of ``generate`` are tried on embedded models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from subtoken_train import SubTokenModel
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import reading_packed
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.fixed_step import FixedStep
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.inference.text_prompts import encode_messages, text_batch
from subtoken_train.types import Batch
from tests.support.places import real_folder
from tests.support.sampling import quick

NEW = 8
QUESTIONS = ["What is the capital of France?", "Name three colours of the rainbow."]
SYSTEM = {"role": "system", "content": "Answer in one word."}
CONTEXT = "The bee and the spider met in the garden. The bee was late.\n"
ABOUT = ["Who was late?", "Where did they meet?"]
RAW = "The capital of France is"
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


class Both:
    """SmolLM2 behind ``SubTokenModel``, and what transformers says by itself, greedily; each answer is made once."""

    def __init__(self, ours: SubTokenModel) -> None:
        self.ours, self.bare, self.tokenizer = ours, ours.backbone.model, ours.tokenizer
        self.whole = cache(lambda text: self.bare.generate(**self.encoded(text), **GREEDY)[0])

    def encoded(self, *texts: str, side: str = "left") -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(list(texts), return_tensors="pt", padding=True, padding_side=side))

    def rendered(self, prompt: Any) -> str:
        return self.tokenizer.apply_chat_template(read_messages(prompt)[0], tokenize=False, add_generation_prompt=True)

    def answer(self, prompt: Any) -> list[int]:
        text = self.rendered(prompt)
        return self.whole(text)[len(self.tokenizer(text)["input_ids"]) :].tolist()

    def said(self, prompt: Any) -> str:
        return self.tokenizer.decode(self.answer(prompt), skip_special_tokens=True).strip()

    def batch(self, prompts: list[Any]) -> Batch:
        family = self.ours.backbone.family
        return text_batch(family, [encode_messages(family, read_messages(prompt)[0]) for prompt in prompts])


@pytest.fixture(scope="module")
def both(smollm2):
    return Both(smollm2)


def padded_on_the_right(both):
    given = both.encoded(*map(both.rendered, QUESTIONS), side="right")
    rows = both.ours.generate(**given, **GREEDY)[:, given["input_ids"].shape[1] :].tolist()
    end = both.tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows], list(map(both.answer, QUESTIONS))


def a_further_turn(both):
    """A first answer and a further turn on its cache, by each."""
    found, given = [], both.encoded(both.rendered(QUESTIONS[1]))
    more = both.tokenizer("\n<|im_start|>user\nAnd two?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    for generate, held in ((both.ours.generate, {}), (both.bare.generate, {CACHE: DynamicCache()})):
        first = generate(**given, **held, **{**GREEDY, "max_new_tokens": 4})
        kept, whole = held.get(CACHE) or both.ours.last.cache, torch.cat([first, more["input_ids"]], 1)
        out = generate(input_ids=whole, attention_mask=torch.ones_like(whole), **{CACHE: kept}, **GREEDY)
        found.append(out[0, whole.shape[1] :].tolist())
    return found


def chats(both):
    talk = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
    said = [both.ours.chat(each, **GREEDY) for each in (QUESTIONS[0], talk)]
    assert "Paris" in said[0]
    return said, [both.said(QUESTIONS[0]), both.said(talk)]


def questions_behind_a_system_prompt(both):
    said = both.ours.ask(CONTEXT, ABOUT, system=SYSTEM["content"], max_new_tokens=NEW)
    return said, [both.said([SYSTEM, {"role": "user", "content": CONTEXT + each}]) for each in ABOUT]


def steps_of_one_shape(both):
    backbone, packed, wanted = both.ours.backbone, PackedCache(30), both.answer(QUESTIONS[0])
    with torch.no_grad(), reading_packed(backbone.family.decoder.config):
        first = prefill(backbone, both.batch([QUESTIONS[0]]), packed, Compression())
        said = [first.logits_BV.argmax(-1, keepdim=True)]
        with FixedStep(backbone, packed, NEW) as step:
            while len(said) < len(wanted):
                said.append(step(said[-1]).argmax(-1, keepdim=True))
    return torch.cat(said, 1)[0].tolist(), wanted


def in_lm_evaluation_harness(both):
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    from subtoken_train.plugins.lm_eval_model import SubTokenLM

    asked = {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, asked), 0) for text in (RAW, CONTEXT + "The spider")]
    ours = SubTokenLM(backbone=str(real_folder("smollm2")), dtype="float32", device="cpu", batch_size=2)
    theirs = harness.HFLM(pretrained=both.bare, tokenizer=both.tokenizer, batch_size=2)
    return [model.generate_until(requests, disable_tqdm=True) for model in (ours, theirs)]


QUICK = (padded_on_the_right, a_further_turn, chats, steps_of_one_shape)
WAYS: dict[str, Callable[..., Any]] = {
    way.__name__: way for way in (*QUICK, questions_behind_a_system_prompt, in_lm_evaluation_harness)
}


@pytest.mark.parametrize("name", quick(WAYS, [way.__name__ for way in QUICK]))
def test_each_way_says_what_transformers_says(both, name):
    ours, theirs = WAYS[name](both)
    assert ours == theirs
    assert ours

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
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.fixed_step import FixedStep
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.inference.text_prompts import encode_messages, text_batch
from subtoken_train.types import Batch, Turn
from tests.support.places import real_folder
from tests.support.sampling import quick

NEW = 8
QUESTIONS = ["What is the capital of France?", "Name three colours of the rainbow."]
SYSTEM = {"role": "system", "content": "Answer in one word."}
TALK = [Turn("What is the capital of France?", "Paris."), Turn("And of Peru?")]
CONTEXT = "The bee and the spider met in the garden. The bee was late.\n"
ABOUT = ["Who was late?", "Where did they meet?"]
RAW = "The capital of France is"
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


class Both:
    """SmolLM2 behind ``SubTokenModel``, and what transformers says by itself, greedily; each answer is made once."""

    def __init__(self, ours: SubTokenModel) -> None:
        self.ours, self.bare, self.tokenizer = ours, ours.backbone.model, ours.tokenizer
        self.whole = cache(self._whole)

    def encoded(self, *prompts: str, side: str = "left", raw: bool = False) -> dict[str, torch.Tensor]:
        texts = list(prompts) if raw else [self.rendered(prompt) for prompt in prompts]
        return dict(self.tokenizer(texts, return_tensors="pt", padding=True, padding_side=side))

    def rendered(self, prompt: Any) -> str:
        return self.tokenizer.apply_chat_template(read_messages(prompt)[0], tokenize=False, add_generation_prompt=True)

    def _whole(self, text: str) -> torch.Tensor:
        return self.bare.generate(**self.encoded(text, raw=True), **GREEDY)[0]

    def answer(self, prompt: Any, raw: bool = False) -> list[int]:
        text = prompt if raw else self.rendered(prompt)
        return self.whole(text)[len(self.tokenizer(text)["input_ids"]) :].tolist()

    def said(self, prompt: Any, raw: bool = False) -> str:
        return self.tokenizer.decode(self.answer(prompt, raw), skip_special_tokens=True).strip()

    def new_tokens(self, out: torch.Tensor, length: int) -> list[list[int]]:
        end, rows = self.tokenizer.eos_token_id, out[:, length:].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    def batch(self, prompts: list[Any]) -> Batch:
        family = self.ours.backbone.family
        return text_batch(family, [encode_messages(family, read_messages(prompt)[0]) for prompt in prompts])


@pytest.fixture(scope="module")
def both(smollm2):
    return Both(smollm2)


def padded_on_the_right(both):
    given = both.encoded(*QUESTIONS, side="right")
    out = both.ours.generate(**given, **GREEDY)
    return both.new_tokens(out, given["input_ids"].shape[1]), [both.answer(each) for each in QUESTIONS]


def a_further_turn(both):
    """A first answer and a further turn on its cache, by each."""
    text, found = both.rendered(QUESTIONS[1]), []
    more = both.tokenizer("\n<|im_start|>user\nAnd two?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    for number, generate in enumerate((both.ours.generate, both.bare.generate)):
        held = {} if number == 0 else {CACHE: DynamicCache()}
        first = generate(**both.encoded(text, raw=True), **held, **{**GREEDY, "max_new_tokens": 4})
        kept = both.ours.last.cache if number == 0 else held[CACHE]
        whole = torch.cat([first, more["input_ids"]], 1)
        out = generate(input_ids=whole, attention_mask=torch.ones_like(whole), **{CACHE: kept}, **GREEDY)
        found.append(out[0, whole.shape[1] :].tolist())
    return found


def chat(both):
    said = both.ours.chat(QUESTIONS[0], **GREEDY)
    assert "Paris" in said
    return said, both.said(QUESTIONS[0])


def chat_of_messages(both):
    talk = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
    return both.ours.chat(talk, **GREEDY), both.said(talk)


def questions_behind_a_system_prompt(both):
    said = both.ours.ask(CONTEXT, ABOUT, system=SYSTEM["content"], max_new_tokens=NEW)
    return said, [both.said([SYSTEM, {"role": "user", "content": CONTEXT + each}]) for each in ABOUT]


def a_batch_of_an_evaluation(both):
    with reading_packed(both.ours.backbone.family.decoder.config):
        found = generate_batch(both.ours.backbone, both.batch([*QUESTIONS, TALK]), max_new_tokens=NEW)
    said = [both.answer(each) for each in (*QUESTIONS, TALK)]
    return [each.token_ids for each in found], [[i for i in ids if i != both.tokenizer.eos_token_id] for ids in said]


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


WAYS: dict[str, Callable[..., Any]] = {
    way.__name__: way
    for way in (
        padded_on_the_right,
        a_further_turn,
        chat,
        chat_of_messages,
        questions_behind_a_system_prompt,
        a_batch_of_an_evaluation,
        steps_of_one_shape,
        in_lm_evaluation_harness,
    )
}


@pytest.mark.parametrize(
    "name", quick(WAYS, ["padded_on_the_right", "a_further_turn", "chat", "chat_of_messages", "steps_of_one_shape"])
)
def test_each_way_says_what_transformers_says(both, name):
    ours, theirs = WAYS[name](both)
    assert ours == theirs
    assert ours

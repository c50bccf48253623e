"""The positions that a model was made for, in every way that configurations say it, and answers past them."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen2VLConfig

from subtoken_train.cache.cache import PackedCache
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.load import published_config
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import decode, prefill
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

THETA = {"rope_theta": 10000.0}
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
ORIGINAL = {"original_max_position_embeddings": 32}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "short_factor": SHORT, "long_factor": LONG, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}
"""Each doubles the 32 positions of a tiny model."""
BOUND = 64


def scaled(kind: str, family: str = "llama"):
    """A tiny model of 64 positions, 32 of which are its own."""
    return text_family(family, max_position_embeddings=32, rope_parameters={**SCALINGS[kind], **THETA})


def plain(most: int, **settings: object) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=most, **settings)


def longer(kind: str, factor: float | None, original: int | None = None, **more: object) -> dict[str, object]:
    given = {"factor": factor, "original_max_position_embeddings": original}
    return {"type": kind, **{name: value for name, value in given.items() if value is not None}, **more}


SECTIONS = {"mrope_section": [16, 24, 24]}
FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
BOUNDS = {
    "plain": (LlamaConfig(max_position_embeddings=2048), 2048),
    "Qwen's yarn": (Qwen2Config(max_position_embeddings=32768, rope_scaling=longer("yarn", 4.0, 32768)), 131072),
    "Llama 3.1": (published_config("meta-llama/Llama-3.1-8B"), 131072),
    "longrope without a factor": (
        LlamaConfig(max_position_embeddings=131072, rope_scaling=longer("longrope", None, 4096, **FACTORS)),
        131072,
    ),
    "mrope and yarn": (
        Qwen2VLConfig(
            text_config={"max_position_embeddings": 32768, "rope_scaling": longer("yarn", 4, 32768, **SECTIONS)}
        ),
        131072,
    ),
    "kinds of layers": (plain(100, rope_parameters=BY_KIND), 800),
    "su beside the parameters": (
        plain(4096, original_max_position_embeddings=4096, rope_scaling=longer("su", 32.0)),
        131072,
    ),
    "not said": (SimpleNamespace(rope_parameters=None), None),
}


@pytest.mark.parametrize(("config", "expected"), BOUNDS.values(), ids=BOUNDS)
def test_the_bound_is_what_the_configuration_says(config, expected):
    assert position_bound(config) == expected


def plain_tokens(model, ids, new):
    return model.generate(input_ids=ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, ids.shape[1] :
    ]


def asked(tokens: int) -> torch.Tensor:
    return torch.randint(10, 60, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def quietly(call):
    """A call's result, and our warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = call()
    return result, [str(each.message) for each in said if issubclass(each.category, SubTokenWarning)]


@sampled("chunk", [None, 16], every=4)
@sampled("kind", SCALINGS, every=3)
def test_long_prompts_are_answered_as_transformers_answers_them(kind, chunk):
    """Below the original length, across it, past it, past the bound; in any order on the same object."""
    name, lengths = "qwen2" if kind == "yarn" else "llama", [70, 40, 27, 60]
    family = scaled(kind, name)
    fresh = {length: plain_tokens(scaled(kind, name).model, asked(length), 8) for length in lengths}
    model = SubTokenModel(family.model, family.tokenizer, prefill_chunk=chunk)
    for length in lengths:
        out, said = quietly(partial(plain_tokens, model, asked(length), 8))
        assert torch.equal(out, fresh[length]), length
        assert len(said) == (length + 7 > BOUND), said
        assert all(f"longer than the {BOUND} positions" in each for each in said)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [30, 50])
def test_scores_are_those_of_tokens_that_are_said_one_by_one(kind, length):
    """What ``generate`` says has its own logits' probabilities."""
    backbone, prompts = compress(scaled(kind)).eval(), text_batch([(length - 6, 5, 0)])
    cache, given, total = PackedCache(3), [7, 8, 9, 10, 11, 12], 0.0
    logits = prefill(backbone, prompts, cache, Compression()).logits_BV
    for token in given:
        total += float(logits.log_softmax(-1)[0, token])
        logits = decode(backbone, torch.tensor([[token]]), cache)
    (scored,) = score_batch(backbone, prompts, [[given]])
    assert scored.logprobs == pytest.approx([total], abs=1e-4)


@sampled("kind", SCALINGS, every=3)
def test_every_question_is_answered_as_if_it_were_the_only_one(kind):
    """Past the original length, in chunks or not; a context and a question as transformers runs them one by one."""
    text = "the quick brown fox jumps over the lazy dog " * 6
    questions = ["a bee sees the sun and a tree", "the bee", "the tree is tall"]

    def ask(questions, chunk=None):
        family = scaled(kind)
        model = SubTokenModel(family.model, family.tokenizer, prefill_chunk=chunk)
        answers, said = quietly(lambda: model.ask(text, questions, max_new_tokens=6))
        assert int(model.cache.packed.next_position) > 32
        return answers, said

    alone = [ask([question])[0][0] for question in questions]
    answers, _ = ask(questions)
    assert answers == ask(questions, chunk=8)[0] == alone
    family = scaled(kind)
    model, tokenizer = family.model, family.tokenizer
    head = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        past = model(head, use_cache=True).past_key_values
        ids = tokenizer("\n" + questions[0], add_special_tokens=False)["input_ids"]
        ids = ids[len(tokenizer("\n", add_special_tokens=False)["input_ids"]) :]
        said = []
        step = torch.tensor([ids])
        for _ in range(6):
            said.append(int(model(step, **{CACHE: past}).logits[0, -1].argmax()))
            step = torch.tensor([[said[-1]]])
            if said[-1] == tokenizer.eos_token_id:
                break
    assert tokenizer.decode(said, skip_special_tokens=True).strip() == alone[0]


def test_what_passes_the_bound_is_said_once():
    """By a prompt, by a question, by the answer; never by what stays below."""
    family = text_family(layers=2, max_position_embeddings=48)
    model = SubTokenModel(family.model, family.tokenizer)
    text = "the quick brown fox jumps over the lazy dog " * 4
    _, said = quietly(lambda: model.ask(text, ["the bee"], max_new_tokens=2))
    assert (said, int(model.cache.packed.next_position) < 46) == ([], True)
    _, said = quietly(lambda: model.ask(None, ["the bee " * 20], max_new_tokens=2))
    assert len(said) == 1
    _, said = quietly(lambda: model.ask(text * 4, ["the bee", "the sun"], max_new_tokens=4))
    assert len(said) == 1
    backbone = compress(family).eval()
    outcomes, said = quietly(lambda: generate_batch(backbone, text_batch([(30, 5, 0), (40, 12, 0)]), max_new_tokens=4))
    assert (len(outcomes), len(said)) == (2, 1)
    _, said = quietly(lambda: score_batch(backbone, text_batch([(30, 5, 0)]), [[[5] * 30, [6] * 20]]))
    assert said
    with warnings.catch_warnings(record=True) as shown:  # as Python shows them: once
        warnings.simplefilter("default", SubTokenWarning)
        for length in (50, 60, 70):
            generate_batch(backbone, text_batch([(length, 5, 0)]), max_new_tokens=2)
    assert len([each for each in shown if each.category is SubTokenWarning]) == 1

"""Prompts whose middle is cut out, and chat templates around prompts of language models."""

from dataclasses import replace

import pytest

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.inference.text_prompts import in_chat, without_middle
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.text_families import text_family

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}>"


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


def test_a_prompt_that_fits_stays(family):
    prompt = words(8)
    count = length(family, prompt)
    assert without_middle(family, prompt, 5, count, 4) == (prompt, 5)
    assert without_middle(family, prompt, 5, None, 4) == (prompt, 5)


def test_both_ends_stay(family):
    context, asked = words(60), " Who ran?"
    tokenizer = family.tokenizer
    ids = tokenizer(context + asked)["input_ids"]
    text, kept = without_middle(family, context + asked, len(context), 21, 4)
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:10], ids[-10:]))
    assert text == first + last
    assert (text[kept:], text[:kept].startswith(first)) == (asked, True)


def test_a_question_longer_than_its_half_is_all_that_asks(family):
    context, asked = words(10), " " + words(60)
    text, kept = without_middle(family, context + asked, len(context), 20, 4)
    assert text[kept:] == family.tokenizer.decode(family.tokenizer(context + asked)["input_ids"][-10:])


@sampled(("given", "new_tokens"), [(None, 4), (1000, 4), (None, 40)], every=3)
def test_the_answer_has_room(family, given, new_tokens):
    text, _ = without_middle(family, words(300), 100, given, new_tokens)
    assert 64 - new_tokens - 4 <= length(family, text) <= 64 - new_tokens


def test_there_must_be_room(family):
    with pytest.raises(ValueError, match=r"room for 0 tokens of a prompt beside 64 of its answer; raise max_length"):
        without_middle(family, words(300), 100, None, 64)


def test_chat_templates(family):
    with pytest.raises(ValueError, match=r"has no chat template; ask without one \(chat: false\)"):
        in_chat(family, "x", 1)
    family.tokenizer.chat_template = TEMPLATE
    text, kept = in_chat(family, "  some text Who? ", 11)
    assert text == f"{family.tokenizer.bos_token}[some text Who?]>"
    assert text[:kept].endswith("[some text")
    assert in_chat(family, "Who?", None) == (f"{family.tokenizer.bos_token}[Who?]>", None)
    long, kept = without_middle(family, words(300), 1200, None, 8, chat=True)
    assert length(family, in_chat(family, long, kept)[0].removeprefix(family.tokenizer.bos_token)) <= 64 - 8


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

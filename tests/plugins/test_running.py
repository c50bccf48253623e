import random

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.plugins import harness
from subtoken_train.plugins.harness import GreedySettings, ModelArguments, Runner
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.text_families import text_family

FAMILY = text_family()
COMPRESSION = Compression(build_eviction("snapkv", window=2), keep=0.3)


def runner(batch_size=1, compression=None, protocol="query_aware"):
    def collate(prompts):
        return text_batch(FAMILY, [EncodedText(ids, len(ids) // 2) for ids in prompts])

    arguments = ModelArguments(backbone="x", batch_size=str(batch_size), protocol=protocol)
    return Runner(SubTokenModel.around(compress(FAMILY), compression), arguments, collate, len)


def requests(seed=0):
    chance = random.Random(seed)

    def ids(count):
        return tuple(chance.randrange(10, 60) for _ in range(count))

    prompts = [ids(length) for length in (9, 20, 5, 14)]
    asked = [(prompt, ids(chance.randint(1, 4))) for prompt in prompts * 3]
    chance.shuffle(asked)
    return asked


def dense(prompt, continuation):
    with torch.no_grad():
        logits = FAMILY.model(torch.tensor([[*prompt, *continuation]])).logits[0].log_softmax(-1)
    ends = range(len(prompt) - 1, len(prompt) + len(continuation) - 1)
    return (
        sum(logits[end, token].item() for end, token in zip(ends, continuation, strict=True)),
        all(logits[end].argmax() == token for end, token in zip(ends, continuation, strict=True)),
    )


def test_scores_come_in_order_are_those_of_the_whole_text_and_share_passes(monkeypatch):
    passes = []
    original = harness.score_batch
    monkeypatch.setattr(
        harness, "score_batch", lambda *args, **named: passes.append(len(args[2])) or original(*args, **named)
    )
    asked, done, subject = requests(), {}, runner(batch_size=3)
    got = subject.score(asked, done.__setitem__)
    for (value, greedy), request in zip(got, asked, strict=True):
        wanted = dense(*request)
        assert (value, greedy) == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    assert done == dict(enumerate(got))
    assert passes == [3, 1]  # twelve requests, four prompts
    assert subject.counted.prompts == 4
    assert subject.counted.facts["kv_fraction_measured"] >= 1


def test_many_continuations_of_a_prompt_are_divided(monkeypatch):
    monkeypatch.setattr(harness, "SHARED", 2)
    asked, subject = requests(), runner(batch_size=8)
    whole = runner().score(asked, lambda *_: None)
    assert [value for value, _ in subject.score(asked, lambda *_: None)] == pytest.approx(
        [v for v, _ in whole], abs=1e-4
    )
    assert subject.counted.prompts == 8


@sampled("protocol", ["query_aware", "context_first"], every=2)
def test_the_batch_size_changes_nothing(protocol):
    asked = requests(1)
    one, eight = (runner(size, COMPRESSION, protocol) for size in (1, 8))
    for (first, greedy), (other, same) in zip(
        one.score(asked, lambda *_: None), eight.score(asked, lambda *_: None), strict=True
    ):
        assert (other, same) == (pytest.approx(first, abs=1e-4), greedy)
    questions = [(prompt, GreedySettings(3 + len(after) % 2, ())) for prompt, after in asked]
    assert one.generate(questions, lambda *_: None) == eight.generate(questions, lambda *_: None)
    for name in ("entries_before", "entries_after", "dense_kv_bytes"):
        assert one.counted.facts[name] == eight.counted.facts[name]
    assert one.counted.facts["entries_after"] < one.counted.facts["entries_before"]


def test_answers_come_in_order():
    asked = [(prompt, GreedySettings(1 + i % 3, ())) for i, (prompt, _) in enumerate(requests(2))]
    done = {}
    got = runner(batch_size=4).generate(asked, done.__setitem__)
    assert done == dict(enumerate(got))
    for (prompt, settings), text in zip(asked, got, strict=True):
        out = FAMILY.model.generate(torch.tensor([prompt]), max_new_tokens=settings.max_new_tokens, do_sample=False)
        assert text == FAMILY.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)


def test_a_method_that_reads_the_question_cannot_come_before_it():
    reducer = {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 4}
    with pytest.raises(ValueError, match="context_first compresses before the question is seen"):
        Runner(
            SubTokenModel.around(compress(FAMILY, **reducer)),
            ModelArguments(backbone="x", protocol="context_first"),
            lambda prompts: None,
            len,
        )

"""Made data: key-value recall (facts are in the context, counts are exact), its English, and scenes as files."""

import json
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.datasets import english, scenes
from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS, RecallRecords, RecallTask, recall_accuracy
from tests.support.refusals import refuses
from tests.support.sampling import sampled


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@sampled(("length", "facts", "questions"), [(512, 24, 8), (64, 6, 6), (64, 1, 1), (512, 48, 2)], every=3)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_context_is_whole_and_states_what_is_asked(tokenizer, length, facts, questions, split):
    records = RecallRecords(RecallTask(tokenizer, length, facts, questions), split, 8)
    for i in range(8):
        sample = records[i]
        text, ids = sample.text, list(sample.text.input_ids)
        assert text.context_length == length
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert tokenizer.bos_token_id not in ids[1:]
        stated = dict(re.findall(r"Code (\w+) (\w+ \w+)\.", tokenizer.decode(ids[:length])))
        assert len(stated) == facts
        assert len({code.split()[0] for code in stated.values()}) == facts  # adjectives are not repeated
        assert len(sample.codes) == questions
        assert sample.codes.items() <= stated.items()
        assert tokenizer.decode(ids[length : text.prompt_length]) == f"\nCodes of {', '.join(sample.codes)}?"
        answer = tokenizer.decode(ids[text.prompt_length : -1])
        assert answer == "".join(f" {name} {code}." for name, code in sample.codes.items())
        assert recall_accuracy(answer, sample.codes) == 1.0


def test_samples_are_a_function_of_seed_split_and_place(tokenizer):
    task = RecallTask(tokenizer, 64, 4, 2)
    first, again = (RecallRecords(task, "dev", 5)[3] for _ in range(2))
    assert first == again
    others = RecallRecords(task, "dev", 5)[2], RecallRecords(task, "dev", 5, 1)[3], RecallRecords(task, "test", 5)[3]
    assert all(other.codes != first.codes for other in others)
    assert first.text.record_id == "dev-000003"


def test_words_are_single_tokens_and_different(tokenizer):
    words = [*NAMES, *ADJECTIVES, *NOUNS]
    assert len(words) == len(set(words))
    assert {len(ids) for ids in tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]} == {1}


@pytest.mark.slow
def test_a_tokenizer_without_a_bos(tokenizer):
    plain = build_tokenizer()
    plain.bos_token = None
    text = RecallTask(plain, 64, 4, 2).sample(np.random.default_rng(0), "dev").text
    assert text.context_length == 64
    assert tokenizer.bos_token_id not in text.input_ids


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" baran icy owl. calek wild newt.", 1.0),
        (" calek wild newt. baran icy owl.", 1.0),
        (" baran icy owl. calek icy newt.", 0.5),
        (" baran icy newt. baran icy owl. calek wild newt.", 0.5),
        (" baran icy owl", 0.0),
        ("", 0.0),
    ],
)
def test_recall_accuracy(answer, score):
    assert recall_accuracy(answer, {"baran": "icy owl", "calek": "wild newt"}) == score


def test_errors(tokenizer):
    task = RecallTask(tokenizer)
    rng = np.random.default_rng(0)
    for words, call in {
        "num_questions 4 and num_facts 3: 1 <= questions": lambda: RecallTask(tokenizer, 512, 3, 4),
        "num_questions 1 and num_facts 49: 1 <= questions": lambda: RecallTask(tokenizer, 512, 49, 1),
        "11 facts do not fit into context_length 64": lambda: RecallTask(tokenizer, 64, 11, 1).sample(rng, "train"),
        r"unknown split 'val'\. Allowed: dev, test, train": lambda: RecallRecords(task, "val", 1),
        "unknown split 'val'": lambda: english.documents("val"),
        "0 recall samples; at least 1 is needed": lambda: RecallRecords(task, "dev", 0),
    }.items():
        refuses(words, call)
    with pytest.raises(IndexError):
        RecallRecords(task, "dev", 3)[3]


def test_splits_share_no_paragraph_and_are_prose():
    splits = {split: english.documents(split) for split in english.SPLITS}
    paragraphs = {split: [p for text in texts for p in text.split("\n")] for split, texts in splits.items()}
    everything = [p for some in paragraphs.values() for p in some]
    assert len(everything) == len(set(everything))
    assert all(p.endswith(".") and len(p.split()) >= 6 for p in everything)
    assert {split: sum(map(len, texts)) // 1000 for split, texts in splits.items()} == EXPECTED_THOUSANDS


EXPECTED_THOUSANDS = {"train": 202, "dev": 14, "test": 17}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_are_a_function_of_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        scenes.write_scenes(tmp_path / name, train=4, dev=2, test=2, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "c").keys()
    alike = contents(tmp_path / "a").items() & contents(tmp_path / "c").items()
    assert [path.name for path, _ in alike] == [".subtoken-data.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.slow
def test_evaluation_splits_are_balanced_and_training_is_mixed(tmp_path):
    scenes.write_scene_split(tmp_path, "dev", 140, seed=0)
    kinds = Counter(row["kind"] for row in json.loads((tmp_path / "dev.json").read_text()))
    assert kinds == dict.fromkeys(scenes.DESCRIPTION_KINDS, 7) | dict.fromkeys(scenes.SHORT_KINDS, 18)
    scenes.write_scene_split(tmp_path, "train", 200, seed=0)
    kinds = Counter(row["kind"] for row in json.loads((tmp_path / "train.json").read_text()))
    assert set(kinds) == {*scenes.SHORT_KINDS, *scenes.DESCRIPTION_KINDS}
    assert 40 <= sum(kinds[kind] for kind in scenes.DESCRIPTION_KINDS) <= 80  # 60 expected


def test_splits_share_no_handwritten_digit():
    originals = {split: {x.tobytes() for shapes in scenes._glyphs()[split] for x in shapes} for split in scenes.SPLITS}
    for first, second in combinations(scenes.SPLITS, 2):
        assert not originals[first] & originals[second]

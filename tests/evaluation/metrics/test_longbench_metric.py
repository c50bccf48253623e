"""LongBench's scorers: what its own ``metrics.py`` gave (rouge 1.0.1, fuzzywuzzy 0.18, jieba 0.42.1)."""

from itertools import combinations

import pytest

from subtoken_train.evaluation.tasks import longbench
from subtoken_train.evaluation.tasks.longbench import (
    SETS,
    LongBenchScores,
    check_jieba,
    class_score,
    longbench_score,
    rouge_l,
)

CLASSES = ["human", "other", "Number", "number of", "Number of dogs"]


def score(name, text, *answers, classes=()):
    return longbench_score(text, {"set": name, "answers": list(answers), "classes": list(classes)})


@pytest.mark.parametrize(
    ("name", "text", "answers", "expected"),
    [
        ("qasper", "The cat, a dog", ["cat dog bird", "no"], 0.8),
        ("qasper", "the", ["a"], 0.0),
        ("triviaqa", "\n\nParis\nPassage: more", ["paris!"], 1.0),
        ("triviaqa", "Paris is it", ["it", "Paris"], 0.5),
        ("gov_report", "the cat sat. it ran", ["a cat ran. it sat."], 0.7999999950000002),
        ("gov_report", "the the the cat", ["the cat. the dog"], 0.7999999952000001),
        ("qmsum", "...", ["a"], 0.0),
        ("samsum", "Amy met Bo\nDialogue: Cy met Di", ["Bo met Amy"], 0.3333333283333334),
        ("passage_count", "There are 12, not 7 or 12", ["12"], 2 / 3),
        ("passage_count", "none", ["12"], 0.0),
        ("passage_retrieval_en", "Paragraph 3", ["Paragraph 3"], 1.0),
        ("passage_retrieval_en", "13 or 3", ["Paragraph 3"], 0.5),
        ("passage_retrieval_zh", "\u6bb5\u843d5", ["\u6bb5\u843d5"], 1.0),
        ("lcc", "\n# note\n```\n    return x\nx = 1", ["    return y"], 0.92),
        ("lcc", "return x", ["    return x"], 0.8),  # indentation counts
        ("lcc", "# all", ["x"], 0.0),
        ("repobench-p", "x = f(1) // 2\n", [""], 1.0),  # nothing is left, and nothing is wanted
    ],
)
def test_what_the_original_gave(name, text, answers, expected):
    assert score(name, text, *answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("it is other", "other", 1.0),
        ("human or other", "other", 0.5),
        ("Number of dogs", "Number of dogs", 1.0),
        ("Number, number of, Number of dogs", "Number of dogs", 0.5),  # the class after a dropped one is passed over
        ("neither", "human", 0.0),
        ("human\nother", "human", 1.0),
    ],
)
def test_classes(text, answer, expected):
    assert score("trec", text, answer, classes=CLASSES) == expected


def test_a_class_that_follows_a_dropped_one_stays():
    assert class_score("ab abc abcd", "abcd", ["ab", "abc", "abcd"]) == 0.5  # not 1: "abc" was never looked at
    assert class_score("abc ab x abcd", "abcd", ["ab", "x", "abc", "abcd"]) == 1 / 2


def longest_common(first, second):
    """Lengths alone, by trying all subsequences."""
    for size in range(len(first), -1, -1):
        for places in combinations(range(len(first)), size):
            rest = iter(second)
            if all(any(word == other for other in rest) for word in (first[i] for i in places)):
                return size
    raise AssertionError


@pytest.mark.parametrize(
    ("said", "wanted"), [("a b c d", "b d a c"), ("a b", "c d"), ("d c b a", "a b c d"), ("a c e b d", "b c d e a")]
)
def test_rouge_of_one_sentence_of_different_words(said, wanted):
    common = longest_common(said.split(), wanted.split())
    precision, recall = common / len(said.split()), common / len(wanted.split())
    expected = 2 * precision * recall / (precision + recall) if common else 0
    assert rouge_l(said, wanted) == pytest.approx(expected, abs=1e-7)


def test_long_sentences_are_scored():
    """The original's recursion ends at about a thousand words, and it gives 0."""
    words = " ".join(map(str, range(700)))
    assert rouge_l(words, words) == pytest.approx(1, abs=1e-7)


def test_the_mean_is_over_sets():
    metric = LongBenchScores()
    rows = [("qasper", "cat", ["cat"]), ("qasper", "dog", ["cat"]), ("qasper", "cat", ["cat"]), ("lcc", "x", ["x"])]
    for name, text, answers in rows:
        metric.update([text], [{"set": name, "answers": answers}])
    found = {name: value.item() for name, value in metric.compute().items()}
    assert found == pytest.approx({"score": (2 / 3 + 1) / 2, "qasper": 2 / 3, "lcc": 1.0})
    assert len(SETS) == len(set(SETS)) == 21


def test_without_jieba(monkeypatch):
    monkeypatch.setattr(longbench, "find_spec", lambda name: None)
    longbench._chinese.cache_clear()
    with pytest.raises(ValueError, match=r"LongBench's dureader, vcsum are cut into words by jieba, .*\[eval\]'"):
        check_jieba(["vcsum", "qasper", "dureader"])
    with pytest.raises(ValueError, match="by jieba, which is missing"):
        score("multifieldqa_zh", "x", "x")
    check_jieba(["qasper", "lsht", "passage_retrieval_zh"])


def test_chinese_words():
    pytest.importorskip("jieba")
    today, weather, good = "\u4eca\u5929", "\u5929\u6c14", "\u5f88\u597d"
    assert score("multifieldqa_zh", today + weather + "\u3002", today + weather) == 1
    assert score("dureader", today + weather + good, today + good) == pytest.approx(0.6666666616666668, abs=1e-9)

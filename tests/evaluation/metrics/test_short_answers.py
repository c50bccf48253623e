"""Short answers against texts, in every reading; the VQA challenges' normaliser, its oddities one by one."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics import short_answers as short
from tests.support.benchmark_folders import mean_of, reference_cases

words = st.text(alphabet="ab ", max_size=7)


@cache
def by_definition(first, second):
    if not first or not second:
        return len(first) + len(second)
    kept = by_definition(first[1:], second[1:]) + (first[0] != second[0])
    return min(kept, 1 + by_definition(first[1:], second), 1 + by_definition(first, second[1:]))


@given(words, words)
def test_levenshtein_is_the_definition(first, second):
    assert short.levenshtein(first, second) == by_definition(first, second) == short.levenshtein(second, first)


@pytest.mark.parametrize(
    ("prediction", "answers", "lmms"),
    [
        ("0.28", ["0.28"], 1), ("University of Californa", ["university of california"], 23 / 24), ("cat", ["dog"], 0),
        ("ab", ["ax"], 0.5), ("abx", ["acy", "abc"], 2 / 3), ("new  york", ["new york"], 1), (" 7b ", ["15b"], 0.5),
        ("", [""], 1), ("  ", [""], 1), ("", ["x"], 0), ("ß", ["ss"], 0), ("ßa", ["sa"], 2 / 3),
    ],
)  # fmt: skip
def test_known_answers(prediction, answers, lmms):
    assert short.ANLS.score(prediction, {"answers": answers}) == pytest.approx(lmms)


def test_reference(shared):
    for case in reference_cases(shared, "anls"):
        found = short.ANLS.score(case["pred"], {"answers": case["gt_answers"]})
        assert found == pytest.approx(case["lmms_eval_anls"], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [("Surfing", "surfing", 1), ("yes..", "yes", 1), ('"woman"', "woman", 0), (" yes", "yes", 0), ("", "no", 0)],
)
def test_what_counts_as_equal(text, answer, right):
    assert short.ExactMatch.figures(text, {"answer": answer}) == {"accuracy": right}


def test_reference_items(shared):
    cases = reference_cases(shared, "gqa")
    metric = short.ExactMatch()
    for case in cases:
        metric.update([case["pred"]], [{"answer": case["target"]}])
        assert short.ExactMatch.score(case["pred"], {"answer": case["target"]}) == case["llava_gqa_correct"]
    assert metric.compute()["accuracy"] == mean_of([case["llava_gqa_correct"] for case in cases])


@pytest.mark.parametrize(
    ("prediction", "target", "right"),
    [
        ("14", "14", True), ("105", "100", True), ("95", "100", True), ("105.1", "100", False),
        ("-100", "100", False), ("5%", "0.05", True), ("5", "5%", False), ("1,200", "1200", False),
        ("1,200", "1,200", True), ("0", "0", True), ("0.0", "0", False), ("0.0001", "0", False), ("No", "no", True),
        ("no.", "no", False), ("nan", "100", False), ("", "", True), ("%", "%", True),
    ],
)  # fmt: skip
def test_known_answers_of_chartqa(prediction, target, right):
    assert short.relaxed_match(prediction, target) is right


def test_kinds_have_their_own_scores():
    metric = short.RelaxedAccuracy()
    metric.update(["1", "2"], [{"answer": "1", "kind": "human"}, {"answer": "1", "kind": "human"}])
    assert metric.compute() == {"relaxed_accuracy": 0.5, "human": 0.5}
    metric.update(["7", "8"], [{"answer": "7", "kind": "augmented"}] * 2)
    assert metric.compute() == {"relaxed_accuracy": 0.5, "human": 0.5, "augmented": 0.5}


def test_reference_of_chartqa(shared):
    for case in reference_cases(shared, "chartqa_relaxed"):
        assert short.relaxed_match(case["pred"], case["target"]) is case["lmms_eval"], case


def test_share_of_answers():
    metric = short.Answered()
    metric.update(["A", " ", "", "no idea"], [{}] * 4)
    assert metric.compute() == {"answered": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Two Dogs.", "2 dogs"), ("None", "0"), ("eleven", "eleven"), ("the one", "1"), ("a an the", ""),
        ("U.S.A.", "usa"), ("5.", "5"), (".5", ".5"), ("8:30 p.m.", "8:30 pm"), ("$1,000", "$1000"),
        ("red,white,blue", "redwhiteblue"), ("dont", "don't"), ("its", "its"), ("it's", "it 's"), ("Im", "im"),
        ("somebody'd", "somebodyd"), ("coca-cola", "coca cola"), ("coca -cola, wi-fi", "coca cola wifi"),
        ("line\nend\ttab", "line end tab"), ("  ", ""),
    ],
)  # fmt: skip
def test_what_an_answer_becomes(text, expected):
    assert short.evalai_answer(text) == expected


def test_reference_texts(shared):
    for case in reference_cases(shared, "vqa_normalizer"):
        text = case["input"]
        assert short.evalai_answer(text) == case["processed"], text
        assert short.without_marks(text) == case["punctuation_only"], text
        assert short.plain_words(text) == case["digit_article_only"], text


@given(st.sampled_from("abc"), st.lists(st.sampled_from("abc"), max_size=12))
def test_equal_to_leaving_out_one_by_one(answer, people):
    terms = [min(1, sum(other == answer for j, other in enumerate(people) if j != i) / 3) for i in range(len(people))]
    assert short.leave_one_out(answer, people) == pytest.approx(sum(terms) / len(terms) if terms else 0, abs=1e-12)


def test_answers_are_normalised():
    answers = ["the nokia", "Nokia.", "NOKIA", "nokia"] + ["two"] * 6
    assert short.SoftAccuracy.score("Nokia", {"answers": answers}) == 1
    assert short.SoftAccuracy.score("2", {"answers": answers}) == 1
    assert short.SoftAccuracy.score("Nokia phone", {"answers": answers}) == 0
    assert short.SoftAccuracy.score("", {"answers": []}) == 0


def test_textvqa_reference(shared):
    cases = reference_cases(shared, "textvqa")
    items = [case for case in cases if case["kind"] == "item"]
    scores = [short.SoftAccuracy.score(case["pred"], {"answers": case["gt_answers"]}) for case in items]
    for case, score in zip(items, scores, strict=True):
        assert short.evalai_answer(case["pred"]) == case["submission_answer"]
        assert score == pytest.approx(case["llava_m4c"], abs=1e-6)
        assert score == pytest.approx(case["lmms_eval"], abs=1e-6)
    start = 0
    for case in cases:
        if case["kind"] == "aggregate":
            assert case["llava_m4c_accuracy"] == mean_of(scores[start : start + case["n"]])
            start += case["n"]
    assert start == len(items) > 0
    metric = short.SoftAccuracy()
    metric.update([case["pred"] for case in items], [{"answers": case["gt_answers"]} for case in items])
    assert metric.compute()["accuracy"] == mean_of(scores)


def test_vizwiz_reference(shared):
    for case in reference_cases(shared, "vizwiz_vqa"):
        assert short.evalai_answer(case["pred"]) == case["submission_answer"]
        score = short.SoftAccuracy.score(case["pred"], {"answers": case["gt_answers"]})
        assert score == pytest.approx(case["lmms_eval"], abs=1e-6)


def test_answers_that_differ_are_normalised():
    """Of ten equal ones neither is: "none" is read as "0", and nobody said that."""
    assert short.VQAv2Accuracy.score("none", {"answers": ["none"] * 10}) == 0
    people = ["2 dogs", "two dogs", "the two dogs", "Two Dogs."] + ["cat"] * 6
    assert short.VQAv2Accuracy.score("Two dogs", {"answers": people}) == 1
    assert short.VQAv2Accuracy.score("two cats", {"answers": people}) == 0


def test_vqav2_reference(shared):
    cases = reference_cases(shared, "vqav2")
    metric = short.VQAv2Accuracy()
    for case in cases:
        assert short.evalai_answer(case["pred"]) == case["llava_processed_pred"]
        reference, people = {"answers": case["gt_answers"]}, [short.without_breaks(a) for a in case["gt_answers"]]
        bare = short.official(short.without_breaks(case["pred"]), people)
        assert bare == pytest.approx(case["official_vqaeval_pct"] / 100, abs=1e-6)
        metric.update([case["pred"]], [reference])
    wanted = mean_of([case["official_vqaeval_pct_on_llava_processed"] / 100 for case in cases])
    assert metric.compute() == {"llava_accuracy": wanted}

"""LongBench and v2: asked as their own programs ask, scored as ``metrics.py`` did (rouge 1.0.1, fuzzywuzzy 0.18)."""

import json
from itertools import combinations

import pytest

from subtoken_train.evaluation.tasks import build_task, longbench
from tests.support.benchmark_folders import listed, refused, write_jsonl
from tests.support.refusals import refuses

ROW = {"input": "Who {context} ran?", "context": "A {input} cat\nran.", "answers": ["cat"], "all_classes": None}


def write(folder, name, *rows):
    write_jsonl(folder, f"{name}.jsonl", [{**ROW, **row} for row in rows])


def test_a_set_is_asked_in_its_own_words(tmp_path):
    write(tmp_path / "data", "multifieldqa_en", {"dataset": "multifieldqa_en", "_id": "a1", "length": 3}, {})
    first, second = build_task("longbench", tmp_path, sets=["multifieldqa_en"]).samples()
    context = "Read the following text and answer briefly.\n\nA {input} cat\nran."
    assert first.prompt == (
        f"{context}\n\nNow, answer the following question based on the above text, only give me the answer and do not "
        "output any other words.\n\nQuestion: Who {context} ran?\nAnswer:"
    )
    assert first.prompt[: first.context_characters] == context
    assert first.reference == {"set": "multifieldqa_en", "answers": ["cat"]}
    assert (first.id, second.id, first.kind) == ("multifieldqa_en-0", "multifieldqa_en-1", "multifieldqa_en")
    assert (first.max_new_tokens, first.stop) == (64, ())
    assert (first.cut_middle, first.chat, first.keep_space) == (True, False, True)


def test_all_sets(tmp_path):
    answers = {"passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "\u6bb5\u843d3"}
    for name in longbench.SETS:
        write(tmp_path, name, {"answers": [answers.get(name, "cat")], "all_classes": ["cat", "dog"]})
    samples = build_task("longbench", tmp_path, chat=True).samples()
    assert [sample.kind for sample in samples] == list(longbench.SETS)
    for sample in samples:
        assert sample.prompt[: sample.context_characters].endswith("A {input} cat\nran.")
        silent = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert sample.prompt[sample.context_characters :].count("Who {context} ran?") == (sample.kind not in silent)
        assert sample.chat == (sample.kind not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))
        assert (sample.stop == ("\n",)) == (sample.kind == "samsum")
        assert ("classes" in sample.reference) == (sample.kind in ("trec", "lsht"))
    lengths = {sample.kind: sample.max_new_tokens for sample in samples}
    assert [lengths[name] for name in ("hotpotqa", "lcc", "samsum", "multi_news")] == [32, 64, 128, 512]
    assert build_task("longbench").expected_rows == 4750
    assert build_task("longbench", sets=["lcc", "multifieldqa_en"]).expected_rows == 650


@pytest.mark.parametrize(("name", "row", "message"), listed("test_rows_that_cannot_be_scored"))
def test_rows_that_cannot_be_scored(tmp_path, name, row, message):
    write(tmp_path, name, {"answers": ["Paragraph 1"], "all_classes": ["x"]}, row)
    refused(message, "longbench", tmp_path, sets=[name])


def score(name, text, *answers, classes=()):
    return longbench.longbench_score(text, {"set": name, "answers": list(answers), "classes": list(classes)})


@pytest.mark.parametrize(("name", "text", "answers", "expected"), listed("test_what_the_original_gave"))
def test_what_the_original_gave(name, text, answers, expected):
    assert score(name, text, *answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("text", "answer", "expected"), listed("test_classes"))
def test_classes(text, answer, expected):
    assert score("trec", text, answer, classes=["human", "other", "Number", "number of", "Number of dogs"]) == expected


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
    assert longbench.rouge_l(said, wanted) == pytest.approx(expected, abs=1e-7)
    words = " ".join(map(str, range(700)))  # the original's recursion ends at about a thousand words, and it gives 0
    assert longbench.rouge_l(words, words) == pytest.approx(1, abs=1e-7)


def test_the_mean_is_over_sets():
    metric = longbench.LongBenchScores()
    rows = [("qasper", "cat", ["cat"]), ("qasper", "dog", ["cat"]), ("qasper", "cat", ["cat"]), ("lcc", "x", ["x"])]
    for name, text, answers in rows:
        metric.update([text], [{"set": name, "answers": answers}])
    assert metric.compute() == pytest.approx({"score": (2 / 3 + 1) / 2, "qasper": 2 / 3, "lcc": 1.0})
    assert len(longbench.SETS) == len(set(longbench.SETS)) == 21


def test_chinese_words(monkeypatch):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    longbench._chinese.cache_clear()
    with pytest.raises(ValueError, match=r"cutting LongBench's dureader, vcsum into words needs jieba, .*\[eval\]'"):
        longbench.check_jieba(["vcsum", "qasper", "dureader"])
    refuses("needs jieba, which is not installed", score, "multifieldqa_zh", "x", "x")
    longbench.check_jieba(["qasper", "lsht", "passage_retrieval_zh"])
    monkeypatch.undo()
    pytest.importorskip("jieba")
    today, weather, good = "\u4eca\u5929", "\u5929\u6c14", "\u5f88\u597d"
    assert score("multifieldqa_zh", today + weather + "\u3002", today + weather) == 1
    assert score("dureader", today + weather + good, today + good) == pytest.approx(0.6666666616666668, abs=1e-9)


V2_ROW = {
    "_id": "66f3", "domain": "Code Repository Understanding", "sub_domain": "x", "difficulty": "hard", "length": "long",
    "question": " Which?\n", "choice_A": "one ", "choice_B": "two", "choice_C": "three", "choice_D": "four",
    "answer": "C", "context": "\nA text with $Q$ in it.\n",
}  # fmt: skip
V2_PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\nA text with Which? in it.\n</text>\n\n"
    "What is the correct answer to this question: Which?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def write_v2(folder, *rows):
    (folder / "data.json").write_text(json.dumps([{**V2_ROW, **row} for row in rows]), encoding="utf-8")
    return folder


def test_how_v2_is_asked(tmp_path):
    write_v2(tmp_path, {}, {"_id": "7", "difficulty": "easy"})
    first, second = build_task("longbench_v2", tmp_path).samples()
    assert first.prompt == V2_PROMPT
    assert first.prompt[: first.context_characters].endswith("A text with Which? in it.")
    assert (first.id, first.kind, first.cut_middle, first.chat) == ("66f3", V2_ROW["domain"], True, False)
    assert second.reference == {"answer": "C", "difficulty": "easy", "length": "long"}
    (whole, _) = build_task("longbench_v2", tmp_path, question="compressed", chat=True).samples()
    assert (whole.chat, whole.prompt[whole.context_characters :]) == (True, V2_PROMPT.rpartition("\n")[2])


@pytest.mark.parametrize(("text", "letter"), listed("test_the_letter_that_an_answer_says"))
def test_the_letter_that_an_answer_says(text, letter):
    assert longbench.said_letter(text) == letter


def test_scores_by_difficulty_and_length():
    metric = longbench.LongBenchV2Accuracy()
    kinds = [("easy", "short"), ("hard", "short"), ("hard", "long")]
    references = [{"answer": "A", "difficulty": first, "length": second} for first, second in kinds]
    metric.update(["The correct answer is (A)", "?", "The correct answer is A"], references)
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3), "easy": 1, "hard": 0.5, "short": 0.5, "long": 1}


@pytest.mark.parametrize(("row", "message"), listed("test_rows_of_v2_that_cannot_be_scored"))
def test_rows_of_v2_that_cannot_be_scored(tmp_path, row, message):
    refused(r"has no data\.json\. hf download THUDM/LongBench-v2", "longbench_v2", tmp_path)
    refused("longbench_v2 reads a folder, and THUDM/LongBench-v2 is not one", "longbench_v2", "THUDM/LongBench-v2")
    refused(message, "longbench_v2", write_v2(tmp_path, {}, {"_id": "7", **row}))
    (tmp_path / "data.json").write_text("7")
    refused(r"data\.json has no list of objects; is it another file\?", "longbench_v2", tmp_path)

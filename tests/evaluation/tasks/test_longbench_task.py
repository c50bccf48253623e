"""LongBench's files: what is asked, what may be compressed, and rows that are none of theirs."""

import json

import pytest

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.longbench import NEW_TOKENS, ROWS, SETS, WITHOUT_CHAT
from tests.support.vqa_cases import refused

ROW = {"input": "Who {context} ran?", "context": "A {input} cat\nran.", "answers": ["cat"], "all_classes": None}


def write(folder, name, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows), encoding="utf-8")
    return path


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
    assert (first.max_new_tokens, first.stop, first.cut_middle, first.chat, first.keep_space) == (
        64,
        (),
        True,
        False,
        True,
    )


def test_all_sets(tmp_path):
    for name in SETS:
        answers = {"passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "\u6bb5\u843d3"}
        row = {"answers": [answers.get(name, "cat")], "all_classes": ["cat", "dog"]}
        write(tmp_path, name, row)
    samples = build_task("longbench", tmp_path, chat=True).samples()
    assert [sample.kind for sample in samples] == list(SETS)
    for sample in samples:
        assert sample.prompt[: sample.context_characters].endswith("A {input} cat\nran.")
        asked = sample.prompt[sample.context_characters :]
        silent = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert asked.count("Who {context} ran?") == (sample.kind not in silent)
        assert sample.chat == (sample.kind not in WITHOUT_CHAT)
        assert (sample.stop == ("\n",)) == (sample.kind == "samsum")
        assert ("classes" in sample.reference) == (sample.kind in ("trec", "lsht"))
    lengths = {sample.kind: sample.max_new_tokens for sample in samples}
    assert lengths == NEW_TOKENS
    assert [lengths[name] for name in ("hotpotqa", "lcc", "samsum", "multi_news")] == [32, 64, 128, 512]
    assert build_task("longbench").expected_rows == sum(ROWS.values()) == 4750
    assert build_task("longbench", sets=["lcc", "multifieldqa_en"]).expected_rows == 650


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("lcc", {"answers": []}, r"lcc\.jsonl, line 2: no answers"),
        ("lcc", {"answers": [3]}, r"line 2: answers is \[3\], and a list of texts is wanted"),
        ("lcc", {"context": None}, r"line 2: context is None, and a text is wanted"),
        ("lcc", {"dataset": "trec"}, r"line 2: dataset is 'trec', in the file of 'lcc'"),
        ("trec", {}, r"line 2: all_classes is None, and a list of texts is wanted"),
        ("passage_retrieval_en", {}, r"line 2: an answer names no paragraph: 'cat'"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path, name, row, message):
    good = {"answers": ["Paragraph 1"], "all_classes": ["x"]}
    write(tmp_path, name, good, row)
    refused(message, "longbench", tmp_path, sets=[name])


def test_files_that_are_none(tmp_path):
    refused(
        r"has no lcc\.jsonl or data/lcc\.jsonl\. hf download THUDM/LongBench data\.zip",
        "longbench",
        tmp_path,
        sets=["lcc"],
    )
    refused(r"longbench reads a folder, and THUDM/LongBench is none\. hf download", "longbench", "THUDM/LongBench")
    path = write(tmp_path, "lcc", {})
    path.write_text(path.read_text()[:-9])
    refused(r"lcc\.jsonl, line 1", "longbench", tmp_path, sets=["lcc"])
    path.write_text("[" * 100_000)
    refused(r"lcc\.jsonl is one JSON list; one JSON object a line", "longbench", tmp_path, sets=["lcc"])

"""Rows and files of another kind are called by their name, with what to do about them, in a short message."""

import json
import re

import pytest

from subtoken_train.datasets.corpus import CorpusSource, load_rows
from subtoken_train.datasets.question_table import read_own_table
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.evaluation.runner.prompt_file import TextPrompts

TURN = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}
KINDS = {
    "it is an Alpaca row (instruction, input, output); `subtoken-train init": {
        "instruction": "a", "input": "", "output": "b",
    },
    "it is a prompt/completion row; `subtoken-train init": {"prompt": "a", "completion": "b"},
    "it is a query/response row": {"query": "a", "response": "b"},
    "it is a preference pair": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "it is OpenAI's preference pair": {"input": {}, "preferred_output": [], "non_preferred_output": []},
    "it has a conversation, as ms-swift and XTuner": {"conversation": [{"human": "a", "assistant": "b"}]},
    "it is a plain text, which a language model reads": {"text": "a"},
    "it is a prompt for reinforcement learning": {"prompt": [], "reward_model": {"ground_truth": "a"}},
}  # fmt: skip


@pytest.mark.parametrize("words", KINDS)
def test_a_row_of_another_trainer_is_named(tmp_path, cache, words):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(KINDS[words]))
    with pytest.raises(ValueError, match=re.escape(f"{path}, record '0': it has no turns; {words}")) as caught:
        InstructionRecords(path)
    assert len(str(caught.value)) - len(str(tmp_path)) <= 400
    if "text" not in KINDS[words]:
        with pytest.raises(
            ValueError, match=re.escape("has no column 'text'; its columns are ") + ".*" + re.escape(words)
        ):
            load_rows(CorpusSource(str(path)))


def test_a_list_named_jsonl_and_lines_named_json(tmp_path):
    rows = [{"conversations": TURN}] * 2
    lines, whole = "".join(json.dumps(row) + "\n" for row in rows), json.dumps(rows)
    for text in (whole, json.dumps(rows, indent=1), f"\ufeff {whole}"):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(
            ValueError, match=r"a.jsonl is one JSON list, and .jsonl is one record a line; name the file"
        ):
            InstructionRecords(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(lines)
    with pytest.raises(
        ValueError, match=r"line 2: invalid JSON \(Extra data\); use the suffix .jsonl .*, which this is"
    ):
        InstructionRecords(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match=r"a list of records is needed; put it in brackets, or name the file .jsonl"):
        InstructionRecords(tmp_path / "a.json")
    (tmp_path / "p.jsonl").write_text(json.dumps([{"prompt": "a"}], indent=1))
    with pytest.raises(ValueError, match=r"p.jsonl is one JSON list, not one JSON object per line"):
        TextPrompts(source=tmp_path / "p.jsonl").samples()


TABLES = {
    "record '0' has 'history', [['a', 'b']]: earlier turns are not read": {"history": [["a", "b"]]},
    "record '0' has 'kto_tag', False: a bad answer": {"kto_tag": False},
    "record '0' has 'weight', 0.5: a bad answer, or one that is weighed": {"weight": 0.5},
    "record '0' has 'is_correct', 'false': a bad answer": {"is_correct": "false"},
    "record '0' has 'Skip', '1': a bad answer": {"Skip": "1"},
    "record '0' has 'rejected', 'no': preferences are not trained": {"rejected": "no"},
    "record '0' has 'Audio', 'a.wav': sound is not read": {"Audio": "a.wav"},
    "record '0' has 'tools', '[{}]': tools are not trained": {"tools": "[{}]"},
}


@pytest.mark.parametrize("words", TABLES)
def test_a_column_that_changes_what_is_learnt_is_refused_in_a_table(tmp_path, words):
    path = tmp_path / "q.json"
    good = {"instruction": "a", "input": "", "output": "b"}
    path.write_text(json.dumps([{**good, **TABLES[words]}]))
    with pytest.raises(ValueError, match=re.escape(f"{path}, {words}")):
        read_own_table(path, dict.fromkeys(("image", "question", "answer")))


def test_notes_and_system_texts_of_a_table(tmp_path):
    path = tmp_path / "q.json"
    row = {
        "instruction": "a",
        "output": "b",
        "system": "Be short.",
        "kto_tag": True,
        "weight": 1,
        "history": [],
        "n": 5,
    }
    path.write_text(json.dumps([row, {**row, "system": ""}]))
    table = read_own_table(path, dict.fromkeys(("image", "question", "answer")))
    asked = [[turn["value"] for turn in record.row["conversations"][:-1]] for record in table.records]
    assert asked == [["Be short.", "a"], ["a"]]
    assert table.unread == ("kto_tag", "weight", "history", "n")
    assert table.columns == "question in 'instruction', answer in 'output', before each question in 'system'"
    path.write_text(json.dumps([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    with pytest.raises(ValueError, match=r"q.json: it is a preference pair, and preferences are not trained"):
        read_own_table(path, dict.fromkeys(("image", "question", "answer")))

"""A caption file as a data set: one fixed question, usual names of columns; refusals name the next command."""

import json
import re

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.own_data import read_own
from subtoken_train.datasets.question_table import DESCRIBE
from tests.support.commands import refused
from tests.support.run_folders import inits, pictures

NONE = dict.fromkeys(("image", "question", "answer"))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "mine", 10)
    return tmp_path / "mine"


def captions(folder, header="file,caption", rows=10):
    lines = [header, *(f"{i:02d}.png,a {'red' if i % 2 else 'blue'} thing" for i in range(rows))]
    (folder / "captions.csv").write_text("\n".join(lines))


@pytest.mark.parametrize("header", ["file,caption", "image,text", "File Name,description", "filename,label"])
@pytest.mark.parametrize("question", [None, "What is seen?"])
def test_captions_are_answers_of_one_question(mine, header, question):
    captions(mine, header)
    data = read_own(mine, None, NONE, 0, question=question)
    rows = [row for split in data.splits.values() for row in split]
    said = {(turns[0]["value"], turns[1]["value"]) for turns in (row["conversations"] for row in rows)}
    assert said == {(f"<image>\n{question or DESCRIBE}", f"a {color} thing") for color in ("red", "blue")}
    assert {split: len(each) for split, each in data.splits.items()} == {"train": 8, "dev": 1, "test": 1}
    assert data.found[1] == f"asked of every picture: {question or DESCRIBE!r}; another question: --question TEXT"


def test_several_captions_of_a_picture_stay_in_one_split(mine):
    captions(mine)
    with (mine / "captions.csv").open("a") as file:
        file.write("\n00.png,another word on it")
    splits = read_own(mine, None, NONE, 0).splits.values()
    assert [n for n in ([row["image"] for row in rows].count("images/00.png") for rows in splits) if n] == [2]


def test_init_says_passes_and_the_backbones_that_fit(mine, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("subtoken_train.cli.init_recipe.machine_memory", lambda: 20 * 2**30)
    captions(mine)
    lines = inits(capsys, "mine", "--backbone", "tiny", "--question", "list .")
    assert "60 steps of 8 records, 60.0 passes over the 8 there are" in lines
    place = next(place for place, line in enumerate(lines) if line.startswith("memory of a step, and time on one H100"))
    rows = [re.fullmatch(r"  (\w+) +([\d.]+) GiB, about \d+ \w+", line) for line in lines[place + 1 : place + 3]]
    assert [row[1] for row in rows] == ["tiny", "smolvlm500m"]
    assert re.fullmatch(r"  larger ones: \d+, from 2[\d.]+ GiB on", lines[place + 3])
    row = json.loads((mine.parent / "mine_subtoken/test.json").read_text())[0]
    assert row["conversations"][0]["value"] == "<image>\nlist ."
    assert main(["check", "--config", "mine_subtoken/mine.yaml", "--offline"]) == 0


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("caption\na\nb\n", [], "name it: subtoken-train init mine --image-column COLUMN"),
        ("file,caption\nnone.png,a\n", [], "add them, or drop their lines, then: subtoken-train init mine"),
        ("file,caption\n00.png,a\n", ["--question", " "], "--question is empty; leave it out"),
        ("file,caption\n00.png,a\n", ["--question=a", "--question-column=b"], "give --question (one for all) or"),
        ("file,caption\n00.png,a\n", [], "three at least; add some, then: subtoken-train init mine"),
    ],
)  # fmt: skip
def test_captions_that_are_wrong(mine, capsys, content, options, words):
    (mine / "t.csv").write_text(content)
    assert words in refused(capsys, "init", "mine", *options)
    assert not (mine.parent / "mine_subtoken").exists()

"""``subtoken-train init`` on folders that are empty, mixed, huge, unreadable or wrong: one line, nothing left."""

import os
import shutil

import pytest

from subtoken_train.datasets import own_data, question_table
from subtoken_train.datasets.english import write_english
from tests.support.commands import refused
from tests.support.run_folders import conversations, own_images, pictures, table


@pytest.fixture(autouse=True)
def untouched(tmp_path):
    """Nothing is written but what a test writes itself."""
    (tmp_path / "mine").mkdir()
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("mine", "secret.png")] == []


@pytest.fixture
def mine(tmp_path):
    return tmp_path / "mine"


def test_no_folder_and_an_empty_one(mine, capsys):
    assert refused(capsys, "init", "nowhere") == "nowhere does not exist; name the folder of your data"
    (mine / "a.csv").write_text("x")
    assert "mine/a.csv is not a folder" in refused(capsys, "init", "mine/a.csv")
    (mine / "a.csv").unlink()
    (mine / "README.md").write_text("to come")
    (mine / ".hidden.csv").write_text("x")
    line = refused(capsys, "init", "mine")
    assert line.startswith("mine holds no data: no images, and no file that ends with one of .csv")
    add = "add texts, or pictures and a table, then: subtoken-train init mine"
    assert line.endswith(f"(but README.md, about the data); {add}")
    (mine / "README.md").unlink()
    for name in ("a.pdf", "b.PDF", "c.html", "Makefile", "d.txt.gz", "e.rtf"):
        (mine / name).write_text("x")
    assert "6 files of kinds that are not read: 2 .pdf, 1 " in refused(capsys, "init", "mine")


def test_mixed_folders(mine, capsys):
    (mine / "notes.txt").write_text("words")
    pictures(mine)
    assert "6 images and no table of questions and answers, but texts (notes.txt)" in refused(capsys, "init", "mine")
    table(mine, [])
    assert refused(capsys, "init", "mine").endswith("subtoken-train init mine --table questions.csv")
    table(mine, [], "other.csv")
    words = "several tables (other.csv, questions.csv); say which one with --table: subtoken-train"
    assert words in refused(capsys, "init", "mine")
    assert "no table 'thrid.csv'; its tables are other" in refused(capsys, "init", "mine", "--table", "thrid.csv")


def test_images_that_no_record_names(mine, capsys):
    pictures(mine)
    line = refused(capsys, "init", "mine")
    assert "6 images and no table of questions and answers; add a CSV file" in line
    assert line.endswith("then: subtoken-train init mine")
    conversations(mine / "chat.jsonl")
    assert "6 images, and chat.jsonl names none of them" in refused(capsys, "init", "mine")


def test_huge_folders_and_columns_that_are_not_there(mine, capsys, monkeypatch):
    own_images(mine)
    line = refused(capsys, "init", "mine", "--answer-column", "antwort")
    listed = "its columns are image, question, answer; then: subtoken-train init mine"
    assert line == f"mine/questions.csv has no column 'antwort'; {listed}"
    monkeypatch.setattr(question_table, "MAX_BYTES", 100)
    assert "questions.csv has more than 100 bytes; a recipe reads" in refused(capsys, "init", "mine")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("bild,frage,antwort\na,b,c\n", "no column for the question (question, prompt, instruction, query); its"),
        ("image,question,antwort\na,b,c\n", "no column for the answer (answer, response, output"),
        ("image,question,answer\nimages/00.png,b\n", "line 2 has 2 cells, and the first line 3"),
        ("image,question,answer\nimages/00.png,b, \n", "line 2: column 'answer' is empty"),
        ("image,question,answer\nimages/00.png,<|image_1|> b,c\n", "line 2: a text holds '<|image_1|>'"),
        ("image,question,answer\nimages/00.png,<img>a.png</img> b,c\n", "line 2: a text holds '<img>a.png</img>'"),
        ("image,question,answer\n,b,c\n", "line 2: column 'image' is empty"),
        ("image,question,question\na,b,c\n", "column 'question' appears twice"),
        ('image,question,answer\nimages/00.png,"b,c\n', "invalid CSV"),
        ("image,question,answer\nimages/00.png,b <image>,c\n", "a text holds <image>"),
        ("image,question,answer\nnone.png,b,c\n", "1 of 1 images are not in mine (first: 'none.png', mine/"),
        ("image,question,answer\ntrain/00.png,b,c\n", "1 of 1 images are not in mine (first: 'train/00.png'"),
        ("image,question,answer\n../secret.png,b,c\n", "line 2: image '../secret.png' lies outside of mine"),
        ("image,question,answer\nimages/link.png,b,c\n", "lies outside of mine"),
        ("image,question,answer\ntwice.png,b,c\n", "'twice.png' could be a/twice.png or b/twice.png; write its path"),
        ("image,question,answer\nimages/00.png,b,c\nimages/01.png,b,d\n", "too few different pictures (2)"),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong(mine, tmp_path, capsys, content, words):
    pictures(mine)
    pictures(tmp_path, 1, "mine")
    (tmp_path / "mine/00.png").rename(tmp_path / "secret.png")
    (mine / "images/link.png").symlink_to("../../secret.png")
    for folder in ("a", "b"):
        (mine / folder).mkdir()
        (mine / folder / "twice.png").write_bytes((mine / "images/00.png").read_bytes())
    (mine / "questions.csv").write_text(content)
    assert words in refused(capsys, "init", "mine")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "image,question,answer\nimages/00.png,b,\xe9\n".encode("latin-1"), "a.csv is not UTF-8 (byte 38)"),
        ("a.jsonl", b"\xff\xfe{", "a.jsonl is not UTF-8 text (byte 0)"),
        ("a.json", b'{"data": []}', "a.json holds {'data': []}; a list of records is needed"),
        ("a.jsonl", b'{"question": "a", "answer": "b"}\n{"messages": []}', "record '0': it has no turns"),
        ("a.JSONL", '\ufeff{"question": "a"}'.encode(), "no column for the answer"),
        ("a.json", b"[5]", "a.json, record '0' is 5; an object with names is needed"),
        ("a.json", b'[{"question": "a", "answer": ["b", "c"]}]', "column 'answer' is ['b', 'c'], which is not text"),
        ("a.json", b'[{"question": "a", "answer": NaN}]', "column 'answer' is nan, which is not text"),
        ("a.json", b'[{"messages": [{"role": "tool", "content": "a"}]}]', "unknown role 'tool'"),
        ("a.txt", b"\xff\xfea", "a.txt is not UTF-8 (byte 0)"),
        ("a.txt", b"a\0b", "a.txt holds a NUL character"),
        ("a.txt", b"one line", "too few different documents (1)"),
        ("a.txt", "\n\n".join(f"paragraph {i}" for i in range(40)).encode(), "there is too little text: "),
    ],
)
def test_files_that_are_wrong(mine, capsys, name, content, words):
    (mine / name).write_bytes(content)
    assert words in refused(capsys, "init", "mine")


def test_a_broken_image_a_pipe_and_a_folder_that_cannot_be_read(mine, capsys, monkeypatch):
    own_images(mine)
    (mine / "images/03.png").write_bytes(b"no picture")
    assert "image mine/images/03.png cannot be read (cannot identify" in refused(capsys, "init", "mine")
    (mine / "images/03.png").write_bytes(b"")
    assert "image mine/images/03.png cannot be read (it is empty" in refused(capsys, "init", "mine")
    walk = os.walk

    def denied(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/images"))
        return walk(folder)

    monkeypatch.setattr(own_data.os, "walk", denied)
    assert refused(capsys, "init", "mine").startswith("Permission denied: mine/images; ")
    monkeypatch.undo()
    (mine / "questions.csv").unlink()
    os.mkfifo(mine / "a.csv")
    assert refused(capsys, "init", str(mine)).startswith(f"{mine}/a.csv is not a regular file; name a file")


def test_targets_that_lie_in_the_data_or_around_it_or_that_another_command_wrote(mine, capsys, tmp_path):
    own_images(mine)
    for out in ("mine", "mine/out", "."):
        assert f"--out {out} and the data mine are inside each other" in refused(capsys, "init", "mine", "--out", out)
    write_english(tmp_path / "mine_out")
    capsys.readouterr()
    line = refused(capsys, "init", "mine", "--out", "mine_out", "--overwrite")
    assert "mine_out is not a folder that init wrote (no .subtoken-data.json of 'subtoken-train init')" in line
    assert len(list((tmp_path / "mine_out").iterdir())) == 5
    shutil.rmtree(tmp_path / "mine_out")


def test_a_record_that_the_embedded_model_cannot_hold(mine, capsys):
    table(mine, [(name, "list . " * 300, "none") for name in pictures(mine)])
    words = "tokens up to its answer, and checkpoints/tiny-llava has 512 positions; shorten"
    assert words in refused(capsys, "init", "mine")


def test_a_backbone_that_does_not_suit(mine, capsys):
    own_images(mine)
    texts = "your data are images, and backbone 'llama7b' reads texts alone; use one of glm41v9b, internvl8b"
    assert texts in refused(capsys, "init", "mine", "--backbone", "llama7b")
    for backbone, words in (("llava7", "'llava7'. Did you mean 'llava7b'?"), ("../x", "'../x'")):
        assert f"unknown backbone {words}" in refused(capsys, "init", "mine", "--backbone", backbone)

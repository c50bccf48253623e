"""``subtoken-train init``: what it writes of images, conversations and texts into a folder of recipes and data."""

import json
import re

import pytest
import yaml

from subtoken_train.cli.main import main
from tests.support.chats import CHATML, byte_level
from tests.support.commands import printed, refused
from tests.support.places import ROOT
from tests.support.run_folders import conversations, inits, own_images, pictures, table
from tests.support.sampling import sampled
from tests.support.training_memory import save_language_model

SPLITS = ("train", "dev", "test")


def rows_of(out, suffix="json"):
    texts = {split: (out / f"{split}.{suffix}").read_text() for split in SPLITS}
    read = json.loads if suffix == "json" else lambda text: list(map(json.loads, text.splitlines()))
    return {split: read(text) for split, text in texts.items()}


@pytest.mark.slow
def test_the_same_picture_under_two_names_stays_in_one_split(tmp_path, capsys):
    folder = tmp_path / "mine"
    names = pictures(folder, 8)
    (folder / "copy.png").write_bytes((folder / names[3]).read_bytes())
    table(folder, [(name, "list .", "none") for name in [*names, "copy.png"]])
    for seed in range(6):
        lines, rows = inits(capsys, "mine", "--seed", seed, "--out", f"out{seed}"), rows_of(tmp_path / f"out{seed}")
        found = [split for split in SPLITS for row in rows[split] if row["image"] in ("copy.png", names[3])]
        assert found[0] == found[1]
    assert "1 are copies of others" in lines[1]


@pytest.mark.slow
def test_a_second_init_loses_nothing(tmp_path, capsys):
    own_images(tmp_path / "mine")
    inits(capsys, "mine")
    out = tmp_path / "mine_subtoken"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert json.loads(before[".subtoken-data.json"]) == {"made_by": "subtoken-train init"}
    words = "mine_subtoken exists; choose another folder or pass --overwrite"
    assert refused(capsys, "init", "mine", "--seed", 3) == words
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    inits(capsys, "mine", "--seed", 3, "--overwrite")
    assert (out / "train.json").read_bytes() != before["train.json"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine_subtoken.1").iterdir()} == before


def test_columns_as_told(tmp_path, capsys):
    folder = tmp_path / "mine"
    lines = ["bild;frage;antwort", *(f"{name.removeprefix('images/')};list .;none" for name in pictures(folder))]
    (folder / "t.csv").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    inits(capsys, "mine", "--image-column", "bild", "--question-column", "frage", "--answer-column", "antwort")
    row = rows_of(tmp_path / "mine_subtoken")["train"][0]
    assert [turn["value"] for turn in row["conversations"]] == ["<image>\nlist .", "none"]
    assert (folder / row["image"]).is_file()


@sampled(
    ("row", "asked", "unread"),
    [
        ({"instruction": "add", "input": "{i} and 1", "Id": 7}, "add\n{i} and 1", ""),
        ({"Instruction": "add {i}", "Input": 5, "by": "me"}, "add {i}\n5", "by"),
        ({"question": "{i} ?", "context": None, "input": " "}, "{i} ?", ""),
        ({"prompt": "{i} ?", "Context": "so", "split": "x", "url": 1}, "{i} ?\nso", "split, url"),
    ],
    every=4,
)
def test_objects_with_numbers_and_what_goes_with_a_question(tmp_path, capsys, row, asked, unread):
    def at(i, value):
        return value.format(i=i) if isinstance(value, str) else value

    rows = [{**{name: at(i, value) for name, value in row.items()}, "output": i + 1} for i in range(300)]
    rows[0] = {name: rows[0][name] for name in (next(iter(row)), "output")}  # what a column is, any record may say
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/alpaca.json").write_text(json.dumps(rows))
    lines = inits(capsys, "mine")
    assert [line for line in lines if "not read" in line] == [f"mine: columns not read: {unread}"] * bool(unread)
    held = rows_of(tmp_path / "mine_subtoken", "jsonl")["train"]
    pairs = [[turn["value"] for turn in row["conversations"]] for row in held]
    assert all(question == at(int(answer) - 1, asked) for question, answer in pairs if answer != "1")


def test_words_that_the_embedded_model_does_not_know_ask_for_another(tmp_path, capsys):
    folder = tmp_path / "mine"
    table(folder, [(name, "What does the zebra eat?", "Grass") for name in pictures(folder)])
    lines, recipe = inits(capsys, "mine"), yaml.safe_load((tmp_path / "mine_subtoken/mine.yaml").read_text())
    assert recipe["model"]["backbone"]["path"] == "llava-hf/llava-1.5-7b-hf"
    assert recipe["trainer"]["accelerator"] == "gpu"
    assert any("does not know your words ('What', 'does', 'zebra')" in line for line in lines)
    assert any(line.startswith("to use another one: --backbone NAME --overwrite") for line in lines)
    assert not any("drawn digits" in line for line in lines)


@sampled("given", ["qwenvl3b", "Qwen/Qwen2.5-VL-7B-Instruct", "llava-hf/llava-1.5-7b-hf"], every=3)
def test_a_chosen_backbone(tmp_path, capsys, given):
    own_images(tmp_path / "mine")
    inits(capsys, "mine", "--backbone", given)
    path = "Qwen/Qwen2.5-VL-3B-Instruct" if given == "qwenvl3b" else given
    for name in ("mine", "mine_anchor"):
        file = f"mine_subtoken/{name}.yaml"
        model = yaml.safe_load((tmp_path / file).read_text())["model"]
        assert (model["backbone"]["path"], model["reducer"]["name"]) == (path, "fastv")
        assert main(["check", "--config", file, "--offline"]) == 0


@sampled(("asked", "answered", "beyond"), [(60, 1, False), (2, 600, True)], every=2)
def test_records_longer_than_the_shipped_recipe_takes(tmp_path, capsys, asked, answered, beyond):
    with (own_images(tmp_path / "mine") / "questions.csv").open("a") as file:
        file.write(f"images/00.png,{'list . ' * asked},{'none ' * answered}\n")
    line = next(line for line in inits(capsys, "mine") if line.startswith("data.max_length"))
    length = yaml.safe_load((tmp_path / "mine_subtoken/mine.yaml").read_text())["data"]["max_length"]
    assert line.startswith(f"data.max_length {length} instead of 160: a record takes ")
    assert (160 < length <= 512, line.endswith("and more than 512 are cut")) == (True, beyond)


def test_turns_that_training_leaves_out_are_not_asked(tmp_path, capsys):
    rows = []
    for number in range(400):
        used = [{"from": "human", "value": f"what comes after {number} ?"}, {"from": "gpt", "value": f"{number + 1}"}]
        greeting, farewell = {"from": "gpt", "value": "hello"}, {"from": "human", "value": "thanks"}
        rows.append({"conversations": [greeting, *used, farewell]})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/chat.json").write_text(json.dumps(rows))
    inits(capsys, "mine")
    asked = json.loads((tmp_path / "mine_subtoken/local_text/test.jsonl").read_text().splitlines()[0])
    number = int(asked["answers"][0])
    assert asked["question"] == f"USER: what comes after {number - 1} ? ASSISTANT:"


def test_runs_that_are_there_are_trained_anew(tmp_path, capsys):
    own_images(tmp_path / "mine")
    (tmp_path / "runs/mine").mkdir(parents=True)
    lines = inits(capsys, "mine", "--seed", 3)
    assert "runs/mine may have been trained on other data: train both again, with --overwrite" in lines
    commands = [line for line in lines if line.startswith("  subtoken-train ")]
    assert [line.endswith(" --overwrite") for line in commands] == [True, True, True, False, False]


def test_conversations_become_documents_and_questions(tmp_path, capsys):
    conversations(tmp_path / "mine/chat.jsonl")
    lines, out = inits(capsys, "mine"), tmp_path / "mine_subtoken"
    asked = [json.loads(line) for line in (out / "local_text/test.jsonl").read_text().splitlines()]
    held = rows_of(out, "jsonl")["test"]
    assert len(asked) == len(held) == 40
    assert asked[0]["question"] == f"USER: {held[0]['conversations'][0]['value']} ASSISTANT:"
    assert asked[0]["answers"] == [held[0]["conversations"][1]["value"]]
    recipe = yaml.safe_load((out / "mine.yaml").read_text())
    assert recipe["data"]["train"] == {"name": "mine_subtoken/train.jsonl", "documents": "conversations"}
    assert any("--tasks local_text --data-root mine_subtoken" in line for line in lines)
    offered = "subtoken-train data smollm2, then --backbone checkpoints/smollm2 --overwrite"
    assert f"a real model for a laptop: {offered}" in lines


def test_texts_take_the_laptop_s_model_where_it_is(tmp_path, capsys):
    """Its shipped recipe's sizes and arm, on whatever the machine has; the embedded one where that is said."""
    save_language_model(tmp_path / "checkpoints/smollm2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/book.txt").write_text("\n\n".join(f"Paragraph {i} says: {'word ' * 60}." for i in range(200)))
    lines, text = inits(capsys, "mine"), (tmp_path / "mine_subtoken/mine.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["model"]["backbone"] == {"path": "checkpoints/smollm2", "dtype": "float32"}
    assert "    # path: checkpoints/qwen05  # a bigger one; get it: subtoken-train data qwen05\n" in text
    assert (recipe["model"]["reducer"]["name"], recipe["model"]["routing"]["kept_groups"]) == ("compactor", 12)
    sizes = {"block_length": 288, "context_length": 192, "prefix_tokens": 16, "batch_size": 1}
    assert {key: recipe["data"][key] for key in sizes} == sizes
    assert recipe["trainer"]["accelerator"] == "auto"
    assert "precision" not in recipe["trainer"]
    assert recipe["trainer"]["max_steps"] <= 100
    assert any("a real model that is already on this machine" in line for line in lines)
    lines = inits(capsys, "mine", "--backbone", "tinylm", "--overwrite")
    assert yaml.safe_load((tmp_path / "mine_subtoken/mine.yaml").read_text())["model"]["reducer"]["name"] == "quest"
    assert "a real model for a laptop: --backbone checkpoints/smollm2 --overwrite" in lines


@sampled("end", ["\n", "\r\n"], every=2)
def test_texts_are_cut_at_paragraphs(tmp_path, capsys, end):
    (tmp_path / "mine").mkdir()
    paragraphs = ["The first."]
    paragraphs += [f"    Paragraph {number} says:\n{'word ' * 60}." for number in range(120)]
    (tmp_path / "mine/book.txt").write_bytes("\n \n\n".join(paragraphs).replace("\n", end).encode())
    (tmp_path / "mine/README.md").write_text("about it")
    for name in ("a.pdf", "b.html", "c.pdf", ".hidden.pdf"):
        (tmp_path / "mine" / name).write_text("not read")
    lines = inits(capsys, "mine")
    assert lines[1] == "mine: 1 file about the data left out (README.md)"
    assert lines[2] == "mine: 3 files of kinds that are not read: 2 .pdf, 1 .html"
    rows = rows_of(tmp_path / "mine_subtoken", "jsonl")
    said = [text for split in SPLITS for row in rows[split] for text in row["text"].split("\n\n")]
    assert sorted(said) == sorted(paragraphs)
    assert min(len(rows[split]) for split in SPLITS) >= 2


def test_short_chats_for_a_model_with_a_template(tmp_path, capsys):
    save_language_model(tmp_path / "model", tokenizer=byte_level(CHATML))
    lines = inits(capsys, ROOT / "data/samples/chats", "--backbone", "model")
    band = yaml.safe_load((tmp_path / "chats_subtoken/chats.yaml").read_text())["data"]
    assert 400 < band["context_length"] < band["block_length"] - band["prefix_tokens"] == band["block_length"] - 64
    (asked,) = map(json.loads, (tmp_path / "chats_subtoken/local_text/test.jsonl").read_text().splitlines())
    said = "Thank you, that was all."
    system, end = "<|im_start|>system\nBe helpful.<|im_end|>\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert asked["question"] == f"{system}<|im_start|>user\n{said}{end}"
    assert lines[-1] == f"  subtoken-train generate --adapter runs/chats --prompt '{said}'"
    assert main(["preview", "--config", "chats_subtoken/chats.yaml", "--count=2"]) == 0
    assert re.search(r"system +masked .*Answer from the text alone.*\n +context +masked", capsys.readouterr().out)


def test_a_system_text_that_is_not_learnt_is_judged_by_how_the_backbone_learns(tmp_path, capsys):
    """In a template neither it nor a question is learnt; as a document all would be."""
    save_language_model(tmp_path / "chat", tokenizer=byte_level(CHATML))
    (tmp_path / "mine").mkdir()
    told = {"role": "system", "content": "Be brief.", "loss": False}
    talks = [[("user", f"What comes after {i} ?"), ("assistant", str(i + 1))] for i in range(60)]
    rows = [{"messages": [told, *({"role": role, "content": text} for role, text in talk)]} for talk in talks]
    (tmp_path / "mine/chat.json").write_text(json.dumps(rows))
    line = refused(capsys, "init", "mine")
    assert line.startswith("a message is not to be learnt")
    assert line.endswith("drop it, or use a backbone with a template")
    assert not (tmp_path / "mine_subtoken").exists()
    inits(capsys, "mine", "--backbone", "chat")
    recipe = ["--config", "mine_subtoken/mine.yaml", "--trainer.accelerator=cpu", "--model.backbone.dtype=float32"]
    assert "tokens of all 48 chats" in printed(capsys, "check", *recipe)
    assert "a message is not to be learnt" in refused(
        capsys, "check", *recipe, "--model.backbone.path=checkpoints/tiny-llama", reports=True
    )

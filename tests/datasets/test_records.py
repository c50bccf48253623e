"""Records of every form become LLaVA's, and a file of them is a table that is made once."""

import errno
import fcntl
import json
import os
import pickle

import pytest
from PIL import Image

from subtoken_train.datasets import records as instruction_records
from subtoken_train.datasets.conversations import conversation_document, llava_form
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.image_sources import open_image
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.types import Turn
from tests.support.chats import talk
from tests.support.refusals import refuses


def write(folder, rows, name="train.json"):
    path = folder / name
    text = "\n\n".join(map(json.dumps, rows)) if name.endswith("jsonl") else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    return path


ROWS = [
    {"id": "one", "image": "a.jpg", "conversations": talk("<image>\nwhat ?", "a 7"), "kind": "read"},
    {"id": 7, "image": ["b/c.jpg", "d.jpg"], "conversations": talk("<image> and <image>", "yes", "sure ?", "no")},
    {"conversations": talk("line\u2028separator", "fine"), "image": None},
]


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_records_are_read_in_order(tmp_path, name):
    path = tmp_path / name
    dump = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_text("\n".join(dump) + "\n" if name.endswith("l") else f"[{','.join(dump)}]", encoding="utf-8")
    one, two, three = list(map(InstructionRecords(path).__getitem__, range(3)))
    assert (one.id, one.images, one.kind) == ("one", [tmp_path / "a.jpg"], "read")
    assert one.turns == [Turn("<image>\nwhat ?", "a 7")]
    assert (two.id, two.images) == ("7", [tmp_path / "b/c.jpg", tmp_path / "d.jpg"])
    assert two.turns == [Turn("<image> and <image>", "yes"), Turn("sure ?", "no")]
    assert (three.id, three.images, three.kind) == ("2", [], None)


def test_what_gpt_says_first_and_nobody_answers_last_is_left_out(tmp_path):
    talks = {"from": "gpt", "value": "welcome"}, *talk("hi", "yes"), {"from": "human", "value": "and?"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"id": "x", "conversations": talks}]))
    records = InstructionRecords(path)
    assert records[0].turns == [Turn("hi", "yes")]
    assert records.sizes().tolist() == [[0, 5]]
    assert InstructionRecords(write(tmp_path, ROWS), tmp_path / "elsewhere")[0].images == [tmp_path / "elsewhere/a.jpg"]


@pytest.mark.parametrize(("name", "text"), [("a.json", "[]"), ("a.jsonl", "\n")])
def test_an_empty_file_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refuses("holds no record", lambda: InstructionRecords(tmp_path / name))
    refuses("does not exist; get it: subtoken-train data scenes", InstructionRecords, "data/scenes/none.json")


def test_a_missing_or_broken_image_is_named_with_its_record(tmp_path):
    refuses(r"record 'x': image .*none.jpg does not exist; check image_folder", open_image, tmp_path / "none.jpg", "x")
    Image.new("P", (3, 2)).save(tmp_path / "cover.gif")  # another suffix stands in for a missing image
    assert (open_image(tmp_path / "cover.jpg", "x").mode, open_image(tmp_path / "cover.jpg").size) == ("RGB", (3, 2))
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:400])
    refuses(r"record 'x': image .*cut.jpg cannot be read", lambda: open_image(tmp_path / "cut.jpg", "x"))


@pytest.fixture
def large(tmp_path, cache, monkeypatch):
    """A data file that counts as large, so that its index is kept."""
    monkeypatch.setattr(instruction_records, "SMALL_FILE", 0)
    return write(tmp_path, ROWS)


def test_the_index_of_a_large_file_is_made_once(large, monkeypatch):
    first = InstructionRecords(large)
    monkeypatch.setattr(instruction_records, "_described", lambda path: pytest.fail("made again"))
    again = InstructionRecords(large)
    assert [again[i] for i in range(3)] == [first[i] for i in range(3)]
    assert again.sizes().tolist() == first.sizes().tolist()


def test_a_changed_file_is_indexed_anew_and_refused_while_in_use(large):
    old = InstructionRecords(large)
    write(large.parent, ROWS[:2])
    assert len(InstructionRecords(large)) == 2
    assert (len(old), old[2].turns) == (3, [Turn("line\u2028separator", "fine")])  # of what it opened
    refuses("was changed while it was in use; start again", lambda: pickle.loads(pickle.dumps(old)))


def test_a_cut_cache_is_named(large, cache):
    InstructionRecords(large)
    (path,) = cache.rglob("*.arrow")
    path.write_bytes(path.read_bytes()[:40])
    refuses(f"rows kept below {cache} cannot be read .*; delete {cache}/generator", InstructionRecords, large)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_cache_that_cannot_be_locked_is_named(large, cache, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    refuses(f"{cache} takes no locks; export HF_DATASETS_CACHE=", InstructionRecords, large)


def test_a_record_set_that_is_sent_to_a_process_carries_no_record(large):
    records = InstructionRecords(large)
    sent = pickle.dumps(records)
    assert len(sent) < 600
    assert pickle.loads(sent)[1].turns == records[1].turns


def test_images_are_compared_with_the_listings(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("a.jpg", "b/c.png"):
        (tmp_path / name).touch()
    (tmp_path / "d.jpg").mkdir()  # no image, whatever its name is
    top, below = InstructionRecords(write(tmp_path, ROWS)).compare_images()
    assert (top.folder, top.named, top.missing, top.renamed) == ("", 2, ["d.jpg"], 0)
    assert (below.folder, below.named, below.missing, below.renamed) == ("b", 1, [], 1)


def said(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


LLAVA = {"image": "a.jpg", "conversations": talk("<image>\nwhat ?", "a 7")}
PARTS = [{"type": "image_url", "image_url": {"url": "a.jpg"}}, {"type": "text", "text": "what ?"}]
NEWER = [{"type": "input_image", "image_url": "a.jpg"}, {"type": "input_text", "text": "what ?"}]
ANSWER = ("assistant", "a 7")
ASKED = said(("user", "<image>\nwhat ?"), ("assistant", "a 7"))
SAME = {
    "LLaVA": LLAVA,
    "ShareGPT with images beside": {"images": ["a.jpg"], "conversations": LLAVA["conversations"]},
    "messages with images beside": {"images": ["a.jpg"], "messages": ASKED},
    "roles under conversations": {"image": "a.jpg", "conversations": ASKED},
    "from and value under messages": {"image": "a.jpg", "messages": LLAVA["conversations"]},
    "OpenAI's parts": {"messages": said(("user", PARTS), ("assistant", "a 7"))},
    "OpenAI's answer in parts": {"messages": said(("user", PARTS), ("assistant", [{"type": "text", "text": "a 7"}]))},
    "a part with a path": {"messages": said(("user", [{"type": "image", "image": "a.jpg"}, PARTS[1]]), ANSWER)},
    "a part with a file's URL": {"messages": said(("user", [{"image_url": "file://a.jpg"}, PARTS[1]]), ANSWER)},
    "parts without a type": {"messages": said(("user", [{"image": "a.jpg"}, {"text": "what ?"}]), ANSWER)},
    "a text among the parts": {"conversations": said(("human", [PARTS[0], "what ?"]), ("gpt", "a 7"))},
    "OpenAI's new parts": {"messages": said(("user", NEWER), ("assistant", [{"type": "output_text", "text": "a 7"}]))},
    "columns of both forms": {
        "images": ["a.jpg"],
        "messages": [{**turn, "from": None, "value": None} for turn in ASKED],
    },
    "a part whose image is listed": {
        "images": ["a.jpg"],
        "messages": said(("user", [{"type": "image"}, PARTS[1]]), ANSWER),
    },
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_the_same_record(tmp_path, form):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([SAME[form]]))
    record = InstructionRecords(path)[0]
    assert (record.images, record.turns) == ([tmp_path / "a.jpg"], [Turn("<image>\nwhat ?", "a 7")])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said(("system", "Be short."), ("user", "hi"), ("assistant", "yes"))},
        {"system": "Be short.", "messages": said(("user", "hi"), ("assistant", "yes"))},
        {"messages": said(("developer", "Be short."), ("user", "hi"), ("assistant", "yes"))},
        {"conversations": said(("system", " Be short. "), ("human", "hi"), ("gpt", "yes"), keys=("from", "value"))},
    ],
)
def test_a_system_text_goes_before_the_first_question(row):
    whole = {**LLAVA, "id": 5, "kind": "read", "model": "x"}
    assert llava_form(whole) == whole
    assert [turn["value"] for turn in llava_form(row)["conversations"]] == ["Be short.\n\nhi", "yes"]


def test_a_language_model_reads_conversations_as_documents(tmp_path, cache):
    path = tmp_path / "chat.jsonl"
    talk = said(("user", "hi"), ("assistant", "yes"), ("user", "sure ?"), ("assistant", "no"))
    source = CorpusSource(str(path), documents="conversations")
    for row, words in ((LLAVA, "it has images, which a language model does"),):
        path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps(row))
        refuses(f"record '1': {words}", load_rows, source)
    path.write_text(json.dumps({"messages": talk}) + "\n")
    documents = list(iterate_documents(load_rows(source), source))
    assert documents == ["USER: hi ASSISTANT: yes\nUSER: sure ? ASSISTANT: no"]
    assert conversation_document(llava_form({"messages": talk})) == documents[0]
    with pytest.raises(ValueError, match="its columns are messages; conversations are read with documents: conversat"):
        load_rows(CorpusSource(str(path)))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"documents: conversations reads a \.json or \.jsonl file"):
        load_rows(CorpusSource(str(tmp_path / "a.txt"), documents="conversations"))

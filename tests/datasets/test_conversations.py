"""Every form of a conversation becomes LLaVA's, and what cannot be trained on is said in words."""

import json

import pytest

from subtoken_train.datasets.conversations import conversation_document, llava_form
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.types import Turn


def said(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


LLAVA = {
    "image": "a.jpg",
    "conversations": [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "a 7"}],
}
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
    "OpenAI's newer parts": {
        "messages": said(("user", NEWER), ("assistant", [{"type": "output_text", "text": "a 7"}]))
    },
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
    for row, words in (
        ({"conversations": []}, "it has no turns"),
        (LLAVA, "it has images, which a language model does"),
    ):
        path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps(row))
        with pytest.raises(ValueError, match=f"record '1': {words}"):
            load_rows(source)
    path.write_text(json.dumps({"messages": talk}) + "\n")
    documents = [document.text for document in iterate_documents(load_rows(source), source)]
    assert documents == ["USER: hi ASSISTANT: yes\nUSER: sure ? ASSISTANT: no"]
    assert conversation_document(llava_form({"messages": talk}))[0] == documents[0]
    with pytest.raises(ValueError, match="its columns are messages; conversations are read with documents: conversat"):
        load_rows(CorpusSource(str(path)))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"documents: conversations reads a \.json or \.jsonl file"):
        load_rows(CorpusSource(str(tmp_path / "a.txt"), documents="conversations"))

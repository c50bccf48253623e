"""Texts of records: one of which nothing can be seen is refused in every form, and so are media that a text names."""

import json
import re

import pytest

from subtoken_train.datasets.conversations import checked_record
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.own_data import look_into, read_texts
from subtoken_train.datasets.question_table import read_own_table
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.documents import text_problem
from tests.support.refusals import refuses

BLANK = {
    "": "is empty",
    " \n\t": "is empty",
    "\u00a0": "is empty",
    "\ufeff": "holds no visible character",
    "\u200b\u2060 \u00ad": "holds no visible character",
    "\u3164\u2800": "holds no visible character",
    "a\0b": "holds a NUL character",
}
NO_COLUMNS = dict.fromkeys(("image", "question", "answer"))


@pytest.mark.parametrize("text", ["a", " . ", "\u200ba", "e\u0301", "私", "❤\ufe0f", "<image>"])
def test_what_can_be_seen_is_a_text(text):
    assert text_problem(text) is None


def llava(question, answer):
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def openai(question, answer):
    part = [{"type": "text", "text": answer}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": part}]}


@pytest.mark.parametrize("text", BLANK)
@pytest.mark.parametrize("form", [llava, openai])
@pytest.mark.parametrize("place", [0, 1])
def test_of_a_record(tmp_path, cache, text, form, place):
    path = tmp_path / "train.jsonl"
    said = ["hi", "yes"]
    said[place] = text
    path.write_text(json.dumps(form("hi", "yes")) + "\n" + json.dumps({"id": "b", **form(*said)}))
    what = ("a question", "an answer")[place]
    words = re.escape(f"{path}, record 'b': message {place + 1}, {what}, {BLANK[text]}")
    refuses(words, InstructionRecords, path)
    refuses(words, lambda: load_rows(CorpusSource(str(path), documents="conversations")))


def test_an_image_alone_is_a_question_and_what_is_left_out_may_be_empty(tmp_path):
    path = tmp_path / "train.json"
    turns = [{"from": "gpt", "value": ""}, *llava("<image>", "a bus")["conversations"]]
    path.write_text(json.dumps([{"image": "a.png", "conversations": turns}]))
    assert InstructionRecords(path)[0].turns[0].prompt == "<image>"


@pytest.mark.parametrize("text", BLANK)
@pytest.mark.parametrize("column", ["question", "answer"])
def test_of_a_table(tmp_path, text, column):
    row = {"question": "what ?", "answer": "a 7", column: text}
    (tmp_path / "q.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=re.escape(f"q.json, record '0': column '{column}' {BLANK[text]}; fill it")):
        read_own_table(tmp_path / "q.json", NO_COLUMNS)
    if "\0" not in text and "\n" not in text:
        (tmp_path / "q.csv").write_text("question,answer\n" + ",".join(f'"{cell}"' for cell in row.values()) + "\n")
        with pytest.raises(ValueError, match=re.escape(f"q.csv, line 2: column '{column}' {BLANK[text]}; fill it")):
            read_own_table(tmp_path / "q.csv", NO_COLUMNS)


@pytest.mark.parametrize("text", [text for text in BLANK if text.strip()])
def test_of_a_corpus_and_of_text_files(tmp_path, cache, text):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in ("one", " ", "", text)))
    source = CorpusSource(str(path))
    rows = iterate_documents(load_rows(source), source)
    assert next(rows) == "one"
    refuses(re.escape(f"{path}, document 4: it {BLANK[text]}; fix it, or drop it"), next, rows)
    path.unlink()
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.txt").write_text(text)
    if text != "\ufeff":  # a byte-order mark alone is an empty file
        refuses(r"b.txt holds (no|a NUL)", lambda: read_texts(look_into(tmp_path)))


def asked(text, answer="a cat", **fields):
    return {**fields, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]}


SPELT = {
    "Picture 1: <img>0.png</img>\nwhat ?": "<img>0.png</img>",
    "<img>https://a.b/c</img> what ?": "<img>https://a.b/c</img>",
    "<img>my pictures/0 1.JPG</img> what ?": "<img>my pictures/0 1.JPG</img>",
    "(<image>./</image>)\nwhat ?": "<image>./</image>",
    "<video fps=2>clip.mp4</video> what ?": "<video fps=2>clip.mp4</video>",
    "hear <audio>a.wav</audio>": "<audio>a.wav</audio>",
    "<|image_1|>\nwhat ?": "<|image_1|>",
    "<|vision_start|><|image_pad|><|vision_end|>what ?": "<|vision_start|>",
    "<|image: a|> what ?": "<|image: a|>",
    "see <image_placeholder>": "<image_placeholder>",
    "<fake_token_around_image>what ?": "<fake_token_around_image>",
    "<image1>\n<image 2>\nwhich ?": "<image1>",
    "[IMG]what ?": "[IMG]",
    "<Image>\nwhat ?": "<Image>",
    "what ?\n[image]": "[image]",
    "{{image}}\nwhat ?": "{{image}}",
    "<img-url>https://a.b/c</img-url> what ?": "<img-url>https://a.b/c</img-url>",
    "<query_image>\nwhat ?": "<query_image>",
    "<!-- image -->\nwhat ?": "<!-- image -->",
    f"![](data:image/png;base64,{'iVBORw0K' * 9}) what ?": "data:image/png;base64,iVBORw0K",
}


@pytest.mark.parametrize("text", SPELT)
@pytest.mark.parametrize("as_document", [False, True])
def test_a_medium_spelt_in_a_text_is_refused(text, as_document):
    words = rf"^r: a text holds '{re.escape(SPELT[text])}.*, a medium that nothing would read; name it in image, images"
    refuses(words, lambda: checked_record(asked(text), "r", as_document))


def test_marks_of_videos_and_of_other_models_and_in_answers():
    refuses("a text holds '<video>', a medium", lambda: checked_record(asked("<video>\nwhat ?"), "r"))
    for text in ("<video>\nwhat ?", "<image><image>\nwhat ?"):
        checked_record(asked(text), "r", as_document=True)  # marks are text to a language model
    with pytest.raises(ValueError, match=r"a text holds '<img>out.png</img>'"):
        checked_record(asked("<image> draw", "<img>out.png</img>", image="a.png"), "r")
    for text in ("<|image_1|>\nwhat ?", "<image>\n<|image_2|> what ?"):
        with pytest.raises(ValueError, match=r"a text holds '<\|image_\d\|>'.*write <image> or <video> at its place"):
            checked_record(asked(text, image="a.png"), "r")
    checked_record(asked("<image 1>: <image>\nwhat ?", image="a.png"), "r")  # a name beside the mark


TEXTS = [
    "the <box>(1,2),(3,4)</box> of <ref>a dog</ref>",
    "how does the <img> tag differ from <picture> ?",
    "<img> is a tag",
    "use <video> in HTML",
    "<video>text for old browsers</video> in HTML ?",
    "replace <your_image> by a path",
    "<|im_start|>user",
    "mark [image] in a text",
    '<div><img src="logo.png"></div>',
    "![](https://a.b/c.png) in markdown",
    "how long is 'data:image/png;base64,iVBORw0K...' in HTML ?",
    r"\<image>0.png\</image> is how it is written",
    "a" * 200_000 + "<" * 20_000 + "[img" * 5000,
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_about_media_stays_text(text):
    assert checked_record(asked(text), "r")["conversations"][0]["value"] == text


LINKS = [
    "![](i/a b.png) what ?",
    "<img src='i/c.JPG' width=5> what ?",
    "look at i/c.JPG.",
    '{"image": "i/a b.png"} what ?',
    "[[i/c.JPG]]",
]


@pytest.mark.parametrize("text", LINKS)
def test_a_text_that_names_a_file_of_the_folder_is_refused(tmp_path, cache, text):
    (tmp_path / "i").mkdir()
    for name in ("a b.png", "c.JPG"):
        (tmp_path / "i" / name).touch()
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(asked(each)) for each in ("hi", "![](logo.png) ../c.png", text)))
    words = re.escape(f"{path}, record '2': a text names 'i/")
    for read in (InstructionRecords, lambda path: load_rows(CorpusSource(str(path), documents="conversations"))):
        refuses(words, read, path)
    path.write_text(json.dumps(asked(f"<image> {text}", image="i/c.JPG")))  # it has a picture, of which it speaks
    assert len(InstructionRecords(path)) == 1


@pytest.mark.parametrize("numbered", ["messages", "parts"])
def test_what_is_numbered_out_of_order_is_refused(numbered):
    parts = [{"type": "text", "text": word, "index": 1 - place} for place, word in enumerate("ab")]
    talk = [{"role": "user", "content": parts if numbered == "parts" else "a"}, {"role": "assistant", "content": "b"}]
    if numbered == "messages":
        talk = [{**turn, "turn": 2 - place} for place, turn in enumerate(talk)]
    refuses("not in the order of their", checked_record, {"messages": talk}, "r")

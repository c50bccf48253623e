"""Records in every form: right labels for what is obeyed, refusals by file, record and field; their texts and media."""

import json
import re

import pytest

from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.conversations import checked_record
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.own_data import look_into, read_texts
from subtoken_train.datasets.question_table import read_own_table
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.documents import text_problem
from subtoken_train.types import Turn
from tests.support.chats import talk
from tests.support.refusals import refuses

ASKED = {"role": "user", "content": "what ?"}
TALK = [ASKED, {"role": "assistant", "content": "none"}, ASKED, {"role": "assistant", "content": "a 7"}]


def said(*contents, **fields):
    """What a user and an assistant say in turns, and fields beside it."""
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **fields}


def llava(*values, first="human", **fields):
    """The same in LLaVA's form."""
    roles = (("human", "gpt") if first == "human" else ("gpt", "human")) * len(values)
    return {"conversations": [{"from": r, "value": v} for r, v in zip(roles, values, strict=False)], **fields}


def roles(*names):
    return {"messages": [{"role": name, "content": "x"} for name in names]}


def with_message(number, **fields):
    """The talk with fields more in one message."""
    return {"messages": [{**message, **(fields if place == number else {})} for place, message in enumerate(TALK)]}


def beside(**fields):
    """The talk with fields beside it."""
    return {"messages": TALK, **fields}


PART = {"type": "image_url", "image_url": {"url": "a.jpg"}}
TEXT = {"type": "text", "text": "hi"}
WRONG = {
    # turns
    "it has no turns; write": {"instruction": "a", "input": "", "output": "b"},
    "it is a plain text, which a language model reads": {"text": "a"},
    "preferences are not trained; write the chosen answer": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "a turn is not": {"conversations": [{"from": "human"}]},
    "turns come from gpt, human; they must alternate": llava("yes", "hi", first="gpt"),
    "turns come from gpt; they": {"conversations": [{"from": "system", "value": ""}, {"from": "gpt", "value": "a"}]},
    "message 2: unknown role 'asistant'. Did you mean 'assistant'?": roles("user", "asistant"),
    "message 2, an answer, is empty": said("hi", " "),
    "a system message is not text, or is not the first": roles("user", "system", "assistant"),
    "message 2 is an empty list; write a text": said("hi", []),
    "message 1 has a part {'type': 'input_audio'}": said([{"type": "input_audio"}], "a"),
    "message 1 names the image 'https://x/a.jpg'; save it": said([{**PART, "image_url": "https://x/a.jpg"}], "a"),
    "message 1 has a part {'type': 'text', 'text': 'a', 'image': 'b.png'}; a part is either": said(
        [{"type": "text", "text": "a", "image": "b.png"}], "a"
    ),
    "a part of message 1 has image and path, which differ": said(
        [{"type": "image", "image": "a.png", "path": "b.png"}], "a"
    ),
    "message 1 has from and role, which differ": with_message(0, **{"from": "gpt"}),
    "it has conversations and messages, and one of them is read": {**said("hi", "a"), **llava("hi", "a")},
    # pictures and videos
    "image is [1]; a path or a list of paths is needed": llava("<image> hi", "yes", image=[1]),
    "1 <image> for 2 image": llava("<image> hi", "yes", image=["a.jpg", "b.jpg"]),
    "1 <image> but no image": llava("<image> hi", "yes"),
    "a gpt turn holds <image>;": llava("hi", "<image>", image="a.jpg"),
    "images are named in several places": said("<image>", "a", image="a.jpg", images=["a.jpg"]),
    "images are named in several places;": said([PART], "a", image="a.jpg"),
    "videos are named in video and in videos": beside(video="a", videos=["b"]),
    "videos is [5]; a folder of frames": beside(videos=[5]),
    "video is [[]]; a folder": llava("<video> hi", "yes", video=[[]]),
    "video 'd/a.MP4' is a video file, which is not decoded here; make a folder of frames: mkdir d/a && ffmpeg -i "
    "d/a.MP4 -vf fps=1 d/a/%06d.jpg": llava("<video> hi", "yes", video="d/a.MP4"),
    "fps is 0; a number": llava("<video> hi", "yes", video="v", fps=0),
    "1 placeholder(s) of images and 0 of videos for 1 image(s) and 1 video(s)": llava(
        "<image> hi", "yes", image="a.png", video="v"
    ),
    "a gpt turn holds <image> or <video>": llava("<video> hi", "<video>", video="v"),
    # switches and labels
    "message 2 has loss 0.5; true or 1 (learnt) and false or 0": with_message(1, loss=0.5),
    "message 2 has weight [1, 0]; true or 1": with_message(1, weight=[1, 0]),
    "message 2 has loss and weight, which contradict": with_message(1, loss=False, weight=1),
    "message 1, which is not an answer, is marked to be learnt": with_message(0, train=True),
    "none of its answers is trained on": {"messages": [{**message, "loss": False} for message in TALK]},
    # what nobody reads
    "message 1 has 'images', ['a.png']: nothing reads it; drop it, or put it into metadata": with_message(
        0, images=["a.png"]
    ),
    "it has 'sytem', 'Be short.': nothing reads it; did you mean 'system'?": beside(sytem="Be short."),
    "a part of message 1 has 'max_pixels', 99: nothing reads it": said([{**TEXT, "max_pixels": 99}], "a"),
    **{f"it has {name!r}, 'x': nothing reads it; {said}": beside(**{name: "x"}) for said, names in {
        "preferences are not trained; write": "rejected chosen",
        "tool calls are not trained; drop": "tools functions",
        "single tokens cannot be switched; write": "input_ids mask_history token_weights labels",
        "write it in a message: true": "loss loss_mask weight",
        "sound is not read; drop the record": "audio speech",
        "places in a picture are not read; write": "bbox",
        "drop it, or put it into metadata": "objects history skip label kto_tag",
    }.items() for name in names.split()},
    "kind is 5; a text is needed": beside(kind=5),
    "id is True; a text or a number is needed": beside(id=True),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_a_record_is_refused_in_words(tmp_path, words):
    path, row = tmp_path / "train.jsonl", {"id": "b7", **WRONG[words]}
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps(row))
    said = refuses(re.escape(f"{path}, record {str(row['id'])!r}: {words}"), InstructionRecords, path)
    assert len(said) - len(str(tmp_path)) <= 400


def test_what_is_no_object_is_no_record(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"messages": TALK}, ["x"]]))
    refuses("record '1': it has no turns; write", InstructionRecords, tmp_path / "a.json")


def records(folder, *rows):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return InstructionRecords(path)


OFF = {
    "ms-swift": with_message(1, loss=False),
    "axolotl": {"messages": [{**m, "train": place == 3} for place, m in enumerate(TALK)]},
    "OpenAI": with_message(1, weight=0),
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "what ?"},
            {"from": "gpt", "value": "none", "loss": False},
            {"from": "human", "value": "what ?"},
            {"from": "gpt", "value": "a 7", "weight": 1},
        ]
    },
}


@pytest.mark.parametrize("form", OFF)
def test_an_answer_without_loss_is_read_and_not_learnt(tmp_path, tiny_family, form):
    record = records(tmp_path, OFF[form])[0]
    assert record.turns == [Turn("what ?", "none", learnt=False), Turn("what ?", "a 7")]
    both = encode(records(tmp_path, {"messages": TALK})[0], tiny_family, 512, [])
    sample = encode(record, tiny_family, 512, [])
    assert (sample.input_ids, sample.regions) == (both.input_ids, both.regions)
    names = tiny_family.tokenizer.convert_ids_to_tokens
    assert names([token for token in both.labels if token != -100]) == ["none", "</s>", "a", "7", "</s>"]
    assert names([token for token in sample.labels if token != -100]) == ["a", "7", "</s>"]
    start = len(sample.labels) - 3
    assert sample.labels == [-100] * start + sample.input_ids[start:]


@pytest.mark.parametrize("row", [with_message(1, loss=False), {"system": "", **with_message(2, loss=False)}])
def test_without_a_template_nothing_can_be_left_unlearnt(tmp_path, cache, row):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(row))
    source = CorpusSource(str(path), documents="conversations")
    with pytest.raises(ValueError, match="record '0': a message is not to be learnt, and without"):
        list(iterate_documents(load_rows(source), source))


def test_notes_and_empty_fields_are_left_alone(tmp_path):
    deep: list[object] = []
    for _ in range(60):
        deep = [deep]
    refuses("message 2 has 'mood', ", records, tmp_path, with_message(1, mood=deep))
    empty = {"tools": "[]", "videos": None, "objects": {"ref": [], "bbox": []}, "label": None, "audios": []}
    notes = {"id": 3, "source": "a.jpg", "image_id": "x.jpg", "url": "http://a/b.png", "num_frames": 8}
    rest = {"metadata": {"rejected": "x"}, **with_message(1, loss=None, name="Ada", index=7)}
    assert records(tmp_path, {**empty, **notes, **rest})[0].turns == [Turn("what ?", "none"), Turn("what ?", "a 7")]


def test_videos_are_a_list_of_folders_or_frames_and_missing_ones_are_counted(tmp_path):
    talk = [{"role": "user", "content": "<video> <video> what ?"}, TALK[1]]
    seen = records(tmp_path, {"messages": talk, "videos": ["clip", ["f/1.png", "f/2.png"]]})
    frames = (tmp_path / "f/1.png", tmp_path / "f/2.png")
    assert [source.frames for source in seen[0].images] == [tmp_path / "clip", frames]
    assert seen[0].turns == [Turn("<image> <image> what ?", "none")]
    assert seen.sizes().tolist() == [[2, 10]]
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip.jpg").touch()  # a still beside the folder is no frame
    assert [name for folder in seen.compare_images() for name in folder.missing] == ["clip/", "f/1.png", "f/2.png"]


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


def asked(text, answer="a cat", **fields):
    return {**fields, "conversations": talk(text, answer)}


def openai(question, answer):
    part = [{"type": "text", "text": answer}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": part}]}


@pytest.mark.parametrize("text", BLANK)
@pytest.mark.parametrize("form", [asked, openai])
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
    turns = [{"from": "gpt", "value": ""}, *talk("<image>", "a bus")]
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

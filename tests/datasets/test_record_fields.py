"""Records in every form: what is obeyed has the right labels, what cannot be is refused by file, record and field."""

import json
import re

import pytest

from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.types import Turn
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
    missing = [name for folder in seen.compare_images() for name in folder.missing]
    assert missing == ["clip/", "f/1.png", "f/2.png"]

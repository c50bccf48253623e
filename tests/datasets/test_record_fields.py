"""Fields of other trainers: what is obeyed has the right labels, what cannot be is refused by record and field."""

import json

import pytest
import torch
from PIL import Image

from subtoken_train.datasets.collate import Collator, encode
from subtoken_train.datasets.corpus import CorpusSource, iterate_blocks, iterate_documents, load_rows
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.evaluation.tasks.embedded_tasks import instruction_samples
from subtoken_train.types import Region, Turn

ASKED = {"role": "user", "content": "what ?"}
TALK = [ASKED, {"role": "assistant", "content": "none"}, ASKED, {"role": "assistant", "content": "a 7"}]


def records(folder, *rows):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return InstructionRecords(path)


def with_message(number, **fields):
    """The conversation with fields more in one message."""
    return [{**message, **(fields if place == number else {})} for place, message in enumerate(TALK)]


OFF = {
    "ms-swift": {"messages": with_message(1, loss=False)},
    "axolotl": {"messages": [{**m, "train": place == 3} for place, m in enumerate(TALK)]},
    "OpenAI": {"messages": with_message(1, weight=0)},
    "a number": {"messages": with_message(1, loss_scale=0.0)},
    "switches that are off, or say nothing": {"messages": with_message(1, loss=False, ignore=False, skip=0)},
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "what ?"},
            {"from": "gpt", "value": "none", "loss": False},
            {"from": "human", "value": "what ?"},
            {"from": "gpt", "value": "a 7", "weight": 1},
        ]
    },
    "a mask beside the messages": {"messages": TALK, "loss_mask": [0, 0, 0, 1]},
    "a good answer": {"messages": with_message(1, loss=False), "label": True},
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


def test_a_mask_survives_images_batches_and_the_cut(tmp_path, tiny_family):
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    first = [{"role": "user", "content": "<image>\nwhat ?"}, {**TALK[1], "loss": False}, *TALK[2:]]
    seen = records(tmp_path, {"images": ["a.png"], "messages": first}, {"messages": with_message(3, loss=False)})
    batch = Collator(tiny_family, 512)([seen[0], seen[1]])
    words = [tiny_family.tokenizer.convert_ids_to_tokens(row[row != -100].tolist()) for row in batch.labels_BN]
    assert words == [["a", "7", "</s>"], ["none", "</s>"]]
    assert torch.equal(batch.labels_BN[batch.labels_BN != -100], batch.input_ids_BN[batch.labels_BN != -100])
    assert (batch.regions_BN == Region.ANSWER).sum(1).tolist() == [5, 5]
    with pytest.raises(ValueError, match=r"all labels masked, .* before the first answer that is learnt; raise it"):
        encode(seen[0], tiny_family, 74, [Image.new("RGB", (9, 9))])


def test_what_is_not_learnt_is_no_reference(tmp_path):
    mixed = [{"role": "user", "content": "<image> <image> a"}, TALK[1], {**ASKED, "content": "b <image>"}, TALK[3]]
    row = {"image": ["a.png", "b.png", "c.png"], "messages": [*mixed[:3], {**mixed[3], "loss": False}]}
    (sample,) = instruction_samples(records(tmp_path, row))
    assert (sample.prompt, sample.reference["answer"], sample.earlier) == ("<image> <image> a", "none", ())
    assert sample.images == (tmp_path / "a.png", tmp_path / "b.png")


def test_a_language_model_reads_without_loss_too(tmp_path, cache, byte_tokenizer):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": with_message(1, loss=False)}, {"messages": with_message(2, loss=False)}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = CorpusSource(str(path), documents="conversations")
    documents = list(iterate_documents(load_rows(source), source))
    text = "USER: what ? ASSISTANT: none\nUSER: what ? ASSISTANT: a 7"
    assert [document.text for document in documents] == [text, text]
    unlearnt = [[document.text[slice(*span)] for span in document.without_loss] for document in documents]
    assert unlearnt == [[" none"], [" what ?"]]
    tokenizer, length = byte_tokenizer(), 10
    blocks = list(iterate_blocks(documents, tokenizer, length))
    said = lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids)).replace("Ġ", " ").replace("Ċ", "\n")  # noqa: E731
    kept = "".join(
        said([token for place, token in enumerate(block.input_ids) if place and place not in block.without_loss])
        for block in blocks
    )
    stream = "".join(text[:23] + text[28:] + "</s>" if i == 0 else text[:34] + text[41:] + "</s>" for i in range(2))
    assert stream.startswith(kept)
    assert len(stream) - len(kept) < length + len("</s>")
    masked = [[block.input_ids[place] for place in block.without_loss] for block in blocks]
    assert said([token for of_block in masked for token in of_block]) == " none what ?"
    batch = collate_text([TextSample(b.input_ids, 4, 2, "x", b.without_loss) for b in blocks], 0)
    for row, block in enumerate(blocks):
        labelled = [place for place in range(6, length) if place not in block.without_loss]
        assert (batch.labels_BN[row] != -100).nonzero().flatten().tolist() == labelled


SYSTEM = {"role": "system", "content": "Be short.", "loss": False}


def test_a_system_text_shares_the_questions_switch_where_a_document_is_one_text(tmp_path, cache):
    path = tmp_path / "chat.jsonl"
    source = CorpusSource(str(path), documents="conversations")
    path.write_text(json.dumps({"messages": [SYSTEM, *TALK]}))
    assert len(InstructionRecords(path)) == 1  # questions are never learnt there
    with pytest.raises(ValueError, match="record '0': its system text and its first question"):
        list(iterate_documents(load_rows(source), source))
    path.write_text(json.dumps({"messages": [SYSTEM, {**ASKED, "loss": False}, *TALK[1:]]}))
    (document,) = iterate_documents(load_rows(source), source)
    assert [document.text[slice(*span)] for span in document.without_loss] == [" Be short.\n\nwhat ?"]


def test_lists_without_end_are_no_empty_field(tmp_path):
    deep: list[object] = []
    for _ in range(60):
        deep = [deep]
    assert records(tmp_path, {"messages": with_message(1, mood=deep)}).unread == ["message.mood"]


def test_notes_and_empty_fields_are_left_alone_and_unknown_names_reported(tmp_path):
    empty = {"tools": "[]", "videos": None, "objects": {"ref": [], "bbox": []}, "label": None, "audios": []}
    notes = {
        "id": 3,
        "source": "a.jpg",
        "width_list": [5],
        "image_id": "x.jpg",
        "url": "http://a/b.png",
        "channel": "c",
    }
    odd = {"difficulty_of_it": 4, "num_frames": 8, "task_label": "colour", "framework": "x", "constraints": ["a"]}
    seen = records(tmp_path, {**empty, **notes, **odd, "messages": with_message(1, loss=None, mood="calm", name="Ada")})
    unread = ["channel", "constraints", "difficulty_of_it", "framework", "message.mood", "message.name", "task_label"]
    assert seen.unread == unread
    assert seen[0].turns == [Turn("what ?", "none"), Turn("what ?", "a 7")]


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

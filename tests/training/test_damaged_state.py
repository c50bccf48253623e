"""A checkpoint's state is data: damage and foreign content are one worded error, and nothing in it is run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.training import checkpoints
from subtoken_train.training.checkpoints import Marker, read_marker
from subtoken_train.training.trained_tensors import check_resumable, read_state, trained_tensors
from tests.support.faults import Canary, put

SHAPES = {"a": [4, 4]}


class SingleDeviceStrategy:
    """What a marker names."""


TRAINER = SimpleNamespace(strategy=SingleDeviceStrategy(), world_size=1)


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def state(**changes: object) -> dict[str, object]:
    parts = {"loops": {}, "optimizer_states": [], "lr_schedulers": [], "epoch": 0, "global_step": 2, "random_state": []}
    parts["pytorch-lightning_version"] = "2.6.0"
    return {"state_dict": {"a": torch.ones(4, 4)}, **parts, **changes}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    partial = checkpoints.begin(tmp_path, 2)
    (partial / "state.ckpt").write_bytes(saved(state()))
    return checkpoints.seal(partial, Marker(2, 1, "SingleDeviceStrategy", SHAPES))


def refused(checkpoint: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        check_resumable(checkpoint, TRAINER, SHAPES)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_a_whole_one(checkpoint):
    check_resumable(checkpoint, TRAINER, SHAPES)


def test_every_cut_and_every_flipped_bit_is_found(checkpoint):
    path = checkpoint / "state.ckpt"
    content = path.read_bytes()
    assert len(content) > 500
    for place in range(0, len(content), 23):
        path.write_bytes(content[:place])
        refused(checkpoint, "state.ckpt cannot be read as a checkpoint: .*; remove ")
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            found = read_state(path, resumes=True)
        except ValueError:
            continue
        assert torch.equal(found["state_dict"]["a"], torch.ones(4, 4))  # a bit that says nothing (padding, a date)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "has no state_dict"),
        ({}, "has no state_dict"),
        (state(state_dict=[]), "has no state_dict"),
        (state(state_dict={"a": 1}), "a is not a tensor of trainable numbers"),
        (state(state_dict={"a": torch.ones(4, 4, dtype=torch.int32)}), "not a tensor of"),
        (state(state_dict={"a": torch.full((4, 4), float("nan"))}), "tensor a holds NaN"),
        (state(state_dict={"a": torch.ones(5)}), "does not fit this recipe"),
        (state(state_dict={}), "does not fit this recipe"),
        (state(optimizer_states=None), "has no optimizer_states"),
        (state(loops=3), "has no loops"),
        (state(epoch="1"), "has no epoch"),
        (state(**{"pytorch-lightning_version": []}), "has no pytorch-lightning_version"),
    ],
)
def test_states_of_another_kind(checkpoint, content, words):
    (checkpoint / "state.ckpt").write_bytes(saved(content))
    refused(checkpoint, words)


def test_code_in_a_state_is_not_run(checkpoint, tmp_path):
    for content in (saved(state(more=Canary(tmp_path / "ran"))), pickle.dumps(Canary(tmp_path / "ran"))):
        (checkpoint / "state.ckpt").write_bytes(content)
        refused(checkpoint, "cannot be read as a checkpoint")
        with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
            trained_tensors(checkpoint / "state.ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("step", "x"),
        ("step", -1),
        ("step", True),
        ("world_size", 0),
        ("strategy", None),
        ("trained", None),
        ("trained", []),
        ("trained.a", ["4", 4]),
        ("trained.a", 4),
        ("schema_version", "1"),
        ("schema_version", ...),
        ("more", 1),
    ],
)
def test_markers_are_typed(checkpoint, place, value):
    put(checkpoint, "COMPLETE", place, value)
    with pytest.raises(ValueError, match=r"COMPLETE cannot be read .* to continue from an older checkpoint"):
        read_marker(checkpoint)


def test_a_marker_that_names_other_tensors(checkpoint):
    put(checkpoint, "COMPLETE", "trained", {})
    refused(checkpoint, "does not fit this recipe")


def test_a_folder_where_a_file_was_written(checkpoint):
    (checkpoint / "state.ckpt").unlink()
    (checkpoint / "state.ckpt").mkdir()
    refused(checkpoint, "it is missing")

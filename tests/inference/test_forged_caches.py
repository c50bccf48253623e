"""Cache files whose checksum is right and whose content is not: all other checks hold on their own."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from subtoken_train.inference.cache_file import sealed
from tests.inference.test_asking import QUESTIONS


def test_every_byte_counts(saved, tmp_path):
    model, answers, path = saved
    content, draw = path.read_bytes(), torch.Generator().manual_seed(0)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    places = [0, 5, 9, header - 40, header, len(content) - 1]
    places += torch.randint(8, header, (12,), generator=draw).tolist()
    places += torch.randint(header, len(content), (12,), generator=draw).tolist()
    for place in places:
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << (place % 8)
        (tmp_path / "b").write_bytes(spoilt)
        with pytest.raises(ValueError, match=str(tmp_path)) as error:
            model.load_cache(tmp_path / "b")
        assert len(str(error.value)) < 500
    assert model.ask(None, QUESTIONS, max_new_tokens=4) == answers


def parts(path):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return json.loads(metadata["subtoken_cache"].partition(" ")[2]), load_file(path)


def forged(path, record, tensors):
    text = json.dumps(record)
    save_file(tensors, path, sealed(text, tensors))
    return path


def newer(record, tensors):
    record["version"] = 99
    return "has version 99, this version reads up to 4; please upgrade"


def ancient(record, tensors):
    record["version"] = 0
    return "versions count from 1"


def more_tensors(record, tensors):
    tensors["0.0.0.more"] = torch.zeros(2)
    return "1 tensors are not expected: .'0.0.0.more'."


def fewer_tensors(record, tensors):
    del tensors["1.0.0.keys"]
    return r"tensor 1\.0\.0\.keys is missing"


def other_shape(record, tensors):
    tensors["1.0.0.values"] = tensors["1.0.0.values"][:, :, 1:].contiguous()
    return r"tensor 1\.0\.0\.values has shape .*; it must be"


def other_dtype(record, tensors):
    tensors["1.0.0.keys"] = tensors["1.0.0.keys"].half()
    return r"tensor 1\.0\.0\.keys is of float16; it must be of float32"


def not_a_number(record, tensors):
    tensors["1.0.0.keys"][0, 0, 0, 0] = float("nan")
    return "holds NaN or infinity"


def far_away(record, tensors):
    tensors["next_position"] += 2**40
    return "next_position holds numbers outside"


def another_report(record, tensors):
    record["report"]["payload_bytes"] += 1
    return "its report says payload_bytes"


def no_frames(record, tensors):
    record["frames"] = []
    return "1 contexts and 0 frames"


def more_keys(record, tensors):
    record["import"] = "os"
    return "unknown key 'import'"


def other_type(record, tensors):
    record["packed"]["layers"] = 5
    return "it must be a list"


def fewer_layers(record, tensors):
    record["packed"]["layers"].pop()
    return "it has 2 layers, and the model 3"


def no_rows(record, tensors):
    tensors["1.0.0.keys"] = tensors["1.0.0.keys"][:0].contiguous()
    return "keys of 0 rows and"


FORGERIES = [newer, ancient, more_tensors, fewer_tensors, other_shape, other_dtype, not_a_number, far_away]
FORGERIES += [another_report, no_frames, no_rows, more_keys, other_type, fewer_layers]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_right_checksum_is_not_enough(forge, saved, tmp_path):
    record, tensors = parts(saved[2])
    words = forge(record, tensors)
    with pytest.raises(ValueError, match=words) as error:
        saved[0].load_cache(forged(tmp_path / "forged", record, tensors))
    assert "forged" in str(error.value)
    record, tensors = parts(saved[2])
    assert saved[0].load_cache(forged(tmp_path / "forged", record, tensors)).digests == record["contexts"]

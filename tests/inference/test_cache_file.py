"""A saved cache: read back it is what was written, for the model that wrote it and no other, whatever its bytes are."""

import json
import os
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from checkpoints.tiny_llava import build_processor
from subtoken_train import SubTokenModel
from subtoken_train.artifact.folder import tokenizer_digest
from subtoken_train.cache.packed_record import packed_tensors
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.cache_file import VERSION, sealed
from subtoken_train.inference.compression import Compression
from subtoken_train.kernels.formats import FORMATS
from tests.inference.test_asking import CELLS, QUESTIONS, TEXTS, asking, contexts_of
from tests.support.generation_cells import PLAIN
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family

TWO, OWN = {"groups": "2/1"}, {"family": "llava_gqa", "eviction": "own_sets"}
LINEAR = {"family": "llama", "reducer": "none", "selector": "linear"}
SHARED = ("llava", "llava routed", "llama split", "llama pages", "qwen3", "mistral_window")
KINDS = {
    **{name: CELLS[name] for name in SHARED},
    **{name: LINEAR | TWO | {"precision": name} for name, form in FORMATS.items() if form.rounds},
    "stored fill": CELLS["qwen3_vl"],
    "learned fill": CELLS["qwen2_window"],
    "heads of their own": LINEAR | {"eviction": "own_sets"},
    "the same groups for all": LINEAR | {"selector": "leading", "groups": "8/3"},
    "int8 groups": LINEAR | {"groups": "8/3", "precision": "int8"},
    "int4": OWN | TWO | {"precision": "int4", "keys": "cut"},
    "rotated": OWN | TWO | {"precision": "int4_rotated"},
    "kivi4": OWN | TWO | {"precision": "kivi4", "keys": "cut"},
    "bf16": {"family": "llava", "eviction": "own_sets", "precision": "bf16"},
    "merged": {"family": "llama", **PLAIN, "eviction": "h2o", "merge": "weighted"},
}


@sampled("name", KINDS, every=3)
def test_every_kind_of_storage_comes_back(name, tmp_path):
    model, asked = asking(**KINDS[name]), [QUESTIONS[:2], QUESTIONS[:1]]
    answers = model.ask(contexts_of(model), asked, max_new_tokens=4)
    written, path = model.cache, model.cache.save(tmp_path / "mine" / "a.safetensors")
    other = SubTokenModel.around(model.backbone, model.compression)
    read = other.load_cache(str(path))
    record, tensors = packed_tensors(written.packed)
    again, found = packed_tensors(read.packed)
    assert (again, found.keys()) == (record, tensors.keys())
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(*(each.view(torch.uint8) for each in (found[key], tensor))), key
    assert (read.digests, read.frames, read.report) == (written.digests, written.frames, written.report)
    assert other.cache_report() == model.cache_report()
    assert other.ask(None, asked, max_new_tokens=4) == answers
    stored, header = sum(tensor.nbytes for tensor in tensors.values()), struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert path.stat().st_size == 8 + header + stored
    assert stored - written.report.total_bytes < 2048  # positions, and a weight that pieces read as


def on_family(model, **settings):
    family = text_family("llama", **settings)
    return SubTokenModel.around(CompressedBackbone(family, model.backbone.reducer), model.compression)


def of_more_words(model):
    tokenizer = build_processor().tokenizer
    assert tokenizer_digest(tokenizer) == tokenizer_digest(model.tokenizer)
    tokenizer.add_tokens(["zyzzyva"])
    family = TextFamily(model.backbone.family.model, tokenizer)
    return SubTokenModel.around(CompressedBackbone(family, model.backbone.reducer), model.compression)


def other_settings(**settings):
    return lambda model: SubTokenModel.around(model.backbone, Compression(model.compression.eviction, **settings))


def with_levels(**levels):
    return lambda model: asking(**{"family": "llama", **PLAIN, "eviction": "h2o", **levels})


MODELS = {
    "weights": (lambda m: on_family(m, seed=99), r"made by the backbone .*, with other weights; load"),
    "shapes": (lambda m: on_family(m, layers=2), "with an architecture of its own; load the backbone that made it"),
    "adapter": (with_levels(selector="linear"), r"was made with no adapter, and this model has adapter \w{12}"),
    "bf16": (with_levels(precision="bf16"), "is in 'float32' and the model in bfloat16"),
    "eviction": (with_levels(eviction="snapkv"), "another compression: eviction"),
    "keep": (other_settings(keep=0.25), r"another compression: keep 0\.5, and this model has 0\.25; build the model"),
    "reducer": (with_levels(reducer="compactor"), "another token reducer: "),
    "tokenizer": (of_more_words, r"made with another tokenizer \(.*load the tokenizer that made it, or"),
}


@pytest.mark.parametrize(("make", "words"), MODELS.values(), ids=MODELS)
def test_another_model_is_refused(make, words, saved):
    model = make(saved[0])
    assert len(refuses(words, model.load_cache, saved[2])) < 500
    refuses("no context has been compressed yet", model.ask, None, QUESTIONS)


def test_another_training_of_the_same_adapter_is_refused(tmp_path):
    model, other = (asking(family="llama", **PLAIN | {"selector": "linear"}) for _ in range(2))
    model.ask(TEXTS[0], [])
    path = model.cache.save(tmp_path / "a")
    other.load_cache(path)
    with torch.no_grad():
        next(other.backbone.bank.parameters()).mul_(1.001)
    refuses(r"was made with adapter \w{12}, and this model has adapter \w{12}", other.load_cache, path)


def test_other_files_are_refused(saved, tmp_path):
    model, _, path = saved
    content = path.read_bytes()
    save_file({"a": torch.zeros(2)}, tmp_path / "weights")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    files = {"cut": content[:-100], "empty": b"", "short": b"abc", "text": b"hello world, " * 9}
    files |= {"huge header": struct.pack("<Q", 2**62) + content[8:], "pickle": b"\x80\x02cos\nsystem\nq\x00."}
    files["long header"] = struct.pack("<Q", len(content) - 8) + content[8:]
    for name, place in (("a bit of the record", 900), ("the last bit", len(content) - 1)):
        files[name] = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    for name, spoilt in files.items():
        (tmp_path / name).write_bytes(spoilt)
    for name in (*files, "folder", "pipe", "weights", "nowhere"):
        refuses(name, model.load_cache, tmp_path / name)


def test_a_file_is_not_written_over_unless_told(saved, tmp_path):
    model, _, path = saved
    before = path.read_bytes()
    for place, words in ((path, "exists; name another file, or pass overwrite=True"), (tmp_path, "is a folder")):
        refuses(words, model.cache.save, place)
    model.cache.save(path, overwrite=True)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_saved_or_read_back_says_why(tmp_path):
    model = asking(family="llama", **{**PLAIN, "eviction": "h2o"})
    online = SubTokenModel.around(model.backbone, Compression(model.compression.eviction, 8, "tokens", every=4))
    online.ask(TEXTS[0], [])
    with pytest.raises(ValueError, match=r"a cache with eviction_every=4 is not saved: .*; leave eviction_every out"):
        online.cache.save(tmp_path / "a")
    model = asking(family="llama", **{**PLAIN, "selector": "linear"})
    with torch.autocast("cpu", torch.bfloat16):
        model.ask(TEXTS[0], [])
    with pytest.raises(ValueError, match=r"is not saved, because it could not be read back: .*without torch\.autocast"):
        model.cache.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_settings_that_leave_the_same_cache_are_the_same(saved):
    model, answers, path = saved
    method = model.compression.eviction
    for same in ({"scope": "context"}, {"merge": method.merges}, {"prefill_chunk": 16}):
        other = SubTokenModel.around(model.backbone, Compression(method, 0.5, **same))
        other.load_cache(path)
        assert other.ask(None, QUESTIONS, max_new_tokens=4) == answers


def test_how_a_tokenizer_is_used_does_not_matter(saved, tmp_path, monkeypatch):
    model, _, path = saved
    tokenizer, before = model.tokenizer, tokenizer_digest(model.tokenizer)
    tokenizer(["a bee", "the sun and the tree"], padding=True, truncation=True, max_length=3)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    assert tokenizer_digest(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == before
    assert SubTokenModel.around(model.backbone, model.compression).load_cache(path).digests == model.cache.digests


def test_a_cache_of_the_first_version_is_read_with_a_warning(saved, tmp_path):
    model, answers, path = saved
    record, tensors = parts(path)
    del record["model"]["tokenizer"]
    other = SubTokenModel.around(model.backbone, model.compression)
    for version in (1, VERSION):
        forged(tmp_path / f"{version}", {**record, "version": version}, tensors)
    with pytest.warns(SubTokenWarning, match=r"was saved by version 0\.2, which did not note the tokenizer"):
        other.load_cache(tmp_path / "1")
    assert other.ask(None, QUESTIONS, max_new_tokens=4) == answers
    refuses("not a cache of this model: its model names no tokenizer", other.load_cache, tmp_path / f"{VERSION}")


@pytest.mark.parametrize(
    ("groups", "precision", "read"), [("8/3", "int8", False), ("8/3", "fp32", True), ("8/8", "int8", True)]
)
def test_a_cache_of_the_second_version_with_a_scale_per_group_is_refused(groups, precision, read, tmp_path):
    model = asking(**{**PLAIN, "family": "llama", "selector": "linear", "groups": groups, "precision": precision})
    asked = [QUESTIONS[:2], QUESTIONS[:1]]
    answers = model.ask(contexts_of(model), asked, max_new_tokens=4)
    record, tensors = parts(model.cache.save(tmp_path / "new.safetensors"))
    old = forged(tmp_path / "old.safetensors", {**record, "version": 2}, tensors)
    other = SubTokenModel.around(model.backbone, model.compression)
    if not read:
        refuses(r"has version 2, whose int8 value groups have a scale each.*compress", other.load_cache, old)
        return
    other.load_cache(old)
    assert other.ask(None, asked, max_new_tokens=4) == answers


def parts(path):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return json.loads(metadata["subtoken_cache"].partition(" ")[2]), load_file(path)


def forged(path, record, tensors):
    save_file(tensors, path, sealed(json.dumps(record), tensors))
    return path


def cut(tensors, name, *place):
    tensors[name] = tensors[name][place].contiguous()


ALL = slice(None)
FORGERIES = {
    "newer": (lambda r, t: r.update(version=99), "has version 99; 1 to 4 are read: please upgrade"),
    "ancient": (lambda r, t: r.update(version=0), "has version 0; 1 to 4"),
    "more tensors": (lambda r, t: t.update({"0.0.0.more": torch.zeros(2)}), "1 tensors are not expected"),
    "fewer tensors": (lambda r, t: t.pop("1.0.0.keys"), r"tensor 1\.0\.0\.keys is missing"),
    "shape": (lambda r, t: cut(t, "1.0.0.values", ALL, ALL, slice(1, None)), r"1\.0\.0\.values has shape .* must be"),
    "dtype": (lambda r, t: t.update({"1.0.0.keys": t["1.0.0.keys"].half()}), "is of float16; it must be of float32"),
    "nan": (lambda r, t: t["1.0.0.keys"][0, 0, 0].fill_(float("nan")), "holds NaN or infinity"),
    "far away": (lambda r, t: t["next_position"].add_(2**40), "next_position holds numbers outside"),
    "report": (lambda r, t: r["report"].update(payload_bytes=1), "its report says payload_bytes"),
    "no frames": (lambda r, t: r.update(frames=[]), "1 contexts and 0 frames"),
    "no rows": (lambda r, t: cut(t, "1.0.0.keys", slice(0)), "keys of 0 rows and"),
    "more keys": (lambda r, t: r.update({"import": "os"}), "unknown key 'import'"),
    "type": (lambda r, t: r["packed"].update(layers=5), "it must be a list"),
    "fewer layers": (lambda r, t: r["packed"]["layers"].pop(), "it has 2 layers, and the model 3"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_right_checksum_is_not_enough(name, saved, tmp_path):
    (forge, words), (record, tensors) = FORGERIES[name], parts(saved[2])
    forge(record, tensors)
    assert "forged" in refuses(words, saved[0].load_cache, forged(tmp_path / "forged", record, tensors))
    record, tensors = parts(saved[2])
    assert saved[0].load_cache(forged(tmp_path / "forged", record, tensors)).digests == record["contexts"]

"""``ask``: a context is compressed once, each question answered as if alone; a saved cache is what was written."""

import json
import os
import struct

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from checkpoints.tiny_llava import build_processor
from subtoken_train import SubTokenModel
from subtoken_train.artifact.folder import tokenizer_digest
from subtoken_train.cache.packed_record import packed_tensors
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.families.images import Video
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.cache_file import VERSION, sealed
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.inference.text_prompts import encode_text, text_batch
from subtoken_train.kernels.formats import FORMATS
from tests.support.generation_cells import CELL, PLAIN
from tests.support.helpers import compress
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.truth_cells import backbone_of, compression_of

PICTURES = [Image.effect_noise((90, 60), 80).convert("RGB"), Image.new("RGB", (64, 96), (200, 40, 40))]
TEXTS = [
    "the bee and the spider met in the garden . " * 5,
    "a cat and a dog sat on the red mat , and it was not blue . " * 3,
]
QUESTIONS = ["is there a 7 ?", "what is at C4 ? and at D2 ?", "describe ."]
CELLS = {
    "llava": {"family": "llava", "eviction": "snapkv"},
    "llava routed": {"family": "llava_gqa", "eviction": "ada(knorm)", "precision": "int8"},
    "qwen2_5_vl": {"family": "qwen2_5_vl", "reducer": "fastv_decoder", "selector": "gated", "eviction": "none"},
    "qwen3_vl": {"family": "qwen3_vl", "reducer": "visionzip", "selector": "mean", "eviction": "h2o"},
    "internvl": {"family": "internvl", **PLAIN, "eviction": "kvcompose"},
    "glm4v": {"family": "glm4v", "reducer": "fastv_embeds", "selector": "linear", "eviction": "knorm"},
    "mistral3": {"family": "mistral3", "reducer": "visionzip", "selector": "linear", "eviction": "snapkv"},
    "smolvlm": {"family": "smolvlm", "reducer": "fastv_embeds", "selector": "linear", "eviction": "none"},
    "llava_next": {"family": "llava_next", **PLAIN, "eviction": "expected_attention", "precision": "int4"},
    "llava_onevision": {"family": "llava_onevision", **PLAIN, "eviction": "random"},
    "llama": {"family": "llama", "reducer": "none", "selector": "linear", "eviction": "snapkv"},
    "llama split": {"family": "llama", "reducer": "compactor", "selector": "value_norm", "eviction": "none"},
    "llama pages": {"family": "llama", **PLAIN, "eviction": "quest_steps"},
    "qwen3": {"family": "qwen3", **PLAIN, "eviction": "kvcompose", "keys": "cut"},
    "llama turned": {"family": "llama", **PLAIN, "eviction": "snapkv", "keys": "turned"},
    "mistral_window": {"family": "mistral_window", **PLAIN, "eviction": "ada(knorm)"},
    "qwen2_window": {"family": "qwen2_window", "reducer": "none", "selector": "mean", "eviction": "none"},
}
SEE = ["llava", "qwen2_5_vl", "internvl", "llava_next", "llava_onevision", "qwen3_vl", "smolvlm", "mistral3", "glm4v"]


def asking(**levels: str) -> SubTokenModel:
    cell = CELL | levels
    return SubTokenModel.around(backbone_of(cell), compression_of(cell))


def contexts_of(model: SubTokenModel) -> list:
    return PICTURES if model.backbone.family.sees_images else TEXTS


def whole_prompt(model: SubTokenModel, context, question: str):
    """Context and question as one prompt, as ``inputs`` and the evaluation make it."""
    family = model.backbone.family
    if not family.sees_images:
        return text_batch(family, [encode_text(family, context + question, context_characters=len(context))])
    inputs = model.inputs(question, [context])
    return batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)


@sampled("name", CELLS, every=4)
def test_many_questions_are_as_one_on_a_fresh_cache(name):
    model, settings = asking(**CELLS[name]), {"max_new_tokens": 4}
    context = contexts_of(model)[0]
    together = model.ask(context, QUESTIONS, **settings)
    held = model.cache.report
    assert together == [model.ask(context, [question], **settings)[0] for question in QUESTIONS]
    assert model.ask(None, QUESTIONS[::-1], **settings) == together[::-1]
    assert model.cache_report() == model.cache.report == held
    assert held.tail_bytes == held.slack_bytes == 0
    if CELLS[name]["eviction"] != "random":  # which reads the record's name
        settings |= {"compression": model.compression, "protocol": "context_first"}
        whole = [generate_batch(model.backbone, whole_prompt(model, context, each), **settings) for each in QUESTIONS]
        assert together == [outcome.text.strip() for (outcome,) in whole]
    assert len(set(together)) > 1, "questions that are not read have one answer"


def test_a_hundred_questions_run_their_context_once():
    """No layer sees more rows than the context's and those of question and answer."""
    model, rows = asking(**CELLS["llama"]), []
    watched = model.backbone.family.decoder.layers[0]
    questions = [f"is there a {number} ?" for number in range(100)]
    with watched.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0] * args[0].shape[1])):
        said = model.ask(TEXTS[0], questions, max_new_tokens=2)
        assert rows[0] > sum(rows[1:]) / 100 > 1
        before = len(rows)
        assert model.ask(None, questions, max_new_tokens=2) == said
    assert sum(rows[before:]) == sum(rows[1:before])


@sampled("name", CELLS, every=4)
def test_contexts_together_are_as_one_by_one(name):
    model = asking(**CELLS[name])
    contexts, settings = contexts_of(model), {"max_new_tokens": 4}
    questions = [QUESTIONS, QUESTIONS[1:2]]
    alone = [model.ask(each, own, **settings) for each, own in zip(contexts, questions, strict=True)]
    assert model.ask(contexts, questions, **settings) == alone
    assert model.ask(None, [questions[0], []], **settings) == [alone[0], []]
    assert model.ask(contexts[1:], [[QUESTIONS[0]]], **settings) == [model.ask(contexts[1], QUESTIONS[:1], **settings)]


def test_several_pictures_and_a_video_are_one_context():
    model = asking(family="qwen2_5_vl", **PLAIN)
    video = Video([PICTURES[1]] * 4, fps=2.0)
    for context in (PICTURES, [PICTURES[0], video]):
        got = model.ask(context, QUESTIONS, max_new_tokens=5)
        assert got == [model.chat(question, context, max_new_tokens=5, do_sample=False) for question in QUESTIONS]
    both = model.ask([PICTURES, video], [QUESTIONS, QUESTIONS[:1]], max_new_tokens=5)
    assert both == [model.ask(PICTURES, QUESTIONS, max_new_tokens=5), model.ask(video, QUESTIONS[:1], max_new_tokens=5)]


@sampled("name", SEE, every=3)
def test_a_system_prompt_stands_beside_pictures_as_in_a_chat(name):
    """Formats that put pictures before all words have it between them and the question."""
    model, told = asking(family=name, **PLAIN), {"role": "system", "content": "answer in a word ."}
    asked = [{"role": "user", "content": f"<image>\n<image>\n{question}"} for question in QUESTIONS]
    said = model.ask(PICTURES, QUESTIONS, system=told["content"], max_new_tokens=5)
    assert said == [model.chat([told, each], PICTURES, max_new_tokens=5, do_sample=False) for each in asked]
    assert said != model.ask(PICTURES, QUESTIONS, max_new_tokens=5)
    refuses("the system prompt contains <image> or <video>", model.ask, PICTURES, QUESTIONS, system="look at <image>")


def test_eviction_while_decoding_begins_anew_for_every_question():
    family = text_family("llama", max_position_embeddings=512)
    compression = Compression(build_eviction("streaming_llm", sinks=1), 8, "tokens", every=4)
    model = SubTokenModel.around(compress(family), compression)
    got = model.ask(TEXTS[0], QUESTIONS, max_new_tokens=24)
    assert got == [model.ask(TEXTS[0], [question], max_new_tokens=24)[0] for question in QUESTIONS]
    assert got != SubTokenModel.around(compress(family)).ask(TEXTS[0], QUESTIONS, max_new_tokens=24)


def test_an_answer_ends_where_the_model_says(monkeypatch):
    """Chat models end a turn with a token that is not the tokenizer's end of text."""
    model = asking(family="llama", **PLAIN)
    (whole,) = model.ask(TEXTS[0], QUESTIONS[:1], max_new_tokens=8)
    ends = [model.tokenizer.eos_token_id, model.tokenizer(whole, add_special_tokens=False)["input_ids"][2]]
    monkeypatch.setattr(model.backbone.model.generation_config, "eos_token_id", ends)
    (short,) = model.ask(None, QUESTIONS[:1], max_new_tokens=8)
    assert whole.startswith(short)
    assert len(model.tokenizer(short, add_special_tokens=False)["input_ids"]) <= 3


MISTAKES = {
    "a text": (lambda m: m.ask(TEXTS[0], "why ?"), "questions must be a list of texts, not str"),
    "no questions": (lambda m: m.ask(["why ?"]), "questions must be a list of texts, not none"),
    "numbers": (lambda m: m.ask(TEXTS[0], [5]), "a question is of type int, not a text"),
    "mixed": (lambda m: m.ask(TEXTS[0], ["a", ["b"]]), "a question is of type list, not a text"),
    "empty": (lambda m: m.ask(TEXTS[0], ["  "]), "a question is empty"),
    "half a character": (lambda m: m.ask(TEXTS[0], ["a\ud800"]), "half of a surrogate pair"),
    "empty context": (lambda m: m.ask(" ", ["why ?"]), "and a context is empty"),
    "a picture": (lambda m: m.ask(PICTURES[0], ["why ?"]), "reads texts, and a context is Image, not text"),
    "one list": (lambda m: m.ask(TEXTS, ["why ?"]), "one list of questions for 2 contexts; give a list for each"),
    "one context": (lambda m: m.ask(TEXTS[0], [["a"], ["b"]]), "2 lists of questions for 1 contexts"),
    "too few": (lambda m: m.ask(TEXTS, [["a"]]), "1 lists of questions for 2 contexts; give a list for each"),
    "other contexts": (lambda m: m.ask(None, [["a"], ["b"]]), "2 lists of questions for 1 contexts"),
    "tokens": (lambda m: m.ask(None, ["a"], max_new_tokens=1.5), "max_new_tokens=1.5 must be a whole number"),
}


def test_after_a_mistake_the_model_serves_the_next_call():
    model = asking(family="llama", **PLAIN)
    expected = model.ask(TEXTS[0], QUESTIONS[:1], max_new_tokens=2)
    for call, words in MISTAKES.values():
        refuses(words, call, model)
        assert model.ask(None, QUESTIONS[:1], max_new_tokens=2) == expected, "the context before stays"


LLAVA, LLAMA = {"family": "llava", **PLAIN}, {"family": "llama", **PLAIN}
NO_PICTURE = "llava sees images: a context is an image or a list of images"
MARKED = "a question holds <image>; all pictures belong to the context"
READS = "ask compresses before any question is seen, but .*{}.*; use generate"
REFUSED = {
    "aircache": (LLAVA | {"eviction": "aircache"}, PICTURES[0], READS.format("'aircache' reads the attention")),
    "quest": (LLAMA | {"reducer": "quest"}, TEXTS[0], READS.format("reducer 'quest' chooses by the question")),
    "routers": (LLAMA | {"selector": "query"}, TEXTS[0], READS.format("the routers are conditioned on the question")),
    "no picture": (LLAVA, [], NO_PICTURE),
    "a number": (LLAVA, 5, NO_PICTURE),
    "a path": (LLAVA, [PICTURES[0], "a.png"], "image 2 is not an image; open it with PIL first"),
    "a mark": (LLAVA, PICTURES[0], MARKED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contexts_that_cannot_be_are_refused(name):
    levels, context, words = REFUSED[name]
    model = asking(**levels)
    refuses(words, lambda: model.ask(context, ["what <image> ?"] if name == "a mark" else QUESTIONS))
    if name != "a mark":
        refuses(r"no context has been compressed yet; call ask\(context, questions\)", lambda: model.cache)


@pytest.mark.parametrize("chunk", [None, 3])
def test_padding_before_a_short_question_is_nowhere_below_0(chunk, monkeypatch):
    """Ministral 3 takes the logarithm of positions: of rows 16 before the text it would be infinite."""
    family, positions = text_family("ministral3"), []
    model, through = SubTokenModel.around(compress(family).eval(), Compression(prefill_chunk=chunk)), family.through
    texts, questions = ["a cat", "a red dog"], [["describe ."], ["what is at C4 ? and at D2 ? " * 4]]

    def noted(layers, hidden, mask, position, *rest, **options):
        positions.append(int(position.min()))
        return through(layers, hidden, mask, position, *rest, **options)

    alone = [model.ask(text, own, max_new_tokens=4) for text, own in zip(texts, questions, strict=True)]
    monkeypatch.setattr(family, "through", noted)
    assert model.ask(texts, questions, max_new_tokens=4) == alone
    assert min(positions) == 0


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

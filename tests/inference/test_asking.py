"""``ask``: a context is compressed once, before any question, and every question is answered as if it were alone."""

import pytest
from PIL import Image

from subtoken_train import SubTokenModel
from subtoken_train.evictions import build_eviction
from subtoken_train.families.images import Video
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.inference.text_prompts import encode_text, text_batch
from tests.support.generation_cells import CELL, PLAIN
from tests.support.helpers import compress
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
    third = model.tokenizer(whole, add_special_tokens=False)["input_ids"][2]
    ends = [model.tokenizer.eos_token_id, third]
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

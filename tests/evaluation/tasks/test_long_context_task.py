"""Questions in the chat template, and compressed with the context: kvpress's token ids, derived from a template."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.ruler import MAKERS, asked_parts
from subtoken_train.inference.text_prompts import encode_chat
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.vqa_cases import refused

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CONTEXT, QUESTION, PREFIX = "The magic number of kite is 7. \n", "What is the number of kite? ", " The number is"


@pytest.fixture
def family():
    tokenizer = build_tokenizer()
    found = text_family("llama", vocab_size=len(tokenizer))
    found.processor = tokenizer
    found.processor.chat_template = CHATML
    found.model.config.max_position_embeddings = 8192
    return found


def kvpress_ids(tokenizer, context, question, answer_prefix, query_aware):
    """Ids of context and question: a separator in the template, its text cut there, both parts encoded alone."""
    if query_aware:
        context, question = context + question, ""
    mark = "#" * (len(context) + 10)
    turn = [{"role": "user", "content": context + mark}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    head, suffix = text.split(mark)
    return [tokenizer.encode(each, add_special_tokens=False) for each in (head, question + suffix + answer_prefix)]


def ids_of(family, sample):
    """(context, rest) of a sample as the runner encodes it."""
    batch, _ = model_inputs([sample], family, "text", None)
    ids, codes = batch.input_ids_BN[0], batch.regions_BN[0]
    assert set(codes.tolist()) <= {int(Region.CONTEXT), int(Region.QUERY)}
    return ids[codes == Region.CONTEXT].tolist(), ids[codes == Region.QUERY].tolist()


def ruler_folder(tmp_path):
    text = CONTEXT + "What is the special magic number? "
    rows = [
        {"index": 0, "input": text + "The special magic number is", "outputs": ["7"]},
        {"index": 1, "input": text, "outputs": ["7"], "answer_prefix": "It is"},
    ]  # as older and newer programs write them
    path = tmp_path / "niah_single_1" / "validation.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@sampled("question", ["kept", "compressed"], every=2)
def test_rulers_ids_are_kvpresss(family, tmp_path, question):
    task = build_task("ruler", ruler_folder(tmp_path), tasks=["niah_single_1"], chat=True, question=question)
    asked = "What is the special magic number? "
    for sample, prefix in zip(task.samples(), ("The special magic number is", "It is"), strict=True):
        expected = kvpress_ids(family.tokenizer, CONTEXT, asked, prefix, question == "compressed")
        assert list(ids_of(family, sample)) == expected
        assert family.tokenizer.decode(expected[1]).endswith(f"assistant\n<think>\n\n</think>\n\n{prefix}")


@sampled("name", MAKERS, every=3)
@sampled("question", ["kept", "compressed"], every=4)
def test_the_synthetic_tasks_ids_are_kvpresss(family, name, question):
    options = {"tasks": [name], "length": 700, "samples_per_task": 1}
    (sample,) = build_task("ruler_synthetic", chat=True, question=question, **options).samples()
    (plain,) = build_task("ruler_synthetic", **options).samples()
    context, rest = plain.prompt[: plain.context_characters], plain.prompt[plain.context_characters :]
    asked, prefix = asked_parts(rest, name)
    assert asked
    assert prefix.startswith(("The special magic", "Answer:"))
    expected = kvpress_ids(family.tokenizer, context, asked, prefix, question == "compressed")
    assert list(ids_of(family, sample)) == expected
    assert sample.prompt == plain.prompt


@sampled("context", ["", "  spaces around  ", "(the question stands here) twice", "## " * 9, "\n\n"], every=5)
def test_any_context_is_cut_where_it_ends(family, context):
    ids = encode_chat(family, context, QUESTION, PREFIX)
    expected = kvpress_ids(family.tokenizer, context, QUESTION, PREFIX, False)
    assert [list(ids.input_ids[: ids.context_length]), list(ids.input_ids[ids.context_length :])] == expected


def test_raw_text_compresses_up_to_the_answer_prefix(family, tmp_path):
    folder = ruler_folder(tmp_path)
    kept, compressed = (
        build_task("ruler", folder, tasks=["niah_single_1"], question=question).samples()[0]
        for question in ("kept", "compressed")
    )
    assert kept.prompt == compressed.prompt
    assert kept.prompt[: kept.context_characters] == CONTEXT
    assert kept.prompt[compressed.context_characters :] == "The special magic number is"
    first, second = ids_of(family, compressed)
    assert first + second == family.tokenizer.encode(kept.prompt)
    assert family.tokenizer.decode(second).strip() == "The special magic number is"


@pytest.mark.slow
def test_longbench_compresses_up_to_its_last_line(tmp_path, family):
    row = {"input": "Who?", "context": "Some text.", "answers": ["Ann"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    options = {"sets": ["hotpotqa"]}
    kept, compressed = (
        build_task("longbench", tmp_path, question=question, **options).samples()[0]
        for question in ("kept", "compressed")
    )
    assert kept.prompt[: kept.context_characters].endswith("Some text.")
    assert compressed.prompt[: compressed.context_characters].endswith("Question: Who?\n")
    assert compressed.prompt[compressed.context_characters :] == "Answer:"
    chat = replace(compressed, chat=True)
    first, second = ids_of(family, chat)
    assert "Question: Who?" in family.tokenizer.decode(first)
    assert family.tokenizer.decode(second).startswith("Answer:<|im_end|>")


@pytest.mark.slow
def test_a_tokenizer_without_a_template_is_refused(family, tmp_path):
    family.processor.chat_template = None
    sample = build_task("ruler", ruler_folder(tmp_path), tasks=["niah_single_1"], chat=True).samples()[0]
    with pytest.raises(ValueError, match=r"'niah_single_1-0': the tokenizer has no chat template; .*chat: false"):
        model_inputs([sample], family, "text", None)


def test_a_file_without_an_answer_prefix_is_named(tmp_path):
    path = tmp_path / "vt" / "validation.jsonl"
    path.parent.mkdir()
    text = "VAR A = 1\nQuestion: Find all variables that are assigned the value 1."
    path.write_text(json.dumps({"index": 0, "input": text, "outputs": ["A"]}), encoding="utf-8")
    assert build_task("ruler", tmp_path, tasks=["vt"]).samples()
    refused(r"validation.jsonl, line 1: no answer prefix \(Answer: ...\)", "ruler", tmp_path, tasks=["vt"], chat=True)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_says_how_it_asks(name):
    task = build_task(name)
    if task.modality == "image":
        assert task.asks == "in the family's chat format; question kept"
    else:
        assert task.asks.startswith("raw text, no chat template; ")
    assert not task.compresses_question


def test_what_a_task_says_follows_its_options():
    task = build_task("ruler", chat=True, question="compressed")
    assert (task.asks, task.compresses_question) == ("in the chat template; question compressed", True)


@pytest.mark.slow
@torch.no_grad()
def test_an_eviction_sees_the_question_before_it_is_followed(family, tmp_path):
    """Context first: what is compressed ends with the question, and only the answer prefix is appended in full."""
    from subtoken_train.cache.cache import PackedCache
    from subtoken_train.evictions import build_eviction
    from subtoken_train.inference.compression import Compression
    from subtoken_train.inference.prefill import contexts_of, open_prompts
    from tests.support.helpers import compress

    backbone = compress(family, None, name="none").eval()
    task = build_task("ruler", ruler_folder(tmp_path), tasks=["niah_single_1"], chat=True, question="compressed")
    batch, _ = model_inputs(task.samples()[:1], family, "text", None)
    text = family.tokenizer.decode(contexts_of(batch).input_ids_BN[0])
    assert text.endswith("What is the special magic number? ")
    context = int((batch.regions_BN == Region.CONTEXT).sum())
    for protocol in ("context_first", "query_aware"):
        cache = PackedCache(3)
        method = build_eviction("snapkv", window=4)
        opened = open_prompts(backbone, batch, cache, Compression(method, 0.5), protocol)
        rest = 0 if protocol == "context_first" else int((batch.regions_BN == Region.QUERY).sum())
        kept = [int((layer.heads_BNh[0, :, 0] if layer.heads_BNh is not None else layer.entries_BN >= 0).sum())
                for layer in opened.plan.layers]  # fmt: skip
        assert kept == [context // 2 + rest] * 3

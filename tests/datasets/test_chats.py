"""Conversations in a tokenizer's template: only answers are learnt, the long first question is the context."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from subtoken_train.datasets.chats import ChatLimits, chat_sample
from subtoken_train.datasets.conversations import chat_messages, llava_form
from subtoken_train.datasets.corpus import CorpusSource, load_rows
from subtoken_train.datasets.datamodule import CorpusDataModule
from subtoken_train.datasets.record_format import answer_is_learnt, used_turns
from subtoken_train.datasets.text_batches import collate_text
from subtoken_train.errors import SubTokenWarning
from subtoken_train.inference.text_prompts import encode_messages
from subtoken_train.types import Region
from tests.support.chats import CHATML, IM, LLAMA2, MARKED, THINKING, byte_level, published
from tests.support.places import ROOT, real_folder
from tests.support.refusals import refuses

LIMITS = ChatLimits(length=400, context=300, asking=24)
END = "<|im_end|>"


def talk(*said, system=None, **switches):
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    for place, loss in switches.items():
        messages[int(place[1:])]["loss"] = loss
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def family(template=CHATML):
    return SimpleNamespace(tokenizer=byte_level(template))


def sample_of(row, template=CHATML, limits=LIMITS):
    conversation = json.dumps(llava_form(row, as_document=True))
    return chat_sample({"name": "chat 1", "conversation": conversation}, family(template), limits)


def parts(sample):
    """The texts of a sample's regions, and what of it is learnt."""
    batch, tokenizer = collate_text([sample], 0), family().tokenizer
    ids, regions, labels = batch.input_ids_BN[0], batch.regions_BN[0], batch.labels_BN[0]
    texts = {region: tokenizer.decode(ids[regions == region].tolist()) for region in Region}
    return texts, tokenizer.decode(labels[labels != -100].tolist())


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_assistants_say_is_learnt(template):
    texts, learnt = parts(sample_of(talk("hi", "yes", "sure ?", "no", system="Be short."), template))
    assert learnt == f"yes{END}no{END}"
    assert texts[Region.SYSTEM] == f"<|im_start|>system\nBe short.{END}\n<|im_start|>user\n"
    assert texts[Region.QUERY].startswith(f"hi{END}\n<|im_start|>assistant\n\n<|im_start|>user\nsure ?")
    assert texts[Region.ANSWER] == learnt
    assert texts[Region.CONTEXT] == ""


@pytest.mark.parametrize("question", ["hi", "A fact. " * 30 + "\n\nWhat ?", "A fact. " * 30])
def test_a_prompt_is_laid_out_as_it_is_asked(question):
    row = talk("before", "yes", question, "no", system="Be short.", m1=False)
    sample = sample_of(row, limits=ChatLimits(1000, 900, 64))
    asked = encode_messages(family(), row["messages"][:-1])
    assert tuple(sample.input_ids[: sample.prompt_length]) == asked.input_ids
    assert (sample.system_length, sample.context_length) == (asked.system_length, asked.context_length)


def test_switches_of_records_are_obeyed():
    texts, learnt = parts(sample_of(talk("one ?", "a b", "two ?", "c d", "three ?", "e f", m1=False, m5=False)))
    assert learnt == texts[Region.ANSWER] == f"c d{END}"
    assert texts[Region.CONTEXT] == f"one ?{END}\n<|im_start|>assistant\na b"


@pytest.mark.parametrize("template", [LLAMA2, THINKING])
def test_other_templates(template):
    _, learnt = parts(sample_of(talk("hi", "yes", "sure ?", "no"), template))
    assert re.sub(r"<think>\s*</think>|\s|<[^>]*>", "", learnt) == "yesno"


def test_the_system_prompt_stays_where_a_template_writes_a_prompt_otherwise_once_it_is_answered():
    opening = "<|im_start|>assistant\\n"
    assert opening in CHATML
    template = CHATML.replace(opening, opening + "<think>\\n")
    texts, learnt = parts(sample_of(talk("A fact. " * 20, "yes", system="Be short."), template))
    assert "Be short." in texts[Region.SYSTEM]
    assert texts[Region.CONTEXT].strip().startswith("A fact.")
    assert learnt.endswith(f"yes{END}")


@pytest.mark.parametrize("answer", ["Paris.", "<think>\nhm\n</think>\n\nParis."])
def test_as_asked_only_the_last_answer_is_learnt_behind_the_prompt_that_asks_for_it(answer):
    made = SimpleNamespace(tokenizer=published("DeepSeek-R1-Distill"))
    row = talk("A fact. " * 20, "yes", "Capital ?", answer, "Thanks", "Bye", m5=False)
    conversation = {"name": "chat 1", "conversation": json.dumps(llava_form(row, as_document=True))}
    sample = chat_sample(conversation, made, replace(LIMITS, as_asked=True))
    assert tuple(sample.input_ids[: sample.prompt_length]) == encode_messages(made, row["messages"][:3]).input_ids
    learnt = made.tokenizer.decode(sample.input_ids[sample.prompt_length :])
    assert learnt == answer.removeprefix("<think>\n") + made.tokenizer.eos_token


@pytest.mark.filterwarnings("ignore:.*chats have no context")
def test_a_form_that_is_not_asked_in_is_told(short):
    settings = {"block_length": 400, "context_length": 300, "prefix_tokens": 24}
    data = CorpusDataModule(short, **settings)
    data._rehearsed_family = SimpleNamespace(tokenizer=published("DeepSeek-R1-Distill"))
    with pytest.warns(
        SubTokenWarning, match=r"writes .*Assistant.* before an answer .*<think>.*set data\.as_asked: true"
    ):
        data.setup("fit")
    data = CorpusDataModule(short, **settings, chat_template_kwargs={"enable_thinking": False})
    qwen3 = SimpleNamespace(tokenizer=published("Qwen3"))
    with pytest.warns(SubTokenWarning, match="before an earlier answer in a conversation"):
        batch = next(data.samples(qwen3, 1))
    learnt = batch.labels_BN[0] != -100
    asked = qwen3.tokenizer.decode(batch.input_ids_BN[0][~learnt])
    assert asked.rstrip("\n").endswith("<|im_start|>assistant\n<think>\n\n</think>")
    assert set(qwen3.tokenizer.decode(batch.labels_BN[0][learnt]).split()) == {"yes", IM}
    data._rehearsed_family = family()
    with pytest.raises(ValueError, match=r"data\.prefix_tokens is 0, and the prompt of a chat must ask"):
        next(CorpusDataModule(short, **{**settings, "prefix_tokens": 0}).samples(family(), 1))
    refuses("reads none", data.setup, "fit")
    texts = CorpusDataModule(replace(short, documents="rows", column="messages"), **settings, as_asked=True)
    texts._rehearsed_family = family()
    texts._raw_train = [{"messages": "x"}]
    refuses(r"data\.as_asked and data\.chat_template_kwargs are for chats", texts._check_form)
    with pytest.raises(ValueError, match=r"^data\.repeat_context is for text that is no chat; leave it out$"):
        next(CorpusDataModule(short, **settings, repeat_context=True).samples(family(), 1))


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        (talk("hi", "yes", system="Be short."), LLAMA2, r"cannot be filled: .*Only user and assistant roles"),
        (talk("hi", "yes"), CHATML.replace("m.content +", "m.content | upper +"), r"does not write what the .* says"),
        (talk("hi", "yes", "x" * 400, "no"), CHATML, None),
        (talk("x" * 400, "no"), CHATML, r"all labels masked, its \d+ tokens were cut to max_length 400 before"),
        (talk("x" * 350, "no"), CHATML, r"its context has \d+ tokens, more than context_length 300"),
    ],
)
def test_what_cannot_be_trained_is_named(row, template, words):
    if words is None:
        assert len(sample_of(row, template).input_ids) == LIMITS.length
        return
    refuses(f"^chat 1: .*{words}", sample_of, row, template)


@pytest.fixture
def short(tmp_path, cache):
    """60 short chats, their lengths mixed, and two with a context."""
    rows = [talk(f"{i} " + "? " * (7 * i % 40), "yes " * (1 + i % 5)) for i in range(60)]
    rows += [talk("A fact. " * (20 + i) + "\n\nWhat ?", "yes") for i in range(2)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CorpusSource(str(tmp_path / "chats.jsonl"), documents="conversations")


def test_short_chats_are_padded_among_their_like_and_those_without_a_context_are_counted(short):
    data = CorpusDataModule(short, block_length=400, context_length=300, prefix_tokens=99, batch_size=4)
    data._rehearsed_family = family()
    with pytest.warns(SubTokenWarning, match=r"60 of 62 chats have no context .a first question of 99 tokens or fewer"):
        data.setup("fit")
    lengths = np.array([len(data._train[i].input_ids) for i in range(62)])
    batches = np.array(list(data.training_order()))[:60].reshape(-1, 4)
    assert sum(lengths[batch].max() * len(batch) for batch in batches) <= 1.2 * lengths[batches].sum()
    batch = next(data.samples(family(), 1, 4))
    assert batch.record_ids[0].endswith("chats.jsonl, record '0'")


def test_smollm2s_template(cache):
    tokenizer = AutoTokenizer.from_pretrained(real_folder("smollm2"))
    rows = list(load_rows(CorpusSource(str(ROOT / "data/samples/chats/chats.jsonl"), documents="conversations")))
    for row in rows:
        sample = chat_sample(row, SimpleNamespace(tokenizer=tokenizer), ChatLimits(2048, 1024, 64))
        turns = used_turns(json.loads(row["conversation"]))[1::2]
        said = [turn["value"] + END for turn in turns if answer_is_learnt(turn)]
        labels = collate_text([sample], 0).labels_BN[0]
        assert tokenizer.decode(labels[labels != -100].tolist()) == "".join(said)
        whole = tokenizer.apply_chat_template(chat_messages(json.loads(row["conversation"])), return_dict=False)
        assert list(sample.input_ids) == whole
    assert len(rows) == 12

"""Chats with a language model: transformers' ids and answers, regions, questions about one context, and mistakes."""

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from subtoken_train import SubTokenModel
from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.records import Record
from subtoken_train.datasets.text_batches import QUERY_TOKENS
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.chat_template import messages_of
from subtoken_train.inference import compressed_context
from subtoken_train.inference.compressed_context import CompressedContext, context_batches
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.inference.text_prompts import further_turns, text_frame
from subtoken_train.types import Region, Turn
from tests.support.chats import CHATML, LLAMA2, MISTRAL, PUBLISHED, byte_level
from tests.support.places import real_folder
from tests.support.refusals import refuses, refusing
from tests.support.text_families import text_family

SYSTEM = {"role": "system", "content": "Answer in one word."}
ASKED = {"role": "user", "content": "What is the capital of France?"}
TALK = [Turn("What is the capital of France?", "Paris."), Turn("And of Peru?")]
PROMPTS = [ASKED["content"], TALK, [SYSTEM, ASKED], [SYSTEM, *messages_of(TALK)]]
LONG = "the bee and the spider met in the garden . " * 12
REAL = [pytest.param(name, marks=pytest.mark.slow) for name in ("smollm2", "qwen05")]
PICTURE = Image.new("RGB", (40, 40), (200, 40, 40))


def chatting(template: str | None = CHATML, **settings) -> SubTokenModel:
    model, tokenizer = text_family(vocab_size=400).model, byte_level()
    tokenizer.chat_template = template
    model.generation_config.eos_token_id = [2, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.generation_config.pad_token_id = 0
    return SubTokenModel(model, tokenizer, **settings)


def test_a_chat_is_that_of_transformers():
    model, greedy = chatting(), {"do_sample": False}
    bare, tokenizer, prompt = model.backbone.model, model.tokenizer, PROMPTS[3]
    for each in PROMPTS:
        wanted = tokenizer.apply_chat_template(read_messages(each)[0], add_generation_prompt=True)
        assert model.inputs(each)["input_ids"].tolist() == [wanted["input_ids"]]
    wanted = tokenizer.apply_chat_template(read_messages(prompt)[0], add_generation_prompt=True, return_tensors="pt")
    out = bare.generate(**wanted, max_new_tokens=6, **greedy)
    assert torch.equal(model.generate(**model.inputs(prompt), max_new_tokens=6, **greedy), out)
    answer = tokenizer.decode(out[0, wanted["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert model.chat(prompt, max_new_tokens=6, **greedy) == answer


def regions(model: SubTokenModel, prompt) -> dict[str, str]:
    made = model.inputs(prompt)
    codes, ids = made["regions"][0], made["input_ids"][0]
    assert codes.tolist() == sorted(codes.tolist())
    return {each.label: model.tokenizer.decode(ids[codes == each]) for each in Region if bool((codes == each).any())}


def test_the_system_stays_and_the_last_question_asks():
    model, opening, tail = chatting(), "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    head, context = f"<|im_start|>system\n{SYSTEM['content']}{opening}", f"{TALK[0].prompt}{tail}Paris."
    assert regions(model, [SYSTEM, ASKED]) == {"system": head, "query": ASKED["content"] + tail}
    told = {"system": head, "context": context, "query": f"{opening}And of Peru?{tail}"}
    assert regions(model, [SYSTEM, *messages_of(TALK)]) == told
    blank, long = regions(model, f"{LONG}\n\n{LONG[:80]}?"), regions(model, LONG)
    assert blank["context"].rstrip() == LONG.rstrip()
    assert blank["query"].lstrip().startswith(LONG[:80])
    asks = long["query"].removesuffix(tail)
    assert len(model.tokenizer.encode(asks, add_special_tokens=False)) == QUERY_TOKENS
    assert long["context"] + asks == LONG


def test_regions_reach_the_cache():
    model = chatting(eviction="snapkv", eviction_keep=0.25)
    made = model.inputs([SYSTEM, {"role": "user", "content": LONG}])
    model.generate(**made, max_new_tokens=2)
    system, context = (int((made["regions"] == region).sum()) for region in (Region.SYSTEM, Region.CONTEXT))
    assert torch.equal(model.last.batch.regions_BN, made["regions"])
    for layer in model.last.plan.layers:
        assert set(range(system)) <= set(layer.entries_BN[0].tolist())
    assert model.cache_report().realised_fraction == pytest.approx(0.25, abs=0.01)
    model.generate(**made, context_length=system + 10, max_new_tokens=2)
    assert int((model.last.batch.regions_BN == Region.CONTEXT).sum()) == 10 < context
    for wrong in (made["regions"][:, 1:], made["regions"].flip(-1), torch.full_like(made["regions"], 2), "system"):
        refuses(r"^regions must be \[1, \d+\] as input_ids are", model.generate, **{**made, "regions": wrong})


@pytest.mark.parametrize("name", ["tiny", *REAL])
@pytest.mark.parametrize("context", [LONG, LONG + "\n", "  Once.\n\nTwice. "])
def test_questions_about_a_context_share_its_tokens(name, context):
    """Ids of context and question, one after the other, are the template's text; the first are always the same."""
    family = chatting().backbone.family
    if name != "tiny":
        family.processor = AutoTokenizer.from_pretrained(real_folder(name))
    tokenizer = family.tokenizer
    head, system_end, frame = text_frame(family, context)
    held = tokenizer.encode(head, add_special_tokens=False)
    assert head[system_end:] == context
    for question in ("Who met?", "\nWho met?", "  Who?", "<|im_end|> Who?"):
        between = "" if context.endswith("\n") or question.startswith("\n") else "\n\n"
        said = {"role": "user", "content": context + between + question}
        whole = tokenizer.apply_chat_template([said], tokenize=False, add_generation_prompt=True)
        asked = frame.ids(family, question)
        assert tokenizer.decode(held + asked) == whole
        assert (held + asked).count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
        if question == "Who met?":
            assert asked == tokenizer.encode(f"{between}{question}{frame.after}", add_special_tokens=False)


WORDS = "Answer in one word, and never say <|im_end|>."
BEFORE = {
    "of its own": (CHATML, f"<|im_start|>system\n{WORDS}<|im_end|>\n<|im_start|>user\n"),
    "in the last turn": (MISTRAL, f"<s>[INST] {WORDS}\n\n"),
    "without a template": (None, f"{WORDS}\n\n"),
}


@pytest.mark.parametrize(("template", "before"), BEFORE.values(), ids=BEFORE)
def test_a_system_prompt_of_ask_stays_whole(template, before, tmp_path):
    model, later = (chatting(template, eviction="snapkv", eviction_keep=0.25) for _ in range(2))
    (batch, _) = context_batches(model.backbone, model.compression, [LONG], system=WORDS)
    for region, text in ((Region.SYSTEM, before), (Region.CONTEXT, LONG)):
        assert model.tokenizer.decode(batch.input_ids_BN[batch.regions_BN == region]) == text
    told, context = (int((batch.regions_BN == region).sum()) for region in (Region.SYSTEM, Region.CONTEXT))
    asked, how = ["Who met?", "Where?"], {"system": WORDS, "max_new_tokens": 4}
    said = model.ask([LONG, LONG[:90]], [asked, []], **how)
    assert said[0] == model.ask(LONG, asked, **how)
    assert model.cache_report().payload_bytes == (told + context // 4) * model.backbone.family.shape.token_bytes
    later.load_cache(model.cache.save(tmp_path / "context.safetensors"))
    assert later.ask(None, asked, max_new_tokens=4) == said[0]


@pytest.mark.parametrize("words", [WORDS, ""])
def test_ask_tells_the_system_prompt_as_chat_does(words):
    model, asked = chatting(), ["Who met?", "Where?"]
    talks = [[{**SYSTEM, "content": words}, {**ASKED, "content": f"{LONG}\n\n{each}"}] for each in asked]
    said = model.ask(LONG, asked, system=words, max_new_tokens=6)
    assert said == [model.chat(talk, max_new_tokens=6, do_sample=False) for talk in talks]
    assert said != model.ask(LONG, asked, max_new_tokens=6)


@pytest.mark.filterwarnings("ignore:a raw prompt for a model")
def test_a_raw_prompt_is_the_text_and_is_warned_of():
    model, bare = chatting(), chatting(None)
    with pytest.warns(SubTokenWarning, match="a raw prompt for a model with a chat template") as said:
        made = model.inputs("<s>go on", raw=True)
    assert len(said) == 1
    assert made["input_ids"].tolist() == [model.tokenizer("<s>go on")["input_ids"]]
    assert made.keys() == bare.inputs("<s>go on").keys() == {"input_ids", "attention_mask"}
    assert torch.equal(bare.inputs("go on", raw=True)["input_ids"], bare.inputs("go on")["input_ids"])
    given = {"questions": ["\nWho?"], "max_new_tokens": 6}
    plain, told = bare.ask(LONG, **given), bare.ask(f"Be brief.\n\n{LONG}", **given)
    assert model.ask(LONG, raw=True, **given) == plain  # what the system says is a text before the context
    assert model.ask(LONG, system="Be brief.", raw=True, **given) == told
    assert bare.ask(LONG, system=" Be brief.\n", **given) == told != plain
    assert bare.ask(LONG, system=" ", **given) == plain


@pytest.mark.filterwarnings("ignore:a raw prompt for a model")
def test_the_space_before_a_continuation_stays(monkeypatch):
    model, going_on = chatting(), [ASKED, {"role": "assistant", "content": "It is"}]
    ids = model.tokenizer("  Paris \n", add_special_tokens=False)["input_ids"]

    def answered(backbone, cache, logits, most, ended):
        for token in ids if ended else ():
            ended([torch.tensor([token])])
        return torch.tensor([ids]), torch.tensor([len(ids)])

    generated = torch.tensor([ids])
    monkeypatch.setattr(SubTokenModel, "generate", lambda _, input_ids, **more: torch.cat([input_ids, generated], 1))
    monkeypatch.setattr(compressed_context, "greedy_tokens", answered)
    assert [model.chat(prompt) for prompt in ("hi", [ASKED], going_on)] == ["Paris", "Paris", "  Paris"]
    assert [chatting(None).chat("The capital is", raw=raw) for raw in (False, True)] == ["Paris", "  Paris"]
    assert model.chat("The capital is", raw=True) == "  Paris"
    assert model.ask(LONG, ["Who?"], raw=True) == ["  Paris"]
    assert "".join(model.ask(None, "Who?", stream=True)) == "  Paris"
    assert model.ask(LONG, ["Who?"]) == ["Paris"]
    assert "".join(model.ask(None, "Who?", stream=True)) == "Paris"


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek-R1-Distill", "Llama-2"])
def test_a_last_message_of_the_assistant_is_gone_on_with(name):
    model, talk = chatting(PUBLISHED[name].template), [ASKED, {"role": "assistant", "content": "the bee"}]
    wanted = model.tokenizer.apply_chat_template(talk, continue_final_message=True)["input_ids"]
    for prompt in (talk, [Turn(ASKED["content"], "the bee")]):
        made = model.inputs(prompt)
        assert made["input_ids"].tolist() == [wanted]
        assert made["regions"][0, -1] == Region.QUERY


def test_formats_that_are_no_template_go_on_too(vlm_adapter):
    bare, seeing = chatting(None), SubTokenModel.from_pretrained(vlm_adapter)
    for model, mark, said in ((bare, "", "it </s> is"), (seeing, "<image>\n", "there is a 7")):
        asked = [{"role": "user", "content": f"{mark}is it </s> ?"}, {"role": "assistant", "content": said}]
        shown = [PICTURE] if mark else []
        head, ids = (model.inputs(talk, shown)["input_ids"][0].tolist() for talk in (asked[:1], asked))
        assert ids[: len(head)] == head
        assert model.tokenizer.decode(ids[len(head) :]).strip() == said
        assert ids.count(model.tokenizer.eos_token_id) == 0


def test_the_chat_template_gets_its_variables():
    model, off = chatting(PUBLISHED["Qwen3"].template), {"chat_template_kwargs": {"enable_thinking": False}}
    wanted = model.tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, enable_thinking=False)
    assert model.inputs([ASKED], **off)["input_ids"].tolist() == [wanted["input_ids"]]
    assert model.chat([ASKED], max_new_tokens=3, **off) is not None
    model.ask(LONG, ["Who?"], max_new_tokens=2, **off)
    assert model.cache.frames[0].after.endswith("<think>\n\n</think>\n\n")
    model.ask(LONG, ["Who?"], max_new_tokens=2)
    assert model.cache.frames[0].after.endswith("<|im_start|>assistant\n")


def test_without_a_template_turns_are_written_as_in_training():
    family = chatting(None).backbone.family
    model = SubTokenModel.around(chatting(None).backbone)
    sample = encode(Record("r", [], [*TALK[:1], Turn("And of Peru?", "Lima")]), family, 4096, [], generation=True)
    assert model.inputs(TALK)["input_ids"][0].tolist() == sample.input_ids
    told = model.inputs([SYSTEM, *messages_of(TALK)])
    assert "USER: Answer in one word.\n\nWhat is" in model.tokenizer.decode(told["input_ids"][0])


def test_messages_are_turns_for_a_model_that_sees(vlm_adapter):
    model = SubTokenModel.from_pretrained(vlm_adapter)
    turns = [Turn("Be brief.\n\n<image>\nwhat is it ?", "red"), Turn("sure ?")]
    part, text = {"type": "image", "image": PICTURE}, {"type": "text", "text": "what is it ?"}
    asked, red = said("Be brief.", role="system")[0], said("red", role="assistant")
    talk = [*said([part, text]), *red, *said("sure ?")]
    made, wanted = model.inputs([asked, *talk]), model.inputs(turns, PICTURE)
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    del part["image"]
    assert torch.equal(model.inputs([asked, *talk], [PICTURE])["input_ids"], wanted["input_ids"])
    refuses("message 3 is the system's where the assistant's is due", model.inputs, [asked, talk[0]] * 2, PICTURE)
    refuses("raw is for language models", model.inputs, "hi", PICTURE, raw=True)


def said(*contents, role="user", **more):
    return [{"role": role, "content": each, **more} for each in contents]


def chat(*given, **more):
    return lambda model: model.chat(*given, **more)


def ask(context=LONG, **more):
    return lambda model: model.ask(context, ["x"], **more)


ONLY, SYSTEM_WORDS = "template reads only enable_thinking", {"system": "Be brief."}
QWEN = PUBLISHED["Qwen3"].template
REFUSED = {
    "no message": (CHATML, chat([]), "the prompt has no message"),
    "no prompt": (CHATML, chat(None), "the prompt is of type NoneType; a prompt is a text, a list of Turn, or a list"),
    "a text among messages": (CHATML, chat([ASKED, "hi"]), "message 2 is of type str"),
    "role": (CHATML, chat(said("hi", role="usr")), "unknown role of message 1 'usr'. Did you mean 'user'"),
    "no content": (CHATML, chat([{"role": "user"}]), "message 1 says null; its content is a text, or a list of parts"),
    "part": (CHATML, chat(said([{"type": "audio"}])), "message 1 has a part .*audio.*; parts are text, image or video"),
    "text part": (CHATML, chat(said([{"type": "text"}])), "message 1 has a part"),
    "path": (CHATML, chat(said([{"type": "image", "image": "a.png"}])), "message 1 names the image 'a.png', but files"),
    "image": (CHATML, chat(said([{"type": "image", "image": PICTURE}])), "takes text, and no images"),
    "field": (CHATML, chat(said("hi", tool_calls=[1])), "message 1 has 'tool_calls', which is not read"),
    "unasked": (CHATML, chat(said("ho", role="assistant")), "the last message is the assistant's, and nothing is"),
    "system last": (CHATML, chat([ASKED, SYSTEM]), "the last message is the system's"),
    "empty": (CHATML, chat(said("hi", " ")), "the prompt is empty"),
    "half a character": (CHATML, chat(said("a\ud800")), "half of a surrogate pair"),
    "raw": (None, chat([ASKED], raw=True), "a raw prompt is one text"),
    "roles": (LLAMA2, chat([SYSTEM, ASKED]), "chat template cannot be filled: Only user and assistant roles"),
    "no system": (LLAMA2, ask(**SYSTEM_WORDS), "Only user and assistant roles are supported"),
    "mute": ("{{ messages[-1].content }}", ask(**SYSTEM_WORDS), "does not write what the system says"),
    "no text": (CHATML, ask(system=SYSTEM), "system is of type dict; give the system prompt as a text"),
    "half a system": (CHATML, ask(system="\ud800"), r"^the system prompt holds half of a surrogate pair"),
    "late system": (CHATML, ask(None, **SYSTEM_WORDS), "system says how to read a context; give it with the context"),
    "variable": (QWEN, chat("hi", chat_template_kwargs={"enable_thinkin": 1}), ONLY),
    "variable of ask": (QWEN, ask(chat_template_kwargs={"thinking": 1}), ONLY),
    "unused variable": (None, chat("hi", chat_template_kwargs={"x": 1}), "which is not used here; leave them out"),
    "turns": (None, lambda m: further_turns(m.backbone.family, [ASKED]), "the tokenizer has no chat template"),
}
test_what_is_no_conversation_is_refused = refusing(REFUSED, lambda template, call: call(chatting(template)))


def test_a_line_break_of_the_question_never_takes_the_template_away():
    model = chatting()
    batch, frames = context_batches(model.backbone, model.compression, [LONG], by_system=True)
    context = CompressedContext.of(model.backbone, model.compression, batch, frames)
    with pytest.raises(ValueError, match="num_beams and num_return_sequences do not go with a question"):
        context.generate([5], context.packed.branch(), num_return_sequences=2, do_sample=True)
    ids = [*batch.input_ids_BN[0].tolist(), *frames[0].ids(model.backbone.family, "\nWho?")]
    asked = "<|im_end|>\n<|im_start|>user\n\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.decode(ids) == f"<|im_start|>system\n{LONG.strip()} {asked}"

"""The server, asked by OpenAI's own client and by plain HTTP: the library's answers, contexts, streams, refusals."""

import base64
import json
import os
import re
import socket
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from inspect import getclosurevars
from pathlib import Path

import openai
import pytest
from PIL import Image

from subtoken_train.inference import decode_step
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.serving.chat_request import Limits
from subtoken_train.types import Turn
from tests.inference.test_messages import chatting
from tests.support import chat_servers
from tests.support.chat_servers import KNORM, LLAMA, MARK, TEXT, about, image_part, said, serving_model, text_part
from tests.support.chats import CHATML
from tests.support.places import ROOT

PICTURE = ROOT / "data/samples/a.png"
LIMITS = Limits(400, 2, 10**6, ("knorm", "keydiff", "none"), (0.1, 0.8))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    with serving_model(ArmSpec(backbone=LLAMA, **KNORM), LIMITS, folder=folder, max_body=300_000, queue=3) as served:
        yield served


@pytest.fixture(scope="module")
def llava():
    with serving_model(ArmSpec(backbone=chat_servers.LLAVA, **KNORM), LIMITS) as served:
        yield served


def refusal(served, status, messages="Hi", **settings):
    """The words of a request that is refused."""
    with pytest.raises(openai.APIStatusError) as caught:
        served.ask(messages, **settings)
    assert caught.value.status_code == status
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    return caught.value.body["message"]


def test_a_greedy_answer_is_the_librarys_own(llama):
    long = TEXT + "\n\nWhat is a traceback?"
    reply = llama.ask(long)
    alone = SubTokenModel.from_pretrained(LLAMA, **KNORM)
    assert said(reply) == alone.chat([{"role": "user", "content": long}], max_new_tokens=8)
    report, usage = alone.cache_report(), reply.usage
    assert (usage.cache_bytes, usage.dense_cache_bytes) == (report.total_bytes - report.slack_bytes, report.dense_bytes)
    assert usage.cache_bytes < 0.7 * usage.dense_cache_bytes
    assert usage.prompt_tokens == alone.last.batch.input_ids_BN.shape[1]
    assert (usage.completion_tokens, reply.choices[0].finish_reason) == (8, "length")
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_pieces_are_the_whole_answer_and_draws_are_repeated_by_their_seed(llama):
    whole = llama.ask("What is a list?", max_tokens=24)
    chunks = list(llama.ask("What is a list?", max_tokens=24, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, pieces)) == said(whole)
    assert len(list(filter(None, pieces))) > 10
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage) == (whole.choices[0].finish_reason, whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in llama.ask("Hi", max_tokens=2, stream=True))
    drawn = [said(llama.ask("What is a list?", temperature=1.5, top_p=0.9, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_two_questions_about_one_text_compress_it_once_for_each_eviction(llama):
    questions, before = ["\n\nWhat is a traceback?", "\n\nWhat does try do?"], llama.health()["contexts"]
    replies = [llama.ask(about(TEXT, each)) for each in questions]
    alone = SubTokenModel.from_pretrained(LLAMA, **KNORM)
    assert list(map(said, replies)) == alone.ask(TEXT, questions, max_new_tokens=8)
    after = llama.health()["contexts"]
    assert (after["compressed"] - before["compressed"], after["found"] - before["found"]) == (1, 1)
    assert [each.usage.prompt_tokens_details.cached_tokens for each in replies] == [0, alone.cache.packed.prompt_length]
    assert replies[0].usage.cache_bytes < 0.7 * replies[0].usage.dense_cache_bytes
    others = {"eviction_keep": 0.2}, {"eviction": "keydiff", "eviction_keep": 0.2}, {"eviction": "none"}
    told = [llama.ask(about(TEXT, questions[0]), max_tokens=1, extra_body=chosen) for chosen in others]
    held = [reply.usage.cache_bytes for reply in told]
    assert held[0] == held[1] < 0.4 * held[2]
    assert llama.health()["contexts"]["compressed"] == before["compressed"] + 4


def test_a_saved_context_is_asked_by_its_name(llama):
    alone = SubTokenModel.from_pretrained(LLAMA, **KNORM)
    wanted = alone.ask(TEXT, ["\n\nWhy?"], max_new_tokens=8)
    alone.cache.save(llama.answerer.contexts.folder / "manual.safetensors", overwrite=True)
    replies = [llama.ask("\n\nWhy?", extra_body={"context": "manual"}) for _ in range(2)]
    assert [said(each) for each in replies] == wanted * 2
    assert replies[1].usage.prompt_tokens_details.cached_tokens == alone.cache.packed.prompt_length
    other = {"eviction": "keydiff", "eviction_keep": 0.5}
    for status, words, messages, more in (
        (404, "no saved context 'manuel'", "Hi", {"context": "manuel"}),
        (400, "also names a file", "Hi", {"context": "../manual"}),
        (400, "made with another compression", "Hi", {"context": "manual", **other}),
        (400, "a saved context has its own system prompt and pictures", about(TEXT, "Why?"), {"context": "manual"}),
    ):
        assert words in refusal(llama, status, messages, extra_body=more)


def test_a_picture_is_compressed_once_and_a_conversation_goes_on(llava):
    picture = Image.open(PICTURE).convert("RGB")
    asked, plain = text_part("what is at C4 ?"), image_part(chat_servers.data_url(picture))
    first = {"role": "user", "content": [plain | MARK, asked]}
    answer = said(llava.ask([first]))
    alone = SubTokenModel.from_pretrained(chat_servers.LLAVA, **KNORM)
    assert [answer] == alone.ask(picture, ["what is at C4 ?"])
    followed = [{"role": "assistant", "content": answer}, {"role": "user", "content": "and at D2 ?"}]
    assert llava.ask([first, *followed]).usage.prompt_tokens_details.cached_tokens == alone.cache.packed.prompt_length
    assert llava.health()["contexts"]["compressed"] == 1
    # uncompressed, it is the conversation that chat reads
    unmarked, none = {"role": "user", "content": [plain, asked]}, {"extra_body": {"eviction": "none"}}
    marked, whole = (llava.ask([each, *followed], **none) for each in (first, unmarked))
    assert (said(marked), marked.usage.prompt_tokens) == (said(whole), whole.usage.prompt_tokens)
    again = SubTokenModel.from_pretrained(chat_servers.LLAVA, **KNORM)
    assert said(llava.ask([unmarked])) == again.chat("what is at C4 ?", [picture])


def test_a_marked_system_prompt_is_the_context_of_a_chat():
    model, document = chatting(eviction="knorm", eviction_keep=0.25), TEXT[:300]
    told = {"role": "developer", "content": [text_part(document, cache_control={"type": "ephemeral", "ttl": "1h"})]}
    talk = [told, *({"role": role, "content": role} for role in ("user", "assistant", "user"))]
    whole = [{"role": "system", "content": document}, *talk[1:]]
    with serving_model(ArmSpec(backbone="random", eviction="knorm", eviction_keep=0.25), LIMITS, model=model) as served:
        first, reply = served.ask([told, {"role": "user", "content": "What ?"}]), served.ask(talk)
        assert reply.usage.prompt_tokens_details.cached_tokens > 200
        assert reply.usage.prompt_tokens == model.inputs(whole)["input_ids"].shape[1]
        assert first.usage.cache_bytes < 0.6 * first.usage.dense_cache_bytes
        assert said(served.ask(talk, extra_body={"eviction": "none"})) == chatting().chat(whole, max_new_tokens=8)
        assert "the first question about a context is the user's" in refusal(served, 400, [told, talk[2], talk[1]])


def test_two_messages_in_a_row_and_marks_in_texts_of_a_model_that_sees_images(llava):
    alone, picture = SubTokenModel.from_pretrained(chat_servers.LLAVA, **KNORM), Image.open(PICTURE).convert("RGB")
    shown, told = image_part(chat_servers.data_url(picture)), {"role": "system", "content": "say <image> ."}
    apart = [{"role": "user", "content": [shown]}, {"role": "user", "content": "what is at C4 ?"}]
    assert said(llava.ask(apart)) == alone.chat("<image>\nwhat is at C4 ?", [picture])
    reply = llava.ask([told, {"role": "user", "content": [shown, text_part(r"is \<image> at C4 ?")]}])
    wanted = [Turn("say \\<image> .\n\n<image>\nis \\\\<image> at C4 ?")]
    assert reply.usage.prompt_tokens == alone.inputs(wanted, [picture])["input_ids"].shape[1]
    assert said(reply) == alone.chat(wanted, [picture], max_new_tokens=8)
    marked = llava.ask([told, {"role": "user", "content": [shown | MARK, text_part("is <image> at C4 ?")]}])
    escaped = {"system": "say \\<image> .", "max_new_tokens": 8}
    assert [said(marked)] == alone.ask(picture, ["is \\<image> at C4 ?"], **escaped)


ASKED = "{{ '<|im_start|>assistant\\n' }}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
THINKS = CHATML.replace(ASKED, ASKED + OFF)


def test_thinking_and_an_answer_that_is_gone_on_with():
    kwargs, knorm = {"enable_thinking": False}, {"eviction": "knorm", "eviction_keep": 0.5}
    alone, asked = chatting(THINKS, **knorm), about(TEXT[:300], "What ?")
    talk = [{"role": "user", "content": TEXT[:300]}, {"role": "assistant", "content": "It is"}]
    off, how = {"extra_body": {"chat_template_kwargs": kwargs}}, {"max_new_tokens": 8}
    with serving_model(ArmSpec(backbone="random", **knorm), model=chatting(THINKS, **knorm)) as served:
        for messages, settings, variables in ((talk[:1], {}, None), (talk[:1], off, kwargs), (talk, {}, None)):
            reply = served.ask(messages, **settings)
            made = alone.inputs(messages, chat_template_kwargs=variables)
            assert reply.usage.prompt_tokens == made["input_ids"].shape[1]
            assert said(reply) == alone.chat(messages, chat_template_kwargs=variables, **how)
        first = served.ask(asked, **off)
        assert [said(first)] == alone.ask(TEXT[:300], ["What ?"], chat_template_kwargs=kwargs, **how)
        assert first.usage.prompt_tokens != served.ask(asked).usage.prompt_tokens
        assert served.ask([*asked, talk[1]]).usage.completion_tokens == 8
        words = refusal(served, 400, extra_body={"chat_template_kwargs": {"enable_thinkin": False}})
        assert "chat_template_kwargs have 'enable_thinkin', but the tokenizer's chat template reads only" in words
        for ends in ({"continue_final_message": True}, {"add_generation_prompt": False}):
            assert "only a last message of the assistant can be continued" in refusal(
                served, 400, talk[:1], extra_body=ends
            )
            assert said(served.ask(talk, extra_body=ends)) == said(served.ask(talk))
        assert "can be continued" in refusal(served, 400, talk, extra_body={"continue_final_message": False})


def bomb(side):
    """A PNG that says it is large, and holds nothing."""

    def chunk(kind, content):
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_pictures_that_are_refused(llava, monkeypatch):
    decoded = "subtoken_train.datasets.image_sources.rgb_pixels"
    monkeypatch.setattr(decoded, lambda *given: pytest.fail("it was decoded"))
    small, unknown = image_part(chat_servers.data_url(Image.new("RGB", (8, 8)))), "no image of a kind that is read here"
    for status, words, *parts in (
        (400, "it has 1,001 x 1,001 pixels, at most 1,000,000 are read", image_part(bomb(1001))),
        (400, "image 1 of the request cannot be read", image_part(bomb(60_000))),
        (400, "image 2 of the request is not a data URL", small, image_part("https://example.org/a.png")),
        (400, "is not base64", image_part("data:image/png;base64,@@")),
        (400, f"image 1 of the request cannot be read ({unknown}); send", image_part("data:image/png;base64,AAAA")),
        (413, "2 images at most", small, small, small),
    ):
        assert words in refusal(llava, status, [{"role": "user", "content": [*parts, text_part("what ?")]}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"extra_body": {"eviction": "snapkv", "eviction_keep": 0.5}}, "unknown eviction of this server 'snapkv'"),
        ({"extra_body": {"eviction": "keydiff"}}, "eviction=keydiff needs eviction_keep"),
        ({"extra_body": {"eviction_keep": 0.9}}, "eviction_keep is 0.9; allowed is 0.1 to 0.8"),
        ({"extra_body": {"eviction": "none", "eviction_keep": 0.5}}, "and scope need eviction=NAME"),
        ({"stop": ["a"] * 5}, "stop is at most 4 texts"),
        ({"temperature": 3}, "temperature must be 0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role of message 1"),
        ({"messages": about("x", "y") * 2}, "belongs to the system message"),
        ({"messages": [{"role": "user", "content": [text_part("x", **MARK)]}]}, "nothing asks after the part"),
        ({"messages": [{"role": "user", "content": [text_part("x", cache_control=1)]}]}, "cache_control is 1"),
    ],
)
def test_mistakes_are_words(llama, settings, words):
    assert re.search(words, refusal(llama, 400, **settings))
    # the later mark is the context's, the system prompt before it stays
    marked = [{"role": "system", "content": [text_part("x", **MARK)]}, *about("a", "b")[:1]]
    assert said(llama.ask(marked, max_tokens=1)) is not None


BODIES = [
    (b"{", 400, "invalid JSON"),
    (b"[]", 400, "it must be a group of keys"),
    (b'{"model": "tiny", "model": "tiny"}', 400, "invalid JSON"),
    (b"[" * 10_000, 400, "nested"),
    (b" " * 300_001, 413, "more than 300,000 bytes"),
    ([b" " * 1000] * 301, 413, "more than 300,000 bytes"),
]


def test_other_refusals(llama):
    assert "there is no model 'gpt' here; this server has 'tiny'" in refusal(llama, 404, model="gpt")
    assert "the model was made for 1,024 together" in refusal(llama, 400, "a b c d e f " * 400)
    for body, status, words in BODIES:
        reply = llama.post(iter(body) if isinstance(body, list) else body)
        assert (reply.status_code, words in reply.json()["error"]["message"]) == (status, True), reply.text
    models = llama.client().models
    assert [card.id for card in models.list()] == ["tiny"] == [models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        models.retrieve("other")
    assert llama.post(b"{}", **{"content-type": "text/plain"}).status_code == 415
    assert llama.post(b"{}", host="example.org").status_code == 400  # a page that names this machine its own
    assert said(llama.ask("Hi")) is not None
    assert llama.health()["requests"] == 0


def test_a_question_reader_keeps_no_context():
    with serving_model(ArmSpec(backbone=LLAMA, eviction="finch", eviction_keep=0.5)) as served:
        words = refusal(served, 400, about(TEXT, "Why?"))
        assert words.startswith("cache_control compresses before the question is seen, but eviction 'finch' scores by")
        assert "eviction 'none': requests choose none here" in refusal(served, 400, extra_body={"eviction": "none"})
        assert "nothing: requests do not choose it here" in refusal(served, 400, extra_body={"eviction_keep": 0.5})
        assert said(served.ask(TEXT)) is not None


def long_request(**more):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 400, "temperature": 1}
    return json.dumps({**asked, **more}).encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_answer(llama, stream):
    llama.until_free()
    host, port = llama.url.removeprefix("http://").split(":")
    body = long_request(stream=stream, logit_bias={}, seed=3)
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        else:
            while not llama.server.held:
                time.sleep(0.01)
            time.sleep(0.2)
    count = len(llama.outcomes)
    llama.until_free()
    assert said(llama.ask("Hi", max_tokens=1)) is not None
    assert min(getattr(each, "new_tokens", 0) for each in llama.outcomes[-2 if stream else count - 1 :]) < 300


def test_a_full_line_is_said_and_nothing_is_lost(llama):
    llama.until_free()
    with ThreadPoolExecutor(8) as askers:
        asked = [askers.submit(llama.post, long_request(max_tokens=40, seed=1)) for _ in range(8)]
        replies = [each.result().status_code for each in asked]
    assert set(replies) == {200, 429}
    assert replies.count(200) >= 3
    assert llama.health()["requests"] == 0


def test_the_time_of_a_request_ends():
    with serving_model(ArmSpec(backbone=LLAMA), Limits(max_new_tokens=900), timeout=0.5) as served:
        streamed = served.post(long_request(max_tokens=900, seed=3, stream=True))
        assert streamed.status_code == 200
        assert "the time for one request is over" in streamed.text.split("data: ")[-1]
        assert "[DONE]" not in streamed.text
        served.until_free()


def test_least_recently_asked_contexts_go():
    spec = ArmSpec(backbone=LLAMA, **KNORM)
    with serving_model(spec) as served:
        size = served.ask(about(TEXT, "Why?")).usage and served.health()["contexts"]["bytes"]
    with serving_model(spec, budget=int(2.5 * size)) as served:
        asked = [served.ask(about(f"{number}{TEXT[1:]}", "Why?"), max_tokens=1) for number in (0, 1, 0, 2, 0, 1)]
        cached = [reply.usage.prompt_tokens_details.cached_tokens > 0 for reply in asked]
        assert cached == [False, False, True, False, True, False]
        counts = served.health()["contexts"]
        assert (counts["held"], counts["bytes"] <= 2.5 * size) == (2, True)
    with serving_model(spec, budget=size // 2) as served:
        assert said(served.ask(about(TEXT, "Why?"))) is not None
        assert served.health()["contexts"] == {"held": 0, "bytes": 0, "compressed": 1, "found": 0}


def test_answers_that_last_together_are_captured_together(llama, monkeypatch):
    """Each goes on alone once the other has ended, and says what it says alone; a capture here calls the step."""

    made = []

    def called(step, *_):
        made.append(len(caches := getclosurevars(step).nonlocals["caches"]))
        return lambda: ([cache.let_append(True) for cache in caches], step())[1]

    monkeypatch.setattr(decode_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(decode_step, "capture", called)
    asked = [(about(TEXT[:400], "\n\nWhy?"), 150), (about(TEXT[:90], "\n\nWhy?"), 190)]
    with ThreadPoolExecutor(2) as askers:
        alone = [said(llama.ask(text, max_tokens=most)) for text, most in asked]
        assert alone == [said(each) for each in askers.map(lambda own: llama.ask(own[0], max_tokens=own[1]), asked)]
    assert 2 in made


@pytest.mark.slow
def test_64_clients_at_once_lose_nothing():
    """Answer rightly for some 20 s, or ``SUBTOKEN_LOAD_SECONDS``; one in ten hangs up, memory stays where it was."""
    texts = [f"{number} {TEXT[:400]}" for number in range(6)]
    with serving_model(ArmSpec(backbone=LLAMA, **KNORM), LIMITS, budget=10**6, queue=64, timeout=300) as served:
        wanted = {text: said(served.ask(about(text, "\n\nWhy?"))) for text in texts}
        outcomes, memory, seconds = Counter[str](), [], int(os.environ.get("SUBTOKEN_LOAD_SECONDS", "20"))
        until = time.monotonic() + seconds
        create = served.client(timeout=300).chat.completions.create

        def asked(turn):
            text = texts[turn % len(texts)]
            try:
                stream = create(model="tiny", messages=about(text, "\n\nWhy?"), stream=True, max_tokens=8)
            except openai.RateLimitError:  # the places of those who left are free in their turn
                return "later"
            if turn % 10 == 0:
                next(iter(stream))
                stream.close()
                return "left"
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            return "right" if "".join(pieces) == wanted[text] else "wrong"

        def ask(turn):
            while time.monotonic() < until:
                turn += 1
                outcomes[asked(turn)] += 1

        with ThreadPoolExecutor(64) as askers:
            running = [askers.submit(ask, place) for place in range(64)]
            while not all(each.done() for each in running):
                time.sleep(1)
                memory.append(int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]))
        served.until_free()
        print(f"{outcomes}, {memory} kB, {served.health()}")
        assert set(outcomes) <= {"right", "left", "later"}
        assert outcomes.total() >= 64
        assert outcomes["right"] > outcomes.total() // 2
        assert max(memory[len(memory) // 2 :]) - memory[len(memory) // 4] < 50_000  # kB
        assert served.health()["requests"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "checkpoints/smollm2").exists(), reason="no SmolLM2: run make real")
def test_64_clients_are_answered_faster_than_one_by_one():
    """About a minute: prompts and answers of unlike lengths; the figures are printed."""
    spec = ArmSpec(backbone=str(ROOT / "checkpoints/smollm2"), eviction="knorm", eviction_keep=0.5)
    prompts = [f"{TEXT[place : place + 40 + 9 * place]}\n\nWhat is a list?" for place in range(64)]
    with serving_model(spec, Limits(evictions=("keydiff",)), queue=64, timeout=300) as served:

        def ask(place):
            more = {"extra_body": {"eviction": "keydiff", "eviction_keep": 0.3}} if place % 8 == 1 else {}
            reply = served.ask(prompts[place], max_tokens=24 + place % 16, **more)
            return said(reply), reply.usage.completion_tokens

        ask(0)
        begun = time.monotonic()
        alone = [ask(place) for place in range(0, 64, 9)]
        between = time.monotonic()
        with ThreadPoolExecutor(64) as askers:
            together = list(askers.map(ask, range(64)))
        ended = time.monotonic()
        rates = [
            sum(tokens for _, tokens in told) / seconds
            for told, seconds in ((alone, between - begun), (together, ended - between))
        ]
        same = sum(one == other for one, other in zip(alone, together[::9], strict=True))
        print(f"{rates[0]:.1f} and {rates[1]:.1f} tokens a second, {same} of {len(alone)} alike, {served.health()}")
        assert served.server.held == 0
        assert same >= len(alone) - 1  # a tie of two tokens may fall otherwise
        assert rates[1] > 1.5 * rates[0]

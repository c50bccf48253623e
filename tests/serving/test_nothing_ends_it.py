"""Panics, late passes, slow bodies and odd configurations end no server, and hold no place of it."""

import queue
import re
import socket
import threading
from itertools import product

import httpx2
import openai
import pytest
from tokenizers import Regex, pre_tokenizers

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.serving.chat_request import Limits
from tests.inference.test_messages import chatting
from tests.serving.test_chat_server import long_request, refusal
from tests.support.chat_servers import KNORM, LLAMA, TEXT, about, said, serving_model
from tests.support.refusals import refuses

PANICS = r"(?:x+x+)+y"  # at forty x in a row it goes back more often than the Rust that cuts texts bears
BROKEN = "the server failed at this request; its log says why"


class Panic(BaseException):
    """No ``Exception``, as a panic of Rust's is none."""


@pytest.fixture(scope="module")
def llama():
    with serving_model(ArmSpec(backbone=LLAMA, **KNORM), Limits(max_new_tokens=400), queue=3) as served:
        yield served


def test_a_panic_of_the_tokenizer_is_words():
    model, text, cuts = chatting(), "x" * 40, pre_tokenizers.Split(Regex(PANICS), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts, bytes_of])
    for ask in (model.chat, lambda text: model.ask(text, ["?"]), lambda text: model.ask("a", [text])):
        refuses(r"the tokenizer broke down at this text \(.*over\); shorten it", ask, text)
    with serving_model(ArmSpec(backbone="random"), model=model) as served:
        for messages in (text, about(text, "?"), about("a", text)):
            assert "the tokenizer broke down at this text" in refusal(served, 400, messages)
        assert said(served.ask("Hi")) is not None
        assert served.server.held == 0


def test_a_text_that_is_too_long_is_not_tokenised(llama, monkeypatch):
    monkeypatch.setattr(llama.answerer, "compression", lambda chat: pytest.fail("it was read"))
    assert "the prompt has 16,000 characters, more than the 1,024 positions" in refusal(llama, 400, "a b " * 4000)
    for blank in " \t\n\u3000":
        words = refusal(llama, 400, [{"role": "user", "content": blank * 1_200_000 + "x"}])
        assert words == "the prompt holds 1,000,000 blanks in a row, at which tokenizers break down; take them out"


IN_A_PASS = product(("_opened", "_whole", "_row"), (Panic("broken"), SystemExit(3), RuntimeError("broken")))
BEFORE = product(
    ("http_app.read_request", "answerer.read_for_pass", "line.Line.put"), (Panic("b"), KeyboardInterrupt())
)
RAISED = [*((f"answerer.Answerer.{place}", error) for place, error in IN_A_PASS), *BEFORE]


@pytest.mark.parametrize(("stage", "error"), RAISED)
def test_nothing_that_is_raised_ends_the_thread_or_the_server(llama, monkeypatch, stage, error):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(f"subtoken_train.serving.{stage}", fail)
    assert refusal(llama, 500) == BROKEN
    monkeypatch.undo()
    assert said(llama.ask("Hi")) is not None
    llama.until_free()
    assert llama.answerer.replaced == 0


def test_a_thread_that_ends_is_replaced(llama, monkeypatch, caplog):
    before, replaced = llama.answerer._thread, llama.answerer.replaced

    def end():
        monkeypatch.undo()
        raise SystemExit(3)

    monkeypatch.setattr(llama.answerer._line, "first", lambda waits: end() if waits else None)
    assert said(llama.ask("Hi")) is not None  # after which it takes the next one
    before.join(20)
    assert not before.is_alive()
    assert said(llama.ask("Hi")) is not None
    health = llama.health()
    assert (health["replaced"], health["status"]) == (replaced + 1, "ok")
    assert "the thread that answers ended; another one takes its place" in caplog.text


def test_a_dead_thread_is_noticed_and_what_it_had_is_told(llama, monkeypatch):
    gate, begun, told = threading.Event(), threading.Event(), []
    alive, replaced = llama.answerer._thread, llama.answerer.replaced
    monkeypatch.setattr(llama.answerer, "_opened", lambda *given: (begun.set(), gate.wait(60)))
    asking = threading.Thread(target=lambda: told.append(refusal(llama, 500)))
    asking.start()
    assert begun.wait(60)
    monkeypatch.undo()
    monkeypatch.setattr(alive, "is_alive", lambda: False)
    reply = httpx2.get(f"{llama.url}/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "the thread that answers ended; it is replaced")
    asking.join(60)
    assert told == [BROKEN]
    assert said(llama.ask("Hi")) is not None
    assert llama.health()["replaced"] == replaced + 1
    gate.set()  # the one that only seemed dead ends
    alive.join(60)
    llama.until_free()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stage", "words"),
    [("_opened", "its prompt is still read, or waits"), ("prepare", "its pictures and texts were not read")],
)
def test_what_outlives_its_time_is_told_in_time(stage, words, stream):
    gate = threading.Event()
    with serving_model(ArmSpec(backbone=LLAMA), timeout=0.5) as served:
        whole = getattr(served.answerer, stage)
        setattr(served.answerer, stage, lambda *given: (gate.wait(60), whole(*given))[1])
        reply = served.post(long_request(stream=stream))
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert f"the time for one request is over; {words}" in reply.json()["error"]["message"]
        assert served.server.held == 1
        gate.set()
        served.until_free()


def test_a_backbones_own_ends_beams_and_copies_hold_no_place():
    def answer(**own):
        model = chatting()
        for name, value in own.items():
            setattr(model.generation_config, name, value)
        with serving_model(ArmSpec(backbone="random"), model=model) as served:
            text = said(served.ask("What is a list?", max_tokens=24))
            assert served.server.held == 0
        return text

    wanted = answer()
    assert len(wanted) > 6
    others = {"max_time": 1e-9, "num_beams": 3, "prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    assert answer(**others) == wanted
    assert answer(stop_strings=[wanted[3:6]]) == wanted[: wanted.index(wanted[3:6])].strip()


def opened(served):
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.settimeout(20)
    return client


def begun(served, length, body=b""):
    """A request of which no more comes."""
    client = opened(served)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return client


def test_slow_bodies_take_no_place(llama):
    slow = [begun(llama, 1000, b"{") for _ in range(16)]
    assert said(llama.ask("Hi")) is not None
    for client in slow:
        client.close()
    with opened(llama) as client:  # headers are bounded too
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100_000)
        assert client.recv(12) == b"HTTP/1.1 400"


def test_bodies_on_their_way_have_a_bound_and_the_longest_goes():
    with serving_model(ArmSpec(backbone=LLAMA), queue=2, max_body=1000) as served:
        slow = [begun(served, 999, b" " * 900) for _ in range(3)]
        assert slow[0].recv(12) == b"HTTP/1.1 408"
        assert said(served.ask("Hi")) is not None
        for client in slow:
            client.close()


def test_slow_headers_end(llama, monkeypatch):
    monkeypatch.setattr("subtoken_train.serving.http_app._READING", 0.3)
    with opened(llama) as silent, opened(llama) as again:
        ask = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        again.sendall(ask + b"\r\n" + ask)  # one that is answered, and the next one's beginning
        assert silent.recv(12) == b"HTTP/1.1 400"
        told = b"".join(iter(lambda: again.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 400" in told
        assert b"The headers took too long." in told


def test_strangers_learn_nothing():
    with serving_model(ArmSpec(backbone=LLAMA), keys=("mine",)) as served:
        assert served.health() == {"status": "ok"}
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} mine"}
            assert httpx2.get(f"{served.url}/health", headers=headers).json()["requests"] == 0
            assert served.post(long_request(max_tokens=1), **headers).status_code == 200
        for path in ("/v1/models", "/v1/models/tiny"):
            assert httpx2.get(f"{served.url}{path}").status_code == 401
        assert refusal(served, 401) == "the API key is missing or wrong"
        assert served.post(b"{}", authorization="Bearer min\xe9".encode("latin-1")).status_code == 401


@pytest.mark.parametrize("apart", [False, True])
def test_contexts_of_another_key(apart):
    with serving_model(ArmSpec(backbone=LLAMA, **KNORM), keys=("a", "b"), apart=apart) as served:

        def cached(key):
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
            asked = client.chat.completions.create(model="tiny", messages=about(TEXT, "Why?"), max_tokens=1)
            return asked.usage.prompt_tokens_details.cached_tokens > 0

        assert [cached(key) for key in "abab"] == [False, not apart, True, True]


def test_a_line_of_log_for_each_request_and_messages_that_name_no_place(monkeypatch, tmp_path):
    lines = queue.SimpleQueue()  # a client has its answer before its line is there
    monkeypatch.setattr("subtoken_train.serving.http_app._log.info", lambda words, *values: lines.put(words % values))
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with serving_model(ArmSpec(backbone=LLAMA), folder=tmp_path) as served:
        usage = served.ask("secret words", max_tokens=3).usage
        tokens = re.escape(f"{usage.prompt_tokens}+{usage.completion_tokens} tokens")
        assert re.fullmatch(rf"POST /v1/chat/completions 200, {tokens}, \d+\.\d\d s", lines.get(timeout=20))
        refusal(served, 400, "secret words", n=2)
        assert re.fullmatch(r"POST /v1/chat/completions 400, \d+\.\d\d s", lines.get(timeout=20))
        httpx2.get(f"{served.url}/v1/models/a%0Ab?secret=words")
        assert re.fullmatch(r"GET /v1/models/a%0Ab 404, \d+\.\d\d s", lines.get(timeout=20))
        words = refusal(served, 400, extra_body={"context": "broken"})
        assert words.startswith("broken.safetensors is not a whole safetensors file")
        served.answerer._opened = lambda *given: (_ for _ in ()).throw(
            ValueError("read /srv/models/a b from /x/y.json")
        )
        assert refusal(served, 400) == "read a b from y.json"


def test_pages_of_other_origins_ask_where_they_may(llama):
    asked, path = {"origin": "https://a.org", "access-control-request-method": "POST"}, "/v1/chat/completions"
    asked["access-control-request-headers"] = "authorization,content-type"
    assert "access-control-allow-origin" not in httpx2.options(f"{llama.url}{path}", headers=asked).headers
    with serving_model(ArmSpec(backbone=LLAMA), origins=("https://a.org",)) as served:
        told = httpx2.options(f"{served.url}{path}", headers=asked)
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, "https://a.org")
    words = httpx2.get(f"{llama.url}/v1/x%1b[31m%E2%80%AE").json()["error"]["message"]  # messages hold no controls
    assert words.startswith(r"GET /v1/x\x1b[31m\u202e: Not Found; there are POST")


def test_a_text_is_gone_on_with(llama):
    create, model = llama.client().completions.create, SubTokenModel.from_pretrained(LLAMA, **KNORM)
    reply, inputs = create(model="tiny", prompt="The list", max_tokens=12), model.inputs("The list", raw=True)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    said = reply.choices[0]
    assert (reply.object, said.text) == ("text_completion", model.tokenizer.decode(ids).rstrip())
    assert (reply.usage.completion_tokens, said.finish_reason) == (12, "length")
    chunks = list(create(model="tiny", prompt=["The list"], max_tokens=12, stream=True, echo=False, best_of=1))
    assert "".join(chunk.choices[0].text for chunk in chunks) == said.text
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="suffix 'y' is not served here; leave it out"):
        create(model="tiny", prompt="x", suffix="y")

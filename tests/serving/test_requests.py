"""Fields of a request, one by one; requests that run together, whatever they ask, are told what they are told alone."""

import base64
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote_from_bytes

import pytest
import torch
from PIL import Image

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.serving.answerer import Answerer, ContextStore
from subtoken_train.serving.chat_request import IGNORED, NEUTRAL, OF_MESSAGES, Limits, RefusedError, read_request
from subtoken_train.serving.line import Answer, Job
from subtoken_train.serving.rows import use_onednn
from tests.support.chat_servers import KNORM, LLAMA, LLAVA, MARK, TEXT, about, data_url, image_part, text_part
from tests.support.places import ROOT
from tests.support.refusals import refuses, refusing
from tests.support.run_folders import encoded

LIMITS = Limits(max_new_tokens=64)
PNG = encoded(Image.new("RGB", (4, 3), "red"))
PACKED = base64.b64encode(PNG).decode()


def read(raw=False, marks=False, **more):
    asked = {"prompt": "What?"} if raw else {"messages": [{"role": "user", "content": "What?"}]}
    return read_request(json.dumps({"model": "m", **asked, **more}).encode(), LIMITS, raw, marks)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_passes_where_it_changes_nothing_and_is_refused_where_it_would(name):
    for value in (*NEUTRAL[name], None):
        assert read(**{name: value}) == read()
        assert read(raw=True, **{name: value}) == read(raw=True)
    refuses(f"{name} .* is not served here; leave it out", lambda: read(**{name: {"other": 3}}, temperature=1))


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_asks_for_nothing_passes(name):
    for value in ("high", True, False, {"a": "b"}, [1]):
        assert read(**{name: value}) == read()


def test_numbers_are_no_truths_and_draws_need_a_temperature():
    assert read(repetition_penalty=1.0, top_k=-1.0) == read()
    for name, value in (("n", True), ("logprobs", 0), ("frequency_penalty", False)):
        refuses("is not served here", read, **{name: value})
    for cold in (0, -0.0, 1e-300, 1e-5):
        assert read(top_k=50, min_p=0.1, temperature=cold) == read()
    assert read(temperature=1e-4).settings["temperature"] == 1e-4
    assert read(max_tokens=10**9).max_new_tokens == read(max_completion_tokens=65).max_new_tokens == 64
    assert (read(max_tokens=3).max_new_tokens, read().max_new_tokens) == (3, None)


def test_a_message_may_say_more_than_is_read():
    beside = {"name": "me", "tool_calls": [], "annotations": [], "refusal": None, "audio": None, "x": {"y": 1}}
    part = text_part("What?", annotations=[], index=3)
    for message in ({"content": "What?", **beside}, {"content": [part], **beside}):
        assert read(messages=[{"role": "user", **message}]) == read()
    for name in OF_MESSAGES:
        with pytest.raises(ValueError, match=f"message 1: {name} .* is not served here"):
            read(messages=[{"role": "user", "content": "What?", name: [1]}])


@pytest.mark.parametrize(
    "url",
    [
        f"DATA:IMAGE/PNG;BASE64,{PACKED}",
        f"data:;base64,{PACKED}",
        f"data:image/png;name=a.png;charset=utf-8;base64,{PACKED}",
        f"data:application/octet-stream;base64,{PACKED.rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(PACKED[at : at + 20] for at in range(0, len(PACKED), 20)),
        f"data:image/png;base64,{quote_from_bytes(PACKED.encode(), safe='')}",
        f"data:,{quote_from_bytes(PNG, safe='')}",
    ],
)
def test_a_data_url_is_read_in_every_form(url):
    part = image_part(url)
    part["image_url"] |= {"detail": "high", "format": "png"}
    (image,) = read(messages=[{"role": "user", "content": [part, text_part("What?")]}]).pictures(LIMITS)
    assert (image.size, image.getpixel((0, 0))) == ((4, 3), (255, 0, 0))


def test_a_text_to_go_on_with_and_marks_of_pictures_that_are_text():
    asked = read(raw=True)
    assert (asked.messages[0]["content"], asked.raw, asked.max_new_tokens) == ("What?", True, 16)
    assert read(raw=True, prompt=["What?"], max_tokens=99) == read(raw=True, max_tokens=64)
    said = r"<image> \<image> \\<video>"
    for content in (said, [text_part(said)]):
        marked, plain = (read(marks=on, messages=[{"role": "user", "content": content}]) for on in (True, False))
        assert marked.messages[0]["content"] == r"\<image> \\<image> \\\<video>"
        assert plain.messages[0]["content"] == said


def seen(part):
    return {"messages": [{"role": "user", "content": [part, text_part("What?")]}]}


NO_URL, NO_PART = "image 1 of the request is not a data URL", "message 1 has a part .*; parts are text or image_url"
REFUSED = {
    **{f"url {url}": (seen(image_part(url)), NO_URL) for url in ("", "data:", "data:a;base64", "file:///a,b", 3)},
    **{f"part {kind}": (seen({"type": kind, "text": "x"}), NO_PART) for kind in (["text"], None, "image", "video")},
    "tokens": ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    "truth": ({"temperature": False}, "temperature is False; it must be a number"),
    "option": ({"stream_options": {"include_usage": 1}}, "include_usage.* is 1; it must be true or false"),
    "draws": ({"top_k": 50, "temperature": 0.5}, "top_k 50 is not served here"),
    "key": ({"evction": "none"}, r"unknown key 'evction'\. Did you mean 'eviction'\?"),
    "cache_control": ({"messages": [{"role": "user", "content": "x", **MARK}]}, "message 1: cache_control"),
    "no text": ({"raw": True, "prompt": []}, "prompt has 0 texts"),
    "texts": ({"raw": True, "prompt": ["a", "b"]}, "prompt has 2 texts"),
    "number": ({"raw": True, "prompt": [1]}, "prompt"),
    "messages": ({"raw": True, "messages": []}, "unknown key 'messages'"),
}
test_what_is_no_request_is_refused = refusing(REFUSED, lambda fields: read(**fields))

STREAMING = {"eviction": "streaming_llm", "eviction_keep": 0.5}
SHARED_LIMITS = Limits(max_new_tokens=200, evictions=("knorm", "keydiff", "streaming_llm", "none"))


class Asked(Job):
    """A job that notes what it is told."""

    def __init__(self, messages, seconds=60.0, **settings):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, **settings}
        super().__init__(read_request(json.dumps(body).encode(), SHARED_LIMITS), self.note, time.monotonic() + seconds)
        self.events, self.done = [], threading.Event()

    def note(self, event):
        self.events.append(event)
        if not isinstance(event, str):
            self.done.set()

    def outcome(self):
        assert self.done.wait(60)
        *pieces, last = self.events
        return "".join(pieces), last if isinstance(last, Answer) else (last.status, str(last))


@contextmanager
def answering(spec=LLAMA, limits=SHARED_LIMITS, budget=10**9, **compression):
    spec = ArmSpec(**{"backbone": spec, **compression})
    answerer = Answerer(spec.load("cpu"), spec, limits, ContextStore(budget))
    sizes, step = [], answerer._step

    def noted(running):
        sizes.append(len(running.rows))
        step(running)

    def ready(job):
        try:
            job.ready = answerer.prepare(job.request)
        except RefusedError as refused:
            job.tell(refused)
        else:
            submit(job)

    submit, answerer.submit = answerer.submit, ready
    answerer._step = noted
    answerer.sizes = sizes
    try:
        yield answerer
    finally:
        answerer.close()


def together(answerer, jobs):
    """What jobs are told that come while another one is answered; the rows of every step since."""
    gate, begun, first = threading.Event(), threading.Event(), Asked("Hi")
    first.say = lambda event: (begun.set(), gate.wait(60))
    answerer.submit(first)
    assert begun.wait(60)
    before = len(answerer.sizes)
    for job in jobs:
        answerer.submit(job)
    gate.set()
    return [job.outcome() for job in jobs], answerer.sizes[before:]


def alone(answerer, jobs):
    told = []
    for job in jobs:
        answerer.submit(job)
        told.append(job.outcome())
    return told


def test_linear_maps_in_onednn_are_those_of_torch():
    """Of any number of rows and axes, with a bias or none; other modules and dtypes stay as they are."""
    maps = torch.nn.ModuleList([torch.nn.Linear(24, 40), torch.nn.Linear(24, 7, bias=False), torch.nn.Embedding(3, 24)])
    half, given = torch.nn.Linear(24, 5).bfloat16(), [torch.randn(*shape, 24) for shape in ((1, 1), (2, 9), (33,))]
    wanted = [linear(rows) for linear in maps[:2] for rows in given]
    use_onednn(torch.nn.ModuleList([*maps, half]))
    assert ["forward" in vars(each) for each in (*maps, half)] == [True, True, False, False]
    with torch.no_grad():
        torch.testing.assert_close([linear(rows) for linear in maps[:2] for rows in given], wanted)


ONLINE = {**STREAMING, "eviction_every": 16}
MADE = {
    "full": {},
    "quest": {"eviction": "quest_steps", "eviction_keep": 0.5},
    "int8": {**KNORM, "kv_dtype": "int8"},
    "routed": {"backbone": None, "adapter": str(ROOT / "checkpoints/adapters/tinylm_quest25_s16k12")},
    "online": ONLINE,
}


def many():
    """Requests of unlike lengths, draws, stops, evictions and contexts."""
    long = [Asked(TEXT[:size] + "\n\nWhat is a list?", max_tokens=4 + size // 100) for size in (600, 900, 750)]
    drawn = [Asked("What is a list?", temperature=0.9, seed=seed, max_tokens=40) for seed in (1, 2)]
    stopped = Asked(TEXT[:800] + "\n\nWhy?", stop=["e"], max_tokens=30)
    other = Asked(TEXT + "\n\nWho?", eviction="keydiff", eviction_keep=0.2, max_tokens=20)
    return [*long, *drawn, stopped, other, *(Asked(about(TEXT, f"\n\n{each}")) for each in ("Why?", "Who does what?"))]


def found_anew(told):
    """What jobs were told, whether their contexts were there or not."""
    return [(text, replace(end, cached_tokens=0) if isinstance(end, Answer) else end) for text, end in told]


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_answers_that_run_together_are_those_of_one_by_one(made, monkeypatch):
    with answering(**made) as answerer:
        wanted = alone(answerer, many())
        told, sizes = together(answerer, many())
        # in chunks, and a step after each
        monkeypatch.setattr("subtoken_train.serving.answerer.CHUNK", 64)
        monkeypatch.setattr("subtoken_train.serving.answerer.PATIENCE", 0.0)
        chunked, _ = together(answerer, [Asked(TEXT, max_tokens=60), *many()[:3]])
    assert found_anew(told) == found_anew(wanted)
    assert sum(isinstance(end, Answer) for _, end in told) >= 5  # the others are refused: a budget or a context
    assert max(sizes) >= 5
    assert sizes[-1] < max(sizes)  # each leaves when it ends
    assert [text for text, _ in chunked[1:]] == [text for text, _ in wanted[:3]]


@pytest.mark.parametrize("asks", [str, lambda text: about(text, "\n\nWhy?")])
def test_a_long_prompt_lets_running_answers_go_on_after_each_chunk(asks, monkeypatch):
    monkeypatch.setattr("subtoken_train.serving.answerer.CHUNK", 50)
    with answering(**KNORM) as answerer:
        running, long = Asked("What is a list?", max_tokens=200), Asked(asks(3 * TEXT))
        wanted, between = alone(answerer, [Asked("What is a list?", max_tokens=200)]), []
        answerer._patience = 0.0
        monkeypatch.setattr("subtoken_train.serving.answerer.PATIENCE", 0.0)
        running.say = lambda event: (running.note(event), long.events or between.append(event))
        opened = answerer._opened
        answerer._opened = lambda job, rows: (between.clear(), opened(job, rows))[1]
        step = answerer._step
        answerer._step = lambda rows: (step(rows), setattr(answerer, "_patience", 0.0))
        told, _ = together(answerer, [running, long])
    assert told[0] == wanted[0]
    assert ["nothing was compressed" in note for note in told[0][1].warnings] == [True]
    assert long.outcome()[1].new_tokens == 8
    assert len(between) > 30  # 6 layers of 17 chunks; a piece of text may take several tokens


def test_rows_leave_for_those_that_wait_and_memory_has_a_bound():
    prompts = [Asked("What is a list?", max_tokens=tokens) for tokens in (30, 10, 20, 10)]
    with answering(limits=replace(SHARED_LIMITS, batch=2), **KNORM) as answerer:
        token_bytes = answerer._family.shape.token_bytes
        together(answerer, prompts)
        assert max(answerer.sizes) == 2
        assert answerer.sizes.count(2) > 20  # the third joins when the second has left
    with answering(limits=replace(SHARED_LIMITS, memory=100 * token_bytes), **KNORM) as answerer:
        told, sizes = together(answerer, [Asked("What is a list?", max_tokens=60) for _ in range(3)])
        assert [end.new_tokens for _, end in told] == [60] * 3
        assert max(sizes) == 1
        (_, (status, words)), *_ = alone(answerer, [Asked(TEXT)])
        assert (status, "send a shorter prompt, or ask for fewer tokens" in words) == (413, True)


def test_questions_about_one_context():
    def asked():
        questions = ["Why?", "What does try do, and what is a traceback good for?", "Who?"]
        return [*(Asked(about(TEXT, "\n\n" + each)) for each in questions), Asked(about(TEXT[:-1], "\n\nWhy?"))]

    with answering(**KNORM) as answerer:
        told, sizes = together(answerer, asked())
        assert max(sizes) >= 4
        assert [answer.cached_tokens > 0 for _, answer in told] == [False, True, True, False]
        wanted = alone(answerer, asked())
        assert [text for text, _ in told] == [text for text, _ in wanted]
        assert told[1:3] == wanted[1:3]
        assert (answerer.contexts.taken, answerer.contexts.found) == (2, 6)


def test_models_that_see_images_answer_together():
    url = data_url(Image.open(ROOT / "data/samples/a.png").convert("RGB"))

    def asked(**mark):
        contents = [[image_part(url, **mark), text_part(f"what is at {place} ?")] for place in ("C4", "D2")]
        return [Asked([{"role": "user", "content": content}]) for content in contents]

    with answering(LLAVA, **KNORM) as answerer:
        wanted = alone(answerer, [*asked(**MARK), *asked()])
        told, sizes = together(answerer, [*asked(**MARK), *asked()])
        assert max(sizes) >= 3  # the first may be a row already when the others come
        assert [text for text, _ in told] == [text for text, _ in wanted]
        assert told[2:] == wanted[2:]


def test_one_that_is_refused_leaves_or_is_late_stops_no_other(caplog):
    with answering(**KNORM) as answerer:
        wanted = alone(answerer, [Asked("What is a list?", max_tokens=60)])
        gone, late = Asked("What is a dict?", max_tokens=200), Asked("What is a dict?", seconds=-1)
        stays, long = Asked("What is a list?", max_tokens=60), Asked("a b c d e f " * 200)
        gone.say = lambda event: (gone.note(event), gone.stopped.set())
        told, sizes = together(answerer, [gone, long, stays, late])
        assert max(sizes) >= 2
        assert told[2:3] == wanted
        assert told[0][1][0] == told[3][1][0] == 503
        assert len(told[0][0]) < 40
        status, words = told[1][1]
        assert (status, "the model was made for 1,024 together" in words) == (400, True)
    assert "a request failed" not in caplog.text


@pytest.mark.parametrize("place", ["stream", "attention", "logits"])
def test_one_that_fails_in_its_middle_stops_no_other(place, caplog):
    with answering(**KNORM) as answerer:
        wanted = alone(answerer, [Asked("What is a list?", max_tokens=20)])
        fails, stays = Asked("What is a dict?", max_tokens=20), Asked("What is a list?", max_tokens=20)

        def broken(*given, **more):
            raise RuntimeError("broken")

        def fail(event):
            fails.note(event)
            if len(fails.events) == 3:
                (row,) = [row for row in answerer._running.rows if row.job is fails]
                if place == "stream":
                    broken()
                elif place == "attention":
                    row.cache.layers[3].reaches = broken
                else:
                    row.cache.layers[3].keys.fill_(torch.nan)

        fails.say = fail
        told, _ = together(answerer, [fails, stays])
    status, words = told[0][1]
    if place == "logits":
        assert (status, "the model gave NaN or infinite numbers at token" in words) == (400, True)
    else:
        assert (status, words) == (500, "the server failed at this request; its log says why")
        assert "a request failed" in caplog.text
    assert told[1:] == wanted


def test_what_is_evicted_while_an_answer_is_made_is_not_counted():
    with answering(**ONLINE) as answerer:
        told, _ = together(answerer, [Asked(about(TEXT, "\n\nWhy?"), max_tokens=100) for _ in range(2)])
    with answering(**STREAMING) as answerer:
        whole = alone(answerer, [Asked(about(TEXT, "\n\nWhy?"), max_tokens=100)])
    assert told[0][1].new_tokens == whole[0][1].new_tokens == 100
    assert told[0][1].dense_cache_bytes == whole[0][1].dense_cache_bytes
    assert told[0][1].cache_bytes < whole[0][1].cache_bytes

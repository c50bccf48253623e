"""Fields of a request, one by one; requests that wait together share a pass, and are told what they are alone."""

import base64
import io
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote_from_bytes

import pytest
from PIL import Image

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.serving.answerer import Answerer, ContextStore
from subtoken_train.serving.chat_request import IGNORED, NEUTRAL, OF_MESSAGES, Limits, RefusedError, read_request
from subtoken_train.serving.line import Answer, Job
from tests.support.chat_servers import KNORM, LLAMA, LLAVA, MARK, TEXT, about, data_url, image_part, text_part
from tests.support.places import ROOT

LIMITS = Limits(max_new_tokens=64)
SHOWN = io.BytesIO()
Image.new("RGB", (4, 3), "red").save(SHOWN, "PNG")
PNG = SHOWN.getvalue()
PACKED = base64.b64encode(PNG).decode()


def read(raw=False, marks=False, **more):
    asked = {"prompt": "What?"} if raw else {"messages": [{"role": "user", "content": "What?"}]}
    return read_request(json.dumps({"model": "m", **asked, **more}).encode(), LIMITS, raw, marks)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_passes_where_it_changes_nothing_and_is_refused_where_it_would(name):
    for value in (*NEUTRAL[name], None):
        assert read(**{name: value}) == read()
        assert read(raw=True, **{name: value}) == read(raw=True)
    with pytest.raises(ValueError, match=f"{name} .* is not served here; leave it out"):
        read(**{name: {"other": 3}}, temperature=1)


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_asks_for_nothing_passes(name):
    for value in ("high", True, False, {"a": "b"}, [1]):
        assert read(**{name: value}) == read()


def test_numbers_are_no_truths_and_draws_need_a_temperature():
    assert read(repetition_penalty=1.0, top_k=-1.0) == read()
    for name, value in (("n", True), ("logprobs", 0), ("frequency_penalty", False)):
        with pytest.raises(ValueError, match="is not served here"):
            read(**{name: value})
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_is_refused(name):
    fields, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        read(**fields)


STREAMING = {"eviction": "streaming_llm", "eviction_keep": 0.5}
SHARED_LIMITS = Limits(max_new_tokens=200, evictions=("knorm", "keydiff", "none"), batch=4)


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
    spec = ArmSpec(backbone=spec, **compression)
    answerer = Answerer(spec.load("cpu"), spec, limits, ContextStore(budget))
    sizes, shared = [], answerer._pass

    def noted(jobs):
        sizes.append(len(jobs))
        shared(jobs)

    def ready(job):
        try:
            job.ready = answerer.prepare(job.request)
        except RefusedError as refused:
            job.tell(refused)
        else:
            submit(job)

    submit, answerer.submit = answerer.submit, ready
    answerer._pass = noted
    answerer.sizes = sizes
    try:
        yield answerer
    finally:
        answerer.close()


def together(answerer, jobs):
    """What jobs are told that come while another one is answered; the sizes of their passes."""
    gate, begun, first = threading.Event(), threading.Event(), Asked("Hi")
    first.say = lambda event: (begun.set(), gate.wait(60))
    answerer.submit(first)
    assert begun.wait(60)
    before = len(answerer.sizes)
    for job in jobs:
        answerer.submit(job)
    gate.set()
    told = [job.outcome() for job in jobs]
    return told, answerer.sizes[before:]


def alone(answerer, jobs):
    told = []
    for job in jobs:
        answerer.submit(job)
        told.append(job.outcome())
    return told


def same(told, wanted):
    """Whether answers are alike; a row of a shared pass is numbered, in 8 bytes a layer and part at most."""
    extra = [0 <= got.cache_bytes - alone.cache_bytes <= 128 for (_, got), (_, alone) in zip(told, wanted, strict=True)]
    ours, theirs = ([(text, replace(end, cache_bytes=0)) for text, end in each] for each in (told, wanted))
    return all(extra) and ours == theirs


MADE = {"full": {}, "quest": {"eviction": "quest_steps", "eviction_keep": 0.5}, "int8": {**KNORM, "kv_dtype": "int8"}}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_prompts_of_several_lengths(made):
    def asked():
        long = [Asked(TEXT[:size] + "\n\nWhat is a list?", max_tokens=4 + size // 100) for size in (600, 900, 750)]
        return [*long, Asked(TEXT[:800] + "\n\nWhy?", stop=["e"], max_tokens=30)]

    with answering(**made) as answerer:
        wanted = alone(answerer, asked())
        told, sizes = together(answerer, asked())
    assert sizes == [4]
    assert same(told, wanted)
    assert [answer.new_tokens for _, answer in told[:3]] == [10, 13, 11]
    assert told[3][1].finish == "stop"
    assert len({answer.cache_bytes for _, answer in told}) > 2


def test_questions_about_one_context():
    def asked():
        questions = ["Why?", "What does try do, and what is a traceback good for?", "Who?"]
        return [*(Asked(about(TEXT, "\n\n" + each)) for each in questions), Asked(about(TEXT[:-1], "\n\nWhy?"))]

    with answering(**KNORM) as answerer:
        told, sizes = together(answerer, asked())
        assert sizes == [3, 1]
        assert [answer.cached_tokens > 0 for _, answer in told] == [False, True, True, False]
        wanted = alone(answerer, asked())
        assert [text for text, _ in told] == [text for text, _ in wanted]
        assert same(told[1:3], wanted[1:3])
        assert (answerer.contexts.taken, answerer.contexts.found) == (2, 4)
        size = answerer.contexts.nbytes // 2
    with answering(budget=int(2.5 * size), **KNORM) as answerer:  # two copies fit into the budget
        calls, shared = [], answerer._shared
        answerer._shared = lambda rows, end: (calls.append(len(rows)), shared(rows, end))[1]
        assert together(answerer, asked()[:3])[0] == told[:3]
        assert calls == [1, 2, 1]  # the first is the one that is waited for


def test_what_differs_does_not_share_and_half_of_a_pass_is_padding_at_most():
    listed, other = "What is a list?", "What is a dict?"
    with answering(**KNORM) as answerer:
        kinds = [Asked(words, **more) for words in (listed, other) for more in ({}, {"temperature": 0.7}, {"seed": 1})]
        kinds += [Asked(listed, eviction="keydiff", eviction_keep=0.5), Asked(about(TEXT, f"\n\n{listed}"))]
        assert sorted(together(answerer, kinds)[1], reverse=True) == [2, 2, 1, 1, 1, 1]
        asked = [Asked(3 * TEXT), *(Asked(f"What is {name}?") for name in "abc"), Asked(3 * TEXT[:-9])]
        assert together(answerer, asked)[1] == [3, 2]  # the long ones take a short one along
        asked = [Asked(3 * TEXT, max_tokens=20), Asked(2 * TEXT, max_tokens=200)]
        told, sizes = together(answerer, asked)
        assert sizes == [2, 1, 1]  # no row goes past the positions of the model
        assert [(answer.new_tokens, answer.warnings) for _, answer in told] == [(20, []), (200, [])]


def test_models_that_see_images_share_what_is_asked_about_one_picture():
    url = data_url(Image.open(ROOT / "data/samples/a.png").convert("RGB"))

    def asked(**mark):
        contents = [[image_part(url, **mark), text_part(f"what is at {place} ?")] for place in ("C4", "D2")]
        return [Asked([{"role": "user", "content": content}]) for content in contents]

    with answering(LLAVA, **KNORM) as answerer:
        wanted = alone(answerer, asked(**MARK))
        told, sizes = together(answerer, asked(**MARK))
        assert sizes == [2]
        assert [text for text, _ in told] == [text for text, _ in wanted]
        assert together(answerer, asked())[1] == [1, 1]


def test_one_that_is_refused_takes_no_other_with_it(caplog):
    def asked():
        return [Asked(f"What is a {name} ?" * 100) for name in ("list", "dict")]

    with answering(**KNORM) as answerer:
        (one, two), wanted = asked(), alone(answerer, asked())
        told, sizes = together(answerer, [one, Asked("a b c d e f " * 200), two])
        assert sizes == [2]
        assert same([told[0], told[2]], wanted)
        status, words = told[1][1]
        assert (status, "the model was made for 1,024 together" in words) == (400, True)
    assert "a request failed" not in caplog.text


def test_one_that_leaves_or_is_late_stops_no_other():
    with answering(**KNORM) as answerer:
        wanted = alone(answerer, [Asked("What is a list?", max_tokens=60)])
        gone, late = Asked("What is a dict?", max_tokens=200), Asked("What is a dict?", seconds=-1)
        stays = Asked("What is a list?", max_tokens=60)
        note = gone.say

        def leave(event):
            note(event)
            gone.stopped.set()

        gone.say = leave
        told, sizes = together(answerer, [gone, stays, late])
        assert sizes == [2]
        assert same(told[1:2], wanted)
        assert told[0][1][0] == told[2][1][0] == 503
        assert len(told[0][0]) < 40
        assert isinstance(gone.events[-1], RefusedError)


def test_a_pass_that_fails_in_its_middle_is_told_to_those_it_had_begun_with(caplog):
    with answering(**KNORM) as answerer:
        jobs = [Asked("What is a list?", max_tokens=20), Asked("What is a dict?", max_tokens=20, stop=["zzzz"])]

        def fail(event):
            jobs[0].note(event)
            if len(jobs[0].events) == 3:
                raise RuntimeError("broken")

        jobs[0].say = fail
        told, _ = together(answerer, jobs)
        assert {end for _, end in told} == {(500, "the server failed at this request; its log says why")}
    assert "a request failed" in caplog.text


def test_what_is_evicted_while_an_answer_is_made_is_not_counted():
    with answering(**STREAMING, eviction_every=16) as answerer:
        told, sizes = together(answerer, [Asked(about(TEXT, "\n\nWhy?"), max_tokens=100) for _ in range(2)])
    assert sizes == [1, 1]
    with answering(**STREAMING) as answerer:
        whole = alone(answerer, [Asked(about(TEXT, "\n\nWhy?"), max_tokens=100)])
    assert told[0][1].new_tokens == whole[0][1].new_tokens == 100
    assert told[0][1].dense_cache_bytes == whole[0][1].dense_cache_bytes
    assert told[0][1].cache_bytes < whole[0][1].cache_bytes

"""The page in a browser: ask, move the slider, see pictures change; nothing from elsewhere, no error in the console."""

import hashlib
import os
import re
import time
from contextlib import contextmanager

import pytest

from subtoken_train.demo.drawings import presets
from subtoken_train.demo.local_server import served
from subtoken_train.demo.side_by_side import SideBySide
from subtoken_train.resources import resource
from tests.support.eval_runs import free_port
from tests.support.report_results import OPTIONS, find_browser

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
pytest.importorskip("gradio", reason="no Gradio here: pip install 'subtoken_train[demo]'")
ROUTED = str(resource("checkpoints/adapters/tiny_fastv25_s16k4"))


@pytest.fixture(scope="module")
def serve():
    """Serves a page that is asked to fetch nothing."""
    find_browser()
    before = dict(os.environ)

    @contextmanager
    def serving(models):
        os.environ["http_proxy"] = "http://127.0.0.1:9"  # where nobody listens
        with served(models, "127.0.0.1", free_port()) as url:
            del os.environ["http_proxy"]
            yield url

    yield serving
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def address(serve):
    with serve(SideBySide(ROUTED, f"{ROUTED}_anchor", device="cpu")) as url:
        yield url


@contextmanager
def opened(address):
    """The page, 1,280 pixels wide; afterwards, what the browser asked for and said."""
    asked, said = [], []
    with playwright.sync_playwright() as program:
        browser = program.chromium.launch(executable_path=find_browser(), args=OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
    assert said == []
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.fixture
def page(address):
    with opened(address) as page:
        yield page


def answer(page, place):
    return page.locator(f"#answer-{place} textarea").input_value()


def ask(page, example):
    page.get_by_text(example).first.click()
    page.wait_for_selector("#picture img")
    playwright.expect(page.locator("#question textarea")).to_have_value(example)
    page.click("#ask")
    page.wait_for_selector("#groups-0 img", state="attached")


def wait_until(page, holds, words):
    """Look again and again, for a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, words
        page.wait_for_timeout(200)


def test_a_text_is_asked_and_its_kept_words_are_marked(serve):
    with serve(SideBySide(backbone="checkpoints/tiny-llama", device="cpu")) as url, opened(url) as page:
        text, question = presets(pictures=False)[0]
        page.locator("#text textarea").fill(text)
        page.locator("#question textarea").fill(question)
        page.locator("#eviction input").fill("kvzip")
        page.locator("#eviction input").press("Enter")
        page.locator("#keep textarea").fill("0.2")
        page.wait_for_timeout(500)
        page.click("#ask")
        playwright.expect(page.locator("#tokens-1")).to_contain_text("plays the cello", timeout=60_000)
        assert re.search(r"compressed\tkvzip 0.2\t", page.locator("#facts").inner_text())
        colours = "own => new Set([...own.querySelectorAll('span')].map(e => getComputedStyle(e).backgroundColor)).size"
        whole, kept = (page.locator(f"#tokens-{place}").evaluate(colours) for place in (0, 1))
        assert kept > whole
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=f"{folder}/demo_text.png", full_page=True)


def test_ask_and_move_the_slider(page):
    ask(page, "what is at C4 ?")
    assert [answer(page, place) for place in range(3)] == ["white 4"] * 3
    facts = page.locator("#facts").inner_text()
    assert re.search(r"routed model\tfastv 0.25, S16K4 linear\t[\d,]+\t[\d.]+%\t15\.625%\t15\.625%", facts)
    places = ("tokens-1", "tokens-2", "groups-1")

    def digests():  # of the pictures that are shown, as the browser has them
        sources = {name: page.locator(f"#{name} img").get_attribute("src") for name in places}
        return {name: hashlib.sha256(page.request.get(source).body()).hexdigest() for name, source in sources.items()}

    last = digests()
    slider = page.locator("#layer input[type=range]")
    for _ in range(5):
        slider.press("ArrowLeft")
    playwright.expect(slider).to_have_value("0")
    wait_until(page, lambda: not set(digests().values()) & set(last.values()), "the pictures of layer 5 stay")
    slider.press("End")
    wait_until(page, lambda: digests() == last, "the pictures of layer 5 do not come back")
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/demo.png", full_page=True)


def test_refusals_are_words_that_go_again(page):
    words, eviction = page.locator("#words textarea"), page.locator("#eviction input")
    page.get_by_label("Remove Image").click()
    page.click("#ask")
    playwright.expect(words).to_have_value("there is no picture; upload one, or use one of the examples")
    page.get_by_text("is there a 7 ?").first.click()
    eviction.fill("snapkv")
    eviction.press("Enter")
    page.locator("#keep textarea").fill("0.5")
    page.wait_for_timeout(500)
    page.click("#ask")
    page.wait_for_selector("#groups-0 img", state="attached")
    assert "snapkv 0.5" in page.locator("#facts").inner_text()
    playwright.expect(words).to_be_hidden()

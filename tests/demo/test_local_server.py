"""Addresses that a server cannot have are refused in words; so is everything that the command finds before it loads."""

import os
import signal
import socket
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from subtoken_train.demo.local_server import check_address, serve, served
from tests.support.refusals import refuses


def test_a_port_in_use_and_a_free_one_which_stays_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refuses(rf"--port {port} of 127\.0\.0\.1 is in use; choose another one", check_address, "127.0.0.1", port)
    check_address("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_no_address_of_this_machine_and_no_ipv6():
    nowhere = dict.fromkeys(("no such host", "203.0.113.1", "a" * 80), "is no address of this machine")
    for host, words in {**nowhere, "::1": "is no IPv4 address; give one, or a name"}.items():
        refuses(words, check_address, host, 45678)


class Page:
    """Stands for Gradio's: fails before or after it listens, and notes what it was launched with."""

    def __init__(self, error=None, is_running=False):
        self.error, self.is_running, self.proxies = error, is_running, None

    def launch(self, **settings):
        self.proxies = os.environ.get("no_proxy")
        if self.error:
            raise self.error
        self.is_running = True
        return None, f"http://{settings['server_name']}:{settings['server_port']}/", None

    def close(self, verbose):
        self.is_running = False


@pytest.fixture
def launched(monkeypatch):
    """A function that serves a page of one's own; its variables do not stay."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def launch(page):
        blocks = SimpleNamespace(build_page=lambda models: page, looks=lambda: None, STYLE="")
        monkeypatch.setitem(sys.modules, "subtoken_train.demo.blocks", blocks)
        return served(None, "127.0.0.1", 45678)

    return launch


@pytest.mark.parametrize(
    ("error", "listens", "words"),
    [
        (OSError("Cannot find empty port"), False, "--port 45678 of 127.0.0.1 is in use"),
        (OSError("refused"), True, "does not reach its own page there, on port 45678; use 127.0.0.1"),
        (ValueError("a link must be created: share=True"), True, "--host 127.0.0.1: this machine does not reach"),
        (ValueError("a setting"), False, "^a setting$"),
    ],
)
def test_what_gradio_says_is_worded(launched, error, listens, words):
    page = Page(error, listens)
    with pytest.raises(ValueError, match=words), launched(page):
        pytest.fail("served")
    assert not page.is_running


@pytest.mark.parametrize("before", [None, "example.org"])
def test_its_own_page_is_behind_no_proxy(launched, monkeypatch, before):
    if before is None:
        os.environ.pop("no_proxy", None)
    else:
        os.environ["no_proxy"] = before
    page = Page()
    with launched(page) as url:
        assert (url, page.proxies) == ("http://127.0.0.1:45678/", "*")
        assert os.environ.get("no_proxy") == before
    assert not page.is_running


def test_sigterm_ends_it_as_ctrl_c_does(monkeypatch):
    ended = []

    @contextmanager
    def page(models, host, port):
        try:
            yield "address"
        finally:
            ended.append(host)

    monkeypatch.setattr("subtoken_train.demo.local_server.served", page)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        serve(None, "127.0.0.1", 45678, lambda url: os.kill(os.getpid(), signal.SIGTERM))
    assert ended == ["127.0.0.1"]
    assert signal.getsignal(signal.SIGTERM) is before

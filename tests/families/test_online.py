"""The Hub is asked once; where it does not answer nothing waits for it again, and messages say why."""

from __future__ import annotations

import warnings

import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from subtoken_train.artifact.hub import find_adapter, worded
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families import online
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family


@pytest.fixture
def asked(monkeypatch):
    """A machine without a network, as the client meets it: what it was asked for, in order."""
    requests: list[str] = []

    def refuse(self, request):
        requests.append(str(request.url).rstrip("/"))
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", refuse)
    monkeypatch.setattr(online, "_answer", online._Answer())
    monkeypatch.setattr(online, "_PAUSE", 0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # given back afterwards
    return requests


def test_no_answer_is_asked_for_once_in_all_commands(asked):
    for call in (
        lambda: find_adapter("nobody/adapter"),
        lambda: find_adapter("nobody/other"),
        lambda: load_family(BackboneConfig(path="nobody/backbone")),
        lambda: layout_family(BackboneConfig(path="nobody/backbone")),
    ):
        with pytest.raises(ValueError, match=r"no answer from .* \(ConnectError: no route\): check the net"):
            call()
    assert asked == [constants.ENDPOINT] * 2


def test_a_cached_answer_comes_with_one_warning(asked):
    said = "no route.*: the local cache is read; HF_HUB_OFFLINE=1 does not ask"
    with pytest.warns(SubTokenWarning, match=said), online.hub_asked():
        pass
    with warnings.catch_warnings(), online.hub_asked():
        warnings.simplefilter("error")


def test_who_said_offline_is_not_told_of_the_network(asked, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with online.hub_asked():
        pass
    assert asked == []
    assert "HF_HUB_OFFLINE is set" in worded(OfflineModeIsEnabled(), "user/name")


def test_any_answer_will_do(asked, monkeypatch):
    monkeypatch.setattr(
        httpx2.Client, "request", lambda self, method, url, **_: asked.append(url) or httpx2.Response(503)
    )
    for _ in range(2):
        with online.hub_asked():
            assert not constants.HF_HUB_OFFLINE
    assert asked == [constants.ENDPOINT]

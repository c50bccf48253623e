"""Every way in which the Hub's client can fail is one line that says what to do."""

from __future__ import annotations

import re

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from subtoken_train.artifact.hub import hub_errors


def answered(status, message=None):
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/api/x"))
    return HfHubHTTPError(f"{status} Error\n\n for url", response=response, server_message=message)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (answered(401), "the Hub does not know this token (401)"),
        (answered(403, "no rights"), "this token may not write to user/name (403: no rights)"),
        (answered(429), "the Hub cannot serve this now (429); try again later"),
        (answered(503, "busy"), "the Hub cannot serve this now (503: busy); try again later"),
        (answered(409), "the Hub refused user/name: 409 Error for url"),
        (httpx2.ConnectError("refused"), "(ConnectError: refused); check the network"),
        (OfflineModeIsEnabled(), "HF_HUB_OFFLINE is set, so the Hub cannot be reached; unset it"),
        (
            caused(LocalEntryNotFoundError("no"), httpx2.ConnectError("down")),
            "user/name@v1 is not in the local cache (",
        ),
        (caused(RuntimeError("thread"), answered(403)), "this token may not write to user/name (403)"),
        (caused(RuntimeError("thread"), OSError("No space left on device")), "user/name: No space left on device"),
        (ConnectionError("transfer broke off"), "user/name: transfer broke off"),
    ],
)
def test_wording(error, words):
    with pytest.raises(ValueError, match=re.escape(words)) as raised, hub_errors("user/name", "v1"):
        raise error
    assert "\n" not in str(raised.value)


def test_our_own_mistakes_pass():
    with pytest.raises(KeyError), hub_errors("user/name"):
        raise KeyError("x")

"""Ask whether the Hugging Face Hub answers: once per process; its client would wait half a minute for each file."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from huggingface_hub import constants, get_session

from subtoken_train.errors import SubTokenWarning

_PATIENCE = 10.0  # seconds


@dataclass
class _Answer:
    asked: bool = False
    reason: str | None = None  # there is no answer; None too where the user said not to ask
    said: bool = False  # to the user


_answer = _Answer()


def silence() -> str | None:
    """Return why the Hub was not reached and what to do, for messages; None if it was, or nobody asked."""
    if _answer.reason is None:
        return None
    return f"{_answer.reason}: check the network, or set HF_HUB_OFFLINE=1 and use what is in the local cache"


@contextmanager
def hub_asked() -> Iterator[None]:
    """Allow the Hub inside the block; if it does not answer, only the local cache is read, with a warning."""
    _ask()
    yield
    if _answer.reason is not None and not _answer.said:
        _answer.said = True
        warnings.warn(
            f"{_answer.reason}: the local cache is read; HF_HUB_OFFLINE=1 does not ask at all",
            SubTokenWarning,
            stacklevel=3,
        )


def _ask() -> None:
    """Send one small request; after a failure the client is offline, in this process and in its children."""
    if _answer.asked or constants.is_offline_mode():
        return
    _answer.asked = True
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
        return
    except httpx2.TransportError as error:
        _answer.reason = f"no answer from {constants.ENDPOINT} ({type(error).__name__}: {error})"
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "datasets.config" in sys.modules:  # it keeps a copy
        vars(sys.modules["datasets.config"])["HF_HUB_OFFLINE"] = True

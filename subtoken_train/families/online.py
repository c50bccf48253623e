"""Ask whether the Hugging Face Hub answers: once per process; its client would wait half a minute for each file."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_session

from subtoken_train.errors import SubTokenWarning

_PATIENCE = 10.0  # seconds


_reasons: list[str | None] = []  # why there was no answer, once the Hub was asked; None: there was


def silence() -> str | None:
    """Return why the Hub was not reached and what to do, for messages; None if it was, or nobody asked."""
    if not any(_reasons):
        return None
    return f"{_reasons[0]}: check the network, or set HF_HUB_OFFLINE=1 and use what is in the local cache"


@contextmanager
def hub_asked() -> Iterator[None]:
    """Allow the Hub inside the block; if it does not answer, only the local cache is read, with a warning, once."""
    found = None if _reasons or constants.is_offline_mode() else _asked()
    yield
    if found is not None:
        words = f"{found}: the local cache is read; HF_HUB_OFFLINE=1 does not ask at all"
        warnings.warn(words, SubTokenWarning, stacklevel=3)


def _asked() -> str | None:
    """Send one small request; after a failure the client is offline, in this process and in its children."""
    _reasons.append(None)
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
        return None
    except httpx2.TransportError as error:
        _reasons[0] = f"no answer from {constants.ENDPOINT} ({type(error).__name__}: {error})"
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "datasets.config" in sys.modules:  # it keeps a copy
        vars(sys.modules["datasets.config"])["HF_HUB_OFFLINE"] = True
    return _reasons[0]

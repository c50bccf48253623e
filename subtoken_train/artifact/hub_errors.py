"""What the Hub's client raises, as one worded ``ValueError``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from subtoken_train.families.hub import silence

NO_TOKEN = (
    "no Hugging Face token was found: run 'hf auth login', or set HF_TOKEN, with a token that may write "
    "(https://huggingface.co/settings/tokens)"
)
BAD_TOKEN = "the Hub does not know this token (401): run 'hf auth login' again, or correct HF_TOKEN"
OFFLINE = "HF_HUB_OFFLINE is set, so nothing is asked of the Hub; unset it"

KNOWN = (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, LocalTokenNotFoundError)
"""What ``worded`` understands."""


@contextmanager
def hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Inside, an error of the client is a ``ValueError`` that says what to do; other errors pass.

    Args:
        repo_id: the repository that is asked for.
        revision: its revision, None for the default branch.
    """
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no Hub name ({error}); write user/name") from error
    except KNOWN as error:
        raise ValueError(worded(error, repo_id, revision)) from error
    except (RuntimeError, OSError) as error:  # an upload's thread or transfer program failed, or the disk
        cause = error.__cause__
        reason = worded(cause, repo_id, revision) if isinstance(cause, KNOWN) else f"{repo_id}: {cause or error}"
        raise ValueError(reason) from error


def worded(error: BaseException, repo_id: str, revision: str | None = None) -> str:
    """One line for an error of the client."""
    fixed = {
        LocalTokenNotFoundError: NO_TOKEN,
        GatedRepoError: f"{repo_id} is gated: ask for access at {constants.ENDPOINT}/{repo_id}, then 'hf auth login'",
        RevisionNotFoundError: f"{repo_id} has no revision {revision!r}; name a branch, a tag or a commit of it",
        OfflineModeIsEnabled: _offline(),
    }
    for kind, words in fixed.items():
        if isinstance(error, kind):
            return words
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__
        reason = worded(cause, repo_id, revision) if isinstance(cause, KNOWN) else _offline()
        return f"{repo_id}{_at(revision)} is not in the local cache ({constants.HF_HUB_CACHE}): {reason}"
    if isinstance(error, HfHubHTTPError):
        return _status(error, repo_id)
    return f"no answer from {constants.ENDPOINT} ({type(error).__name__}: {error}); check the network"


def _offline() -> str:
    """Who decided that nothing is asked."""
    return silence() or OFFLINE


def _at(revision: str | None) -> str:
    return "" if revision is None else f"@{revision}"


def _status(error: HfHubHTTPError, repo_id: str) -> str:
    """The message for an answer of the Hub that is an error."""
    status = error.response.status_code
    said = f": {error.server_message}" if error.server_message else ""
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return BAD_TOKEN
    if status in (401, 404):
        return (
            f"{repo_id} is not on the Hub, or this token may not see it ({status}); check the name, and log in "
            "('hf auth login') where it is private"
        )
    if status == 403:
        return f"this token may not write to {repo_id} (403{said}); take a token with write permission there"
    if status >= 500 or status == 429:
        return f"the Hub cannot serve this now ({status}{said}); try again later"
    first = re.sub(r"\s+", " ", str(error)).strip()
    return f"the Hub refused {repo_id}: {first}"

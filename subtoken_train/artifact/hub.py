"""Publish a folder on the Hugging Face Hub: what can be refused is found out first, and a push is one commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from subtoken_train.artifact.hub_errors import NO_TOKEN, hub_errors
from subtoken_train.families.load import is_hub_id

_OURS = ["*.safetensors", "*.safetensors.index.json", "*.json", "recipe.yaml"]
"""What an earlier push may have left and a new one has not: it would make the folder disagree with itself."""


@dataclass(frozen=True)
class Destination:
    """Where a folder is published.

    Attributes:
        repo_id: ``user/name`` or ``organisation/name``; made where it does not exist.
        private: whether nobody else may see it.
        revision: the branch, made where it does not exist; None: the default branch.
        message: of the commit.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    message: str | None = None


def check_backbone(path: str) -> None:
    """Raise a worded ``ValueError`` unless a backbone can be found by those who load the adapter."""
    if not is_hub_id(path):
        raise ValueError(
            f"the backbone {path!r} is no Hub id, so nobody else could load the adapter; train with its Hub id, or "
            "export with --backbone user/name (publish the backbone first where it is your own)"
        )


def check_name(repo_id: str) -> None:
    """Raise a worded ``ValueError`` unless ``repo_id`` reads as ``user/name``; the Hub is not asked."""
    if not is_hub_id(repo_id):
        raise ValueError(f"{repo_id!r} is no Hub name; write user/name (letters, digits, '-', '_' and '.')")


def check_destination(destination: Destination) -> None:
    """Ask the Hub, without changing anything, whether ``push_folder`` would be allowed.

    Raises:
        ValueError: a name that is none, no or a wrong token, one without write permission, a public repository where a
            private one is asked for, or no connection.
    """
    repo_id = destination.repo_id
    check_name(repo_id)
    if get_token() is None:
        raise ValueError(NO_TOKEN)
    api = HfApi()
    with hub_errors(repo_id):
        _check_owner(api.whoami(), repo_id)
        try:
            info = api.model_info(repo_id)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return  # it will be made
        api.auth_check(repo_id, write=True)
    if destination.private and not info.private:
        raise ValueError(f"{repo_id} exists and is public; make it private in its settings, or choose another name")


def push_folder(folder: Path, destination: Destination) -> str:
    """Upload a folder as one commit and return its address; files of an earlier push that it has not are removed.

    The commit comes after all files have arrived: a connection that breaks leaves the repository as it was, and what
    did arrive is not sent again.

    Raises:
        ValueError: the Hub refused, or cannot be reached.
    """
    repo_id, revision = destination.repo_id, destination.revision
    api = HfApi()
    with hub_errors(repo_id, revision):
        api.create_repo(repo_id, private=True if destination.private else None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=destination.message or f"Upload {folder.name} with subtoken_train",
            delete_patterns=list(_OURS),
        )
    return str(commit.commit_url)


def _check_owner(user: dict[str, Any], repo_id: str) -> None:
    """Whether a token's user, with the token's role, may write under a name."""
    owner, allowed = repo_id.split("/", maxsplit=1)[0], [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if owner not in allowed:
        names = ", ".join(f"{name}/..." for name in allowed)
        raise ValueError(f"the token of {user['name']!r} may not write to {repo_id}; allowed: {names}")
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"the token of {user['name']!r} may only read; take one that may write to {repo_id}")

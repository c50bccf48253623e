"""Where an adapter is: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from subtoken_train.artifact.hub import hub_errors
from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.families.backbone_config import check_revision, is_hub_id, resolve
from subtoken_train.families.online import hub_asked

RUN_ADAPTER, CHECKPOINTS = "adapter", "checkpoints"
"""Of a run's folder."""
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.md"]
"""Data only: no pickle, no code. A merged folder's chat template is a .jinja file."""


def adapter_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of an adapter by its path, its run's path or its Hub id; downloaded where need be.

    Raises:
        ValueError: there is no such adapter, or the Hub cannot be asked.
    """
    folder = find_adapter(name, revision)
    if folder is None:
        if (Path(name) / CHECKPOINTS).is_dir():
            raise ValueError(
                f"{name} is a run without a finished adapter; 'subtoken-train export {name} OUT' makes one of its "
                "newest checkpoint"
            )
        kind = "repository" if is_hub_id(str(name)) else "folder"
        raise ValueError(f"{name} is not an adapter {kind}: it has no {CONFIG_FILE}")
    return folder


def find_adapter(name: str | Path, revision: str | None = None) -> Path | None:
    """The same, and None for what is no adapter: a backbone's folder or Hub id, or a folder that does not exist.

    With HF_HUB_OFFLINE set, or without a connection, the local cache is read.

    Raises:
        ValueError: the Hub has no such repository or revision, does not give it to this token, or cannot be reached and
            the cache does not hold it either; or a revision of a folder.
    """
    if not is_hub_id(str(name)):
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for Hub ids, and {name} is a folder; leave it out")
        return adapter_in(Path(resolve(str(name))))
    check_revision(revision)
    repo_id = str(name)
    with hub_errors(repo_id, revision), hub_asked():
        try:
            hf_hub_download(repo_id, CONFIG_FILE, revision=revision)
        except LocalEntryNotFoundError:
            if isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str):
                return None  # a backbone in the cache
            raise
        except EntryNotFoundError:
            return None
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_FILES))


def adapter_in(folder: Path) -> Path | None:
    """The adapter that a folder is, or that a run's folder (which is no backbone) holds; None for others."""
    if (folder / CONFIG_FILE).is_file():
        return folder
    own = folder / RUN_ADAPTER
    return own if (own / CONFIG_FILE).is_file() and not (folder / "config.json").is_file() else None

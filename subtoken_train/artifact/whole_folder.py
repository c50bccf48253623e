"""Folders that are whole or not there."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subtoken_train.artifact.layout import Layout, make_folder, names_of, unmake_folders

CONFIG_FILE = "subtoken_config.json"
"""What makes a folder an adapter folder."""
ADAPTER_FILES = (
    r"adapter_config\.json|adapter_model\.safetensors|router\.safetensors|subtoken_config\.json|recipe\.yaml"
    r"|README\.md|output/(adapter_config\.json|adapter_model\.safetensors|README\.md)"
)
_MERGED_FILES = (
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
    r"|tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|((video_)?pre)?processor_config\.json|chat_template\.(jinja|json)|additional_chat_templates/.+\.jinja"
)
ADAPTER = Layout(
    re.compile(f"{ADAPTER_FILES}|{_MERGED_FILES}"), re.compile(r"output|additional_chat_templates"), last=CONFIG_FILE
)
"""An adapter folder, or one with merged weights."""
DATA_MARKER = ".subtoken-data.json"
"""What makes a folder a data set that the ``data`` command wrote; those of version 0.1 have none."""


def check_target(folder: Path, overwrite: bool, layout: Layout = ADAPTER, kind: str = "an adapter folder") -> None:
    """Raise a worded ``ValueError`` unless ``folder`` may be written: new, or one of its kind and nothing else in it.

    Args:
        folder: the target.
        overwrite: whether an old one is to be replaced.
        layout: what a folder of this kind is made of; ``last`` is what it must hold.
        kind: for messages, with its article.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not overwrite:
        raise ValueError(f"{folder} exists; choose another folder or pass --overwrite")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, which is not replaced; name the folder itself, or another")
    if not (folder / layout.last).is_file():
        raise ValueError(f"{folder} is not {kind} (no {layout.last}), so it is not replaced; choose another")
    if others := layout.others(folder):
        raise ValueError(
            f"{folder} holds what {kind} has not ({names_of(others, folder)}), so it is not replaced; move that away, "
            "or choose another folder"
        )


def mark_data(folder: Path, name: str) -> None:
    """Mark a data set."""
    (folder / DATA_MARKER).write_text(json.dumps({"made_by": f"subtoken-train data {name}"}) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(
    folder: Path, overwrite: bool, layout: Layout = ADAPTER, kind: str = "an adapter folder"
) -> Iterator[Path]:
    """A temporary sibling to write into, which takes ``folder``'s name at the end, or vanishes after an error.

    An old folder is renamed before, and removed after; its siblings have names that nobody else has.

    Raises:
        ValueError: see ``check_target``.
    """
    check_target(folder, overwrite, layout, kind)
    token = secrets.token_hex(4)
    temporary, old = (folder.with_name(f"{folder.name}.{word}-{token}") for word in ("partial", "replaced"))
    made = make_folder(temporary)
    try:
        yield temporary
        check_target(folder, overwrite, layout, kind)  # again: hours may have passed
    except BaseException:
        shutil.rmtree(temporary)
        unmake_folders(made)
        raise
    if not folder.exists():
        temporary.rename(folder)
        return
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    layout.remove(old)

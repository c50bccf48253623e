"""Folders that are whole or not there, and what they are made of: nothing else in them is ever removed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.documents import read_json
from subtoken_train.outputs import remove_if_empty, stage, take_left


@dataclass(frozen=True)
class Layout:
    """The files and folders of one kind of folder, by their paths in it (``/`` between the parts)."""

    files: re.Pattern[str]
    """Matches the whole path of every file (or symbolic link) that is ours."""
    folders: re.Pattern[str]
    """The same for folders; what lies in another folder is not looked at and not ours."""
    last: str
    """The file that is removed last: what says that the folder is ours."""
    kind: str
    """Such a folder in words, with its article."""
    made_by: str | None = None
    """The command that ``last`` must name, where several kinds have the same marker."""

    def others(self, root: Path) -> list[Path]:
        """Return what in ``root`` is not ours: files, and folders as a whole."""
        return [item for item, ours in self._sorted(root, root) if not ours]

    def remove(self, root: Path) -> list[Path]:
        """Remove what is ours (of a link, the link) and the folders that it leaves empty; returns what stays."""
        found, last = list(self._sorted(root, root)), root / self.last
        for item, ours in found:
            if ours and item.is_dir() and not item.is_symlink():
                remove_if_empty(item)
            elif ours and item != last:
                item.unlink()
        if [item for item in root.iterdir() if item != last] == []:
            last.unlink(missing_ok=True)
            root.rmdir()
        return [item for item, ours in found if not ours]

    def _sorted(self, folder: Path, root: Path) -> Iterator[tuple[Path, bool]]:
        """Yield what lies in a folder, and whether it is ours; our folders come behind what is in them."""
        for item in sorted(folder.iterdir()):
            name = item.relative_to(root).as_posix()
            if item.is_symlink() or not item.is_dir():
                yield item, self.files.fullmatch(name) is not None
            elif ours := self.folders.fullmatch(name) is not None:
                yield from self._sorted(item, root)
                yield item, ours
            else:
                yield item, ours


CONFIG_FILE = "subtoken_config.json"
"""Layout of an adapter folder."""
RECIPE_FILE = "recipe.yaml"
"""In an adapter's folder and in a run's."""
PICTURE_FILE = "training.png"
"""In an adapter's folder: the course of its training."""
_FILES = (
    r"adapter_config\.json|adapter_model\.safetensors|router\.safetensors|subtoken_config\.json|recipe\.yaml"
    r"|training\.png|README\.md|output/(adapter_config\.json|adapter_model\.safetensors|README\.md)"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
    r"|tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|((video_)?pre)?processor_config\.json|chat_template\.(jinja|json)|additional_chat_templates/.+\.jinja"
)
ADAPTER = Layout(
    re.compile(_FILES), re.compile(r"output|additional_chat_templates"), last=CONFIG_FILE, kind="an adapter folder"
)
"""An adapter folder, or one with merged weights."""
DATA_MARKER = ".subtoken-data.json"
"""Layout of a data set that ``data`` or ``init`` wrote; those of version 0.1 have none."""


def check_target(folder: Path, overwrite: bool, layout: Layout = ADAPTER) -> None:
    """Raise ``ValueError`` unless ``folder`` may be written: new, or one of its kind and nothing else in it."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not overwrite:
        raise ValueError(f"{folder} exists; choose another folder or pass --overwrite")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, which is not replaced; name the folder itself, or another")
    if not (folder / layout.last).is_file():
        raise ValueError(f"{folder} is not {layout.kind} (no {layout.last}), so it is not replaced; choose another")
    if layout.made_by is not None and _maker(folder / layout.last) != layout.made_by:
        raise ValueError(
            f"{folder} is not {layout.kind} ({layout.last} does not name {layout.made_by!r}), so it is not replaced; "
            "choose another"
        )
    if others := [item.relative_to(folder).as_posix() for item in layout.others(folder)]:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3:,} more" if len(others) > 3 else "")
        raise ValueError(
            f"{folder} holds files that do not belong to {layout.kind} ({names}), so it is "
            "not replaced; move them away, or choose another folder"
        )


def mark_data(folder: Path, layout: Layout) -> None:
    """Mark a data set as made by its layout's command."""
    (folder / DATA_MARKER).write_text(json.dumps({"made_by": layout.made_by}) + "\n", encoding="utf-8")


def _maker(marker: Path) -> str | None:
    try:
        content = read_json(marker)
    except ValueError:
        return None
    return content.get("made_by") if isinstance(content, dict) else None


@contextmanager
def whole_folder(folder: Path, overwrite: bool, layout: Layout = ADAPTER) -> Iterator[Path]:
    """Yield a new folder to write into, which takes ``folder``'s name at the end, or vanishes after an error.

    An old folder is renamed to ``NAME.replaced-`` and the stage's token before, and removed after; what a killed
    process left of that is settled by the next call.
    """
    _settle(folder, layout)
    check_target(folder, overwrite, layout)
    with stage(folder) as temporary:
        temporary.mkdir()
        yield temporary
        check_target(folder, overwrite, layout)  # again: hours may have passed
        if not folder.exists():
            temporary.rename(folder)
            return
        old = _replaced(folder, temporary.parent)
        folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        layout.remove(old)


def _replaced(folder: Path, own: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced-{own.name[-8:]}")


def _settle(folder: Path, layout: Layout) -> None:
    """Put back, or finish removing, the old folders of writers that were killed while they replaced them."""
    for own in take_left(folder):
        old = _replaced(folder, own)
        if old.is_symlink() or not old.is_dir():
            continue
        remove_if_empty(old)  # killed when all but the folder itself was removed
        if not (old / layout.last).is_file():
            continue
        if not os.path.lexists(folder):
            old.rename(folder)
        elif (folder / layout.last).is_file():  # the new one stands
            layout.remove(old)

"""Which folder ``subtoken-train export`` reads: a run, one of its checkpoints, or an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from subtoken_train.artifact.whole_folder import CONFIG_FILE, PICTURE_FILE, RECIPE_FILE
from subtoken_train.documents import check_regular
from subtoken_train.training.checkpoints import newest_complete, read_marker

_PNG, _MAX_PICTURE = b"\x89PNG\r\n\x1a\n", 2**20


@dataclass(frozen=True)
class Source:
    """What is exported: an adapter folder or a checkpoint folder, and the recipe beside it where there is one."""

    folder: Path
    is_adapter: bool
    recipe: Path | None

    def picture(self) -> bytes | None:
        """The picture of the training that an adapter folder holds; None where it holds none of ours."""
        path = self.folder / PICTURE_FILE
        if not self.is_adapter or not path.is_file() or check_regular(path) > _MAX_PICTURE:
            return None
        content = path.read_bytes()
        return content if content.startswith(_PNG) else None


def find_source(path: Path) -> Source:
    """The adapter or checkpoint that a path means: a run's adapter comes first, then its newest complete checkpoint.

    Raises:
        ValueError: neither a run, nor a complete checkpoint of one, nor an adapter folder.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name a run (runs/NAME), one of its checkpoints, or an adapter")
    for adapter in (path, path / "adapter"):
        if (adapter / CONFIG_FILE).is_file():
            return Source(adapter, True, _recipe_of(adapter))
    checkpoint = _checkpoint_of(path)
    read_marker(checkpoint)
    recipe = _recipe_of(checkpoint.parent)
    if recipe is None:
        raise ValueError(
            f"{checkpoint} has no {RECIPE_FILE} in {checkpoint.parent.parent}, which says what its tensors belong to"
        )
    return Source(checkpoint, False, recipe)


def _checkpoint_of(path: Path) -> Path:
    """A checkpoint folder itself, or the newest complete one of a run or of its ``checkpoints``."""
    if path.name.startswith("step-"):
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{path} is neither a run, a checkpoint of one, nor an adapter folder (no {CONFIG_FILE})")
    newest = newest_complete(folder)
    if newest is None:
        raise ValueError(f"{path} holds no adapter and no complete checkpoint; train it first")
    return newest


def _recipe_of(folder: Path) -> Path | None:
    """The recipe in a folder or beside it."""
    return next((place / RECIPE_FILE for place in (folder, folder.parent) if (place / RECIPE_FILE).is_file()), None)

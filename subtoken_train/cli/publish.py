"""Publishing from the command line: everything is asked before the work, and a failed upload loses nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

from subtoken_train.artifact.hub import Destination, check_backbone, check_destination, push_folder
from subtoken_train.errors import UncutError


def check_publishing(destination: Destination, backbone: str | None) -> None:
    """Raise a worded ``ValueError`` unless a folder can be published there; ``backbone`` None: it holds its own."""
    if backbone is not None:
        check_backbone(backbone)
    check_destination(destination)


def publish(folder: Path, destination: Destination, retry: list[str]) -> None:
    """Push a folder that is safely on disk, and say where it is; or how to try again.

    Args:
        folder: the adapter folder.
        destination: where to.
        retry: the words of the command that pushes it again.

    Raises:
        ValueError: the push failed; the folder stays.
    """
    try:
        address = push_folder(folder, destination)
    except ValueError as error:
        raise UncutError(
            f"{folder} is written, but not published: {error}. Try again with: {shlex.join(retry)}"
        ) from error
    print(f"published: {address}")

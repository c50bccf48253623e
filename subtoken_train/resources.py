"""Files that travel with the project: recipes, small data, embedded checkpoints.

In a checkout they are the repository's own top-level folders; in an installed wheel they lie under
``subtoken_train/_bundled``.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_root() -> Path:
    """The folder that holds ``recipes/``, ``data/`` and ``checkpoints/``."""
    bundled = _PACKAGE / "_bundled"
    return bundled if bundled.is_dir() else _PACKAGE.parent


def resource(relative: str) -> Path:
    """The path of a shipped file, e.g. ``data/digits/digits.npz``.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    path = resource_root() / relative
    if not path.exists():
        raise FileNotFoundError(f"{relative} is missing from this installation (looked in {resource_root()})")
    return path

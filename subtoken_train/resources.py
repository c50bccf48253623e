"""Files that travel with the project: recipes, small data, embedded checkpoints.

In a checkout they are the repository's own top-level folders; in an installed wheel they lie under
``subtoken_train/_bundled``. ``find_recipe`` finds a recipe by name from any folder. Most recipes are names alone, made
from a base and a line of a table (``recipe_names``): their paths say where they would lie, and ``recipe_text`` reads
both kinds.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from subtoken_train.documents import read_text
from subtoken_train.recipe_names import read_names

_PACKAGE = Path(__file__).resolve().parent


def resource_root() -> Path:
    """Return the folder that holds ``recipes/``, ``data/`` and ``checkpoints/``."""
    bundled = _PACKAGE / "_bundled"
    return bundled if bundled.is_dir() else _PACKAGE.parent


def resource(relative: str) -> Path:
    """Return the path of a shipped file, e.g. ``data/digits/digits.npz``.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    path = resource_root() / relative
    if not path.exists():
        raise FileNotFoundError(f"{relative} is missing from this installation (looked in {resource_root()})")
    return path


def recipe_files() -> dict[str, Path]:
    """Return every shipped recipe, overlay and grid by ``FOLDER/NAME`` without suffix, sorted.

    A run's recipe lies at the top of ``recipes/``, or is a name alone (see ``recipe_text``); its FOLDER is its model.
    """
    folder = resource("recipes")
    names = {path.stem: path for path in folder.glob("*.yaml")}
    names |= {name: folder / f"{name}.yaml" for name in read_names(folder)}
    found = {f"{name.partition('_')[0]}/{name}": path for name, path in names.items()}
    found |= {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("*/*.yaml")}
    return dict(sorted(found.items()))


def recipe_text(path: Path, max_bytes: int = 2**20) -> str:
    """Return the text of a recipe's file, or of a shipped name: its base with the settings of its line.

    Raises:
        ValueError: the file cannot be read, see ``documents.read_text``.
    """
    folder = resource_root() / "recipes"
    row = None if path.exists() or path.parent.resolve() != folder.resolve() else read_names(folder).get(path.stem)
    if row is not None:
        return row.text(read_text(folder / f"{row.base}.yaml", max_bytes))
    return read_text(path, max_bytes)


def recipe_file(path: Path) -> Path:
    """Return the file behind a shipped recipe: its own, or its base's where the recipe is a name."""
    row = None if path.exists() else read_names(path.parent).get(path.stem)
    return path if row is None else path.with_name(f"{row.base}.yaml")


def find_recipe(given: str | Path) -> Path | None:
    """Return the file that a user means: one that exists, else a shipped recipe; None if the path leads nowhere.

    A shipped one is written ``NAME`` or ``FOLDER/NAME``, alone or below any folder ``recipes``, ``.yaml`` or not:
    ``llava7b_fastv25_s16k4``, ``recipes/llava7b_fastv25_s16k4.yaml``, ``recipes/strategy/ddp.yaml``. A file that is
    missing in another folder is missing.
    """
    path = Path(given)
    if path.is_dir():
        return shipped_recipe(given) or path
    return path if path.exists() else shipped_recipe(given)


def named_recipe(given: str | Path, kind: str = "recipe") -> Path:
    """Return the file that a user means, see ``find_recipe``.

    Raises:
        ValueError: there is none; the message says ``kind`` and the nearest shipped name.
    """
    if (path := find_recipe(given)) is not None:
        return path
    near = get_close_matches(Path(given).stem, [shipped.stem for shipped in recipe_files().values()], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0] + '.yaml'!r}?" if near else ""
    raise ValueError(f"{kind} {given} is not a file.{hint} 'subtoken-train recipes ls' lists the shipped ones")


def shipped_recipe(given: str | Path) -> Path | None:
    """Return the shipped recipe of this spelling (see ``find_recipe``), whatever lies at that path, or None."""
    parts = Path(str(given).removesuffix(".yaml")).parts
    below = parts[len(parts) - parts[::-1].index("recipes") :] if "recipes" in parts else parts
    found = [path for name, path in recipe_files().items() if below in ((path.stem,), tuple(name.split("/")))]
    return found[0] if len(found) == 1 else None

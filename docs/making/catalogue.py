"""The catalogue of recipes, from their files: a page for each kind of backbone or purpose, and the way there."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from subtoken_train.resources import first_comment, read_names, recipe_files, resource

HEAD = """# Catalogue of recipes

Every recipe, overlay and grid that travels with the package, by folder. A name is enough, in any folder:
`subtoken-train fit --config NAME`; `recipes show NAME` prints one, `recipes copy NAME` gives you one to change.
How names are made, and what the comparisons say: [recipes](README.md).

| page | folders | files |
|---|---|---|
"""
SHELF_HEAD = """# {}

With the first line of each file. The link leads to it, or to the base that it is made from by a line of
`recipes/names.csv`. *Anchor*: a recipe of its matched token-only anchor ships, too; of any other routed recipe
`subtoken-train recipes anchor NAME` writes it. [The whole catalogue](../catalogue.md).
"""


@dataclass(frozen=True)
class Shelf:
    """Folders of recipes that one page lists.

    Attributes:
        page: its name in ``recipes/catalogue/``.
        title: its heading.
        folders: the folders.
    """

    page: str
    title: str
    folders: tuple[str, ...]


SHELVES = (
    Shelf("tiny", "Recipes for the embedded models", ("tiny", "tinylm")),
    Shelf(
        "llava",
        "Recipes for LLaVA",
        ("llava7b", "llava13b", "llavanext7b", "llavanextmistral7b", "llavaov7b"),
    ),
    Shelf(
        "vision",
        "Recipes for other models that see",
        (
            *("glm41v9b", "internvl8b", "mistralsmall24b", "qwen2vl7b", "qwen3vl4b", "qwen3vl8b", "qwenvl3b"),
            *("qwenvl7b", "smolvlm500m"),
        ),
    ),
    Shelf("text", "Recipes for language models", ("llama31", "llama7b", "qwen314b", "qwen38b", "qwen7b", "real")),
    Shelf("grids", "Grids of evaluation", ("eval",)),
    Shelf("overlays", "Overlays", ("logging", "memory", "strategy")),
)


def catalogue_page() -> str:
    """Return the text of the overview: a row for each page."""
    folders = _folders()
    for folder in folders:
        if sum(folder in shelf.folders for shelf in SHELVES) != 1:
            raise ValueError(
                f"recipes of {folder!r} must be on one page; name them in SHELVES of docs/making/catalogue.py"
            )
    rows = [
        f"| [{shelf.title}](catalogue/{shelf.page}.md) | {', '.join(f'`{name}`' for name in shelf.folders)} "
        f"| {sum(len(folders[name]) for name in shelf.folders)} |\n"
        for shelf in SHELVES
    ]
    return "".join([HEAD, *rows])


def shelf_page(shelf: Shelf) -> str:
    """Return the text of a page: a table for each of its folders."""
    files = recipe_files()
    parts = [SHELF_HEAD.format(shelf.title)]
    for folder in shelf.folders:
        parts.append(f"\n## {folder}\n\n| recipe | what it is | anchor |\n|---|---|---|\n")
        for name in _folders()[folder]:
            anchor = "yes" if f"{name}_anchor" in files else ""
            said = first_comment(files[name]).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
            file = recipe_file(files[name]).relative_to(resource("recipes")).as_posix()
            parts.append(f"| [`{PurePosixPath(name).name}`](../{file}) | {said} | {anchor} |\n")
    return "".join(parts)


def recipe_file(path: Path) -> Path:
    """Return the file behind a shipped recipe: its own, or its base's where the recipe is a name."""
    return path if path.exists() else path.with_name(f"{read_names(path.parent)[path.stem].base}.yaml")


def _folders() -> dict[str, list[str]]:
    """Return folder -> the recipes in it, as the package lists them."""
    grouped = groupby(recipe_files(), key=lambda name: str(PurePosixPath(name).parent))
    return {folder: list(names) for folder, names in grouped}

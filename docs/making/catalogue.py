"""The catalogue of recipes, from their files."""

from __future__ import annotations

from itertools import groupby
from pathlib import PurePosixPath

from subtoken_train.cli.recipes import first_comment
from subtoken_train.resources import recipe_file, recipe_files, resource

HEAD = """# Catalogue of recipes

Every recipe, overlay and grid that travels with the package, with its first line. The link leads to its file, or to the
base that it is made from by a line of `recipes/names.csv`. A name is enough, in any folder:
`subtoken-train fit --config NAME`; `recipes show NAME` prints one, `recipes copy NAME` gives you one to change.
How names are made, and what the comparisons say: [recipes](README.md). *Anchor*: a recipe of its matched token-only
anchor ships, too; of any other routed recipe `subtoken-train recipes anchor NAME` writes it.
"""


def catalogue_page() -> str:
    """The text of the page: a table for each folder."""
    files = recipe_files()
    parts = [HEAD]
    for folder, group in groupby(files, key=lambda name: str(PurePosixPath(name).parent)):
        parts.append(f"\n## {folder}\n\n| recipe | what it is | anchor |\n|---|---|---|\n")
        for name in group:
            anchor = "yes" if f"{name}_anchor" in files else ""
            said = first_comment(files[name]).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
            file = recipe_file(files[name]).relative_to(resource("recipes")).as_posix()
            parts.append(f"| [`{PurePosixPath(name).name}`]({file}) | {said} | {anchor} |\n")
    return "".join(parts)

"""The pages that say of every item of the five papers where it is done, from ``docs/paper_items.yaml``."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from making.catalogue import recipe_file
from subtoken_train.documents import read_yaml
from subtoken_train.resources import shipped_recipe
from subtoken_train.typed import typed

ROOT = Path(__file__).resolve().parents[2]
ITEMS = ROOT / "docs" / "paper_items.yaml"
PAPERS = {
    "subtoken_routing": "Sub-Token Routing for KV Cache Compression",
    "aircache": "AirCache",
    "kvcompose": "KVCompose",
    "tgv_kv": "TGV-KV",
    "vl_cache": "VL-Cache",
}
"""Titles of the papers by their keys in the file."""
HOW = ("exact", "reading", "not done")
"""From best to worst."""
UNSAID = re.compile(r"\breadings?\b|does not say|does not speak|not told", re.IGNORECASE)
"""Words of a note that tell of something which a paper leaves open."""
HEAD = """# Papers, item by item

Every table, figure, equation and hyper-parameter of the papers that this package follows, and where it is done.
*exact*: as the paper says. *reading*: the paper is silent or contradicts itself; the note says what was taken. *not
done*: the note says why. An item is what the worst of its parts is. "Done" means that the settings are here and checked
without weights: no 7B model was trained or scored with them ([status](status.md)). Made from `docs/paper_items.yaml`; a
test checks that every place exists.

| paper | items |
|---|---|
"""
PAPER_HEAD = """# {}, item by item

{}. What these words mean: [papers](../papers.md).

| item | how | where | note |
|---|---|---|---|
"""


@dataclass(frozen=True)
class PaperItem:
    """One thing that a paper shows, defines or claims.

    Attributes:
        item: its name in the paper, "Table 3" or "Eq. 10", and what it is.
        how: ``exact``, ``reading`` or ``not done``.
        where: paths from the repository's root, ``path::symbol`` of a Python file, or names of recipes and grids.
        note: the reading taken, or why it is not done.
        parts: beginnings of the names of items of the same paper that it stands on; "Table 5, ..." are parts of
            "Table 5: ..." without being named.
    """

    item: str
    how: str
    where: tuple[str, ...] = ()
    note: str = ""
    parts: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Say what is wrong with it: an unknown word, a place that is not there, or a missing reason."""
        found = [] if self.how in HOW else [f"how is {self.how!r}; it must be one of {', '.join(HOW)}"]
        if self.how in ("reading", "not done") and not self.note.strip():
            found.append(f"{self.how!r} needs a note: the reading taken, or the reason")
        if self.how != "not done" and not self.where:
            found.append("where is empty; name a path, path::symbol, or a recipe")
        found += [f"{place!r} is no path, no path::symbol and no recipe" for place in self.where if not exists(place)]
        if self.how == "exact" and (words := UNSAID.search(self.note)):
            found.append(f"the note says {words[0]!r}, which 'exact' is not")
        return [f"{self.item}: {fault}" for fault in found]


def part_faults(items: list[PaperItem]) -> list[str]:
    """Say which items of a paper name parts that are not one item each, or are not what the worst of them is."""
    found = []
    for own in items:
        of_each = [[item for item in items if item is not own and item.item.startswith(part)] for part in own.parts]
        found += [
            f"{own.item}: {p!r} is no one item" for p, some in zip(own.parts, of_each, strict=True) if len(some) != 1
        ]
        table = re.match(r"(Table \d+):", own.item)
        rows = [item for item in items if table and item.item.startswith(f"{table[1]}, ")]
        parts = [*rows, *(item for some in of_each for item in some)]
        worst = max((item.how for item in parts), key=HOW.index, default=own.how)
        if worst != own.how:
            found.append(f"{own.item}: how is {own.how!r}, and its worst part is {worst!r}")
    return found


def read_items(path: Path = ITEMS) -> dict[str, list[PaperItem]]:
    """Read the file: paper -> its items, in its order."""
    content = read_yaml(path)
    unknown = set(content) - set(PAPERS) if isinstance(content, dict) else {type(content).__name__}
    if unknown:
        raise ValueError(f"{path.name} must map papers ({', '.join(PAPERS)}) to lists of items; got {unknown}")
    return {
        paper: [typed(PaperItem, entry, f"{path.name}: {paper}[{number}]") for number, entry in enumerate(entries)]
        for paper, entries in content.items()
    }


def exists(place: str) -> bool:
    """Tell whether a ``where`` leads somewhere."""
    path, _, symbol = place.partition("::")
    file = ROOT / path
    if symbol:
        return file.suffix == ".py" and file.is_file() and symbol in symbols(ast.parse(file.read_text("utf-8")))
    return file.exists() or shipped_recipe(path) is not None


def symbols(tree: ast.Module) -> set[str]:
    """Return a module's names, and those of its classes as ``Class.name``."""
    found = set()
    for node in tree.body:
        for name in _bound(node):
            found.add(name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{name}.{inner}" for part in node.body for inner in _bound(part)}
    return found


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def paper_items_page() -> str:
    """Return the text of the overview: a row for each paper, with its counts."""
    rows = [f"| [{PAPERS[paper]}](papers/{paper}.md) | {_counts(items)} |\n" for paper, items in read_items().items()]
    return "".join([HEAD, *rows])


def paper_page(paper: str) -> str:
    """Return the text of a paper's page: its items in a table."""
    items = read_items()[paper]
    return "".join([PAPER_HEAD.format(PAPERS[paper], _counts(items)), *map(_row, items)])


def _counts(items: list[PaperItem]) -> str:
    return ", ".join(f"{sum(item.how == how for item in items)} {how}" for how in HOW)


def _row(item: PaperItem) -> str:
    how = f"**{item.how}**" if item.how == "not done" else item.how
    return f"| {_cell(item.item)} | {how} | {', '.join(map(_link, item.where))} | {_cell(item.note)} |\n"


def _link(place: str) -> str:
    path, _, symbol = place.partition("::")
    recipe = None if (ROOT / path).exists() else shipped_recipe(path)
    target = path if recipe is None else recipe_file(recipe).relative_to(ROOT).as_posix()
    words = symbol or (path if recipe is None else recipe.stem)
    return f"[`{words}`](../../{target})"


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")

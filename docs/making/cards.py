"""What a card says of a class: its module's docstring, and its settings."""

import ast
import dataclasses
import inspect
import re
from typing import Any

BASES = {"Eviction", "Reducer", "Selector"}


def about(method: type) -> tuple[str, str]:
    """(first line, the rest) of the module's docstring, the class's where methods share it; without legend or table."""
    module = inspect.getmodule(method)
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    methods = [kind for kind in own if BASES & {base.__name__ for base in kind.__mro__[1:]}]
    tree = ast.parse(inspect.getsource(module))
    words = ast.get_docstring(tree) if len(methods) < 2 else inspect.cleandoc(method.__doc__ or "")
    first, _, rest = (words or "").partition("\n")
    rest = re.sub(r"\n*(Legend|Attributes):.*\Z", "", rest, flags=re.DOTALL).strip()
    return markdown(first), markdown(rest)


def link(name: str, page: str = "") -> str:
    """Return a link to the card of that name, on the same page unless another is named."""
    return f"[`{name}`]({page}#{name})"


def card(name: str, method: type, facts: str, settings: list[str]) -> str:
    """A section: facts, the module's docstring, and a table of settings where there are any."""
    title, text = about(method)
    parts = [f"\n## {name}", *(part for part in (title, facts, text) if part)]
    return "\n".join(["\n\n".join(parts), *setting_table(settings)]) + "\n"


def class_words(method: type) -> str:
    """The class's own docstring, for those whose settings are not fields."""
    return markdown(inspect.cleandoc(method.__doc__ or ""))


def setting_table(rows: list[str]) -> list[str]:
    """The rows below their heading; nothing without rows."""
    return ["\n| setting | default | what it does |\n|---|---|---|", *rows] if rows else []


def setting_rows(method: type) -> list[str]:
    """A table row for each field; a field of a base class is described there."""
    described: dict[str, str] = {}
    for kind in reversed(method.__mro__):
        described |= _attributes(kind.__doc__ or "")
    return [
        f"| `{field.name}` | `{_default(field)!r}` | {markdown(described[field.name])} |"
        for field in dataclasses.fields(method)
        if field.name not in ("base", "name")
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _attributes(docstring: str) -> dict[str, str]:
    """Settings and what an ``Attributes:`` section says of them."""
    section = re.search(r"Attributes:\n(.*?)(?=\n\s*\n|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    if section is None:
        return {}
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def markdown(text: str) -> str:
    """Text of docstrings, with reStructuredText's code marks as Markdown's; a cell's bars do not end it."""
    return text.replace("``", "`").replace("|", "\\|")

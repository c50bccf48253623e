"""Find methods by name: built in, or brought by another installed package as an entry point of one of our groups.

Names are read from tables and from the packages' metadata; nothing is imported until a name is looked up. A package
adds a method in its ``pyproject.toml``::

    [project.entry-points."subtoken_train.evictions"]
    newest = "their_package.newest:Newest"

Recipes, grids and adapters are data: a name that stands in one leads to a class only if it is in a registry.
"""

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from subtoken_train.errors import SubTokenWarning, refuse, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(MutableMapping[str, type[T]]):
    """Classes of one kind by name; a class can also be put in for this process alone, as into a dict.

    Args:
        group: of the entry points by which other packages add to it. A built-in goes before an entry of its name.
        package: where the built-in classes (``module:Class``) are; empty: their modules are written in full.
        base: what every class extends.
        named: whether a class has a ``name`` too, which must be the one that it is registered by.
    """

    def __init__(
        self, kind: str, *, group: str, package: str, base: str, builtin: Mapping[str, str], named: bool = False
    ) -> None:
        self.kind, self.group = kind, group
        self.package, self._base, self._named = package, base, named
        self.builtin = dict(builtin)
        self._classes: dict[str, type[T]] = {}

    @cached_property
    def _installed(self) -> "dict[str, list[EntryPoint]]":
        found: dict[str, list[EntryPoint]] = {}
        if not _may_be_installed(self.group):
            return found
        from importlib.metadata import entry_points

        for entry in entry_points(group=self.group):
            if entry.name not in self.builtin:
                found.setdefault(entry.name, []).append(entry)
                continue
            words = f"{self.kind} {entry.name!r} of {_origin(entry)} is not used: there is a built-in of this name"
            warnings.warn(words, SubTokenWarning, stacklevel=2)
        return found

    def find(self, name: str) -> type[T]:
        """Return a class by its name."""
        if name not in self:
            raise unknown_name(self.kind, name, self)
        return self[name]

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            if name in self.builtin:
                self._classes[name] = self._own(self.builtin[name])
            else:
                self._classes[name] = self._checked(name, self._installed[name])
        return self._classes[name]

    def __setitem__(self, name: str, value: type[T]) -> None:
        self._classes[name] = value

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._classes or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter({**self.builtin, **self._classes, **self._installed})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def origin(self, name: str) -> str | None:
        """Return the requirement that brings a class, as ``package==version``; None where no installed package does."""
        entries = [] if name in self.builtin else self._installed.get(name, [])
        dist = entries[0].dist if entries else None
        return None if dist is None else f"{dist.name}=={dist.version}"

    def _own(self, place: str) -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(f"{self.package}.{module}".lstrip(".")), name)

    def _checked(self, name: str, entries: "list[EntryPoint]") -> type[T]:
        where = f"{self.kind} {name!r} of {' and '.join(map(_origin, entries))}"
        refuse((len(entries) > 1, f"{where}: the name is taken twice; uninstall one of the packages"))
        try:
            found = entries[0].load()
        except Exception as error:  # whatever another package does when it is imported
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{where} cannot be imported ({type(error).__name__}: {reason})") from error
        base = self._own(self._base)
        if not (isinstance(found, type) and issubclass(found, base)) or inspect.isabstract(found):
            raise ValueError(f"{where} does not extend {base.__module__}.{base.__name__} with all its methods")
        if self._named and getattr(found, "name", None) != name:
            raise ValueError(f"{where} calls itself {getattr(found, 'name', None)!r}; the two names must be the same")
        return found


def _may_be_installed(group: str) -> bool:
    """Tell whether a package on the path may bring such an entry point, by the group's name in its metadata."""
    for place in map(Path, sys.path):
        if place.is_file():
            return True
        for file in place.glob("*-[iI][nN][fF][oO]/entry_points.txt"):
            with suppress(OSError):
                if group in file.read_text("utf-8", "replace"):
                    return True
    return False


def _origin(entry: "EntryPoint") -> str:
    package = "an unknown package" if entry.dist is None else f"package {entry.dist.name}"
    return f"{package} ({entry.value})"

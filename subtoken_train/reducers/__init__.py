"""Token reducers; a new one is a class and a line in ``REDUCERS``, which names each one's file.

They score; ``keep_ranked`` (``base.py``) makes a mask, by which ``engine/compressed_backbone.py`` leaves rows out.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from subtoken_train.errors import check_word, clipped, unknown_name
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.reducers.base import Reducer


class Reducers(Registry["Reducer"]):
    """Token reducers; an eviction's name finds the context reducer of its scores."""

    def find(self, name: str) -> "type[Reducer]":
        """Return a class by its name, a reducer's before an eviction's."""
        if name in self or not isinstance(name, str):
            return super().find(name)
        if name in EVICTIONS:
            from subtoken_train.reducers.contexts import context_reducer

            return context_reducer(EVICTIONS.find(name))
        if name.partition("(")[0] in WRAPPERS:
            own = "a wrapper changes what an eviction does with its budget, and a context reducer has its own"
            raise ValueError(f"reducer {clipped(repr(name), 60)}: {own}; name the eviction inside alone")
        raise unknown_name("reducer", name, [*self, *EVICTIONS])


REDUCERS = Reducers(
    "reducer",
    group="subtoken_train.reducers",
    package=__name__,
    base="base:Reducer",
    named=True,
    builtin={
        "none": "embeds:NoReducer",
        "random": "embeds:RandomReducer",
        "uniform": "embeds:UniformReducer",
        "fastv": "staged:FastV",
        "visionzip": "tower:VisionZip",
        "fastervlm": "tower:FasterVLM",
        "prumerge": "tower:PruMerge",
        "sparsevlm": "staged:SparseVLM",
        "quest": "contexts:Quest",
        "pyramiddrop": "staged:PyramidDrop",
        "fitprune": "staged:FitPrune",
        "divprune": "embeds:DivPrune",
        "cdpruner": "embeds:CDPruner",
        "dart": "embeds:DART",
        "vispruner": "tower:VisPruner",
        "prunesid": "tower:PruneSID",
        "evs": "embeds:EVS",
        "vidcom2": "embeds:VidCom2",
    },
)
DEFAULT_REDUCER = "fastv"  # reducer of a recipe that names none
ONCE_OF_ALL = {
    "stage": ("fastv", "embeds"),
    "layer": ("fastv", 2),
    "seed": ("random", 0),
    "page_size": ("quest", 16),
    "window": ("quest", 64),
}
"""Settings that the record of every built-in reducer held up to adapter schema 3: whose they are, and their default."""
YOUNGER = frozenset({"dart"})  # reducers that no such record names, and that have settings of these names themselves


def build_reducer(name: str, keep_ratio: float = 1.0, round_up: bool = False, **settings: Any) -> "Reducer":
    """Build a reducer of ``REDUCERS`` by its name; ``keep_ratio`` r is in (0, 1], ``round_up`` for matched anchors."""
    method = REDUCERS.find(name)
    known = [field.name for field in dataclasses.fields(method) if field.name != "name"]
    for setting in settings:
        check_word(f"setting of {name}", setting, known)
    return method(keep_ratio=keep_ratio, round_up=round_up, **settings)


def split_settings(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a record into the reducer's own settings and what version 0.1 wrote beside them; adds no defaults."""
    own, others = dict(record), {}
    name = record.get("name", DEFAULT_REDUCER)
    if isinstance(name, str) and name in REDUCERS.builtin and name not in YOUNGER:
        for setting, (owner, default) in ONCE_OF_ALL.items():
            if setting in own and owner != name and (value := own.pop(setting)) != default:
                others[setting] = value
    return own, others

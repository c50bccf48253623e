"""What a comparison runs and shows: its arms, how all of them are trained, what they are asked, the differences.

YAML files of ``benchmarks/ablations`` (``read_comparison``). An arm is a recipe, or a recipe with other settings, or
another arm's adapter under a recipe's token reducer (trained once, reduced at evaluation).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subtoken_train.datasets.scenes import KINDS
from subtoken_train.documents import read_yaml
from subtoken_train.typed import typed

Value = str | int | float | bool | None
Settings = dict[str, Value]


@dataclass(frozen=True)
class ArmPlan:
    """One row of a table.

    Attributes:
        name: of its records.
        words: the row's.
        recipe: a shipped recipe's name.
        settings: over the recipe's own, by the name that ``fit`` has for them (``model.reducer.ranking``).
        adapter_of: the arm whose adapter is asked under this recipe's token reducer; None: this arm is trained.
    """

    name: str
    words: str
    recipe: str
    settings: Settings = field(default_factory=dict)
    adapter_of: str | None = None

    def flags(self) -> list[str]:
        """The settings as ``fit`` takes them."""
        written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        return [word for key, value in written.items() for word in (f"--{key}", value)]

    def content(self, recipe: dict[str, Any]) -> bytes:
        """Return what makes the arm what it is: the recipe's settings, the arm's own, and whose adapter it is.

        Comments make no difference, and neither does an anchor's ``matches``: the embedded models' lengths times the
        arms' keep ratios are whole tokens, which no rounding moves.
        """
        model = recipe["model"]
        reducer = {key: value for key, value in model.get("reducer", {}).items() if key != "matches"}
        acting = {**recipe, "model": {**model, "reducer": reducer}}
        own = {"recipe": acting, "settings": self.settings, "adapter_of": self.adapter_of}
        return json.dumps(own, sort_keys=True).encode()


@dataclass(frozen=True)
class Questions:
    """What is asked of the scenes, or of contexts drawn for recall.

    Attributes:
        split: whose digits and English.
        seed: of the scenes, or of the contexts.
        count: scene questions, or contexts.
    """

    split: Literal["dev", "test"]
    seed: int
    count: int


@dataclass(frozen=True)
class Comparison:
    """What one table shows.

    Attributes:
        arms: by name, in the table's order.
        pairs: (arm, what it is compared with).
        groups: groups of questions whose mean and difference are shown, see ``Arm.scores_of``.
        kinds: single question kinds whose mean is shown too.
        folder: of the records, in the results' folder; empty: that folder itself.
        questions: None: those that the first comparisons asked.
    """

    arms: dict[str, ArmPlan]
    pairs: tuple[tuple[str, str], ...]
    groups: tuple[str, ...] = ("questions", "descriptions")
    kinds: tuple[str, ...] = KINDS
    folder: str = ""
    questions: Questions | None = None


@dataclass(frozen=True)
class _Arm:
    words: str
    recipe: str | None = None
    settings: Settings = field(default_factory=dict)
    adapter_of: str | None = None


@dataclass(frozen=True)
class _List:
    arms: dict[str, Any]
    differences: list[list[str]]
    groups: list[str] | None = None
    folder: str = ""
    questions: Questions | None = None
    training: Settings = field(default_factory=dict)


def read_comparison(path: Path) -> Comparison:
    """Read a YAML file with ``arms`` and ``differences`` (pairs of arms).

    An arm is words under a recipe's name, or ``words``, ``recipe`` (default: the arm's name), ``settings`` and
    ``adapter_of`` under any name. ``training`` are settings of every arm, below its own; ``folder`` and ``questions``
    are as in ``Comparison``. With ``groups`` the table shows these groups of questions and no single kinds.
    """
    content = read_yaml(path)
    keys = {"arms", "differences"}
    if not isinstance(content, dict) or not keys <= content.keys():
        raise ValueError(f"{path} must have the keys arms and differences")
    read: _List = typed(_List, content, str(path))
    if any(len(pair) != 2 for pair in read.differences):
        raise ValueError(f"{path}: each of the differences is a pair of arms")
    arms = {name: _plan(name, arm, read.training, f"{path}: arms: {name}") for name, arm in read.arms.items()}
    pairs = tuple((first, second) for first, second in read.differences)
    if strangers := {arm for pair in pairs for arm in pair} - arms.keys():
        raise ValueError(f"{path} compares {', '.join(sorted(strangers))}, which its arms do not list")
    for plan in arms.values():
        if plan.adapter_of is not None and (plan.adapter_of not in arms or arms[plan.adapter_of].adapter_of):
            raise ValueError(f"{path}: {plan.name} takes the adapter of {plan.adapter_of}, which no arm trains")
    shown: dict[str, Any] = {} if read.groups is None else {"groups": tuple(read.groups), "kinds": ()}
    return Comparison(arms, pairs, folder=read.folder, questions=read.questions, **shown)


def _plan(name: str, content: Any, training: Settings, place: str) -> ArmPlan:
    arm = _Arm(content) if isinstance(content, str) else typed(_Arm, content, place)
    trained = {} if arm.adapter_of is not None else training
    return ArmPlan(name, arm.words, arm.recipe or name, {**trained, **arm.settings}, arm.adapter_of)

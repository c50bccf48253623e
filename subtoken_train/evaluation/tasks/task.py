"""Base of every benchmark: samples, read from its own files, and the metric that scores their answers.

A task knows neither models nor budgets. Its samples say in plain text what is asked; the runner turns them into batches
and the metric turns predictions into scores, so that answers can be scored again without a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from subtoken_train.datasets.image_sources import PictureSource
from subtoken_train.errors import check_range, unknown_name
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.tasks.table import TASK_ROWS
from subtoken_train.families.chat_template import Message
from subtoken_train.typed import shown
from subtoken_train.types import Turn

Modality = Literal["image", "text"]


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(import_module(f"subtoken_train.evaluation.{module}"), name)


_READ: dict[str, Any] = {"rows": int, "tokens": int, "columns": lambda text: tuple(text.split()), "scored_by": _named}


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        prompt: of an image task the user's turn without chat format, ``<image>`` once per image; else the whole text.
        reference: what the metric reads beside the prediction; JSON values only.
        images: images and videos in the order of their placeholders; opened when a batch needs them.
        choices: continuations whose log-likelihoods are asked; empty: the answer is generated.
        context_characters: of a text, how much of ``prompt`` may be compressed; None: as ``context_tokens`` splits it.
        stop: texts that end a generated answer; they are cut off.
        kind: what scores are also shown by (subtask, category, question type).
        earlier: turns before an image task's ``prompt``, with their answers; they are not in a task's digest.
        cut_middle: a text that is too long loses its middle, instead of being refused.
        chat: a text is asked in the tokenizer's chat template; one without it is refused.
        prefix_characters: in a chat: so many of ``prompt``, at its end, begin the answer; None: none.
        keep_space: the answer is kept with the space around it.
        greedy: the prediction has, after the choices' log-likelihoods, 1 or 0 each: whether greedy decoding says it.
        messages: conversation that is asked in place of a text's ``prompt``, in a chat template where there is one.
    """

    id: str
    prompt: str
    reference: Mapping[str, Any]
    images: tuple[PictureSource, ...] = ()
    choices: tuple[str, ...] = ()
    context_characters: int | None = None
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    kind: str = "question"
    earlier: tuple[Turn, ...] = ()
    cut_middle: bool = False
    chat: bool = False
    prefix_characters: int | None = None
    keep_space: bool = False
    greedy: bool = False
    messages: tuple[Message, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Task(ABC):
    """A benchmark; options of its own are fields of a dataclass.

    ``source`` is a folder with its files, or a Hub data-set id; None: ``hub_id``. A built-in task is a row of
    ``tasks.csv``, whose cells become these attributes, made of the class that the row names; another states them.
    """

    name: ClassVar[str]
    modality: ClassVar[Modality]
    scored_by: ClassVar[type[TaskMetric]]
    """Its metric."""
    primary: ClassVar[str]
    """The score of ``metric().compute()`` that tables print."""
    where: ClassVar[str]
    """Commands and addresses that get the files, in plain text (``subtoken-train data NAME`` prints it)."""
    hub_id: ClassVar[str | None] = None
    """Hub name by which ``datasets`` finds it; None for what is on no hub."""
    rows: ClassVar[int | None] = None
    """Samples of the complete set that the paper uses; None where there is no such number."""
    answered: ClassVar[str]
    """The Parquet set's split whose answers are public."""
    columns: ClassVar[tuple[str, ...]]
    """Columns that make a sample, beside images."""
    tokens: ClassVar[int] = 16
    """Cap on an answer."""
    made_in: ClassVar[str | None] = None
    """Folder that ``subtoken-train data`` writes, and that is read unless another is named."""
    needs_files: ClassVar[bool] = True
    """False for a task that makes its samples itself, by its options."""
    allowed: ClassVar[Mapping[str, Sequence[object]]] = {}
    """The values that an option, or each member of it, may have, for options that are names or small counts."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Least and greatest value of options that are numbers, or of each member."""
    length_option: ClassVar[str | None] = None
    """Name of the option that says how long its prompts are; None: no option does."""

    source: str | Path | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, row: str | None = None) -> None:
        """Take the cells of a row; a form of files of the benchmark's own (``own_form``) ends where files are."""
        super().__init_subclass__()
        cells = {name: text for name, text in (TASK_ROWS[row] if row else {}).items() if text and name != "class"}
        for name, text in cells.items():
            setattr(cls, name, _READ.get(name, str)(text))
        if "answered" in cells and "where" not in cells:
            files = f"--local-dir DIR --include '{cells.get('config', 'data')}/{cls.answered}-*'"
            hub = f"hf download {cls.hub_id} --repo-type dataset {files}"
            cls.where = f"Parquet: {hub}. {cells['own_form']}" if "own_form" in cells else hub

    def __post_init__(self) -> None:
        """Refuse an option's value that is not ``allowed`` or out of its range, by a ``ValueError``."""
        for option in {**self.allowed, **self.ranges}:
            given, what = getattr(self, option), f"{option} of {self.name}"
            several = given if isinstance(given, tuple) else (given,)
            for one in several:
                if option in self.ranges:
                    check_range(what, one, *self.ranges[option])
                elif one not in self.allowed[option]:
                    raise unknown_name(what, one, map(str, self.allowed[option]))
            if len(set(several)) != len(several) or not several:
                raise ValueError(f"{what} is {shown(list(several))}; name one or more, each once")

    @abstractmethod
    def samples(self) -> Sequence[Sample]:
        """Return all samples in the files' order, images closed; a ``ValueError`` names file and line of a fault."""

    def metric(self) -> TaskMetric:
        """Return a fresh metric."""
        return self.scored_by()

    def check_options(self) -> None:  # noqa: B027  (most options cannot contradict each other)
        """Raise a ``ValueError`` where options that are each allowed cannot be served together; no file is read."""

    def check_requirements(self) -> None:  # noqa: B027  (most tasks need nothing)
        """Raise a ``ValueError`` where the metric could not score here; asked before any model runs."""

    def write_for_others(self, folder: Path) -> None:  # noqa: B027  (few are read)
        """Write what a program outside reads beside the records, when all samples are answered."""

    @property
    def expected_rows(self) -> int | None:
        """Samples of the complete set under these options; ``rows`` unless an option changes the split."""
        return self.rows

    @property
    def asks(self) -> str:
        """Say how a model is asked: raw or in its chat format, and what of a prompt may be compressed."""
        if self.modality == "image":
            return "in the family's chat format; question kept"
        return "raw text, no chat template; question kept"

    @property
    def compresses_question(self) -> bool:
        """True if the question belongs to what may be compressed, so that even a context first holds it."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The options but ``source``, for manifests and tables."""
        return {name: value for name, value in vars(self).items() if name != "source"}


def __getattr__(name: str) -> type[Task]:
    """Return the class of a row of the table by the row's name."""
    if name not in TASK_ROWS:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    kind = _named(f"tasks.{TASK_ROWS[name]['class']}")
    made: type[Task] = globals().setdefault(name, type(name, (kind,), {"__module__": __name__}, row=name))
    return made

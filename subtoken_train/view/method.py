"""Method: what drops something is a frozen dataclass whose fields are settings, each of its range or ``Literal``."""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from functools import cache, cached_property, partial
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from subtoken_train.calibrations import CalibratedNumbers, Calibration, Unmade, read_calibration
from subtoken_train.errors import MAX_TOKENS, check_range, unknown_name

if TYPE_CHECKING:
    import torch


def setting(default: Any, least: float = 0, most: float = MAX_TOKENS) -> Any:
    """Declare a setting that must lie between ``least`` and ``most``; a None is not checked."""
    return checked_setting(default, partial(check_range, low=least, high=most))


def checked_setting(default: Any, check: Callable[[str, Any], None]) -> Any:
    """Declare a setting that ``check`` sees with its name; a wrong value raises a worded ``ValueError``."""
    return field(default=default, metadata={"check": check})


def by_settings(read: Callable[[Any], Any]) -> Any:
    """Declare a fact that depends on the method's settings, in place of a class attribute."""
    return property(read)


class Method:
    """Base class of evictions and reducers."""

    calibrates: ClassVar[type[CalibratedNumbers] | None] = None  # numbers that it reads from the file ``calibration``
    left: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions and the values that it acts by, which records of a compression go on to name."""

    def __post_init__(self) -> None:
        owner = _name_of(self)
        for name, allowed in _words(type(self)).items():  # type: ignore[arg-type]
            if getattr(self, name) not in allowed:
                raise unknown_name(f"{owner} {name}", getattr(self, name), [str(word) for word in allowed])
        for each in fields(self):  # type: ignore[arg-type]
            if "check" in each.metadata:
                each.metadata["check"](f"{owner} {each.name}", getattr(self, each.name))
        _ = self.calibrated  # a file that cannot be read is refused before anything runs

    @cached_property
    def calibrated(self) -> Calibration[Any] | None:
        """The calibration that its setting ``calibration`` names; None where it reads none."""
        file = getattr(self, "calibration", None)
        kind = None if file is None or isinstance(file, Unmade) else self.calibrates
        return None if kind is None else read_calibration(file, _name_of(self), kind)

    def check_named(self) -> None:
        """Raise the ``ValueError`` of ``read_numbers`` unless a calibration is named, made or not."""
        if not isinstance(getattr(self, "calibration", None), Unmade):
            self.read_numbers()

    def read_numbers(self) -> Any:
        """Return what the calibration holds; a ``ValueError`` says how to make one where none is named."""
        if self.calibrated is None:
            name = _name_of(self)
            made = f"'subtoken-train calibrate {name}' writes one, for the option calibration"
            reads = f"{name} reads numbers that are found for a backbone, and calibration names no file of them"
            raise ValueError(f"{reads}; {made}")
        return self.calibrated.numbers

    def numbers_of(self, layer: int, device: "torch.device", name: str) -> "torch.Tensor":
        """Return a layer's part of a calibrated table, fp32; the whole table goes to a device once."""
        from torch import tensor  # names of methods are asked for where no torch is loaded

        sent: dict[Any, torch.Tensor] = vars(self).setdefault("_sent", {})
        if (name, device) not in sent:
            sent[name, device] = tensor(getattr(self.read_numbers(), name), device=device)
        return sent[name, device][layer]


def _name_of(method: Any) -> str:
    return str(type(method).name)


@cache
def _words(kind: type[Method]) -> dict[str, tuple[Any, ...]]:
    own = {each.name: hint_of(kind, each.name) for each in fields(kind)}  # type: ignore[arg-type]
    return {name: get_args(hint) for name, hint in own.items() if get_origin(hint) is Literal}


def hint_of(kind: type, name: str) -> Any:
    """Return one annotation's type; None where another package imports that type for its checker alone."""
    owner = next(base for base in kind.__mro__ if name in get_annotations(base))
    alone = type("_One", (), {"__annotations__": {name: get_annotations(owner)[name]}, "__module__": owner.__module__})
    try:
        return get_type_hints(alone)[name]
    except NameError:
        return None

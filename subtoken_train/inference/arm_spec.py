"""An arm as it is written: the model that answers and the compression of its prompts, under one set of rules.

A command's flags, a grid's YAML and a harness's ``key=value`` are front ends: each turns its own form into an
``ArmSpec`` and says how its options are spelled in messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from subtoken_train.artifact.hub import adapter_folder
from subtoken_train.documents import check_file_name
from subtoken_train.errors import check_word, refuse
from subtoken_train.evictions import EVICTIONS, build_eviction, known_names, notation_names
from subtoken_train.families.backbone_config import DTYPES
from subtoken_train.reducers import REDUCERS, build_reducer
from subtoken_train.settings import ARM_SETTINGS, FORMAT_NAMES, KINDS, ArmSettings, check_written_keep
from subtoken_train.types import Protocol

if TYPE_CHECKING:  # an arm is read without torch
    from subtoken_train.inference.compression import Compression
    from subtoken_train.inference.model import SubTokenModel
    from subtoken_train.routing import RoutingConfig

DRAWING = ("random", "static")
"""Reducers, selectors and evictions of these names take a seed."""
Written = Literal["key", "flag", "argument"]
"""Spellings of an option: ``eviction: snapkv``, ``--eviction snapkv`` or ``eviction=snapkv``."""


def run_name(folder: str) -> str:
    """Return ``NAME`` of an adapter ``runs/NAME/adapter`` or ``runs/NAME``, or of a model's folder."""
    path = Path(folder)
    return path.parent.name if path.name == "adapter" else path.name


@dataclass(frozen=True)
class ArmSpec(ArmSettings):
    """One arm: its settings, checked, and the model that they name; ``written`` is how messages spell the settings."""

    written: Written = field(default="key", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        say, keyed = self.spelled, self.written == "key"
        for name, setting in ARM_SETTINGS.items():  # a file may hold values of any type
            value, kinds = getattr(self, name), (int, float) if setting.kind is float else (setting.kind,)
            fits = isinstance(value, Mapping) if setting.kind is dict else type(value) in kinds and value != ""
            if not fits and name not in _CHECKED_ELSEWHERE and (value is not None or name in _ALWAYS):
                place, unit = " of an arm" if keyed else "", f" of {setting.unit}" if setting.unit else ""
                raise ValueError(f"{say(name)}{place} must be {KINDS[setting.kind]}{unit}; got {value!r}")
        if self.name is not None:
            check_file_name(self.name, "name of an arm")
        seed, named = self.seed, set(DRAWING) & {self.selector}
        seedless = seed is not None and (type(seed) is not int or not self.drawing | named)
        drawing = f"must be a whole number, of a reducer, selector or eviction that draws: {' or '.join(DRAWING)}"
        places = f"give {say('adapter', 'DIR')}, or {say('backbone', 'PATH')} for a model without one"
        refuse((seedless, f"seed {self.seed!r} {drawing}"), (self.adapter is None and self.backbone is None, places))
        check_word("protocol", self.protocol, get_args(Protocol))
        if self.dtype is not None:
            check_word("dtype", self.dtype, DTYPES)
        if self.adapter is None:
            self._check_reducer()
            refuse((self.byte_share is not None, f"{say('byte_share')} is for routers of {say('adapter', 'DIR')}"))
            if any(getattr(self, name) is not None for name in ("groups", "selector", "layout")):
                assert self.routing is not None
        else:
            for name in ("groups", "layout"):
                own = f"{say(name)} is for a backbone alone; {self.adapter} is an adapter with its own"
                refuse((getattr(self, name) is not None, own))
        given = self.eviction_keep is not None or self.eviction_every is not None or self.eviction_options or self.scope
        options = f"{', '.join(map(say, ('eviction_keep', 'eviction_every', 'eviction_options')))} and {say('scope')}"
        if self.eviction is not None:
            known_names(self.eviction)
        if self.reducer is not None and self.reducer not in (*REDUCERS, *EVICTIONS):
            REDUCERS.find(self.reducer)
        check_word("kv_dtype", self.kv_dtype, FORMAT_NAMES)
        unsaid = self.eviction is not None and self.eviction_keep is None
        example = "for instance 0.1, 256tokens or 20MB"
        refuse(
            (self.eviction is None and given, f"{options} need {say('eviction', 'NAME')}, for instance snapkv"),
            (unsaid, f"{say('eviction', self.eviction)} needs {say('eviction_keep')}, {example}"),
        )
        check_written_keep(1 if self.eviction_keep is None else self.eviction_keep)

    @property
    def called(self) -> str:
        """The name that is given, else the run's (``NAME`` of ``runs/NAME/adapter``) or the model's."""
        return self.name or run_name(self.adapter or str(self.backbone))

    def spelled(self, option: str, value: str | None = None) -> str:
        """Spell an option, with a value or alone, as its front end does."""
        if self.written == "flag":
            option = option.replace("options", "option")  # each is given by a flag of its own
            flag = f"--{option.replace('_', '-')}"
            return flag if value is None else f"{flag} {value}"
        return option if value is None else f"{option}{': ' if self.written == 'key' else '='}{value}"

    def _check_reducer(self) -> None:
        say, place = self.spelled, f"arm {self.backbone}: " if self.written == "key" else ""
        example = f"{say('reducer', 'fastv')} and {say('keep_ratio', '0.25')}"
        words = f"{place}{say('reducer')} and {say('keep_ratio')} go together, for instance {example}"
        refuse(((self.reducer is None) != (self.keep_ratio is None), words))

    @property
    def routing(self) -> "RoutingConfig | None":
        """Value groups of a backbone alone; None where it has none, and of an adapter."""
        from subtoken_train.routing import untrained_routing

        return untrained_routing(self.groups, self.selector, self.layout, self.seed) if self.adapter is None else None

    def compression(self, round_up: bool = False) -> "Compression":
        """Build the compression that the arm asks for; ``round_up`` is for anchors."""
        from subtoken_train.inference.compression import Compression, written_keep

        own = ARM_SETTINGS.keys() - {"eviction"}
        options, seeded = dict(self.eviction_options), self.seed is not None and self.eviction is not None
        if seeded and (drawn := notation_names(str(self.eviction))[-1]) in DRAWING:
            options[f"{drawn}.seed"] = self.seed
        try:
            method = None if self.eviction is None else build_eviction(self.eviction, **options)
        except TypeError as error:  # a text where a number belongs
            raise ValueError(f"eviction_options of {self.eviction}: {error}") from None
        settings = written_keep(1 if self.eviction_keep is None else self.eviction_keep)
        settings |= {name: getattr(self, name) for name in Compression.__annotations__ if name in own}
        return Compression(method, round_up=round_up, every=self.eviction_every, **settings)

    def load(self, device: str | None = None, revision: str | None = None) -> "SubTokenModel":
        """Load the model in evaluation mode: an adapter under its own reducer and routers, or a backbone alone."""
        from subtoken_train.inference.model import SubTokenModel
        from subtoken_train.inference.pool import load_backbone

        self._check_reducer()
        compression, ratio = self.compression(), 1.0 if self.keep_ratio is None else self.keep_ratio
        reducer = None if self.reducer is None else build_reducer(self.reducer, ratio, **self.reducer_options)
        how: dict[str, Any] = {"seed": self.seed, "routing": self.routing, "loading": self.loading}
        if self.adapter is None:
            loaded = load_backbone(str(self.backbone), revision, None, reducer, device, **how)
        else:  # what is no adapter would be taken for a backbone
            how |= {"selector": self.selector, "byte_share": self.byte_share}
            loaded = load_backbone(adapter_folder(self.adapter, revision), None, self.backbone, reducer, device, **how)
        return SubTokenModel.around(loaded, compression)

    @property
    def loading(self) -> dict[str, Any]:
        """Settings of the arm that the backbone is loaded with."""
        given = {"dtype": self.dtype, "max_pixels": self.max_pixels}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def drawing(self) -> set[str]:
        """Names of its reducer and eviction that draw at random, and so take the seed."""
        eviction = None if self.eviction is None else notation_names(self.eviction)[-1]
        return {name for name in (self.reducer, eviction) if name in DRAWING}

    @property
    def overrides(self) -> bool:
        """Return whether reducer, selector or bytes differ from those that the adapter was trained under."""
        changes = self.reducer, self.keep_ratio is not None, self.reducer_options, self.selector, self.byte_share
        return self.adapter is not None and any(changes)


_CHECKED_ELSEWHERE = ("eviction_keep", "prefill_chunk", "seed", "groups")
"""Settings whose types ``written_keep``, ``Compression`` and ``untrained_routing`` check, or of what draws."""
_ALWAYS = ("key_channels", "rerotate", "reducer_options", "eviction_options")
"""Settings for which None is no value."""

"""A threshold in the place of a budget: entries that score below one number go, in every layer, head and prompt.

Source: DMS at inference, as kvpress has it (``dms_press.py``; arXiv 2506.05345): an entry that is older than the last
``window`` positions and scores below the threshold goes, in the prompt and while tokens are decoded. No bytes are
promised: they are measured. ``subtoken-train calibrate threshold`` finds the threshold of a mean budget.

Legend: B batch, N rows of a layer, h key-value heads, L layers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, Calibration, read_calibration
from subtoken_train.errors import MAX_TOKENS, check_range, check_word, clipped, refuse
from subtoken_train.evictions import EVICTIONS
from subtoken_train.evictions.base import Eviction, Wrapper
from subtoken_train.typed import checked
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scale, Scores

WINDOW = 128  # last positions that stay unless it is said otherwise, as DMS has it
FORM = "write threshold:-4, threshold:-4:128 with the window, or threshold:FILE; in a file {threshold: -4, window: 128}"


@dataclass(frozen=True)
class ThresholdRecord(CalibratedNumbers):
    """A threshold, and the share of (entry, head) pairs in scope that it left of the prompts it was found on."""

    threshold: float
    window: int
    eviction: dict[str, Any]
    mean: float
    deviation: float

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, -math.inf)
        check_range("window", self.window, 0, MAX_TOKENS)
        check_range("mean", self.mean, 0, 1)
        check_range("deviation", self.deviation, 0, 1)

    def words(self) -> str:
        return (
            f"threshold {self.threshold:g}, window {self.window:,}: keeps {self.mean:.3%} of the entries in scope "
            f"(mean over the prompts, standard deviation {self.deviation:.3%})"
        )


@dataclass(frozen=True)
class Threshold:
    """One number that entries must reach to stay.

    ``value`` is on the method's scale: of attention the natural logarithm, -4 is 1.8 %. The last ``window`` positions
    so far stay whatever they score. Without a ``record`` nothing is known of the share that stays.
    """

    value: float
    window: int = WINDOW
    record: Calibration[ThresholdRecord] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        checked(float, self.value, "threshold of eviction_keep")
        checked(int, self.window, "window of an eviction_keep threshold")
        check_range("window of an eviction_keep threshold", self.window, 0, MAX_TOKENS)

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file of ``subtoken-train calibrate threshold``."""
        made = read_calibration(path, "threshold", ThresholdRecord)
        return cls(made.numbers.threshold, made.numbers.window, made)

    @property
    def mean(self) -> float | None:
        """Share of the entries in scope that stays on average, where it is recorded."""
        return None if self.record is None else self.record.numbers.mean

    @property
    def label(self) -> str:
        """Short form for tables: ``threshold=-4``; a window of another size and a recorded mean are named."""
        words = [f"threshold={self.value:.6g}"]
        words += [] if self.window == WINDOW else [f"window={self.window}"]
        words += [] if self.mean is None else [f"mean {self.mean:.4g}"]
        return " ".join(words)

    def check(self, method: Eviction) -> None:
        """Raise a worded ``ValueError`` where the method has no absolute scores, or none of them is on one side."""
        scale = scale_of(method)
        kind = f"the {'logarithms of ' * scale.log}scores of {method.name} are"
        given = f"eviction_keep threshold {self.value:g} keeps"
        refuse(
            (self.value <= scale.low, f"{given} all: {kind} {scale.low:g} or more"),
            (self.value > scale.high, f"{given} nothing: {kind} at most {scale.high:g}"),
        )

    def keep(
        self, method: Eviction, scores: list[Scores], candidates: Candidates, recent_LBN: list[Tensor]
    ) -> list[Tensor]:
        """Mark what stays, per layer bool [B, h, N] (h = 1: one set for all heads), what does not compete too."""
        layers = zip(scores, candidates.regions_LBN, candidates.competes_LBN, recent_LBN, strict=True)
        return [
            (self.reached(method, each.scores_BhN) & competes_BN[:, None])
            | ((regions_BN != Region.PADDING) & (~competes_BN | recent_BN | each.protected_BN))[:, None]
            for each, regions_BN, competes_BN, recent_BN in layers
        ]

    def reached(self, method: Eviction, scores_BhN: Tensor) -> Tensor:
        """Return which scores reach it, bool of the same shape."""
        return scale_of(method).read(scores_BhN) >= self.value


def scale_of(method: Eviction) -> Scale:
    """Return the scale of a method's absolute scores; a worded ``ValueError`` where it has none."""
    if isinstance(method, Wrapper):
        divides = f"eviction {method.name!r} divides a budget, and eviction_keep is a threshold, which has no budget"
        raise ValueError(f"{divides}; use {method.inside[-1].name}")
    if method.absolute is None:
        can = [name for name in EVICTIONS if EVICTIONS.find(name)().absolute is not None]
        words = f"eviction {method.name!r} with these settings takes no threshold: its scores do not mean the same in"
        instead = f"Use one of {', '.join(can)}, or a share, for instance eviction_keep=0.2"
        raise ValueError(f"{words} every prompt, layer and head. {instead}")
    return method.absolute


@dataclass
class Older:
    """Counts what a threshold decides on in a prompt, int64 [B]: ``among``, ``kept`` of them; ``safe`` stay anyway."""

    among: Tensor
    kept: Tensor
    safe: Tensor

    @classmethod
    def of(cls, kept_BhN: Tensor, scores: Scores, competes_BN: Tensor, recent_BN: Tensor) -> Self:
        """Count in one layer."""
        safe_BN = competes_BN & (recent_BN | scores.protected_BN)
        older_BN, heads = competes_BN & ~safe_BN, kept_BhN.shape[1]
        return cls(older_BN.sum(-1) * heads, (kept_BhN & older_BN[:, None]).sum((1, 2)), safe_BN.sum(-1) * heads)

    def __add__(self, other: "Older") -> "Older":
        return Older(self.among + other.among, self.kept + other.kept, self.safe + other.safe)

    def check(self, threshold: Threshold, names: list[str]) -> None:
        """Raise a worded ``ValueError`` for a prompt, not mostly window, of which nothing or all decided on stays."""
        long_B = self.among > self.safe
        none_B, all_B = (self.kept == 0) & long_B, (self.kept == self.among) & long_B
        for name, nothing, everything in zip(names, *torch.stack([none_B, all_B]).tolist(), strict=True):
            what, remedy = ("none", "lower") if nothing else ("all", "raise")
            kept = f"eviction_keep threshold {threshold.value:g} keeps {what} of the entries of {name[:80]!r}"
            older = f"that are older than the last {threshold.window:,} positions"
            instead = f"{remedy} it, or let 'subtoken-train calibrate threshold' find one"
            refuse((nothing or everything, f"{kept} {older}; {instead}"))


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt, all layers and heads: scores that a threshold decides on, fp32, and entries that stay anyway."""

    scores_n: Tensor
    safe: int

    def share(self, threshold: float) -> float:
        """Return the share of the entries in scope that stays."""
        return (self.safe + int((self.scores_n >= threshold).sum())) / (self.safe + len(self.scores_n))


def mean_threshold(prompts: list[ScoredPrompt], keep: float) -> float:
    """Find the lowest threshold that keeps at most ``keep`` on average over prompts, six digits, rounded up."""
    safe = sum(each.share(math.inf) for each in prompts) / len(prompts)
    sizes = [len(each.scores_n) for each in prompts]
    own_P = [1 / (each.safe + n) / len(prompts) for each, n in zip(prompts, sizes, strict=True)]
    scores_n, order_n = torch.cat([each.scores_n for each in prompts]).sort(descending=True, stable=True)
    weights_n = torch.tensor(own_P, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))[order_n]
    fits = int((safe + weights_n.cumsum(0) <= keep + 1e-9).sum())
    while 0 < fits < len(scores_n) and scores_n[fits - 1] == scores_n[fits]:
        fits -= 1
    if fits == 0:
        stays = f"what always stays, the window and what the method protects, which is {safe:.4g} of them"
        instead = "use a smaller window, longer prompts or a larger keep"
        raise ValueError(f"no threshold keeps {keep:.4g} of the entries and more than {stays}; {instead}")
    low, high = float(scores_n[fits]), float(scores_n[fits - 1])
    between = (low + high) / 2 if math.isfinite(low) else high
    return min(math.ceil(between * 1e6) / 1e6, max(high, between))


def written_threshold(written: object) -> Threshold | None:
    """Read ``threshold:-4``, ``threshold:-4:128``, ``threshold:FILE`` or ``{threshold, window}``; None: it is none."""
    if (file := threshold_file(written)) is not None:
        return Threshold.read(file)
    if isinstance(written, str):
        found = _TEXT.fullmatch(written.strip())
        return None if found is None else Threshold(float(found[1]), int(found[2] or WINDOW))
    return Threshold(written["threshold"], written.get("window", WINDOW)) if isinstance(written, Mapping) else None


def threshold_file(written: object) -> str | None:
    """Return the file that a written threshold names, unread; None if it names none or is no threshold."""
    if isinstance(written, str) and re.match(r"threshold\b", written.strip()):
        named = written.strip().removeprefix("threshold")
        if not named.startswith(":") or named == ":":
            raise ValueError(f"eviction_keep={clipped(repr(written), 60)} names no threshold; {FORM}")
        return None if _TEXT.fullmatch(written.strip()) else named[1:]
    if not isinstance(written, Mapping):
        return None
    for key in written:
        check_word("key of eviction_keep", key, ("threshold", "window"))
    if (value := written.get("threshold")) is None:
        raise ValueError(f"eviction_keep={clipped(repr(dict(written)), 60)} names no threshold; {FORM}")
    if isinstance(value, str) and "window" in written:
        raise ValueError(f"eviction_keep takes its window from {value}, with its threshold; leave window out")
    return value if isinstance(value, str) else None


_TEXT = re.compile(r"threshold:([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?::(\d+))?", re.IGNORECASE)

"""Which setting to take: per regime and group of questions, the arm that beats every fair twin, or none.

A winner beats its token-only anchor *and* the router-free selection at equal bytes: both paired 95 % intervals, over
seeds and questions, lie above zero. Of several, the one with the highest mean. The same records choose and show it, so
a winner of many candidates is somewhat flattered; intervals are not corrected for their number.

Legend: s seeds, n questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.comparison_tables import Arm
from subtoken_train.cli.recommend import interval_cell
from subtoken_train.evaluation.intervals import bootstrap_interval


@dataclass(frozen=True)
class Regime:
    """Arms of one regime by their role, all but ``unrouted`` at equal bytes.

    Attributes:
        words: what the regime is, for people.
        candidates: arms that may be taken, by name.
        anchor: the fair token-only twin of each candidate.
        router_free: the trained selection without a router of each candidate; none for one that is such itself.
        unrouted: the arm with the candidates' tokens and whole values, at more bytes; shown, never a hurdle.
    """

    words: str
    candidates: tuple[str, ...]
    anchor: Mapping[str, str]
    router_free: Mapping[str, str]
    unrouted: str | None = None


@dataclass(frozen=True)
class Gain:
    """A paired difference in points and its 95 % interval, over ``seeds`` seeds."""

    points: float
    low: float
    high: float
    seeds: int

    @property
    def words(self) -> str:
        """``+5.9 [+3.7, +8.3]``."""
        return interval_cell((self.points, self.low, self.high), 1)


@dataclass(frozen=True)
class Choice:
    """One line: ``arm`` None says that nothing beats its twins; the gains are then the best candidate's, ``nearest``.

    ``nearest`` is None where no candidate has all its twins' records; then there is nothing to say yet.
    """

    arm: str | None
    nearest: str | None
    to_anchor: Gain | None = None
    to_router_free: Gain | None = None
    to_unrouted: Gain | None = None


def paired_gain(first: Arm, second: Arm, group: str) -> Gain | None:
    """``first`` less ``second`` on a group of questions, over the seeds of both; None where they share none."""
    seeds = sorted(set(first.seeds) & set(second.seeds))
    if not seeds:
        return None
    ours, theirs = (arm.scores_of(group)[[arm.seeds.index(seed) for seed in seeds]] for arm in (first, second))
    difference = 100 * (ours - theirs)
    low, high = bootstrap_interval(difference)
    return Gain(float(difference.mean()), low, high, len(seeds))


def choose(arms: Mapping[str, Arm], regime: Regime, group: str) -> Choice:
    """The regime's choice for a group of questions; candidates whose twins have no records are left out."""
    made = [choice for name in regime.candidates if (choice := _compared(arms, regime, name, group)) is not None]
    best = max((choice for choice in made if choice.arm), key=lambda each: _mean(arms, each, group), default=None)
    nearest = max(made, key=lambda each: _mean(arms, each, group), default=None)
    return best or nearest or Choice(None, None)


def choice_words(choice: Choice, words: Mapping[str, str]) -> str:
    """Markdown cells ``setting | against its anchor | against router-free selection``."""
    if choice.nearest is None:
        return "no records yet | - | -"
    named = words[choice.nearest].replace("S64K16, bilinear, attention, prior, gate", "best")
    beaten = choice.to_anchor is not None and choice.to_anchor.low > 0
    level = f"{'value norm' if beaten else 'token-only'} (nearest: {named})"
    taken = named if choice.arm else level
    gains = (choice.to_anchor, choice.to_router_free)
    return " | ".join([taken, *("-" if gain is None else gain.words for gain in gains)])


def seeds_of(choice: Choice) -> str:
    """Training seeds that stand behind it; ``-`` without records."""
    return "-" if choice.to_anchor is None else str(choice.to_anchor.seeds)


def _compared(arms: Mapping[str, Arm], regime: Regime, name: str, group: str) -> Choice | None:
    hurdles = [regime.anchor[name], *([regime.router_free[name]] if name in regime.router_free else [])]
    if name not in arms or not all(twin in arms for twin in hurdles):
        return None
    gains = [paired_gain(arms[name], arms[twin], group) for twin in hurdles]
    if any(gain is None for gain in gains):
        return None
    wins = all(gain is not None and gain.low > 0 for gain in gains)
    whole = None if regime.unrouted is None else arms.get(regime.unrouted)
    unrouted = None if whole is None else paired_gain(arms[name], whole, group)
    return Choice(name if wins else None, name, gains[0], gains[1] if len(gains) > 1 else None, unrouted)


def _mean(arms: Mapping[str, Arm], choice: Choice, group: str) -> float:
    assert choice.nearest is not None
    return float(arms[choice.nearest].scores_of(group).mean())

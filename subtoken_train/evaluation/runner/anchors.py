"""Matched token-only anchors: which of the arms is one, and a spec where none is.

The anchor of a routed arm keeps whole values of fewer tokens, at the keep ratio that the byte ledger solves for,
rounded up from the arm's own count: its bytes are never below the arm's, and less than a token above, at any length. A
*trained* anchor is an adapter of its own, under its own reducer; of several, one of the arm's seed is taken. Where no
arm of the grid is one, the arm's own LoRA runs token-only at that ratio: an untrained anchor, named so, since LoRA
adapts to what it was trained under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from subtoken_train.evaluation.runner.arms import Arm, arm_name, describe_arm
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.pool import ModelPool
from subtoken_train.reducers.base import Reducer, matched_reducer

SUFFIX = "untrained_anchor"
WRITTEN = 1e-5  # by which a ratio in a recipe, a third for instance, may lie below the exact one


def with_anchors(arms: Sequence[Arm], pool: ModelPool) -> tuple[list[Arm], list[str]]:
    """The arms with their anchors named, followed by the untrained anchors that had to be added.

    Returns:
        (arms, notes): a note for every routed arm that has no anchor, with the reason.
    """
    named: list[Arm] = []
    added: list[Arm] = []
    notes: list[str] = []
    for arm in arms:
        try:
            solved = None if arm.routing is None else solve(arm)
        except ValueError as error:
            solved, notes = None, [*notes, f"{arm.facts.name} has no matched anchor: {error}"]
        if solved is None:
            named.append(arm)
            continue
        serving = [other for other in [*arms, *added] if _serves(other, arm, solved)]
        anchor = min(serving, key=partial(_distance, arm), default=None)
        if anchor is None:
            anchor = describe_arm(_untrained(arm, solved, pool), pool)
            added.append(anchor)
        named.append(replace(arm, facts=replace(arm.facts, anchor=anchor.facts.name)))
    return named + added, notes


def solve(arm: Arm) -> Reducer:
    """The reducer of a routed arm's anchor.

    Raises:
        ValueError: there is none: no token reducer, or layers below its cut that alone cost more.
    """
    assert arm.routing is not None
    routed = replace(arm.routing.token_budget, key_channels=arm.spec.key_channels)
    return matched_reducer(arm.reducer, routed, arm.shape.num_layers, arm.tokens)


def _serves(other: Arm, arm: Arm, solved: Reducer) -> bool:
    """Whether an arm is token-only, of the same reducer, compression and backbone, and keeps as many tokens.

    Its LoRA is the arm's own, or was trained under just that. Prompts of other lengths than the nominal one must not
    get fewer tokens either.
    """
    known = other.spec.adapter is not None and not other.spec.overrides
    return (
        other.routing is None
        and other.facts.backbone == arm.facts.backbone
        and _kind(other.reducer) == _kind(solved)
        and other.layer_tokens(other.reducer) == arm.layer_tokens(solved)
        and other.reducer.round_up
        and other.reducer.keep_ratio >= solved.keep_ratio * (1 - WRITTEN)
        and _compression(other.spec) == _compression(arm.spec)
        and (known or other.spec.adapter == arm.spec.adapter)
    )


def _distance(arm: Arm, other: Arm) -> tuple[bool, bool]:
    """Trained anchors before others, the arm's own seed before others."""
    return other.spec.overrides, other.facts.seed != arm.facts.seed


def _kind(reducer: Reducer) -> dict[str, object]:
    """What it is, however much it keeps."""
    own = asdict(reducer)
    return {key: value for key, value in own.items() if key not in ("keep_ratio", "round_up", "matches", "seed")}


def _compression(spec: ArmSpec) -> tuple[object, ...]:
    keep = None if spec.eviction_keep is None else str(spec.eviction_keep)
    scope = "all" if spec.scope == "all" else "context"
    eviction = spec.eviction, keep, spec.eviction_every, dict(spec.eviction_options), scope
    return *eviction, spec.kv_dtype, spec.key_channels, spec.merge, spec.rerotate, spec.protocol


def _untrained(arm: Arm, solved: Reducer, pool: ModelPool) -> ArmSpec:
    """Named after the arm as it was trained: one anchor serves all selectors."""
    base = replace(arm.spec, selector=None, seed=arm.spec.seed if arm.spec.drawing else None)
    config = None if base.adapter is None else pool.adapter(base.adapter)
    return replace(
        base,
        name=f"{arm.spec.name or arm_name(base, config)}-{SUFFIX}",
        selector="none",
        keep_ratio=solved.keep_ratio,
        reducer_options={**arm.spec.reducer_options, "round_up": True, "matches": solved.matches},
    )

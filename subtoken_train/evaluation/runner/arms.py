"""Arms that can answer: specs, what tables say of them, models taken from a pool, and their matched anchors.

An anchor keeps whole values of fewer tokens, at the keep ratio that the byte ledger solves for, rounded up: at least
its arm's bytes and less than one token more. A *trained* anchor is an adapter trained under its own reducer, of the
arm's seed if there is one. If no arm of the grid serves, the arm's own LoRA runs token-only at that ratio and is named
an untrained anchor. A threshold promises no bytes: its arm's anchor keeps the threshold's recorded mean.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from subtoken_train.artifact.config import AdapterConfig, read_config
from subtoken_train.artifact.hub import adapter_folder
from subtoken_train.documents import read_json
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import ending_with
from subtoken_train.evaluation.results import ArmFacts
from subtoken_train.evaluation.runner.spec import Anchors
from subtoken_train.evaluation.tasks.task import Modality, Task
from subtoken_train.evictions import notation_names
from subtoken_train.evictions.thresholds import written_threshold
from subtoken_train.families.family import Family
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prefill import check_choices, check_context_first, with_gates
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer, matched_reducer
from subtoken_train.routing import RoutingConfig

NOMINAL_CONTEXT = 1024
"""Context tokens that a language model's nominal budget is stated for (the paper's)."""
SUFFIX = "untrained_anchor"
WRITTEN = 1e-5  # by which a ratio in a recipe, a third for instance, may lie below the exact one


@dataclass(frozen=True)
class Arm:
    """One arm of a run, and what of its model the ledger reads, so that anchors need no model.

    ``tokens`` are a nominal prompt's, in its compressed region, before reduction; digests are of the adapter's settings
    and tensors, and of the files that reducer and eviction read; ``chat_template`` None: no tokenizer is here.
    """

    spec: ArmSpec
    facts: ArmFacts
    reducer: Reducer
    tokens: int
    routing: RoutingConfig | None
    shape: KVShape
    modality: Modality
    adapter_sha256: str | None
    calibration_sha256: str | None
    chat_template: bool | None = field(default=None, compare=False)

    def compression(self) -> Compression:
        """Return what happens after the prompt's pass; rounded as the reducer is, up for anchors."""
        return self.spec.compression(self.reducer.round_up)


def load_arm(spec: ArmSpec, pool: ModelPool) -> CompressedBackbone:
    """Return a spec's model; another arm's on the same weights ends with it."""
    if (adapter := spec.adapter) is None and pool.find(str(spec.backbone)) is not None:
        raise ValueError(f"backbone {spec.backbone} is an adapter; write {spec.spelled('adapter', spec.backbone)}")
    return pool.get(
        str(spec.backbone) if adapter is None else pool.folder(adapter),  # no adapter would be taken for a backbone
        backbone=None if adapter is None else spec.backbone,
        reducer=_reducer(spec, pool),
        selector=None if adapter is None else spec.selector,
        byte_share=spec.byte_share,
        seed=spec.seed,
        routing=spec.routing,
        loading=spec.loading,
    )


def _reducer(spec: ArmSpec, pool: ModelPool) -> Reducer | None:
    if spec.reducer is None and spec.keep_ratio is None and not spec.reducer_options:
        return None
    own = build_reducer("none") if spec.adapter is None else pool.adapter(spec.adapter).reducer
    name = spec.reducer or own.name
    if name == "none" and spec.keep_ratio not in (None, 1):
        raise ValueError(f"keep_ratio {spec.keep_ratio} needs a reducer; {spec.adapter} has none, name one")
    if name != "none" and own.name == "none" and spec.keep_ratio is None:
        raise ValueError(f"{spec.adapter} has no token reducer, so {name} needs keep_ratio, for instance 0.25")
    changed: dict[str, Any] = asdict(own) if name == own.name else {"name": name, "keep_ratio": own.keep_ratio}
    if spec.keep_ratio is not None:
        changed |= {"keep_ratio": spec.keep_ratio, "matches": None}  # an anchor's, at another ratio, has no arm
    if name == "none":
        changed["keep_ratio"] = 1.0
    if name == "random" and spec.seed is not None:
        changed["seed"] = spec.seed
    return build_reducer(**{**changed, **spec.reducer_options})


def prepare(specs: Sequence[ArmSpec], pool: ModelPool) -> list[Arm]:
    """Load every arm once, so that mistakes show before anything is answered, and state its facts."""
    arms: dict[str, Arm] = {}
    for spec in specs:
        arm = describe_arm(spec, pool)
        if arms.setdefault(arm.facts.name, arm) is not arm:
            raise ValueError(f"two arms are named {arm.facts.name!r}; give them names of their own (name: ...)")
    return list(arms.values())


def resolve_arms(
    specs: Sequence[ArmSpec], tasks: Sequence[Task], anchors: Anchors, pool: ModelPool
) -> tuple[list[Arm], list[str]]:
    """Return all arms, anchors too, and notes on those without one; what cannot run is refused here, once."""
    arms = prepare(specs, pool)
    for arm, task in product(arms, tasks):
        if task.modality != arm.modality:
            model = f"the model of arm {arm.facts.name} reads {arm.modality}s"
            raise ValueError(f"task {task.name} asks about {task.modality}s, but {model}; run them separately")
        if task.options.get("chat") is True and arm.chat_template is False:
            whose = f"the tokenizer of {arm.facts.backbone} has no chat template"
            raise ValueError(f"task {task.name} has chat: true, and {whose}; leave chat out, or use an instruct model")
    return with_anchors(arms, pool) if anchors == "auto" else (arms, [])


@ending_with("'subtoken-train evaluate --help' lists the settings of an arm")
def describe_arm(spec: ArmSpec, pool: ModelPool) -> Arm:
    """Return the arm that a spec and its model make; no anchor is named yet."""
    backbone = load_arm(spec, pool)
    reducer, family = backbone.reducer, backbone.family
    compression = with_gates(backbone, spec.compression())
    compression.check(family)
    check_choices(backbone, compression)
    if spec.protocol == "context_first":
        check_context_first(backbone, compression)
    routing, is_text = backbone.active_routing, family.image_token_id is None
    tokens = NOMINAL_CONTEXT if is_text else family.visual_tokens()
    config = None if spec.adapter is None else pool.adapter(spec.adapter)
    # a budget in tokens or bytes is no share of anything before a prompt is there, and what is read frees nothing
    method = compression.eviction
    known = compression.share if method and not method.reads else None
    nominal = backbone.promised_fraction([tokens], spec.key_channels, compression.key_axes)
    files = [each.calibrated for each in (reducer, *(() if method is None else (method, *method.inside)))]
    files += [] if compression.threshold is None else [compression.threshold.record]
    places = {"in": reducer.acts or routing is not None, "after": compression.label != "-"}
    acts = f"{' and '.join(word for word, there in places.items() if there)} prefill" if any(places.values()) else "-"
    facts = ArmFacts(
        name=spec.name or arm_name(spec, config),
        backbone=spec.backbone or (spec.adapter if config is None or config.merged else config.backbone.path) or "",
        adapter=spec.adapter,
        reducer=f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "-",
        groups="-" if routing is None else routing.words,
        eviction=compression.label,
        protocol=spec.protocol,
        acts=acts if acts == "-" or spec.protocol == "query_aware" else f"{acts} of the context",
        nominal_kv=nominal * (1.0 if known is None else known),
        anchor=None,
        trained=config is not None and not spec.overrides and spec.eviction is None,
        seed=spec.seed if config is None or spec.seed is not None else config.training.get("seed"),
    )
    return Arm(
        spec=spec,
        facts=facts,
        reducer=reducer,
        tokens=tokens,
        routing=routing,
        shape=family.shape,
        modality="text" if is_text else "image",
        adapter_sha256=None if spec.adapter is None else pool.digest(spec.adapter),
        calibration_sha256="+".join(each.digest for each in files if each is not None) or None,
        chat_template=_has_template(family, facts.backbone),
    )


def _has_template(family: Family, backbone: str) -> bool | None:
    """Say whether a model's tokenizer has a chat template; of a layout without one, by the files of a local folder."""
    if family.processor is not None:
        return bool(getattr(family.tokenizer, "chat_template", None))
    if not (folder := Path(backbone)).is_dir():
        return None
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    content = read_json(settings) if settings.is_file() else {}
    return isinstance(content, dict) and bool(content.get("chat_template"))


def arm_name(spec: ArmSpec, config: AdapterConfig | None = None) -> str:
    """Return a name made of what the arm is; safe as a folder's. ``config``: its adapter's, where it was read."""
    parts = [adapter_name(spec.adapter, config) if spec.adapter is not None else Path(str(spec.backbone)).name]
    if spec.reducer is not None or spec.keep_ratio is not None:
        parts.append(f"{spec.reducer or 'keep'}{'' if spec.keep_ratio is None else format(spec.keep_ratio, '.6g')}")
    if (routing := spec.routing) is not None:
        parts.append(routing.words.replace(" ", "-"))
        parts += [] if routing.layout == "contiguous" else [routing.layout]
    elif spec.selector is not None:
        parts.append("token_only" if spec.selector == "none" else spec.selector)
    if spec.eviction is not None:
        threshold, keep = written_threshold(spec.eviction_keep), str(spec.eviction_keep)
        if threshold is not None:
            keep = f"_{threshold.label.partition(' mean')[0]}".replace(" ", "_")
        parts.append("+".join(notation_names(spec.eviction)) + keep + (f"_{spec.scope}" if spec.scope else ""))
    others = {
        f"bytes{spec.byte_share}": spec.byte_share is not None,
        f"every{spec.eviction_every}": spec.eviction_every is not None,
        f"merge_{spec.merge}": spec.merge is not None,
        f"keys{spec.key_channels:.6g}": spec.key_channels != 1,
        spec.key_axes: spec.key_axes != "own",
        spec.kv_dtype: spec.kv_dtype != "model",
        spec.protocol: spec.protocol != "query_aware",
        "rerotated": spec.rerotate,
        f"chunk{spec.prefill_chunk}": spec.prefill_chunk is not None,
        str(spec.dtype): spec.dtype is not None,
        f"pixels{spec.max_pixels}": spec.max_pixels is not None,
        f"seed{spec.seed}": spec.seed is not None,
    }
    return "-".join([*parts, *(word for word, there in others.items() if there)]).replace("/", "_")


def adapter_name(path: str, config: AdapterConfig | None = None) -> str:
    """Return the name that an adapter was trained under, else its folder's."""
    config = read_config(adapter_folder(path)) if config is None else config
    return str(config.training.get("name", Path(path).name))


def with_anchors(arms: Sequence[Arm], pool: ModelPool) -> tuple[list[Arm], list[str]]:
    """Return the arms, anchors named and untrained ones added; and why a routed arm has none."""
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
        # trained anchors before others, and the arm's own seed before others
        serving.sort(key=lambda other, seed=arm.facts.seed: (other.spec.overrides, other.facts.seed != seed))  # type: ignore[misc]
        if not serving:
            serving = [describe_arm(_untrained(arm, solved, pool), pool)]
            added += serving
        named.append(replace(arm, facts=replace(arm.facts, anchor=serving[0].facts.name)))
    return named + added, notes


def solve(arm: Arm) -> Reducer:
    """Return the reducer of a routed arm's anchor."""
    assert arm.routing is not None
    _anchor_keep(arm.spec)
    routed = replace(arm.routing.token_budget, key_channels=arm.spec.key_channels)
    return matched_reducer(arm.reducer, routed, arm.shape.num_layers, arm.tokens)


def _serves(other: Arm, arm: Arm, solved: Reducer) -> bool:
    """Tell whether an arm is token-only, of the same reducer, compression and backbone, and keeps as many tokens.

    Its LoRA is the arm's own, or was trained under just that; at no length may it keep fewer.
    """
    known, layers = other.spec.adapter is not None and not other.spec.overrides, arm.shape.num_layers
    return (
        other.routing is None
        and other.facts.backbone == arm.facts.backbone
        and _kind(other.reducer) == _kind(solved)
        and other.reducer.layer_tokens(other.tokens, layers) == solved.layer_tokens(arm.tokens, layers)
        and other.reducer.round_up
        and other.reducer.keep_ratio >= solved.keep_ratio * (1 - WRITTEN)
        and _compression(other.spec, other.spec.eviction_keep) == _compression(arm.spec, _anchor_keep(arm.spec))
        and (known or other.spec.adapter == arm.spec.adapter)
    )


def _kind(reducer: Reducer) -> dict[str, object]:
    own = asdict(reducer)
    return {key: value for key, value in own.items() if key not in ("keep_ratio", "round_up", "matches", "seed")}


def _anchor_keep(spec: ArmSpec) -> Any:
    """Return what the anchor's eviction keeps: its arm's budget, or the recorded mean of its arm's threshold."""
    if (threshold := written_threshold(spec.eviction_keep)) is None:
        return spec.eviction_keep
    if threshold.mean is None:
        how = "'subtoken-train calibrate threshold' finds and records one"
        raise ValueError(f"its {threshold.label} has no recorded mean to match; {how}")
    return threshold.mean


def _compression(spec: ArmSpec, kept: object) -> tuple[object, ...]:
    keep = None if kept is None else str(kept)
    scope = "all" if spec.scope == "all" else "context"
    eviction = spec.eviction, keep, spec.eviction_every, dict(spec.eviction_options), scope
    return *eviction, spec.kv_dtype, spec.key_channels, spec.key_axes, spec.merge, spec.rerotate, spec.protocol


def _untrained(arm: Arm, solved: Reducer, pool: ModelPool) -> ArmSpec:
    """An untrained anchor, named after the arm as it was trained: one serves all selectors."""
    seed = arm.spec.seed if arm.spec.drawing else None
    base = replace(arm.spec, selector=None, seed=seed, eviction_keep=_anchor_keep(arm.spec))
    config = None if base.adapter is None else pool.adapter(base.adapter)
    return replace(
        base,
        name=f"{arm.spec.name or arm_name(base, config)}-{SUFFIX}",
        selector=None if base.adapter is None else "none",
        groups=None,
        layout=None,
        byte_share=None,
        keep_ratio=solved.keep_ratio,
        reducer_options={**arm.spec.reducer_options, "round_up": True, "matches": solved.matches},
    )

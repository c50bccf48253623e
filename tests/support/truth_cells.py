"""The matrix of packed = truth: factors, allowed cells, a cell's difference. B batch, T steps, V vocabulary."""

import random
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from math import gcd
from operator import itemgetter
from types import SimpleNamespace

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.families.family import Family
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.ledger.kv_budget import kept_channels
from subtoken_train.reducers import REDUCERS as REGISTERED
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Batch, Plan, Protocol
from tests.support import truth_models as models
from tests.support.helpers import compress, opened
from tests.support.plain_parts import note_pages, noting_feedback
from tests.support.prompt_views import settings_for
from tests.support.reference import SampleTruth, closed_up, in_fp32, recompute, rounded, tapped, truths
from tests.support.sampling import Cell
from tests.support.truth_models import family_of

CELL = {
    "family": "llava_gqa", "reducer": "fastv_embeds", "selector": "linear", "layout": "contiguous", "groups": "8/3",
    "budget": "per_token", "eviction": "none", "precision": "fp32",
}  # fmt: skip
"""A cell to change a level of; who reads more factors adds theirs."""
KEYS = {
    "whole": {},
    "cut": {"key_channels": 0.6, "key_window": 4},
    "turned": {"key_channels": 0.6, "key_axes": "pca", "key_window": 4},
}
REDUCERS = {
    "none": {}, "fastv_embeds": {"name": "fastv", "keep_ratio": 0.5, "stage": "embeds", "layer": 2},
    "fastv_decoder": {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder", "layer": 1},
    "fastv_merged": {"name": "fastv", "keep_ratio": 0.5, "merge_dropped": True},
    "visionzip": {"name": "visionzip", "keep_ratio": 0.5}, "fastervlm": {"name": "fastervlm", "keep_ratio": 0.5},
    "prumerge": {"name": "prumerge", "keep_ratio": 0.5},
    "prumerge_plus": {"name": "prumerge", "keep_ratio": 0.6, "plus": True},
    "quest": {"name": "quest", "keep_ratio": 0.6, "page_size": 4, "window": 4},
    "compactor": {"name": "compactor", "keep_ratio": 0.6, "sinks": 1, "last": 1, "chunk": 8},
    "expected_attention": {"name": "expected_attention", "keep_ratio": 0.6, "sinks": 1, "future": 16},
    "sparsevlm": {"name": "sparsevlm", "keep_ratio": 0.7},
    "sparsevlm_v2": {"name": "sparsevlm", "keep_ratio": 0.7, "version": 2, "heads": 2},
    "fitprune": {"name": "fitprune", "keep_ratio": 0.6},
    "pyramiddrop": {"name": "pyramiddrop", "keep_ratio": 0.6, "stages": 3},
    "divprune": {"name": "divprune", "keep_ratio": 0.5}, "cdpruner": {"name": "cdpruner", "keep_ratio": 0.5},
    "dart": {"name": "dart", "keep_ratio": 0.5},
    "dart_decoder": {"name": "dart", "keep_ratio": 0.5, "stage": "decoder", "layer": 1},
    "vispruner": {"name": "vispruner", "keep_ratio": 0.5}, "prunesid": {"name": "prunesid", "keep_ratio": 0.5},
    "evs": {"name": "evs", "keep_ratio": 0.6}, "vidcom2": {"name": "vidcom2", "keep_ratio": 0.5},
}  # fmt: skip
RANKS = {level: REGISTERED.find(settings.get("name", "none")).ranks for level, settings in REDUCERS.items()}
SELECTORS = {
    "none": None, "linear": RoutingConfig("linear"), "mlp": RoutingConfig("mlp"),
    "value_norm": RoutingConfig("value_norm"), "leading": RoutingConfig("leading"),
    "query": RoutingConfig("linear", query_conditioned=True), "gated": RoutingConfig("linear", value_gate=True),
    "bilinear": RoutingConfig("bilinear", features=("norm", "attention")),
    "mean": RoutingConfig("linear", value_gate=True, fill="mean"),
    "mean_norm": RoutingConfig("value_norm", fill="mean"),
}  # fmt: skip
BYTE_POOLS = {"bytes_head": "head", "bytes_layer": "layer", "bytes_all": "all"}
"""Budgets of bytes for keys and groups, and what shares them."""
ROUNDING = [name for name, form in FORMATS.items() if form.rounds]
FACTORS = {
    "family": models.FAMILIES, "reducer": list(REDUCERS), "selector": list(SELECTORS),
    "layout": ["contiguous", "per_head"],
    "groups": ["16/4", "2/1", "8/3", "8/8"], "budget": ["per_token", "global", "ranked", *BYTE_POOLS],
    "eviction": ["none", *models.OWN, *EVICTIONS, *models.CHAINS, *models.PAST], "scope": ["context", "all"],
    "batch": ["one", "three_left", "three_right", "text_left", "text_right", "last_left", "last_right"],
    "protocol": ["query_aware", "context_first"],
    "precision": ["fp32", "bf16", *ROUNDING],
    "keys": list(KEYS),
    "merge": ["own", "none", "weighted", "pivot", "position"],
}  # fmt: skip
"""``groups`` is S/K: 2 groups are heads or several of them, 8 and 16 are parts of a head."""


def allowed(cell: Cell) -> bool:
    """Whether the factors that are given go together."""
    family, reducer, budget = (cell.get(name) for name in ("family", "reducer", "budget"))
    if family is not None and reducer is not None:
        sees = family not in models.TEXT
        if reducer in models.TINY[family].without or (reducer != "none" and sees == (reducer in models.OF_TEXT)):
            return False
        if not serves(family, reducer):
            return False
    fixed = {"layout": "contiguous", "groups": "16/4", "budget": "per_token"}
    if cell.get("selector") == "none" and any(cell.get(name, level) != level for name, level in fixed.items()):
        return False
    if cell.get("selector") == "mean_norm" and cell.get("groups") == "8/8":
        return False  # a fill without a gate needs groups that are dropped
    if budget == "ranked" and (not RANKS[reducer or "fastv_embeds"] or family in models.TEXT):
        return False
    return all(fits(cell) for fits in (_piece_fits, _eviction_fits, _protocol_fits, _bytes_fit))


@cache
def serves(family: str, reducer: str) -> bool:
    method = build_reducer(**{"name": "none", **REDUCERS[reducer]})
    if not isinstance(method, TowerReducer) and not method.reads_frames:
        return True
    built = family_of(family)
    if method.reads_frames:
        return built.tells_frames
    return method.statistics in built.tower_statistics(built.model.config)


def shows_videos(reducer: str) -> bool:
    return REGISTERED.find(REDUCERS[reducer].get("name", "none")).reads_frames


def _protocol_fits(cell: Cell) -> bool:
    """Only models that see images end with one; before the question is seen nothing can read it."""
    ends = cell.get("batch", "one").startswith("last")
    method = EVICTIONS.get(cell.get("eviction", "none"))
    if ends and (cell.get("family", "llava") in models.TEXT or (method is not None and method.needs_question)):
        return False
    if cell.get("protocol", "query_aware") == "query_aware":
        return True
    reducer = REDUCERS[cell.get("reducer", "none")].get("name", "none")
    asks = cell.get("selector") in ("query", "bilinear") or REGISTERED.find(reducer).reads_question
    return not (ends or asks or (method is not None and (method.needs_image or method.needs_question)))


def _bytes_fit(cell: Cell) -> bool:
    """Bytes for keys and groups are spent by learned routers of a language model, and nothing else cuts keys."""
    budget = cell.get("budget")
    if budget not in BYTE_POOLS:
        return True
    asking, blind = ["query", "bilinear"], ["linear", "mlp", "gated"]
    only = {"family": models.TEXT, "selector": blind + asking, "groups": ["8/8"], "layout": ["contiguous"]}
    only |= {"eviction": ["none"], "scope": ["context"], "merge": ["own"], "keys": ["whole"]}
    if budget == "bytes_all":
        only |= {"selector": blind, "reducer": ["none"]}
    return all(cell.get(name, levels[0]) in levels for name, levels in only.items())


def _piece_fits(cell: Cell) -> bool:
    """Bytes of several channels need pieces of as many; heads are 16 channels wide."""
    per_code = FORMATS[cell["precision"]].per_code if cell.get("precision") in FORMATS else 1
    if kept_channels(16, KEYS[cell.get("keys", "whole")].get("key_channels", 1)) % per_code:
        return False
    if per_code == 1 or cell.get("selector", "none") == "none":
        return True
    if "groups" not in cell or "layout" not in cell:
        return True
    kv_heads = 4 if cell.get("family") == "llava" else 2
    groups, kept = map(int, cell["groups"].split("/"))
    width = 16 if cell["layout"] == "per_head" else 16 * kv_heads
    return (groups == kept and cell.get("budget") not in BYTE_POOLS) or gcd(width // groups, 16) % per_code == 0


def _eviction_fits(cell: Cell) -> bool:
    own = getattr(EVICTIONS.get(cell.get("eviction", "none")), "merges", "none")
    merge = own if cell.get("merge", "own") == "own" else cell["merge"]
    if cell.get("precision") == "bf16" and merge in ("weighted", "pivot"):
        return False  # two passes in bf16 find other nearest keys
    form = FORMATS.get(cell.get("precision"))
    if form is not None and form.mixes and cell.get("keys", "whole") != "whole":
        return False
    if cell.get("eviction") == "none" and (cell.get("scope") == "all" or cell.get("merge", "own") != "own"):
        return False
    if cell.get("eviction") in models.READING:
        # rounded keys can have other pages chosen than those that the truth reads
        plain = {"precision": "fp32", "keys": "whole", "merge": "own", "selector": "none"}
        windowed = "family" in cell and models.TINY[cell["family"]].windowed
        return not windowed and all(cell.get(name, level) == level for name, level in plain.items())
    if (method := EVICTIONS.get(cell.get("eviction", "none"))) is None:
        return True
    sees = cell.get("family", "llava") not in models.TEXT
    return not method.needs_image or (sees and not cell.get("batch", "one").startswith("text"))


def full_matrix() -> list[Cell]:
    """Take every choice of what the model computes and what acts on its cache, filled up from shuffled levels."""
    models = ["family", "reducer", "selector", "layout", "groups", "budget"]
    others = [name for name in FACTORS if name not in models]
    cells = _filled(models, others) + _filled(ACTING, [name for name in FACTORS if name not in ACTING])
    return random.Random(1).sample(cells, min(MOST_CELLS, len(cells)))


MOST_CELLS = 6100  # drawn of some 38,000; they take an hour of a core
PLAIN_CELL = {name: level for name, level in CELL.items() if name != "eviction"}
PLAIN_CELL |= {"family": "llama", "reducer": "none", "selector": "none"}
"""A language model without compression, for tests that add some."""

ACTING = ["eviction", "batch", "protocol", "precision"]


def _filled(crossed: list[str], rest: list[str]) -> list[Cell]:
    """The allowed cells of all levels of some factors, each with one choice of the others."""
    turns = [dict(zip(rest, levels, strict=True)) for levels in product(*(FACTORS[name] for name in rest))]
    random.Random(0).shuffle(turns)
    cells = []
    for turn, levels in enumerate(product(*(FACTORS[name] for name in crossed))):
        cell = dict(zip(crossed, levels, strict=True))
        if allowed(cell):
            filled = (cell | turns[(turn + i) % len(turns)] for i in range(len(turns)))
            cells += list(islice(filter(allowed, filled), 1))
    return cells


@dataclass
class Decoded:
    """Packed decoding: tokens [B, T], the logits that chose them [B, T, V], and what the truth needs."""

    tokens_BT: Tensor
    logits_BTV: Tensor
    truths: list[SampleTruth]
    cache: PackedCache
    plan: Plan


@torch.no_grad()
def decoded(
    backbone: CompressedBackbone, batch: Batch, steps: int, compression: Compression, protocol: Protocol = "query_aware"
) -> Decoded:
    """Greedy decoding that notes its logits and does not stop at an end of text."""
    with tapped(backbone) as tap, noting_feedback() as feedback:
        first, cache = opened(backbone, batch, compression, protocol)
    saved = truths(backbone, tap, first.plan, batch, compression.merging)
    if compression.eviction is not None and compression.eviction.reads:
        note_pages(saved, tap, compression)
    saved = list(map(closed_up, saved)) if compression.rerotate else saved
    if compression.kv_dtype != "model":
        saved = rounded(saved, compression.kv_dtype, cache, feedback)
    logits, tokens = [first.logits_BV], [first.logits_BV.argmax(-1)]
    while len(tokens) < steps:
        logits.append(decode(backbone, tokens[-1][:, None], cache))
        tokens.append(logits[-1].argmax(-1))
    return Decoded(torch.stack(tokens, 1), torch.stack(logits, 1), saved, cache, first.plan)


def backbone_of(cell: Cell) -> CompressedBackbone:
    family = family_of(cell["family"], torch.bfloat16 if cell["precision"] == "bf16" else torch.float32)
    torch.manual_seed(1)
    if (routing := SELECTORS[cell["selector"]]) is not None:
        groups, kept = map(int, cell["groups"].split("/"))
        routing = replace(routing, num_groups=groups, kept_groups=kept, layout=cell["layout"])
        pool = BYTE_POOLS.get(cell["budget"])
        spent = {"budget": "bytes", "byte_pool": pool, "byte_share": 0.4, "sinks": 1, "window": 1}
        routing = replace(routing, **(spent if pool else {"budget": cell["budget"]}))
    reducer = dict(REDUCERS[cell["reducer"]])
    if cell["reducer"] == "fitprune":
        reducer["calibration"] = models.schedules_of(cell["family"])
    backbone = compress(family, routing, **reducer).eval()
    if cell.get("budget") in BYTE_POOLS:  # routers that have opinions of keys as of groups
        for parameter in backbone.bank.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    for gate in () if backbone.bank is None else backbone.bank.gates:
        gate.beta.data.fill_(2.0)
    models.KV_HEADS[0] = family.shape.num_kv_heads
    return backbone


def compression_of(cell: Cell) -> Compression:
    """A cell's eviction and precision; ``chunk`` and ``rerotate`` are for cells of their own."""
    name, precision = cell["eviction"], cell["precision"]
    own = {"prefill_chunk": cell.get("chunk"), "rerotate": "rerotate" in cell, **KEYS[cell.get("keys", "whole")]}
    own["kv_dtype"] = precision if precision in FORMATS else "model"
    if name == "none":
        return Compression(**own)
    notation = name.removeprefix("threshold(").removesuffix(")") if name in models.PAST else name
    family = family_of(cell["family"])
    settings = dict({**models.CHAINS, **models.SHORT}.get(notation, {}))
    if "shares" in settings:
        settings["shares"] = settings["shares"][: family.shape.num_layers]
    method = (
        models.OWN[name]()
        if name in models.OWN
        else build_eviction(notation, **settings, **settings_for(notation, family))
    )
    merge = None if cell.get("merge", "own") == "own" else cell["merge"]
    kept = {"threshold": Threshold(models.PAST[name], models.RECENT)} if name in models.PAST else {"keep": 0.5}
    return Compression(method, **kept, scope=cell.get("scope"), merge=merge, **own)


def batch_of(cell: Cell) -> Batch:
    kind, _, side = cell["batch"].partition("_")
    return models.prompts(
        family_of(cell["family"]), kind, side == "left", videos=shows_videos(cell.get("reducer", "none"))
    )


EXACT = 1e-4  # of a logit, in fp32 and in formats that round, which the truth rounds as they do
TOLD = 6  # of a sample's ties (``plain_parts.EDGE``), decided by fp32's last bits, the truth may be told how they fell
TIMES = 2.0  # as far from the truth in fp32 as eager attention is, a packed bfloat16 model may be


@dataclass(frozen=True)
class Difference:
    """Of packed logits from the truth."""

    largest: float  # of a logit
    relative: float  # root mean square over that of the logits
    same_tokens: bool
    told: int = 0  # ties of a sample that the truth had to be told, at most
    times: float | None = None  # root mean square over that of eager attention in bfloat16

    def fits(self, precision: str) -> bool:
        if precision == "bf16":
            return self.times is not None and self.times < TIMES
        return self.largest < EXACT and self.same_tokens


def difference(cell: Cell, steps: int, compression: Compression | None = None) -> Difference:
    """Decode a cell, under another compression than its own where one is given, and recompute it."""
    compression = compression_of(cell) if compression is None else compression
    return from_truth(backbone_of(cell), batch_of(cell), steps, compression, cell["protocol"])


@torch.no_grad()
def from_truth(
    backbone: CompressedBackbone, batch: Batch, steps: int, compression: Compression, protocol: Protocol = "query_aware"
) -> Difference:
    """Decode ``steps`` tokens after a batch of prompts from the packed cache, and recompute them."""
    got = decoded(backbone, batch, steps, compression, protocol)
    eager = _recomputed(backbone, got.truths, got)
    if backbone.family.model.dtype != torch.bfloat16:
        return _apart(got, eager)
    wide = _recomputed(SimpleNamespace(family=widened(backbone.family)), list(map(in_fp32, got.truths)), got)
    own = _apart(got, wide)
    return replace(own, times=own.relative / _relative(eager, wide))


def _recomputed(backbone: CompressedBackbone, samples: list[SampleTruth], got: Decoded) -> Tensor:
    each = zip(samples, got.tokens_BT, got.logits_BTV, strict=True)
    return torch.stack([_settled(backbone, truth, tokens[:-1], logits.float()) for truth, tokens, logits in each])


def _settled(backbone: CompressedBackbone, truth: SampleTruth, tokens: Tensor, logits: Tensor) -> Tensor:
    """The truth's logits; where they are not those that came, one tie after the other falls as brings them nearest."""
    roundings = [layer.storage.rounding for layer in truth.layers if layer.storage is not None]
    found = recompute(backbone, truth, tokens).float()
    for _ in range(TOLD if roundings else 0):
        if float((found - logits).abs().max()) < EXACT:
            break
        best = float((found - logits).norm()), found, None, frozenset[int]()
        for rounding, number in [(own, number) for own in roundings for number in range(own.ties)]:
            before, rounding.told = rounding.told, rounding.told ^ {number}
            other = recompute(backbone, truth, tokens).float()
            best = min(best, (float((other - logits).norm()), other, rounding, rounding.told), key=itemgetter(0))
            rounding.told = before
        found, rounding, told = best[1:]
        if rounding is None:
            break
        rounding.told = told
    return found


def _apart(got: Decoded, expected: Tensor) -> Difference:
    logits = got.logits_BTV.float()
    told = [sum(len(each.storage.rounding.told) for each in t.layers if each.storage is not None) for t in got.truths]
    largest, same_tokens = float((logits - expected).abs().max()), torch.equal(expected.argmax(-1), got.tokens_BT)
    return Difference(largest, _relative(logits, expected), same_tokens, told=max(told))


def _relative(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@cache
def widened(family: Family) -> Family:
    wide = copy(family)
    wide.model = deepcopy(family.model).float()
    return wide

"""Every text eviction on a real model: facts hidden in WikiText, and the text that follows, at equal bytes.

    python -m benchmarks.real_text --model checkpoints/qwen05 --dtype bfloat16 --source DIR    # what has no record
    python -m benchmarks.real_text --model DIR --source DIR --arms full                # is this model a judge?

DIR holds WikiText-2's ``test.txt``. A context is a run of it with six sentences put between its own, ``The access code
of the harbour is 4711.`` The context is compressed before anything is asked. Then the start of each sentence follows
it (alone, on a branch of the cache): nats of the code, and whether greedy decoding says it. The text that follows the
context in WikiText is scored on a branch of its own. A model judges methods by facts only if it says half of the codes
with the full cache, which is measured first. Where an arm says "question seen", the start of the first sentence asked
is part of the prompt, so that the method chooses in its sight; that one code is scored. Bytes are those of packed
tensors, indices included, as a share of the full cache in two-byte numbers: a model in fp32 holds what it does not
quantise in twice as many.

Arms whose values are *turned* read the model's copy NAME-axes, which ``subtoken-train axes`` writes beside it from
``valid.txt``. Arms of one method with several budgets share the prompt's pass; what each keeps is what it would keep
alone. *By norm* every token keeps value groups of its own; the *first* ones of each head are the same for all tokens:
of turned values the low-rank cut, which a choice has to beat.
"""

import argparse
import json
import lzma
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.arm_training import commit, sha256
from benchmarks.bf16_products import has_unit, products
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.pool import load_backbone
from subtoken_train.inference.prefill import append, contexts_of, pack_whole, run_whole
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.routing import RoutingConfig, untrained_routing
from subtoken_train.settings import KVDtype
from subtoken_train.types import Batch, KeyAxes
from subtoken_train.view.view import TaskPlan

ROOT = Path(__file__).resolve().parents[1]
OUT, PAGES = ROOT / "benchmarks/results/real_text", ROOT / "docs/real_text"
CONTEXTS, TEXT_TOKENS, FOLLOWING, FACTS, SEED = 60, 640, 128, 6, 1
PLACES = [
    "harbour", "orchard", "library", "chapel", "quarry", "bakery", "museum", "tannery", "brewery", "lighthouse",
    "granary", "foundry", "observatory", "stable", "vineyard", "cannery", "arsenal", "hospital", "theatre", "monastery",
]  # fmt: skip
ENTRIES = (0.5, 0.219, 0.125)
METHODS: dict[str, dict[str, Any]] = {
    "kvzip": {}, "kvzip (a budget per head)": {"pool": "head"}, "compactor": {}, "expected_attention": {}, "snapkv": {},
    "pyramidkv": {}, "h2o": {}, "tova": {}, "keydiff": {}, "knorm": {}, "lagkv": {}, "kvcompose": {}, "elastic": {},
    "prefixkv": {}, "streaming_llm": {}, "simlayerkv (64 recent)": {"recent": 64}, "cur": {}, "random": {},
    "critical(expected_attention)": {}, "chunk(snapkv)": {},
}  # fmt: skip
"""Notation, and settings that differ from a method's own; of calibrated methods KVzap alone is asked."""
NETS = OUT / "kvzap"
"""Folder of KVzap's nets by the model's name: calibrated on the first 16 stretches of WikiText-2's ``valid.txt``."""
NAMES = {"qwen05": "Qwen2.5-Coder-0.5B", "smollm2": "SmolLM2-135M"}
HALVES, TWELVE = (f"{kept} of 16 value groups by norm, values turned" for kept in (8, 12))
FIRST = "first 8 of 16 value groups, values turned"
SHARED = 6
"""Methods that share a prompt's pass; their records are written together."""
GROUPS = (16, 12)
ROTATED = "3/4 of the key channels, keys rotated"
BOTH = f"{ROTATED}, 12 of 16 value groups by norm"
CUT = 0.125
"""Of a token's bytes, that 12 of 16 value groups or three quarters of the key channels leave out, nearly."""
SEEN = ("kvzip", "compactor", "expected_attention", "snapkv", "pyramidkv", "h2o", "tova", "kvcompose", "finch")
"""Methods that are tried with the question in the prompt, too."""
POOLED = ("compactor", "expected_attention", "snapkv", "h2o", "keydiff", "knorm", "random")
"""Methods whose ranking is tried with one budget for the heads of a layer, and for all layers and heads."""


@dataclass(frozen=True)
class Arm:
    """One setting of a compression.

    Attributes:
        words: of the table.
        compression: how contexts are compressed.
        groups: S and K of value groups; None keeps values whole.
        seen: whether the first question stands in the prompt.
        turned: whether the model is the copy that ``subtoken-train axes`` writes, NAME-axes beside the model.
        leading: whether the groups are the first of every head instead of each token's by norm.
    """

    words: str
    compression: Compression
    groups: tuple[int, int] | None = None
    seen: bool = False
    turned: bool = False
    leading: bool = False

    @property
    def routing(self) -> RoutingConfig | None:
        """How value groups are chosen."""
        own = ("leading", "per_head") if self.leading else (None, None)
        return None if self.groups is None else untrained_routing(self.groups, *own)


def arms(model: str = "qwen05") -> dict[str, list[Arm]]:
    """Return the arms that share a pass, by its name, in the table's order; ``model`` says whose nets KVzap reads."""
    found: dict[str, list[Arm]] = {"full": [Arm("full cache", Compression())]}
    found["bits"] = [Arm(f"{kind} of everything", Compression(kv_dtype=kind)) for kind in ("int8", "int4")]
    found["channels"] = [Arm("3/4 of the key channels", Compression(key_channels=0.75))]
    found["few channels"] = [Arm("1/4 of the key channels", Compression(key_channels=0.25))]
    chains = {name: (name.split(" ")[0], options) for name, options in METHODS.items()}
    if (nets := NETS / f"{model}.json").exists():
        chains["kvzap"] = ("kvzap", {"calibration": str(nets)})
    for base in POOLED:
        chains[f"pooled({base})"] = (f"pooled({base})", {})
        if base != "h2o":
            chains[f"ada({base})"] = (f"ada({base})", {"alpha": 0.0})
    for name, (notation, options) in chains.items():
        method = build_eviction(notation, **options)
        found[name] = [Arm(f"{name} {keep:.1%}", Compression(method, keep)) for keep in ENTRIES]
    kvzip = found["kvzip"][0].compression.eviction  # what shares a pass is one object
    mixed: dict[str, tuple[tuple[float, KVDtype], ...]] = {
        "kvzip": ((0.42, "int8"), (0.5, "int8"), (0.8, "int4")),
        "kvzip bits": ((0.242, "int8"), (0.47, "int4")),
        "kvzip more bits": ((0.94, "int4"), (0.29, "int8"), (0.56, "int4"), (0.19, "int8"), (0.38, "int4")),
    }
    for name, kinds in mixed.items():
        found.setdefault(name, []).extend(
            Arm(f"kvzip {keep:.0%} in {kind}", Compression(kvzip, keep, kv_dtype=kind)) for keep, kind in kinds
        )
    found["rotated"] = [Arm("int4_rotated of everything", Compression(kv_dtype="int4_rotated"))]
    # half a point fewer than in int4: the basis of a head's keys takes the bytes of four of its entries
    found["kvzip rotated"] = [
        Arm(f"kvzip {keep:.1%} in int4_rotated", Compression(kvzip, keep, kv_dtype="int4_rotated"))
        for keep in (0.795, 0.465, 0.375, 0.22)
    ]
    found["kivi"] = [Arm(f"{kind} of everything", Compression(kv_dtype=kind)) for kind in ("kivi4", "kivi2")]
    # of the bytes that stay, a quarter of the entries are whole
    found["kvzip kivi"] = [Arm("kvzip 26.5% in kivi4", Compression(kvzip, 0.265, kv_dtype="kivi4"))]
    if "kvzap" in found:
        kvzap = found["kvzap"][0].compression
        found["kvzap bits"] = [
            Arm(f"kvzap {keep:.0%} in int8", replace(kvzap, keep=keep, kv_dtype="int8")) for keep in (0.42, 0.242)
        ]
    found |= cut_arms() | turned_arms(False) | turned_arms(True)
    for name in SEEN:
        method = build_eviction(name)
        found[f"{name} seen"] = [
            Arm(f"{name} {keep:.1%}, question seen", Compression(method, keep), seen=True) for keep in ENTRIES
        ]
    return found


Shares = Sequence[tuple[float, KVDtype]]
"""Shares of the entries, and what numbers they are held in."""
HALF = (GROUPS[0], GROUPS[0] // 2)
ROUNDED: Shares = [(0.47, "int8"), (0.268, "int8"), (0.51, "int4")]
ROUNDED_HALVES: Shares = [(0.537, "int8"), (0.309, "int8"), (0.585, "int4")]


def cut_arms() -> dict[str, list[Arm]]:
    """Return the arms whose tokens are cut: key channels, and value groups of the model as it is or turned."""
    tokens: Shares = [(keep / (1 - CUT), "model") for keep in ENTRIES]
    # the basis of a head's keys takes the bytes of 12.5 of its entries
    turned: Shares = [(0.552, "model"), (0.23, "model"), (0.123, "model")]
    turned_bits: Shares = [(0.435, "int8"), (0.235, "int8"), (0.455, "int4")]
    both: Shares = [(0.63, "model"), (0.263, "model"), (0.14, "model")]
    both_bits: Shares = [(0.488, "int8"), (0.262, "int8")]
    return {
        "kvzip channels": _kvzip_arms(tokens, "3/4 of the key channels", key_channels=0.75),
        "kvzip channels bits": _kvzip_arms(
            [(0.473, "int8"), (0.273, "int8"), (0.528, "int4")], "3/4 of the key channels", key_channels=0.75
        ),
        "rotated channels": [Arm(ROTATED, Compression(key_channels=0.75, key_axes="pca"))],
        "few rotated channels": [
            Arm("1/4 of the key channels, keys rotated", Compression(key_channels=0.25, key_axes="pca"))
        ],
        "kvzip rotated channels": _kvzip_arms(turned, ROTATED, key_channels=0.75, key_axes="pca"),
        "kvzip rotated channels bits": _kvzip_arms(turned_bits, ROTATED, key_channels=0.75, key_axes="pca"),
        "both cuts": [Arm(BOTH, Compression(key_channels=0.75, key_axes="pca"), GROUPS)],
        "kvzip both cuts": _kvzip_arms(both, BOTH, GROUPS, key_channels=0.75, key_axes="pca"),
        "kvzip both cuts bits": _kvzip_arms(both_bits, BOTH, GROUPS, key_channels=0.75, key_axes="pca"),
        "groups": [Arm(_groups_words(GROUPS), Compression(), GROUPS)],
        "kvzip groups": _kvzip_arms(tokens, _groups_words(GROUPS), GROUPS),
        "kvzip groups bits": _kvzip_arms(ROUNDED, _groups_words(GROUPS), GROUPS),
        "kvzip halves bits": _kvzip_arms(ROUNDED_HALVES, _groups_words(HALF), HALF),
        "turned full": [Arm("full cache, values turned", Compression(), turned=True)],
    }


def turned_arms(leading: bool) -> dict[str, list[Arm]]:
    """Return the arms of turned values whose groups are each token's own, or the leading ones of every head."""
    halves: Shares = [(0.658, "model"), (0.286, "model"), (0.165, "model")]
    rotated: Shares = [(0.867, "int4_rotated"), (0.505, "int4_rotated"), (0.407, "int4_rotated")]
    rotated_halves: Shares = [(0.578, "int4_rotated"), (0.466, "int4_rotated"), (0.273, "int4_rotated")]
    half, most = (_groups_words(groups, True, leading) for groups in (HALF, GROUPS))
    four_bits = Compression(kv_dtype="int4_rotated")
    found = {
        "halves": [Arm(half, Compression(), HALF)],
        "kvzip halves": _kvzip_arms(halves, half, HALF),
        "kvzip halves bits": _kvzip_arms(ROUNDED_HALVES, half, HALF),
        "kvzip groups bits": _kvzip_arms(ROUNDED, most, GROUPS),
        "kvzip groups rotated": _kvzip_arms(rotated, most, GROUPS),
        "kvzip halves rotated": _kvzip_arms(rotated_halves, half, HALF),
        "halves rotated": [Arm(f"int4_rotated of everything, {half}", four_bits, HALF)],
    }
    return {
        f"turned {'leading ' * leading}{name}": [replace(arm, turned=True, leading=leading) for arm in some]
        for name, some in found.items()
    }


def _groups_words(groups: tuple[int, int], turned: bool = False, leading: bool = False) -> str:
    own = "first {1} of {0} value groups" if leading else "{1} of {0} value groups by norm"
    return own.format(*groups) + ", values turned" * turned


def _kvzip_arms(
    kinds: Shares, words: str, groups: tuple[int, int] | None = None, key_channels: float = 1, key_axes: KeyAxes = "own"
) -> list[Arm]:
    kvzip = build_eviction("kvzip")
    return [
        Arm(
            f"kvzip {keep:.1%}{'' if kind == 'model' else f' in {kind}'}, {words}",
            Compression(kvzip, keep, kv_dtype=kind, key_channels=key_channels, key_axes=key_axes),
            groups,
        )
        for keep, kind in kinds
    ]


@dataclass(frozen=True)
class Question:
    """A start that follows a context, and what is scored after it."""

    start: list[int]
    scored: list[int]


@dataclass(frozen=True)
class Context:
    """A context's tokens, and what is asked of it: the facts, and last the text that follows."""

    ids: list[int]
    questions: list[Question]


def contexts(tokenizer: Any, text: str, count: int) -> list[Context]:
    """Hide facts in ``count`` runs of WikiText's test split that do not overlap."""
    draw, made = random.Random(SEED), []
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for number in range(count):
        start = number * (TEXT_TOKENS + FOLLOWING)
        run, after = ids[start : start + TEXT_TOKENS], ids[start + TEXT_TOKENS : start + TEXT_TOKENS + FOLLOWING]
        if len(after) < FOLLOWING:
            raise SystemExit(f"the text has {len(ids)} tokens, too few for {count} contexts")
        facts = {place: f"{draw.randrange(1000, 10000)}" for place in draw.sample(PLACES, FACTS)}
        sentences = re.split(r"(?<= \. )", tokenizer.decode(run))
        for place, code in facts.items():
            sentences.insert(draw.randrange(1, len(sentences)), f"The access code of the {place} is {code} . ")
        asked = [
            _question(tokenizer, f"\nThe access code of the {place} is", f" {code}") for place, code in facts.items()
        ]
        made.append(Context(tokenizer("".join(sentences))["input_ids"], [*asked, Question(after[:1], after[1:])]))
    return made


def _question(tokenizer: Any, start: str, answer: str) -> Question:
    begun, whole = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (start, start + answer))
    assert whole[: len(begun)] == begun
    return Question(begun, whole[len(begun) :])


class Watchers:
    """Several methods' passes over one prompt: each scores what it would score alone; none may read it twice."""

    def __init__(self, passes: Sequence[EvictionPass]) -> None:
        assert not any(each.tasks for each in passes)
        self.passes, self.tasks, self.method = passes, list[TaskPlan](), passes[0].method

    def inputs(self, layer: int, input_BND: torch.Tensor) -> None:
        """Hand a layer's input to those that read it."""
        for each in self.passes:
            if each.inputs is not None:
                each.inputs(layer, input_BND)

    def observe(self, *states: Any) -> None:
        """Score one layer, see ``EvictionPass``."""
        for each in self.passes:
            each.observe(*states)


def compressed(
    backbone: CompressedBackbone, batch: Batch, settings: Sequence[Compression]
) -> Iterator[tuple[PackedCache, float]]:
    """Compress contexts in several ways after one pass; the cache, and the seconds of the pass and of its packing.

    Args:
        backbone: in evaluation mode.
        batch: contexts.
        settings: which differ in the method, in the budget and in the format; of one method if it reads a prompt twice.
    """
    family, clock = backbone.family, time.perf_counter()
    passes: dict[int, EvictionPass] = {}
    for own in settings:
        if own.eviction is not None and id(own.eviction) not in passes:
            passes[id(own.eviction)] = EvictionPass(own, family, batch, backbone.reducer, backbone.group_budget)
    layers, length = family.shape.num_layers, batch.input_ids_BN.shape[1]
    watches = next((own for own in settings if FORMATS[own.kv_dtype].rotates), settings[0])
    packer = LayerPacker(backbone, watches, PackedCache(layers), length)
    whole = Watchers(list(passes.values())) if len(passes) > 1 else next(iter(passes.values()), None)
    result = run_whole(backbone, batch, cast("EvictionPass", whole), packer)
    took = time.perf_counter() - clock
    for own in settings:
        clock = time.perf_counter()
        its = LayerPacker(backbone, own, PackedCache(layers), length)
        its.dense.layers, its.key_cut = [copy(layer) for layer in packer.dense.layers], packer.key_cut
        its.moments = None if its.moments is None else packer.moments
        eviction = passes.get(id(own.eviction))
        if eviction is not None:
            eviction.compression = own
        pack_whole(result, eviction, its)
        its.make_ready(result.rows.next_position)
        yield its.cache, took + time.perf_counter() - clock


def scored(backbone: CompressedBackbone, cache: PackedCache, questions: Sequence[Question]) -> list[tuple[float, bool]]:
    """Return the nats of what each question scores, and whether it is what greedy decoding says."""
    found = []
    for _, group in groupby(questions, key=lambda each: len(each.scored) > FOLLOWING // 2):
        some = list(group)
        branch = cache.branch()
        assert branch.origin_B is not None
        device = branch.origin_B.device
        branch.batch_select_indices(torch.zeros(len(some), dtype=torch.long, device=device))
        ids = [each.start + each.scored for each in some]
        width = max(map(len, ids))
        rows = torch.tensor([[own[0]] * (width - len(own)) + own for own in ids], device=device)
        missing = torch.tensor([width - len(own) for own in ids], device=device)
        hidden_BND = append(backbone, rows, branch, missing if bool(missing.any()) else None)
        asks = [hidden_ND[width - 1 - len(each.scored) : -1] for hidden_ND, each in zip(hidden_BND, some, strict=True)]
        logprobs = backbone.family.logits(torch.cat(asks)[None])[0].float().log_softmax(-1).cpu()
        for own, each in zip(logprobs.split([len(each.scored) for each in some]), some, strict=True):
            wanted = torch.tensor(each.scored)
            nats = -own.gather(-1, wanted[:, None]).sum()
            found.append((float(nats), bool((own.argmax(-1) == wanted).all())))
    return found


def prompt(family: Family, context: Context, seen: bool) -> tuple[Batch, list[Question]]:
    """Return what runs before a cache is compressed, and what is asked of the cache.

    ``seen``: whether the first question stands in the prompt but for its last token, which asks.
    """
    first, own = context.questions[0], context.ids
    if seen:
        ids = (*own, *first.start[:-1])
        return text_batch(family, [EncodedText(ids, len(own))]), [Question(first.start[-1:], first.scored)]
    return contexts_of(text_batch(family, [EncodedText((*own, own[-1]), len(own))])), context.questions


def measure(backbone: CompressedBackbone, some: Sequence[Arm], asked: Sequence[Context]) -> dict[str, dict[str, Any]]:
    """Return a record for each of the arms that share a pass."""
    records: dict[str, dict[str, list[Any]]] = {
        arm.words: {key: [] for key in ("facts", "exact", "text", "share", "seconds")} for arm in some
    }
    family = backbone.family
    for number, context in enumerate(asked):
        print(f"{some[0].words}: context {number + 1} of {len(asked)}", end="\r", file=sys.stderr, flush=True)
        batch, questions = prompt(family, context, some[0].seen)
        batch = on_device(batch, family.decoder.device)
        dense = len(context.ids) * family.shape.token_bytes
        two_bytes = dense * 2 / family.shape.element_bytes
        made = compressed(backbone, batch, [arm.compression for arm in some])
        for arm, record, (cache, seconds) in zip(some, records.values(), made, strict=True):
            found = scored(backbone, cache, questions)
            facts, text = (found, None) if arm.seen else (found[:-1], found[-1][0])
            layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
            record["facts"].append([round(nats, 3) for nats, _ in facts])
            record["exact"].append([int(right) for _, right in facts])
            if text is not None:
                record["text"].append(round(text, 3))
            held, whole = sum(each.payload_bytes + each.index_bytes for each in layers), two_bytes
            if arm.compression.kv_dtype == "model":
                whole = dense
            record["share"].append(round(held / whole, 5))
            record["seconds"].append(round(seconds, 2))
    return records


def run(
    model: Path, dtype: str, source: Path, names: Iterable[str], count: int, device: str, first: int | None = None
) -> None:
    """Measure what has no record yet; one line for each arm in the model's file, of the ``first`` contexts or all."""
    backbone, loaded = load_backbone(model, loading={"dtype": dtype}, device=device), (model, None)
    asked = contexts(backbone.family.tokenizer, (source / "test.txt").read_text(encoding="utf-8"), count)
    about = {"dtype": dtype, "contexts_sha256": sha256(json.dumps([each.ids for each in asked]).encode())}
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{model.name}.jsonl.xz"
    # an arm counts as asked on whichever machine; the full cache does not, since arms are told from that of their own
    where, found = machine(device).get("gpu"), read(file)
    done = {own["arm"]: own for own in found if own["arm"] != "full cache" or own.get("gpu") == where}
    if wrong := [arm for arm, record in done.items() if any(record[key] != about[key] for key in about)]:
        raise SystemExit(f"{file} holds records of other contexts ({wrong[0]}); move it away")
    if "full cache" in done and done["full cache"]["weights_sha256"] != weights_digest(model):
        raise SystemExit(f"{file} holds records of other weights; move it away")
    known = arms(model.name)
    for left in shared([[arm for arm in known.get(name, []) if arm.words not in done] for name in names]):
        folder = model.with_name(f"{model.name}-axes") if left[0].turned else model
        weights = {"weights_sha256": weights_digest(folder)}
        if (folder, left[0].routing) != loaded:
            loaded = folder, left[0].routing
            backbone = load_backbone(folder, loading={"dtype": dtype}, routing=left[0].routing, device=device)
        with reading_packed(backbone.family.decoder.config), torch.no_grad(), products():
            measured = measure(backbone, left, asked[:first])
        for words, record in measured.items():
            line = {"arm": words, **weights, **about, "commit": commit(), **machine(device), **record}
            add(file, line)
            print(
                f"{words}: {np.mean(record['facts']):.2f} nats a fact, {np.mean(record['exact']):.1%} exact", flush=True
            )


def machine(device: str) -> dict[str, Any]:
    """Return what a record says of where it was made."""
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "device": device}
    if device == "cpu":
        return {**found, "bf16_unit": has_unit()}
    return {**found, "gpu": torch.cuda.get_device_name(device)}


def shared(methods: Iterable[list[Arm]]) -> Iterator[list[Arm]]:
    """Join arms of up to SHARED methods that read a prompt once and hold whole entries as they are."""
    waiting: dict[bool, list[list[Arm]]] = {False: [], True: []}
    for some in filter(None, methods):
        own, compression = some[0], some[0].compression
        whole = own.groups is None and compression.key_channels == 1 and compression.kv_dtype == "model"
        if compression.eviction is None or "second_pass" in compression.eviction.needs or not whole:
            yield some
            continue
        (together := waiting[own.seen]).append(some)
        if len(together) == SHARED:
            yield list(chain.from_iterable(together))
            together.clear()
    yield from (list(chain.from_iterable(together)) for together in waiting.values() if together)


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a folder's weights, in hexadecimal."""
    return sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors"))))


def read(file: Path) -> list[dict[str, Any]]:
    """Return a file's records, compressed lines of JSON; none where it is not there."""
    return [json.loads(line) for line in lzma.open(file, "rt")] if file.exists() else []


def add(file: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file; a kill loses at most this one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(lzma.compress(json.dumps(record, separators=(",", ":")).encode() + b"\n"))


def by_arm(file: Path) -> dict[str, dict[str, Any]]:
    """Return records by arm, a GPU's rather than a CPU's; ``full`` is the full cache's of the same machine."""
    found, full = sorted(read(file), key=lambda own: "gpu" in own), full_caches(file)
    return {own["arm"]: own | {"full": full[own.get("gpu")]} for own in found}


def full_caches(file: Path) -> dict[str | None, dict[str, Any]]:
    """Return the records of the full cache, each its own ``full``, by the GPU they were asked on; None: a CPU."""
    return {own.get("gpu"): own | {"full": own} for own in read(file) if own["arm"] == "full cache"}


Records = Mapping[str, Mapping[str, Any]]


def facts_above(own: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Return the nats a fact above the full cache of the same machine, of every context."""
    scored = np.array(own["facts"])
    whole = np.array(own["full"]["facts"])[: len(scored), : scored.shape[1]]
    apart: npt.NDArray[np.float64] = scored.mean(1) - whole.mean(1)
    return apart


def text_above(own: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Return the nats a token of what follows above the full cache of the same machine, of every context."""
    text = np.array(own["text"])
    apart: npt.NDArray[np.float64] = (text - np.array(own["full"]["text"])[: len(text)]) / (FOLLOWING - 1)
    return apart


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a language model's folder")
    parser.add_argument("--dtype", default="float32", help="what the weights are read to and the cache is held in")
    parser.add_argument("--device", default="cpu", help="where it runs")
    parser.add_argument("--source", type=Path, required=True, help="folder with WikiText's test.txt")
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--contexts", type=int, default=CONTEXTS)
    parser.add_argument("--first", type=int, help="of these contexts, ask the first N alone; tables say n")
    args = parser.parse_args()
    run(args.model, args.dtype, args.source, args.arms, args.contexts, args.device, args.first)


if __name__ == "__main__":
    main()

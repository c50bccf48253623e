"""Evicting, and choosing pages, while decoding: a recompute under the same masks; bounded; refused in words."""

import hashlib
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.entries import read_keys, read_values
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.base import Eviction
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.routing import RoutingConfig
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Online
from tests.support.helpers import compress
from tests.support.online_truth import decoded_online, largest_difference
from tests.support.prompt_views import NEEDED, settings_for
from tests.support.reference import recompute
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL as CELL
from tests.support.truth_cells import allowed, backbone_of, batch_of, decoded
from tests.support.truth_models import family_of

SETTINGS = {name: {"window": 4, "kernel": 3} for name in ("snapkv", "cake")}
PAGES = {"page_size": 4, "least_pages": 1, "dense_layers": 1}
SETTINGS |= {name: {"window": 4} for name in ("headkv", "sparsemm")}
ONLINE = [name for name in EVICTIONS if EVICTIONS.find(name)().online is not None]
PROTOCOLS = ["query_aware", "context_first"]
BASE = {"layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32", "every": "4", "keep": "10"}
FACTORS = {
    "family": ["llava", "llava_gqa", "qwen2_5_vl", "llama", "qwen2"],
    "reducer": ["none", "fastv_decoder", "quest"],
    "selector": ["none", "linear", "mean"],
    "eviction": ONLINE,
    "scope": ["context", "all"],
    "batch": ["one", "three_left", "three_right"],
    "protocol": PROTOCOLS,
    "keep": ["10", "40"],
    "every": ["4", "7"],
    "keys": ["1", "0.5"],
    "merge": ["none", "pivot"],
}


def cells() -> list[dict[str, str]]:
    found = [BASE | dict(zip(FACTORS, levels, strict=True)) for levels in product(*FACTORS.values())]
    for cell in found:
        if cell["selector"] == "none":
            cell["groups"] = "16/4"
    own = ("keep", "every", "keys", "merge")
    return [cell for cell in found if allowed({k: v for k, v in cell.items() if k not in own})]


def name_of(cell: dict[str, str]) -> str:
    return "-".join(cell[name] for name in FACTORS)


DRAWN = sorted(cells(), key=lambda cell: hashlib.sha256(name_of(cell).encode()).digest())


def compression_of(cell: dict[str, str], **changed) -> Compression:
    name = cell["eviction"]
    method = build_eviction(name, **SETTINGS.get(name, {}), **settings_for(name, family_of(cell["family"])))
    settings = {"keep": int(cell["keep"]), "unit": "tokens", "scope": cell["scope"], "every": int(cell["every"])}
    settings |= {"key_channels": float(cell["keys"]), "key_window": 3, "merge": cell["merge"]}
    return Compression(method, **(settings | changed))


def check(cell: dict[str, str], steps: int = 18, **changed) -> None:
    """Logits are the truth's, and the budget is held by every row, of all layers together at least."""
    backbone, keep = backbone_of(cell), int(cell["keep"])
    run = decoded_online(backbone, batch_of(cell), steps, compression_of(cell, **changed), cell["protocol"])
    largest, same = largest_difference(backbone, run)
    assert (largest < 1e-4, same) == (True, True)
    if run.cache.evictor.evictions:
        for layer in run.cache.layers:
            assert layer.tail_length <= int(cell["every"]) + layer.eviction_state.given
        by_head = [x.view(len(run.truths), -1) for x in run.held[-1]]
        held = torch.stack([x.amax(-1) for x in by_head])
        if cell["eviction"] in NEEDED:  # heads share a budget, too
            assert bool((sum(x.sum(-1) for x in by_head) <= keep * sum(x.shape[1] for x in by_head)).all())
            return
        assert bool((held.sum(0) <= keep * len(held)).all())
        assert cell["eviction"] in ("kvcompose", "cake") or int(held.max()) <= keep  # whose layers share a budget


@sampled("cell", DRAWN[:900], every=40, ids=name_of)
def test_decoding_is_the_truth(cell):
    check(cell)


@sampled(("eviction", "protocol"), [(name, PROTOCOLS[i % 2]) for i, name in enumerate(ONLINE)], every=5)
def test_keys_that_are_cut_along_principal_axes(eviction, protocol):
    check(cell_of(eviction=eviction, protocol=protocol, keys="0.5"), key_axes="pca")


def cell_of(**levels: str) -> dict[str, str]:
    first = {name: values[0] for name, values in FACTORS.items()}
    return BASE | first | {"family": "llava_gqa", "batch": "three_left", "selector": "linear"} | levels


# the cell's values come in pieces of 4 channels, which must fill whole codes
@sampled("precision", [n for n, f in FORMATS.items() if f.rounds and f.run == 1 and 4 % f.per_code == 0], every=2)
@sampled("eviction", ONLINE, every=5)
def test_rounded_entries_are_selected_and_never_rounded_again(eviction, precision):
    """Every stored vector reads as it did when it was first stored; a tail is rounded once."""
    cell, again = cell_of(eviction=eviction), 0
    backbone = backbone_of(cell)
    read: dict[tuple[int, int, int], torch.Tensor] = {}
    cache = PackedCache(backbone.family.shape.num_layers)
    prefill(backbone, batch_of(cell), cache, compression_of(cell, kv_dtype=precision))
    for _ in range(14):
        for number, layer in enumerate(cache.layers):
            place = layer.eviction_state.place_RM
            keys, values = read_keys(layer.blocks, len(place)), read_values(layer.blocks, len(place))
            for row, entry in (place >= 0).nonzero().tolist():
                name = number, row, int(place[row, entry])
                pair = torch.cat([keys[row, :, entry], values[row, :, entry]])
                again += name in read
                assert torch.equal(read.setdefault(name, pair), pair)
        decode(backbone, torch.full((3, 1), 11), cache)
    assert cache.evictor.evictions == 3
    assert again > 100


@sampled("eviction", ONLINE, every=3)
@sampled("kv_dtype", ["model", "int8"], every=4)
def test_a_budget_that_holds_all_is_plain_generation(eviction, kv_dtype):
    """The same logits, bit for bit: nothing is packed anew, nothing is rounded, while nothing is evicted."""
    cell = cell_of(eviction=eviction)
    backbone, batch = backbone_of(cell), batch_of(cell)
    plain = decoded_online(backbone, batch, 24, Compression(kv_dtype=kv_dtype))
    run = decoded_online(backbone, batch, 24, compression_of(cell, keep=500, kv_dtype=kv_dtype))
    assert run.cache.evictor.evictions == 0
    assert torch.equal(torch.cat(run.tokens, 1), torch.cat(plain.tokens, 1))
    largest = max(float((a - b).abs().max()) for a, b in zip(run.logits, plain.logits, strict=True))
    assert largest < 1e-5  # heads that keep all of their entries are stored one by one


@sampled("eviction", ONLINE, every=3)
@sampled("protocol", ["query_aware", "context_first"], every=4)
def test_turns_of_several_tokens(eviction, protocol):
    """What a further turn appends is seen causally and competes afterwards; an eviction that is due comes before it."""
    cell = cell_of(eviction=eviction, protocol=protocol)
    generator = torch.Generator().manual_seed(5)
    turns = ((3, 9), (7, 2), (11, 17))
    chunks = [(call, torch.randint(10, 60, (3, size), generator=generator)) for call, size in turns]
    backbone = backbone_of(cell)
    run = decoded_online(backbone, batch_of(cell), 20, compression_of(cell), protocol, chunks)
    largest, same = largest_difference(backbone, run)
    assert largest < 1e-4
    assert same
    assert run.cache.evictor.evictions == 4


@sampled("eviction", ONLINE, every=5)
def test_samples_are_chosen_and_repeated_with_their_records(eviction):
    cell, order = cell_of(eviction=eviction), torch.tensor([2, 0, 0])
    backbone, compression = backbone_of(cell), compression_of(cell)

    def run(chooses):
        cache, tokens = PackedCache(backbone.family.shape.num_layers), torch.arange(10, 40).view(3, 10)
        prefill(backbone, batch_of(cell), cache, compression)
        for step in range(10):
            if step == 6 and chooses:  # in the middle: two evictions later, with two queries noted
                cache.batch_select_indices(order)
                tokens = tokens[order]
            logits = decode(backbone, tokens[:, step, None], cache)
        return logits

    assert torch.allclose(run(True), run(False)[order], atol=1e-5)


def test_generate_and_the_report():
    """``generate`` holds its memory; the report counts what is there, and the dense cache that it stands for."""
    cell = cell_of(eviction="h2o", selector="none", groups="16/4", batch="one")
    model, batch = SubTokenModel.around(backbone_of(cell), compression_of(cell)), batch_of(cell)
    inputs, shape = {"input_ids": batch.input_ids_BN, "pixel_values": batch.pixel_values}, model.backbone.family.shape
    sizes = []
    for new in (8, 16, 64):
        out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        assert out.shape[1] == batch.input_ids_BN.shape[1] + new
        report = model.cache_report()
        assert report.evictions == (new - 2) // 4
        assert report.dense_bytes == (out.shape[1] - 1) * shape.token_bytes
        held = sum(layer.eviction_state.nbytes for layer in model.last.cache.layers)
        assert report.statistics_bytes == held > 0
        assert f"{report.evictions} evictions while decoding, statistics {held:,} bytes" in str(report)
        sizes.append(report.total_bytes - report.slack_bytes)
    assert sizes[2] <= sizes[1] + 3 * shape.token_bytes  # the tail's length differs
    refuses("eviction_every deletes tokens", model.last.cache.crop, -1)
    refuses("num_beams=2 does not go with eviction_every=4", model.generate, **inputs, max_new_tokens=4, num_beams=2)
    several = model.generate(**inputs, max_new_tokens=20, min_new_tokens=20, do_sample=True, num_return_sequences=3)
    assert several.shape[0] == 3


def test_what_is_longer_than_every_is_refused():
    cell = cell_of(eviction="h2o")
    backbone, batch, compression = backbone_of(cell), batch_of(cell), compression_of(cell)
    with pytest.raises(ValueError, match=r"eviction_every=7 is more than the budget of 'sample-0', whose prompt keeps"):
        decoded_online(backbone, batch, 1, compression_of(cell, keep=0.2, unit="fraction", every=7))
    short, plain = (
        score_batch(backbone, batch, [[[11, 12, 13]]] * 3, compression=each)
        for each in (compression, compression_of(cell, every=None))
    )
    assert short[0].logprobs == plain[0].logprobs
    with pytest.raises(ValueError, match=r"a continuation of 5 tokens is scored, and eviction_every=4"):
        score_batch(backbone, batch, [[list(range(11, 16))]] * 3, compression=compression)
    assert compression.label == "h2o 10 tokens merge none every 4"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "eviction_every=0 must be a whole number of at least 1"),
        ({"every": True}, "eviction_every=True must be a whole number"),
        ({"every": 11}, "eviction_every=11 exceeds eviction_keep=10 tokens; use 10 or less"),
        ({"eviction": None, "keep": 1.0, "unit": "fraction"}, "eviction_every=4 needs an .* or an adapter with gates"),
        ({"eviction": build_eviction("knorm")}, "'knorm' with these settings cannot evict .*streaming_llm, h2o"),
        ({"eviction": build_eviction("kvcompose", structured=False)}, "'kvcompose' with these settings cannot evict"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    given = {"eviction": build_eviction("h2o"), "keep": 10, "unit": "tokens", "every": 4}
    refuses(words, lambda: Compression(**(given | settings)).check(text_family()))


def method_that(reads, asks, rows=1):
    """Somebody else's, which reads of its view what ``reads`` says; what it saw while tokens were decoded."""

    @dataclass(frozen=True)
    class Theirs(Eviction):
        name: ClassVar[str] = "theirs"
        needs: ClassVar[frozenset[str]] = frozenset(asks)
        online: ClassVar[Online] = Online(rows)

        def score(self, view):
            found = reads(view)
            if "seen_B" in vars(view):
                seen.append(found)
            return Scores(view.key_BhNd.float().norm(dim=-1), torch.zeros_like(view.entries_BN))

    seen = []
    return Theirs(), seen


def decoded_by(method, kv_dtype="model"):
    cell = cell_of(eviction="h2o", selector="linear", batch="one")
    backbone = backbone_of(cell)
    compression = replace(compression_of(cell, kv_dtype=kv_dtype), eviction=method, merge="none", key_channels=1.0)
    cache = PackedCache(backbone.family.shape.num_layers)
    prefill(backbone, batch_of(cell), cache, compression)
    for step in range(12):
        decode(backbone, torch.tensor([[step + 5]]), cache)
    return cache


def test_a_method_reads_the_values_that_it_asked_for_and_keys_as_the_model_made_them():
    """Of the first layer, whose new keys no cache changes, from a cache that holds them in another basis."""
    found = []
    for kv_dtype in ("model", "int4_rotated"):
        method, seen = method_that(lambda view: (view.key_BhNd, view.value_BhNd), {"values"})
        assert decoded_by(method, kv_dtype).evictor.evictions
        assert all(values.shape[2] > 0 and bool(values.any()) for _, values in seen)
        found.append(seen[0][0])
    plain, turned = found
    assert torch.allclose(turned[:, :, -4:], plain[:, :, -4:], atol=1e-5)
    assert float((turned - plain).norm()) < 0.15 * float(plain.norm())


DECODED = "of its view while tokens"
ABSENT = {
    "values": (lambda view: view.value_BhNd, set(), 1, "value_BhNd of its view and did not ask for it: add 'values'"),
    "value_norms": (lambda view: view.value_norms(), {"values"}, 1, "add 'value_norms' to the method's needs"),
    "queries": (lambda view: view.query_BHNd, set(), 0, f"reads query_BHNd {DECODED} are decoded and says that it"),
    "rows": (lambda view: view.rows(torch.zeros(1, 1, dtype=torch.long)), {"rows"}, 0, f"reads query_BHNd {DECODED}"),
    "position": (lambda view: view.position, set(), 1, f"reads position {DECODED}"),
    "rotate": (lambda view: view.unrotated_keys(), set(), 1, f"reads position {DECODED}"),
    "output_weight": (lambda view: view.output_weight(), set(), 1, f"reads output_weight {DECODED}"),
}


@pytest.mark.parametrize(("reads", "asks", "rows", "words"), ABSENT.values(), ids=ABSENT)
def test_what_is_not_there_is_refused_in_words_and_never_empty(reads, asks, rows, words):
    assert len(refuses(words, decoded_by, method_that(reads, asks, rows)[0])) < 400


def reading(keep, **settings):
    return Compression(build_eviction("quest_steps", **PAGES | settings), keep)


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize("pad_left", [False, True])
@sampled("keep", [0.1, 0.3], every=2)
def test_every_step_reads_the_pages_that_it_chooses(keep, pad_left, protocol):
    """Long contexts of unlike lengths, grouped heads; other steps choose other pages."""
    backbone = backbone_of(CELL)
    got = decoded(backbone, text_batch([(120, 6, 0), (61, 9, 0), (40, 1, 0)], pad_left), 8, reading(keep), protocol)
    for sample, (truth, tokens) in enumerate(zip(got.truths, got.tokens_BT, strict=True)):
        assert (got.logits_BTV[sample] - recompute(backbone, truth, tokens[:-1])).abs().max() < 1e-4
        for layer in truth.layers:
            layer.pages = None
        assert (got.logits_BTV[sample] - recompute(backbone, truth, tokens[:-1])).abs().max() > 1e-3


def test_the_report_tells_what_is_stored_and_what_is_read():
    family = text_family(max_position_embeddings=512)
    model = SubTokenModel.around(compress(family), reading(0.25, dense_layers=1))
    ids = torch.randint(10, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    report, pages, entry = model.cache_report(), 300 // 4, family.shape.token_bytes // family.shape.num_layers
    # 236 entries are context, 64 and the last row's are not; 59 pages of 4: budget 59, of which the last page's 0
    assert report.payload_bytes == 3 * 300 * entry
    assert report.unread_bytes == 2 * entry * 4 * (pages - 14 - 16)
    assert report.index_bytes == 2 * (pages * entry + pages)
    held = report.total_bytes - report.slack_bytes
    assert f" (a decoding step reads {held - report.unread_bytes:,} bytes); " in str(report)


@pytest.mark.parametrize(
    ("compression", "routing", "words"),
    [
        (reading(0.5), RoutingConfig("linear", num_groups=8, kept_groups=3), "reads pages of whole values.*selector"),
        (Compression(build_eviction("quest_steps"), 9000, "bytes"), None, "frees no bytes.*a share such as 0.25"),
        (Compression(build_eviction("quest_steps"), 0.5, key_channels=0.5), None, "it reads pages of whole keys"),
        (Compression(build_eviction("quest_steps"), 0.5, merge="pivot"), None, "drops nothing that could be merged"),
    ],
)
def test_what_it_does_not_go_with(compression, routing, words):
    backbone = compress(text_family(), routing).eval()
    refuses(words, generate_batch, backbone, text_batch([(31, 5, 0)]), max_new_tokens=1, compression=compression)

"""Batches of prompts: scores and answers are those of a full forward, and every byte is counted once."""

from dataclasses import replace

import pytest
import torch

from subtoken_train.inference import batched
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.cache_report import account
from subtoken_train.inference.prefill import decode
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.types import Region, in_compressed_region
from tests.support.helpers import compress, only_sample, opened
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.reference import recompute
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.truth_cells import CELL, PLAIN_CELL, backbone_of, compression_of, decoded
from tests.support.truth_models import family_of, prompts

CELLS = [
    {},
    {"reducer": "fastv_decoder", "budget": "global", "eviction": "shared_set"},
    {"reducer": "visionzip", "selector": "gated", "eviction": "own_sets", "layout": "per_head"},
    {"family": "llava", "selector": "none", "eviction": "snapkv"},
    {"family": "qwen2_5_vl", "selector": "query", "eviction": "own_sets"},
    {"family": "qwen2_5_vl", "reducer": "none", "groups": "2/1", "budget": "global"},
    {"family": "llama", "reducer": "quest", "selector": "value_norm", "eviction": "shared_set"},
    {"family": "llama", "reducer": "quest", "selector": "query", "budget": "global", "eviction": "own_sets"},
]
ROUNDED = [{"precision": "int8"}, {"precision": "int4", "eviction": "own_sets"}, {"precision": "kivi4"}]
LENGTHS = [[1, 4], [1], [7, 1, 2]]


def name_of(levels):
    return "-".join(levels.values()).replace("/", "k") or "base"


def texts(lengths=LENGTHS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(10, 60, (n,), generator=generator).tolist() for n in row] for row in lengths]


@sampled("levels", CELLS, every=4, ids=name_of)
def test_scores_from_a_compressed_cache_are_a_masked_recompute(levels):
    cell = CELL | levels
    backbone, compression = backbone_of(cell), compression_of(cell)
    batch, wanted = prompts(backbone.family, "three", pad_left=True), texts()
    truths = decoded(backbone, batch, 1, compression).truths
    outcomes = score_batch(backbone, batch, wanted, compression=compression)
    for outcome, truth, of_prompt in zip(outcomes, truths, wanted, strict=True):
        pairs = [(recompute(backbone, truth, torch.tensor(ids, dtype=torch.long))[:-1], ids) for ids in of_prompt]
        logprobs = [float(own.float().log_softmax(-1)[range(len(ids)), ids].sum()) for own, ids in pairs]
        assert outcome.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert outcome.greedy == [own.argmax(-1).tolist() == list(ids) for own, ids in pairs]


@sampled("protocol", ["query_aware", "context_first"], every=4)
@sampled("levels", [*CELLS[:4], CELLS[6]], every=3, ids=name_of)
def test_neither_the_batch_nor_the_padding_changes_what_is_said(levels, protocol):
    cell = CELL | levels
    if protocol == "context_first" and cell["reducer"] == "quest":
        cell["reducer"] = "none"
    if cell["eviction"].endswith(("set", "sets")):  # random by place in the batch
        cell["eviction"] = "none"
    backbone, wanted, runs = backbone_of(cell), texts([[2, 1]] * 3), []
    how = {"compression": compression_of(cell), "protocol": protocol}
    for pad_left in (True, False):
        batch = prompts(backbone.family, "three", pad_left)
        alone = [only_sample(batch, i) for i in range(3)]
        together = generate_batch(backbone, batch, max_new_tokens=6, **how)
        runs.append((score_batch(backbone, batch, wanted, **how), together))
        scores = [score_batch(backbone, one, [own], **how)[0] for one, own in zip(alone, wanted, strict=True)]
        runs.append((scores, [generate_batch(backbone, one, max_new_tokens=6, **how)[0] for one in alone]))
    first_scores, first_answers = runs[0]
    for scores, answers in runs[1:]:
        assert [x.token_ids for x in answers] == [x.token_ids for x in first_answers]
        for one, other in zip(scores, first_scores, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert one.entries_after == other.entries_after


def test_long_continuations_in_pieces_score_the_same(monkeypatch):
    backbone, wanted = backbone_of(CELL), texts([[30, 3], [17], [23, 1]])
    batch = prompts(backbone.family, "three", pad_left=False)
    whole = score_batch(backbone, batch, wanted)
    sizes, logits = [], backbone.family.logits
    monkeypatch.setattr(batched, "APPENDED", 7)
    monkeypatch.setattr(batched, "LOGITS", 5 * 90 + 1)
    monkeypatch.setattr(backbone.family, "logits", lambda x: (sizes.append(x.shape[:-1].numel()), logits(x))[1])
    pieces = score_batch(backbone, batch, wanted)
    assert max(sizes) == 5
    for one, other in zip(whole, pieces, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.greedy == other.greedy


def test_single_tokens_cost_one_pass(monkeypatch):
    backbone, passes = backbone_of(CELL), []
    batch, family = prompts(backbone.family, "three", pad_left=True), backbone.family

    def noting(name, own):
        return lambda *given, **more: (passes.append(name), own(*given, **more))[1]

    def passes_of(call, *given, **more):
        passes.clear()
        return call(backbone, batch, *given, **more), list(passes)

    for name in ("run_layers", "decode"):
        monkeypatch.setattr(family, name, noting(name, getattr(family, name)))
    (first, *_), prompt_passes = passes_of(generate_batch, max_new_tokens=1)
    assert first.prefill_seconds > 0 < first.decode_seconds
    assert passes_of(score_batch, texts([[1] * 4] * 3))[1] == prompt_passes
    assert passes_of(score_batch, texts([[1, 3, 2, 1]] * 3))[1].count("decode") == 2


@pytest.mark.parametrize("kind", ["three_left", "text_right"])
@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@sampled("levels", CELLS + ROUNDED, every=3, ids=name_of)
@torch.no_grad()
def test_bytes_of_all_samples_are_the_cache(levels, protocol, kind):
    cell = CELL | levels
    if protocol == "context_first":
        cell |= {"reducer": "none"} if cell["reducer"] == "quest" else {}
        cell |= {"selector": "linear"} if cell["selector"] == "query" else {}
    backbone, compression = backbone_of(cell), compression_of(cell)
    shape, (kind, _, side) = backbone.family.shape, kind.partition("_")
    batch = prompts(backbone.family, kind, side == "left")
    first, cache = opened(backbone, batch, compression, protocol)
    parts = account(backbone, batch, first, cache)
    appended = int((batch.regions_BN != Region.PADDING).sum() - (first.regions_BM != Region.PADDING).sum())
    assert (appended > 0) == (protocol == "context_first")
    packed = sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers)
    assert sum(part.kv_bytes for part in parts) == packed + appended * shape.token_bytes
    ledger = measured_ledger(first.plan, first.regions_BM, shape)
    region = "visual" if backbone.family.image_token_id is not None else "context"
    rows = [entry for entry in ledger.entries if entry.region == region]
    assert sum(part.entries_before for part in parts) == sum(entry.tokens_before for entry in rows)
    assert sum(part.entries_after for part in parts) == sum(entry.tokens for entry in rows)
    assert sum(part.region_dense_bytes for part in parts) == ledger.dense_bytes(region)
    values = sum(entry.value_bytes for entry in rows) / shape.side_bytes
    assert sum(part.values_after for part in parts) == pytest.approx(values, abs=1e-3)
    assert sum(part.dense_kv_bytes for part in parts) == int((batch.regions_BN > 0).sum()) * shape.token_bytes
    if cell["precision"] == "fp32":
        index = sum(part.region_bytes for part in parts) - ledger.bytes_of(region, with_index=False)
        assert 0 <= index <= sum(layer.index_bytes for layer in cache.layers)
        assert (index > 0) == (cell["selector"] != "none")


@pytest.mark.parametrize("eviction", ["none", "own_sets"])
def test_bytes_of_a_region_are_counted_entry_by_entry(eviction):
    """KIVI leaves the latest entries of a head whole, whichever region they are of."""
    cell = CELL | {"selector": "none", "precision": "kivi4", "eviction": eviction}
    backbone, heads, rounded = backbone_of(cell), family_of(cell["family"]).shape.num_kv_heads, 0
    batch = prompts(backbone.family, "three", pad_left=True)
    first, cache = opened(backbone, batch, compression_of(cell))
    for sample, part in enumerate(account(backbone, batch, first, cache)):
        wanted = 0
        for plan in first.plan.layers:
            keeps_Nh = (plan.entries_BN[sample] >= 0)[:, None].expand(-1, heads)
            keeps_Nh = keeps_Nh if plan.heads_BNh is None else keeps_Nh & plan.heads_BNh[sample]
            for keeps_N in keeps_Nh.unbind(1):
                regions = first.regions_BM[sample, plan.entries_BN[sample, keeps_N]]
                in_region, full = in_compressed_region(regions), max(0, len(regions) - 3) // 4 * 4
                # of 16 channels: half bytes, and scale and zero point of four keys' channel and of a value
                wanted += int(in_region[:full].sum()) * (8 + 16 * 4 // 4 + 8 + 4) + int(in_region[full:].sum()) * 128
                rounded += full
        assert part.region_bytes == wanted
    assert rounded


def test_stop_texts_end_and_cut_an_answer():
    backbone = backbone_of(CELL | {"reducer": "none", "selector": "none"})
    batch, tokenizer = prompts(backbone.family, "three", pad_left=True), backbone.family.tokenizer
    full = generate_batch(backbone, batch, max_new_tokens=12)
    stop = tokenizer.decode(full[0].token_ids[3:5])
    ended = generate_batch(backbone, batch, max_new_tokens=12, stop=["never said", "", stop])
    assert ended[0].text == full[0].text[: full[0].text.index(stop)]
    assert ended[0].new_tokens == len(ended[0].token_ids) <= 5
    for one, other in zip(ended[1:], full[1:], strict=True):
        assert one.text == other.text[: other.text.index(stop)] if stop in other.text else other.text


def test_end_of_text_and_special_stops_are_cut(monkeypatch):
    backbone = compress(text_family(initializer_range=0.2))
    batch, end = prompts(backbone.family, "three", pad_left=True), backbone.family.tokenizer.eos_token_id
    full = generate_batch(backbone, batch, max_new_tokens=6)[0].token_ids
    first, rows = full.index(full[3]), backbone.model.lm_head.weight.data
    monkeypatch.setattr(batched, "_special_ids", lambda _: {"<stop>": full[3]})
    for stop in (["<stop>"], []):
        ended = generate_batch(backbone, batch, max_new_tokens=6, stop=stop)[0]
        assert (ended.token_ids, ended.new_tokens) == (full[:first], first + 1)
        rows[[end, full[3]]] = rows[[full[3], end]]  # what was said third ends the text


REFS = {"max_new_tokens": 2, "references": [[11, 45], [], [19, 23]]}
REFUSED = {
    "lists": (score_batch, [[[1]]] * 2, {}, "2 lists of continuations for 3 prompts"),
    "no tokens": (score_batch, [[[1]], [[1], []], [[1]]], {}, "continuation 1 of 'sample-1' has no tokens"),
    "length": (generate_batch, None, {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    "references": (generate_batch, None, REFS | {"references": [[11]] * 2}, "2 lists of continuations for 3 prompts"),
    "evicting": (generate_batch, 3, REFS, "references cannot be scored with eviction_every=3; leave one out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scored_is_refused(name):
    call, given, settings, words = REFUSED[name]
    cell = PLAIN_CELL | {"eviction": "h2o"}
    backbone, more = backbone_of(cell), [given] if call is score_batch else []
    every = replace(compression_of(cell), every=given) if name == "evicting" else None
    refuses(words, call, backbone, prompts(backbone.family, "three", True), *more, compression=every, **settings)


FORCED = {
    "routed": {"family": "llava_gqa", "reducer": "fastv_embeds", "selector": "linear"},
    "anchor": {"family": "llava_gqa", "reducer": "fastv_embeds"},
    "evicted": {"family": "llava_gqa", "eviction": "snapkv"},
    "rounded": {"reducer": "quest", "selector": "query", "eviction": "knorm", "precision": "int8"},
    "pages": {"eviction": "read_pages"},
    "before the question": {"family": "llava_gqa", "eviction": "knorm", "protocol": "context_first"},
}


def forced_by_hand(backbone, prompt, compression, protocol, tokens):
    """(log-probability, share that greedy decoding would say) of one prompt's tokens, fed one after another."""
    first, cache = opened(backbone, prompt, compression, protocol)
    logits_V, total, right = first.logits_BV[0], 0.0, 0
    for token in tokens:
        total += logits_V.float().log_softmax(-1)[token].item()
        right += int(logits_V.argmax()) == token
        logits_V = decode(backbone, torch.tensor([[token]]), cache)[0]
    return total, right / len(tokens)


@sampled("pad_left", [True, False], every=4)
@sampled("arm", FORCED, every=3)
def test_references_are_scored_as_decoding_steps_with_them_forced(arm, pad_left):
    """In a batch of unequal prompts and references; and the answers stay what they are."""
    cell = PLAIN_CELL | {"eviction": "none", "protocol": "query_aware"} | FORCED[arm]
    backbone, compression, protocol = backbone_of(cell), compression_of(cell), cell["protocol"]
    how = {"max_new_tokens": 5, "compression": compression, "protocol": protocol}
    batch = prompts(backbone.family, "three", pad_left)
    plain = generate_batch(backbone, batch, **how)
    said = plain[0].token_ids
    given = [[*said[:3], said[3] % 50 + 1, 12, 45], [], [19, 23]]  # some right, some wrong
    got = generate_batch(backbone, batch, **how, references=given)
    assert [(one.token_ids, one.kv_bytes) for one in got] == [(one.token_ids, one.kv_bytes) for one in plain]
    assert got[1].reference is None
    assert 3 <= got[0].reference.right < 6
    for i in (0, 2):
        score, alone = got[i].reference, only_sample(batch, i)
        logprob, share = forced_by_hand(backbone, alone, compression, protocol, given[i])
        assert score.logprob == pytest.approx(logprob, abs=1e-4)
        assert (score.right / score.count, score.count) == (share, len(given[i]))

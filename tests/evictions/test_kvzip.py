"""KVzip, KVzap and KVCompose: chunks, pools and nets beside plain loops, kvpress's and the releases' goldens."""

import base64
import json
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrations import read_calibration
from subtoken_train.engine.attention import reading_packed
from subtoken_train.evictions import build_eviction, kvzip
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.budgets import pooled_counts, score_curve
from subtoken_train.evictions.kvzip import ANSWER, KVCompose, KVzap, KVzip, TokenScorers, foretold, token_scores
from subtoken_train.families.family import check_calibration, shapes_digest
from subtoken_train.inference.cache_report import report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import decode, open_prompts, prefill, run_whole
from subtoken_train.types import Identity, Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import OF_TASKS, View
from tests.support import prompt_views
from tests.support.golden_cases import alike, close, load, near, record
from tests.support.helpers import compress, random_mask, random_scores
from tests.support.prompt_views import PROMPTS, C, Q, S, V, drawn_nets, layer_views, plan, settings_for, written
from tests.support.refusals import refuses
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import backbone_of
from tests.support.truth_models import prompts

POOLS = {"global": [range(6)], "layer": [(0, 1), (2, 3), (4, 5)], "head": [(i,) for i in range(6)]}
PADDED = torch.tensor([[0, S, C, C, C, C, C, Q, Q], [S, S, V, V, Q, V, V, V, Q], [S, Q, Q, 0, 0, 0, 0, 0, 0]])


def places(marks):
    return [row.nonzero()[:, 0].tolist() for row in marks]


def test_the_context_is_the_body_of_a_prompt():
    assert places(kvzip.repeated_context(PADDED)) == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], [0, 1, 2]]


def test_tasks_repeat_every_chunk_once():
    first, second = KVzip(chunk=4).tasks(PADDED)
    assert first.pieces[:2] == (kvzip.FIRST, ANSWER)
    assert places(first.about_BN) == [[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2]]
    assert second.pieces[0] == kvzip.LATER
    assert places(second.pieces[1]) == [[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2]]  # fewer than eight tokens come before
    assert second.pieces[2] == ANSWER
    assert places(second.about_BN) == [[6], [6, 7], []]
    for task in (first, second):
        assert task.pieces[-1] is task.about_BN
    assert places(KVzip(chunk=11).tasks(torch.full((1, 40), C))[2].pieces[1]) == [list(range(14, 22))]


def task_view(regions_BN, about_BN, rows_BS, seed=0):
    """Random states of a layer, eight wide, four query heads on two."""
    batch, length = regions_BN.shape
    count = length + rows_BS.shape[1]
    query, key = random_scores(seed, batch, 4, rows_BS.shape[1], 8), random_scores(seed + 1, batch, 2, count, 8)
    value = random_scores(seed + 2, batch, 2, length, 8)
    return View(0, query * 3, key, value, regions_BN, 8**-0.5, OF_TASKS, task_BS=rows_BS, about_BN=about_BN)


@pytest.mark.parametrize("sinks", [0, 2, 4, 30])
def test_scores_are_the_largest_of_a_softmax_over_sinks_chunk_and_rows(sinks):
    """Heads in groups, a sample without a chunk, rows that are padding; the rest of the prompt is unseen."""
    regions = torch.where(random_mask(0, 3, 20, share=0.8), C, 0)
    about, rows = (regions > 0) & (torch.arange(20) >= 9), random_mask(1, 3, 7, share=0.7)
    about[2], rows[:2, 0] = False, True
    view = task_view(regions, about, rows)
    scores = KVzip(sinks=sinks).score_task(view)
    for b in range(3):
        entries = regions[b].nonzero()[:, 0].tolist()
        seen = [i for i in entries if about[b, i] or i in entries[:sinks]]
        columns = [*seen, *(20 + i for i in rows[b].nonzero()[:, 0].tolist())]
        own = rows[b].nonzero()[:, 0].tolist()
        keys, expected = view.key_BhNd[b, :, columns], torch.zeros(2, 20)
        queries = torch.zeros(4, len(columns), 8)
        queries[:, len(seen) :] = view.query_BHNd[b, :, own]
        matrix = prompt_views.dense_attention(queries, keys, [True] * len(columns), view.scale)[
            :, len(seen) :, : len(seen)
        ]
        if own:
            expected[:, seen] = matrix.amax(1).view(2, 2, -1).amax(1)
        assert torch.allclose(scores[b][:, about[b]], expected[:, about[b]], atol=1e-5)


def test_golden(shared):
    """The original's scores; its threshold is strict, so that it keeps one entry fewer than the budget."""
    params, tensors = load(shared, "kvzip_original")
    keys, queries = tensors["keys"], tensors["queries"]
    batch, kv_heads, count, _ = keys.shape
    length, start, stop = count - queries.shape[2], params["start_idx"], params["end_idx"]
    places_N = torch.arange(length).expand(batch, -1)
    about = (places_N >= start) & (places_N < stop)
    rows = torch.ones(batch, queries.shape[2], dtype=torch.bool)
    regions = torch.full((batch, length), C)
    scale = keys.shape[-1] ** -0.5
    view = View(0, queries, keys, keys[:, :, :length], regions, scale, OF_TASKS, task_BS=rows, about_BN=about)
    scores = KVzip(sinks=params["sink"]).score_task(view)[:, :, start:stop]
    close(KVzip(), "kvzip_original: scores", scores, tensors["score"])
    own = scores.reshape(1, batch * kv_heads, stop - start)  # its threshold is that of all its heads
    competes = torch.ones(1, stop - start, dtype=torch.bool)
    strict = int(own.numel() * params["ratio"]) - 1
    assert torch.allclose(own.flatten().sort(descending=True).values[strict], tensors["threshold"])
    pooled = pooled_counts(score_curve(own, competes), torch.tensor([strict]), 0)
    for name, counts in (("global", pooled), ("uniform", torch.tensor([int(own.shape[-1] * params["ratio"])]))):
        kept = keep_best_entries(own, competes, torch.zeros_like(competes), counts)
        alike("kvzip", f"kvzip_original {name}", kept.flatten(), tensors[f"valid_{name}"].flatten())


def found(seed, layers=3, levels=None):
    """Scores of random layers, and candidates: half of 12 entries, of 7 in the second sample."""
    regions = torch.zeros(2, 12, dtype=torch.long)
    regions[0], regions[1, 3:10] = C, C
    none = torch.zeros_like(regions, dtype=torch.bool)
    scores = [Scores((random_scores(seed + i, 2, 2, 12, levels=levels) / 5).sigmoid(), none) for i in range(layers)]
    return scores, Candidates([regions] * layers, [regions > 0] * layers, torch.tensor([[6, 3]] * layers))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool, seed):
    """One entry of every head, then the best of a pool."""
    scores, candidates = found(seed * 10)
    kept = KVzip(pool=pool).keep(scores, candidates)
    for sample, budget in enumerate((6, 3)):
        layers = list(zip(scores, kept, candidates.competes_LBN, strict=True))
        runs = [
            s.scores_BhN[sample, h, c[sample]].sort(descending=True).values.tolist()
            for s, _, c in layers
            for h in (0, 1)
        ]
        counts = [0] * 6
        for group in POOLS[pool]:
            order = sorted((rank > 0, -score, run) for run in group for rank, score in enumerate(runs[run]))
            for *_, run in order[: budget * len(group)]:
                counts[run] += 1
        marks = [k[sample, h, c[sample]] for _, k, c in layers for h in (0, 1)]
        assert [int(each.sum()) for each in marks] == counts
        for each, (s, _, c), h in zip(marks, [layer for layer in layers for _ in (0, 1)], [0, 1] * 3, strict=True):
            own = s.scores_BhN[sample, h, c[sample]]
            assert own[each].min() >= own.sort(descending=True).values[int(each.sum()) - 1]


def test_what_is_no_context_goes_last():
    """Where everything competes, entries outside of the context come before those inside."""
    regions, context = torch.tensor([[S, C, C, C, C, Q]]), torch.tensor([[False, True, True, True, True, False]])
    view = task_view(regions, context, torch.ones(1, 3, dtype=torch.bool))
    keys = view.key_BhNd[:, :, :6]
    first = KVzip().score(View(0, view.query_BHNd, keys, view.value_BhNd, regions, view.scale, KVzip.needs))
    first.scores_BhN = torch.where(context[:, None], KVzip().score_task(view), first.scores_BhN)
    kept = KVzip().keep([first], Candidates([regions], [regions > 0], torch.tensor([[3]])))[0]
    assert kept[0, :, [0, 5]].all()
    assert kept.sum() == 6


CELL = {"reducer": "none", "selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token"}


def press_net(net):
    """kvpress's module of a layer, with a net's weights."""
    parts = [nn.Linear(weight.shape[1], len(weight)) for weight in net[::2]]
    for part, weight, bias in zip(parts, net[::2], net[1::2], strict=True):
        part.weight.data, part.bias.data = weight, bias
    return parts[0] if len(parts) == 1 else nn.Sequential(parts[0], nn.GELU(), parts[1])


def press_scores(family, batch, nets):
    """kvpress's scores: a hook of every attention reads its hidden states in a plain pass, [B, h, N] per layer."""
    found, hooks = {}, []

    def hook(layer, module, args, kwargs):
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        found[layer] = press_net(nets[layer])(hidden_states).transpose(1, 2)

    for layer, block in enumerate(family.decoder.layers):
        hooks.append(block.self_attn.register_forward_pre_hook(partial(hook, layer), with_kwargs=True))
    compress(family).eval().run(batch, pad_left=True)
    for each in hooks:
        each.remove()
    return found


def our_scores(backbone, batch, method, chunk=None):
    """Scores of every layer after a prompt's pass, [B, h, N]."""
    family, found = backbone.family, {}
    compression = Compression(method, 0.5, prefill_chunk=chunk)
    if chunk is not None:
        noted = method.score

        def score(view):
            scores = noted(view)
            found[view.layer] = scores.scores_BhN
            return scores

        object.__setattr__(method, "score", score)
        prefill(backbone, batch, PackedCache(family.shape.num_layers), compression)
        return found
    eviction = EvictionPass(compression, family, batch, backbone.reducer)
    packer = LayerPacker(backbone, compression, PackedCache(family.shape.num_layers), batch.input_ids_BN.shape[1])
    with reading_packed(family.decoder.config):
        run_whole(backbone, batch, eviction, packer)
    return {layer: scores.scores_BhN for layer, scores in eviction.scores.items()}


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("hidden", [0, 6])
def test_scores_are_those_of_kvpress_s_press(family, hidden):
    """The same nets on the hidden states that its hook is given; a batch of three, padded."""
    backbone = backbone_of({**CELL, "family": family, "precision": "fp32"})
    batch = prompts(backbone.family, "three", pad_left=True)
    method = build_eviction("kvzap", **settings_for("kvzap", backbone.family, hidden))
    expected = press_scores(backbone.family, batch, method.calibrated.numbers.nets)
    found = our_scores(backbone, batch, method)
    assert found.keys() == expected.keys()
    for layer, scores in found.items():
        seen = (batch.regions_BN != Region.PADDING)[:, None].expand_as(scores)
        assert (scores - expected[layer])[seen].abs().max() < 1e-5


@pytest.mark.parametrize(("reducer", "selector"), [("none", "none"), ("none", "linear"), ("quest", "linear")])
def test_chunks_show_the_same_inputs(reducer, selector):
    """Whatever runs ahead of a layer's rows: routers, a context reducer."""
    backbone = backbone_of({**CELL, "family": "llama", "precision": "fp32", "reducer": reducer, "selector": selector})
    batch = prompts(backbone.family, "three", pad_left=True)
    settings = {"pool": "layer", **settings_for("kvzap", backbone.family)}
    whole = our_scores(backbone, batch, build_eviction("kvzap", **settings))
    parts = our_scores(backbone, batch, build_eviction("kvzap", **settings), chunk=7)
    for layer, scores in whole.items():
        seen = (batch.regions_BN != Region.PADDING)[:, None].expand_as(scores)
        assert (scores - parts[layer])[seen].abs().max() < 1e-4


@pytest.mark.parametrize("pool", ["global", "layer", "head"])
def test_the_last_entries_stay_inside_the_budget(pool):
    """Of a context alone its own last ones, in every head; before a question those after it, which cost nothing."""
    method = build_eviction("kvzap", pool=pool, last=3, **settings_for("kvzap"))
    views = layer_views([[int(Region.CONTEXT)] * 20], method.needs)
    candidates = prompt_views.candidates_of(method, views, 0.3)
    counts = prompt_views.by_head(method.counts([method.score(view) for view in views], candidates))
    assert (
        counts.sum() * (prompt_views.KV_HEADS if counts.shape[-1] == 1 else 1)
        == 6 * prompt_views.LAYERS * prompt_views.KV_HEADS
    )
    for kept in method.keep([method.score(view) for view in views], candidates):
        assert kept[0, :, -3:].all()
    assert method.across_layers == (pool == "global")
    asked = layer_views([prompt_views.PROMPTS["context"]], method.needs)[0]
    asked.in_scope_BN = asked.regions_BN == Region.CONTEXT
    assert not (method.score(asked).protected_BN & asked.in_scope_BN).any()


def evicted(held, size, pool):
    """What stays of {(layer, head, place): score} where a pool of heads keeps so many; ties go to the lower."""
    parts = {}
    for key in sorted(held, key=lambda key: (-held[key], key)):
        parts.setdefault({"global": 0, "layer": key[0], "head": key[:2]}[pool], []).append(key)
    return {key: held[key] for keys in parts.values() for key in keys[:size]}


@pytest.mark.parametrize(("pool", "heads"), [("global", 6), ("layer", 2), ("head", 1)])
def test_while_decoding_the_best_of_old_and_new_stay(pool, heads):
    """By hand: entries keep their scores, new ones get theirs from what their layers projected."""
    family, budget, every = text_family(layers=3), 12, 4
    backbone = compress(family).eval()
    batch = text_batch([(30, 5, 0)], seed=3)
    method = build_eviction("kvzap", pool=pool, last=0, **settings_for("kvzap", family))
    inputs = {layer: [] for layer in range(3)}
    for layer in range(3):
        family.projection(layer, "v").module.register_forward_pre_hook(
            lambda module, args, layer=layer: inputs[layer].append(args[0])
        )
    cache, held = PackedCache(3), {}

    def scores(layer, call):
        return foretold(method.calibrated.numbers.nets[layer], inputs[layer][call])[0]

    for layer, own in enumerate(
        prefill(backbone, batch, cache, Compression(method, budget, "tokens", every=every)).plan.layers
    ):
        for row, marks in zip(own.entries_BN[0].tolist(), own.heads_BNh[0], strict=True):
            if row >= 0 and batch.regions_BN[0, row] == Region.CONTEXT:
                held |= {(layer, h, row): float(scores(layer, 0)[h, row]) for h in marks.nonzero()[:, 0].tolist()}
    prompt = int((batch.regions_BN != Region.PADDING).sum())
    for call in range(14):
        decode(backbone, torch.tensor([[20 + call]]), cache)
        if call and call % every == 0:  # what came before this token
            held = evicted(held, budget * heads, pool)
            for i, layer in enumerate(cache.layers):
                state = layer.eviction_state
                competes = (state.region_RM > 0) & (state.region_RM < 128)
                for head, (places, marks) in enumerate(zip(state.place_RM, competes, strict=True)):
                    assert sorted(places[marks].tolist()) == sorted(place for *own, place in held if own == [i, head])
        held |= {
            (layer, head, prompt + call): float(scores(layer, call + 1)[head, 0])
            for layer in range(3)
            for head in range(2)
        }
    assert cache.evictor.evictions == 3


def test_what_is_held_of_new_tokens_is_counted():
    """Until the next look: what each layer projected of them, and no query."""
    family, layers = text_family(layers=3), 3
    backbone, cache = compress(family).eval(), PackedCache(layers)
    compression = Compression(build_eviction("kvzap", **settings_for("kvzap", family)), 12, "tokens", every=4)
    batch = text_batch([(30, 5, 0), (20, 9, 0)], seed=3)
    plan, counts = prefill(backbone, batch, cache, compression).plan, []
    for token in range(5):
        counts.append(report(backbone, batch, plan, cache, compression).statistics_bytes)
        decode(backbone, torch.tensor([[20 + token]] * 2), cache)
    assert [after - before for before, after in pairwise(counts)] == [layers * 2 * family.hidden_size * 4] * 4
    assert cache.evictor.evictions == 1
    assert report(backbone, batch, plan, cache, compression).statistics_bytes < counts[-1]


def test_a_file_holds_the_nets_bit_for_bit(tmp_path):
    for hidden in (0, 4):
        numbers = drawn_nets(2, 3, 5, hidden)
        found = read_calibration(written(tmp_path / f"{hidden}.json", "kvzap", numbers), "kvzap", TokenScorers).numbers
        assert found == numbers
        for ours, its in zip(found.nets, numbers.nets, strict=True):
            assert all(map(torch.equal, ours, its))
        found.check_shape(2, 3, 99)
        assert f"a net from 5 to {'4 to ' if hidden else ''}3" in found.words()


def test_a_gate_is_fast_kvzip_s_and_a_file_holds_it(tmp_path):
    """What the release's ``Weight.forward`` makes of these numbers (``prefill/attention/gate.py`` @7d78b34)."""

    def wave(start, *shape):
        return (torch.arange(math.prod(shape)).double() * 1.7 + start).sin().float().view(shape)

    (heads, group, sinks, width), states = (2, 3, 5, 12), wave(6, 1, 4, 12)
    net = [wave(0, heads * group * 16, width), wave(1, heads * group * 16), wave(2, heads * 16, width)]
    net += [1 + wave(3, 2, 16) / 2, wave(4, heads, sinks, 16), wave(5, heads, group)]
    released = torch.tensor([[0.008286, 0.008772, 0.004983, 0.011719], [0.004732, 0.001431, 0.003219, 0.002633]])
    near("kvzap", "fastkvzip: scores of a gate", foretold(net, states)[0].exp(), released)
    assert torch.equal(foretold(net, states.bfloat16()), foretold(net, states.bfloat16().float()))
    path = written(tmp_path / "gates.json", "kvzap", TokenScorers.of([net, net]))
    found = read_calibration(path, "kvzap", TokenScorers).numbers
    assert all(map(torch.equal, found.nets[1], net))
    assert (found.hidden, found.sinks, found.words()) == (96, 5, "2 layers, each a gate from 12 to 96 to 2")


def encoded(*numbers):
    return base64.b64encode(torch.tensor(numbers).numpy().astype("<f4").tobytes()).decode()


FAULTS = {
    "no layers": ({"layers": []}, "layers must hold a net for every layer"),
    "no base64": ({"layers": ["!"]}, r"layers\[0\] is not base64"),
    "too short": ({"layers": [encoded(1.0)]}, r"layers\[0\] has 4 bytes; a net of these widths has 12"),
    "another width": ({"hidden": 2}, r"layers\[0\] has 12 bytes; a net of these widths has"),
    "NaN": ({"layers": [encoded(1.0, math.nan, 0.0)]}, r"layers\[0\] holds NaN or infinity"),
    "a gate of no queries": ({"sinks": 2}, "hidden of a gate is 0; it must be a multiple of 16 times the heads"),
    "no width": ({"width": 0}, "width is 0"),
    "a width of many digits": ({"width": 10**9}, "width is 1,000,000,000; it must be"),
    "numbers": ({"layers": [[1.0]]}, r"layers\[0\] is \[1.0\]; it must be a text"),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=FAULTS)
def test_a_broken_file_is_refused_in_one_message(tmp_path, change, words):
    path = written(tmp_path / "nets.json", "kvzap", TokenScorers.of([[torch.ones(1, 2), torch.ones(1)]]))
    content = json.loads((tmp_path / "nets.json").read_text())
    content["numbers"] |= change
    (tmp_path / "nets.json").write_text(json.dumps(content))
    assert "nets.json" in refuses(words, build_eviction, "kvzap", calibration=path)


def test_nets_of_another_width_are_refused_before_anything_runs(tmp_path):
    """A file that names this backbone, by hand or by mistake; of a reducer and a warm start too."""
    family = text_family(layers=2)
    own = Identity("x", None, str(family.model.config.model_type), shapes_digest(family))
    path = written(tmp_path / "a.json", "kvzap", drawn_nets(2, family.shape.num_kv_heads, 32, 5), own)
    words = "nets that read 32 numbers of a token, and the backbone's layers have 64; make its own"
    refuses(words, Compression(KVzap(path), 0.5).check, family)
    refuses(words, lambda: check_calibration(KVzap(path).calibrated, family))


SETTINGS = [{}, {"task": "causal"}, {"kvpress": True}, {"value_norm": True, "lower_bound": 3}, {"exact_total": True}]
ROWS = {"text before and after": range(23, 29), "context": range(18, 25), "no image": range(14), "image last": [14]}
HALVES = [{"composite": False}, {"adaptive": False}, {"composite": False, "adaptive": False}]


def plain_scores(matrix, rows, kv_heads, norms):
    """Scores of one sample from its matrix [H, N, N]; ``norms`` is [h, N] or None."""
    scores = matrix[:, list(rows)].amax(1).view(kv_heads, -1, matrix.shape[-1]).mean(1)
    scores = scores if norms is None else scores * norms
    return scores + scores.mean(0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(name, settings, dtype):
    method = KVCompose(**settings)
    rows = range(len(PROMPTS[name])) if method.task == "causal" else ROWS[name]
    view = layer_views([PROMPTS[name], PROMPTS["two images"]], method.needs, dtype=dtype, layers=1)[0]
    _, entries, matrix, _, value = next(prompt_views.samples(view))
    expected = plain_scores(matrix, rows, 2, value.float().norm(dim=-1) if method.value_norm else None)
    assert torch.allclose(method.score(view).scores_BhN[0][:, entries], expected, atol=1e-4)


@pytest.mark.parametrize("case", ["structured", "structured_vnorm_lb2", "unstructured", "unstructured_vnorm_lb2"])
def test_golden_of_kvpress(shared, case):
    """kvpress's own scores, counts and kept sets; its attention is [task rows, context + task]."""
    params, tensors = load(shared, f"kvpress_kvcompose_{case}")
    heads, bound = params["Hkv"], params["keep_token_lower_bound"]
    layers, context = tensors["composite_scores_per_layer"].shape
    scores = []
    for layer in range(layers):
        norms = tensors["values"][layer].norm(dim=-1) if params["add_v_norm"] else None
        scores.append(token_scores(tensors["attention"][layer][..., :context].amax(2), heads, norms))
    worst = float((torch.cat(scores) - tensors["scores"]).abs().max())
    assert worst < 1e-5
    competes = torch.ones(1, context, dtype=torch.bool)
    found = [Scores(each, torch.zeros_like(competes)) for each in scores]
    for structured, name, curves in ((True, "layer", 1), (False, "head", heads)):
        # as kvpress rounds: the product of floats, over all of its curves
        total = int(layers * curves * context * (1 - params["compression_ratio"])) / (layers * curves)
        exact = torch.full((layers, 1), total, dtype=torch.float64)
        candidates = Candidates([competes.long()] * layers, [competes] * layers, exact.long(), exact)
        method = KVCompose(structured=structured, kvpress=structured, lower_bound=bound, exact_total=True)
        assert method.counts(found, candidates)[:, 0].tolist() == tensors[f"important_per_{name}"].tolist()
        if structured != case.startswith("un"):
            assert torch.equal(torch.stack(method.keep(found, candidates))[:, 0], tensors["kept_mask"])
    curves = torch.cat([score_curve(each, competes) for each in scores])
    composite = curves.mean(1)
    above = slice(bound, None)  # kvpress adds 1e9 to the ranks below its bound
    assert torch.allclose(composite[1:, above], tensors["composite_scores_per_layer"][1:, above], atol=1e-5)
    assert torch.allclose(composite.amax(0)[above], tensors["composite_scores_per_layer"][0, above], atol=1e-5)
    assert torch.allclose(curves[..., above], tensors["composite_scores_per_head"][..., above], atol=1e-5)
    for layer in range(layers):
        if f"kept_positions_layer{layer}" in tensors:
            positions = tensors[f"kept_positions_layer{layer}"]
            assert [each.nonzero()[:, 0].tolist() for each in tensors["kept_mask"][layer]] == positions.tolist()
    record("kvcompose", f"kvpress_kvcompose_{case}", worst)


@pytest.mark.parametrize("structured", [True, False])
def test_a_bound_of_zero_may_empty_a_layer(structured):
    """All of the budget goes where the scores are; elsewhere what competes goes, and what does not compete stays."""
    regions = torch.tensor([[V] * 6 + [Q] * 2])
    scores = [Scores(torch.rand(1, 2, 8) + 10 * layer, torch.zeros(1, 8, dtype=torch.bool)) for layer in range(3)]
    candidates = Candidates([regions] * 3, [regions == V] * 3, torch.tensor([[2], [2], [2]]))
    for bound, expected in ((0, [0, 0, 6]), (1, [1, 1, 4])):
        method = KVCompose(structured=structured, lower_bound=bound)
        for kept, count in zip(method.keep(scores, candidates), expected, strict=True):
            assert int((kept & (regions == V)[:, None]).sum()) == 2 * count
            assert kept[..., 6:].all()


PAPER = {"exact_total": True, "lower_bound": 0}  # equations 21 and 22, as the paper's grids set them


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("percent", [90, 75, 60, 50, 40, 30, 20, 10])
def test_the_papers_total_is_kept_to_the_entry(structured, percent):
    """Equation 21 over the whole context: floor((1 - r) L N), of every head; 37 tokens and 3 layers divide nowhere."""
    backbone = compress(text_family(layers=3), None, name="none").eval()
    prompts, cache = text_batch([(37, 5, 0)]), PackedCache(3)  # and a first token that never competes
    method = KVCompose(structured=structured, **PAPER)
    opened = open_prompts(backbone, prompts, cache, Compression(method, percent / 100), "context_first")
    heads = backbone.family.shape.num_kv_heads
    kept = -3 * heads
    for layer in opened.plan.layers:
        held = layer.entries_BN >= 0
        kept += int(held.sum()) * heads if layer.heads_BNh is None else int((layer.heads_BNh & held[..., None]).sum())
    total = percent * 3 * 37 * (1 if structured else heads) // 100
    assert kept == total * (heads if structured else 1)


@pytest.mark.parametrize("percent", [90, 30, 10])
def test_the_total_of_millions_of_entries(percent):
    """80 layers of 131,072 tokens: sums in float64 are off by more than a billionth."""
    exact = torch.full((80, 1), 131_072 * (percent / 100), dtype=torch.float64)
    assert KVCompose(**PAPER)._total(Candidates([], [], exact.long(), exact)).item() == percent * 80 * 131_072 // 100


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.8, 1.0])
def test_budgets_of_heads(settings, keep):
    method = KVCompose(structured=False, **settings)
    views = layer_views(list(PROMPTS.values()), method.needs, "left", dropped=[(2, 0.5)])
    _, counts, kept, candidates = plan(method, views, keep)
    chosen = torch.stack([(a & b[:, None]).sum(-1) for a, b in zip(kept, candidates.competes_LBN, strict=True)])
    assert torch.equal(chosen.sum((0, 2)), candidates.budget_LB.sum(0) * 2)
    assert (chosen >= 1).all()
    assert torch.equal(counts, chosen)


@pytest.mark.parametrize("settings", HALVES)
def test_each_half_can_be_left_out(settings):
    """Without composite tokens heads keep those of the best mean; without adaptive budgets layers keep alike."""
    method, whole = KVCompose(**settings), KVCompose()
    views = layer_views([PROMPTS["context"]], method.needs)
    _, counts, kept, candidates = plan(method, views, 0.3)
    assert torch.equal(counts, candidates.budget_LB) == (not method.adaptive)
    assert int(counts.sum()) == int(candidates.budget_LB.sum())
    for view, count_B, kept_BhN, competes_BN in zip(views, counts, kept, candidates.competes_LBN, strict=True):
        own = whole.score(view).scores_BhN[0, :, competes_BN[0]]
        ranked = own if method.composite else own.mean(0, keepdim=True)
        expected = [set(row.argsort(descending=True)[: int(count_B)].tolist()) for row in ranked]
        assert [set(row[competes_BN[0]].nonzero()[:, 0].tolist()) for row in kept_BhN[0]] == expected
    prompt_views.check_padding(method, list(PROMPTS.values()))
    cache, backbone = PackedCache(3), compress(text_family(layers=3), None, name="none").eval()
    opened = open_prompts(backbone, text_batch([(37, 5, 0)]), cache, Compression(method, 0.3), "context_first")
    assert all((layer.heads_BNh is None) == (not method.composite) for layer in opened.plan.layers)
    assert method.online is None

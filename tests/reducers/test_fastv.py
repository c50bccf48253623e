"""FastV: the official code's golden, who is ranked with whom, frozen ranking, and ``merge_dropped``."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.folder import check_mergeable, read_adapter
from subtoken_train.engine.attention_rows import row_attention
from subtoken_train.engine.build import Stage2Config, assemble
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import keep_ranked
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Batch, Region
from tests.support import truth_cells
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import compress, make_batch, random_mask, random_scores, sharpen, write_vlm_adapter
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of, difference


class GoldenFamily(Family):
    """The golden's bare Llama, whose "visual features" are its recorded input embeddings."""

    name = "golden"
    render = visual_tokens = process_images = project = None
    image_token_id = 4

    def __init__(self, model, embeds):
        super().__init__(model, None)
        self.embeds = embeds

    @property
    def decoder(self):
        return self.model

    def visual_states(self, batch, statistics=None):
        return None

    def embed(self, batch, states=None):
        return self.embeds

    def rotate(self, layer, query, key, position_embeddings):
        return apply_rotary_pos_emb(query, key, *position_embeddings)


class Golden:
    """The official run: geometry, recorded tensors, and the same model here."""

    def __init__(self, shared):
        params, self.tensors = load(shared, "fastv_official")
        self.layer = params["agg_layer_K"]
        self.keep_ratio = params["attention_rank_keep"] / params["image_token_length"]
        of = "weight."
        weights = {name.removeprefix(of): tensor for name, tensor in self.tensors.items() if name.startswith(of)}
        config = LlamaConfig(
            vocab_size=len(weights["embed_tokens.weight"]), hidden_size=params["H"] * params["D"],
            intermediate_size=len(weights["layers.0.mlp.up_proj.weight"]), num_hidden_layers=params["L"],
            num_attention_heads=params["H"], num_key_value_heads=params["H"], rms_norm_eps=params["rms_norm_eps"],
            hidden_act=params["hidden_act"],
            rope_parameters={"rope_type": "default", "rope_theta": params["rope_theta"]},
        )  # fmt: skip
        model = LlamaModel(config).eval()
        model.load_state_dict(weights, strict=True)
        self.family = GoldenFamily(model, self.tensors["inputs_embeds"])
        system, visual = params["sys_length"], params["image_token_length"]
        batch, length = self.tensors["inputs_embeds"].shape[:2]
        regions = torch.full((batch, length), int(Region.QUERY))
        regions[:, :system], regions[:, system : system + visual] = Region.SYSTEM, Region.VISUAL
        ids, counts = torch.zeros(batch, length, dtype=torch.long), torch.ones(batch, dtype=torch.long)
        names = [f"golden {sample}" for sample in range(batch)]
        self.batch = Batch(ids, ids - 100, regions, torch.full((batch,), length - 1), None, counts, names)
        self.visible, self.positions = torch.ones_like(regions, dtype=torch.bool), torch.arange(length)[None]

    def run(self, **settings):
        reducer = build_reducer("fastv", self.keep_ratio, layer=self.layer, **settings)
        return CompressedBackbone(self.family, reducer).run(self.batch)


@pytest.fixture
def golden(shared):
    return Golden(shared)


def test_golden_model_is_the_officials(golden):
    ours = golden.family.model.norm(golden.family.run_layers(golden.family.embeds, golden.visible, golden.positions))
    near("fastv", "fastv_official: every token", ours, golden.tensors["full_last_hidden"], atol=1e-4)


def test_golden_attention_row(golden):
    below = golden.family.run_layers(golden.family.embeds, golden.visible, golden.positions, stop=golden.layer - 1)
    last_B = golden.batch.rank_position_B
    row = row_attention(golden.family, golden.layer - 1, below, golden.visible, golden.positions, last_B)
    near("fastv", "fastv_official: attention row", row, golden.tensors["attention_layer_Kminus1"].mean(1)[:, -1])


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
def test_golden_kept_positions(golden, stage):
    """The official code keeps the same positions of every sample, those of the first: one sample is compared."""
    rows = golden.run(stage=stage).rows
    alike("fastv", f"fastv_official: {stage}", rows.position, golden.tensors["kept_positions"][None])
    assert rows.visible_BM.all()


def test_golden_output_after_the_cut(golden):
    """The official in-place mode row by row; its mask mode agrees on the last row."""
    output = golden.family.model.norm(golden.run(stage="decoder").hidden_BMD)
    near("fastv", "fastv_official: after the cut", output, golden.tensors["inplace_last_hidden"], atol=1e-4)
    assert torch.allclose(output[:, -1], golden.tensors["mask_last_hidden"][:, -1], atol=1e-4)
    assert (golden.family.model.norm(golden.run(stage="embeds").hidden_BMD) - output).abs().max() > 1e-2


PROMPTS = [(1, 9), (1, 12), (2, 7), (0, 12)]


def adapted(family, stage2=None, **reducer):
    """FastV at a quarter on a family whose every LoRA says something."""
    torch.manual_seed(0)
    routing = None if stage2 is None else RoutingConfig()
    parts, _ = assemble(family, LoraSettings(rank=4, alpha=8, dropout=0.3), reducer_of(**reducer), routing, stage2)
    with torch.no_grad():
        for name, parameter in family.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.4)
    return parts


def reducer_of(**settings):
    return build_reducer("fastv", 0.25, **settings)


def kept(parts, batch):
    rows = parts.run(batch).rows
    return [index[seen].tolist() for index, seen in zip(rows.index_BM, rows.visible_BM, strict=True)]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("layer", [2, 4])
def test_the_backbone_alone_ranks(tiny_family, pad_left, layer):
    sharpen(tiny_family)
    batch = make_batch(PROMPTS, pad_left)
    plain = kept(CompressedBackbone(tiny_family, reducer_of(layer=layer)), batch)
    frozen = adapted(tiny_family, layer=layer, ranking="frozen")
    assert kept(frozen, batch) == plain
    assert kept(CompressedBackbone(tiny_family, replace(frozen.reducer, ranking="adapted")), batch) != plain


@pytest.mark.parametrize("second", [None, Stage2Config("nowhere", LoraSettings(rank=2, alpha=4, dropout=0.0))])
def test_in_training_the_lora_still_learns_and_stage_2_ranks_without_either(tiny_family, second):
    """Dropout and LoRA are off in the scout alone: the kept rows are the backbone's, and their gradient is there."""
    batch = make_batch(PROMPTS)
    plain = kept(CompressedBackbone(tiny_family, reducer_of()), batch)
    parts = adapted(tiny_family, second, ranking="frozen").train()
    before = {name: x.requires_grad for name, x in parts.named_parameters()}
    assert kept(parts, batch) == plain
    assert {name: x.requires_grad for name, x in parts.named_parameters()} == before
    frozen = sum("lora_" in name and not trained for name, trained in before.items())
    assert (frozen > 0) == (second is not None)  # stage 1's
    parts.logits(parts.run(batch)).float().pow(2).mean().backward()
    assert [name for name, x in parts.named_parameters() if x.requires_grad and x.grad is None] == []


@pytest.mark.parametrize(("key", "before", "after"), [("ranking", "adapted", "frozen"), ("merge_dropped", False, True)])
def test_an_adapter_folder_remembers_it(tmp_path, key, before, after):
    folder = write_vlm_adapter(tmp_path / "adapter")
    path = folder / "subtoken_config.json"
    record = json.loads(path.read_text())
    assert record["reducer"].pop(key) == before  # folders of schema 4 have none
    path.write_text(json.dumps({**record, "schema_version": 4}))
    assert getattr(read_config(folder).reducer, key) == before
    record["reducer"][key] = after
    path.write_text(json.dumps(record))
    parts = read_adapter(folder)[1]
    assert getattr(parts.reducer, key) == after
    if key == "ranking":
        refuses(r"cannot merge: .*ranking: frozen.*without --merge-lora", check_mergeable, parts)
        path.write_text(json.dumps({**record, "merged": True}))
        refuses("the LoRA is merged, so it cannot rank as frozen", read_config, folder)


MERGED = [(1, 9), (2, 7), (0, 12)]


def merged_by_loop(scores, regions, read, count):
    """One sample: rows of the whole tokens in the order of their rank, the merged row (or None), and who joins it."""
    visual = [n for n, code in enumerate(regions) if code == Region.VISUAL]
    order = sorted(visual, key=lambda n: (-scores[n], n))
    needed = [n for n in order if read[n]]
    count = min(len(visual), max(count, len(needed)))
    first = set(needed + [n for n in order if not read[n]][: count - len(needed)])
    kept = [n for n in order if n in first]
    free = [n for n in kept if not read[n]]
    if len(kept) == len(visual) or not free:
        return kept, None, []
    slot = free[-1]
    return [n for n in kept if n != slot], slot, [slot, *(n for n in visual if n not in first)]


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 14)),
    count=st.integers(0, 15),
    levels=st.sampled_from([None, 2]),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_who_joins_equals_a_plain_loop(shape, count, levels, share, dtype, seed):
    """Ties, padding anywhere, samples without visual tokens, rows that are read from, and counts from none to all."""
    regions = random_scores(seed, *shape, levels=len(Region), dtype=torch.int64)
    regions = torch.where(random_scores(seed + 1, *shape) > 0, Region.VISUAL, regions)
    scores = random_scores(seed + 2, *shape, levels=levels).to(dtype)
    read = random_mask(seed + 3, *shape, share=share)
    given_ = (scores, regions, read, torch.full(shape[:1], count))
    keep, rank, joins, _ = keep_ranked(*given_, ranks=True, merges=True)
    plain, plain_rank, nothing, _ = keep_ranked(*given_, ranks=True)
    assert nothing is None
    assert torch.equal(keep, plain)
    for sample in range(shape[0]):
        whole, slot, members = merged_by_loop(*(part[sample].tolist() for part in (scores, regions, read)), count)
        expected = list(range(shape[1]))
        for row in members:
            expected[row] = slot
        assert joins[sample].tolist() == expected
        order = whole if slot is None else [*whole, slot]
        assert [int(rank[sample, n]) for n in order] == list(range(len(order)))
        if slot is None:
            assert rank[sample, order].tolist() == plain_rank[sample, order].tolist()


def plain_reduced(family, reducer, batch, sample):
    """The input embeddings that a sample should run with, by a loop over its rows."""

    def kept_rows(ratio):
        rows = CompressedBackbone(family, replace(reducer, keep_ratio=ratio, merge_dropped=False)).run(batch).rows
        return rows.index_BM[sample, rows.visible_BM[sample]].tolist()

    kept, embeds = kept_rows(reducer.keep_ratio), family.embed(batch)[sample]
    visual = (batch.regions_BN[sample] == Region.VISUAL).nonzero()[:, 0].tolist()
    dropped = [row for row in visual if row not in kept]
    best = kept_rows((len(visual) - len(dropped) - 1) / len(visual)) if dropped else kept
    return torch.stack([embeds[row] if row in best else embeds[[row, *dropped]].mean(0) for row in kept])


@sampled("pad_left", [False, True], every=2)
def test_layer_0_sees_the_mean_of_what_was_dropped(tiny_family, pad_left):
    """One image, two of one sample, and none; the ranking is that of the plain reducer with one token fewer."""
    sharpen(tiny_family)
    batch = make_batch(MERGED, pad_left)
    backbone = compress(tiny_family, name="fastv", keep_ratio=0.25, merge_dropped=True)
    seen = []
    handle = tiny_family.decoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = backbone.run(batch, pad_left=pad_left).rows
    handle.remove()
    plain = compress(tiny_family, name="fastv", keep_ratio=0.25).run(batch, pad_left=pad_left).rows
    assert torch.equal(rows.index_BM, plain.index_BM)
    assert torch.equal(rows.position, plain.position)
    for sample in range(3):
        got = seen[-1][sample, rows.visible_BM[sample]]
        expected = plain_reduced(tiny_family, backbone.reducer, batch, sample)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        changed = (got != tiny_family.embed(batch)[sample, rows.index_BM[sample, rows.visible_BM[sample]]]).any(-1)
        assert int(changed.sum()) == (0 if sample == 2 else 1)


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
def test_where_nothing_is_dropped_nothing_changes(tiny_family, stage):
    """Not a bit: at a keep ratio of 1, with everything gathered, and in a batch of text."""
    with torch.no_grad():
        for batch, ratio, forced in ((make_batch(MERGED), 1.0, True), (make_batch([(0, 12), (0, 5)]), 0.25, False)):
            made = [
                compress(tiny_family, name="fastv", keep_ratio=ratio, stage=stage, merge_dropped=merged)
                .run(batch, force_gather=forced)
                .hidden_BMD
                for merged in (False, True)
            ]
            assert torch.equal(*made)


CELLS = [
    ("llava", "linear", "ranked", "snapkv", "three_left", "query_aware"),
    ("qwen3_vl", "none", "per_token", "none", "last_right", "query_aware"),
    ("qwen2_5_vl", "gated", "per_token", "h2o", "text_left", "query_aware"),
    ("llava_gqa", "mlp", "global", "none", "three_right", "context_first"),
]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_cut_between_layers_merges_what_the_truth_merges(monkeypatch, cell):
    """The stage ``decoder``; that of ``embeds`` is a level of the matrix of packed = truth."""
    decoder = {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder", "layer": 1, "merge_dropped": True}
    monkeypatch.setitem(truth_cells.REDUCERS, "fastv_merged", decoder)
    names = ("family", "selector", "budget", "eviction", "batch", "protocol")
    fixed = {"reducer": "fastv_merged", "layout": "contiguous", "groups": "8/3", "precision": "fp32"}
    cell = {**fixed, **dict(zip(names, cell, strict=True)), "scope": "context"}
    assert backbone_of(cell).reducer.stage == "decoder"
    found = difference(cell, 4)
    assert found.fits("fp32"), found


def test_a_cache_is_reconstructed_from_what_ran():
    """KVzip repeats the context's kept rows, the merged one as it ran; Qwen3-VL's adds features of its own to them."""
    for family in ("llava", "qwen3_vl"):
        cell = {"family": family, "reducer": "fastv_merged", "selector": "none", "layout": "contiguous"}
        cell |= {"groups": "16/4", "budget": "per_token", "eviction": "kvzip", "scope": "context"}
        found = difference(cell | {"batch": "three_left", "protocol": "query_aware", "precision": "fp32"}, 4)
        assert found.fits("fp32"), found

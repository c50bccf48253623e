"""Calibrations of heads: HeadKV's and SparseMM's scores, DuoAttention's loss, LKV's budgets, by loops and by hand."""

import numpy as np
import pytest
import torch

from subtoken_train.calibrating import heads
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.scenes import draw_scene
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.mixed_heads import FadingEntries, HeadMix, mixed_hidden
from subtoken_train.evictions import build_eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.prefill import contexts_of
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.helpers import compress, random_scores
from tests.support.places import ROOT
from tests.support.prompt_views import NOBODY
from tests.support.refusals import refuses, refusing
from tests.support.text_families import text_batch, text_family

RECALLED = [(40, 4, 5), (30, 3, 4)]


def told_again(pad_left=False):
    """Random texts whose answers say again a run of 5 tokens and one of 3 of their contexts."""
    batch = text_batch([(40, 4, 9), (30, 3, 6)], pad_left)
    ids, regions = batch.input_ids_BN, batch.regions_BN
    for sample in range(len(ids)):
        context, answer = ((regions[sample] == code).nonzero()[:, 0] for code in (Region.CONTEXT, Region.ANSWER))
        ids[sample, answer[:5]] = ids[sample, context[7:12]].clone()
        if len(answer) > 6:
            ids[sample, answer[6:9]] = ids[sample, context[20:23]].clone()
        batch.labels_BN[sample, answer] = ids[sample, answer]
    return batch


def runs_by_loop(answer, ids, context):
    """The longest run through every token of an answer, the earliest of two: (start, tokens), None below 2."""
    found = []
    for i in range(len(answer)):
        best = (0, 0)
        for place in range(len(ids)):
            if not context[place] or ids[place] != answer[i]:
                continue
            back = ahead = 0
            while i - back > 0 and place - back > 0 and context[place - back - 1] \
                    and answer[i - back - 1] == ids[place - back - 1]:  # fmt: skip
                back += 1
            while i + ahead + 1 < len(answer) and place + ahead + 1 < len(ids) and context[place + ahead + 1] \
                    and answer[i + ahead + 1] == ids[place + ahead + 1]:  # fmt: skip
                ahead += 1
            if back + ahead + 1 > best[1]:
                best = (place - back, back + ahead + 1)
        found.append(best if best[1] > 1 else None)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_runs_equal_a_loop(seed):
    """Few kinds of tokens, so that many runs are as long."""
    draw = torch.Generator().manual_seed(seed)
    answer, ids = (torch.randint(0, 3, (n,), generator=draw) for n in (9, 25))
    context = torch.rand(25, generator=draw) < 0.9
    found = heads.repeated_runs(answer, ids, context)
    for marks, run in zip(found, runs_by_loop(answer.tolist(), ids.tolist(), context.tolist()), strict=True):
        assert marks.nonzero()[:, 0].tolist() == ([] if run is None else list(range(run[0], run[0] + run[1])))


@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_scores_equal_a_loop_over_eager_attention(pad_left):
    batch = told_again(pad_left)
    found = heads.NeedleCalibrator().numbers(CompressedBackbone(text_family(), build_reducer("none")).eval(), [batch])
    model = text_family().model
    model.set_attn_implementation("eager")
    sums = torch.zeros(3, 4, dtype=torch.float64)
    index_BW, needle_BWN = heads.NeedleCalibrator().needles(text_family(), batch)
    assert (index_BW >= 0).sum() == needle_BWN.any(-1).sum() >= 5 + 3 + 5
    for sample in range(2):
        real = batch.regions_BN[sample] != Region.PADDING
        layers = model(batch.input_ids_BN[sample][real][None], output_attentions=True).attentions
        for row, needle in zip(index_BW[sample], needle_BWN[sample], strict=True):
            if row < 0:
                continue
            place, own = int(real[:row].sum()), needle[real].nonzero()[:, 0]
            for layer, attention in enumerate(layers):
                weights, largest = attention[0, :, place].double().topk(len(own))
                sums[layer] += (weights * torch.isin(largest, own)).sum(-1) / len(own)
    of_groups = sums.view(3, 2, 2).sum(-1)
    torch.testing.assert_close(torch.tensor(found.score).double(), of_groups / of_groups.mean(), rtol=1e-3, atol=1e-5)


def test_what_cannot_be_calibrated_is_refused(tiny_family):
    with pytest.raises(ValueError, match="headkv is calibrated on recall of text, and the backbone sees images"):
        heads.NeedleCalibrator().check(CompressedBackbone(tiny_family, build_reducer("none")).eval())
    backbone, unlike = CompressedBackbone(text_family(), build_reducer("none")).eval(), text_batch([(12, 3, 1)])
    refuses("no head attends to the answers", lambda: heads.NeedleCalibrator().numbers(backbone, [unlike]))


@pytest.fixture(scope="module")
def llava():
    return load_family(BackboneConfig(path=str(ROOT / "checkpoints/tiny-llava")))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 4), (3, 5), (24, 24), (2, 7)])
def test_every_token_that_reaches_into_a_cell(rows, columns):
    for cell in range(16):
        found = heads.cell_tokens(cell, rows, columns).view(rows, columns)
        for i in range(rows):
            for j in range(columns):
                spans = [(i / rows, (i + 1) / rows, cell // 4), (j / columns, (j + 1) / columns, cell % 4)]
                meets = all(min(stop, (k + 1) / 4) - max(start, k / 4) > 1e-9 for start, stop, k in spans)
                assert bool(found[i, j]) == meets


def test_answers_tell_of_the_cells_of_their_scenes(llava):
    """A token for every word of the tiny model: three for each object, in order, and an end that tells of none."""
    for number in range(3):
        objects = draw_scene(np.random.default_rng([0, number]), "train").objects
        batch = Collator(llava, 512)([heads.scene_record(np.random.default_rng([0, number]), number)])
        cells = heads.told_cells(llava.tokenizer, batch.labels_BN[0][batch.labels_BN[0] >= 0].tolist())
        assert [cell for cell in cells if cell >= 0] == [item.cell for item in objects for _ in range(3)]
        index_BW, needle_BWN = heads.VisualCalibrator().needles(llava, batch)
        assert index_BW[0].tolist() == [i - 1 for i in (batch.labels_BN[0] >= 0).nonzero()[:, 0]][: index_BW.shape[1]]
        assert needle_BWN.sum(-1).tolist() == [[4] * index_BW.shape[1]]  # 8 x 8 tokens, 4 x 4 cells
        assert not needle_BWN[0, :, batch.regions_BN[0] != Region.VISUAL].any()


def test_only_the_largest_weight_counts():
    looked = torch.tensor([0.1, 0.4, 0.3, 0.2]).expand(1, 2, 1, 4)
    weight = heads.VisualCalibrator().weight
    assert weight(looked, torch.tensor([[[True, True, False, False]]])).tolist() == [[[0.5], [0.5]]]
    assert weight(looked, torch.tensor([[[True, False, True, False]]])).tolist() == [[[0.0], [0.0]]]
    assert weight(looked, torch.zeros(1, 1, 4, dtype=torch.bool)).tolist() == [[[0.0], [0.0]]]


def test_scores_do_not_hang_on_the_batch(llava):
    backbone = CompressedBackbone(llava, build_reducer("none")).eval()
    found = []
    for size in (1, 3):
        calibrator = heads.VisualCalibrator(samples=3, batch_size=size)
        found.append(torch.tensor(calibrator.numbers(backbone, calibrator.prompts(llava, None).batches).score))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert float(found[0].mean()) == pytest.approx(1, abs=1e-4)


def test_what_cannot_be_calibrated_is_refused_of_visual_heads(llava):
    with pytest.raises(ValueError, match="calibrated on pictures, and the backbone sees none; use headkv"):
        heads.VisualCalibrator().check(CompressedBackbone(text_family(), build_reducer("none")).eval())
    refuses(r"data 'dev\.json': sparsemm draws its own scenes", heads.VisualCalibrator().prompts, llava, "dev.json")


@pytest.fixture
def family():
    return text_family(layers=2)


def backbone_of(family, **reducer):
    return CompressedBackbone(family, build_reducer(**(reducer or {"name": "none"}))).eval()


def short(**settings):
    return heads.DuoCalibrator(
        **{"samples": 80, "batch_size": 2, "sinks": 1, "recent": 6, "context_length": 40} | settings
    )


def test_the_loss_by_hand(family):
    """Squared difference of the hidden states of the rows before labels, and a share of the mean alpha."""
    batch, alpha = text_batch(RECALLED), torch.tensor([[0.2, 0.7], [0.9, 0.4]])
    loss = short().loss(family, batch, alpha.requires_grad_())
    visible = batch.regions_BN != Region.PADDING
    states = [
        mixed_hidden(family, family.embed(batch), family.positions(batch), HeadMix(each, 1, 6, visible))
        for each in (torch.ones(2, 2), alpha)
    ]
    squares = [
        (states[1][sample, row] - states[0][sample, row]).pow(2).mean()
        for sample, labels in enumerate(batch.labels_BN)
        for row in range(len(labels) - 1)
        if labels[row + 1] != IGNORE_INDEX
    ]
    assert len(squares) == 9
    torch.testing.assert_close(loss, torch.stack(squares).mean() + 0.05 * alpha.mean())


def test_the_rate_rises_falls_and_never_stops():
    rates = [heads.rate_at(step, 50) for step in (0, 4, 9, 25, 45, 49, 60)]
    assert rates == pytest.approx([0.1, 0.5, 1, 1, 0.5, 0.1, 0.1])


def test_the_backbone_does_not_change(family):
    before = {name: value.clone() for name, value in family.model.state_dict().items()}
    found = short().numbers(backbone_of(family), [text_batch(RECALLED, seed=seed) for seed in range(40)])
    assert all(torch.equal(value, before[name]) for name, value in family.model.state_dict().items())
    values = torch.tensor(found.alpha)
    assert values.shape == (2, 2)
    assert ((values >= 0) & (values <= 1)).all()
    assert (found.sinks, found.recent) == (1, 6)


def test_a_reduced_cache_is_refused(family):
    backbone = backbone_of(family, name="quest", keep_ratio=0.5, page_size=4, window=4)
    refuses("calibrated on whole caches", lambda: short().run(backbone, NOBODY))


@pytest.fixture
def backbone():
    found = compress(text_family(layers=2)).eval()
    use_packed_attention(found.family.decoder.config)
    return found


def test_rows_after_the_context_see_it_as_far_as_it_stays():
    """A loop over query heads and rows; rows of the context and before it see everything up to themselves."""
    query, key, value = random_scores(0, 1, 4, 9, 8), random_scores(1, 1, 2, 9, 8), random_scores(2, 1, 2, 9, 8)
    context = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    stays = torch.rand(2, 1, 2, 9).log()
    found = FadingEntries(context, stays, torch.ones(1, 9).bool()).attend(1, query, key, value, 0.3)
    for head in range(4):
        for row in range(9):
            logits = [0.3 * float(query[0, head, row] @ key[0, head // 2, place]) for place in range(row + 1)]
            if row > 4:
                logits = [x + float(stays[1, 0, head // 2, n]) * bool(context[0, n]) for n, x in enumerate(logits)]
            expected = torch.tensor(logits).softmax(0) @ value[0, head // 2, : row + 1]
            torch.testing.assert_close(found[0, head, row], expected)


def test_places_are_those_of_the_method_s_scores(backbone):
    batch = text_batch([(20, 4, 0)], seed=3)
    found = heads.places(backbone, batch, build_eviction("knorm"))
    dense = backbone.family.model(contexts_of(batch).input_ids_BN, use_cache=True).past_key_values
    assert found.shape == (2, backbone.family.shape.num_kv_heads, 21)  # its first token is read with it
    for layer in range(2):
        for head in range(found.shape[1]):
            norms = dense.layers[layer].keys[0, head].norm(dim=-1)
            assert found[layer, head].tolist() == norms.argsort(stable=True).argsort().tolist()  # the lowest stay


def test_what_is_learned_loses_less_of_what_it_was_learned_from(backbone):
    calibrator = heads.BudgetCalibrator(samples=60, context_length=60, following=12, keep=0.2, eviction="knorm")
    batches = [text_batch([(60, 2, 0)], seed=seed % 3) for seed in range(60)]
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    found = torch.tensor(calibrator.numbers(backbone, batches).score)
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())
    assert found.mean() == pytest.approx(1, abs=1e-5)
    assert found.max() > 1.2 * found.min()
    losses = {}
    for name, share in (("equal", torch.ones_like(found)), ("learned", found)):
        prompts = calibrator._prompts(backbone.family, batches[:3])
        with torch.no_grad():
            losses[name] = sum(float(calibrator.loss(backbone, prompt, share, 0.05)) for prompt in prompts)
    assert losses["learned"] < 0.97 * losses["equal"]


def test_a_loss_of_entries_that_all_stay_is_none(backbone):
    calibrator = heads.BudgetCalibrator(context_length=40, following=10, keep=0.5, eviction="knorm")
    (prompt,) = calibrator._prompts(backbone.family, [text_batch([(40, 2, 0)])])
    assert (prompt.regions_BN == Region.CONTEXT).sum() == 31  # the first token is read as context, too
    with torch.no_grad():
        wide = torch.full((2, backbone.family.shape.num_kv_heads), 9.0)
        assert float(calibrator.loss(backbone, prompt, wide, 0.01)) < 1e-6
        assert float(calibrator.loss(backbone, prompt, wide / 20, 0.01)) > 1e-3


test_budgets_that_no_head_can_meet_are_refused = refusing(
    [
        (
            {"keep": 0.001},
            "lkv keep=0.001 must leave a head one at least of the 192 tokens before following=64, and not all",
        ),
        ({"keep": 1.0}, "lkv keep=1 must leave a head one"),
        ({"following": 256}, "of the 0 tokens before following=256"),
        ({"eviction": "tova"}, "lkv divides a budget between heads, and tova keeps one set"),
        ({"eviction": "kvzip", "eviction_options": "chunks=3"}, "unknown setting of kvzip 'chunks'"),
    ],
    lambda settings: heads.BudgetCalibrator(**settings),
)


def test_nothing_to_learn_from_is_refused(backbone):
    with pytest.raises(ValueError, match="none of the prompts has a context to score"):
        heads.BudgetCalibrator(eviction="knorm").numbers(backbone, [text_batch([(20, 4, 0)])])

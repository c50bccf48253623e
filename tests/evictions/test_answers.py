"""TriAttention and R-KV: beside plain references in complex numbers, rows that are heads, what is refused."""

from types import SimpleNamespace

import pytest
import torch

from subtoken_train.calibrating.layers import CentreCalibrator
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.queries import QueryCentres
from subtoken_train.families.positions import LENGTH_DEPENDENT
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.prompt_views import HEADS, KV_HEADS, NOBODY, PROMPTS, WIDTH, layer_views, rope, settings_for
from tests.support.refusals import refuses
from tests.support.text_families import text_batch, text_family

GROUP, HALF = HEADS // KV_HEADS, WIDTH // 2
RUNS = [(pad, dtype) for pad in ("left", "right") for dtype in (torch.float32, torch.bfloat16)]


def methods():
    rkv = build_eviction("rkv", window=3, kernel=3, importance=0.3, alike=0.2)
    return [build_eviction("triattention", **settings_for("triattention")), rkv]


def foretold(method, view, sample, head):
    """A query head's scores of all rows of a sample before they are standardised, in complex numbers."""
    numbers, key = method.read_numbers(), view.key_BhNd[sample, head // GROUP].double()
    mean, length = (torch.tensor(each[view.layer][head]).double() for each in (numbers.mean, numbers.length))
    centre, turned = torch.complex(mean[:HALF], mean[HALF:]), torch.complex(key[:, :HALF], key[:, HALF:])
    ahead = int(view.next_position[sample, 0]) + 2.0 ** torch.arange(17)[:, None]
    queries = centre * (1j * ahead * 100.0 ** -(2 * torch.arange(HALF).double() / WIDTH)).exp()
    beside = (length.view(2, HALF) - centre.abs()).clamp(min=0).mean(0) * turned.abs()
    return ((queries.mean(0) * turned.conj()).real + beside).sum(-1).float()


@pytest.mark.parametrize(("pad", "dtype"), RUNS)
def test_triattention_is_a_sum_over_frequencies_and_distances(pad, dtype):
    method = methods()[0]
    for view in layer_views(list(PROMPTS.values()), method.needs, pad, dtype=dtype):
        found = method.score(view).scores_BhN
        for sample, entries in enumerate(view.entries_BN):
            each = torch.stack([foretold(method, view, sample, head)[entries] for head in range(HEADS)])
            each = (each - each.mean(-1, keepdim=True)) / each.std(-1, correction=0, keepdim=True)
            expected = each.view(KV_HEADS, GROUP, -1).amax(1)
            torch.testing.assert_close(found[sample][:, entries], expected, atol=5e-4, rtol=5e-4)


def repeated(keys, alike):
    """Mean similarity of each key of a head to all others, the latest one that is alike left out of each row."""
    unit = keys.float() / keys.float().norm(dim=-1, keepdim=True)
    similar = (unit @ unit.T).fill_diagonal_(0)
    for row in similar:
        row[(row > alike).nonzero()[-1:, 0]] = 0
    return similar.mean(0).softmax(0)


@pytest.mark.parametrize(("pad", "dtype"), RUNS)
def test_rkv_is_attention_less_redundancy(pad, dtype):
    method = methods()[1]
    for view in layer_views([PROMPTS["context"], PROMPTS["image last"]], method.needs, pad, dtype=dtype):
        found = method.score(view)
        for sample, entries in enumerate(view.entries_BN):
            keys, queries = view.key_BhNd[sample][:, entries].float(), view.query_BHNd[sample][:, entries].float()
            before = keys.shape[1] - 3
            for head, own in enumerate(keys):
                logits = queries[head * GROUP : (head + 1) * GROUP, before:] @ own[:before].T
                paid = (logits.amax(0) * view.scale).softmax(-1).mean(0)
                pooled = torch.stack([paid[max(i - 1, 0) : i + 2].amax() for i in range(before)])
                expected = -0.7 * repeated(own, 0.2)
                expected[:before] += 0.3 * pooled
                torch.testing.assert_close(found.scores_BhN[sample, head, entries], expected, atol=1e-5, rtol=1e-4)
            assert found.protected_BN[sample, entries].tolist() == [False] * before + [True] * 3


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
def test_heads_that_are_rows_score_alike(method):
    """While tokens are decoded a row is one head of one sample."""
    (prompt,) = layer_views([PROMPTS["context"]], method.needs, layers=1)
    length = prompt.key_BhNd.shape[2]
    key, query = prompt.key_BhNd[0][:, None], prompt.query_BHNd[0].view(KV_HEADS, GROUP, length, WIDTH)[:, :, -5:]
    online = View(
        0, query, key, key, torch.full((KV_HEADS, length), int(Region.GENERATED)), prompt.scale, method.needs,
        place_BN=torch.arange(length).expand(KV_HEADS, -1), seen_B=torch.full((KV_HEADS,), length), heads=KV_HEADS,
        rotate=rope, next_position=prompt.next_position.expand(KV_HEADS, 1), budget=lambda: torch.tensor([20, 20]),
    )  # fmt: skip
    torch.testing.assert_close(method.score(online).scores_BhN[:, 0], method.score(prompt).scores_BhN[0])


def test_centres_are_means_of_unturned_queries():
    family, queries = text_family(layers=2), {0: [], 1: []}
    backbone = CompressedBackbone(family, build_reducer("none")).eval()
    batches = [text_batch([(20, 4, 0), (11, 3, 0)], seed=1), text_batch([(9, 2, 0)], pad_left=True, seed=2)]
    found = CentreCalibrator().numbers(backbone, batches)

    def observe(layer, query, key, value, scale, rows):
        rotation, half = family.rotation(layer, rows.position), query.shape[-1] // 2
        for sample, row in rows.visible_BM.nonzero().tolist():
            turned = torch.complex(query[sample, :, row, :half], query[sample, :, row, half:])
            cos, sin = rotation.cos_BNr[sample, row, :half], rotation.sin_BNr[sample, row, :half]
            queries[layer].append(turned * torch.complex(cos, -sin))

    for batch in batches:
        backbone.run(batch, pad_left=True, observer=observe)
    for layer, each in queries.items():
        centre, length = torch.stack(each).mean(0), torch.stack(each).abs().mean(0)
        own = torch.cat([centre.real, centre.imag], -1), length.repeat(1, 2)
        for table, expected in zip((found.mean, found.length), own, strict=True):
            torch.testing.assert_close(torch.tensor(table[layer]), expected, atol=1e-5, rtol=1e-4)
    assert "concentration" in found.words()


def test_what_does_not_fit_is_refused():
    own = settings_for("triattention")
    made = build_eviction("triattention", **own).calibrated
    with pytest.raises(ValueError, match=r"make its own: subtoken-train calibrate triattention"):
        made.check_backbone("qwen2", "1" * 64, 3, KV_HEADS, WIDTH)
    with pytest.raises(ValueError, match="3 layers of 4 heads of width 8, and the backbone 3 of"):
        made.check_backbone(NOBODY.model_type, NOBODY.digest, 3, 3, WIDTH)
    with pytest.raises(ValueError, match="'subtoken-train calibrate triattention' writes one"):
        build_eviction("triattention").check_shape(3, KV_HEADS, WIDTH)
    refuses("must hold a table for every layer, all of one shape", QueryCentres, [[[1.0, 2.0]]], [[[1.0, 2.0, 3.0]]])
    for method in (build_eviction("triattention", window=8, **own), build_eviction("rkv", window=8)):
        (view,) = layer_views([[int(Region.CONTEXT)] * 20], method.needs, layers=1)
        candidates = Candidates([view.regions_BN], [view.entries_BN], torch.tensor([[5]]))
        with pytest.raises(ValueError, match=rf"{method.name} window=8 is larger than the budget of 5 entries"):
            method.keep([method.score(view)], candidates)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_positions_that_depend_on_the_length_are_refused(kind):
    rotary = SimpleNamespace(rope_type=kind)
    family = SimpleNamespace(length_dependent=True, decoder=SimpleNamespace(rotary_emb=rotary))
    with pytest.raises(ValueError, match=f"cannot foretell attention under '{kind}' positions"):
        CentreCalibrator().check(SimpleNamespace(family=family))

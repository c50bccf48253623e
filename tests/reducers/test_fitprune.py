"""FitPrune: the release's golden block and tables, a plain reference, calibrations, and what is refused."""

from fractions import Fraction
from itertools import accumulate

import pytest
import torch

from subtoken_train.families.family import shapes_digest
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.fitprune import PUBLISHED, PruneSchedules, attention_masses
from subtoken_train.types import Identity, Region
from subtoken_train.view.view import View
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import compress, gqa_family, make_batch, only_sample, sharpen
from tests.support.kvzap_files import written

MIXED = [(1, 9), (2, 7), (0, 12)]
SHARES = [[1, 0.75, 0.75, 0.5], [1, 0.5, 0.25, 0.25]]  # averages 0.75 and 0.5


def identity(family):
    return Identity("made/here", None, "llava", shapes_digest(family))


@pytest.fixture
def file(tmp_path, tiny_family):
    return written(tmp_path / "fit.json", "fitprune", PruneSchedules(SHARES), identity(tiny_family))


def view_of(regions, attention, count, last):
    """A cut's view of one layer's attention [B, H, N, N]."""

    def blocks(marks_BN):
        for row in range(marks_BN.shape[1]):
            yield torch.where(marks_BN[:, row : row + 1], row, -1), attention[:, :, row : row + 1]

    last_B, counts = (torch.full((len(regions),), number) for number in (last, count))
    unread = torch.zeros_like(regions).bool()
    return View(
        layer=1, regions_BN=regions, protected_BN=unread, rank_position_B=last_B, count_B=counts, attention=blocks
    )


def test_golden_block(shared):
    params, tensors = load(shared, "fitprune")
    system, visual = params["system_tokens"], params["n_visual"]
    length = tensors["attn_weights"].shape[-1]
    regions = torch.full((len(tensors["attn_weights"]), length), int(Region.QUERY))
    regions[:, :system], regions[:, system : system + visual] = Region.SYSTEM, Region.VISUAL
    view = view_of(regions, tensors["attn_weights"], visual - params["n_delete"], length - 1)
    self_BN, cross_BN, asks_B = attention_masses(view)
    image = slice(system, system + visual)
    assert asks_B.all()
    near("fitprune", "fitprune: self score", self_BN[0, image], tensors["self_score"], rtol=1e-5)
    # the release leaves out the number of text rows, which ranks alike
    ratio = tensors["cross_score"] / cross_BN[0, image]
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-5)
    alike("fitprune", "fitprune", build_reducer("fitprune", 0.5).cut(view).keep_BM[0], tensors["keep_mask"])


def test_golden_tables(shared):
    tensors = load(shared, "fitprune")[1]
    alike("fitprune", "fitprune: published counts", torch.tensor(PUBLISHED), tensors["delete_scheme_table"][1:])
    for row in PUBLISHED:
        held = list(accumulate(row[:-1], lambda left, gone: left - gone, initial=576))
        share = Fraction(sum(held), 32 * 576)
        reducer = build_reducer("fitprune", float(share))
        assert sum(abs(a - b) for a, b in zip(reducer.layer_tokens(576, 32), held, strict=True)) <= 32
        more = build_reducer("fitprune", min(1.0, float(share) + 0.02)).layer_tokens(576, 32)
        assert sum(more) > sum(held)


@pytest.mark.parametrize("ratio", [0.95, 0.6, 0.5, 0.25, 0.13])
def test_the_average_is_the_keep_ratio(ratio):
    shares = build_reducer("fitprune", ratio).layer_shares(32)
    assert sum(shares) / 32 == Fraction(str(ratio))
    assert shares == sorted(shares, reverse=True)
    assert build_reducer("fitprune", 1.0).layer_tokens(576, 32) == [576] * 32


def by_the_release(family, batch, counts):
    """One sample: rows of every layer and the last output, by loops over transformers' eager attention."""
    hidden, regions = family.embed(batch)[0], batch.regions_BN[0].tolist()
    rows, asks, held = list(range(len(regions))), int(batch.rank_position_B[0]), []
    for layer, count in enumerate([*counts[1:], None]):
        held.append(rows)
        block, position = family.decoder.layers[layer], torch.tensor(rows)[None]
        attention, normed = block.self_attn, block.input_layernorm(hidden[None])
        query, key = (
            made(normed).view(1, len(rows), -1, attention.head_dim).transpose(1, 2)
            for made in (attention.q_proj, attention.k_proj)
        )
        query, key = family.rotate(layer, query, key, family.decoder.rotary_emb(normed, position))
        logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * attention.head_dim**-0.5
        later = torch.ones(len(rows), len(rows)).triu(1).bool()
        largest = logits.masked_fill(later, -torch.inf).softmax(-1)[0].amax(0)
        seen = torch.ones(1, len(rows), dtype=torch.bool)
        hidden = family.run_layers(hidden[None], seen, position, start=layer, stop=layer + 1)[0]
        visual = [i for i, n in enumerate(rows) if regions[n] == Region.VISUAL]
        if count is None or not visual:
            continue
        after = [i for i, n in enumerate(rows) if i > visual[0] and i not in visual and n <= asks]
        score = largest[visual].sum(0) * largest[after].sum(0)
        best = sorted(visual, key=lambda i: -float(score[i]))[:count]
        keep = sorted({i for i in range(len(rows)) if i not in visual} | set(best))
        hidden, rows = hidden[keep], [rows[i] for i in keep]
    return held, hidden


@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_layers_are_the_releases(tiny_family, file, pad_left):
    sharpen(tiny_family)
    batch = make_batch(MIXED, pad_left)
    backbone = compress(tiny_family, name="fitprune", keep_ratio=0.5, calibration=file)
    result = backbone.run(batch, pad_left=pad_left)
    for sample, tokens in enumerate((64, 128, 0)):
        counts = [int(tokens * share) for share in SHARES[1]]
        held, hidden = by_the_release(tiny_family, only_sample(batch, sample), counts)
        first = int((batch.regions_BN[sample] == Region.PADDING).sum()) if pad_left else 0
        for expected, (_, _, rows) in zip(held, result.spans, strict=True):
            assert (rows.index_BM[sample, rows.visible_BM[sample]] - first).tolist() == expected
        assert torch.allclose(result.hidden_BMD[sample, result.rows.visible_BM[sample]], hidden, atol=1e-5)


def test_a_calibration_of_another_backbone_is_refused(tiny_family, tmp_path):
    numbers = PruneSchedules(SHARES)
    other = written(tmp_path / "other.json", "fitprune", numbers, identity(gqa_family()))
    with pytest.raises(ValueError, match=r"this backbone is another one .*subtoken-train calibrate fitprune"):
        compress(tiny_family, name="fitprune", keep_ratio=0.6, calibration=other)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[0.9, 0.5]], r"shares\[0\] must start at 1 and never rise"),
        ([[1, 0.5, 0.6]], r"shares\[0\] must start at 1 and never rise"),
        ([[1, 0.0]], r"shares\[0\] ends at 0; the last layer holds something"),
        ([[1, 0.5], [1, 0.7]], r"rows of falling averages below 1"),
        ([[1, 1.0]], r"rows of falling averages below 1"),
        ([[1, float("nan")]], r"shares\[0\]\[1\] is nan"),
    ],
)
def test_numbers_of_a_file_are_checked(shares, message):
    with pytest.raises(ValueError, match=message):
        PruneSchedules(shares)

"""Prompts that end with their image: its last row is where the next token is read from, so it is never dropped."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.types import Region
from tests.support.helpers import compress, only_sample
from tests.support.truth_models import family_of, prompts

A, V, P = int(Region.ANSWER), int(Region.VISUAL), int(Region.PADDING)
REDUCTIONS = [
    {"name": "fastv", "stage": "embeds", "layer": 2},
    {"name": "fastv", "stage": "decoder", "layer": 1},
    {"name": "visionzip"},
    {"name": "random"},
    {"name": "uniform"},
    {"name": "cdpruner"},
    {"name": "dart", "stage": "decoder", "layer": 1},
    {"name": "vispruner"},
]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(map(str, r.values())))
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_answers_after_an_image_are_predicted_from_its_last_row(name, reduction, pad_left):
    """In training too: the image's last token stays, inside the budget, and the answer keeps its positions."""
    family = family_of(name)
    batch = prompts(family, "last", pad_left)
    answer = torch.full((3, 2), 11)
    joined = [torch.cat(pair, 1) for pair in ((batch.input_ids_BN, answer), (batch.regions_BN, torch.full((3, 2), A)))]
    if not pad_left:  # the answer stands right after the prompt
        for i, count in enumerate((batch.regions_BN != P).sum(-1).tolist()):
            for each in joined:
                each[i] = torch.cat([each[i, :count], each[i, -2:], each[i, count:-2]])
    batch.input_ids_BN, batch.regions_BN = joined
    batch.labels_BN = torch.where(batch.regions_BN == A, batch.input_ids_BN, -100)
    backbone = compress(family, keep_ratio=0.25, **reduction).eval()
    result = backbone.run(batch, pad_left=pad_left)
    own, anew = family.positions(batch), name == "llava" and reduction["name"] in ("visionzip", "vispruner")
    for i in range(3):
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        visual = int((batch.regions_BN[i] == V).sum())
        assert int((batch.regions_BN[i, kept] == V).sum()) == backbone.reducer.kept_tokens(visual) or visual > 16
        if anew:
            continue
        place = kept.tolist().index(int((batch.regions_BN[i] == A).long().argmax()))
        assert kept[place - 1] == kept[place] - 1
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)

"""A family's logits and answers beside those of the transformers model that it wraps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from subtoken_train.families.family import Family
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.types import Batch
from tests.support.helpers import compress


@torch.no_grad()
def check_logits(family: Family, given: Mapping[str, Tensor], batch: Batch, side: str) -> None:
    """Neutral settings give the model's logits bit for bit, a reducer that keeps all of them to 1e-5.

    ``given`` is the processor's output, padded on ``side``, and ``batch`` what the family makes of it.
    """
    seen = given["attention_mask"].bool()
    counted = {"position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    expected = family.model(**given, **({} if family.tower_positions == "mrope" else counted)).logits[seen]
    backbone = compress(family)
    assert torch.equal(backbone.logits(backbone.run(batch))[seen], expected)
    forced = compress(family, name="fastv", keep_ratio=1.0)
    got = forced.logits(forced.run(batch, pad_left=side == "left", force_gather=True))[seen]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def check_answers(family: Family, given: Mapping[str, Tensor], **settings: int) -> None:
    """Greedy answers are the model's own, token for token."""
    asked = {**given, "max_new_tokens": 8, "do_sample": False, **settings}
    expected = family.model.generate(**asked)
    assert torch.equal(SubTokenModel.around(compress(family)).generate(**asked), expected)

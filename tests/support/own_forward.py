"""A family's logits and answers beside those of the transformers model that it wraps."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

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


def eager_calls(tower: Any, attention: Any, run: Callable[[], Any], monkeypatch: Any) -> list[tuple[Tensor, Tensor]]:
    """Weights and keys of each call of a tower's attention module, by transformers' eager attention."""
    module, seen = import_module(type(attention).__module__), []
    original = module.eager_attention_forward

    def recording(own, query, key, *args, **options):
        output, weights = original(own, query, key, *args, **options)
        if own is attention:
            seen.append((weights, key))
        return output, weights

    monkeypatch.setattr(module, "eager_attention_forward", recording)
    tower.set_attn_implementation("eager")
    run()
    tower.set_attn_implementation("sdpa")
    return seen

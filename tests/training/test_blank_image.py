"""With a blank image a text-only batch calls exactly what a batch with images calls, in the same order."""

from __future__ import annotations

import torch

from subtoken_train.routing import RoutingConfig
from subtoken_train.training.sharding import see_blank_image
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

REDUCERS = [
    {},
    {"name": "random", "keep_ratio": 0.5},
    {"name": "fastv", "keep_ratio": 0.25},
    {"name": "fastv", "keep_ratio": 0.25, "stage": "decoder"},
    {"name": "visionzip", "keep_ratio": 0.25},
    {"name": "visionzip", "keep_ratio": 1.0},
    {"name": "sparsevlm", "keep_ratio": 0.6},
]
ROUTING = RoutingConfig(num_groups=4, kept_groups=1)


def calls(parts, batch) -> list[str]:
    """Every module that a training pass calls, in order."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: seen.append(name))
        for name, module in parts.named_modules()
        if name and not list(module.children())
    ]
    see_blank_image(parts, batch)
    parts.logits(parts.run(batch))
    for hook in hooks:
        hook.remove()
    return seen


def named(reducer) -> str:
    return "-".join(str(value) for value in reducer.values()) or "none"


@sampled("reducer", REDUCERS, every=3, ids=named)
def test_llava(tiny_family, reducer):
    parts = compress(tiny_family, ROUTING, **reducer)
    with_images, text = make_batch([(1, 6), (2, 5)]), make_batch([(0, 7), (0, 4)])
    assert text.pixel_values is None
    assert calls(parts, text) == calls(parts, with_images)


@sampled("reducer", REDUCERS, every=3, ids=named)
def test_qwen(tmp_path, reducer):
    family, records = qwen_family(), qwen_records(tmp_path)
    parts = compress(family, ROUTING, **reducer)
    assert calls(parts, qwen_batch(family, records[2:])) == calls(parts, qwen_batch(family, records[:2]))


def test_it_changes_nothing(tiny_family):
    parts = compress(tiny_family, ROUTING, name="visionzip", keep_ratio=0.25)
    text = make_batch([(0, 7), (0, 4)])
    before = parts.logits(parts.run(text))
    see_blank_image(parts, text)
    assert torch.equal(parts.logits(parts.run(text)), before)

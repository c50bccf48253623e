"""Steps that read pages, against a recompute that masks what each step did not choose; bytes; batches, beams, turns."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, only_sample
from tests.support.reference import recompute
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL as CELL
from tests.support.truth_cells import backbone_of, decoded

PAGES = {"page_size": 4, "least_pages": 1, "dense_layers": 1}


def reading(keep, **settings):
    return Compression(build_eviction("quest_steps", **PAGES | settings), keep)


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize("pad_left", [False, True])
@sampled("keep", [0.1, 0.3], every=2)
@torch.no_grad()
def test_every_step_reads_the_pages_that_it_chooses(keep, pad_left, protocol):
    """Long contexts of unlike lengths, grouped heads; other steps choose other pages."""
    backbone = backbone_of(CELL)
    batch = text_batch([(120, 6, 0), (61, 9, 0), (40, 1, 0)], pad_left)
    got = decoded(backbone, batch, 8, reading(keep), protocol)
    for sample, (truth, tokens) in enumerate(zip(got.truths, got.tokens_BT, strict=True)):
        expected = recompute(backbone, truth, tokens[:-1])
        assert (got.logits_BTV[sample] - expected).abs().max() < 1e-4
        for layer in truth.layers:
            layer.pages = None
        assert (got.logits_BTV[sample] - recompute(backbone, truth, tokens[:-1])).abs().max() > 1e-3


@torch.no_grad()
def test_a_sample_reads_what_it_reads_alone():
    backbone = backbone_of(CELL)
    batch = text_batch([(50, 6, 0), (33, 9, 0), (21, 4, 0)])
    together = generate_batch(backbone, batch, max_new_tokens=6, compression=reading(0.3))
    for i, ours in enumerate(together):
        (alone,) = generate_batch(backbone, only_sample(batch, i), max_new_tokens=6, compression=reading(0.3))
        assert ours.token_ids == alone.token_ids
        assert ours.unread_bytes == alone.unread_bytes > 0


@pytest.mark.parametrize("kv_dtype", ["model", "int8", "int4"])
@torch.no_grad()
def test_a_budget_of_everything_reads_everything(kv_dtype):
    backbone = backbone_of(CELL)
    batch = text_batch([(50, 6, 0), (33, 9, 0)])
    whole = Compression(build_eviction("quest_steps", **PAGES), 1.0, kv_dtype=kv_dtype)
    ours = generate_batch(backbone, batch, max_new_tokens=6, compression=whole)
    plain = generate_batch(backbone, batch, max_new_tokens=6, compression=Compression(kv_dtype=kv_dtype))
    for own, its in zip(ours, plain, strict=True):
        assert (own.token_ids, own.kv_bytes, own.unread_bytes) == (its.token_ids, its.kv_bytes, 0)


@torch.no_grad()
def test_the_report_tells_what_is_stored_and_what_is_read():
    family = text_family(max_position_embeddings=512)
    model = SubTokenModel.around(compress(family), reading(0.25, dense_layers=1))
    ids = torch.randint(10, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    report, pages, entry = model.cache_report(), 300 // 4, family.shape.token_bytes // family.shape.num_layers
    # 236 entries are context, 64 and the last row's are not; 59 pages of 4: budget 59, of which the last page's 0
    assert report.payload_bytes == 3 * 300 * entry
    assert report.unread_bytes == 2 * entry * 4 * (pages - 14 - 16)
    assert report.index_bytes == 2 * (pages * entry + pages)
    held = report.total_bytes - report.slack_bytes
    assert f"; a decoding step reads {held - report.unread_bytes:,} of them" in str(report)


def test_beams_take_their_pages_along():
    family = text_family(max_position_embeddings=512)
    ids = torch.randint(10, 60, (2, 150), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    both = SubTokenModel.around(compress(family), reading(0.25)).generate(input_ids=ids, **settings)
    settings["attention_mask"] = settings["attention_mask"][:1]
    for i in range(2):
        alone = SubTokenModel.around(compress(family), reading(0.25)).generate(input_ids=ids[i : i + 1], **settings)
        assert torch.equal(both[i, : alone.shape[1]], alone[0])


@pytest.mark.parametrize(
    ("compression", "routing", "words"),
    [
        (reading(0.5), RoutingConfig("linear", num_groups=8, kept_groups=3), "reads pages of whole values.*selector"),
        (Compression(build_eviction("quest_steps"), 9000, "bytes"), None, "frees no bytes.*a share such as 0.25"),
        (Compression(build_eviction("quest_steps"), 0.5, key_channels=0.5), None, "it reads pages of whole keys"),
        (Compression(build_eviction("quest_steps"), 0.5, merge="pivot"), None, "drops nothing that could be merged"),
    ],
)
def test_what_it_does_not_go_with(compression, routing, words):
    backbone = compress(text_family(), routing).eval()
    with pytest.raises(ValueError, match=words):
        generate_batch(backbone, text_batch([(31, 5, 0)]), max_new_tokens=1, compression=compression)

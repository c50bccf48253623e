"""KVzip's passes: against a plain model that reads the context and a task as one sequence; positions; its limit."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine import second_pass as module
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.second_pass import rows_of_task, task_tokens
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions.kvzip import ANSWER, FIRST, HINT, LATER, KVzip
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.prefill import prefill
from subtoken_train.types import Region
from tests.support.chats import CHATML, byte_level
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL as CELL
from tests.support.truth_cells import backbone_of, difference
from tests.support.truth_models import family_of, prompts


def plain_scores(family, ids, chunk, sinks):
    """Scores of a context whose first token is no part of it, [h, N] per layer, whole matrices, one chunk at a time."""
    model, tokens = family.model, lambda text: family.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = [torch.zeros(model.config.num_key_value_heads, len(ids)) for _ in model.model.layers]
    for start in range(1, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        said = tokens(FIRST) if start == 1 else [*tokens(LATER), *ids[max(1, start - HINT) : start]]
        task = [*said, *tokens(ANSWER.otherwise), *ids[start:stop]]
        out = model(torch.tensor([[*ids, *task]]), output_hidden_states=True, use_cache=False)
        columns = [*(i for i in range(sinks) if not start <= i < stop), *range(start, stop)]
        columns += range(len(ids), len(ids) + len(task))
        position = model.model.rotary_emb(out.hidden_states[0], torch.arange(len(ids) + len(task))[None])
        for layer, block in enumerate(model.model.layers):
            normed = block.input_layernorm(out.hidden_states[layer])
            query, key = (
                project(normed).unflatten(-1, (-1, 16)).transpose(1, 2)
                for project in (block.self_attn.q_proj, block.self_attn.k_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *position)
            group = query.shape[1] // key.shape[1]
            logits = query[0, :, len(ids) :] @ key[0].repeat_interleave(group, 0)[:, columns].mT / 4
            hidden = torch.ones(len(task), len(columns)).triu(len(columns) - len(task) + 1).bool()
            own = logits.masked_fill(hidden, -torch.inf).softmax(-1)[..., -len(task) - (stop - start) : -len(task)]
            found[layer][:, start:stop] = own.amax(1).view(-1, group, stop - start).amax(1)
    return found


def scored(backbone, batch, method, monkeypatch):
    """Scores of every layer after all passes, [B, h, N]."""
    passes = []

    class Noting(EvictionPass):
        def __init__(self, *args):
            super().__init__(*args)
            passes.append(self)

    monkeypatch.setattr("subtoken_train.inference.prefill.EvictionPass", Noting)
    cache = PackedCache(backbone.family.shape.num_layers)
    prefill(backbone, batch, cache, Compression(method, 0.5))
    return [passes[0].scores[layer].scores_BhN for layer in sorted(passes[0].scores)]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize(("chunk", "sinks", "block"), [(2048, 4, 7), (7, 4, 1024), (7, 0, 5), (30, 1, 1024)])
@torch.no_grad()
def test_scores_are_those_of_a_plain_model(monkeypatch, chunk, sinks, block, pad_left):
    """GQA, a batch of unequal contexts padded on either side, chunks that divide nothing, rows in blocks."""
    monkeypatch.setattr(module, "BLOCK", block)
    backbone = backbone_of(CELL)
    batch = text_batch([(30, 0, 0), (17, 0, 0), (24, 0, 0)], pad_left)
    scores = scored(backbone, batch, KVzip(chunk=chunk, sinks=sinks), monkeypatch)
    for i in range(3):
        real = batch.regions_BN[i] != Region.PADDING
        expected = plain_scores(backbone.family, batch.input_ids_BN[i, real].tolist(), chunk, sinks)
        for ours, theirs in zip(scores, expected, strict=True):
            assert torch.allclose(ours[i][:, real][:, 1:], theirs[:, 1:], atol=1e-5)
            assert (ours[i][:, real][:, 0] == 1).all()


@sampled(
    ("family", "reducer", "selector", "batch", "protocol", "settings"),
    [
        ("llama", "none", "linear", "three_left", "context_first", {"chunk": 9}),
        ("llama", "none", "none", "text_right", "query_aware", {"chunk": 9, "pool": "layer", "level": "head"}),
        ("qwen2", "quest", "none", "text_right", "query_aware", {"chunk": 9, "lower_bound": 0}),
        ("llava_gqa", "fastv_decoder", "gated", "three_right", "query_aware", {"chunk": 9}),
        ("llava_gqa", "fastv_decoder", "gated", "three_right", "context_first", {"pool": "layer"}),
        ("qwen2_5_vl", "visionzip", "mlp", "three_left", "context_first", {"chunk": 9, "level": "head"}),
        ("qwen2_5_vl", "none", "none", "text_left", "query_aware", {"chunk": 9, "pool": "head"}),
    ],
    every=7,
)
def test_packed_is_truth(family, reducer, selector, batch, protocol, settings):
    cell = {**CELL, "family": family, "reducer": reducer, "selector": selector, "batch": batch, "protocol": protocol}
    found = difference(cell, 4, Compression(KVzip(**settings), 0.4))
    assert found.fits("fp32"), found


@pytest.mark.parametrize("name", ["llama", "llava_gqa", "qwen2_5_vl"])
@torch.no_grad()
def test_rows_of_a_task(name):
    """Embeddings of the text and the context's own; positions go on after the prompt and keep an image's grid."""
    backbone = backbone_of({**CELL, "family": name})
    family, batch = backbone.family, prompts(family_of(name), "three", pad_left=False)
    use_packed_attention(family.decoder.config)
    result = backbone.run(batch, cache=DynamicCache(config=family.decoder.config), pad_left=True)
    plans = KVzip(chunk=10).tasks(batch.regions_BN)
    for plan in plans:
        task = rows_of_task(family, result, plan)
        assert task.rows_BS.sum(-1).tolist() == task_tokens(family, plan, batch.regions_BN).tolist()
        assert (task.position[..., task.rows_BS] >= result.rows.next_position.amin()).all()
        for b in range(3):
            marked, count = plan.about_BN[b], int(plan.about_BN[b].sum())
            again = task.rows_BS[b].nonzero()[-count:, 0] if count else []
            assert torch.equal(task.hidden_BSD[b, again], result.embeds_BND[b, marked])
            if count:
                moved = task.position[..., b, again] - result.rows.position[..., b, marked]
                assert moved.unique().numel() == 1
            before = task.position[..., b, : len(family.tokenizer(FIRST, add_special_tokens=False)["input_ids"])]
            assert (before[..., 0] == result.rows.next_position[..., b, 0]).all()
            assert (before.diff() == 1).all()


@pytest.mark.parametrize(("template", "system"), [(CHATML, 6), (CHATML, 0), (None, 6)])
@torch.no_grad()
def test_a_chat_template_opens_what_is_repeated(template, system):
    """Where a prompt has the template's beginning; after a raw one, and without a template, a newline does."""
    family = text_family(layers=1, vocab_size=400)
    family.processor = byte_level(template)
    backbone = compress(family).eval()
    batch = text_batch([(20, 0, 0)])
    length = batch.regions_BN.shape[1]
    batch.regions_BN[:, :system], batch.regions_BN[:, system:] = int(Region.SYSTEM), int(Region.CONTEXT)
    use_packed_attention(family.decoder.config)
    result = backbone.run(batch, cache=DynamicCache(config=family.decoder.config), pad_left=True)
    (plan,) = KVzip().tasks(batch.regions_BN)
    opening = "<|im_end|>\n<|im_start|>assistant\n" if template and system else "\n"
    ids = [
        tokens for text in (FIRST, opening) for tokens in family.tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    task = rows_of_task(family, result, plan)
    assert torch.equal(task.hidden_BSD[0, : len(ids)], family.token_states(torch.tensor(ids)))
    assert task.rows_BS.shape[1] == len(ids) + length - system == int(task_tokens(family, plan, batch.regions_BN))


def test_a_chunk_that_does_not_fit_is_scored_with_a_warning():
    family = text_family(layers=2, max_position_embeddings=120)
    batch, options = text_batch([(60, 5, 0), (20, 5, 0)]), {"max_new_tokens": 2}
    with pytest.warns(SubTokenWarning, match="past the 120 positions .*option chunk"):
        generate_batch(compress(family).eval(), batch, compression=Compression(KVzip(), 0.5), **options)
    fitting = Compression(KVzip(chunk=4), 0.5)
    assert generate_batch(compress(family).eval(), text_batch([(20, 5, 0)]), compression=fitting, **options)

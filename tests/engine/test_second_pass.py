"""The second pass against plain models that run a prompt and what follows as one sequence: KVCompose and KVzip."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine import second_pass as module
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.second_pass import rows_of_task, second_pass
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.kvzip import ANSWER, FIRST, HINT, LATER, KVzip
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.prefill import prefill
from subtoken_train.types import Region
from tests.support.chats import CHATML, byte_level
from tests.support.helpers import compress
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of
from tests.support.truth_models import family_of, prompts

KVCOMPOSE = build_eviction("kvcompose")


def scored(backbone, batch, method):
    """Scores of every layer after both passes, [B, h, N], and the eviction's pass."""
    family = backbone.family
    use_packed_attention(family.decoder.config)
    dense = DynamicCache(config=family.decoder.config)
    eviction = EvictionPass(Compression(method, 0.5), family, batch)
    result = backbone.run(batch, cache=dense, pad_left=True, observer=eviction.observe)
    before = [(layer.keys, layer.values) for layer in dense.layers]
    for task in eviction.tasks:
        second_pass(family, dense, result, task, eviction.observe_task)
    for layer, (keys, values) in zip(dense.layers, before, strict=True):
        assert layer.keys is keys
        assert layer.values is values
    return [eviction.scores[layer].scores_BhN for layer in range(len(before))], eviction


def release_scores(family, ids, value_norm=False):
    """The release, literally: the context, then the context again, whole matrices; [h, N] per layer."""
    config = LlamaConfig(**{**family.model.config.to_dict(), "attn_implementation": "eager"})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(family.model.state_dict())
    length, kv_heads = len(ids), config.num_key_value_heads
    cache = DynamicCache(config=config)
    out = model(torch.tensor([[*ids, *ids]]), **{CACHE: cache}, output_attentions=True)
    scores = []
    for layer, attention in enumerate(out.attentions):
        task = attention[0, :, length:, :length]  # rows of the repetition, columns of the context
        head = task.amax(1).view(kv_heads, -1, length).mean(1)
        if value_norm:
            head = head * cache.layers[layer].values[0, :, :length].norm(dim=-1)
        scores.append(head + head.mean(0))
    return scores


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("block", [7, 1024])
def test_scores_are_the_releases(monkeypatch, block, pad_left, value_norm):
    """GQA, a batch of unequal contexts padded on either side, rows in blocks that divide nothing."""
    monkeypatch.setattr(module, "BLOCK", block)
    backbone = backbone_of(PLAIN_CELL)
    assert backbone.family.shape.num_kv_heads < backbone.family.decoder.config.num_attention_heads
    batch = text_batch([(30, 0, 0), (17, 0, 0), (24, 0, 0)], pad_left)
    scores, eviction = scored(backbone, batch, build_eviction("kvcompose", value_norm=value_norm))
    assert eviction.again_B.all()
    for i in range(3):
        real = batch.regions_BN[i] != Region.PADDING
        expected = release_scores(backbone.family, batch.input_ids_BN[i, real].tolist(), value_norm)
        for ours, theirs in zip(scores, expected, strict=True):
            assert torch.allclose(ours[i][:, real], theirs, atol=1e-5)


def test_a_question_is_the_task_where_there_is_one():
    """Only samples that end with their context are scored by the second pass, in one batch with others."""
    backbone = backbone_of(PLAIN_CELL)
    batch = text_batch([(30, 0, 0), (20, 6, 0)])
    auto, eviction = scored(backbone, batch, KVCOMPOSE)
    assert eviction.again_B.tolist() == [True, False]
    aware, again = (scored(backbone, batch, build_eviction("kvcompose", task=x)) for x in ("aware", "agnostic"))
    assert build_eviction("kvcompose", task="aware").reads_question  # and is refused without one
    assert (aware[1].again_B.tolist(), again[1].again_B.tolist()) == ([False] * 2, [True] * 2)
    for layer, scores in enumerate(auto):
        assert torch.equal(scores[0], again[0][layer][0])
        assert torch.equal(scores[1], aware[0][layer][1])
        assert not torch.allclose(aware[0][layer][:, :, :20], again[0][layer][:, :, :20])


@pytest.mark.parametrize(
    ("method", "positions", "length", "fits", "words"),
    [
        (
            KVCOMPOSE,
            60,
            31,
            (build_eviction("kvcompose", task="causal"), 31),
            "; shorten the context, or use the option task=",
        ),
        (KVCOMPOSE, 60, 31, (KVCOMPOSE, 29), "'kvcompose' runs further rows"),
        (KVzip(), 120, 60, (KVzip(chunk=4), 20), "option chunk"),
    ],
)
def test_a_context_that_does_not_fit_twice_is_scored_with_a_warning(method, positions, length, fits, words):
    backbone = compress(text_family(layers=2, max_position_embeddings=positions)).eval()

    def answers(method, length):
        options = {"max_new_tokens": 2, "compression": Compression(method, 0.5), "protocol": "context_first"}
        return generate_batch(backbone, text_batch([(length, 5, 0)]), **options)

    with pytest.warns(SubTokenWarning, match=f"past the {positions} positions .*") as said:
        answers(method, length)
    assert words in str(said[0].message)
    assert answers(*fits)[0].token_ids


def sloped(model, ids, behind):
    """The output, and per layer the gradients in the last rows' attention outputs of their squared last states."""
    embeds, written, last = model.get_input_embeddings()(torch.tensor([ids])).detach(), [], []
    hooks = [each.self_attn.register_forward_hook(lambda *x: written.append(x[2][0])) for each in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0])))
    out = model(inputs_embeds=embeds.requires_grad_(), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    slopes = torch.autograd.grad(last[0][0, behind:].square().sum(), written)
    return out, [slope[0, behind:].norm(dim=-1) for slope in slopes]


def plain_scores(family, ids, method):
    """Scores of a context whose first token is no part of it, [h, N] per layer, whole matrices, one chunk at a time."""
    chunk, sinks = method.chunk, method.sinks
    model, tokens = family.model, lambda text: family.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = [torch.zeros(model.config.num_key_value_heads, len(ids)) for _ in model.model.layers]
    for start in range(1, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        said = tokens(FIRST) if start == 1 else [*tokens(LATER), *ids[max(1, start - HINT) : start]]
        task = [*said, *tokens(ANSWER.otherwise), *ids[start:stop]]
        out, slopes = sloped(model, [*ids, *task], len(ids))
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
            if method.name == "kvgrad":
                value = block.self_attn.v_proj(normed)[0, start:stop].unflatten(-1, (-1, 16)).transpose(0, 1)
                heads = zip(value.repeat_interleave(group, 0), block.self_attn.o_proj.weight.split(16, 1), strict=True)
                written_by = torch.stack([(one @ weight.T).norm(dim=-1) for one, weight in heads])
                own = own * written_by[:, None] * slopes[layer][:, None]
            found[layer][:, start:stop] = own.amax(1).view(-1, group, stop - start).amax(1)
    return found


def chunk_scores(backbone, batch, method, monkeypatch):
    """Scores of every layer after all passes, [B, h, N]."""
    passes = []

    class Noting(EvictionPass):
        def __init__(self, *args):
            super().__init__(*args)
            passes.append(self)

    monkeypatch.setattr("subtoken_train.inference.prefill.EvictionPass", Noting)
    prefill(backbone, batch, PackedCache(backbone.family.shape.num_layers), Compression(method, 0.5))
    return [passes[0].scores[layer].scores_BhN for layer in sorted(passes[0].scores)]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize(
    ("method", "block"),
    [
        *((KVzip(chunk=chunk, sinks=sinks), block) for chunk, sinks, block in [(2048, 4, 7), (7, 4, 1024), (7, 0, 5)]),
        *((build_eviction("kvgrad", chunk=chunk), 7) for chunk in (256, 7)),
    ],
)
def test_scores_are_those_of_a_plain_model(monkeypatch, method, block, pad_left):
    """GQA, a batch of unequal contexts padded on either side, chunks that divide nothing, rows in blocks."""
    monkeypatch.setattr(module, "BLOCK", block)
    backbone = backbone_of(PLAIN_CELL)
    batch = text_batch([(30, 0, 0), (17, 0, 0), (24, 0, 0)], pad_left)
    scores = chunk_scores(backbone, batch, method, monkeypatch)
    for i in range(3):
        real = batch.regions_BN[i] != Region.PADDING
        expected = plain_scores(backbone.family, batch.input_ids_BN[i, real].tolist(), method)
        for ours, theirs in zip(scores, expected, strict=True):
            torch.testing.assert_close(ours[i][:, real][:, 1:], theirs[:, 1:].detach(), atol=1e-5, rtol=1e-4)
            assert (ours[i][:, real][:, 0] == 1).all()


@pytest.mark.parametrize("name", ["llama", "llava_gqa", "qwen2_5_vl"])
def test_rows_of_a_task(name):
    """Embeddings of the text and the context's own; positions go on after the prompt and keep an image's grid."""
    backbone = backbone_of({**PLAIN_CELL, "family": name})
    family, batch = backbone.family, prompts(family_of(name), "three", pad_left=False)
    use_packed_attention(family.decoder.config)
    result = backbone.run(batch, cache=DynamicCache(config=family.decoder.config), pad_left=True)
    for plan in KVzip(chunk=10).tasks(batch.regions_BN):
        task = rows_of_task(family, result, plan)
        assert (task.position[..., task.rows_BS] >= result.rows.next_position.amin()).all()
        for b in range(3):
            marked, count = plan.about_BN[b], int(plan.about_BN[b].sum())
            again = task.rows_BS[b].nonzero()[-count:, 0] if count else []
            assert torch.equal(task.hidden_BSD[b, again], result.embeds_BND[b, marked])
            if count:
                assert (task.position[..., b, again] - result.rows.position[..., b, marked]).unique().numel() == 1
            before = task.position[..., b, : len(family.tokenizer(FIRST, add_special_tokens=False)["input_ids"])]
            assert (before[..., 0] == result.rows.next_position[..., b, 0]).all()
            assert (before.diff() == 1).all()


@pytest.mark.parametrize(("template", "system"), [(CHATML, 6), (CHATML, 0), (None, 6)])
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
    ids = [it for text in (FIRST, opening) for it in family.tokenizer(text, add_special_tokens=False)["input_ids"]]
    task = rows_of_task(family, result, plan)
    assert torch.equal(task.hidden_BSD[0, : len(ids)], family.token_states(torch.tensor(ids)))
    assert task.rows_BS.shape[1] == len(ids) + length - system

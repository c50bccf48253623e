"""The truth about a packed cache: full recompute without any cache, in transformers' own eager attention.

From the prompt's pass it takes what was decided there (rows, kept entries, group masks, gates) and nothing that was
stored. Positions are counted here, from the whole prompt. Every sample runs alone, unpadded, through the decoder's own
``forward``; a registered attention function swaps the mask and scales the values, layer by layer, around
``eager_attention_forward`` of the model's file. Under ``context_first`` the rest of the prompt are tokens that come
after the context's pass.

Legend: B batch, N prompt rows of a sample, T generated tokens, L layers, H query heads, h key-value heads, d head
width, S value groups, V vocabulary.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import PromptPass
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.reducers.staged import Cut
from subtoken_train.types import Batch, LayerPlan, Plan, Region
from tests.support import plain_parts
from tests.support.plain_choices import merged_by_loop

NAME = "truth_eager"


@dataclass
class LayerTruth:
    """One layer of one sample: who sees whom, and what values are worth."""

    seen_N: Tensor  # rows that prompt rows see
    entries_hN: Tensor  # rows that generated tokens see
    factor_hNd: Tensor  # of values
    keys_hNd: Tensor  # of keys, for generated tokens, in the coordinates of ``turn_hdd`` where there are such
    merge: str  # what generated tokens read of dropped rows
    pages: plain_parts.PageTruth | None = None  # what they read, where they choose
    lost: list[tuple[int, Tensor]] = field(default_factory=list)  # (row, marks [h, row]): it and later ones see no more
    joins_N: Tensor | None = None  # whom rows join before this layer
    position_N: Tensor | None = None  # and where they stand in it
    fill: plain_parts.PlainFill = field(default_factory=plain_parts.PlainFill)  # what dropped groups read as
    held_hN: Tensor | None = None  # whose keys heads have; None: all
    centre_h1d: Tensor | None = None
    turn_hdd: Tensor | None = None  # about that centre
    cut_N: Tensor | None = None  # whose keys are cut
    storage: plain_parts.PlainStorage | None = None  # what rounds the prompt's entries for generated tokens

    def cut(self, key_hNd: Tensor) -> Tensor:
        """Keys of the prompt's rows without their cut channels."""
        if self.turn_hdd is None:
            return key_hNd * self.keys_hNd.to(key_hNd.dtype)
        apart = (key_hNd.float() - self.centre_h1d) @ self.turn_hdd
        return ((apart * self.keys_hNd) @ self.turn_hdd.mT + self.centre_h1d).to(key_hNd.dtype)

    def read_back(self, key_hNd: Tensor, value_hNd: Tensor, plain_hNd: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt's rows as tokens read them after they were stored; ``plain_hNd`` was routed."""
        there_hNd = self.factor_hNd != 0
        fill_hNd = self.fill.under(plain_hNd[None], torch.zeros(there_hNd.shape))[0]
        return self.storage.read(key_hNd, value_hNd, fill_hNd, there_hNd, self.entries_hN)


@dataclass
class SampleTruth:
    """One sample: the rows that enter layer 0, and every layer."""

    hidden_ND: Tensor
    position: Tensor  # of these rows and of the rest, [N + q] or [3, N + q]
    next_position: int
    rest_q: Tensor  # tokens of the prompt after those rows
    whole_N: Tensor  # rows that read whole values and all context
    layers: list[LayerTruth]
    deep: tuple[Tensor, list[Tensor]] | None = None  # the visual rows and what the first layers add to them
    closed_up: bool = False  # later tokens see entries as if they stood at 0, 1, 2, ...


@dataclass
class Tap:
    hidden: list[Tensor] = field(default_factory=list)
    batch: list[Batch] = field(default_factory=list)
    result: list[PromptPass] = field(default_factory=list)
    gates: dict[int, Tensor] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)


@contextmanager
def tapped(backbone: CompressedBackbone) -> Iterator[Tap]:
    tap, run = Tap(), backbone.run

    def noting(batch, *args, **kwargs):
        tap.batch.append(batch)
        tap.result.append(run(batch, *args, **kwargs))
        result, parts = tap.result[-1], [tap.hidden.pop()]
        rows = result.spans[0][2] if result.spans else result.rows
        while sum(part.shape[1] for part in parts) < rows.index_BM.shape[1]:  # in chunks
            parts.insert(0, tap.hidden.pop())
        tap.hidden.append(torch.cat(parts, 1))
        return result

    def entering(_, args):
        if len(tap.batch) > len(tap.result):  # not what is appended after the pass
            tap.hidden.append(args[0])

    handles = [backbone.family.decoder.layers[0].register_forward_pre_hook(entering)]
    for layer, gate in enumerate(() if backbone.bank is None else backbone.bank.gates):
        handles.append(gate.register_forward_hook(lambda _, __, out, layer=layer: tap.gates.update({layer: out})))
    backbone.run = noting
    try:
        with plain_parts.noting_cuts(backbone, tap.cuts):
            yield tap
    finally:
        del backbone.run
        for handle in handles:
            handle.remove()


def truths(
    backbone: CompressedBackbone, tap: Tap, plan: Plan, prompts: Batch, merge: str = "none"
) -> list[SampleTruth]:
    """Every sample of the tapped pass; ``plan``: what later tokens see, ``merge``: what becomes of dropped entries."""
    return [_sample(backbone, tap, plan, prompts, sample, merge) for sample in range(len(tap.hidden[-1]))]


def rounded(samples: list[SampleTruth], name: str, cache: PackedCache, feedback: list[Tensor]) -> list[SampleTruth]:
    depth = len(cache.layers)
    whole = [place < FORMATS[name].left or place >= depth - FORMATS[name].left for place in range(depth)]
    for number, sample in enumerate(samples):
        layers = zip(sample.layers, cache.layers, feedback or [None] * depth, whole, strict=True)
        for layer, packed, own, _ in (each for each in layers if not each[3]):
            turn = layer.centre_h1d, layer.turn_hdd
            layer.storage = plain_parts.plain_storage(FORMATS[name], packed, own, number, layer.cut_N, turn)
    return samples


def in_fp32(truth: SampleTruth) -> SampleTruth:
    deep = None if truth.deep is None else (truth.deep[0], [each.float() for each in truth.deep[1]])
    return replace(truth, hidden_ND=truth.hidden_ND.float(), deep=deep)


def closed_up(truth: SampleTruth) -> SampleTruth:
    """The same, after key re-rotation: what follows the kept entries stands right after them."""
    count, rows, rest = int(truth.layers[0].entries_hN[0].sum()), len(truth.hidden_ND), len(truth.rest_q)
    assert all(bool((layer.entries_hN.sum(-1) == count).all()) for layer in truth.layers)
    position = torch.cat([truth.position[:rows], count + torch.arange(rest)])
    return replace(truth, position=position, next_position=count + rest, closed_up=True)


def _placed(backbone: CompressedBackbone, tap: Tap, prompts: Batch, sample: int, origin: Tensor) -> dict[str, object]:
    """Positions of the rows and of the rest of the prompt, its tokens, and the first position after it."""
    reducer, own = backbone.reducer, tap.batch[-1].regions_BN[sample] != Region.PADDING
    position = plain_parts.prompt_positions(backbone.family, prompts, sample)
    real = prompts.input_ids_BN[sample, prompts.regions_BN[sample] != Region.PADDING]
    passed = int(own.sum())
    assert torch.equal(tap.batch[-1].input_ids_BN[sample, own], real[:passed])
    place = origin - int(own.long().argmax())
    anew = reducer.stage == "tower" and reducer.acts and backbone.family.tower_positions == "renumber"
    rest = real[passed:]
    if anew:  # VisionZip on LLaVA makes a shorter prompt
        position = torch.arange(len(origin) + len(rest))
    else:
        assert len(rest) or int(place[-1]) == len(real) - 1, "the row that the next token is read from was dropped"
        position = torch.cat([position[..., place], position[..., passed:]], -1)
    following = (
        len(origin) + len(rest)
        if anew
        else int(plain_parts.prompt_positions(backbone.family, prompts, sample).max()) + 1
    )
    return {"position": position, "next_position": following, "rest_q": rest}


def _sample(backbone: CompressedBackbone, tap: Tap, plan: Plan, prompts: Batch, sample: int, merge: str) -> SampleTruth:
    result, shape = tap.result[-1], backbone.family.shape
    first = result.spans[0][2] if result.spans else result.rows
    real = first.visible_BM[sample]
    origin, regions = first.index_BM[sample, real], first.regions_BM[sample, real]
    count, routed = len(origin), (regions == Region.VISUAL) | (regions == Region.CONTEXT)
    whole = torch.zeros(count, dtype=torch.bool)
    if result.kept:
        last = int(routed.nonzero()[-1]) if bool(routed.any()) else -1
        whole = (regions == Region.SYSTEM) | (torch.arange(count) <= last)
    layers, placed = [], _placed(backbone, tap, prompts, sample, origin)
    for layer, kept in enumerate(plan.layers):
        rows = result.rows if result.kept else next(r for start, stop, r in result.spans if start <= layer < stop)
        seen = torch.isin(origin, rows.index_BM[sample, rows.visible_BM[sample]])
        if result.kept:
            seen = result.kept[layer][sample, real]
        place = {int(row): i for i, row in enumerate(rows.index_BM[sample].tolist()) if rows.visible_BM[sample, i]}
        here = torch.tensor([place.get(int(row), -1) for row in origin])
        factor = torch.ones(count, shape.num_kv_heads, shape.head_dim)
        mask = None if result.state is None else result.state.masks.get(layer)
        if mask is not None:
            groups = mask[sample, here].float()
            if layer in tap.gates:
                groups = torch.where(routed[:, None], groups * tap.gates[layer][sample, here], groups)
            groups[here < 0] = 1
            factor = groups[:, _group_of_channel(backbone, groups.shape[-1])].view_as(factor)
        factor = factor.transpose(0, 1)
        layers.append(
            LayerTruth(seen, torch.zeros(shape.num_kv_heads, count).bool(), factor, torch.ones(factor.shape), merge)
        )
        if result.state is not None and layer in result.state.keys:
            layers[-1].held_hN = result.state.keys[layer][sample][:, real]
        layers[-1].fill = plain_parts.plain_fill(backbone, layer, routed & seen, mask)
        _check_plan(kept, mask, sample, rows.index_BM)
        for i, row in enumerate(kept.entries_BN[sample].tolist()):
            if row >= 0:
                keep_h1 = True if kept.heads_BNh is None else kept.heads_BNh[sample, i, :, None]
                layers[-1].entries_hN[:, origin == row] = keep_h1
        _note_cut(layers[-1], kept, sample, origin)
        layers[-1].joins_N = plain_parts.joined_targets(result, tap.cuts, sample, layer, origin)
        layers[-1].position_N = plain_parts.counted_anew(tap.cuts, layer, seen, placed["position"])
    start = int((tap.batch[-1].regions_BN[sample] != Region.PADDING).long().argmax())
    deep = plain_parts.deep_rows(
        backbone.family, prompts, sample, origin - start, plain_parts.joined_places(tap.cuts, sample, start)
    )
    return SampleTruth(hidden_ND=tap.hidden[-1][sample, real], whole_N=whole, layers=layers, deep=deep, **placed)


def _note_cut(truth: LayerTruth, kept: LayerPlan, sample: int, origin: Tensor) -> None:
    """Write down which channels of which keys are cut, and along which axes."""
    cut, truth.cut_N = kept.cut_keys, torch.zeros(len(origin), dtype=torch.bool)
    if cut is None:
        return
    for row in kept.entries_BN[sample, cut.entries_BN[sample]].tolist():
        truth.keys_hNd[:, origin == row] *= cut.channels_Bhd[sample, :, None]
        truth.cut_N |= origin == row
    if cut.turn is not None:
        truth.centre_h1d = cut.turn.centre_Bh1d[sample].float()
        truth.turn_hdd = reflected(cut.turn.mirrors_Bhdr[sample].float())


def reflected(mirrors_hdr: Tensor) -> Tensor:
    """The product of reflections at some vectors, one after the other, [h, d, d]."""
    product = torch.eye(mirrors_hdr.shape[1]).expand(len(mirrors_hdr), -1, -1)
    for vector_hd in mirrors_hdr.unbind(-1):
        unit_hd1 = (vector_hd / vector_hd.norm(dim=-1, keepdim=True))[..., None]
        product = product - 2 * product @ unit_hd1 @ unit_hd1.mT
    return product


def _check_plan(kept, mask: Tensor | None, sample: int, index_BM: Tensor) -> None:
    if kept.group_mask_BNS is None:
        return
    for i, row in enumerate(kept.entries_BN[sample].tolist()):
        if row >= 0:
            places = (index_BM[sample] == row).nonzero()[:, 0]
            assert any(torch.equal(kept.group_mask_BNS[sample, i], mask[sample, place]) for place in places)


def _group_of_channel(backbone: CompressedBackbone, num_groups: int) -> Tensor:
    shape = backbone.family.shape
    channel = torch.arange(shape.value_dim)
    if backbone.bank.config.layout == "per_head":
        return channel % shape.head_dim // (shape.head_dim // num_groups)
    return channel // (shape.value_dim // num_groups)


def _for_later(
    sample: SampleTruth, layer: LayerTruth, key: Tensor, value: Tensor, routed: Tensor, entries_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows as tokens after the prompt read them; the very ones where nothing differs."""
    count = len(layer.seen_N)
    if layer.merge != "none" or bool((layer.keys_hNd != 1).any()):
        plain, key, routed = (key[0, :, :count], routed[0, :, :count]), key.clone(), routed.clone()
        if layer.merge != "none":
            key[0, :, :count], routed[0, :, :count] = merged_by_loop(layer.merge, *plain, layer.entries_hN, entries_N)
            there = (layer.factor_hNd != 0).to(value.dtype)
            routed[:, :, :count] *= there
            routed[:, :, :count] += layer.fill.under(value, there)
        key[0, :, :count] = layer.cut(key[0, :, :count])
    if sample.closed_up:
        key = plain_parts.moved_keys(key, layer.entries_hN, sample.position, *FREQUENCIES[-1])
    if layer.storage is not None:
        read = layer.read_back(key[0, :, :count], routed[0, :, :count], value[0])
        key, routed = key.clone(), routed.clone()
        key[0, :, :count], routed[0, :, :count] = read
    return key, routed


_active: list[SampleTruth] = []
PLACES: list[Tensor] = []  # positions of all rows of the sample that runs
FREQUENCIES: list[tuple[Tensor, str]] = []  # radians a pair of channels turns by in a position, and the model's type


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Eager attention over all rows, the mask and the values being those of the layer."""
    sample = _active[-1]
    layer = sample.layers[module.layer_idx]
    eager = importlib.import_module(type(module).__module__).eager_attention_forward
    count, length = len(layer.seen_N), query.shape[2]
    allowed = torch.ones(length, length).bool().tril().repeat(key.shape[1], 1, 1)
    seen_hN = layer.seen_N[None] if layer.held_hN is None else layer.seen_N & layer.held_hN
    allowed[:, :count, :count] &= seen_hN[:, None] | sample.whole_N[:, None] | torch.eye(count).bool()
    allowed[:, count:, :count] = layer.entries_hN[:, None]
    entries_N, window = layer.seen_N, plain_parts.plain_window(module.config, module.layer_idx)
    if window is not None:
        place = PLACES[-1] if layer.position_N is None else torch.cat([layer.position_N, PLACES[-1][count:]])
        past = int(place[count]) if length > count else sample.next_position
        allowed &= place[:, None] - place < window
        entries_N = layer.seen_N & (past - place[:count] < window)
    for row, lost_hN in layer.lost:
        allowed[:, row:, :row] &= ~lost_hN[:, None]
    if layer.pages is not None:
        layer.pages.hide_unread(allowed, query[0], key[0], count + len(sample.rest_q))
    hidden = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
    mask = hidden.repeat_interleave(query.shape[1] // key.shape[1], dim=0)[None]
    routed = value.clone()
    routed[:, :, :count] *= layer.factor_hNd.to(value.dtype)
    routed[:, :, :count] += layer.fill.under(value, layer.factor_hNd)
    out, _ = eager(module, query, key, routed, mask, scaling=scaling)
    later_key, later_value = _for_later(sample, layer, key, value, routed, entries_N)
    if later_key is not key or later_value is not routed:
        out[:, count:] = eager(module, query, later_key, later_value, mask, scaling=scaling)[0][:, count:]
    if bool(sample.whole_N.any()):
        plain, _ = eager(module, query, key, value, mask, scaling=scaling)
        out[:, :count] = torch.where(sample.whole_N[:, None, None], plain[:, :count], out[:, :count])
    return out, None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


@torch.no_grad()
def recompute(backbone: CompressedBackbone, sample: SampleTruth, tokens_T: Tensor) -> Tensor:
    """Logits of the token after the prompt, and after each of ``tokens_T``, [T + 1, V]."""
    family, embed = backbone.family, backbone.family.model.get_input_embeddings()
    config = family.decoder.config
    scaled = getattr(family.decoder, "embedding_multiplier", 1.0)  # which the decoder's own forward multiplies by
    hidden = torch.cat([sample.hidden_ND / scaled, embed(sample.rest_q), embed(tokens_T)])[None]
    following = sample.next_position + torch.arange(len(tokens_T))
    position = torch.cat([sample.position, following.expand(*sample.position.shape[:-1], -1)], dim=-1)
    loaded, config._attn_implementation = config._attn_implementation, NAME
    _active.append(sample)
    PLACES.append(position)
    FREQUENCIES.append((getattr(family.decoder.rotary_emb, "inv_freq", None), config.model_type))
    try:
        with plain_parts.cut_layers(family, [(layer.joins_N, layer.position_N) for layer in sample.layers], position):
            given = {
                "position_ids": position.unsqueeze(-2),
                **plain_parts.deep_inputs(sample.deep, hidden),
            }  # [1, N] or [3, 1, N]
            out = family.decoder(inputs_embeds=hidden, use_cache=False, **given)
    finally:
        config._attn_implementation = loaded
        _active.pop()
        PLACES.pop()
        FREQUENCIES.pop()
    logits = family.model.get_output_embeddings()(out.last_hidden_state[0, sample.position.shape[-1] - 1 :])
    return logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)

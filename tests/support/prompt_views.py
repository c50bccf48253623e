"""Random layers as methods see them, dense attention, checks that all methods pass, and calibrations made once."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.calibrations import Calibration, CalibrationData, write_calibration
from subtoken_train.evictions import notation_names
from subtoken_train.evictions.kvzip import TokenScorers
from subtoken_train.evictions.queries import QueryCentres
from subtoken_train.evictions.snapkv import HeadScores
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.functional.rotary import Rotation
from subtoken_train.types import Identity, Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View

S, V, C, Q = (int(each) for each in (Region.SYSTEM, Region.VISUAL, Region.CONTEXT, Region.QUERY))

PROMPTS = {
    "text before and after": [S] * 3 + [V] * 20 + [Q] * 6,
    "two images": [S] * 2 + [V] * 8 + [Q] * 3 + [V] * 9 + [Q] * 5, "one text token after": [S] + [V] * 16 + [Q],
    "image last": [S, Q, Q] + [V] * 12, "no image": [S] + [Q] * 13, "context": [C] * 18 + [Q] * 7,
}  # fmt: skip
WITH_IMAGE = {name: codes for name, codes in PROMPTS.items() if V in codes}
LAYERS, HEADS, KV_HEADS, WIDTH, MODEL = 3, 4, 2, 8, 12


class DenseView(View):
    """A layer whose attention is given as a matrix [B, H, N, N]; fewer keys: its rows, normalised again."""

    def __init__(self, attention, regions, needs, value=None):
        self.matrix = attention
        batch, heads, length, _ = attention.shape
        nothing = torch.zeros(batch, heads, length, 1)
        super().__init__(0, nothing, nothing if value is None else value, value, regions, 1.0, needs)

    def rows(self, index_BW, keys_BN=None):
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        rows = self.matrix.gather(
            2, index_BW.clamp(min=0)[:, None, :, None].expand(-1, self.matrix.shape[1], -1, self.matrix.shape[-1])
        )
        rows = rows * keys_BN[:, None, None] * (index_BW >= 0)[:, None, :, None]
        return rows / rows.sum(-1, keepdim=True).clamp(min=1e-30)

    def blocks(self, rows_BN, keys_BN=None, among=None):
        order = rows_BN.int().sort(dim=-1, descending=True, stable=True).indices
        for part in order.masked_fill(~rows_BN.gather(1, order), -1).split(5, dim=1):
            yield part, self.rows(part, keys_BN)

    def received(self, rows_BN, keys_BN=None, weight_BN=None, among=None):
        found = self.rows(torch.arange(rows_BN.shape[1]).expand(rows_BN.shape), keys_BN) * rows_BN[:, None, :, None]
        return (found if weight_BN is None else found * weight_BN[:, None, :, None]).sum(2)


def dense_attention(query, key, keys, scale):
    """Attention of one sample as a whole matrix, [H, N, N]: causal, over the marked keys; 0 in rows that see none."""
    shared = key.float().repeat_interleave(len(query) // len(key), 0)
    seen = torch.ones(query.shape[1], query.shape[1]).tril().bool() & torch.as_tensor(keys)
    return (query.float() @ shared.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)


def samples(view):
    """Every sample's number and entries [N]; of these alone the attention [H, n, n], keys and values, [h, n, d]."""
    states = view.query_BHNd, view.key_BhNd, vars(view).get("value_BhNd", view.key_BhNd)
    for sample, entries in enumerate(view.entries_BN):
        query, key, value = (each[sample][:, entries] for each in states)
        yield sample, entries, dense_attention(query, key, [True] * query.shape[1], view.scale), key, value


def layer_views(prompts, needs, pad="none", seed=0, dropped=(), dtype=torch.float32, layers=LAYERS):
    """Give views of prompts (lists of regions), by them and the seed; ``dropped``: (layer, share of VISUAL rows)."""
    width = max(map(len, prompts)) + (0 if pad == "none" else 3)
    views = []
    for layer in range(layers):
        tensors = [torch.randn(len(prompts), heads, width, WIDTH).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        regions = torch.zeros(len(prompts), width, dtype=torch.long)
        real = torch.zeros(len(prompts), width, dtype=torch.bool)
        inputs = torch.randn(len(prompts), width, MODEL).to(dtype) if "inputs" in needs else None
        for i, codes in enumerate(prompts):
            generator = torch.Generator().manual_seed(seed * 1000 + layer * 10 + len(codes))
            span = slice(width - len(codes), width) if pad == "left" else slice(0, len(codes))
            for tensor in tensors:
                drawn = torch.randn(tensor.shape[1], len(codes), WIDTH, generator=generator) * 1.5
                tensor[i, :, span] = drawn.to(dtype)
            real[i, span] = True
            lost = torch.rand(len(codes), generator=generator) < dict(dropped).get(layer, 0.0)
            regions[i, span] = torch.where((torch.tensor(codes) == V) & lost, 0, torch.tensor(codes))
            if inputs is not None:
                inputs[i, span] = torch.randn(len(codes), MODEL, generator=generator).to(dtype)
        views.append(View(layer, *tensors, regions, WIDTH**-0.5, needs, **surroundings(real), input_BND=inputs))
    return views


def llama_turn(cos, sin):
    """Llama's rotation by cosine and sine."""
    return Rotation(cos, sin, lambda query, key, angles: apply_rotary_pos_emb(query, key, *angles))


def rope(position, width=WIDTH, theta=100.0):
    """Llama's rotation at position ids [B, N]."""
    angle = (position[..., None].float() * theta ** -(torch.arange(0, width, 2) / width)).repeat(1, 1, 2)
    return llama_turn(angle.cos(), angle.sin())


def surroundings(real_BN, width=WIDTH, model=MODEL):
    """What a view is told beside states: positions that count real rows, their rotation, an output projection."""
    weight = torch.randn(model, HEADS * width, generator=torch.Generator().manual_seed(7))
    count = real_BN.sum(-1, keepdim=True)
    return {
        "position": (real_BN.cumsum(-1) - 1).clamp(min=0), "next_position": count, "rotate": rope,
        "output_weight": lambda: weight,
    }  # fmt: skip


def candidates_of(method, views, keep):
    """A fraction ``keep`` per layer, rounded down, at least 1, of all entries: in most papers text competes too."""
    regions = [view.regions_BN for view in views]
    competes = [codes == V if "aircache" in method.name else codes > 0 for codes in regions]
    counts = torch.stack([each.sum(-1) for each in competes])
    return Candidates(regions, competes, torch.minimum((counts * keep).long().clamp(min=1), counts))


def plan(method, views, keep):
    scores = [method.score(view) for view in views]
    candidates = candidates_of(method, views, keep)
    return scores, method.counts(scores, candidates), method.keep(scores, candidates), candidates


def check_padding(method, prompts, **options):
    """Scores, counts and kept sets of a sample are those it has alone, whatever the padding and its neighbours."""
    for pad in ("left", "right"):
        views = layer_views(prompts, method.needs, pad, **options)
        scores, counts, kept, _ = plan(method, views, 0.4)
        for i, codes in enumerate(prompts):
            alone = layer_views([codes], method.needs, **options)
            scores_1, counts_1, kept_1, _ = plan(method, alone, 0.4)
            width = views[0].regions_BN.shape[1]
            span = slice(width - len(codes), width) if pad == "left" else slice(0, len(codes))
            assert counts[:, i].tolist() == counts_1[:, 0].tolist(), (pad, i)
            for layer in range(len(views)):
                entries = alone[layer].entries_BN[0]
                ours, its = scores[layer].scores_BhN[i, :, span], scores_1[layer].scores_BhN[0]
                assert torch.allclose(ours[:, entries], its[:, entries], atol=1e-5), (pad, i, layer)
                assert torch.equal(kept[layer][i, :, span], kept_1[layer][0]), (pad, i, layer)
                assert not kept[layer][i][:, ~views[layer].entries_BN[i]].any()


def by_head(counts):
    """``Eviction.counts`` as [L, B, h]; h = 1 where all heads of a layer keep as many."""
    return counts if counts.dim() == 3 else counts[..., None]


PADDING, SYSTEM, CONTEXT, QUERY = Region.PADDING, Region.SYSTEM, Region.CONTEXT, Region.QUERY


def context_view(prompts, pad="right", seed=0, layer=0, dtype=torch.float32, kv_heads=KV_HEADS):
    """A view of prompts (lists of regions); a row's tensors depend on its place, the prompt's length and the seed."""
    width = max(map(len, prompts))
    regions = torch.full((len(prompts), width), int(PADDING))
    tensors = [torch.zeros(len(prompts), heads, width, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    for sample, codes in enumerate(prompts):
        span = slice(width - len(codes), width) if pad == "left" else slice(0, len(codes))
        regions[sample, span] = torch.tensor(codes, dtype=torch.long)
        generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + len(codes))
        for tensor in tensors:
            tensor[sample, :, span] = torch.randn(tensor.shape[1], len(codes), WIDTH, generator=generator)
    query, key, value = (tensor.to(dtype) for tensor in tensors)
    context, asks = regions == CONTEXT, regions == QUERY
    return View(
        layer, query, key, value, regions, WIDTH**-0.5, frozenset({"asks", "values"}), context,
        position=((regions != PADDING).cumsum(-1) - 1).clamp(min=0), rotate=rope, asks_BN=asks,
        scope_counts=context.sum(-1).tolist(), asks_counts=asks.sum(-1).tolist(), faults=[],
        before_BN=regions.masked_fill(~context & (regions != SYSTEM), int(PADDING)),
    )  # fmt: skip


NEEDED = ("kvzap", "headkv", "sparsemm", "lkv")


def drawn_nets(layers: int, heads: int, width: int, hidden: int = 0, seed: int = 0) -> TokenScorers:
    """Nets of every layer; their scores are about as large as logs of attention."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(hidden, width), (hidden,), (heads, hidden), (heads,)] if hidden else [(heads, width), (heads,)]
    scale = 3 * max(hidden, width) ** -0.5
    return TokenScorers.of([[torch.randn(shape, generator=draw) * scale for shape in shapes] for _ in range(layers)])


def drawn_heads(layers: int, heads: int, seed: int = 0) -> HeadScores:
    score = torch.rand(layers * heads, generator=torch.Generator().manual_seed(seed)) ** 3
    score[1] = 0
    return HeadScores(score.view(layers, heads).tolist())


def drawn_centres(layers: int, heads: int, width: int) -> QueryCentres:
    mean = torch.randn(layers, heads, width, generator=torch.Generator().manual_seed(layers + heads))
    return QueryCentres(mean.tolist(), (1 + mean.abs() + mean.roll(width // 2, -1).abs()).tolist())


@cache
def _written(
    method: str, path: str | None, model_type: str, digest: str, layers: int, heads: int, width: int, hidden: int
) -> str:
    folder = Path(tempfile.mkdtemp(prefix="calibrated-"))
    if method == "triattention":
        numbers: Any = drawn_centres(layers, heads, width)
    else:
        numbers = drawn_nets(layers, heads, width, hidden) if method == "kvzap" else drawn_heads(layers, heads)
    return written(folder / f"{method}.json", method, numbers, Identity(path, None, model_type, digest))


def settings_for(notation: str, family: Family | None = None, hidden: int = 0) -> dict[str, Any]:
    names = notation_names(notation)
    if family is None:
        made_on, (layers, kv_heads, width) = (NOBODY.path, NOBODY.model_type, NOBODY.digest), (LAYERS, KV_HEADS, MODEL)
        centred = layers, HEADS, WIDTH
    else:
        made_on = ("random", str(family.model.config.model_type), shapes_digest(family))
        layers, kv_heads, width = family.shape.num_layers, family.shape.num_kv_heads, family.hidden_size
        centred = layers, family.decoder.config.num_attention_heads, family.shape.head_dim
    sizes = dict.fromkeys(NEEDED, (layers, kv_heads, width)) | {"triattention": centred}
    files = {name: _written(name, *made_on, *sizes[name], hidden) for name in names if name in sizes}
    found = {f"{name}." * (len(files) > 1) + "calibration": file for name, file in files.items()}
    return found | ({"window": 1} if names[-1] == "rkv" else {})  # fits any budget


NOBODY = Identity("nowhere/model", None, "llama", "0" * 64)


def written(path, method, numbers, backbone=NOBODY, **settings):
    write_calibration(path, Calibration(method, backbone, settings, numbers, CalibrationData("tests", 1, 2)))
    return str(path)


EXTREME = [-torch.inf, -3.4e38, -1.5, -0.0, 0.0, 0.5, 2.0, torch.inf]  # few values: many ties


def draw_scores(draw: Any, heads: int, length: int, values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw scores of a layer by hypothesis, which entries compete, and which are protected."""
    batch, heads, length = (draw(st.integers(1, most)) for most in (3, heads, length))
    count, marks = batch * heads * length, st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
    scores = torch.tensor(draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)))
    competes, protected = (torch.tensor(draw(marks)).view(batch, length) for _ in range(2))
    return scores.view(batch, heads, length), competes, protected

"""One byte budget for keys and groups: what rows see, what is stored, what learns, and what is refused."""

from functools import partial
from itertools import product

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.engine.build import start_warm
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.families.family import shapes_digest
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import contexts_of
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.routers import start_from
from subtoken_train.routing.shares import RATE, HeadShares
from subtoken_train.types import Identity, Region
from tests.engine.test_context import MIXED, QUEST, check_trained_as_alone, hf_logits, trained_loss
from tests.support.helpers import compress, gqa_family, make_batch, opened, random_mask, random_scores
from tests.support.prompt_views import drawn_nets, settings_for, written
from tests.support.refusals import refusing
from tests.support.sampling import sampled
from tests.support.text_families import KINDS, NAMED, text_batch, text_family
from tests.support.truth_cells import from_truth

NONE = {"name": "none"}


def settings(**changed):
    own = {"num_groups": 8, "kept_groups": 8, "budget": "bytes", "byte_share": 0.4, "sinks": 1, "window": 1}
    return RoutingConfig(**{**own, **changed})


def eager(family, routing=None, reducer=NONE, factor=20.0):
    backbone = compress(family, routing or settings(), **reducer)
    torch.manual_seed(3)
    for name, parameter in backbone.bank.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02 * factor / (RATE if "shares" in name else 1))
    return backbone


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize(("pool", "chunk"), [("layer", None), ("learned", 7), ("all", None)])
def test_blind_and_in_chunks(protocol, pool, chunk):
    backbone = eager(text_family(), settings(byte_pool=pool)).eval()
    batch = text_batch([(24, 6, 0), (16, 4, 0), (0, 9, 0)], True)
    found = from_truth(backbone, batch, 5, Compression(prefill_chunk=chunk), protocol)
    assert found.largest < 1e-4
    assert found.same_tokens


@pytest.mark.parametrize(("pool", "share"), [("layer", 0.21875), ("layer", 0.9), ("head", 0.1), ("head", 0.5)])
@torch.no_grad()
def test_a_layer_spends_its_bytes_and_never_more(pool, share):
    """Counted from the plan, and measured on what is packed; less than an entry is left over."""
    backbone = eager(text_family(), settings(byte_share=share, byte_pool=pool)).eval()
    batch = text_batch([(40, 6, 0), (31, 4, 0)])
    first, cache = opened(backbone, batch)
    shape, heads = backbone.family.shape, backbone.family.shape.num_kv_heads
    masks, keys = (backbone.run(batch).state.__dict__[name] for name in ("masks", "keys"))
    for layer in range(shape.num_layers):
        context = batch.regions_BN == Region.CONTEXT
        assert keys[layer].transpose(1, 2)[~context].all()
        own = keys[layer] & context[:, None]
        groups = masks[layer].view(*context.shape, heads, -1).transpose(1, 2) & context[:, None, :, None]
        assert not (groups & ~own[..., None]).any()  # nothing is stored of a token without its key
        spent = own.sum(-1) * 33 + groups.sum((-1, -2)) * 8  # bf16: a key of 16 channels, a byte of index, groups of 4
        limit = torch.tensor([[int(share * count * 64)] * heads for count in (40, 31)])
        if pool == "layer":
            spent, limit = spent.sum(-1), torch.tensor([int(share * count * 128) for count in (40, 31)])
        assert (spent <= limit).all()
        assert (limit - spent < 65).all()
    ledger = measured_ledger(first.plan, batch.regions_BN, shape)
    assert share - 0.05 < ledger.fraction("context", with_index=False) <= share
    assert report(backbone, batch, first.plan, cache).nominal_fraction == pytest.approx(share, abs=1e-3)
    for sample in account(backbone, batch, first, cache):
        assert sample.keys_after < sample.entries_before or share > 0.5
        assert sample.region_bytes - sample.index_bytes <= share * sample.region_dense_bytes


@sampled("kind", ["llama", "qwen2_window"], every=1)
@pytest.mark.parametrize("share", [0.1, 0.4])
@torch.no_grad()
def test_all_layers_share_one_budget(kind, share):
    """Of what their windows leave in reach; layers keep unlike numbers, and one may keep next to nothing."""
    backbone = eager(text_family(kind), settings(byte_share=share, byte_pool="all", sinks=0, window=0)).eval()
    batch = text_batch([(40, 6, 0), (31, 4, 0)])
    family, (first, _) = backbone.family, opened(backbone, batch)
    spent, dense = torch.zeros(2), torch.zeros(2)
    result, by_layer = backbone.run(batch), []
    for layer, (_, regions_BN) in enumerate(result.layer_rows()):
        context = (batch.regions_BN == Region.CONTEXT) & result.kept[layer]
        own = result.state.keys[layer] & context[:, None]
        groups = result.state.masks[layer] & context[..., None]
        by_layer.append(own.sum((1, 2)) * 33 + groups.sum((1, 2)) * 8)
        spent, dense = spent + by_layer[-1], dense + context.sum(-1) * 128
        assert regions_BN.shape == context.shape
    assert (spent <= share * dense).all()
    assert (share * dense - spent < 65).all()
    assert len({int(bytes_B[0]) for bytes_B in by_layer}) == family.shape.num_layers
    assert measured_ledger(first.plan, batch.regions_BN, family.shape).fraction("context") <= share


@pytest.mark.parametrize("gate", [False, True])
@sampled("kind", NAMED, every=2)
def test_a_context_runs_once_into_a_cache(kind, gate):
    """With its question or without, it keeps what training chooses in a pass before: keys, groups, and gated values."""
    backbone = eager(text_family(kind), settings(byte_pool="all", value_gate=gate)).eval()
    ran, batch = [], text_batch([(24, 6, 0), (16, 6, 0)], True)
    alone = contexts_of(batch)
    for layer in backbone.family.decoder.layers:
        layer.register_forward_pre_hook(lambda _, given: ran.append(given[0].shape[1]))
    caches = [backbone.family.dense_cache() for _ in range(2)]
    passes = (batch, None), (batch, caches[0]), (alone, caches[1])
    states = [backbone.run(*each, pad_left=True).state for each in passes]
    depth, length = backbone.family.shape.num_layers, alone.input_ids_BN.shape[1]
    assert ran == [rows for rows in (25, 31, 25, 6, 25) for _ in range(depth)]
    real = alone.regions_BN != Region.PADDING
    for layer in range(depth):
        for other in states[1:]:
            assert torch.equal(*(state.keys[layer][..., :length].mT[real] for state in (states[0], other)))
            assert torch.equal(*(state.masks[layer][:, :length][real] for state in (states[0], other)))
        values = [cache.layers[layer].values[:, :, :length].transpose(1, 2)[real] for cache in caches]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_heads_have_the_shares_that_they_learnt():
    """LKV: of 40 and 31 whole entries a head 6 heads keep 80 and 62, each its best: sinks and window, and never all."""
    backbone = eager(text_family(), settings(num_groups=2, kept_groups=2, byte_share=0.34, byte_pool="learned")).eval()
    for own_h, share in zip(backbone.bank.shares, ([1, 2], [3, 4], [30, 0.1]), strict=True):
        own_h.copy_(torch.tensor(share).log() / RATE)
    batch, noted = text_batch([(40, 6, 0), (31, 4, 0)]), []
    for selector in backbone.bank.selectors:
        selector.register_forward_hook(lambda _, __, logits: noted.append(logits))
    state = backbone.run(batch).state
    for sample, counts in enumerate(([[4, 8], [11, 15], [40, 2]], [[3, 6], [9, 11], [31, 2]])):
        context_N = batch.regions_BN[sample] == Region.CONTEXT
        for layer, head in product(range(3), range(2)):
            kept_C = state.keys[layer][sample, head, context_N]
            assert int(kept_C.sum()) == counts[layer][head]
            assert kept_C[[0, -1]].all()
            assert torch.equal(state.masks[layer][sample, context_N, head], kept_C)
            order = noted[layer][sample, context_N, head][1:-1].argsort(descending=True, stable=True)
            assert kept_C[1:-1][order].tolist() == sorted(kept_C[1:-1].tolist(), reverse=True)


def test_a_byte_more_lowers_the_cut_of_its_head():
    """The shares' gradient beside the difference of two relaxed choices, whose sigmoids sum to a head's bytes."""
    shares = HeadShares(settings(byte_share=0.25), text_family().shape).double()
    scores_BNO, learns_BN = random_scores(3, 2, 12, 10).double(), random_mask(4, 2, 12)

    def relaxed_cut():
        low, high = (torch.full((2, 2), each, dtype=torch.float64) for each in (-50.0, 50.0))
        wanted = shares.of_all()[1].double() * learns_BN.sum(-1, keepdim=True) * 64 / 4
        for _ in range(80):
            cut = (low + high) / 2
            keys = (scores_BNO[..., 8:] - cut[:, None]).sigmoid() * 33
            groups = (scores_BNO[..., :8].unflatten(-1, (2, 4)) - cut[:, None, :, None]).sigmoid().sum(-1) * 8
            over = ((keys + groups) * learns_BN[..., None]).sum(1) > wanted
            low, high = torch.where(over, cut, low), torch.where(over, high, cut)
        return cut

    with torch.no_grad():
        for layer, own_h in enumerate(shares):
            own_h.copy_(random_scores(5 + layer, 2) / RATE / 4)
    shares.joined(1, relaxed_cut(), scores_BNO, learns_BN).sum().backward()
    expected = 0.0
    for step in (1e-4, -2e-4):
        with torch.no_grad():
            for layer, own_h in enumerate(shares):
                own_h.add_(step * random_scores(8 + layer, 2))
        expected += float(relaxed_cut().sum()) * (1 if step > 0 else -1) / 2e-4
    found = sum(float((own_h.grad * random_scores(8 + layer, 2)).sum()) for layer, own_h in enumerate(shares))
    assert found == pytest.approx(expected, rel=1e-2)


def test_a_head_may_keep_nothing_of_a_text():
    backbone = eager(text_family(), settings(byte_share=0.02, byte_pool="all", sinks=0, window=0)).eval()
    batch = text_batch([(24, 6, 0), (16, 4, 0)], True)
    batch.regions_BN[batch.regions_BN == Region.SYSTEM] = Region.CONTEXT
    assert from_truth(backbone, batch, 5, Compression(), "context_first").largest < 1e-4
    keys = torch.stack([*backbone.run(batch).state.keys.values()]) & (batch.regions_BN == Region.CONTEXT)[:, None]
    assert (keys.sum((-1, -2)) == 0).any()
    model = SubTokenModel.around(backbone, Compression())
    with pytest.warns(SubTokenWarning, match="S8 bytes 0.02: nothing is left of .* Raise byte_share or sinks"):
        model.ask("the lamp is red . the door is green . what", ["which ?"], max_new_tokens=2)


@sampled("kind", KINDS, every=4)
def test_a_whole_budget_is_the_backbone(kind):
    family, batch = text_family(kind), text_batch(MIXED)
    expected = hf_logits(family, batch)
    whole, real = settings(byte_share=1.0), batch.regions_BN != Region.PADDING
    for pool in ("layer", "all"):
        neutral = compress(family, settings(byte_share=1.0, byte_pool=pool))
        assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])
    forced = compress(family, whole, **{**QUEST, "keep_ratio": 1.0})
    result = forced.run(batch, force_gather=True)
    assert all(keys.all() for keys in result.state.keys.values())
    assert (forced.logits(result)[real] - expected[real]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "routing",
    [
        {"query_conditioned": True},
        {"query_conditioned": True, "byte_pool": "head", "value_gate": True},
        {"query_conditioned": True, "selector": "mlp"},
        {"byte_pool": "all", "features": ("norm",), "score_prior": "value_norm"},
        {"byte_pool": "learned"},
    ],
)
def test_keys_and_groups_learn_with_and_without_checkpointing(routing):
    """Routers, their key logits and the LoRA get gradients; recomputing a layer changes none of them."""
    gradients = []
    for checkpointing in (False, True):
        family = text_family()
        torch.manual_seed(0)
        add_lora(family, LoraSettings(dropout=0.0))
        backbone = eager(family, settings(**routing))
        backbone.train()
        if checkpointing:
            enable_checkpointing(family, backbone.bank)
        gradients.append(trained_loss(backbone, text_batch(MIXED))[1])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
        assert gradient.any() or "lora_A" in name
    last = "out" if routing.get("selector") == "mlp" else "token"
    for layer in range(3):
        weight = gradients[0][f"bank.selectors.{layer}.{last}.weight"]
        assert weight.shape[0] == 8 + 2  # the groups, then the heads' keys
        assert weight.any(-1).all()


@pytest.mark.parametrize("own", [{}, {"byte_pool": "all"}, {"num_groups": 2, "kept_groups": 2}, {"byte_share": 1.0}])
def test_what_has_no_choice_has_no_gradient(own, monkeypatch):
    """Sinks and window stay whatever their logits are; where everything stays, nothing is chosen."""
    family, batch, noted = text_family(), text_batch(MIXED), []
    add_lora(family, LoraSettings(dropout=0.0))
    backbone = eager(family, settings(**{"sinks": 2, "window": 3, **own}))
    scores = backbone.bank._scores

    def note(*args):
        found = scores(*args)
        if found.requires_grad:
            found.retain_grad()
            noted.append(found)
        return found

    monkeypatch.setattr(backbone.bank, "_scores", note)
    trained_loss(backbone, batch)
    stays = torch.zeros_like(batch.regions_BN, dtype=torch.bool)
    for row, marks in zip(stays, batch.regions_BN == Region.CONTEXT, strict=True):
        places = marks.nonzero()[:, 0]
        row[places[:2]] = row[places[-3:]] = True
    learnt = [each.grad for each in noted if each.grad is not None]
    assert len(noted) == 3
    assert all(not gradient[stays].any() for gradient in learnt)
    assert len([gradient for gradient in learnt if gradient.any()]) == (0 if "byte_share" in own else 3)


@pytest.mark.parametrize("pool", ["layer", "all", "learned"])
def test_a_batch_is_trained_as_each_sample_alone(pool):
    family = text_family()
    add_lora(family, LoraSettings(dropout=0.0))
    backbone = eager(family, settings(byte_pool=pool))
    check_trained_as_alone(backbone, text_batch([*MIXED, (0, 9, 6)]))  # one without a context


def warm(family, **changed):
    hidden = family.hidden_size // 4 if changed.get("selector") == "mlp" else 0
    file = settings_for("kvzap", family, hidden=hidden)["calibration"]
    backbone = compress(family, settings(byte_pool="all", sinks=0, window=3, warm_start=file, **changed))
    start_warm(backbone)
    return backbone.eval(), file


@pytest.mark.parametrize("selector", ["linear", "mlp"])
@pytest.mark.parametrize("groups", [2, 8])
@sampled("kind", ["llama", "phi3"], every=1)
def test_a_warm_start_keeps_what_kvzap_keeps(kind, groups, selector):
    """As many whole entries in the same pool, of a context that nobody has asked yet; and no part of one."""
    family, count, context = text_family(kind), 9, 24
    shape = family.shape
    dense = 4 * shape.head_dim
    index = 1  # byte of a head's entry, which KVzap's does not have
    share = count * (dense + index) / (context * dense)
    backbone, file = warm(family, num_groups=groups, kept_groups=groups, byte_share=share, selector=selector)
    batch = text_batch([(context, 6, 0)])
    ours = opened(backbone, batch, protocol="context_first")[0].plan
    method = build_eviction("kvzap", calibration=file, last=3, lower_bound=0)
    theirs = opened(compress(family).eval(), batch, Compression(method, count / context), "context_first")[0].plan
    entries = 0
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        for head in range(shape.num_kv_heads):
            kept = own.entries_BN[0][own.heads_BNh[0, :, head]].tolist()
            assert kept == other.entries_BN[0][other.heads_BNh[0, :, head]].tolist()
            entries += len(kept)
        assert (own.group_mask_BNS is None) == (groups == shape.num_kv_heads)  # whole entries need no index
        if own.group_mask_BNS is not None:
            groups_BNhs = own.group_mask_BNS.unflatten(-1, (shape.num_kv_heads, -1))
            assert torch.equal(groups_BNhs.all(-1), own.heads_BNh)
            assert torch.equal(groups_BNhs.any(-1), own.heads_BNh)
    assert entries >= count * shape.num_layers * shape.num_kv_heads


def test_a_warm_start_learns_from_choices_that_hang_in_the_balance():
    """Logits of any scale: what is added to all of them changes neither the choice nor a gradient."""
    gradients = []
    for shift in (0.0, -20.0):
        family = text_family()
        family.model.requires_grad_(False)
        backbone, _ = warm(family, byte_share=0.4)
        for selector in backbone.bank.selectors:
            selector.token.bias.data += shift
        gradients.append(trained_loss(backbone, text_batch(MIXED))[1])
    for name, gradient in gradients[0].items():
        assert gradient.any()
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("pool", ["layer", "all"])
def test_what_is_trained_on_images_is_what_is_served(tiny_family, pool):
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    backbone = eager(tiny_family, settings(num_groups=16, kept_groups=16, byte_pool=pool))
    batch = make_batch([(1, 9), (2, 7), (1, 12)])
    _, gradients = trained_loss(backbone, batch)
    for layer in range(backbone.family.shape.num_layers):
        assert gradients[f"bank.selectors.{layer}.token.weight"].any(-1).sum() > 16
    spent = backbone.run(batch).state
    visual_BN = batch.regions_BN == Region.VISUAL
    entry = 4 * backbone.family.shape.head_dim
    own = sum(int((keys & visual_BN[:, None]).sum()) * (entry // 2 + 1) for keys in spent.keys.values())
    own += sum(int((masks & visual_BN[..., None]).sum()) * 2 * 8 for masks in spent.masks.values())
    dense = int(visual_BN.sum()) * entry * backbone.family.shape.num_kv_heads * len(spent.keys)
    assert 0.38 * dense < own <= 0.4 * dense


def warmed(kind="llama", **options):
    other = settings_for("kvzap", text_family(kind), **options)["calibration"]
    start_warm(compress(text_family(), settings(warm_start=other)))


def short(folder):
    family = text_family()
    nets = drawn_nets(family.shape.num_layers - 1, family.shape.num_kv_heads, family.hidden_size)
    identity = Identity("x", None, str(family.model.config.model_type), shapes_digest(family))
    return str(written(folder / "short.json", "kvzap", nets, identity))


def asked(compression, **changed):
    opened(eager(text_family(), settings(**changed)).eval(), text_batch([(24, 6, 0)]), compression)


def of(reducer=NONE, family=text_family, **changed):
    return lambda folder: compress(family(), settings(**changed), **reducer)


CUTS = {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder"}
REFUSED = [
    (of(selector="value_norm"), "budget 'bytes' needs a logit for every key, and selector 'value_norm' gives"),
    (of(kept_groups=4), r"kept_groups=4 is another budget: set kept_groups to num_groups, 8"),
    (of(layout="per_head"), "groups, num_groups=8, span the 2 heads: use contiguous groups, as many as 2, 4, 8"),
    (of(num_groups=1, kept_groups=1), "num_groups=1, span the 2 heads"),
    (of(byte_share=0.0), r"byte_share=0.0 must lie in \(0, 1\]; 0.2 spends a fifth"),
    (of(byte_share=True), "byte_share=True must lie in"),
    (of(byte_pool="any"), "byte_pool 'any'"),
    (of(byte_pool="all", query_conditioned=True), "before the question is read, which query_conditioned reads"),
    (of(byte_pool="all", selector="bilinear"), "before the question is read"),
    (of(byte_pool="all", features=("attention",)), "before the question is read, which feature 'attention'"),
    (of(QUEST, byte_pool="all"), "byte_pool 'all' chooses among whole contexts, before reducer 'quest' drops"),
    (of(QUEST, byte_pool="learned"), "byte_pool 'learned' chooses among whole contexts, before reducer 'quest'"),
    (of(byte_pool="learned", family=partial(text_family, "qwen2_window")), "use 'all', or a model without windows"),
    (lambda _: settings(byte_pool="learned").check_tokens(text_family().shape, 4), "less than the 260 that sinks 1"),
    (of(fill="mean"), "fill 'mean' is not stored under budget 'bytes'"),
    (of(sinks=-1), "routing sinks"),
    (of(warm_start="a.json", selector="bilinear"), "'a.json' starts routers of selector 'linear' or 'mlp', not 'bil"),
    (of(budget="global"), "byte_share is a setting of budget 'bytes', and the budget is 'global'"),
    (of(CUTS, family=gqa_family), "'fastv' cuts rows between layers: use one of stage embeds or tower"),
    (lambda _: asked(Compression(prefill_chunk=8), byte_pool="all"), "byte_pool 'all' runs a context twice"),
    (lambda _: asked(Compression(build_eviction("snapkv"), 0.5)), "'snapkv' does not go with budget 'bytes'"),
    (lambda _: asked(Compression(key_channels=0.5)), "key_channels=0.5 does not go with budget 'bytes'"),
    (lambda _: warmed("phi3"), r"calibration of kvzap was made on .* this backbone is another one"),
    (lambda _: start_from(None, [torch.zeros(1)] * 6), "these nets are gates, and no router starts as one"),
    (lambda _: warmed(hidden=5), r"warm_start .*: these nets are of 'hidden=5', and this router starts"),
    (lambda p: start_warm(of(warm_start=str(p / "none.json"))(p)), "is not a file; 'subtoken-train calibrate kvzap'"),
    (lambda p: start_warm(of(warm_start=short(p))(p)), "has nets for 2 layers of 2 heads, and the backbone 3 of 2"),
]
test_what_does_not_fit_is_refused_in_words = refusing(REFUSED, lambda call, tmp_path: call(tmp_path))

"""The memory prediction: exact where it can be, within 15 % of what real steps hold; AdamW's groups and schedule."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import recipe_memory
from subtoken_train.benchmarking.rounds import tensors_of
from subtoken_train.engine.build import assemble
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.memory import Step, check_strategy, estimate_memory
from subtoken_train.training.module import StepRecord
from subtoken_train.training.optimizer import OptimizerConfig, build_optimizer, check_optimizer, rate_scale
from subtoken_train.training.preflight import StepPlan, count_devices, layer_bands, plan_steps
from tests.support import training_memory
from tests.support.helpers import save_backbone
from tests.support.places import ROOT, shown
from tests.support.refusals import refuses
from tests.support.sampling import sampled

STEP = Step(batch_size=2, length=160, compressed=64, labelled=90)


@pytest.fixture
def parts(tiny_family):
    return assemble(tiny_family, LoraSettings(40, 16, 0.0), build_reducer("fastv", keep_ratio=0.25), RoutingConfig())[0]


def trained(parts):
    return [parameter for parameter in parts.parameters() if parameter.requires_grad]


def sizes(parts, **changes):
    return dict(estimate_memory(parts, replace(STEP, **changes)).parts)


def test_what_is_held_is_exact(parts):
    found, elements = sizes(parts), sum(parameter.numel() for parameter in trained(parts))
    assert found["LoRA + routers"] == found["gradients"] == 4 * elements
    assert found["optimiser state"] == 8 * elements
    assert found["frozen weights"] == 4 * sum(p.numel() for p in parts.parameters() if not p.requires_grad)


def test_the_8_bit_state_is_what_the_optimizer_holds(parts):
    pytest.importorskip("bitsandbytes")
    parameters = trained(parts)
    assert {parameter.numel() >= 4096 for parameter in parameters} == {True, False}
    optimizer, _ = build_optimizer(parameters, [], OptimizerConfig(name="paged_adamw_8bit"), 10)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [state[key] for state in optimizer.state.values() for key in state if key[:-1] in ("state", "absmax")]
    state = sum(t.numel() * t.element_size() for t in held)
    assert sizes(parts, optimizer="paged_adamw_8bit")["optimiser state"] == state


@sampled("kind", ["nf4", "int8"], every=2)
def test_quantised_weights_are_counted_as_they_are_held(tiny_family, tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    config = BackboneConfig(str(save_backbone(tiny_family, tmp_path)), quantization=kind)
    loaded = assemble(load_family(config), LoraSettings(), build_reducer("none"), None)[0]
    laid_out = assemble(tiny_family, LoraSettings(), build_reducer("none"), None)[0]
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in loaded.buffers())
    held = sum(t.numel() * t.element_size() for t in tensors_of(loaded) if not t.requires_grad) - buffers
    assert sizes(laid_out, quantization=kind)["frozen weights"] == sizes(loaded, quantization=kind)["frozen weights"]
    assert sizes(loaded, quantization=kind)["frozen weights"] == held


def test_strategies_divide_what_they_share(parts):
    alone = sizes(parts)
    for strategy, divided in {"auto": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 4, "fsdp2": 4}.items():
        found = sizes(parts, strategy=strategy, processes=4)
        names = ("optimiser state", "gradients", "LoRA + routers", "frozen weights")
        assert [alone[name] // found[name] for name in names] == [4] * divided + [1] * (4 - divided)
        assert ("a gathered layer" in found) == (divided == 4)
        assert found["kept for backward"] == alone["kept for backward"]
    offloaded = sizes(parts, strategy="zero3_offload", processes=4)
    assert offloaded["frozen weights"] == offloaded["optimiser state"] == 0


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload", "fsdp2"])
def test_quantised_weights_are_not_shared_out(strategy):
    with pytest.raises(ValueError, match=rf"trainer\.strategy {strategy} cannot divide weights in .* use ddp or zero2"):
        check_strategy("nf4", strategy)
    check_strategy("none", strategy)
    check_strategy("int8", "ddp")


@pytest.mark.filterwarnings("ignore:.*PEFT for a second time|Already found a `peft_config`")  # it measures one again
def test_activations_grow_with_the_batch_and_shrink_with_checkpointing_and_reduction(parts, tiny_family):
    kept = sizes(parts)["kept for backward"]
    assert sizes(parts, batch_size=4)["kept for backward"] == 2 * kept
    assert sizes(parts, checkpointing=True)["kept for backward"] < kept / 4
    whole = assemble(tiny_family, LoraSettings(), build_reducer("none"), None)[0]
    assert sizes(whole)["kept for backward"] > kept
    assert estimate_memory(parts, STEP).rows == (160, 112)


@sampled(
    "case",
    [
        training_memory.Case("tiny-llava", reducer="fastv"),
        training_memory.Case("llama", quantization="int8", reducer="quest", batch=4, checkpointing=True),
        training_memory.Case("qwen2_5_vl", reducer="fastv", batch=4, checkpointing=True),
        training_memory.Case("qwen2", "float32", "nf4", reducer="quest", checkpointing=True),
    ],
    every=2,
)
def test_real_steps_hold_what_was_predicted(tmp_path, case):
    pytest.importorskip("bitsandbytes")
    assert abs(training_memory.measure(case, tmp_path)["error"]) < 0.15


@sampled("dtype", ["float32", "bfloat16"], every=2)
def test_steps_with_a_teacher_hold_what_was_predicted(tmp_path, dtype):
    """A vocabulary of 32,000, so that both sides' logits are the largest moment."""
    case = training_memory.Case("llama-32k", dtype, reducer="quest", distilled=True)
    found = training_memory.measure(case, tmp_path)
    assert abs(found["error"]) < 0.05
    assert found["parts"]["teacher's logits"] == 2 * training_memory.ANSWER * 32_000 * (4 if dtype == "float32" else 2)


def test_a_teachers_pass_counts_where_it_is_the_largest_moment(parts):
    """It sees all rows, and what trains sees few: so with checkpointing, and long before a record is all image."""
    few = {"distilled": True, "checkpointing": True, "batch_size": 64}
    assert "teacher's pass" not in sizes(parts, **few)
    found = sizes(parts, **few, length=4096 + 100, compressed=4096, labelled=2)
    assert found["teacher's pass"] > 64 * 4196 * 3 * 4 * (128 + 256)
    assert "kept for backward" not in found


@pytest.mark.slow
def test_the_page_shows_the_recipes_as_check_predicts_them():
    assert shown(ROOT / "docs" / "memory.md", "recipes") == recipe_memory.table()


def test_layer_bands_cover_every_layer_once():
    ledger = nominal_ledger(KVShape(5, 2, 8), {"system": 3, "visual": 16}, KVBudget(0.25, 4, 1), cut_layer=1)
    bands = layer_bands(ledger)
    assert [(band.first, band.last) for band in bands] == [(0, 0), (1, 4)]
    assert [row.region for row in bands[1].rows] == ["system", "visual"]
    total = sum((band.last - band.first + 1) * sum(row.payload_bytes for row in band.rows) for band in bands)
    assert total == ledger.bytes_of(with_index=False)


@pytest.mark.parametrize(
    ("devices", "accelerator", "nodes", "count"),
    [(2, "gpu", 1, 2), ("4", "gpu", 2, 8), ("0,3", "gpu", 1, 2), ([1, 2, 3], "gpu", 1, 3), ("auto", "cpu", 2, 2)],
)
def test_count_devices(devices, accelerator, nodes, count):
    assert count_devices(devices, accelerator, nodes) == count


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "batches", "plan"),
    [
        (100, None, None, StepPlan(100, 8, None)),
        (-1, 3, None, StepPlan(None, 8, None)),
        (100, None, 20, StepPlan(100, 8, 20.0)),  # 20 batches in windows of 4 are 5 steps
        (100, 2, 20, StepPlan(10, 8, 2.0)),
        (-1, 3, 21, StepPlan(18, 8, 3.0)),  # the last window is shorter
        (-1, None, 20, StepPlan(None, 8, None)),
    ],
)
def test_plan_steps(max_steps, max_epochs, batches, plan):
    assert plan_steps(8, max_steps, max_epochs, batches, accumulate=4) == plan


WHOLE = ((1, 2, 2, 2, 4), (1, 2, 4, 0, 0))
CUT = ((1, 2, 4), (1, 2, 4))


def rows(codes) -> Rows:
    regions = torch.tensor(codes)
    return Rows.whole(regions, regions)


def record(*spans, codes=WHOLE, kept: dict[int, Tensor] | None = None) -> StepRecord:
    """Two samples with 3 and 1 visual tokens; each span is (first layer, last layer + 1, its rows)."""
    found = [(start, stop, rows(of_span)) for start, stop, of_span in spans]
    return StepRecord(torch.tensor(codes), found[-1][2], found, None, kept or {})


@pytest.mark.parametrize(
    ("spans", "before", "after"),
    [
        ([(0, 2, WHOLE)], 8, 8),
        ([(0, 2, CUT)], 8, 4),
        ([(0, 1, WHOLE), (1, 4, CUT)], 16, 4 + 3 * 2),
        ([(0, 2, ((1, 4), (1, 4)))], 8, 0),
    ],
    ids=["everything", "before layer 0", "between layers", "nothing left"],
)
def test_entries_are_summed_over_layers(spans, before, after):
    assert tuple(map(int, record(*spans).compressed())) == (before, after)


def test_a_contexts_entries_are_those_that_later_rows_see():
    codes = ((3, 3, 3, 3, 4),)
    kept = {layer: torch.tensor([[layer == 0, False, True, False, False]]) for layer in range(2)}
    found = record((0, 2, codes), codes=codes, kept=kept)
    region = int(record((0, 2, codes), codes=codes).compressed()[0])
    assert tuple(map(int, found.compressed())) == (region, 3)
    assert region == 8


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(("router_rate", "expected"), [(None, 0.2), (0.5, 0.5), (0.0, 0.0)])
def test_routers_have_their_own_rate_where_one_is_set(router_rate, expected):
    config = OptimizerConfig(learning_rate=0.2, router_learning_rate=router_rate)
    optimizer, _ = build_optimizer(weight(), weight(), config, total_steps=10)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {"lora": 0.2, "router": expected}


def test_cosine_after_warm_up():
    scale = rate_scale(OptimizerConfig(warmup_steps=4, final_fraction=0.1), total_steps=14)
    assert [scale(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scale(9) == pytest.approx(0.55)
    assert scale(14) == pytest.approx(0.1)
    assert scale(99) == pytest.approx(0.1)


def two_weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 128), (16,))]


def steps(parameters, optimizer, count, first=0):
    for step in range(first, first + count):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()


def test_paged_8_bit_adamw_goes_near_adamw():
    pytest.importorskip("bitsandbytes")
    ours, plain = two_weights(), two_weights()
    for own, name in ((ours, {"name": "paged_adamw_8bit"}), (plain, {})):
        config = OptimizerConfig(learning_rate=0.01, schedule="constant", **name)
        steps(own, build_optimizer(own[:1], own[1:], config, total_steps=10)[0], 10)
    assert (ours[0] - plain[0]).norm() < 0.05 * (plain[0] - two_weights()[0]).norm()
    assert torch.allclose(ours[1], plain[1], atol=1e-6)


def test_what_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"unknown schedule 'cosin'\. Did you mean 'cosine'"):
        rate_scale(OptimizerConfig(schedule="cosin"), total_steps=10)
    refuses(r"unknown optimizer 'adam'\. Did you mean 'adamw'", check_optimizer, OptimizerConfig(name="adam"))
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'paged_adamw_8bit' needs bitsandbytes, which is not installed: pip install"):
        build_optimizer(weight(), [], OptimizerConfig(name="paged_adamw_8bit"), total_steps=10)

"""Builders that several tests share."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from checkpoints import tiny_llama
from checkpoints.tiny_llava import build_model, build_processor
from subtoken_train.artifact.folder import AdapterConfig, identify, write_adapter
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.engine.build import Stage2Config, build
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import PromptPass
from subtoken_train.evictions.base import Eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import FUSED
from subtoken_train.families.family import Family
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.lora import LoraSettings
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.training.checkpoints import newest_complete, state_path
from subtoken_train.types import Batch, Region, VisualStates
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import View
from tests.support.tiny import assembled

ALL_GROUPS = RoutingConfig(num_groups=16, kept_groups=16)
ROUTED = RoutingConfig(num_groups=16, kept_groups=4)
REDUCTIONS = [{"name": "fastv", "stage": "embeds"}, {"name": "fastv", "stage": "decoder"}, {"name": "visionzip"}]


def make_batch(prompts: list[tuple[int, int]], pad_left: bool = False, visual: int = 64, seed: int = 0) -> Batch:
    """Random batch for the tiny LLaVA: per sample (images, text tokens after them); text answers fill the last two."""
    generator = torch.Generator().manual_seed(seed)
    rows, regions, ranks = [], [], []
    for images, text in prompts:
        words = torch.randint(10, 60, (2 + text,), generator=generator)
        head, tail = words[:2], words[2:]
        rows.append(torch.cat([head, torch.full((images * visual,), 4), tail]))
        codes = [Region.SYSTEM] * 2 + [Region.VISUAL] * (images * visual)
        codes += [Region.QUERY] * (text - 2) + [Region.ANSWER] * 2
        regions.append(torch.tensor(codes))
        ranks.append(len(codes) - 3 if images else -1)
    counts = [images for images, _ in prompts]
    pixels = torch.randn(sum(counts), 3, 96, 96, generator=generator) if sum(counts) else None
    return assembled(rows, regions, ranks, pad_left, counts, pixel_values=pixels)


def only_sample(batch: Batch, index: int) -> Batch:
    real = batch.regions_BN[index] != Region.PADDING
    first_image = int(batch.images_per_sample_B[:index].sum())
    images = int(batch.images_per_sample_B[index])
    rank = int(batch.rank_position_B[index])
    shift = int(real.long().argmax()) if rank >= 0 else 0
    own = slice(first_image, first_image + images)
    grid = batch.image_grid_I3
    if grid is not None:  # patches, or tiles, of all images one after another
        patches = grid[:, 0] if batch.pixel_values is not None and batch.pixel_values.dim() == 4 else grid.prod(-1)
        start = int(patches[:first_image].sum())
        own = slice(start, start + int(patches[own].sum()))
        grid = grid[first_image : first_image + images] if images else None
    return Batch(
        batch.input_ids_BN[index : index + 1, real], batch.labels_BN[index : index + 1, real],
        batch.regions_BN[index : index + 1, real], torch.tensor([rank - shift]),
        batch.pixel_values[own] if images else None, batch.images_per_sample_B[index : index + 1],
        batch.record_ids[index : index + 1], grid,
        None if batch.seconds_I is None or not images else batch.seconds_I[first_image : first_image + images],
    )  # fmt: skip


def compress(family: Family, routing: RoutingConfig | None = None, **reducer: object) -> CompressedBackbone:
    config = build_reducer(**{"name": "none", **reducer})
    bank = None if routing is None else RouterBank(routing, family.hidden_size, family.shape)
    return CompressedBackbone(family, config, bank)


def opened(
    backbone: CompressedBackbone, batch: Batch, compression: Compression | None = None, protocol: str = "query_aware"
) -> tuple[PromptPass, PackedCache]:
    """The pass of a batch's prompts, and the cache that it leaves."""
    cache = PackedCache(backbone.family.shape.num_layers)
    return open_prompts(backbone, batch, cache, compression or Compression(), protocol), cache


def check_alone(backbone: CompressedBackbone, batch: Batch, pad_left: bool) -> PromptPass:
    """Assert that each sample of a batch has the logits and closed-up positions that it has alone; the batch's pass."""
    together = backbone.run(batch, pad_left=pad_left)
    logits = backbone.logits(together)
    for index in range(len(batch.record_ids)):
        alone = backbone.run(only_sample(batch, index))
        seen = together.rows.visible_BM[index]
        assert together.rows.position[index][seen].tolist() == list(range(int(seen.sum())))
        torch.testing.assert_close(logits[index][seen], backbone.logits(alone)[0], rtol=1e-4, atol=1e-4)
    return together


def unread(states: VisualStates) -> list[Tensor]:
    """No token is read from any of the images' rows, as ``TowerReducer.merge`` takes it."""
    return [torch.zeros(len(tokens), dtype=torch.bool) for tokens in states.tokens]


def watch_last(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Call a forward hook in every call after the hooks that are there when it begins, the routers' among them."""

    def enter(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        module._forward_hooks.pop(handle.id, None)
        module._forward_hooks[handle.id] = hook

    handle = module.register_forward_hook(hook)
    module.register_forward_pre_hook(enter)


@torch.no_grad()
def sharpen(family: Family, factor: float = 6.0) -> Any:
    for attention in (layer.self_attn for layer in family.decoder.layers):
        fused = hasattr(attention, FUSED)
        rows = [attention.qkv_proj.weight[:-32]] if fused else [attention.q_proj.weight, attention.k_proj.weight]
        for weight in rows:
            weight.mul_(factor)
    return family


def random_scores(seed: int, *shape: int, levels: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores of ``shape``: normal numbers, or whole numbers below ``levels``, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(levels, shape, generator=generator).to(dtype)


def random_mask(seed: int, *shape: int, share: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def save_backbone(family: Family, folder: Path) -> Path:
    family.model.save_pretrained(folder)
    family.processor.save_pretrained(folder)
    return folder


def drawn_llava(layers: int) -> LlavaFamily:
    torch.manual_seed(0)
    return LlavaFamily(build_model(text_layers=layers).eval(), build_processor())


def gqa_family(num_kv_heads: int = 2) -> LlavaFamily:
    """The random tiny LLaVA with fewer key-value heads than its four query heads."""
    torch.manual_seed(0)
    config = build_model().config
    config.text_config.num_key_value_heads = num_kv_heads
    return LlavaFamily(LlavaForConditionalGeneration(config).eval(), build_processor())


def interrupted_fit(argv: list[str], after_step: int) -> int:
    from lightning.pytorch.callbacks import Callback

    from subtoken_train.cli import recipe
    from subtoken_train.cli.main import main

    class Interrupt(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == after_step:
                os.kill(os.getpid(), signal.SIGINT)

    original = recipe.RecipeCLI.build_trainer

    def with_interrupt(self):
        trainer = original(self)
        trainer.callbacks.insert(0, Interrupt())
        return trainer

    recipe.RecipeCLI.build_trainer = with_interrupt
    try:
        return main(argv)
    finally:
        recipe.RecipeCLI.build_trainer = original


def last_state(run: Path) -> dict:
    return torch.load(state_path(newest_complete(run / "checkpoints")), weights_only=True)


def moved_by_fit(cli: RecipeCLI) -> set[str]:
    """Names of the parameters that a run moves: exactly those that it says it trains."""
    parts = cli.model.parts
    before = {name: parameter.clone() for name, parameter in parts.named_parameters()}
    cli.trainer.fit(cli.model, cli.datamodule)
    moved = {name for name, parameter in parts.named_parameters() if not torch.equal(parameter, before[name])}
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    return moved


@dataclass(frozen=True)
class FirstEntries(Eviction):
    """The earliest entries are best; the last ``window`` are protected."""

    name: ClassVar[str] = "first"
    window: int = 1
    weight: float = 1.0
    loud: bool = False
    mode: str = "plain"

    def score(self, view: View) -> Scores:
        entries = view.entries_BN
        late = entries.flip(-1).long().cumsum(-1).flip(-1) <= self.window
        places = torch.arange(entries.shape[1], device=entries.device, dtype=torch.float32)
        return Scores(-places.expand_as(entries)[:, None] * self.weight, entries & late)


@dataclass(frozen=True)
class FirstVisual(FirstEntries):
    """The same among visual entries, for models that see images."""

    name: ClassVar[str] = "first_visual"
    needs_image: ClassVar[bool] = True
    window: int = 0


SMALL_LORA = LoraSettings(rank=2)


def made_adapter(
    folder: Path,
    backbone: Path,
    reducer: Reducer,
    routing: RoutingConfig | None,
    lora: LoraSettings = SMALL_LORA,
    stage2: Stage2Config | None = None,
    spread: float = 0.0,
    **training: object,
) -> tuple[Path, CompressedBackbone]:
    """An adapter folder on a saved backbone, and what was written; what trains is drawn anew with a ``spread``."""
    source = BackboneConfig(path=str(backbone))
    parts, peft_model = build(source, lora, reducer, routing, stage2)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if spread and ("lora_" in name or "bank" in name):
                parameter.normal_(std=spread)
    identity = identify(parts.family, source)
    config = AdapterConfig(source, lora, reducer, routing, identity, {"name": "tiny", **training}, stage2)
    return write_adapter(folder, config, parts, peft_model), parts.eval()


def write_vlm_adapter(folder: Path) -> Path:
    """FastV 25 %, S = 4, K = 1 on a random tiny LLaVA (64 visual tokens, 3 layers); ``backbone`` lies beside it."""
    save_backbone(drawn_llava(3), folder / "backbone")
    reducer, routing = build_reducer("fastv", keep_ratio=0.25), RoutingConfig(num_groups=4, kept_groups=1)
    return made_adapter(folder / "adapter", folder / "backbone", reducer, routing)[0]


def write_text_adapter(folder: Path) -> Path:
    """Quest 50 % in pages of 4, S = 4, mean K = 1, query-conditioned, on a random tiny Llama of two layers."""
    torch.manual_seed(0)
    tiny_llama.build_model(layers=2).save_pretrained(folder / "backbone")
    tiny_llama.build_tokenizer().save_pretrained(folder / "backbone")
    reducer = build_reducer("quest", keep_ratio=0.5, page_size=4, window=4)
    routing = RoutingConfig(num_groups=4, kept_groups=1, budget="global", query_conditioned=True)
    return made_adapter(folder / "adapter", folder / "backbone", reducer, routing)[0]


@torch.no_grad()
def check_logits(family: Family, given: Mapping[str, Tensor], batch: Batch, side: str) -> None:
    """Check that neutral settings give the logits of ``given`` bit for bit, a reducer that keeps all to 1e-5."""
    seen = given["attention_mask"].bool()
    counted = {"position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    expected = family.model(**given, **({} if family.tower_positions == "mrope" else counted)).logits[seen]
    backbone = compress(family)
    assert torch.equal(backbone.logits(backbone.run(batch))[seen], expected)
    forced = compress(family, name="fastv", keep_ratio=1.0)
    got = forced.logits(forced.run(batch, pad_left=side == "left", force_gather=True))[seen]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


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

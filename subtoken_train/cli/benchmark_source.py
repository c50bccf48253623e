"""The subject of ``benchmark``: an adapter, a recipe's untrained arm or a backbone, laid out before it is loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.folder import put_adapter
from subtoken_train.artifact.hub import adapter_folder, find_adapter
from subtoken_train.benchmarking.synthetic_prompts import Shrink, random_family
from subtoken_train.cli.arm_flags import arm_options
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig, is_hub_id
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import adapter_backbone
from subtoken_train.reducers import build_reducer
from subtoken_train.routing.bank import RouterBank


@dataclass(frozen=True)
class BenchmarkSource:
    """A model that can be looked at without its weights: laid out, its identity and shapes checked.

    ``load`` loads it.
    """

    words: str
    backbone: BackboneConfig
    layout: CompressedBackbone
    compression: Compression
    load: Callable[[torch.device], CompressedBackbone]


def source_of(args: Namespace, shrink: Shrink) -> BenchmarkSource:
    """Return the subject that the options name, with its compression; no weights of a backbone are read."""
    source = _recipe(args, shrink) if args.config else _adapter(args) if args.adapter else _backbone(args, shrink)
    source.compression.check(source.layout.family)
    return source


def _spec(args: Namespace, **model: Any) -> ArmSpec:
    return ArmSpec(**{**arm_options(args), **model}, written="flag")


def _adapter(args: Namespace) -> BenchmarkSource:
    spec = _spec(args, adapter=args.adapter)
    if spec.overrides:
        raise ValueError(
            f"{args.adapter} is an adapter with its own reducer and routers; leave --reducer, --keep-ratio and "
            "--selector out"
        )
    folder = adapter_folder(args.adapter)
    config = read_config(folder)
    if config.merged and args.backbone:
        raise ValueError(f"{args.adapter} is merged and holds its own backbone; leave --backbone out")
    backbone = replace(adapter_backbone(folder, config, args.backbone or None), **spec.loading)

    def put(family: Family) -> CompressedBackbone:
        return put_adapter(folder, config, family, backbone)[0]

    def load(device: torch.device) -> CompressedBackbone:
        if args.random:
            return put(random_family(backbone, Shrink(), device)).to(device).eval()
        return spec.load(str(device)).backbone

    words = f"adapter {config.training.get('name', args.adapter)} on {args.backbone or config.backbone.path}"
    return BenchmarkSource(words, backbone, put(layout_family(backbone)), spec.compression(), load)


def _backbone(args: Namespace, shrink: Shrink) -> BenchmarkSource:
    drawn = args.random and is_hub_id(args.model)  # the Hub is not asked for what is drawn
    if not drawn and find_adapter(args.model, None) is not None:
        raise ValueError(f"--model {args.model} is an adapter; write --adapter {args.model}")
    spec = _spec(args, backbone=args.model)
    backbone = replace(BackboneConfig(path=args.model), **spec.loading)
    reducer = build_reducer(spec.reducer or "none", 1.0 if spec.keep_ratio is None else spec.keep_ratio)

    def around(family: Family) -> CompressedBackbone:
        bank = None if spec.routing is None else RouterBank(spec.routing, family.hidden_size, family.shape)
        return CompressedBackbone(family, reducer, bank)

    def load(device: torch.device) -> CompressedBackbone:
        if args.random:
            return around(random_family(backbone, shrink, device)).to(device).eval()
        return spec.load(str(device)).backbone

    layout = around(layout_family(backbone, shrink.apply if args.random else None))
    return BenchmarkSource(f"backbone {args.model}", backbone, layout, spec.compression(), load)


def _recipe(args: Namespace, shrink: Shrink) -> BenchmarkSource:
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.training.preflight import lay_out

    own = ("reducer", "keep_ratio", "selector", "groups", "layout")
    if given := [name for name in own if getattr(args, name) is not None]:
        raise ValueError(f"--{given[0].replace('_', '-')}: the recipe names its own reducer and routers; leave it out")
    loading = {name: value for name in ("dtype", "max_pixels") if (value := getattr(args, name)) is not None}
    overrides = [f"--model.backbone.{name}={value}" for name, value in loading.items()]
    module = RecipeCLI(["--config", args.config, *overrides]).model
    backbone = module.backbone_config
    compression = _spec(args, backbone=backbone.path).compression()

    def load(device: torch.device) -> CompressedBackbone:
        drawn = module.lay_out(random_family(backbone, shrink, device))[0] if args.random else None
        parts: CompressedBackbone = module.parts if drawn is None else drawn
        return parts.to(device).eval()

    if args.random:
        with torch.device("meta"):
            layout = module.lay_out(layout_family(backbone, shrink.apply))[0]
    else:
        layout = lay_out(module)
    return BenchmarkSource(f"recipe {args.config}, untrained, on {backbone.path}", backbone, layout, compression, load)

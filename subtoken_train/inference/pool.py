"""From names to models in evaluation mode: an adapter with the backbone that it names, or a backbone alone."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from subtoken_train.artifact.config import AdapterConfig, read_config
from subtoken_train.artifact.folder import adapter_digest, put_adapter
from subtoken_train.artifact.hub import adapter_folder, find_adapter
from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.documents import real_path
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import check_word, refuse
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.family import Family
from subtoken_train.families.load import (
    family_class,
    free_memory,
    is_spread,
    layout_family,
    load_family,
    published_config,
    spread_memory,
    stored_dtype,
)
from subtoken_train.families.lora import remove_lora
from subtoken_train.ledger.kv_budget import check_share
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig, check_untrained
from subtoken_train.routing.bank import RouterBank


def device_of(device: str | int | torch.device) -> torch.device:
    """Return a device of this machine; ``auto``: the first GPU, else the CPU; a number: that GPU, -1: the CPU."""
    name = ("cpu" if device == -1 else f"cuda:{device}") if isinstance(device, int) else str(device)
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    check_word("device of this machine", name, ["auto", "cpu", *gpus, *(["cuda"] if gpus else [])])
    return torch.device(name)


class ModelPool:
    """Hands out backbones with an adapter's LoRA, reducer and routers, and reads weights as seldom as it can.

    Arms that name the same backbone (path, revision, dtype, ...) take turns on one loaded family: only the arm that was
    handed out last runs. ``device_map``: where models run, None: where they are loaded; ``auto`` may spread a model.
    """

    def __init__(self, device_map: str | int | torch.device | None = None) -> None:
        self.loads = 0
        self._device = None if device_map is None else device_of(device_map)
        self._spreads = device_map == "auto"
        self._source: BackboneConfig | None = None
        self._family: Family | None = None
        self._current: CompressedBackbone | None = None

    def find(self, name: str | Path, revision: str | None = None) -> Path | None:
        """Return the folder of what may be an adapter, see ``find_adapter``; no published backbone is one."""
        return None if published_config(str(name)) is not None else find_adapter(name, revision)

    def folder(self, adapter: str) -> Path:
        """Return the folder of an adapter, see ``adapter_folder``."""
        return adapter_folder(adapter)

    def adapter(self, adapter: str) -> AdapterConfig:
        """Return an adapter's settings."""
        return read_config(self.folder(adapter))

    def digest(self, adapter: str) -> str | None:
        """Return the digest of an adapter's settings and tensors; None if there is no such adapter."""
        return adapter_digest(self.folder(adapter))

    def get(
        self,
        path: str | Path,
        *,
        revision: str | None = None,
        backbone: BackboneConfig | str | None = None,
        reducer: Reducer | None = None,
        selector: str | None = None,
        byte_share: float | None = None,
        seed: int | None = None,
        routing: RoutingConfig | None = None,
        loading: Mapping[str, Any] | None = None,
    ) -> CompressedBackbone:
        """Return an arm in evaluation mode; it holds until the next call.

        Args:
            reducer: takes the place of the adapter's own (a matched anchor: the same LoRA at another ratio).
            selector: takes the place of the adapter's routers: ``none`` (values stay whole), or a router-free selector
                at the same S and K, with a ``seed`` where it draws.
            byte_share: takes the place of the adapter's own; for routers with one byte budget.
            loading: settings of the backbone (dtype, max_pixels) in the place of its own.
        """
        chooses, named = selector not in (None, "none"), isinstance(backbone, str)
        if chooses:
            check_untrained(str(selector))
        if (folder := self.find(path, revision)) is None:
            alone = f"{path} is not an adapter folder (no {CONFIG_FILE}); backbone={backbone!r} needs one"
            routes = f"selector={selector!r} takes the place of an adapter's routers; {path} has no adapter"
            spends = f"byte_share={byte_share} is for an adapter's routers; {path} has no adapter"
            refuse((named, alone), (chooses, routes), (byte_share is not None, spends))
            source = replace(backbone if isinstance(backbone, BackboneConfig) else BackboneConfig(), **(loading or {}))
            source = replace(source, path=str(path), revision=revision or source.revision)
            reducer = reducer or build_reducer("none")
            family = self._cleared(source, reducer)
            bank = None if routing is None else RouterBank(routing, family.hidden_size, family.shape)
            self._current = CompressedBackbone(family, reducer, bank)
            return self._placed(self._current)
        config = read_config(folder)
        refuse(
            (routing is not None, f"{path} is an adapter with its own value groups; leave groups out"),
            (config.merged and named, f"{path} is merged and holds its own backbone; leave backbone out"),
        )
        source = replace(adapter_backbone(folder, config, backbone), **(loading or {}))
        changed = with_selection(
            config, str(path), reducer=reducer, selector=selector, seed=seed, byte_share=byte_share
        )
        family = self._cleared(source, changed.reducer)
        own = selector is None or changed.routing == config.routing
        self._current, _ = put_adapter(folder, changed, family, source, routers=own)
        return self._placed(self._current)

    def _cleared(self, source: BackboneConfig, reducer: Reducer) -> Family:
        if self._current is not None:
            self._current.detach()
            self._current = None
        wanted = in_one_place(source)
        if self._family is not None and wanted == self._source:
            remove_lora(self._family)
            return self._family
        self._source = self._family = None  # its memory is free before the next one is read
        self._family, self._source = self._load(source, reducer), wanted
        self.loads += 1
        return self._family

    def _load(self, source: BackboneConfig, reducer: Reducer) -> Family:
        """Read the weights; some pools lay models out, or draw them."""
        free = free_memory() if self._spreads else []
        memory = None if len(free) < 2 else spread_memory(layout_family(source), source, free)
        return load_family(source, reducer, memory)

    def _placed(self, backbone: CompressedBackbone) -> CompressedBackbone:
        if is_spread(backbone.model):
            if backbone.bank is not None:
                backbone.bank.place([next(layer.parameters()).device for layer in backbone.family.decoder.layers])
        elif self._device is not None:
            backbone.to(self._device)
        return backbone.eval()


def load_backbone(
    path: str | Path,
    revision: str | None = None,
    backbone: BackboneConfig | str | None = None,
    reducer: Reducer | None = None,
    device: str | int | torch.device | None = None,
    **settings: Any,
) -> CompressedBackbone:
    """Load an adapter with its backbone, or a backbone alone, from disk or from the Hub."""
    own = reducer is not None and find_adapter(path, revision) is not None
    refuse((own, f"{path} is an adapter with its own token reducer; leave reducer out"))
    return ModelPool(device).get(path, revision=revision, backbone=backbone, reducer=reducer, **settings)


def loading_of(path: str | Path, revision: str | None, dtype: str | torch.dtype | None) -> dict[str, str]:
    """Return the settings of a backbone for a dtype of torch; ``auto``: an adapter's own, or that of the weights."""
    name = str(dtype).removeprefix("torch.")
    if dtype is None or (name == "auto" and find_adapter(path, revision) is not None):
        return {}
    return {"dtype": stored_dtype(BackboneConfig(path=str(path), revision=revision)) if name == "auto" else name}


def family_named(path: str | Path, backbone: str | None = None) -> type[Family]:
    """Return the family of an adapter's backbone, or of a backbone, without loading weights."""
    if (folder := find_adapter(path, None)) is None:
        return family_class(BackboneConfig(path=str(path)))
    return family_class(adapter_backbone(folder, read_config(folder), backbone))


def adapter_backbone(folder: Path, config: AdapterConfig, backbone: BackboneConfig | str | None) -> BackboneConfig:
    """Return the source of an adapter's backbone."""
    source = replace(config.backbone, path=backbone, revision=None) if isinstance(backbone, str) else backbone
    source = config.backbone if source is None else source
    return replace(source, path=str(folder), revision=None) if config.merged else source


def with_selection(
    config: AdapterConfig,
    name: str,
    *,
    reducer: Reducer | None,
    selector: str | None,
    seed: int | None,
    byte_share: float | None,
) -> AdapterConfig:
    """Return the settings of the adapter called ``name`` with another reducer, selector or share of bytes."""
    changed, routing = config if reducer is None else replace(config, reducer=reducer), config.routing
    frozen = f"ranking 'frozen' ranks without the LoRA, which {name} has merged into its weights"
    unrouted = selector not in (None, "none") and routing is None
    both = byte_share is not None and selector is not None
    refuse(
        (changed.merged and changed.reducer.frozen_scout, f"{frozen}; use the unmerged adapter, or ranking adapted"),
        (unrouted, f"selector={selector!r}: {name} routes nothing, so there is no S and K for it to use"),
        (both, f"byte_share={byte_share} is for routers, whose place selector={selector!r} takes; leave one out"),
    )
    if byte_share is not None:
        check_share("byte_share", byte_share)
        if routing is None or routing.budget != "bytes":
            raise ValueError(f"byte_share={byte_share}: {name} spends no byte budget; leave it out")
        return replace(changed, routing=replace(routing, byte_share=byte_share))
    if selector is None or routing is None:
        return changed
    free = None if selector == "none" else routing.without_router(selector)
    return replace(changed, routing=free if free is None or seed is None else replace(free, seed=seed))


def in_one_place(source: BackboneConfig) -> BackboneConfig:
    """Spell a backbone's folder in one way, however it was written, so that equal ones share loaded weights."""
    found = resolve(source.path)
    return replace(source, path=str(real_path(found))) if Path(found).exists() else source

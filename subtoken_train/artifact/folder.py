"""Write and read the adapter folder; read the one that stage 2 of two-stage training starts from.

``adapter_config.json`` and ``adapter_model.safetensors`` load with plain peft; ``router.safetensors`` holds the routers
(peft would drop or double them silently); ``subtoken_config.json`` says how they were trained; ``README.md`` is the
model card. After two-stage training the folder holds stage 1's LoRA at the top, as ever, and in ``output/`` the LoRA on
``o_proj`` where there is one, loadable with plain peft as a second adapter. A *merged* folder holds
a whole transformers checkpoint in the place of the LoRA. No pickle, no remote code.

READING. The paper (section 4.4) says that "the LoRA-adapted VLM backbone and token-level anchor are first trained and
fixed", not at which token keep ratio. Three adapters fit these words, and each is taken under its own name:

- ``SAME_TOKENS``: token-only, trained under the very reducer of stage 2 (the default, which the recipes name);
- ``LORA_ONLY``: LoRA trained without a token reducer;
- ``MATCHED_ANCHOR``: token-only, the same reducer at the keep ratio that has stage 2's bytes.

The name stands in what ``check`` prints, in what ``fit`` says at its start, and in the adapter's card.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from subtoken_train.artifact.card import CardSections, model_card
from subtoken_train.artifact.config import (
    LORA_FILE,
    SCHEMA_VERSION,
    AdapterConfig,
    check_finite,
    read_config,
    read_exactly,
)
from subtoken_train.artifact.hub import adapter_in
from subtoken_train.artifact.identity import check_identity, identify
from subtoken_train.artifact.whole_folder import CONFIG_FILE, PICTURE_FILE, RECIPE_FILE, whole_folder
from subtoken_train.engine.build import add_adapters
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.gguf_files import is_gguf
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import MAIN_ADAPTER, OUTPUT_ADAPTER, LoraSettings
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.version import __version__

ROUTER_FILE = "router.safetensors"
CARD_FILE = "README.md"


def write_adapter(
    folder: Path,
    config: AdapterConfig,
    backbone: CompressedBackbone,
    peft_model: PeftModel,
    overwrite: bool = False,
    sections: CardSections | None = None,
) -> Path:
    """Write the folder whole or not at all; only adapters and routers need values, not the backbone."""
    with whole_folder(folder, overwrite) as temporary:
        for peft_config in peft_model.peft_config.values():
            peft_config.base_model_name_or_path = config.backbone.path
        peft_model.save_pretrained(temporary, safe_serialization=True, save_embedding_layers=False)
        write_rest(temporary, config, backbone, sections)
    return folder


def write_rest(
    folder: Path, config: AdapterConfig, backbone: CompressedBackbone, sections: CardSections | None
) -> None:
    """Write what a folder holds besides LoRA or weights: routers, configuration, card, recipe and picture."""
    routers = _router_tensors(backbone.bank)
    if routers:
        save_file(routers, folder / ROUTER_FILE)
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "lightning")}
    versions["subtoken_train"] = __version__
    record = {"schema_version": SCHEMA_VERSION, **asdict(config), "packages": config.packages(), "versions": versions}
    (folder / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(model_card(record, sections), encoding="utf-8")
    if sections is not None and sections.recipe is not None:
        (folder / RECIPE_FILE).write_text(sections.recipe, encoding="utf-8")
    if sections is not None and sections.picture is not None:
        (folder / PICTURE_FILE).write_bytes(sections.picture)


def read_adapter(
    folder: Path, backbone: BackboneConfig | None = None, layout: bool = False
) -> tuple[AdapterConfig, CompressedBackbone, PeftModel | None]:
    """Load backbone, LoRA and routers, strictly in both directions.

    Args:
        folder: the adapter folder.
        backbone: overrides where the backbone is loaded from (a local copy, another dtype); its identity must match.
            A merged folder is its own backbone.
        layout: leave the backbone on the meta device, without weights: enough to write the adapter again.

    Returns:
        Configuration, model, and the ``PeftModel`` around it; None for a merged folder, which has no LoRA.
    """
    config = read_config(folder)
    source = backbone or config.backbone
    if config.merged:
        source = replace(source, path=str(folder), revision=None)
    family = (layout_family if layout else load_family)(source)
    return config, *put_adapter(folder, config, family, source)


def put_adapter(
    folder: Path, config: AdapterConfig, family: Family, source: BackboneConfig, routers: bool = True
) -> tuple[CompressedBackbone, PeftModel | None]:
    """Put a folder's LoRA and routers on a loaded family without any; as ``read_adapter``.

    Args:
        folder: the adapter folder.
        config: what it says of itself, or that with another reducer or another selector.
        family: as ``source`` names it.
        source: where the family is from.
        routers: False where ``config`` was given other routers than the folder's.
    """
    peft_model = None if config.merged else add_adapters(family, config.lora, config.stage2)
    check_identity(config.identity, identify(family, source))
    if peft_model is not None:
        load_lora(folder, peft_model)
    elif family.model.device.type != "meta":
        check_finite(dict(family.model.named_parameters()), folder)
    bank = None if config.routing is None else RouterBank(config.routing, family.hidden_size, family.shape)
    if routers:
        load_routers(folder, bank)
    # last, because it puts hooks on the family
    compressed = CompressedBackbone(family, config.reducer, bank)
    compressed.eval()
    return compressed, peft_model


def load_lora(folder: Path, peft_model: PeftModel) -> None:
    """Put a folder's LoRA, and any on ``o_proj``, into the model; onto the CPU where the model has no weights."""
    for adapter in peft_model.peft_config:
        put_lora(peft_model, lora_tensors(folder, peft_model, adapter), adapter)
    if OUTPUT_ADAPTER not in peft_model.peft_config and (folder / OUTPUT_ADAPTER).exists():
        raise ValueError(f"{folder} holds {OUTPUT_ADAPTER}/, but its {CONFIG_FILE} names no output LoRA")


def put_lora(peft_model: PeftModel, tensors: dict[str, Tensor], adapter: str = MAIN_ADAPTER) -> None:
    """Put tensors, named as in peft's files, into one LoRA of the model."""
    model = peft_model.base_model.model
    if model.device.type != "meta":
        set_peft_model_state_dict(peft_model, tensors, adapter_name=adapter)
        return
    # peft would move them back to the device of the weights around them
    own = {name.removeprefix("base_model.model.").removesuffix("weight"): tensor for name, tensor in tensors.items()}
    renamed = {f"{name}{adapter}.weight": tensor for name, tensor in own.items()}
    assert not model.load_state_dict(renamed, strict=False, assign=True).unexpected_keys


def load_routers(folder: Path, bank: RouterBank | None) -> None:
    """Put a folder's routers into the bank; a file that none needs is an error."""
    routers = _router_tensors(bank)
    if routers:
        assert bank is not None
        bank.load_state_dict(read_exactly(folder / ROUTER_FILE, routers))
    elif (folder / ROUTER_FILE).exists():
        raise ValueError(f"{folder} holds {ROUTER_FILE}, but its {CONFIG_FILE} names no router: the files disagree")


def lora_tensors(folder: Path, peft_model: PeftModel, adapter: str = MAIN_ADAPTER) -> dict[str, Tensor]:
    """Read the tensors of one of a folder's LoRAs, which must fit ``peft_model``'s exactly."""
    expected = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
    return read_exactly((folder if adapter == MAIN_ADAPTER else folder / adapter) / LORA_FILE, expected)


def _router_tensors(bank: RouterBank | None) -> dict[str, Tensor]:
    """Return the routers' tensors; empty for token-only arms and router-free selectors."""
    return {} if bank is None else {name: tensor.contiguous() for name, tensor in bank.state_dict().items()}


def write_merged(
    folder: Path,
    config: AdapterConfig,
    backbone: CompressedBackbone,
    peft_model: PeftModel,
    overwrite: bool = False,
    sections: CardSections | None = None,
) -> Path:
    """Merge every LoRA into the weights and write model, processor, routers, configuration and card.

    The update is added in the dtype of the backbone's weights: exact to rounding in fp32, and rounded to bfloat16 in
    bfloat16. The model that was handed in has no LoRA afterwards.
    """
    check_mergeable(backbone)
    with whole_folder(folder, overwrite) as temporary:
        model = peft_model.merge_and_unload(safe_merge=True, adapter_names=list(peft_model.peft_config))
        model.save_pretrained(temporary)
        backbone.family.processor.save_pretrained(temporary)
        revision = None if is_gguf(config.identity.path) else config.identity.revision  # its weights are new ones
        merged = replace(config, merged=True, identity=replace(config.identity, revision=revision))
        write_rest(temporary, merged, backbone, sections)
    return folder


def check_mergeable(backbone: CompressedBackbone) -> None:
    """Raise ``ValueError`` if a LoRA sits on no floating-point numbers, or must be left out for ranking."""
    if backbone.reducer.frozen_scout:
        raise ValueError(
            "cannot merge an adapter whose reducer ranks by the backbone alone (reducer.ranking: frozen): merged "
            "weights cannot run without the LoRA; export it without --merge-lora"
        )
    for name, module in backbone.model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not base.weight.is_floating_point():
            kind = str(base.weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"cannot merge into a quantised backbone ({name} holds {kind}): rounding would change what was "
                "trained; export the adapter without --merge-lora, or name an unquantised copy with --backbone"
            )


SAME_TOKENS = "token-only, under the same reducer"
LORA_ONLY = "LoRA alone, without a token reducer"
MATCHED_ANCHOR = "the matched token-only anchor"
ONE_TOKEN = Fraction(1, 64)
"""Share by which an anchor's keep ratio may lie above its arm's bytes: a token of the smallest image that is served."""


@dataclass(frozen=True)
class FirstStage:
    """An adapter that a recipe's stage 2 may start from; ``reading``: which of the three stages 1 above it is."""

    folder: Path
    config: AdapterConfig
    reading: str

    def digest(self) -> str:
        """Return the SHA-256 of the LoRA's file as it is now."""
        return hashlib.sha256((self.folder / LORA_FILE).read_bytes()).hexdigest()

    def tensors(self, family: Family, backbone: BackboneConfig, peft_model: PeftModel) -> dict[str, Tensor]:
        """Return the LoRA's tensors, by the names that ``set_peft_model_state_dict`` takes."""
        check_identity(self.config.identity, identify(family, backbone))
        return lora_tensors(self.folder, peft_model)


def read_first_stage(
    folder: Path, reducer: Reducer, routing: RoutingConfig | None, lora: LoraSettings | None
) -> FirstStage:
    """Read stage 1's configuration (no weights), check it against stage 2's recipe, and name the reading that it is.

    ``folder`` is the token-only adapter, or its run. The recipe's routing tells a matched anchor by its bytes; its LoRA
    settings, if any, must be stage 1's.
    """
    if not folder.is_dir():
        raise ValueError(f"stage2.adapter {folder} does not exist; train the token-only recipe (routing: null) first")
    folder = adapter_in(folder) or folder
    config = read_config(folder)
    if config.routing is not None:
        raise ValueError(
            f"stage2.adapter {folder} already routes ({config.routing.words}); stage 2 starts from a token-only "
            "adapter (routing: null)"
        )
    if lora is not None and (differing := _differing("lora", config.lora, lora)):
        raise ValueError(f"stage2.adapter {folder} was trained with {', '.join(differing)}")
    reading = _reading(config.reducer, reducer, routing)
    if reading is None:
        differing = _differing("reducer", config.reducer, reducer)
        raise ValueError(
            f"stage2.adapter {folder} was trained with {', '.join(differing)}; stage 1 has the recipe's reducer, or "
            "none (lora_only), or is the matched anchor"
        )
    return FirstStage(folder, config, reading)


def _reading(trained: Reducer, recipe: Reducer, routing: RoutingConfig | None) -> str | None:
    """Name what stage 1 was trained as; None where it is none of the three."""
    if not _differing("reducer", trained, recipe):
        return SAME_TOKENS
    if not trained.acts:
        return LORA_ONLY
    if routing is None or recipe.staged or not trained.round_up or _own(trained) != _own(recipe):
        return None
    if trained.matches not in (None, recipe.keep_ratio):
        return None
    total = replace(routing.token_budget, keep_ratio=recipe.keep_ratio).exact_total
    return MATCHED_ANCHOR if total <= Fraction(str(trained.keep_ratio)) < total + ONE_TOKEN else None


def _own(reducer: Reducer) -> dict[str, Any]:
    """Return a reducer's settings but for how many tokens it keeps."""
    return {key: value for key, value in asdict(reducer).items() if key not in ("keep_ratio", "round_up", "matches")}


def _differing(group: str, trained: Any, recipe: Any) -> list[str]:
    """Name the keys in which two settings differ; of two methods, those that both have."""
    ours = asdict(recipe)
    return [
        f"{group}.{key} {value} (the recipe has {ours[key]})"
        for key, value in asdict(trained).items()
        if key in ours and value != ours[key]
    ]

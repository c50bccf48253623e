"""Identities, and the adapter folder: write, read, and read the one that stage 2 of two-stage training starts from.

``adapter_config.json`` and ``adapter_model.safetensors`` load with plain peft, as the LoRA on ``o_proj`` in
``output/``; ``router.safetensors`` holds the routers, which peft would drop or double. A *merged* folder holds a whole
checkpoint.

READING. The paper (section 4.4) says that "the LoRA-adapted VLM backbone and token-level anchor are first trained and
fixed", not at which keep ratio. Three adapters fit: token-only under stage 2's reducer (``SAME_TOKENS``, the default);
LoRA without a reducer (``LORA_ONLY``); token-only at stage 2's bytes (``MATCHED_ANCHOR``). ``check``, ``fit`` and the
card say which it is.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
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
from subtoken_train.artifact.whole_folder import CONFIG_FILE, PICTURE_FILE, RECIPE_FILE, whole_folder
from subtoken_train.engine.build import add_adapters
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import refuse
from subtoken_train.families.backbone_config import BackboneConfig, is_gguf, resolve
from subtoken_train.families.backbone_files import gguf_digest
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import MAIN_ADAPTER, OUTPUT_ADAPTER, LoraSettings
from subtoken_train.functional.hashing import digest_of
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.typed import shown
from subtoken_train.types import Identity
from subtoken_train.version import __version__


def identify(family: Family, config: BackboneConfig) -> Identity:
    """Return the identity of a backbone, whatever its LoRA, quantisation and sharding; a GGUF file has its SHA-256."""
    revision = _FILE + gguf_digest(Path(resolve(config.path))) if is_gguf(config.path) else config.revision
    return Identity(config.path, revision, str(family.model.config.model_type), shapes_digest(family))


def check_identity(wanted: Identity, found: Identity) -> None:
    """Raise ``ValueError`` if an adapter meets a backbone of another architecture, or one of a GGUF file another."""
    ours, here = (f"{each.path!r} ({each.model_type}, {each.digest[:12]})" for each in (wanted, found))
    other = f"the adapter was trained on {ours}, but the backbone is {here}"
    refuse((wanted.digest != found.digest, f"{other}; load the backbone that it names"))
    if (file := wanted.revision or "").startswith(_FILE) and found.revision != file:
        ours, here = f"{wanted.path!r} ({file[:19]})", (found.revision or "no GGUF file")[:19]
        words = f"the adapter was trained on the GGUF file {ours}, and {found.path!r} is not that file ({here})"
        raise ValueError(f"{words}; load the file that it names")


_FILE = "sha256-"
_FILES = ("*.json", "*.safetensors")
"""Files that a model is made of; the card and the recipe beside it may be written anew."""


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter folder's settings and tensors (merged weights too), wherever it lies."""
    paths = {path.relative_to(folder).as_posix(): path for kind in _FILES for path in folder.rglob(kind)}
    digest = hashlib.sha256()
    for name, path in sorted(paths.items()):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


SAMPLED = 64
"""Numbers of each tensor of a backbone that ``model_identity`` reads: a fine-tuned one differs in most of them."""


@dataclass(frozen=True)
class ModelIdentity:
    """Model that a cache belongs to, wherever it was loaded from."""

    backbone: Identity
    weights: str
    """SHA-256 of ``SAMPLED`` numbers of each of its tensors as they are stored, rotary settings, windows, epsilon."""
    adapter: str | None  # SHA-256 of LoRA (scaling included), routers and the routing's settings; None without any
    tokenizer: str | None = None  # as ``tokenizer_digest`` makes it; None in files of version 0.2


def model_identity(backbone: CompressedBackbone) -> ModelIdentity:
    """Return the identity of what is loaded; it takes a second for billions of weights, of which a few are read."""
    family, bank = backbone.family, backbone.bank
    own, lora = dict[str, Tensor](), dict[str, Tensor]()
    for name, parameter in family.model.named_parameters():
        (lora if ".lora_" in name else own)[name.replace(".base_layer.", ".")] = parameter
    config = family.decoder.config
    beside = [getattr(config, "rope_parameters", None), family.windows, getattr(config, "rms_norm_eps", None)]
    weights = _digest(beside, ((name, _sampled(tensor)) for name, tensor in own.items()))
    adapter = None
    if lora or bank is not None:
        parts = [(name, part) for name, part in family.model.named_modules() if isinstance(part, BaseTunerLayer)]
        scalings = [[name, getattr(part, "scaling", None), list(part.active_adapters)] for name, part in parts]
        routers = {} if bank is None else {f"routers.{name}": tensor for name, tensor in bank.state_dict().items()}
        adapter = _digest([None if bank is None else asdict(bank.config), scalings], {**lora, **routers}.items())
    whole = family.model.config
    found = Identity(str(whole._name_or_path), None, str(whole.model_type), shapes_digest(family))
    return ModelIdentity(found, weights, adapter, tokenizer_digest(family.tokenizer))


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of what makes ids of a text: not of padding, truncation and the chat template."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:  # one without a tokenizer.json
        content = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_tokens)])
    else:
        whole: str = backend.to_str()
        content = whole[whole.index('"added_tokens":') :]  # before it stand version, truncation and padding
    return hashlib.sha256(content.encode()).hexdigest()


def check_same_model(wanted: ModelIdentity, found: ModelIdentity) -> None:
    """Raise ``ValueError`` if a cache meets another model than the one that made it."""
    theirs, ours = wanted.backbone, found.backbone
    if theirs.digest != ours.digest or wanted.weights != found.weights:
        why = "an architecture of its own" if theirs.digest != ours.digest else "other weights"
        made = f"the backbone {shown(theirs.path)} ({shown(theirs.model_type)}, {wanted.weights[:12]})"
        here = f"this one is {shown(ours.path)} ({ours.model_type}, {found.weights[:12]}), with {why}"
        raise ValueError(f"the cache was made by {made}, and {here}; load the backbone that made it")
    if wanted.adapter != found.adapter:
        made, here = (f"adapter {x[:12]}" if x else "no adapter" for x in (wanted.adapter, found.adapter))
        raise ValueError(f"the cache was made with {made}, and this model has {here}; load the adapter that made it")
    if wanted.tokenizer is not None and wanted.tokenizer != found.tokenizer:
        words = f"the cache was made with another tokenizer ({wanted.tokenizer[:12]}, here {str(found.tokenizer)[:12]})"
        raise ValueError(f"{words}; load the tokenizer that made it, or compress again")


def _digest(settings: list[Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return digest_of(text, sorted(tensors, key=lambda each: each[0])).hexdigest()


def _sampled(tensor: Tensor) -> Tensor:
    """Sample numbers of all columns: a step that divides the rows' width would stay in one."""
    flat, width = tensor.detach().reshape(-1), tensor.shape[-1] if tensor.dim() else 1
    step = max(1, len(flat) // SAMPLED)
    while math.gcd(step, width) > 1:
        step -= 1
    return flat[::step][:SAMPLED]


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
    if routers := _router_tensors(backbone.bank):
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
    """Load backbone (from elsewhere, if one is given), LoRA and routers, strictly in both directions.

    ``layout`` leaves the backbone without weights, on the meta device: enough to write the adapter again. Returns
    configuration, model, and the ``PeftModel`` around it; None for a merged folder.
    """
    config = read_config(folder)
    source = backbone or config.backbone
    if config.merged:
        source = replace(source, path=str(folder), revision=None)
    return config, *put_adapter(folder, config, (layout_family if layout else load_family)(source), source)


def put_adapter(
    folder: Path, config: AdapterConfig, family: Family, source: BackboneConfig, routers: bool = True
) -> tuple[CompressedBackbone, PeftModel | None]:
    """Put a folder's LoRA and routers on a loaded family without any, which ``source`` names; as ``read_adapter``.

    ``config`` may have another reducer or selector than the folder, which then has no ``routers`` for it.
    """
    peft_model = None if config.merged else add_adapters(family, config.lora, config.stage2)
    check_identity(config.identity, identify(family, source))
    if peft_model is not None:
        for adapter in peft_model.peft_config:
            put_lora(peft_model, lora_tensors(folder, peft_model, adapter), adapter)
        if OUTPUT_ADAPTER not in peft_model.peft_config and (folder / OUTPUT_ADAPTER).exists():
            raise ValueError(f"{folder} holds {OUTPUT_ADAPTER}/, but its {CONFIG_FILE} names no output LoRA")
    elif family.model.device.type != "meta":
        check_finite(dict(family.model.named_parameters()), folder)
    bank = None if config.routing is None else RouterBank(config.routing, family.hidden_size, family.shape)
    if routers and (wanted := _router_tensors(bank)):
        assert bank is not None
        bank.load_state_dict(read_exactly(folder / ROUTER_FILE, wanted))
    elif routers and (folder / ROUTER_FILE).exists():
        raise ValueError(f"{folder} holds {ROUTER_FILE}, but its {CONFIG_FILE} names no router: the files disagree")
    # last, because it puts hooks on the family
    return CompressedBackbone(family, config.reducer, bank).eval(), peft_model


def put_lora(peft_model: PeftModel, tensors: dict[str, Tensor], adapter: str = MAIN_ADAPTER) -> None:
    """Put tensors, named as in peft's files, into one LoRA of the model; onto the CPU where that has no weights."""
    if (model := peft_model.base_model.model).device.type != "meta":
        set_peft_model_state_dict(peft_model, tensors, adapter_name=adapter)
        return
    # peft would move them back to the device of the weights around them
    own = {name.removeprefix("base_model.model.").removesuffix("weight"): tensor for name, tensor in tensors.items()}
    renamed = {f"{name}{adapter}.weight": tensor for name, tensor in own.items()}
    assert not model.load_state_dict(renamed, strict=False, assign=True).unexpected_keys


def lora_tensors(folder: Path, peft_model: PeftModel, adapter: str = MAIN_ADAPTER) -> dict[str, Tensor]:
    """Read the tensors of one of a folder's LoRAs, which must fit ``peft_model``'s exactly."""
    expected = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
    return read_exactly((folder if adapter == MAIN_ADAPTER else folder / adapter) / LORA_FILE, expected)


def _router_tensors(bank: RouterBank | None) -> dict[str, Tensor]:
    return {} if bank is None else {name: tensor.contiguous() for name, tensor in bank.state_dict().items()}


def write_merged(
    folder: Path,
    config: AdapterConfig,
    backbone: CompressedBackbone,
    peft_model: PeftModel,
    overwrite: bool = False,
    sections: CardSections | None = None,
) -> None:
    """Merge every LoRA into the weights, in their dtype, and write the folder; the given model has no LoRA any more."""
    check_mergeable(backbone)
    with whole_folder(folder, overwrite) as temporary:
        model = peft_model.merge_and_unload(safe_merge=True, adapter_names=list(peft_model.peft_config))
        model.save_pretrained(temporary)
        backbone.family.processor.save_pretrained(temporary)
        revision = None if is_gguf(config.identity.path) else config.identity.revision  # its weights are new ones
        merged = replace(config, merged=True, identity=replace(config.identity, revision=revision))
        write_rest(temporary, merged, backbone, sections)


def check_mergeable(backbone: CompressedBackbone) -> None:
    """Raise ``ValueError`` if a LoRA sits on no floating-point numbers, or must be left out for ranking."""
    words = "the reducer ranks by the backbone alone (reducer.ranking: frozen), which merged weights cannot run"
    refuse((backbone.reducer.frozen_scout, f"cannot merge: {words}; export the adapter without --merge-lora"))
    for name, module in backbone.model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not base.weight.is_floating_point():
            words = f"a quantised backbone ({name} holds {str(base.weight.dtype).removeprefix('torch.')})"
            instead = "export the adapter without --merge-lora, or name an unquantised copy with --backbone"
            raise ValueError(f"cannot merge into {words}: rounding would change what was trained; {instead}")


SAME_TOKENS = "token-only, under the same reducer"
LORA_ONLY = "LoRA alone, without a token reducer"
MATCHED_ANCHOR = "the matched token-only anchor"
ONE_TOKEN = Fraction(1, 64)
"""Share by which an anchor's keep ratio may lie above its arm's bytes: a token of the smallest image that is served."""


@dataclass(frozen=True)
class FirstStage:
    """An adapter that stage 2 of a recipe may start from, and which of the three readings it is."""

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
    """Read stage 1's configuration (no weights) from an adapter or its run, and check it against stage 2's recipe."""
    if not folder.is_dir():
        raise ValueError(f"stage2.adapter {folder} does not exist; train the token-only recipe (routing: null) first")
    folder = adapter_in(folder) or folder
    if (config := read_config(folder)).routing is not None:
        raise ValueError(f"stage2.adapter {folder} already has routers ({config.routing.words}); name a token-only one")
    if lora is not None and (differing := _differing("lora", config.lora, lora)):
        raise ValueError(f"stage2.adapter {folder} was trained with {', '.join(differing)}")
    if not (differing := _differing("reducer", config.reducer, reducer)):
        return FirstStage(folder, config, SAME_TOKENS)
    if not config.reducer.acts:
        return FirstStage(folder, config, LORA_ONLY)
    kept = {name: getattr(reducer, name) for name in ("keep_ratio", "round_up", "matches")}
    alike = config.reducer.round_up and not reducer.staged and {**asdict(config.reducer), **kept} == asdict(reducer)
    if routing is not None and alike and config.reducer.matches in (None, reducer.keep_ratio):  # stage 2's bytes, whole
        total = replace(routing.token_budget, keep_ratio=reducer.keep_ratio).exact_total
        if total <= Fraction(str(config.reducer.keep_ratio)) < total + ONE_TOKEN:
            return FirstStage(folder, config, MATCHED_ANCHOR)
    instead = "stage 1 has the recipe's reducer, or none (lora_only), or is the matched anchor"
    raise ValueError(f"stage2.adapter {folder} was trained with {', '.join(differing)}; {instead}")


def _differing(group: str, trained: Any, recipe: Any) -> list[str]:
    """Name the keys in which two settings differ; of two methods, those that both have."""
    ours = asdict(recipe)
    return [
        f"{group}.{key} {value} (the recipe has {ours[key]})"
        for key, value in asdict(trained).items()
        if key in ours and value != ours[key]
    ]

"""Identity of an adapter's backbone (name, revision, configuration, shapes), of an adapter, and of a cache's model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.backbone_files import gguf_digest, is_gguf
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.functional.hashing import digest_tensor
from subtoken_train.typed import shown
from subtoken_train.types import Identity


def identify(family: Family, config: BackboneConfig) -> Identity:
    """Return the identity of a backbone, whatever its LoRA, quantisation and sharding; a GGUF file has its SHA-256."""
    revision = _FILE + gguf_digest(Path(resolve(config.path))) if is_gguf(config.path) else config.revision
    return Identity(config.path, revision, str(family.model.config.model_type), shapes_digest(family))


def check_identity(wanted: Identity, found: Identity) -> None:
    """Raise ``ValueError`` if an adapter meets a backbone of another architecture, or one of a GGUF file another."""
    if wanted.digest != found.digest:
        raise ValueError(
            f"the adapter was trained on {wanted.path!r} ({wanted.model_type}, {wanted.digest[:12]}), but the backbone "
            f"is {found.path!r} ({found.model_type}, {found.digest[:12]}); load the backbone that it names"
        )
    if (file := wanted.revision or "").startswith(_FILE) and found.revision != file:
        raise ValueError(
            f"the adapter was trained on the GGUF file {wanted.path!r} ({file[:19]}), and {found.path!r} is not that "
            f"file ({(found.revision or 'no GGUF file')[:19]}); load the file that it names"
        )


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
    adapter: str | None
    """SHA-256 of LoRA (scaling included), routers and the routing's settings; None without any."""
    tokenizer: str | None = None
    """As ``tokenizer_digest`` makes it; None in files of version 0.2."""


def model_identity(backbone: CompressedBackbone) -> ModelIdentity:
    """Return the identity of what is loaded; it takes a second for billions of weights, of which a few are read."""
    family, bank = backbone.family, backbone.bank
    own: dict[str, Tensor] = {}
    lora: dict[str, Tensor] = {}
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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one without a tokenizer.json
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
        raise ValueError(
            f"the cache was made by the backbone {shown(theirs.path)} ({shown(theirs.model_type)}, "
            f"{wanted.weights[:12]}), and this one is {shown(ours.path)} ({ours.model_type}, {found.weights[:12]}), "
            f"with {why}; load the backbone that made it"
        )
    if wanted.adapter != found.adapter:
        made, here = (f"adapter {x[:12]}" if x else "no adapter" for x in (wanted.adapter, found.adapter))
        raise ValueError(f"the cache was made with {made}, and this model has {here}; load the adapter that made it")
    if wanted.tokenizer is not None and wanted.tokenizer != found.tokenizer:
        raise ValueError(
            f"the cache was made with another tokenizer ({wanted.tokenizer[:12]}, here {str(found.tokenizer)[:12]}), "
            "which turns a question into other tokens; load the tokenizer that made it, or compress again"
        )


def _digest(settings: list[Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest_tensor(digest, name, tensor)
    return digest.hexdigest()


def _sampled(tensor: Tensor) -> Tensor:
    """Sample numbers of all columns: a step that divides the rows' width would stay in one."""
    flat, width = tensor.detach().reshape(-1), tensor.shape[-1] if tensor.dim() else 1
    step = max(1, len(flat) // SAMPLED)
    while math.gcd(step, width) > 1:
        step -= 1
    return flat[::step][:SAMPLED]

"""Settings that name a recipe's or a command's backbone, checked without looking anything up."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from subtoken_train.errors import check_word, clipped
from subtoken_train.families.chat import check_chat
from subtoken_train.resources import resource_root
from subtoken_train.typed import shown
from subtoken_train.types import Quantization

_LONGEST = 255  # bytes of a name that a file system takes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"\w[\w.+/-]{0,199}")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")  # any other text could name a kernel on the Hub, which is code
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class BackboneConfig:
    """Choice of the frozen model to build on.

    Attributes:
        path: a folder, a Hub id (``llava-hf/llava-1.5-7b-hf``), a folder that ships with the project
            (``checkpoints/tiny-llava``), or a language model's GGUF file (``model.gguf``), which is read to ``dtype``.
        revision: branch, tag or commit on the Hub; None takes the default branch.
        dtype: ``float32``, ``bfloat16`` or ``float16``, of the frozen weights.
        attention: transformers' attention implementation (``sdpa``, ``eager``, ``flash_attention_2``).
        max_pixels: cap of an image, where images keep their own size (Qwen2.5-VL); 784 pixels are one visual token.
            None: the processor's own cap, and at most 1,003,520 (1,280 visual tokens).
        quantization: of the decoder's linear layers: ``none``, ``nf4`` (4 bits, double quantisation) or ``int8``; by
            bitsandbytes, with products in ``dtype``. Adapters fit a backbone however it is quantised.
        template: chat format, where the model was published with several: LLaVA-1.5's ``vicuna_v1``, ``llava_v1`` or
            ``plain`` (``llava_chat``). None: the family's own; of LLaVA-1.5 ``vicuna_v1``.
        system: whether LLaVA-1.5's ``vicuna_v1`` has its system text: ``none`` or ``vicuna_v1``. None: ``none``.
        image_aspect_ratio: ``pad``: Qwen's VLMs see an image as a square, padded with the processor's mean colour as
            LLaVA-1.5's are (the paper's "aspect-ratio padding", Table 7). None: as its family shows it.
    """

    path: str = "checkpoints/tiny-llava"
    revision: str | None = None
    dtype: str = "float32"
    attention: str = "sdpa"
    max_pixels: int | None = None
    quantization: Quantization = "none"
    template: str | None = None
    system: str | None = None
    image_aspect_ratio: str | None = None


def is_gguf(path: str) -> bool:
    """Return whether a backbone's name is that of a GGUF file."""
    return path.lower().endswith(".gguf")


def nowhere(path: str, why: str, advice: str) -> ValueError:
    """Return the error for a backbone that is nowhere: what it is not, what to check, and a command that gets one."""
    another = "or take another: 'subtoken-train data smollm2' fetches a small one"
    return ValueError(f"backbone {path!r} {why}; {advice}, {another}")


def resolve(path: str) -> str:
    """Return the path of a local or shipped folder or GGUF file if there is one, else the name unchanged."""
    shipped = [resource_root() / path] if Path(path).parts[:1] == ("checkpoints",) else []
    there = (each for each in (Path(path), *shipped) if each.is_dir() or (is_gguf(path) and each.is_file()))
    return str(next(there, path))


def is_hub_id(path: str) -> bool:
    """Return whether a name reads as ``user/name`` and is no folder here."""
    if is_gguf(path) or _HUB_ID.fullmatch(path) is None:
        return False
    return resolve(path) == path and not Path(path).exists()


def check_backbone(config: BackboneConfig) -> None:
    """Raise ``ValueError`` if a setting is none, or does not go with the path; the Hub is not asked."""
    check_named(config)
    _check_gguf_settings(config)
    check_word("dtype", config.dtype, DTYPES)
    check_word("quantization", config.quantization, get_args(Quantization))
    check_word("attention", config.attention, ATTENTIONS)
    if config.max_pixels is not None and config.max_pixels < 1:
        raise ValueError(f"max_pixels={config.max_pixels} must be at least 1")
    check_revision(config.revision)
    check_chat(config.template, config.system)
    if config.image_aspect_ratio is not None:
        check_word("image_aspect_ratio", config.image_aspect_ratio, ("pad",))


def check_named(config: BackboneConfig) -> None:
    """Raise ``ValueError`` if no backbone is named; a recipe's ``path: null`` comes as None."""
    named: object = config.path
    if not isinstance(named, str) or not named.strip():
        raise ValueError(f"backbone.path is {shown(named)}; name a folder, a Hub id or a GGUF file")
    if max(map(len, os.fsencode(named).split(b"/"))) > _LONGEST:
        raise ValueError(f"backbone.path holds a name of more than {_LONGEST} bytes: look at it for a missing space")


def _check_gguf_settings(config: BackboneConfig) -> None:
    path, folder = config.path, Path(resolve(config.path))
    if is_gguf(path):
        if config.quantization != "none":
            raise ValueError(f"quantization {config.quantization}: {path} is read to {config.dtype}; set it to none")
        if config.revision is not None:
            raise ValueError(f"revision {config.revision!r} is for Hub ids, and {path} is a file; leave it out")
        return
    inside = [] if not folder.is_dir() or (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    if inside:
        raise ValueError(f"backbone {path!r} is a folder of GGUF files; name one of them: {folder / inside[0].name}")
    if path.lower().endswith("-gguf") and not folder.is_dir():
        raise ValueError(f"{clipped(path, 40)!r} holds GGUF files; fetch one of them ('hf download {path} FILE.gguf')")


def check_revision(revision: str | None) -> None:
    """Raise ``ValueError`` unless a revision can be a branch, tag or commit: it names a file in the cache."""
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ValueError(f"revision {revision[:80]!r} is not a branch, tag or commit")

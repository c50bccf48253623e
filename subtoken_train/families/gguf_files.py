"""Check a GGUF file, llama.cpp's format, as a backbone, and open it for transformers, which reads it to plain tensors.

The rounding of the file's own format stays in them, so its SHA-256 is part of a backbone's identity.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from subtoken_train.documents import check_regular, real_path
from subtoken_train.errors import check_package
from subtoken_train.forks import undoing

_INSTEAD = "use the model in transformers' format (a folder with config.json and .safetensors files, or a Hub id)"
_NAME = "model.gguf"
_NO_ARCHITECTURES = ("general", "tokenizer")


def is_gguf(path: str) -> bool:
    """Return whether a backbone's name is that of a GGUF file."""
    return path.lower().endswith(".gguf")


def check_gguf(path: Path) -> None:
    """Raise ``ValueError`` unless a file is whole and of a language model that transformers reads, by its header."""
    if not path.exists():
        raise ValueError(f"backbone {path} does not exist; check its spelling, and the folder that you are in")
    size = check_regular(path)
    check_package("gguf", "gguf", f"reading {path}")
    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except Exception as error:  # whatever a damaged header makes the reader do
        raise _damaged(path, size) from error
    architecture = metadata["general.architecture"]
    kind, parts = metadata.get("general.type"), metadata.get("split.count", 1)
    if architecture == "clip" or kind == "mmproj":
        raise ValueError(f"{path} is the vision tower of a model that sees (mmproj), which is not read; {_INSTEAD}")
    if kind == "adapter":
        raise ValueError(f"{path} is a LoRA, not a model; name the model that it is for")
    if parts != 1:
        raise ValueError(f"{path} is one of {parts} parts; join them first with llama.cpp's 'llama-gguf-split --merge'")
    known = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}.difference(_NO_ARCHITECTURES)
    if not isinstance(architecture, str) or _plain(architecture) not in map(_plain, known):
        raise ValueError(
            f"{path} is of the architecture {str(architecture)[:60]!r}, which transformers does not read from GGUF; "
            f"{_INSTEAD}"
        )
    layers = metadata.get(f"{architecture}.block_count", 0)
    held = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if "token_embd.weight" not in tensors or not isinstance(layers, int) or len(held) < layers:
        raise ValueError(f"{path} names {str(layers)[:60]} layers and holds the weights of fewer; download it again")
    scaled = [name for name in tensors if name.startswith("rope_")]
    scaled += [key for key, value in metadata.items() if key.endswith("rope.scaling.type") and value != "none"]
    if scaled and architecture != "gpt-oss":
        raise ValueError(
            f"{path} scales its rotary positions ({scaled[0]}), which transformers leaves out of what it reads from "
            f"GGUF; {_INSTEAD}"
        )
    try:
        _reader(*_version(path))
    except Exception as error:  # a tensor ends past the file's end, or is of no known type
        raise _damaged(path, size) from error


@contextmanager
def opened_gguf(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the folder, of this file alone, and the argument by which ``from_pretrained`` reads a checked file.

    Its header is parsed once, over a plain array: with 50,000 words that takes 1 second, and over a memory map 5.
    """
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / _NAME
        own.symlink_to(real_path(path))
        whole, reader = gguf.GGUFReader, _reader(*_version(path))
        named = "GGUFReader"  # transformers looks it up in the package at each reading
        setattr(gguf, named, lambda name: reader if Path(name) == own else whole(name))
        with undoing(lambda: setattr(gguf, named, whole)):
            yield folder, {"gguf_file": _NAME}


def gguf_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal; it is read once in a process, unless it changes."""
    return _digest(*_version(path))


def _plain(architecture: str) -> str:
    return architecture.replace("-", "").replace("_", "")  # gpt-oss is gpt_oss elsewhere


def _damaged(path: Path, size: int) -> ValueError:
    return ValueError(f"{path} is not a GGUF file, or is damaged or cut off ({size:,} bytes); download it again")


def _version(path: Path) -> tuple[Path, int, int]:
    status = path.stat()
    return real_path(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1)
def _reader(path: Path, size: int, changed: int) -> Any:
    """Parse a file's header; sizes and offsets of all tensors are checked against its length."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)

    return Reader(path)


@lru_cache(maxsize=4)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

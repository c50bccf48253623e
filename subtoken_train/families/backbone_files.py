"""Checks of a backbone's files before transformers opens them, and of its weights once they are loaded.

Weights are judged by their files' headers; no pickle is opened. A GGUF file is read to plain tensors; its format's
rounding stays in them, so its SHA-256 is part of an identity.
"""

import hashlib
import re
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as converter
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata

from subtoken_train.documents import check_file_name, check_regular, read_json, real_path
from subtoken_train.errors import MAX_TOKENS, check_package, check_range, refuse
from subtoken_train.families.backbone_config import nowhere
from subtoken_train.forks import changed
from subtoken_train.typed import checked, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes of a header at most; safetensors reads no longer one
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\..+")
_TOWER = re.compile("vision|visual|tower")


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Read the names, shapes and dtypes of a folder's weights, as tensors on the meta device."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        kinds = read_kinds(path)
        if twice := found.keys() & kinds.keys():
            raise ValueError(f"{path.name} holds {sorted(twice)[0][:120]}, which is in another file too")
        for name, (shape, dtype) in kinds.items():
            refuse((dtype not in _DTYPES, f"{path.name}: tensor {name[:120]} is of type {dtype}, which is not read"))
            found[name] = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights, in transformers' order of preference."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(map(str, read_json(folder / INDEX)["weight_map"].values())))]
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ValueError(f"{pickles[0]} is a pickle, which may hold code and is not read; use the model in safetensors")
    raise ValueError(f"there is no {WEIGHTS} in it; the download is incomplete")


def read_kinds(path: Path) -> dict[str, tuple[list[int], str]]:
    """Return the shape and the type (``F32``) of a safetensors file's tensors, by name; only its header is read."""
    size = check_regular(path)
    with path.open("rb") as file:
        begin = file.read(8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
    broken = f"{path} is not a whole safetensors file (truncated download?)"
    refuse((not 2 <= length <= min(size - 8, MAX_HEADER), f"{broken}: a header of {length:,} in {size:,} bytes"))
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            return {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{broken}: {str(error)[:160]}") from None


def check_report(report: Mapping[str, Any], model: Any, path: str) -> None:
    """Raise ``ValueError`` where weights do not fit a configuration, by what ``from_pretrained`` reports of loading."""
    weights, own = f"the weights of backbone {path!r}", model.state_dict().keys()
    if mismatched := sorted(report["mismatched_keys"], key=str):
        name, theirs, ours = mismatched[0]
        first = f"first {name[:120]}: {list(theirs)} in the file, {list(ours)} by the configuration"
        raise ValueError(f"{weights} do not fit its config.json: {len(mismatched)} tensors have another shape, {first}")
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise ValueError(f"{weights} are incomplete: {len(missing)} tensors are missing, first {missing[0][:120]}")
    layers = {(found[1], found[2]) for name in own if (found := _LAYER.fullmatch(name))}
    for name in sorted(report["unexpected_keys"]):
        if (found := _LAYER.fullmatch(name)) is None or _TOWER.search(name) or (found[1], found[2]) in layers:
            continue
        if any(stack == found[1] for stack, _ in layers):
            left_out = f"layer {found[2]} ({name[:120]}), which it leaves out"
            raise ValueError(f"{weights} do not fit its config.json: they hold {left_out}")


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def check_finite_weights(model: Any, path: str) -> None:
    """Raise ``ValueError`` if a parameter (of a quantised one its scales) holds NaN or infinity, or a buffer NaN."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, whole in (parameters | buffers).items():
        for part in _numbers(whole):
            low, high = part.detach().aminmax()  # NaN where any number is
            found[part.device].append((name, low.isnan() if name in buffers else ~(low.isfinite() & high.isfinite())))
    named = set()
    for flags in found.values():
        values = torch.stack([flag for _, flag in flags]).tolist()
        named |= {name for (name, _), value in zip(flags, values, strict=True) if value}
    if named:
        first = next(name for name in parameters | buffers if name in named)
        held = f"hold NaN or infinity in {len(named)} tensors, first {first}"
        raise ValueError(f"the weights of backbone {path!r} {held}; download it again, or choose another dtype")


def _numbers(weight: Any) -> Iterator[Tensor]:
    state = getattr(weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    scales = [getattr(state, "absmax", None), getattr(state, "offset", None), getattr(nested, "absmax", None)]
    held = [weight] if state is None else scales
    for tensor in (*held, getattr(weight, "SCB", None)):
        if isinstance(tensor, Tensor) and tensor.dtype in FLOATS and tensor.numel() and tensor.device.type != "meta":
            yield tensor


PEFT_FILE = "adapter_config.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
_MOST = {
    "_layers": 10_000, **dict.fromkeys(("_size", "_heads", "head_dim", "depth"), MAX_TOKENS),
    "height": 2**14, "width": 2**14, "_edge": 2**28,
}  # fmt: skip
"""Largest whole numbers by the ends of their keys: libraries build as many layers, and make pictures as large."""
_TEXTS = ("transformers_version", "cache_implementation", "compile_config")  # all others are numbers and truths


def check_local_files(folder: Path) -> None:
    """Raise ``ValueError`` unless a folder's configurations are sound JSON and its shards lie in it."""
    for path in sorted(folder.glob("*config.json")):
        if path.name == PEFT_FILE:
            raise ValueError(f"{folder} is a LoRA of peft ({PEFT_FILE}), not a backbone; name the model that it is for")
        content = read_json(path)
        refuse((not isinstance(content, dict), f"{path} is {shown(content)}; it must be a group of keys"))
        check_format(content)
        _check_settings(content, str(path), path.name)
    for path in sorted(folder.glob("*.index.json")):
        index = read_json(path)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{path} names no weights (weight_map)")
        for shard in set(map(str, shards.values())):
            check_file_name(shard, f"{path}: weight_map")
            if not (folder / shard).is_file():
                raise ValueError(f"{path} is incomplete: it names {shard[:120]}, which is not beside it")


def _check_settings(content: dict[str, Any], place: str, file: str) -> None:
    for key, value in content.items():
        name, most = f"{place}: {key}", next((most for end, most in _MOST.items() if key.endswith(end)), None)
        if value is None:
            continue
        if most is not None and isinstance(value, int) and not isinstance(value, bool):
            check_range(name, value, 0, most)
        odd = str | dict | float if key.endswith("_token_id") else str
        if file == GENERATION and isinstance(value, odd) and key not in _TEXTS:
            raise ValueError(f"{name} is {shown(value)}; it must be a number, or true or false")
        if file == TOKENIZER and key == "chat_template":
            checked(str | list[dict[str, str]], value, name)
        elif isinstance(value, dict):
            _check_settings(value, name, "")


def check_format(content: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a configuration is of the original LLaVA code, whose weights fit no class."""
    if "mm_vision_tower" in content:
        raise ValueError("it is in the format of LLaVA's original code; use the same model of llava-hf/...")


_INSTEAD = "use the model in transformers' format (a folder with config.json and .safetensors files, or a Hub id)"
_NAME = "model.gguf"
_NO_ARCHITECTURES = ("general", "tokenizer")


def check_gguf(path: Path) -> None:
    """Raise ``ValueError`` unless a file is whole and of a language model that transformers reads, by its header."""
    if not path.exists():
        raise nowhere(str(path), "does not exist", "check its spelling, and the folder that you are in")
    size = check_regular(path)
    check_package("gguf", "gguf", f"reading {path}")
    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except Exception as error:  # whatever a damaged header makes the reader do
        raise _damaged(path, size) from error
    architecture, parts = metadata["general.architecture"], metadata.get("split.count", 1)
    known = {*converter.GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}.difference(_NO_ARCHITECTURES)
    plain = {re.sub("[-_]", "", name) for name in known}  # gpt-oss is gpt_oss elsewhere
    if not isinstance(architecture, str) or re.sub("[-_]", "", architecture) not in plain:
        raise ValueError(f"{path}: transformers does not read architecture {architecture!r:.60} from GGUF; {_INSTEAD}")
    layers = metadata.get(f"{architecture}.block_count", 0)
    held = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    whole = "token_embd.weight" in tensors and isinstance(layers, int) and len(held) >= layers and parts == 1
    if not whole or metadata.get("general.type", "model") != "model":
        part = f"a LoRA, a vision tower, cut off, or one of {parts} parts (join them: llama-gguf-split --merge)"
        raise ValueError(f"{path} names {str(layers)[:60]} layers and is not the whole model: {part}")
    scaled = [name for name in tensors if name.startswith("rope_")]
    scaled += [key for key, value in metadata.items() if key.endswith("rope.scaling.type") and value != "none"]
    if scaled and architecture != "gpt-oss":
        raise ValueError(f"{path} scales its rotary positions ({scaled[0]}), which is not read from GGUF; {_INSTEAD}")
    try:
        _reader(*_version(path))
    except Exception as error:  # a tensor ends past the file's end, or is of no known type
        raise _damaged(path, size) from error


@contextmanager
def opened_gguf(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a folder of this file alone, and the argument by which ``from_pretrained`` reads it, parsed once."""
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / _NAME
        own.symlink_to(real_path(path))
        whole, reader = gguf.GGUFReader, _reader(*_version(path))
        bar = partial(converter.tqdm, disable=None)  # on terminals alone
        with (  # transformers looks both up at each reading
            changed(gguf, GGUFReader=lambda name: reader if Path(name) == own else whole(name)),
            changed(converter, tqdm=bar),
        ):
            yield folder, {"gguf_file": _NAME}


def gguf_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal; it is read once in a process, unless it changes."""
    return _digest(*_version(path))


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

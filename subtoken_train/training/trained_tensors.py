"""Trained tensors of a run, plain and whole: out of a checkpoint of any strategy, or out of a model in training.

A checkpoint is read as data: nothing in it is run, and damage is found before anything is loaded.
"""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import check_package, refuse
from subtoken_train.families.load import layout_family
from subtoken_train.outputs import write_whole
from subtoken_train.training.checkpoints import STATE, read_marker

_LISTS = dict.fromkeys(("optimizer_states", "lr_schedulers", "random_state"), list)
_HOLDS = {"loops": dict, "epoch": int, "global_step": int, "pytorch-lightning_version": str, **_LISTS}
"""Parts that are restored beside the tensors, and their types."""


def read_state(state: Path, resumes: bool = False) -> dict[str, Any]:
    """Read a file of ``trainer.save_checkpoint`` on the CPU; where training ``resumes`` from it, all of its parts."""
    check_archive(state)
    try:
        content = torch.load(state, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a pickle may name anything, and its reader raise anything
        raise _unreadable(state, "it holds more than tensors and plain values") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise _unreadable(state, "it has no state_dict")
    for key, kind in _HOLDS.items() if resumes else ():
        if type(content.get(key)) is not kind:
            raise _unreadable(state, f"it has no {key} as training writes it")
    for name, tensor in content["state_dict"].items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise _unreadable(state, f"{str(name)[:80]} is not a tensor of trainable numbers")
        if not torch.isfinite(tensor).all():
            raise _unreadable(state, f"tensor {name[:80]} holds NaN or infinity")
    return content


def check_archive(path: Path) -> None:
    """Read a file that torch wrote through, and compare the checksums of its parts."""
    if not path.is_file():
        raise _unreadable(path, "it is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except PermissionError:
        raise
    except Exception:  # zipfile's reader raises many kinds for broken headers
        raise _unreadable(path, "it is cut off, or was not written by training") from None
    if broken is not None:
        raise _unreadable(path, f"its part {broken[:80]!r} is damaged")


def _unreadable(state: Path, reason: str) -> ValueError:
    older = f"remove {state.parent} to use an older checkpoint"
    return ValueError(f"{state} cannot be read as a checkpoint: {reason}; {older}")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, rename: a crash or a full disk leaves the previous file intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``."""
        content = io.BytesIO()
        torch.save(checkpoint, content)  # straight into a file, a full disk would come out as a RuntimeError of torch's
        write_whole(Path(path), content.getbuffer())


_ONE_FILE = {"SingleDeviceStrategy", "DDPStrategy"}  # they write and read the same file
DEEPSPEED_TAG = "checkpoint"  # the folder that Lightning's strategy lets DeepSpeed write into


def trained_tensors(state: Path) -> dict[str, Tensor]:
    """Return the tensors of a state file or DeepSpeed's folder: whole, fp32, on the CPU, by name in the module."""
    if state.is_dir():
        tensors = _of_deepspeed(state)
    elif state.is_file():
        tensors = read_state(state)["state_dict"]
    else:
        raise ValueError(f"{state} does not exist; a checkpoint is a file, or a folder that DeepSpeed wrote")
    return {name: _checked(name, tensor.float()) for name, tensor in tensors.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the whole shape of every tensor, also if ZeRO-3 left an empty one in its place."""
    return {name: list(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors.items()}


def trained_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the whole shape of every trained parameter."""
    return shapes_of({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})


def check_same_shapes(
    wanted: Mapping[str, list[int]], found: Mapping[str, list[int]], where: object = "the checkpoint"
) -> None:
    """Raise ``ValueError`` unless the shapes of a checkpoint's tensors are those that a recipe trains."""
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if differing:
        first = f"first {differing[0]} (there {found.get(differing[0])}, here {wanted.get(differing[0])})"
        differ = f"{len(differing)} trained tensors differ, {first}; resume with the recipe that wrote it"
        raise ValueError(f"{where} does not fit this recipe: {differ}")


def check_resumable(checkpoint: Path, trainer: L.Trainer, here: dict[str, list[int]]) -> None:
    """Compare a checkpoint with the run that wants to go on from it, and read its state through."""
    marker, state, kind = read_marker(checkpoint), checkpoint / STATE, type(trainer.strategy).__name__
    if kind != marker.strategy and not {kind, marker.strategy} <= _ONE_FILE:
        raise ValueError(f"{checkpoint} was written by {marker.strategy} and cannot be read by {kind}; use that one")
    if state.is_dir() and trainer.world_size != marker.world_size:
        parts = f"holds the parts of {marker.world_size} process(es), this run has {trainer.world_size}"
        raise ValueError(f"{checkpoint} {parts}; resume with as many as wrote it")
    check_same_shapes(here, marker.trained, checkpoint)
    if state.is_dir() and marker.strategy not in _ONE_FILE:
        for part in sorted(state.rglob("*.pt")):
            check_archive(part)
    else:
        check_same_shapes(here, shapes_of(read_state(state, resumes=True)["state_dict"]), checkpoint)


def gathered(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, gathered if it is sharded."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def adapter_tensors(parts: CompressedBackbone) -> dict[str, Tensor]:
    """Return a model's LoRA and routers, whole, on the CPU, by name in ``parts``; every process must call this."""
    return {name: _checked(name, gathered(tensor)) for name, tensor in _adapter_names(parts).items()}


def finished_parts(module: Any) -> tuple[CompressedBackbone, PeftModel]:
    """Return a ``SubTokenModule``'s parts with a whole adapter; if sharded, all but the adapter is a mere layout."""
    if module.gathered is None:
        return module.parts, module.peft_model
    with torch.device("meta"):
        parts, peft_model = module.lay_out(layout_family(module.backbone_config))
    parts.load_state_dict(module.gathered, strict=False, assign=True)
    assert all(name in module.gathered for name in _adapter_names(parts)), "the adapter was not gathered whole"
    return parts, peft_model


def _adapter_names(parts: CompressedBackbone) -> dict[str, Tensor]:
    named = [*parts.named_parameters(), *parts.named_buffers()]
    return {name: tensor for name, tensor in named if ".lora_" in name or name.startswith("bank.")}


def _of_deepspeed(folder: Path) -> dict[str, Tensor]:
    check_package("deepspeed", "deepspeed", f"reading {folder}")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for part in sorted(folder.rglob("*.pt")):
        check_archive(part)
    try:
        whole: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
            str(folder), tag=DEEPSPEED_TAG, exclude_frozen_parameters=True
        )
    except Exception as error:  # whatever its reader raises for broken parts
        raise ValueError(f"{folder} is not a complete DeepSpeed checkpoint: {str(error)[:200]}") from error
    return whole


def _checked(name: str, tensor: Tensor) -> Tensor:
    refuse((tensor.numel() == 0, f"tensor {name} is empty: it was taken from a model whose weights are shared out"))
    return tensor

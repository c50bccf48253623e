"""The processes that a trainer's settings ask for, one per device, and whether this machine has as many."""

from __future__ import annotations

import os
import re

import torch

_DEVICES = re.compile(r"auto|-1|\d+(,\d+)*,?")


def count_devices(devices: int | str | list[int], accelerator: str, num_nodes: int) -> int:
    """Processes of a run from the trainer's settings; ``auto`` and -1 count what this machine has."""
    chosen = list(filter(None, devices.split(","))) if isinstance(devices, str) and "," in devices else devices
    if isinstance(chosen, list):
        return len(chosen) * num_nodes
    if chosen in ("auto", "-1", -1):
        return num_nodes * (1 if accelerator == "cpu" else max(1, torch.cuda.device_count()))
    return int(chosen) * num_nodes


def check_devices(devices: int | str | list[int], accelerator: str) -> None:
    """Raise a worded ``ValueError`` where a node's processes are more than its GPUs (or, on a CPU, its cores)."""
    if accelerator in ("gpu", "cuda"):
        there, name = torch.cuda.device_count(), "GPU(s)"
    elif accelerator == "cpu":
        there, name = os.cpu_count() or 1, "CPU core(s)"
    else:
        return
    if isinstance(devices, str) and not _DEVICES.fullmatch(devices):
        return  # the trainer says what is wrong with it
    wanted = count_devices(devices, accelerator, num_nodes=1)
    if wanted > there:
        raise ValueError(
            f"trainer.devices asks for {wanted} process(es), one per device, but this machine has {there} {name}; "
            "lower trainer.devices, raise trainer.accumulate_grad_batches as much, or choose trainer.accelerator"
        )


def check_cpus(devices: int | str | list[int], accelerator: str) -> None:
    """Raise a worded ``ValueError`` for devices of a CPU that are no count: it has no numbered ones."""
    if accelerator == "cpu" and devices != "auto" and (isinstance(devices, list) or not str(devices).isdecimal()):
        raise ValueError(f"trainer.devices is {devices!r}; on a CPU it is a count of processes, or auto")

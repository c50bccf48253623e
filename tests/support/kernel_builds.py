"""What Triton's compiler makes of the fused decode kernel: registers, spilled bytes, shared memory. Needs no GPU.

Nothing runs: a program that spills or does not fit a multiprocessor is slow or refused, one that does neither can still
be slow. ``ptxas`` comes with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from subtoken_train.kernels.triton_attention import ELEMENTS, STAGES, TAIL_STRETCH, tiles, warps
from subtoken_train.kernels.triton_decode import attend_stretch

CAPABILITIES = (80, 90)
POINTERS = {"tail_start": "*i64", "written": "*i64", "rows": "*i64", "items": "*i32", "first_position": "*i64"}
SHAPES: dict[str, dict[str, Any]] = {
    "whole d128": {},
    "S16 of d128": {"piece": 8},
    "S16 of d128, G4": {"piece": 8, "group": 4},
    "S16 of d128, G7, 16 tokens": {"piece": 8, "group": 7, "new": 16},
    "S64 of d128": {"piece": 2},
    "S16 of d128, int8": {"piece": 8, "bits": 8},
    "S16 of d128, int4": {"piece": 8, "bits": 4},
    "whole d128, kivi4": {"bits": 4, "shared": 32},
    "S16 of d128, kivi4": {"piece": 8, "bits": 4, "shared": 32},
    "S16 of d128, kivi2": {"piece": 8, "bits": 2, "shared": 32},
    "S16 of d128, cut, padded, window": {"piece": 8, "cut": True, "padded": True, "fixed": True, "window": True},
    "S16 of d64": {"width": 64, "piece": 4},
    "S16 of d80": {"width": 80, "piece": 5},
    "S8 of d96": {"width": 96, "piece": 12},
    "S16 of d256": {"width": 256, "piece": 16},
    "S16 of d128, fp32": {"piece": 8, "dtype": torch.float32},
    "S16 of d256, fp32": {"width": 256, "piece": 16, "dtype": torch.float32},
}
"""By name what differs from a head of 128 channels in fp16, stored whole, one query row of one token."""


def source(
    width: int = 128,
    piece: int | None = None,
    bits: int = 0,
    shared: int = 0,
    group: int = 1,
    new: int = 1,
    dtype: torch.dtype = torch.float16,
    cut: bool = False,
    padded: bool = False,
    fixed: bool = False,
    window: bool = False,
    filled: bool = False,
) -> ASTSource:
    """The kernel with what a launch of this shape fixes."""
    piece = piece or width
    own, stored = ELEMENTS[dtype], {0: ELEMENTS[dtype], 8: tl.int8, 4: tl.uint8, 2: tl.uint8}[bits]
    fixed_values: dict[str, Any] = {
        "KV_HEADS": 8, "GROUP": group, "WIDTH": width, "TAIL_STRETCH": TAIL_STRETCH, "ROW_HEADS": 8, "PIECE": piece,
        "BITS": bits, "SHARED": shared, "KEY_DTYPE": stored, "VALUE_DTYPE": stored, "ALIGNED": 16, "CUT": cut,
        "FILLED": filled, "FILL_DTYPE": own, "PADDED": padded, "FIXED": fixed, "WINDOW": window,
        **tiles(width, piece, group * new, dtype),
    }  # fmt: skip
    signature, hints = {}, {}
    for place, name in enumerate(attend_stretch.arg_names):
        pointer = f"*{own.name}" if name in ("query", "tail_keys", "tail_values") else POINTERS.get(name, "i32")
        if name in ("part_sums", "part_peaks"):
            pointer = "*fp32"
        signature[name] = "constexpr" if name in fixed_values else "fp32" if name == "scale" else pointer
        if signature[name].startswith("*") or name in ("query_b", "query_h", "query_q", "tail_b", "tail_h", "tail_t"):
            hints[place,] = [["tt.divisibility", 16]]
    values = {(attend_stretch.arg_names.index(name),): value for name, value in fixed_values.items()}
    return ASTSource(attend_stretch, signature, values, hints)


def build(capability: int, **shape: Any) -> dict[str, int]:
    """Compile one shape for a compute capability (80 for 8.0); bytes and registers of a thread."""
    rows = shape.get("group", 1) * shape.get("new", 1)
    count = warps(shape.get("width", 128), rows, shape.get("dtype", torch.float16), shape.get("shared", 0))
    options = {"num_warps": count, "num_stages": STAGES}
    made = triton.compile(source(**shape), target=GPUTarget("cuda", capability, 32), options=options)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        target = f"sm_{capability}{'a' if capability == 90 else ''}"
        command = [str(assembler), "-v", f"-arch={target}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(words, said)[1]) for words in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return {"registers": registers, "spilled_bytes": spilled, "shared_bytes": made.metadata.shared}

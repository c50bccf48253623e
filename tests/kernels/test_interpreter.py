"""Fused kernels interpreted, and (by Triton's own ``ptxas``, no GPU) their registers, spilled bytes, shared memory."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from subtoken_train.kernels.formats import FORMATS
from tests.support.sampling import sampled

triton = pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHARES, DRAWN = 8, 40


def interpreted(file: str, *chosen: str, **variables: str) -> None:
    """Run a file of tests, or some of it, under the interpreter; its output is shown where one fails."""
    words = f"-m pytest tests/kernels/interpreted/{file} -q -x -p no:cacheprovider"
    own = {name: value for name, value in os.environ.items() if name != "SUBTOKEN_KERNEL"}
    environment = own | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *words.split(), *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@sampled("share", range(SHARES), every=SHARES)
def test_drawn_layers(share):
    interpreted("test_layers.py", "-k", "drawn", DRAWN_FIRST=str(share * DRAWN), DRAWN_COUNT=str(DRAWN))


@pytest.mark.slow
def test_named_layers_and_compiled_steps():
    interpreted("test_layers.py", "-k", "not drawn")
    interpreted("test_compiled_steps.py")


def test_layers_that_one_launch_packs():
    interpreted("test_packing.py")


@pytest.mark.slow
def test_the_equality_matrix():
    """Whole prompts and steps of tiny models, packed and decoded by the fused kernels, are the truth."""
    interpreted("test_packed_cells.py")


needs_assembler = pytest.mark.skipif(not shutil.which(str(PTXAS)), reason="this build of triton has no ptxas")
SHARED = 99 * 1024  # bytes that a program may take on every GPU since Ampere
SPILLED = 64
POINTERS = {"tail_start": "*i64", "written": "*i64", "rows": "*i64", "items": "*i32", "first_position": "*i64"}
PLAIN = {"width": 128, "bits": 0, "shared": 0, "group": 1, "new": 1, "dtype": torch.float16}
MARKS = ("cut", "padded", "fixed", "window", "filled")
SHAPES: dict[str, dict[str, Any]] = {
    "whole d128": {}, "S16 of d128": {"piece": 8}, "S16 of d128, G4": {"piece": 8, "group": 4},
    "S16 of d128, G7, 16 tokens": {"piece": 8, "group": 7, "new": 16}, "S64 of d128": {"piece": 2},
    "S16 of d128, int8": {"piece": 8, "bits": 8}, "S16 of d128, int4": {"piece": 8, "bits": 4},
    "whole d128, kivi4": {"bits": 4, "shared": 32}, "S16 of d128, kivi4": {"piece": 8, "bits": 4, "shared": 32},
    "S16 of d128, kivi2": {"piece": 8, "bits": 2, "shared": 32},
    "S16 of d128, int4, cut, filled": {"piece": 8, "bits": 4, "cut": True, "filled": True},
    "S16 of d128, cut, padded, window": {"piece": 8, "cut": True, "padded": True, "fixed": True, "window": True},
    "S16 of d64": {"width": 64, "piece": 4}, "S16 of d80": {"width": 80, "piece": 5},
    "S8 of d96": {"width": 96, "piece": 12}, "S16 of d256": {"width": 256, "piece": 16},
    "S16 of d128, fp32": {"piece": 8, "dtype": torch.float32},
    "S16 of d256, fp32": {"width": 256, "piece": 16, "dtype": torch.float32},
}  # fmt: skip
"""By name what differs from ``PLAIN``: a head of 128 channels in fp16, stored whole, one query row of one token."""
FORM_OF = {0: "model", 8: "int8", 4: "int4"}
PACKED = [{}, {"width": 80}, {"piece": 16}, {"width": 256, "piece": 32, "dtype": torch.float32}]
"""Likewise what every other format is packed of."""


def source(shape: dict[str, Any]) -> Any:
    """The kernel with what a launch of this shape fixes."""
    from triton import language as tl
    from triton.compiler import ASTSource

    from subtoken_train.kernels.triton_attention import ELEMENTS, TAIL_STRETCH, tiles
    from subtoken_train.kernels.triton_decode import Made, attend_stretch

    width, bits, own = shape["width"], shape["bits"], ELEMENTS[shape["dtype"]]
    piece = shape.get("piece", width)
    stored = {0: own, 8: tl.int8, 4: tl.uint8, 2: tl.uint8}[bits]
    given = {
        "kv_heads": 8, "group": shape["group"], "width": width, "row_heads": 8, "piece": piece, "aligned": 16,
        "fill_dtype": own, "dtype": own, "tail_stretch": TAIL_STRETCH, "bits": bits, "shared": shape["shared"],
        "key_dtype": stored, "value_dtype": stored, **{mark: shape.get(mark, False) for mark in MARKS},
        **tiles(width, piece, shape["group"] * shape["new"], shape["dtype"]),
    }  # fmt: skip
    signature, hints, names = {}, {}, attend_stretch.arg_names
    for place, name in enumerate(names):
        pointer = f"*{own.name}" if name in ("query", "tail_keys", "tail_values") else POINTERS.get(name, "i32")
        if name in ("part_sums", "part_peaks"):
            pointer = "*fp32"
        signature[name] = "constexpr" if name == "OF" else "fp32" if name == "scale" else pointer
        if signature[name].startswith("*") or name in ("query_b", "query_h", "query_q", "tail_b", "tail_h", "tail_t"):
            hints[place,] = [["tt.divisibility", 16]]
    return ASTSource(attend_stretch, signature, {(names.index("OF"),): Made(**given)}, hints)


def packing_source(shape: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """Likewise the kernel that packs a layer, and its options."""
    from triton.compiler import ASTSource

    from subtoken_train.kernels.triton_attention import ELEMENTS
    from subtoken_train.kernels.triton_pack import made_for, pack_entries

    width, own, form = shape["width"], ELEMENTS[shape["dtype"]], FORMATS[shape["form"]]
    piece, cut, filled = shape.get("piece", width), shape.get("cut", False), shape.get("filled", False)
    made, warps = made_for(form, (2, 8, 1, width, piece, cut, piece < width, filled, form.rotates), 16)
    pointers = dict.fromkeys(("key", "value", "fill"), f"*{own.name}") | {
        "table": "*i64", "order": "*i64", "rows": "*i64", "flags": "*i1", "counted": "*i32", "positions": "*i32",
    }  # fmt: skip
    pointers["errors"] = "*fp32"
    names = pack_entries.arg_names
    signature = {name: "constexpr" if name == "OF" else pointers.get(name, "i32") for name in names}
    return ASTSource(pack_entries, signature, {(names.index("OF"),): made}, {}), {"num_warps": warps}


def check_fit(capability: int, given: dict[str, Any]) -> None:
    """Compile one shape for a compute capability (80 for 8.0), which must neither spill nor take too much."""
    from subtoken_train.kernels.triton_attention import STAGES, warps

    shape = PLAIN | given
    count = warps(shape["width"], shape["group"] * shape["new"], shape["dtype"], shape["shared"])
    check_made(capability, given, source(shape), {"num_warps": count, "num_stages": STAGES})
    if not shape["shared"] and shape["new"] == 1:
        check_made(capability, given, *packing_source(shape | {"form": FORM_OF[shape["bits"]]}))


def check_made(capability: int, given: dict[str, Any], kernel: Any, options: dict[str, int]) -> None:
    from triton.backends.compiler import GPUTarget

    made = triton.compile(kernel, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        target = f"sm_{capability}{'a' if capability == 90 else ''}"
        command = [str(PTXAS), "-v", f"-arch={target}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert made.metadata.shared <= SHARED, (given, capability)
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= SPILLED, (given, capability)


@needs_assembler
@pytest.mark.slow
def test_every_shape_of_the_record_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for shape in SHAPES.values():
        for capability in (80, 90):
            check_fit(capability, shape)


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMATS if form not in FORM_OF.values()])
@pytest.mark.parametrize("own", PACKED, ids=str)
def test_every_format_is_packed_within_a_program(own, form, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for capability in (80, 90):
        check_made(capability, own, *packing_source(PLAIN | {"form": form} | own))

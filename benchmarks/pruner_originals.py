"""Outputs of the visual pruners' own code on small random inputs, for ``tests/functional/test_diversity.py``.

    git clone https://github.com/vbdi/divprune; git clone https://github.com/Theia-4869/CDPruner; ...
    python benchmarks/pruner_originals.py divprune CDPruner DART VisPruner    # needs torch and safetensors alone

The functions are taken out of the checkouts' files as they stand and run here: nothing of theirs is in this project.
One file is written, ``benchmarks/results/pruner_originals.safetensors``: inputs, what was chosen, and in its header the
commits.
"""

from __future__ import annotations

import argparse
import ast
import math
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

OUT = Path(__file__).resolve().parent / "results" / "pruner_originals.safetensors"
ARCH = "llava/model/llava_arch.py"
FILES = {
    "divprune": ("LLaVA/" + ARCH, ("pairwise_cosine_similarity", "DivPrune")),
    "cdpruner": (ARCH, ("encode_images",)),
    "dart": ("llava/model/language_model/modeling_llama_self.py", ("get_retained_image_token",)),
    "vispruner": (ARCH, ("encode_images",)),
}
IMAGES, TOKENS, WIDTH = 3, 60, 24


def taken(checkout: Path, file: str, names: tuple[str, ...], **told: Any) -> SimpleNamespace:
    """The named functions and classes of a file; ``told`` is what they find under names that they do not import."""
    found: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "math": math, **told}
    left = set(names)
    for node in ast.walk(ast.parse((checkout / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in left:
            left.remove(node.name)
            exec(compile(ast.Module([node], []), file, "exec"), found)  # annotations stay texts, as in this file
    return SimpleNamespace(**{name: found[name] for name in names})


def write(out: Path, cases: dict[str, tuple[Callable[[Path], dict[str, Tensor]], Path]]) -> None:
    """Run cases on their checkouts, each from its own seed, and write all tensors to one file."""
    tensors, about = {}, {"torch": torch.__version__}
    for seed, (name, (case, checkout)) in enumerate(cases.items()):
        torch.manual_seed(seed)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in case(checkout).items()}
        done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        about[name] = done.stdout.strip()
    save_file(tensors, out, metadata=about)
    print(f"{out}: {about}")


def drawn(*shape: int) -> Tensor:
    """Normal numbers around a common mean, as features have one."""
    return torch.randn(*shape) + 0.5 * torch.randn(shape[-1])


def divprune(code: SimpleNamespace) -> dict[str, Tensor]:
    """One image at a time: indices in the order of choice."""
    owner = SimpleNamespace(pairwise_cosine_similarity=lambda rows: code.pairwise_cosine_similarity(None, rows))
    features = drawn(IMAGES, TOKENS, WIDTH)
    chosen = [code.DivPrune(owner, image, TOKENS, threshold_ratio=0.25)[0] for image in features]
    return {"features": features, "chosen": torch.stack(chosen)}


def _model(tower: Any) -> Any:
    return SimpleNamespace(get_vision_tower=lambda: tower, mm_projector=nn.Identity())


def cdpruner(code: SimpleNamespace) -> dict[str, Tensor]:
    """One image at a time, since it scales relevance over the batch: marks of what stays."""
    features, text = drawn(IMAGES, TOKENS, WIDTH), drawn(7, WIDTH)
    kept = []
    for image in features[:, None]:
        model = _model(lambda images, texts=None: (images, images, text))
        owner = SimpleNamespace(get_model=lambda model=model: model, visual_token_num=15)
        kept.append(code.encode_images(owner, image, [""])[1][0])
    return {"features": features, "text": text, "kept": torch.stack(kept)}


def dart(code: SimpleNamespace) -> dict[str, Tensor]:
    """One prompt of 5 rows, the image and 9 rows: indices of what stays, and its pivots in the order it takes them."""
    start, text = 5, 9
    states, keys = drawn(1, start + TOKENS + text, WIDTH), drawn(1, 2, start + TOKENS + text, 6)
    own = {"K": 2, "image_token_start_index": start, "image_token_length": TOKENS, "max_num_trunction": 24}
    own |= {"pivot_image_token": 4, "pivot_text_token": 4, "reduction_ratio": 0.6}
    kept = code.get_retained_image_token(None, SimpleNamespace(DART_config=own, text_length=None), states, keys)
    norms = keys[0].abs().sum((0, 2))
    image = (norms[start : start + TOKENS].topk(4).indices + start).tolist()
    asking = (norms[start + TOKENS :].topk(4).indices + start + TOKENS).tolist()
    pivots = torch.tensor(list(set(image + asking)))  # as it walks through them
    return {"states": states, "keys": keys, "kept": kept.sort().values, "pivots": pivots}


def vispruner(code: SimpleNamespace) -> dict[str, Tensor]:
    """A batch of images: marks of what stays."""
    features, attention = drawn(IMAGES, TOKENS, WIDTH), torch.rand(IMAGES, 4, TOKENS).softmax(-1)
    model = _model(lambda images, output_attentions: (images, attention))
    owner = SimpleNamespace(get_model=lambda: model, get_visual_token_num=lambda: 16, get_important_ratio=lambda: 0.5)
    return {"features": features, "attention": attention, "kept": code.encode_images(owner, features)[1]}


CASES = {"divprune": divprune, "cdpruner": cdpruner, "dart": dart, "vispruner": vispruner}


def main() -> None:
    """Run all four and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CASES:
        parser.add_argument(name, type=Path, help=f"checkout of {name}")
    args = vars(parser.parse_args())
    write(OUT, {name: (partial(run, name), args[name]) for name in CASES})


def run(name: str, checkout: Path) -> dict[str, Tensor]:
    """A case on its functions."""
    return CASES[name](taken(checkout, *FILES[name]))


if __name__ == "__main__":
    main()

"""Outputs of the visual pruners' own code on small random inputs, which tests compare with.

    git clone https://github.com/vbdi/divprune; git clone https://github.com/Theia-4869/CDPruner; ...
    python benchmarks/pruner_originals.py --divprune divprune --cdpruner CDPruner --dart DART --vispruner VisPruner \
        --vidcom2 VidCom2 --evs vllm --vidcom2_vllm vllm --prunesid PruneSID    # needs torch and safetensors alone

The functions are taken out of the checkouts' files as they stand and run here: nothing of theirs is in this project. An
unpacked wheel is as good as a checkout. One file is written, ``benchmarks/results/pruner_originals.safetensors``:
inputs, what was chosen, and in its header the commits; what is not named there stays as it was.
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

OUT = Path(__file__).resolve().parent / "results" / "pruner_originals.safetensors"
ARCH = "llava/model/llava_arch.py"
PRUNE = "vllm/multimodal/video_prune/"
COUNT_AND_MASK = ("compute_retained_tokens_count", "compute_retention_mask")
FILES = {
    "divprune": ("LLaVA/" + ARCH, ("pairwise_cosine_similarity", "DivPrune")),
    "cdpruner": (ARCH, ("encode_images",)),
    "dart": ("llava/model/language_model/modeling_llama_self.py", ("get_retained_image_token",)),
    "vispruner": (ARCH, ("encode_images",)),
    "prunesid": (
        "prunesid/prunesid_llava/clip_encoder.py",
        ("batch_similarity_nms", "batch_pca", "CLIPVisionTower_PruneSID"),
    ),
    "evs": (PRUNE + "evs.py", COUNT_AND_MASK),
    "vidcom2": (
        "token_compressor/vidcom2/vidcom2.py",
        (
            "select_low_var_channels",
            "compute_gaussian_scores",
            "_multi_scale_gaussian",
            "compute_scales",
            "select_outlier_indices",
        ),
    ),
    "vidcom2_vllm": (
        PRUNE + "vidcom2.py",
        (*COUNT_AND_MASK, "_multi_scale_gaussian", "_ALPHAS", "_LOW_VAR_CHANNEL_RATIO", "_SOFTMAX_TEMPERATURE"),
    ),
}
IMAGES, TOKENS, WIDTH = 3, 60, 24
FRAMES, HIGH, WIDE = 6, 4, 5
RATIOS = (0.25, 0.5, 0.875)
"""Of the videos' tokens that stay: exact in binary."""


def taken(checkout: Path, file: str, names: tuple[str, ...], **told: Any) -> SimpleNamespace:
    """The named functions, classes and annotated constants of a file, told what they do not import."""
    found: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "math": math, **told}
    left = set(names)
    for node in ast.walk(ast.parse((checkout / file).read_text())):
        name = node.target if isinstance(node, ast.AnnAssign) else node
        name = name.id if isinstance(name, ast.Name) else getattr(node, "name", None)
        if name in left and isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign):
            left.remove(name)
            exec(compile(ast.Module([node], []), file, "exec"), found)  # annotations stay texts, as in this file
    return SimpleNamespace(**{name: found[name] for name in names})


def version(checkout: Path) -> str:
    """The commit of a checkout, or the release of an unpacked wheel."""
    if found := next(checkout.glob("*.dist-info"), None):
        return found.stem
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(out: Path, cases: dict[str, tuple[Callable[[Path], dict[str, Tensor]], Path | None]]) -> None:
    """Run cases on their checkouts, each from its own seed, and write their tensors to a file; without one, none."""
    tensors: dict[str, Tensor] = {}
    about = {"torch": torch.__version__}
    if out.is_file():
        with safe_open(out, "pt") as file:
            about |= file.metadata()
        tensors = load_file(out)
    for seed, (name, (case, checkout)) in enumerate(cases.items()):
        if checkout is None:
            continue
        torch.manual_seed(seed)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in case(checkout).items()}
        about[name] = version(checkout)
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


def prunesid(code: SimpleNamespace) -> dict[str, Tensor]:
    """VisPruner's images, a class token before them: what stays of two budgets, without it, in the order of choice.

    Its decomposition starts at random and makes two steps; so many that nothing is left of the start make it exact.
    """
    images = load_file(OUT)
    features, attention = images["vispruner.features"], images["vispruner.attention"]
    hidden, rows = (functional.pad(each, side) for each, side in ((features, (0, 0, 1, 0)), (attention, (1, 0))))
    steps, torch.pca_lowrank = torch.pca_lowrank, partial(torch.pca_lowrank, niter=200)
    found = {}
    for need in (16, 40):
        said = SimpleNamespace(attentions=[rows[:, :, None], None], hidden_states=[hidden, None])
        tower = SimpleNamespace(vision_tower=lambda *_, said=said, **__: said, device="cpu", dtype=torch.float32)
        tower.need_token_num = need
        places = code.CLIPVisionTower_PruneSID.forward(tower, torch.zeros(1))[1]
        found[f"chosen{need}"] = (places[:, 1:] - 1).to(torch.uint8)
    torch.pca_lowrank = steps
    return found


def film() -> Tensor:
    """Tokens of one video, frame after frame: each changes by a step of its own, and each frame by another."""
    start, steps = drawn(HIGH * WIDE, WIDTH), torch.rand(FRAMES, 1, 1) * torch.rand(FRAMES, HIGH * WIDE, 1)
    return (start + (steps * torch.randn(FRAMES, HIGH * WIDE, WIDTH)).cumsum(0)).flatten(0, 1)


def by_vllm(code: SimpleNamespace) -> dict[str, Tensor]:
    """One video, kept at several ratios: marks of what stays."""
    features, size = film(), (FRAMES, 2 * HIGH, 2 * WIDE)
    kept = [code.compute_retention_mask(features, size, 2, 1 - ratio) for ratio in RATIOS]
    return {"features": features, "kept": torch.stack(kept), "ratios": torch.tensor(RATIOS)}


def vidcom2(code: SimpleNamespace) -> dict[str, Tensor]:
    """One video at several ratios: marks of what stays, whose count is its own."""
    features = film()
    of_video, of_frame = code.compute_gaussian_scores(code.select_low_var_channels(features), HIGH * WIDE)
    kept = torch.zeros(len(RATIOS), FRAMES, HIGH * WIDE, dtype=torch.bool)
    for marks, ratio in zip(kept, RATIOS, strict=True):
        shares = code.compute_scales(-of_video.mean(dim=-1), ratio)
        for frame, rows in enumerate(code.select_outlier_indices(of_video + of_frame, shares, HIGH * WIDE)):
            marks[frame, rows] = True
    return {"features": features, "kept": kept.flatten(1), "ratios": torch.tensor(RATIOS)}


CASES = {"divprune": divprune, "cdpruner": cdpruner, "dart": dart, "vispruner": vispruner}
CASES |= {"evs": by_vllm, "vidcom2": vidcom2, "vidcom2_vllm": by_vllm, "prunesid": prunesid}


def main() -> None:
    """Run those whose checkouts are given, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CASES:
        parser.add_argument(f"--{name}", type=Path, help=f"checkout of {name}")
    args = vars(parser.parse_args())
    write(OUT, {name: (partial(run, name), args[name]) for name in CASES})


def run(name: str, checkout: Path) -> dict[str, Tensor]:
    """A case on its functions."""
    return CASES[name](taken(checkout, *FILES[name]))


if __name__ == "__main__":
    main()

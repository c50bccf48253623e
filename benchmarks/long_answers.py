"""Long answers under a budget: the loss of a text's own continuation, 4,096 tokens after a prompt of 512, and a step.

    OMP_NUM_THREADS=1 python -m benchmarks.long_answers loss --source DIR --calibration FILE [--arms ARM ...]
    OMP_NUM_THREADS=1 python -m benchmarks.long_answers steps --source DIR --calibration FILE

DIR holds WikiText-2's ``test.txt``; FILE is of ``subtoken-train calibrate triattention`` on its ``valid.txt``. Three
stretches are read together, ``EVERY`` tokens at a time, after which an eviction follows: the tokens see what they would
see one by one. ``steps`` times steps of one token of all arms in turns, as many as hold one eviction. Both add to one
record.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import hardware, write
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import load_backbone
from subtoken_train.inference.prefill import append, decode, prefill
from subtoken_train.types import Batch, Region

OUT = Path(__file__).with_name("results") / "long_answers.json"
PROMPT, ANSWER, EVERY, TEXTS = 512, 4096, 128, 3
ARMS: dict[str, tuple[str, int, str]] = {
    "full cache": ("", 0, "model"),
    **{name: (name, 512, "model") for name in ("streaming_llm", "tova", "h2o", "snapkv", "triattention", "rkv")},
    "snapkv, int8": ("snapkv", 960, "int8"), "snapkv, int4_rotated": ("snapkv", 1792, "int4_rotated"),
}  # fmt: skip
"""Method, entries and format; in the last two entries take as many bytes as 512 in bf16."""


def compression(arm: str, calibration: str) -> Compression:
    """An arm's; everything competes."""
    name, keep, form = ARMS[arm]
    own = {"calibration": calibration} if name == "triattention" else {}
    if not name:
        return Compression()
    return Compression(build_eviction(name, **own), keep, unit="tokens", scope="all", every=EVERY, kv_dtype=form)


def opened(backbone: CompressedBackbone, ids_BN: Tensor, own: Compression) -> PackedCache:
    """A cache of prompts that are context alone."""
    cache, regions = PackedCache(backbone.family.shape.num_layers), torch.full_like(ids_BN, int(Region.CONTEXT))
    none, names = torch.zeros(len(ids_BN), dtype=torch.long), [str(i) for i in range(len(ids_BN))]
    labels, rank = torch.full_like(ids_BN, -100), none + ids_BN.shape[1] - 1
    prefill(backbone, Batch(ids_BN, labels, regions, rank, None, none, names, followed=True), cache, own)
    return cache


def held(cache: PackedCache) -> int:
    """Bytes of keys and values, what finds them, the tail, and what the method keeps to decide."""
    states = sum(layer.eviction_state.nbytes for layer in cache.layers if layer.eviction_state is not None)
    return states + sum(layer.payload_bytes + layer.index_bytes + sum(layer.tail_bytes) for layer in cache.layers)


@torch.no_grad()
def loss(backbone: CompressedBackbone, ids_BN: Tensor, own: Compression) -> dict[str, Any]:
    """Nats a token of every stretch, the first and the last half of them, and the most bytes a stretch held."""
    cache, begun, found, most = opened(backbone, ids_BN[:, :PROMPT], own), time.process_time(), [], 0
    for start in range(PROMPT, PROMPT + ANSWER, EVERY):
        logits = backbone.family.logits(append(backbone, ids_BN[:, start : start + EVERY], cache)).float()
        targets = ids_BN[:, start + 1 : start + EVERY + 1, None]
        found.append(-logits.log_softmax(-1).gather(-1, targets)[..., 0])
        most = max(most, held(cache) // len(ids_BN))
    nats_BT, half = torch.cat(found, 1), ANSWER // 2
    parts = {"nats": nats_BT, "first_half": nats_BT[:, :half], "last_half": nats_BT[:, half:]}
    seconds, last = round(time.process_time() - begun, 1), held(cache) // len(ids_BN)
    losses = {key: [round(each, 4) for each in part.mean(-1).tolist()] for key, part in parts.items()}
    return losses | {"largest_bytes": most, "last_bytes": last, "cpu_seconds": seconds}


@torch.no_grad()
def steps(backbone: CompressedBackbone, ids_1N: Tensor, calibration: str) -> dict[str, float]:
    """CPU milliseconds of a step of one token, evictions included; of the full cache, after all but the last tokens."""
    caches, spent = {}, dict.fromkeys(ARMS, 0.0)
    for arm, (name, keep, _) in ARMS.items():
        length = max(keep, PROMPT) if name else PROMPT + ANSWER - EVERY
        caches[arm] = opened(backbone, ids_1N[:, :length], compression(arm, calibration))
        append(backbone, ids_1N[:, :EVERY], caches[arm])
    for step in range(EVERY):
        for arm in list(ARMS)[:: 1 if step % 2 else -1]:
            begun = time.process_time()
            decode(backbone, ids_1N[:, step : step + 1], caches[arm])
            spent[arm] += time.process_time() - begun
    return {arm: round(1000 * each / EVERY, 2) for arm, each in spent.items()}


def main() -> None:
    """Measure, add to the record, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loss", "steps"])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--source", type=Path, required=True, help="folder with WikiText's test.txt")
    parser.add_argument("--calibration", required=True, help="of triattention")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="for loss")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    backbone = load_backbone(args.model, loading={"dtype": "float32"}).eval()
    text, long = (args.source / "test.txt").read_text(), PROMPT + ANSWER + 1
    ids = backbone.family.tokenizer(text, add_special_tokens=False)["input_ids"][: TEXTS * long]
    ids_BN = torch.tensor(ids).view(TEXTS, long)
    record = json.loads(args.out.read_text()) if args.out.is_file() else {"hardware": hardware(), "arms": {}}
    record |= {"prompt": PROMPT, "answer": ANSWER, "every": EVERY, "texts": TEXTS}
    if args.what == "steps":
        record["step_ms"] = steps(backbone, ids_BN[:1], args.calibration)
        print(json.dumps(record["step_ms"], indent=1))
    for arm in args.arms if args.what == "loss" else ():
        record["arms"][arm] = loss(backbone, ids_BN, compression(arm, args.calibration))
        print(arm, record["arms"][arm], flush=True)
        write(record, args.out)
    write(record, args.out)


if __name__ == "__main__":
    main()

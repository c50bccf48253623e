"""One byte budget for keys and value groups on real models, beside its token-only twin: trained alike, asked blind.

    python -m benchmarks.real_text_bytes --source DIR --model qwen05    # trains and asks what has no record yet

DIR holds WikiText-2's ``valid.txt``, which is learnt from, and ``test.txt``, whose contexts are asked, see
``real_text.py``. Every arm trains by ``recipes/real/smollm2_bytes21p875_s12.yaml`` with one pool of bytes for all
layers and heads, in bfloat16 with fp32 adapters; the loss is ten parts of the divergence from the uncompressed model's
distributions to one of the text's. The last 16 tokens stay, as under KVzap, and the first one, which it does not spare.

What is read after a context in training is, in every other block, what follows it in WikiText, and in the others a run
of the context once more: only then is there anything to learn of what a fact is worth that nothing has asked for yet.

``tokens`` is the twin: the same router and budget, whose heads keep an entry whole or not at all. Routers start as
KVzap's nets (the file of ``real_text.py``), which keep what KVzap keeps, with the norm of value groups beside them or
without; or from ``nothing``. They learn alone (``router``), with LoRA, for the recipe's steps or twice as many, or not
at all (``untrained``).

``--turned`` takes the model's copy with turned values, NAME-axes beside it. Turning leaves what layers read as it is,
so the nets of the model are those of its copy.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arm_training import commit, sha256
from benchmarks.real_text import CONTEXTS, ENTRIES, HALVES, NETS, OUT, add, machine, read
from benchmarks.real_text_trained import MIXED, ROOT, fitted, said
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import shapes_digest
from subtoken_train.families.load import load_family
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import ModelPool
from subtoken_train.settings import KVDtype

RECIPE = "smollm2_bytes21p875_s12"
BLOCK, CONTEXT = 512, 384
BUDGET = {"byte_pool": "all", "sinks": "1", "window": "16"}
HEADS = {"smollm2": 3, "qwen05": 2}
"""Key-value heads of a layer."""
ROUTERS = {"bytes": 4, "tokens": 1}
"""Value groups of a head."""
WARM = {"optimizer.router_learning_rate": "2e-4"}
STARTS = {
    "kvzap": WARM,
    "kvzap and norm": {**WARM, "routing.score_prior": "value_norm"},
    "nothing": {"optimizer.router_learning_rate": "1e-3"},
}
USUAL = "kvzap and norm"
"""The start that tables do not name."""
LEARNS = {
    "untrained": {"optimizer.learning_rate": "0", "optimizer.router_learning_rate": "0"},
    "router": {"optimizer.learning_rate": "0"},
    "router and LoRA": {"optimizer.learning_rate": "2e-4"},
    "router and LoRA, 320 steps": {"optimizer.learning_rate": "2e-4"},
}
STEPS = {"untrained": "1", "router and LoRA, 320 steps": "320"}
"""Where they are not the recipe's."""
BEST = (
    "kvzip {:.1%}", "kvzap {:.1%}", "pooled(compactor) {:.1%}", "expected_attention {:.1%}", "pooled(keydiff) {:.1%}",
)  # fmt: skip
SIZES: dict[str, tuple[float, KVDtype, tuple[str, ...]]] = {
    **{f"{share:.1%}": (share, "model", tuple(name.format(share) for name in BEST)) for share in ENTRIES},
    "42% in int8": (0.42, "int8", ("kvzip 42% in int8", "kvzap 42% in int8", f"kvzip 53.7% in int8, {HALVES}")),
    "46.5% in int4_rotated": (
        0.465, "int4_rotated", ("kvzip 46.5% in int4_rotated", f"kvzip 57.8% in int4_rotated, {HALVES}"),
    ),
}  # fmt: skip
"""By name: the share of the bytes in bf16, what numbers they are then held in, and arms of as many bytes."""


class Arm(NamedTuple):
    """One arm: what of each it has; ``turned``: values of the model's copy with turned ones."""

    learns: str
    start: str
    router: str
    size: str
    turned: bool

    def argv(self, model: str, nets: Path, device: str = "cpu") -> list[str]:
        """Flags of ``fit`` beside the recipe; ``nets`` is KVzap's file for the weights."""
        groups, weights = str(HEADS[model] * ROUTERS[self.router]), weights_of(model, self.turned)
        settings = {f"routing.{name}": value for name, value in BUDGET.items()}
        settings |= {"routing.byte_share": str(SIZES[self.size][0]), "distillation.weight": "10"}
        settings |= {"routing.num_groups": groups, "routing.kept_groups": groups, "backbone.path": str(weights)}
        settings |= {"routing.warm_start": str(nets)} if self.start != "nothing" else {}
        settings |= {**STARTS[self.start], **LEARNS[self.learns]}
        flags = [part for name, value in settings.items() for part in (f"--model.{name}", value)]
        flags += ["--trainer.accelerator", "gpu"] if device != "cpu" else []
        return [*MIXED, *flags, *(["--trainer.max_steps", STEPS[self.learns]] if self.learns in STEPS else [])]


def weights_of(model: str, turned: bool) -> Path:
    """Return the folder of a model, or of its copy with turned values."""
    return ROOT / "checkpoints" / (f"{model}-axes" if turned else model)


def arms(
    learns: Iterable[str], starts: Iterable[str], routers: Iterable[str], sizes: Iterable[str], turned: bool = False
) -> list[Arm]:
    """Return the arms there are of these parts; what starts from nothing and learns nothing is none."""
    found = [Arm(*parts, turned) for parts in product(learns, starts, routers, sizes)]
    return [arm for arm in found if (arm.learns, arm.start) != ("untrained", "nothing")]


def documents(tokenizer: Any, text: str, block: int = BLOCK, context: int = CONTEXT) -> list[str]:
    """Return texts that fill a block each: a context, and what follows it or, of every other text, a run of it again.

    Args:
        tokenizer: of the model.
        text: WikiText's.
        block: tokens of a block; with a BOS, where there is one, and an EOS.
        context: its first tokens, the BOS among them.
    """
    started = tokenizer.bos_token_id is not None
    length, own, draw = block - 1 - started, context - started, random.Random(0)
    ids, found = tokenizer(text, add_special_tokens=False)["input_ids"], []
    for start in range(0, len(ids) - length + 1, length):
        run = ids[start : start + length]
        if len(found) % 2:
            first = draw.randrange(own - (length - own) + 1)
            run = run[:own] + run[first : first + length - own]
        made = tokenizer.decode(run)
        if tokenizer(made, add_special_tokens=False)["input_ids"] == run:  # not of runs that part a character
            found.append(made)
    return found


def write_documents(model: str, source: Path, work: Path) -> Path:
    """Write what is learnt from, once for a model's tokenizer."""
    file = work / f"{model}-documents.jsonl"
    made = documents(
        load_family(BackboneConfig(str(weights_of(model, False)))).tokenizer, (source / "valid.txt").read_text()
    )
    whole = "".join(json.dumps({"text": each}) + "\n" for each in made)
    if not file.exists() or file.read_text(encoding="utf-8") != whole:
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(whole, encoding="utf-8")
    return file


def nets_for(model: str, turned: bool, work: Path) -> Path:
    """Return KVzap's file for the weights; the copy with turned values takes the model's nets under its own name."""
    file = NETS / f"{model}.json"
    if not turned:
        return file
    weights = weights_of(model, True)
    content = json.loads(file.read_text(encoding="utf-8"))
    content["backbone"] |= {"path": str(weights), "digest": shapes_digest(load_family(BackboneConfig(str(weights))))}
    work.mkdir(parents=True, exist_ok=True)
    (work / f"{weights.name}-kvzap.json").write_text(json.dumps(content), encoding="utf-8")
    return work / f"{weights.name}-kvzap.json"


def train(model: str, arm: Arm, seed: int, data: Path, work: Path, device: str = "cpu") -> Path:
    """Train an arm's adapter on a device unless it is there; return its folder."""
    name = "-".join([model, *map(str, arm)]).replace(" ", "_")
    argv = ["--seed_everything", str(seed), "--data.seed", str(seed), "--data.train.name", str(data)]
    flags = [*arm.argv(model, nets_for(model, arm.turned, work), device), *argv]
    fitted(work / f"{name}-seed{seed}", RECIPE, flags, sha256(data.read_bytes()))
    return work / f"{name}-seed{seed}" / "adapter"


Own = Mapping[str, Any]


def words(arm: Arm) -> str:
    """Return what a table of a size calls an arm."""
    kept = {"bytes": "keys and groups", "tokens": "whole tokens"}[arm.router]
    start = "" if arm.start == USUAL else f", from {arm.start}"
    return f"{kept}{', turned' * arm.turned}, {arm.learns}{start}"


def records_of(model: str) -> Path:
    """Return the file of a model's records."""
    return OUT / f"trained/{model}_bytes.jsonl.xz"


def main() -> None:
    """Train and ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with WikiText's valid.txt and test.txt")
    parser.add_argument("--model", choices=list(HEADS), default="smollm2")
    parser.add_argument("--device", default="cpu", help="where it runs: cpu, or a GPU")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/real_text_bytes")
    parser.add_argument("--learns", nargs="+", choices=list(LEARNS), default=list(LEARNS))
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turned", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    some = arms(args.learns, args.starts, args.routers, args.sizes, args.turned)
    run(args.model, some, args.seeds, args.source, args.work, args.device)


def run(model: str, some: Iterable[Arm], seeds: Sequence[int], source: Path, work: Path, device: str = "cpu") -> None:
    """Train and ask what has no record yet; one line for each arm and seed in the model's file."""
    file = records_of(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    data, done, first = write_documents(model, source, work), {key(each) for each in read(file)}, min(seeds)
    for seed, arm in product(seeds, some):
        line = {**arm._asdict(), "seed": seed, "commit": commit(), "dtype": "bfloat16", **machine(device)}
        if key(line) in done or (arm.learns == "untrained" and seed != first):
            continue  # nothing of what is untrained hangs on the seed
        compression = Compression(kv_dtype=SIZES[arm.size][1])
        adapter = train(model, arm, seed, data, work, device)
        line |= said(ModelPool(device).get(adapter), compression, source, CONTEXTS)
        add(file, line)
        told = f"{np.mean(line['facts']):.2f} nats, {np.mean(line['exact']):.1%} exact"
        print(arm.size, words(arm), seed, told, flush=True)


def key(record: Own) -> tuple[Any, ...]:
    """Return what a record is of."""
    return tuple(record[name] for name in (*Arm._fields, "seed"))


if __name__ == "__main__":
    main()

"""One byte budget for keys and value groups on SmolLM2, beside its token-only twin: trained alike, asked blind.

    python -m benchmarks.real_text_bytes --source DIR            # trains and asks what has no record yet
    python -m benchmarks.real_text_bytes --table                 # the page from the records

DIR holds WikiText-2's ``valid.txt``, which is learnt from, and ``test.txt``, whose contexts are asked, see
``real_text.py``. Every arm trains by ``recipes/real/smollm2_bytes21p875_s12.yaml`` with one pool of bytes for all
layers and heads, in bfloat16 with fp32 adapters; the loss is ten parts of the divergence from the uncompressed model's
distributions to one of the text's. The last 16 tokens stay, as under KVzap, and the first one, which it does not spare.

What is read after a context in training is, in every other block, what follows it in WikiText, and in the others a run
of the context once more: only then is there anything to learn of what a fact is worth that nothing has asked for yet.

``tokens`` is the twin: the same router and budget, whose heads keep an entry whole or not at all. Routers start as
KVzap's nets (the file of ``real_text.py``), which keep what KVzap keeps, with the norm of value groups beside them or
without; or from ``nothing``. They learn alone (``router``), with LoRA, or not at all (``untrained``).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arm_training import commit, sha256
from benchmarks.bf16_products import has_unit
from benchmarks.comparison_tables import signed_cell
from benchmarks.pages import put
from benchmarks.real_text import CONTEXTS, ENTRIES, NETS, OUT, PAGE, facts_lost, read, text_lost
from benchmarks.real_text_trained import MIXED, ROOT, fitted, said, same_seeds
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import ModelPool

FILE = OUT / "trained/smollm2_bytes.jsonl"
RECIPE = "smollm2_bytes21p875_s12"
BLOCK, CONTEXT = 512, 384
BUDGET = {"byte_pool": "all", "sinks": "1", "window": "16"}
ROUTERS: dict[str, dict[str, str]] = {
    "bytes": {},
    "tokens": {"routing.num_groups": "3", "routing.kept_groups": "3"},
}
WARM = {"routing.warm_start": str(NETS / "smollm2.json"), "optimizer.router_learning_rate": "2e-4"}
STARTS = {
    "kvzap": WARM,
    "kvzap and norm": {**WARM, "routing.score_prior": "value_norm"},
    "nothing": {"optimizer.router_learning_rate": "1e-3"},
}
LEARNS = {
    "untrained": {"optimizer.learning_rate": "0", "optimizer.router_learning_rate": "0"},
    "router": {"optimizer.learning_rate": "0"},
    "router and LoRA": {"optimizer.learning_rate": "2e-4"},
}
SHARES = ENTRIES[1:]


class Arm(NamedTuple):
    """One arm: what of each it has."""

    learns: str
    start: str
    router: str
    byte_share: float

    def argv(self) -> list[str]:
        """Flags of ``fit`` beside the recipe."""
        settings = {f"routing.{name}": value for name, value in BUDGET.items()}
        settings |= {"routing.byte_share": str(self.byte_share), "distillation.weight": "10"}
        settings |= {**ROUTERS[self.router], **STARTS[self.start], **LEARNS[self.learns]}
        flags = [part for name, value in settings.items() for part in (f"--model.{name}", value)]
        return [*MIXED, *flags, *(["--trainer.max_steps", "1"] if self.learns == "untrained" else [])]


def arms(learns: Iterable[str], starts: Iterable[str], routers: Iterable[str], shares: Iterable[float]) -> list[Arm]:
    """Return the arms there are of these parts; what starts from nothing and learns nothing is none."""
    found = [Arm(*parts) for parts in product(learns, starts, routers, shares)]
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


def write_documents(source: Path, work: Path) -> Path:
    """Write what is learnt from, once."""
    file = work / "documents.jsonl"
    family = load_family(BackboneConfig(str(ROOT / "checkpoints/smollm2")))
    made = documents(family.tokenizer, (source / "valid.txt").read_text(encoding="utf-8"))
    whole = "".join(json.dumps({"text": each}) + "\n" for each in made)
    if not file.exists() or file.read_text(encoding="utf-8") != whole:
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(whole, encoding="utf-8")
    return file


def train(arm: Arm, seed: int, data: Path, work: Path) -> Path:
    """Train an arm's adapter unless it is there; return its folder."""
    name = "-".join([arm.learns, arm.start, arm.router, str(arm.byte_share)]).replace(" ", "_")
    argv = ["--seed_everything", str(seed), "--data.seed", str(seed), "--data.train.name", str(data)]
    fitted(work / f"{name}-seed{seed}", RECIPE, [*arm.argv(), *argv], sha256(data.read_bytes()))
    return work / f"{name}-seed{seed}" / "adapter"


Own = Mapping[str, Any]


def table(records: Iterable[Own], others: Mapping[str, Own]) -> str:
    """Write means over seeds and contexts, and what an arm loses more than its twin and than untrained rankings.

    Args:
        records: of the arms.
        others: of ``real_text.py`` on the same contexts, by arm.
    """
    found: dict[Arm, list[Own]] = {}
    for record in records:
        found.setdefault(Arm(*(record[name] for name in Arm._fields)), []).append(record)
    if not found:
        return "Not measured yet."
    heads = ("token twin", "KVzip", "KVzap")
    lines = [
        "| bytes | learns | starts | router | seeds | codes said | facts: nats above full |"
        + "".join(f" less {head} |" for head in heads)
        + " text: nats a token above full |"
        + "".join(f" less {head} |" for head in heads),
        "|" + "---|" * 14,
    ]
    for arm in sorted(found, key=lambda arm: (-arm.byte_share, *map(_place, arm))):
        own = found[arm]
        twins = found.get(arm._replace(router="tokens"), []) if arm.router == "bytes" else []
        beside = [same_seeds(twins, own)] + [
            [others[f"{name} {arm.byte_share:.1%}"]] * len(own) for name in ("kvzip", "kvzap")
        ]
        share, said_ = (np.mean([np.mean(each[name]) for each in own]) for name in ("share", "exact"))
        cells = [f"{share:.1%}", arm.learns, arm.start, arm.router, str(len(own)), f"{said_:.0%}"]
        for lost, digits in ((facts_lost, 2), (text_lost, 3)):
            pairs = [[others["full cache"]] * len(own), *beside]
            cells += [
                signed_cell(np.array([lost(*pair) for pair in zip(own, other, strict=True)]), digits)
                if len(other) == len(own)
                else ""
                for other in pairs
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _place(part: object) -> int:
    names = [*LEARNS, *STARTS, *ROUTERS]
    return names.index(part) if isinstance(part, str) else 0


def shown() -> str:
    """Return the page's table."""
    return table(read(FILE), {each["arm"]: each for each in read(OUT / "smollm2.jsonl")})


def main() -> None:
    """Train and ask, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with WikiText's valid.txt and test.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/real_text_bytes")
    parser.add_argument("--learns", nargs="+", choices=list(LEARNS), default=list(LEARNS))
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        if args.source is None:
            parser.error("--source DIR, or --table")
        FILE.parent.mkdir(parents=True, exist_ok=True)
        data, done = write_documents(args.source, args.work), {key(each) for each in read(FILE)}
        for seed, arm in product(args.seeds, arms(args.learns, args.starts, args.routers, args.shares)):
            line = {**arm._asdict(), "seed": seed, "commit": commit(), "dtype": "bfloat16", "bf16_unit": has_unit()}
            if key(line) in done or (arm.learns == "untrained" and seed != args.seeds[0]):
                continue  # nothing of what is untrained hangs on the seed
            line |= said(ModelPool().get(train(arm, seed, data, args.work)), Compression(), args.source, CONTEXTS)
            with FILE.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line, separators=(",", ":")) + "\n")
            nats, exact = np.mean(line["facts"]), np.mean(line["exact"])
            print(*arm, seed, f"{nats:.2f} nats, {exact:.1%} exact", flush=True)
    put(PAGE, "bytes", shown())


def key(record: Own) -> tuple[Any, ...]:
    """Return what a record is of."""
    return tuple(record[name] for name in (*Arm._fields, "seed"))


if __name__ == "__main__":
    main()

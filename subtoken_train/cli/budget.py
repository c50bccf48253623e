"""``subtoken-train budget``: what a keep ratio and value groups cost, and the token-only anchor of equal bytes."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

from subtoken_train.cli.command_line import check_counts
from subtoken_train.errors import check_word, refuse
from subtoken_train.functional.groups import check_groups
from subtoken_train.ledger.kv_budget import GEOMETRIES, KVBudget, KVShape, exact, geometry, kept_count
from subtoken_train.ledger.ledger import nominal_ledger, solve_anchor
from subtoken_train.settings import FORMAT_NAMES, check_amount

HELP = """What a KV budget keeps, before anything is trained.

  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4
  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4 --model llava-1.5-7b --tokens 576
  subtoken-train budget --eviction-keep .42 --kv-dtype int8 --model llama-3.1-8b --tokens 8192"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep-ratio", type=float, help="r, tokens kept / tokens, in (0, 1]")
    parser.add_argument("--num-groups", type=int, help="S, value groups per value vector")
    parser.add_argument("--kept-groups", type=int, help="K, groups kept per routed token")
    parser.add_argument("--eviction-keep", type=float, metavar="SHARE", help="share that an eviction keeps of these")
    parser.add_argument("--kv-dtype", metavar="NAME", help=f"format of the stored entries: {', '.join(FORMAT_NAMES)}")
    parser.add_argument("--model", metavar="NAME", help=f"geometry for bytes (bf16): {', '.join(GEOMETRIES)}")
    parser.add_argument("--tokens", type=int, metavar="N", help="visual (or context) tokens before the reducer")


def run(args: Namespace) -> int:
    check_counts(args, "tokens")
    given = args.keep_ratio, args.num_groups, args.kept_groups, args.eviction_keep
    needed = "required: --keep-ratio, --num-groups, --kept-groups; or --eviction-keep, or --kv-dtype"
    refuse((None in given[:3] and given[3] is args.kv_dtype is None, f"{needed} (see 'subtoken-train budget --help')"))
    ratio, groups, stay, keep = (1 if each is None else each for each in given)
    budget = KVBudget(ratio, groups, stay)
    check_amount(keep, "fraction")
    budget = replace(budget, keep_ratio=float(exact(ratio) * exact(keep)))
    if args.kv_dtype is not None:
        check_word("kv_dtype", args.kv_dtype, FORMAT_NAMES)
        whole = "--kv-dtype is counted of whole values here; leave --num-groups and --kept-groups out"
        refuse((budget.value_fraction < 1, whole), (args.tokens is None, "--kv-dtype needs --model and --tokens"))
    if args.tokens is not None and args.model is None:
        raise ValueError(f"--tokens needs --model, for the bytes of a token; known: {', '.join(GEOMETRIES)}")
    kept, total = f"{budget.kept_groups} of {budget.num_groups}", f"{budget.total_kv_fraction:g}"
    lines = [
        f"K/S        {float(budget.value_fraction):<10g} value groups kept of a routed token ({kept})",
        f"rho_KV     {budget.kv_fraction:<10g} KV kept of a routed token",
        f"rho_total  {total:<10} KV kept of all tokens that the reducer sees",
        f"anchor     {total:<10} keep ratio of the matched token-only arm",
    ]
    if args.model is not None:
        shape = geometry(args.model)
        check_groups(budget.num_groups, budget.kept_groups, shape.num_kv_heads, shape.head_dim, "contiguous")
        lines += ["", f"{args.model}: {shape.token_bytes / 2**10:g} KiB per token, uncompressed bf16"]
        if (tokens := args.tokens) is not None:
            routed = nominal_ledger(shape, {"visual": tokens}, budget)
            anchor = solve_anchor(shape, tokens, budget.total_of(tokens), region="visual")
            anchored = nominal_ledger(shape, {"visual": tokens}, KVBudget(), kept_tokens=anchor.kept_tokens)
            dense, payload = routed.dense_bytes(), routed.bytes_of(with_index=False)
            index = routed.bytes_of() - payload
            note = f"  + {index / 2**10:.1f} KiB of group indices ({index / payload:.2%})"
            count = kept_count(tokens, budget.keep_ratio)
            rows = [("dense", tokens, dense, ""), ("routed", count, payload, note)]
            rows.append(("anchor", anchor.kept_tokens, anchored.bytes_of(), ""))
            if args.kv_dtype is not None:
                rows.append((args.kv_dtype, count, _stored_bytes(args.kv_dtype, shape, count), ""))
            lines.append(f"{'':<13}{'tokens':>8}{'MiB':>12}{'of dense':>11}")
            for label, count, size, words in rows:
                lines.append(f"{label:<13}{count:>8,}{size / 2**20:>12.3f}{size / dense:>11.3%}{words}")
    print("\n".join(lines))
    return 0


def _stored_bytes(name: Any, shape: KVShape, tokens: int) -> int:
    import torch  # which a format's codes are of

    from subtoken_train.kernels.formats import FORMATS

    count = tokens * shape.num_layers * shape.num_kv_heads
    return sum(FORMATS[name].bytes_of(count, shape.head_dim, torch.bfloat16, part) for part in ("keys", "values"))

"""``subtoken-train budget``: what a keep ratio and value groups cost, and the token-only anchor of equal bytes."""

from argparse import ArgumentParser, Namespace

from subtoken_train.cli.command_line import check_counts
from subtoken_train.functional.groups import check_groups
from subtoken_train.ledger.kv_budget import GEOMETRIES, KVBudget, geometry, kept_count
from subtoken_train.ledger.ledger import nominal_ledger, solve_anchor

HELP = """What a KV budget keeps, before anything is trained.

  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4
  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4 --model llava-1.5-7b --tokens 576"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep-ratio", type=float, required=True, help="r, tokens kept / tokens, in (0, 1]")
    parser.add_argument("--num-groups", type=int, required=True, help="S, value groups per value vector")
    parser.add_argument("--kept-groups", type=int, required=True, help="K, groups kept per routed token")
    parser.add_argument("--model", metavar="NAME", help=f"geometry for bytes (bf16): {', '.join(GEOMETRIES)}")
    parser.add_argument("--tokens", type=int, metavar="N", help="visual (or context) tokens before the reducer")


def run(args: Namespace) -> int:
    check_counts(args, "tokens")
    budget = KVBudget(args.keep_ratio, args.num_groups, args.kept_groups)
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
            lines.append(f"{'':<9}{'tokens':>8}{'MiB':>12}{'of dense':>11}")
            for label, count, size, words in (
                ("dense", tokens, dense, ""),
                ("routed", kept_count(tokens, budget.keep_ratio), payload, note),
                ("anchor", anchor.kept_tokens, anchored.bytes_of(), ""),
            ):
                lines.append(f"{label:<9}{count:>8,}{size / 2**20:>12.3f}{size / dense:>11.3%}{words}")
    print("\n".join(lines))
    return 0

"""``subtoken-train budget``: what a keep ratio and value groups cost, and the token-only anchor of equal bytes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import get_args

from subtoken_train.cli.command_line import check_counts
from subtoken_train.errors import refuse
from subtoken_train.functional.groups import check_groups
from subtoken_train.ledger.kv_budget import GEOMETRIES, KVBudget, KVShape, equal_kept_groups, geometry, kept_count
from subtoken_train.ledger.ledger import nominal_ledger, solve_anchor
from subtoken_train.types import Fill

HELP = """What a KV budget keeps, before anything is trained.

  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4
  subtoken-train budget --keep-ratio .25 --num-groups 16 --kept-groups 4 --model llava-1.5-7b --tokens 576"""

REGION = "visual"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the budget, and optionally a model and a token count."""
    parser.add_argument("--keep-ratio", type=float, required=True, help="r, tokens kept / tokens, in (0, 1]")
    parser.add_argument("--num-groups", type=int, required=True, help="S, value groups per value vector")
    parser.add_argument("--kept-groups", type=int, required=True, help="K, groups kept per routed token")
    fills = f"what replaces dropped groups: {', '.join(get_args(Fill))}"
    parser.add_argument("--fill", default="zero", metavar="WORD", help=fills)
    parser.add_argument("--model", metavar="NAME", help=f"geometry for bytes (bf16): {', '.join(GEOMETRIES)}")
    parser.add_argument("--tokens", type=int, metavar="N", help="visual (or context) tokens before the reducer")


def fraction_lines(budget: KVBudget) -> list[str]:
    """The budget's fractions, which hold for every model."""
    ratio = f"{float(budget.value_fraction):g}"
    total = f"{budget.total_kv_fraction:g}"
    lines = [
        f"K/S        {ratio:<10} value groups kept of a routed token ({budget.kept_groups} of {budget.num_groups})",
        f"rho_KV     {budget.kv_fraction:<10g} KV kept of a routed token",
        f"rho_total  {total:<10} KV kept of all tokens that the reducer sees",
        f"anchor     {total:<10} keep ratio of the matched token-only arm",
    ]
    if budget.stores_fill:
        lines.append("fill       a value vector per layer and sample beside these: its share is 1 / (2 tokens)")
    return lines


def size_line(label: str, tokens: int, num_bytes: int, dense: int, note: str = "") -> str:
    """One row of the table of bytes: tokens, MiB and share of the dense cache."""
    return f"{label:<9}{tokens:>8,}{num_bytes / 2**20:>12.3f}{num_bytes / dense:>11.3%}  {note}".rstrip()


def byte_lines(budget: KVBudget, shape: KVShape, tokens: int) -> list[str]:
    """The table of bytes: dense, routed and anchor, from the ledger."""
    routed = nominal_ledger(shape, {REGION: tokens}, budget)
    anchor = solve_anchor(shape, tokens, budget.total_of(tokens), region=REGION)
    anchored = nominal_ledger(shape, {REGION: tokens}, KVBudget(), kept_tokens=anchor.kept_tokens)
    dense, payload = routed.dense_bytes(), routed.bytes_of(with_index=False)
    index = routed.bytes_of() - payload
    note = f"+ {index / 2**10:.1f} KiB of group indices ({index / payload:.2%})"
    lines = [
        f"{'':<9}{'tokens':>8}{'MiB':>12}{'of dense':>11}",
        size_line("dense", tokens, dense, dense),
        size_line("routed", kept_count(tokens, budget.keep_ratio), payload, dense, note),
        size_line("anchor", anchor.kept_tokens, anchored.bytes_of(), dense),
    ]
    if budget.stores_fill:
        lines.append(_equal_line(budget, kept_count(tokens, budget.keep_ratio)))
    return lines


def _equal_line(budget: KVBudget, kept: int) -> str:
    """Return the K that pays for the stored fill, or say why none does, which is no mistake of the given budget."""
    without = f"K={budget.kept_groups} without"
    try:
        equal = equal_kept_groups(budget.num_groups, budget.kept_groups, kept)
    except ValueError as error:
        return f"no K with this fill takes as few bytes as {without}: {error}"
    return f"K={equal} with this fill takes no more bytes than {without} ({kept} tokens)"


def run(args: Namespace) -> int:
    """Print the fractions, and the bytes where a model is named."""
    check_counts(args, "tokens")
    budget = KVBudget(args.keep_ratio, args.num_groups, args.kept_groups, fill=args.fill)
    filled = f"--fill {budget.fill} with --kept-groups = --num-groups = {budget.num_groups}"
    known = ", ".join(GEOMETRIES)
    full = budget.fill != "zero" and budget.kept_groups == budget.num_groups
    bare = args.tokens is not None and args.model is None
    refuse(
        (full, f"{filled}: no group is dropped; keep fewer groups, or leave --fill out"),
        (bare, f"--tokens needs --model, for the bytes of a token; known: {known}"),
    )
    lines = fraction_lines(budget)
    if args.model is not None:
        shape = geometry(args.model)
        check_groups(budget.num_groups, budget.kept_groups, shape.num_kv_heads, shape.head_dim, "contiguous")
        lines += ["", f"{args.model}: {shape.token_bytes / 2**10:g} KiB per token, uncompressed bf16"]
        lines += byte_lines(budget, shape, args.tokens) if args.tokens is not None else []
    print("\n".join(lines))
    return 0

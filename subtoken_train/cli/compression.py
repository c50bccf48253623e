"""Options that say which model runs and how its cache is compressed: shared by the commands that generate."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from subtoken_train.evictions import EVICTIONS

if TYPE_CHECKING:
    from subtoken_train.inference.model import SubTokenModel


def add_compression_options(parser: ArgumentParser) -> None:
    """A plain backbone's token reducer, and for every model the eviction and the precision of its cache."""
    evictions = ", ".join(EVICTIONS)
    parser.add_argument("--reducer", metavar="NAME", help="token reducer of a backbone alone; an adapter has its own")
    parser.add_argument("--keep-ratio", type=float, metavar="R", help="share of the tokens that --reducer keeps")
    parser.add_argument("--eviction", metavar="NAME", help=f"KV eviction after the prompt: {evictions} (default: none)")
    parser.add_argument(
        "--eviction-keep", metavar="BUDGET", help="what it keeps: 0.1 of the entries, 256tokens per layer, or 20MB"
    )
    parser.add_argument(
        "--eviction-option", action="append", default=[], metavar="KEY=VALUE", help="a method's setting; repeatable"
    )
    parser.add_argument(
        "--scope", metavar="context|all", help="what it chooses among (default: context, also written visual)"
    )
    parser.add_argument(
        "--kv-dtype", default="model", metavar="model|int8|int4", help="precision of the stored prompt (default: model)"
    )


def load_model(args: Namespace, adapter: str | None, device: str | None = None) -> SubTokenModel:
    """An adapter (its backbone from ``--backbone``, if given) or ``--backbone`` alone, with the options' compression.

    Raises:
        ValueError: options that belong to others that are missing, or what ``SubTokenModel`` refuses.
    """
    if (args.reducer is None) != (args.keep_ratio is None):
        raise ValueError("--reducer and --keep-ratio go together, for instance --reducer fastv --keep-ratio 0.25")
    if args.eviction is None and (args.eviction_keep is not None or args.eviction_option or args.scope is not None):
        raise ValueError("--eviction-keep, --eviction-option and --scope need --eviction NAME")
    if args.eviction is not None and args.eviction_keep is None:
        raise ValueError(f"--eviction {args.eviction} needs --eviction-keep, for instance 0.1, 256tokens or 20MB")
    from subtoken_train.artifact.source import adapter_folder
    from subtoken_train.inference.model import SubTokenModel
    from subtoken_train.inference.written_settings import parse_keep, parse_settings
    from subtoken_train.reducers import build_reducer

    folder = adapter_folder(adapter) if adapter else None  # what is none would be taken for a backbone
    keep, unit = parse_keep("1" if args.eviction_keep is None else args.eviction_keep)
    return SubTokenModel.from_pretrained(
        folder or args.backbone,
        backbone=args.backbone if adapter else None,
        reducer=None if args.reducer is None else build_reducer(args.reducer, keep_ratio=args.keep_ratio),
        eviction=args.eviction,
        eviction_keep=keep,
        eviction_unit=unit,
        eviction_options=None if args.eviction is None else parse_settings(args.eviction, args.eviction_option),
        scope=args.scope,
        kv_dtype=args.kv_dtype,
        device_map=device,
    )

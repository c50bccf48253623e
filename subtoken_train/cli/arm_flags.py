"""Options that say which model runs and how its cache is compressed: shared by the commands that generate."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.reducers import REDUCERS

if TYPE_CHECKING:
    from subtoken_train.inference.model import SubTokenModel


def add_compression_options(parser: ArgumentParser) -> None:
    """A plain backbone's token reducer, and for every model the eviction and the precision of its cache."""
    reducers = ", ".join(REDUCERS)
    parser.add_argument(
        "--reducer", metavar="NAME", help=f"token reducer of a backbone alone: {reducers}; an adapter has its own"
    )
    parser.add_argument("--keep-ratio", type=float, metavar="R", help="share of the tokens that --reducer keeps")
    add_eviction_options(parser)
    parser.add_argument(
        "--kv-dtype", default="model", metavar="model|int8|int4", help="precision of the stored prompt (default: model)"
    )
    parser.add_argument(
        "--dtype", metavar="NAME", help="of the frozen weights: float32, bfloat16 or float16 (default: the adapter's)"
    )
    parser.add_argument(
        "--max-pixels", type=int, metavar="N", help="cap of an image of its own size (Qwen-VL, InternVL)"
    )
    parser.add_argument(
        "--key-channels", type=float, metavar="SHARE", help="share of the key channels in scope that stay (default: 1)"
    )
    parser.add_argument(
        "--merge", metavar="KIND", help="of what is evicted: none, weighted, pivot or position (default: the method's)"
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="ROWS",
        help="rows of a prompt that run at a time, e.g. 4096 (default: all)",
    )
    parser.add_argument(
        "--rerotate", action="store_true", default=None, help="turn the keys that stay to closed-up positions"
    )


def add_eviction_options(parser: ArgumentParser) -> None:
    """The eviction, how much it keeps, its settings and its scope."""
    evictions, wrappers = (", ".join(names) for names in (EVICTIONS, WRAPPERS))
    parser.add_argument(
        "--eviction",
        metavar="NAME",
        help=f"KV eviction after the prompt: {evictions}; or {wrappers} around one, 'ada(snapkv)' (default: none)",
    )
    parser.add_argument(
        "--eviction-keep", metavar="BUDGET", help="what it keeps: 0.1 of the entries, 256tokens per layer, or 20MB"
    )
    parser.add_argument(
        "--eviction-every", type=int, metavar="TOKENS", help="evict again whenever this many tokens were generated"
    )
    parser.add_argument(
        "--eviction-option", action="append", default=[], metavar="KEY=VALUE", help="a method's setting; repeatable"
    )
    parser.add_argument(
        "--scope", metavar="context|all", help="what it chooses among (default: context, also written visual)"
    )


def arm_options(args: Namespace) -> dict[str, Any]:
    """The options that are given, as ``ArmSpec`` names them; ``adapter`` is left to the command."""
    from subtoken_train.inference.compression import parse_settings

    models = ("backbone", "reducer", "keep_ratio", "selector", "dtype", "max_pixels")
    caches = ("eviction", "eviction_keep", "eviction_every", "scope", "kv_dtype", "key_channels", "merge")
    runs = ("protocol", "prefill_chunk", "rerotate")
    given = {name: value for name in (*models, *caches, *runs) if (value := getattr(args, name, None)) is not None}
    if args.eviction_option:
        given["eviction_options"] = parse_settings(args.eviction, args.eviction_option)
    return given


def flagged_model(args: Namespace, adapter: str | None, device: str | None = None) -> SubTokenModel:
    """An adapter (its backbone from ``--backbone``, if given) or ``--backbone`` alone, with the options' compression.

    Raises:
        ValueError: what ``ArmSpec`` or ``SubTokenModel`` refuses.
    """
    from subtoken_train.inference.arm_spec import ArmSpec

    return ArmSpec(adapter=adapter, **arm_options(args), written="flag").load(device)

"""``subtoken-train demo``: a page in the browser with a backbone and what compresses it side by side."""

import argparse

from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.demo.local_server import check_address, serve
from subtoken_train.errors import check_package, check_range

HELP = """Ask backbone, anchor and routed model the same question about a picture or a text, in the browser.

  subtoken-train demo --adapter DIR --anchor DIR
  subtoken-train demo --backbone checkpoints/smollm2

The page shows the answers as they are made, what each layer keeps, and what each cache takes in bytes and seconds; an
eviction and fewer bits can be added. It needs Gradio (the extra demo). Only this machine can reach it, unless --host
says otherwise. Ctrl-C ends it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR|ID", help="the routed model's adapter (default: none)")
    parser.add_argument("--anchor", metavar="DIR|ID", help="its token-only anchor's adapter (default: none)")
    where = "a backbone alone, or the folder of the adapters' backbone (default: as they name it)"
    parser.add_argument("--backbone", metavar="PATH", help=where)
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="default: 7860")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")


def run(args: argparse.Namespace) -> int:
    for package in ("gradio", "matplotlib"):
        check_package(package, "demo", "the page")
    check_range("--port", args.port, 1, 65535)
    check_address(args.host, args.port)
    quiet_libraries()
    from subtoken_train.demo.side_by_side import SideBySide

    models = SideBySide(args.adapter, args.anchor, args.backbone)
    serve(models, args.host, args.port, lambda url: print(f"{url} (Ctrl-C ends it)", flush=True))
    return 0

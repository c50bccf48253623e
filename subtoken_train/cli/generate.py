"""``subtoken-train generate``: answer one prompt, or a file of prompts, from compressed caches."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli import command_line
from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.documents import parse_json, real_path
from subtoken_train.errors import COLD, at_place, refuse
from subtoken_train.outputs import check_place, whole_file

if TYPE_CHECKING:
    from subtoken_train.inference.model import SubTokenModel

LONG = 4096  # tokens of a prompt whose layers are counted while they run

HELP = """Answer one prompt with reducer, routers and KV eviction, and report the size of its cache.

  subtoken-train generate --adapter DIR --image a.png --prompt "what is this?"
  subtoken-train generate --backbone PATH --prompt - --eviction snapkv --eviction-keep 0.25 < long.txt
  subtoken-train generate --adapter DIR --prompts FILE.jsonl --output OUT.jsonl

The prompt is what the user says in the model's chat template. With --raw, or without a template, the model continues
the text. The answer is printed as it is generated, then a line with tokens, bytes, shares and seconds.

FILE.jsonl has one {"id", "prompt", "image" or "images"} a line, or "messages": [{"role": "user", "content": "Hi"}, ...]
instead of "prompt". OUT.jsonl gets a line for each: id, answer, tokens, seconds, bytes of its cache. Run the same
command again to continue after Ctrl-C; OUT.jsonl.records holds what is finished."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_settings(parser, "adapter", "backbone")
    repeated = "image; repeatable, one per <image>"
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=repeated)
    parser.add_argument("--prompt", metavar="TEXT", help="what to answer; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text, without the model's chat template")
    variables = """arguments of the chat template, as '{"enable_thinking": false}'"""
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help=variables)
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines of prompts to answer; --output takes the answers")
    parser.add_argument("--output", metavar="FILE", help="where the answers to --prompts go, as JSON lines")
    together, outside = "prompts of --prompts to answer together (default: 1)", "allow image paths outside its folder"
    parser.add_argument("--batch-size", type=int, metavar="N", help=together)
    parser.add_argument("--images-outside-folder", action="store_true", help=f"--prompts: {outside}")
    first = "compress only the first N tokens of a text prompt"
    parser.add_argument("--context-length", type=int, metavar="N", help=first)
    command_line.add_compression_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="cap on the answer in tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample at this temperature (default: greedy)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0", help="where it runs (default: auto)")
    parser.add_argument("--show", metavar="FILE", help="draw kept and dropped visual tokens as a PNG")
    parser.add_argument("--show-layers", metavar="LIST", help="its layers, as 0,3 (default: first, middle and last)")


def run(args: argparse.Namespace) -> int:
    if any(getattr(args, name) for name in _OF_FILES):
        return _answer_file(args)
    _check_prompt(args)
    arm = command_line.flagged_arm(args, adapter=args.adapter or None)
    from subtoken_train.datasets.image_sources import open_image

    images = [open_image(Path(path)) for path in args.image]
    quiet_libraries()
    from transformers import TextStreamer

    from subtoken_train.engine.modes import watching_inputs

    prompt, model = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt, arm.load(args.device)
    layers = _drawn_layers(args.show_layers, model) if args.show else []
    inputs: dict[str, Any] = model.inputs(prompt, images, raw=args.raw, chat_template_kwargs=_variables(args))
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > COLD else {"do_sample": False}
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    sizes = {name: getattr(args, name) for name in ("context_length", "max_new_tokens")}
    begun, show, family = set[int](), counter("layers of the prompt", timed=True), model.backbone.family

    def reached(layer: int, rows: Any) -> None:
        if rows.shape[1] > 1 and layer not in begun:
            begun.add(layer)
            show(len(begun), family.shape.num_layers)
        if len(begun) == family.shape.num_layers:
            watch.close()  # a step that is watched is not captured

    with ExitStack() as watch:
        watch.enter_context(watching_inputs(family, reached if inputs["input_ids"].shape[1] >= LONG else None))
        out = model.generate(**inputs, **sampling, **sizes, streamer=streamer)
    print(_summary(model, len(out[0]) - inputs["input_ids"].shape[1]))
    if args.show:
        from subtoken_train.evaluation.picture import kept_picture

        assert model.last is not None
        picture = kept_picture(images[0], model.backbone.family, model.last.batch, model.last.plan, layers)
        with whole_file(Path(args.show), overwrite=False) as temporary:
            picture.save(temporary, "PNG")
        print(f"kept and dropped visual tokens of layers {', '.join(map(str, layers))} drawn in {args.show}")
    return 0


def _check_prompt(args: argparse.Namespace) -> None:
    refuse((args.prompt is None, "give --prompt TEXT, or --prompts FILE.jsonl with --output FILE.jsonl"))
    command_line.check_counts(args, "max_new_tokens")
    refuse(
        (not 0 <= args.temperature < float("inf"), f"--temperature {args.temperature} must be 0 (greedy) or more"),
        (args.show_layers and not args.show, "--show-layers needs --show FILE"),
    )
    if not args.show:
        return
    path, given = Path(args.show), len(args.image)
    refuse(
        (given != 1, f"--show draws the visual tokens of one image, and {given} are given"),
        (path.suffix.lower() != ".png", f"--show {path} must end in .png"),
        (path.exists(), f"{path} exists; choose another --show"),
    )
    check_place(path)


def _variables(args: argparse.Namespace) -> dict[str, Any]:
    if args.chat_template_kwargs is None:
        return {}
    with at_place("", """; write names and values in braces, as '{"enable_thinking": false}'"""):
        read = parse_json(args.chat_template_kwargs, "--chat-template-kwargs")
        refuse((not isinstance(read, dict), f"--chat-template-kwargs is {args.chat_template_kwargs}"))
    return dict(read)


def _drawn_layers(text: str | None, model: "SubTokenModel") -> list[int]:
    from subtoken_train.evaluation.picture import check_drawable, check_places

    family, depth = model.backbone.family, model.backbone.family.shape.num_layers
    refuse((family.image_token_id is None, f"--show draws visual tokens, but {family.name} has none; leave it out"))
    check_drawable(family)
    check_places(model.backbone)
    if text is None:
        return sorted({0, depth // 2, depth - 1})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < depth for part in parts):
        raise ValueError(f"--show-layers {text}: layers are numbers from 0 to {depth - 1}, with commas between them")
    return [int(part) for part in parts]


def _summary(model: "SubTokenModel", tokens: int) -> str:
    assert model.last is not None
    prompt = int(model.last.batch.input_ids_BN.shape[1])
    compression = "" if model.compression.label == "-" else f" | {model.compression.label}"
    seconds = f"prefill {model.last.prefill_seconds:.2f} s, decode {model.last.decode_seconds:.2f} s"
    return f"{tokens} tokens after {prompt} | {model.cache_report()}{compression} | {seconds}"


_OF_FILES = ("prompts", "output", "batch_size", "images_outside_folder")
_OF_ONE_PROMPT = ("prompt", "image", "context_length", "temperature", "show", "show_layers")


def _answer_file(args: argparse.Namespace) -> int:
    _check_file(args)
    arm = command_line.flagged_arm(args, adapter=args.adapter or None)
    quiet_libraries()
    from subtoken_train.evaluation.runner.prompt_file import answer_file
    from subtoken_train.inference.pool import device_of

    how: dict[str, Any] = {name: getattr(args, name) for name in ("max_new_tokens", "images_outside_folder", "raw")}
    how |= {"device": str(device_of(args.device)), "batch_size": args.batch_size or 1}
    how |= {"chat_template_kwargs": _variables(args), "progress": counter("prompts")}
    try:
        count = answer_file(Path(args.prompts), Path(args.output), arm, **how)
    except KeyboardInterrupt:
        if Path(args.output).exists():
            said = f"\nthe answers so far are in {args.output}; run the same command to continue from there"
            print(said, file=sys.stderr)
        raise
    print(f"{count:,} answers are in {args.output}")
    return 0


def _check_file(args: argparse.Namespace) -> None:
    given = command_line.spelled_flag(next(option for option in _OF_FILES if getattr(args, option)))
    for name, other in (("prompts", "output"), ("output", "prompts")):
        refuse((not getattr(args, name), f"{given} needs --{name} FILE.jsonl beside --{other} FILE.jsonl"))
    many = "is for a single prompt, and --prompts FILE has many: answers are greedy, and each line names its own images"
    command_line.check_unused(args, _OF_ONE_PROMPT, many)
    command_line.check_counts(args, "max_new_tokens", "batch_size")
    same = real_path(args.output) == real_path(args.prompts)
    refuse(
        (Path(args.output).suffix.lower() != ".jsonl", f"--output {args.output} must end in .jsonl"),
        (same, f"--output {args.output} is the file of the prompts; name another"),
    )
    check_place(Path(args.output))

"""``subtoken-train init``: a folder of one's own data becomes records, splits, a recipe and its anchor's."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.documents import check_file_name, real_path
from subtoken_train.errors import MAX_SEED, check_range, shell_words

if TYPE_CHECKING:
    from subtoken_train.cli.init_recipe import Chosen
    from subtoken_train.datasets.own_data import OwnData

HELP = """Make a recipe for your own data, without asking any questions.

DIR holds images and a table of questions and answers (CSV, TSV, JSON, JSON lines; columns image, question, answer, or
their usual other names) or of captions (file, caption; each picture is asked --question), or a file of conversations
(LLaVA, ShareGPT, OpenAI messages), or plain texts (.txt, .md, or JSON lines with text). Nothing in it is changed.

It writes to DIR_subtoken (--out): train, dev and test records, split by picture; NAME.yaml, and NAME_anchor.yaml, the
matched token-only anchor. Then it prints the commands to run next, from the folder you are in.

--backbone NAME|ID|FOLDER: a folder of 'recipes ls' (llava7b, qwenvl3b, llama31, ...), a Hub id or a model's folder.
Without it: the embedded tiny model if it knows the words of your data, otherwise LLaVA-1.5-7B; for texts
checkpoints/smollm2 where it is, otherwise the embedded one.

docs/own_data.md walks through it."""

_ASKED = "local_text/test.jsonl"
"""Folder below a ``--data-root`` in which the task ``local_text`` looks for questions."""
_KINDS = ("image", "question", "answer")
_OTHERWISE = {
    False: "a real model for a laptop: {there}--backbone checkpoints/smollm2 --overwrite",
    True: "it was trained on drawn digits only: its answers about photos mean nothing; models for photos need a GPU",
}
"""Lines on the embedded models of texts and of images."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of your data")
    parser.add_argument("--backbone", metavar="NAME", help="what to train on (see above)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder to write (default: DIR_subtoken, here)")
    parser.add_argument("--table", metavar="FILE", help="which table in DIR to use, if it holds several")
    for kind in _KINDS:
        parser.add_argument(f"--{kind}-column", metavar="COLUMN", help=f"the table's column of the {kind}s")
    asked = "asked of each picture of captions (default: Describe the picture.)"
    parser.add_argument("--question", metavar="TEXT", help=asked)
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="rename what an earlier init wrote to NAME.1")


def run(args: argparse.Namespace) -> int:
    from subtoken_train.artifact.whole_folder import FolderKind, check_target, whole_folder

    check_range("--seed", args.seed, 0, MAX_SEED)
    name = re.sub(r"[^\w.-]+", "_", real_path(args.folder).name).strip("._-") or "mydata"
    check_file_name(name, "the folder's name")
    out = Path(f"{name}_subtoken") if args.out is None else args.out
    inner, outer = real_path(out), real_path(args.folder)
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"--out {out} and the data {args.folder} are inside each other; name a folder beside it")
    kind = FolderKind("a folder that init wrote", "subtoken-train init")
    check_target(out, args.overwrite, kind)
    from subtoken_train.datasets.own_data import read_own

    columns = {kind: getattr(args, f"{kind}_column") for kind in _KINDS}
    data = read_own(args.folder, args.table, columns, args.seed, counter("images"), args.question)
    quiet_libraries()
    from subtoken_train.cli.init_recipe import chat_tokenizer, choose_backbone, own_recipe, own_recipe_text, said
    from subtoken_train.cli.recipes import anchor_text

    texts = [text for split in data.splits for text in said(data, split)]
    chosen = choose_backbone(args.backbone, data.kind == "images", texts)
    content, notes = own_recipe(data, chosen, args.folder, out, name)
    tokenizer, recipe, anchor = chat_tokenizer(chosen.path), out / f"{name}.yaml", out / f"{name}_anchor.yaml"
    files: dict[str, Any] = dict(data.splits)
    if data.kind == "conversations":
        files[_ASKED] = [_question(row, number, tokenizer) for number, row in enumerate(data.splits["test"])]
    with whole_folder(out, args.overwrite, kind) as partial:
        for file, rows in files.items():
            if data.kind == "images":
                path, text = partial / f"{file}.json", json.dumps(rows, indent=1, ensure_ascii=False)
            else:
                path = (partial / file).with_suffix(".jsonl")
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        written = partial / recipe.name
        written.write_text(own_recipe_text(content, chosen, recipe, args.folder), encoding="utf-8")
        (partial / anchor.name).write_text(anchor_text(written, anchor), encoding="utf-8")
    trained = [run for run in (f"runs/{name}", f"runs/{name}_anchor") if Path(run).exists()]
    print(*_said(args.folder, out, data, chosen), *notes, sep="\n")
    if trained:
        print(f"{' and '.join(trained)} may have been trained on other data: train both again, with --overwrite")
    following = _next(data, args.folder, recipe, name, ["--overwrite"] if trained else [], tokenizer)
    print("\nwhat follows:", *(f"  {shell_words(*line)}" for line in following), sep="\n")
    return 0


def _question(row: dict[str, Any], number: int, tokenizer: Any) -> dict[str, Any]:
    from subtoken_train.datasets.conversations import chat_messages, conversation_document
    from subtoken_train.datasets.record_format import answer_is_learnt, said_turns

    turns = said_turns(row)
    last = max(place for place, turn in enumerate(turns) if turn["from"] == "gpt" and answer_is_learnt(turn))
    plain_turns = [{"from": turn["from"], "value": turn["value"]} for turn in turns[: last + 1]]  # asked, not learnt
    asked, answer = {"conversations": plain_turns}, turns[last]["value"].strip()
    if tokenizer is None:
        question = conversation_document(asked).removesuffix(answer).rstrip()
    else:
        from subtoken_train.families.chat_template import filled_template

        question = filled_template(tokenizer, chat_messages(asked)[:-1], add_generation_prompt=True)
    return {"id": str(number), "question": question, "answers": [answer], "metric": "exact_match"}


def _said(folder: Path, out: Path, data: "OwnData", chosen: "Chosen") -> list[str]:
    from subtoken_train.cli.init_recipe import LAPTOP_PATH, borne, without_gpu

    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in data.splits.items())
    there = "" if Path(LAPTOP_PATH).is_dir() else "subtoken-train data smollm2, then "
    return [
        *(f"{folder}: {line}" for line in data.found),
        f"{out}: {counts}, recipe and anchor",
        f"backbone {chosen.path}: {chosen.why}",
        "to use another one: --backbone NAME --overwrite, with a Hub id, a folder, or one of these",
        *borne(data),
        *([_OTHERWISE[data.kind == "images"].format(there=there)] if chosen.is_embedded else []),
        *without_gpu(data.kind == "images"),
    ]


def _next(data: "OwnData", folder: Path, recipe: Path, name: str, anew: list[str], tokenizer: Any) -> list[list[str]]:
    """The commands that follow; ``anew`` is what check and fit are told of runs that are there."""
    program, runs = "subtoken-train", ["--adapter", f"runs/{name}", "--adapter", f"runs/{name}_anchor"]
    anchor, test = str(recipe.with_name(f"{name}_anchor.yaml")), data.splits["test"][0]
    lines = [[program, word, "--config", str(recipe), *anew] for word in ("check", "fit")]
    lines.append([program, "fit", "--config", anchor, *anew])
    ask = [program, "generate", "--adapter", f"runs/{name}"]
    if data.kind == "images":
        from subtoken_train.datasets.record_format import image_names, used_turns, without_placeholders

        scores = [*runs, "--data", str(recipe.with_name("test.json")), "--image-folder", str(folder)]
        images = [word for each in image_names(test) for word in ("--image", str(folder / each))]
        prompt = without_placeholders(test, used_turns(test)[0]["value"])
        return [*lines, [program, "evaluate", *scores], [*ask, *images, "--prompt", prompt]]
    if data.kind == "conversations":
        scores = [*runs, "--tasks", "local_text", "--data-root", str(recipe.parent), "--out", f"results/{name}"]
        from subtoken_train.datasets.record_format import used_turns

        prompt = _question(test, 0, None)["question"] if tokenizer is None else used_turns(test)[0]["value"]
        return [*lines, [program, "evaluate", *scores], [*ask, "--prompt", prompt]]
    return [*lines, [program, "compare", f"runs/{name}"], [*ask, "--prompt", " ".join(test["text"].split()[:40])]]

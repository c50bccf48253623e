"""The recipe of a user's own data: choose a backbone, take a shipped recipe's settings, fit files, sizes and steps."""

import json
import math
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from subtoken_train.artifact.hub import check_fetched
from subtoken_train.datasets.chats import ChatLimits, iterate_chats
from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.conversations import conversation_document
from subtoken_train.datasets.own_data import OwnData
from subtoken_train.datasets.record_format import image_names, record_id, said_turns
from subtoken_train.datasets.records import Record, turns_of
from subtoken_train.datasets.unknown_tokens import TOLERATED, SomeTexts, say_unknown, unknown_tokens
from subtoken_train.documents import read_yaml
from subtoken_train.errors import MAX_TOKENS, refuse, shell_words, unknown_name
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone, is_hub_id, resolve
from subtoken_train.families.load import family_class, layout_family, machine_memory, with_processor
from subtoken_train.families.positions import position_bound
from subtoken_train.resources import recipe_files, with_schema

_ARMS = {"fastv25_s16k4": True, "compactor25_s16k12": False, "quest25_s16k12": False}
"""The arm of a backbone that is taken (of two the later by name), and whether it is one that sees images."""
EMBEDDED = {True: "tiny", False: "tinylm"}
"""The backbones that ship, by whether they see images."""
_PUBLISHED = "llava7b"
"""For images whose words the embedded one does not know."""
LAPTOP, LAPTOP_PATH, _BIGGER = "smollm2", "checkpoints/smollm2", "checkpoints/qwen05"
"""For texts where it is at hand, on any machine; the bigger one takes the same settings."""


@dataclass(frozen=True)
class Chosen:
    """A backbone: folder and content of its shipped recipe, where it is, and why it was chosen, in words."""

    name: str
    path: str
    recipe: dict[str, Any]
    why: str

    @property
    def is_embedded(self) -> bool:
        """True if it ships with the project."""
        return self.name in EMBEDDED.values()


@cache
def _needs(name: str, samples: int) -> tuple[int, str] | None:
    """Bytes of a step on a backbone, and they and the longest time in words; None where its folder is not here."""
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.run_plan import on_gpus, plan_of_recipe

    recipe = read_yaml(path := _templates()[name][0])
    steps = _wanted_steps(samples, recipe["data"]["batch_size"] * recipe["trainer"].get("accumulate_grad_batches", 1))
    try:
        plan = plan_of_recipe(RecipeCLI(["--config", str(path), "--trainer.max_steps", str(steps)]))
    except ValueError:
        return None
    assert plan.memory is not None
    assert plan.flops is not None
    time = on_gpus((plan.flops[1], plan.flops[1]), "", gpus=["H100"]).strip()
    return plan.memory, f"  {name:<17} {plan.memory / 2**30:5.1f} GiB, {time}"


def borne(data: OwnData) -> list[str]:
    """Return the backbones that this machine has room for, by the memory of their step, and how many need more."""
    sees, samples = data.kind == "images", len(data.splits["train"])
    if data.kind == "texts":
        samples = sum(map(len, said(data, "train"))) // (4 * _BLOCK["block_length"])
    if torch.cuda.is_available():
        room, where = max(torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count())), "GPU"
    else:
        room, where = machine_memory(), "memory, no GPU"
    needs = (_needs(name, samples) for name, (_, of_images) in _templates().items() if of_images == sees)
    known = sorted(filter(None, needs))
    more = [size for size, _ in known if size > room]
    head = f"memory of a step, and time on one H100 at most, of those for {room / 2**30:.0f} GiB ({where}):"
    rest = [f"  larger ones: {len(more)}, from {more[0] / 2**30:.1f} GiB on"] if more else []
    return [head, *(text for size, text in known if size <= room), *rest]


def without_gpu(sees: bool) -> list[str]:
    """Say in one sentence what can be had where there is no GPU; nothing where there is one."""
    if torch.cuda.is_available():
        return []
    texts = f"SmolLM2 ({LAPTOP_PATH}) and the embedded model train here in minutes; larger ones need a GPU"
    images = (
        "only the embedded model (--backbone tiny) trains here in minutes, to try the way from data to answers, not to "
        "describe photos; for the others 'check' and the recipe can be made here, and 'fit' belongs on a GPU"
    )
    return [f"no GPU here: {images if sees else texts}"]


def choose_backbone(given: str | None, sees: bool, texts: Sequence[str]) -> Chosen:
    """Return the backbone that ``given`` means (``llava7b``, a Hub id, a folder), or one that suits the data."""
    if given is None:
        return _default(sees, texts)
    chosen = _named(given, sees)
    if (tokenizer := _tokenizer_at_hand(chosen.path)) is not None:
        say_unknown(tokenizer, SomeTexts(list(texts), None), "your data")
    return chosen


def _templates() -> dict[str, tuple[Path, bool]]:
    found = {}
    for name, path in recipe_files().items():
        backbone, _, arm = name.rpartition("/")[2].partition("_")
        if arm in _ARMS:
            found[backbone] = (path, _ARMS[arm])
    return found


def _default(sees: bool, texts: Sequence[str]) -> Chosen:
    if not sees and Path(LAPTOP_PATH).is_dir():
        return _taken(LAPTOP, "a real model that is already on this machine, and small enough to train without a GPU")
    embedded = _taken(EMBEDDED[sees], "the embedded one, which knows your words; small, for trying things out")
    found = unknown_tokens(_tokenizer_at_hand(embedded.path), SomeTexts(list(texts), None))
    if found is None or found.share <= TOLERATED:
        return embedded
    words = ", ".join(map(repr, found.examples))
    why = f"the embedded one does not know your words ({words}); this one needs a GPU and its weights"
    return _taken(_PUBLISHED, why)


def _taken(name: str, why: str, path: str | None = None) -> Chosen:
    recipe = read_yaml(_templates()[name][0])
    return Chosen(name, path or recipe["model"]["backbone"]["path"], recipe, why)


def _named(given: str, sees: bool) -> Chosen:
    check_backbone(BackboneConfig(given))
    templates = _templates()
    if given in templates:
        name, path = given, None
    else:
        by_path = {_same(read_yaml(file)["model"]["backbone"]["path"]): name for name, (file, _) in templates.items()}
        name, path = by_path.get(_same(given)) or _of_its_family(given), given
    data, other = ("images", "reads texts alone") if sees else ("texts without images", "is for images")
    fitting = ", ".join(each for each, (_, of_images) in templates.items() if of_images == sees)
    refuse((templates[name][1] != sees, f"your data are {data}, and backbone {given!r} {other}; use one of {fitting}"))
    chosen = _taken(name, "as you said", path)
    check_fetched(chosen.path)
    return chosen


def _same(path: str) -> str:
    return os.path.realpath(found) if Path(found := resolve(path)).exists() else path


def _of_its_family(given: str) -> str:
    if not Path(resolve(given)).exists() and not is_hub_id(given):
        raise unknown_name("backbone", given, _templates())
    wanted = family_class(BackboneConfig(given))
    own = (*EMBEDDED.values(), LAPTOP)
    paths = {n: read_yaml(file)["model"]["backbone"]["path"] for n, (file, _) in _templates().items() if n not in own}
    return next(name for name, path in paths.items() if family_class(BackboneConfig(path)) is wanted)


def _tokenizer_at_hand(path: str) -> Any:
    """The tokenizer of a folder; None for a Hub id, which is not asked for now, and where there is none."""
    if not Path(resolve(path)).is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=False)
    except Exception:  # whatever the readers of broken files raise: check and fit say it in words
        return None


def chat_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder that has a chat template; None for every other backbone."""
    tokenizer = _tokenizer_at_hand(path)
    return tokenizer if tokenizer is not None and tokenizer.chat_template else None


def longest_record(data: OwnData, chosen: Chosen) -> tuple[int, int]:
    """Return the longest record's tokens, images included, and the embedded model's positions; opens no image."""
    config = BackboneConfig(chosen.path)
    family = with_processor(layout_family(config), config)
    positions, longest, blank = position_bound(family.decoder.config) or MAX_TOKENS, 0, Image.new("RGB", (1, 1))
    for rows in data.splits.values():
        for number, row in enumerate(rows):
            name = record_id(row, number)
            sample = encode(Record(name, [], turns_of(row)), family, MAX_TOKENS, [blank] * len(image_names(row)))
            taken = f"record {name!r} takes {sample.needed:,} tokens up to its answer"
            has = f"{chosen.path} has {positions:,} positions; shorten it, drop it, or use another --backbone"
            refuse((sample.needed > positions, f"{taken}, and {has}"))
            longest = max(longest, len(sample.input_ids))
    return longest, positions


EPOCHS, LEAST_STEPS, WARMUP_SHARE = 3, 60, 0.05
_BLOCK = {"block_length": 2048, "context_length": 1024, "prefix_tokens": 64}  # of a recipe, or of chats
_EMBEDDED_BLOCK = {"block_length": 640, "context_length": 512, "prefix_tokens": 16}


def _wanted_steps(samples: int, per_step: int) -> int:
    return max(LEAST_STEPS, math.ceil(EPOCHS * samples / per_step))


def own_recipe(data: OwnData, chosen: Chosen, folder: Path, out: Path, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of one's own data, and what follows from it, a line each; records will lie below ``out``."""
    content = deepcopy(chosen.recipe)
    content["output_dir"] = f"runs/{name}"
    content["model"]["backbone"]["path"] = chosen.path
    lengths = []
    if data.kind == "images":
        files = {"train_file": str(out / "train.json"), "val_file": str(out / "dev.json"), "image_folder": str(folder)}
        band, samples = {**content["data"], **files}, len(data.splits["train"])
        if chosen.is_embedded:
            longest, positions = longest_record(data, chosen)
            before, band["max_length"] = band["max_length"], max(band["max_length"], min(longest, positions))
            if band["max_length"] > before:
                beyond = f", and more than {positions:,} are cut" if longest > positions else ""
                takes = f"instead of {before:,}: a record takes {longest:,} tokens{beyond}"
                lengths = [f"data.max_length {band['max_length']:,} {takes}"]
    else:
        band, samples = _text_band(data, chosen, out)
    trainer = content["trainer"]
    band["batch_size"] = min(band["batch_size"], samples)
    accumulate = min(trainer.get("accumulate_grad_batches", 1), samples // band["batch_size"])
    per_step = band["batch_size"] * accumulate
    wanted, most = _wanted_steps(samples, per_step), trainer["max_steps"]
    steps = min(wanted, most)
    cut = f", the most that the shipped recipe takes; {EPOCHS} passes are {wanted:,}" if wanted > most else ""
    passes = steps * per_step / samples
    cut = f", {passes:.1f} passes over the {samples:,} there are{cut}" if passes > 1 else cut
    logs = min(10, samples // band["batch_size"])
    trainer |= {"max_steps": steps, "accumulate_grad_batches": accumulate, "log_every_n_steps": logs}
    trainer |= {"val_check_interval": max(1, steps * accumulate // 4), "check_val_every_n_epoch": None}
    if chosen.name == LAPTOP:
        trainer["accelerator"] = "auto"
    content["model"]["optimizer"]["warmup_steps"] = max(1, round(WARMUP_SHARE * steps))
    return {**content, "data": band}, [f"{steps:,} steps of {per_step:,} record{'s' * (per_step > 1)}{cut}", *lengths]


def own_recipe_text(content: dict[str, Any], chosen: Chosen, path: Path, data: Path) -> str:
    """Write the recipe's file, with what one may want to know on top."""
    header = (
        f"# {shell_words(data, 'on', chosen.path)}, with the settings of the shipped recipe of {chosen.name}\n"
        "# yaml-language-server: $schema=recipe.schema.json\n"
        f"#\n#   check   subtoken-train check --config {shell_words(path)}\n"
        f"#   train   subtoken-train fit --config {shell_words(path)}\n"
        "#\n# Every key can be overridden behind --config; 'subtoken-train recipes show' prints commented recipes.\n"
    )
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    if chosen.path == LAPTOP_PATH and "documents" not in content["data"]["train"]:  # chats are cut for one template
        bigger = f"    # path: {_BIGGER}  # a bigger one; get it: subtoken-train data {Path(_BIGGER).name}\n"
        text = text.replace(own := f"    path: {LAPTOP_PATH}\n", own + bigger, 1)
    return with_schema(header) + text


def _text_band(data: OwnData, chosen: Chosen, out: Path) -> tuple[dict[str, Any], int]:
    as_records = {"documents": "conversations"} if data.kind == "conversations" else {}
    sources = {key: {"name": str(out / f"{split}.jsonl"), **as_records} for key, split in _SOURCES.items()}
    batch = 8 if chosen.is_embedded else chosen.recipe["data"]["batch_size"]
    tokenizer = _tokenizer_at_hand(chosen.path)
    if as_records and (tokenizer is None or tokenizer.chat_template):
        return {**sources, **_chat_sizes(data, chosen), "batch_size": batch, "seed": 0}, len(data.splits["train"])
    if as_records:
        for rows in data.splits.values():
            list(map(conversation_document, rows))  # which says what cannot be one
    texts, tokens = {key: said(data, split) for key, split in _SOURCES.items()}, dict[str, int]()
    for key, each in texts.items():  # where the tokenizer is not on this machine, four characters are one
        ids = tokenizer and tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"]
        tokens[key] = sum(map(len, ids)) if ids is not None else sum(map(len, each)) // 4
    shipped = chosen.recipe["data"]
    sizes = {key: shipped[key] if "block_length" in shipped else size for key, size in _EMBEDDED_BLOCK.items()}
    for _ in range(2):  # where there is little text
        if tokens["train"] >= 2 * sizes["block_length"] and tokens["val"] >= sizes["block_length"]:
            break
        sizes = {key: size // 2 for key, size in sizes.items()}
    blocks = tokens["train"] // sizes["block_length"]
    little = f"there is too little text: {tokens['train']:,} tokens to train on and {tokens['val']:,} for dev"
    few = blocks < 2 or tokens["val"] < sizes["block_length"]
    refuse((few, f"{little}, and a block takes {sizes['block_length']}; add text"))
    return {**sources, **sizes, "batch_size": batch, "seed": 0}, blocks


def _chat_sizes(data: OwnData, chosen: Chosen) -> dict[str, int]:
    """Sizes that cut no chat which the backbone has positions for; the usual ones where its template is not at hand."""
    if chat_tokenizer(chosen.path) is None:
        return dict(_BLOCK)
    config = BackboneConfig(chosen.path)
    family = with_processor(layout_family(config), config)
    limits = ChatLimits(position_bound(family.decoder.config) or MAX_TOKENS, MAX_TOKENS, _BLOCK["prefix_tokens"])
    numbered = [each for split in data.splits.values() for each in enumerate(split)]
    rows = [{"name": f"record {record_id(row, number)!r}", "conversation": json.dumps(row)} for number, row in numbered]
    chats = list(iterate_chats(rows, family, limits))
    context = max(1, *(chat.context_length for chat in chats))
    longest = max(context + limits.asking + 1, *(len(chat.input_ids) for chat in chats))
    return {"block_length": longest, "context_length": context, "prefix_tokens": limits.asking}


_SOURCES = {"train": "train", "val": "dev"}


def said(data: OwnData, split: str) -> list[str]:
    """Return the texts of a split."""
    rows = data.splits[split]
    if data.kind == "texts":
        return [row["text"] for row in rows]
    return ["\n".join(turn["value"] for turn in said_turns(row)) for row in rows]

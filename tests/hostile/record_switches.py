"""Records whose fields change what is learnt: obeyed to the token, refused by name, or saying nothing."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import yaml

from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.pool import VLM
from tests.hostile.recipes import TENSORS, read, with_key
from tests.hostile.references import both, same

ON, OFF = (True, 1, 1.0), (False, 0, 0.0)
SWITCHES = ("loss", "trainable", "train", "weight", "loss_weight", "training")
LABELS = ("label", "kto_tag", "labels")
NEITHER = (0.5, 2, -1, "no", "maybe", [1, 0], {"a": 1})
REFUSED: dict[str, tuple[Any, ...]] = {
    "label": (False, 0, "bad"),
    "kto_tag": (False,),
    "videos": (["a.mp4"], [["a.png"]]),
    "video": ("a.mp4",),
    "objects": ([{"bbox": [1, 2, 3, 4]}],),
    "bbox": ([1, 2, 3, 4],),
    "masks": (["a.png"],),
    "audio": ("a.wav",),
    "audios": (["a.wav"],),
    "chosen": ("yes",),
    "rejected": ("no",),
    "rejected_response": ("no",),
    "tools": ([{"name": "search"}],),
    "labels": ([1, 2, 3],),
    "input_ids": ([1, 2, 3],),
    "completion_mask": ([0, 1],),
    "image_url": ("a.png",),
    "image_paths": (["a.png"],),
    "my_image": ("a.png",),
    "second_picture": ("a.png",),
    "voice": ("a.wav",),
    "sample_weight": (0.5,),
    "mask_history": (True,),
    "history": ([["a", "b"]],),
}
"""Fields of a record that some trainer reads, or that are called like a medium or a mask."""
OF_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([{"name": "search"}],),
    "images": (["a.png"],),
    "reasoning_content": ("since it is so",),
    "token_weights": ([0, 1],),
    "audio": ("a.wav",),
}
NOTES = ("source", "dataset", "model", "license", "width", "category", "tags")
EMPTY = (None, "", [], {})
WORDS = ("is there a 2 ?", "what is at A1 ?", "how many white ?")
ANSWERS = ("yes", "red 8", "3")


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """One to three exchanges about a picture."""
    turns: list[dict[str, Any]] = []
    for number in range(draw.choice((1, 2, 2, 3))):
        mark = "" if number else "<image>\n"
        turns += [{"from": "human", "value": f"{mark}{WORDS[number]}"}, {"from": "gpt", "value": ANSWERS[number]}]
    return turns


def as_messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation as OpenAI writes one."""
    roles = {"human": "user", "gpt": "assistant"}
    made = []
    for turn in turns:
        more = {name: value for name, value in turn.items() if name not in ("from", "value")}
        made.append({"role": roles[turn["from"]], "content": turn["value"], **more})
    return made


Made = tuple[str, Expect, dict[str, Any], list[bool]]
"""What was done, what must come of it, fields of the record, and which answers are learnt."""


def obeyed(draw: random.Random, turns: list[dict[str, Any]]) -> Made:
    """Answers that are read and not learnt; one of them is learnt."""
    answers = turns[1::2]
    learnt = [draw.random() < 0.5 for _ in answers]
    learnt[draw.randrange(len(learnt))] = True
    name = draw.choice(SWITCHES)
    for turn, each in zip(answers, learnt, strict=True):
        if not each or draw.random() < 0.5:
            turn[name] = draw.choice(ON if each else OFF)
    return f"{name}: {learnt}", Expect.TAKEN, {}, learnt


def odd_switch(draw: random.Random, turns: list[dict[str, Any]]) -> Made:
    """A switch that is neither on nor off, or two that contradict each other."""
    turn, value = draw.choice(turns[1::2]), draw.choice(NEITHER)
    name, other = draw.sample(SWITCHES, 2)
    if draw.random() < 0.3:
        turn[name], turn[other] = True, False
        return f"{name} and not {other}", Expect.REFUSED, {}, []
    turn[name] = value
    return f"{name} is {value!r}", Expect.REFUSED, {}, []


def refused(draw: random.Random, turns: list[dict[str, Any]]) -> Made:
    """A field that changes what is learnt or seen, and is not read."""
    table, inner = draw.choice(((REFUSED, False), (REFUSED, False), (OF_MESSAGE, True)))
    name = draw.choice(list(table))
    value = draw.choice(table[name])
    if inner:
        draw.choice(turns[1::2])[name] = value
        return f"a message's {name} is {value!r}", Expect.REFUSED, {}, []
    return f"{name} is {value!r}", Expect.REFUSED, {name: value}, []


def says_nothing(draw: random.Random, turns: list[dict[str, Any]]) -> Made:
    """A field that is empty, true where true is the rule, or a note."""
    learnt = [True] * (len(turns) // 2)
    kind = draw.choice(("empty", "label", "note"))
    if kind == "empty":
        name, value = draw.choice([each for each in REFUSED if each not in LABELS]), draw.choice(EMPTY)
    else:
        name, value = ("label", True) if kind == "label" else (draw.choice(NOTES), draw.choice(("x", 3, ["a"])))
    return f"{name} is {value!r}", Expect.TAKEN, {name: value}, learnt


KINDS = (obeyed, obeyed, obeyed, odd_switch, refused, refused, refused, says_nothing, says_nothing)


def make(draw: random.Random, place: Place) -> Case:
    """A record that says more than its conversation does; an accepted one has exactly the right labels."""
    turns = conversation(draw)
    plain = json.loads(json.dumps(turns))
    what, expect, fields, learnt = draw.choice(KINDS)(draw, turns)
    messages = draw.random() < 0.4
    place.copy("images/a.png", "a.png")

    def record(said: list[dict[str, Any]], more: dict[str, Any]) -> str:
        body = {"messages": as_messages(said)} if messages else {"conversations": said}
        return json.dumps([{"id": "one", "image": "a.png", **body, **more}] * 2)

    place.write("data.json", record(turns, fields))
    recipe = yaml.safe_dump(with_key(read(place, VLM), "data.train_file", "data.json"))
    place.write("recipe.yaml", recipe)
    way = draw.choice(("preview", "preview", "preview", "fit"))
    words = [way, "--config", "recipe.yaml", *(["--count", "1"] if way == "preview" else [])]
    files = {"recipe.yaml": recipe, "data.json": record(plain, {})}
    reference = same(place, words, TENSORS if way == "fit" else (), files)
    if way == "preview" and not all(learnt):
        reference = labels(learnt)
    elif way == "fit" and not all(learnt):
        reference = both(labels_of_fit(place, recipe, learnt))
    elif way == "preview":
        reference = both(reference, labels(learnt))
    return Case(f"{way}: {what}", words, expect, ("run",) if way == "fit" else (), reference=reference)


def labels(learnt: list[bool]) -> Reference:
    """The preview shows as trained the answers that are learnt, word by word, and no others."""

    def difference(answer: Answer) -> str | None:
        shown = re.findall(r"(?m)^ +answer +(trained|masked) +\d+ +(.*)$", answer.out)
        got = [text.replace("</s>", "").strip() for state, text in shown if state == "trained"]
        right = [text for text, each in zip(ANSWERS, learnt, strict=False) if each]
        return None if got == right else f"trains {got}, not {right}"

    return difference


def labels_of_fit(place: Place, recipe: str, learnt: list[bool]) -> Reference:
    """What was trained on is what the preview of the same file shows."""
    from tests.hostile.acts import command

    def difference(answer: Answer) -> str | None:
        (place.work / "again.yaml").write_text(recipe.replace("data.json", str(place.work / "data.json")))
        return labels(learnt)(command(["preview", "--config", str(place.work / "again.yaml"), "--count", "1"]))

    return difference

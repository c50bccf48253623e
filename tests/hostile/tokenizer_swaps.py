"""Caches that were saved under one tokenizer and are loaded under another."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.caches import right_answer
from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import CACHES, VLM
from tests.hostile.references import made


def _exchanged(draw: random.Random, content: dict[str, Any]) -> str:
    """Two words have each other's number."""
    words = content["model"]["vocab"]
    one, other = draw.sample(sorted(word for word in words if not word.startswith("<")), 2)
    words[one], words[other] = words[other], words[one]
    return f"{one!r} and {other!r} exchanged"


def _renamed(draw: random.Random, content: dict[str, Any]) -> str:
    """A number has another word."""
    words = content["model"]["vocab"]
    merged = {
        part
        for merge in content["model"].get("merges", [])
        for part in (merge if isinstance(merge, list) else merge.split())
    }
    one = draw.choice(
        sorted(word for word in words if not word.startswith("<") and len(word) > 2 and word not in merged)
        or sorted(words)
    )
    words[f"{one}zzz"] = words.pop(one)
    return f"{one!r} renamed"


def _normalised(draw: random.Random, content: dict[str, Any]) -> str:
    """Texts are read in small letters."""
    content["normalizer"] = {"type": "Lowercase"}
    return "a normaliser more"


CHANGES = (_exchanged, _exchanged, _renamed, _normalised)


def make(draw: random.Random, place: Place) -> Case:
    """A saved cache, and the same weights with another tokenizer; or with the same one, written otherwise."""
    name = draw.choice(list(CACHES))
    folder = place.copy(f"backbones/{'tiny-llava' if name == 'vlm' else 'tiny-llama'}", "backbone")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    expect = Expect.TAKEN if draw.random() < 0.25 else Expect.REFUSED
    what = "the same, written otherwise"
    if expect is Expect.REFUSED:
        what = draw.choice(CHANGES)(draw, content)
    path.write_text(json.dumps(content, ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, 1))))

    def call() -> Any:
        model = loaded(place.pool, name, folder)
        model.load_cache(place.pool / f"caches/{name}.safetensors")
        return model.ask(None, ["what ?"], max_new_tokens=3)

    reference = made(lambda: right_answer(place.pool, name))
    return Case(f"cache {name}, tokenizer: {what}", call, expect, reference=reference, says=("tokenizer",))


def loaded(pool: Path, name: str, folder: Path) -> Any:
    """The cache's model on another folder of its backbone."""
    from subtoken_train import SubTokenModel

    if name == "vlm":
        return SubTokenModel.from_pretrained(pool / "adapters" / VLM, backbone=str(folder))
    return SubTokenModel.from_pretrained(folder, eviction="ada(knorm)", eviction_keep=0.5, kv_dtype="int8")

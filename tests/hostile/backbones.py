"""Backbone folders whose configuration, tokenizer or weights are wrong, or carry code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import LM, VLM
from tests.hostile.recipes import read, with_key
from tests.hostile.tensor_files import canary_pickle, spoil_tensors
from tests.hostile.values import HUGE, INFINITY, NAN, changed, damaged, mutated, no_file, shown, written

BAD: tuple[Any, ...] = ("x", [], {}, -1, NAN, INFINITY, HUGE, 1.5)
INVALID: dict[str, tuple[Any, ...]] = {
    "hidden_size": (*BAD, 0, 2**40, 7),
    "num_hidden_layers": (*BAD, 10**7),
    "num_attention_heads": (*BAD, 0, 2**40, 7),
    "num_key_value_heads": (*BAD, 0, 2**40, 7),
    "head_dim": (*BAD, 0, 2**40),
    "intermediate_size": (*BAD, 2**45),
    "vocab_size": (*BAD, 0, 2**45),
    "model_type": (5, None, [], "nope", "../x", "os.system", "auto"),
    "architectures": (5, "x", ["os.system"], [5]),
    "auto_map": (
        {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        {"AutoConfig": "user/name--evil.Config"},
    ),
}
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Config: pass\nclass Model: pass\n"
TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"


Spoilt = tuple[str, Expect]
Spoil = Callable[[random.Random, Path], Spoilt]


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def odd(draw: random.Random, folder: Path) -> Spoilt:
    """A number or a name of the configuration that cannot be."""
    config = _config(folder)
    inner = config.get("text_config", {})
    key = draw.choice([key for key in INVALID if key in config or key in inner or key == "auto_map"])
    value = draw.choice(INVALID[key])
    where = ("text_config", key) if key in inner and draw.random() < 0.8 else (key,)
    (folder / "config.json").write_text(written(changed(config, where, value)))
    return f"{key} is {shown(value)}", Expect.EITHER


def anything(draw: random.Random, folder: Path) -> Spoilt:
    """Anything anywhere in the configuration."""
    config, what = mutated(draw, _config(folder))
    (folder / "config.json").write_text(written(config))
    return f"config: {what}", Expect.EITHER


def code(draw: random.Random, folder: Path) -> Spoilt:
    """Programs beside the configuration."""
    (folder / "evil.py").write_text(EVIL)
    if draw.random() < 0.5:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return "a template that does not end", Expect.EITHER
    config = _config(folder)
    kind = draw.choice(("evil", config["model_type"]))
    changes = {"auto_map": INVALID["auto_map"][0], "model_type": kind}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return "code beside the configuration", Expect.EITHER


def bytes_of_a_file(draw: random.Random, folder: Path) -> Spoilt:
    """A text that a disk has spoilt."""
    name = draw.choice([name for name in FILES if (folder / name).exists()])
    content, what = damaged(draw, (folder / name).read_bytes())
    (folder / name).write_bytes(content)
    return f"{name}: {what}", Expect.EITHER


def other_file(draw: random.Random, folder: Path) -> Spoilt:
    """No file where one belongs."""
    name = draw.choice([name for name in FILES[:3] if (folder / name).exists()])
    return f"{name}: {no_file(draw, folder / name)}", Expect.EITHER


def pickled(draw: random.Random, folder: Path) -> Spoilt:
    """Weights that are a pickle."""
    (folder / "model.safetensors").unlink()
    (folder / draw.choice(("pytorch_model.bin", "model.safetensors", "tf_model.h5"))).write_bytes(canary_pickle())
    return "weights that are a pickle", Expect.REFUSED


def weights(draw: random.Random, folder: Path) -> Spoilt:
    """Weights that are absent, of another shape, or damaged; whether a weight is finite is not looked at."""
    what, expect = spoil_tensors(draw, folder / "model.safetensors")
    known = what.endswith(ABSENT) or what.startswith(("a pickle", "header", "length"))
    return f"weights: {what}", expect if known else Expect.EITHER


def nothing(draw: random.Random, folder: Path) -> Spoilt:
    """A whole backbone."""
    return "whole", Expect.TAKEN


ABSENT = (": shape", ": empty", ": gone", ": scalar", ": one more")
OF_WEIGHTS: tuple[Spoil, ...] = (pickled, weights, weights)
OTHERS: tuple[Spoil, ...] = (
    odd,
    odd,
    odd,
    anything,
    anything,
    code,
    bytes_of_a_file,
    bytes_of_a_file,
    other_file,
    nothing,
)


def make(draw: random.Random, place: Place) -> Case:
    """A backbone with something wrong in it, named by a recipe, an adapter or an option."""
    vision = draw.random() < 0.5
    folder = place.copy(f"backbones/{'tiny-llava' if vision else 'tiny-llama'}", "backbone")
    spoil = draw.choice((*OF_WEIGHTS, *OTHERS))
    what, expect = spoil(draw, folder)
    ways = ["generate", "adapter", *(() if spoil in OF_WEIGHTS else ("check", "check", "preview"))]
    way = draw.choice(ways)
    if way == "generate":
        words = ["generate", "--backbone", "backbone", "--prompt", "what is this ?", "--max-new-tokens", "1"]
    elif way == "adapter":
        adapter = str(place.pool / "adapters" / (VLM if vision else LM))
        words = [
            "generate",
            "--adapter",
            adapter,
            "--backbone",
            "backbone",
            "--prompt",
            "what ?",
            "--max-new-tokens",
            "1",
        ]
    else:
        recipe = with_key(read(place, VLM if vision else LM), "model.backbone.path", "./backbone")
        place.write("recipe.yaml", yaml.safe_dump(recipe))
        words = (
            ["check", "--config", "recipe.yaml", "--offline"]
            if way == "check"
            else ["preview", "--config", "recipe.yaml"]
        )
    return Case(f"{way}: {what}", words, expect)

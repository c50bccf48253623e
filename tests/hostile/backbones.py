"""Backbone folders whose configuration, tokenizer or weights are wrong, or carry code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from hostile.adapters import canary_pickle, spoil_tensors
from hostile.case import Case, Expect, Place
from hostile.pool import LM, VLM
from hostile.recipes import read, with_key
from hostile.values import HUGE, INFINITY, NAN, changed, damaged, mutated, no_file, shown, written

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


def spoil(draw: random.Random, folder: Path) -> tuple[str, Expect, bool]:
    """Make one thing wrong in a backbone's folder; whether it is known to be, and whether only the weights show it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kind = draw.choice(
        ("config",) * 3
        + ("mutated",) * 2
        + ("code", "damage", "damage", "file", "pickle", "weights", "weights", "control")
    )
    if kind == "config":
        key = draw.choice(
            [key for key in INVALID if key in config or key in config.get("text_config", {}) or key == "auto_map"]
        )
        value = draw.choice(INVALID[key])
        where = ("text_config", key) if key in config.get("text_config", {}) and draw.random() < 0.8 else (key,)
        path.write_text(written(changed(config, where, value)))
        return f"{key} is {shown(value)}", Expect.EITHER, False
    if kind == "mutated":
        config, what = mutated(draw, config)
        path.write_text(written(config))
        return f"config: {what}", Expect.EITHER, False
    if kind == "code":
        (folder / "evil.py").write_text(EVIL)
        if draw.random() < 0.5:
            (folder / "chat_template.jinja").write_text(TEMPLATE)
            return "a template that does not end", Expect.EITHER, False
        path.write_text(
            json.dumps(
                {
                    **config,
                    "auto_map": INVALID["auto_map"][0],
                    "model_type": draw.choice(("evil", config["model_type"])),
                }
            )
        )
        return "code beside the configuration", Expect.EITHER, False
    if kind == "damage":
        name = draw.choice([name for name in FILES if (folder / name).exists()])
        content, what = damaged(draw, (folder / name).read_bytes())
        (folder / name).write_bytes(content)
        return f"{name}: {what}", Expect.EITHER, False
    if kind == "file":
        name = draw.choice([name for name in FILES[:3] if (folder / name).exists()])
        return f"{name}: {no_file(draw, folder / name)}", Expect.EITHER, False
    if kind == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / draw.choice(("pytorch_model.bin", "model.safetensors", "tf_model.h5"))).write_bytes(canary_pickle())
        return "weights that are a pickle", Expect.REFUSED, True
    if kind == "weights":
        what, expect = spoil_tensors(draw, folder / "model.safetensors")
        known = what.endswith((": shape", ": empty", ": gone", ": scalar", ": transposed")) or what.startswith(
            ("a pickle", "header", "length")
        )
        return f"weights: {what}", expect if known else Expect.EITHER, True
    return "whole", Expect.TAKEN, False


def make(draw: random.Random, place: Place) -> Case:
    """A backbone with something wrong in it, named by a recipe, an adapter or an option."""
    vision = draw.random() < 0.5
    folder = place.copy(f"backbones/{'tiny-llava' if vision else 'tiny-llama'}", "backbone")
    what, expect, loads = spoil(draw, folder)
    ways = ["generate", "adapter"] if loads else ["generate", "adapter", "check", "check", "preview"]
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

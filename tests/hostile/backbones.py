"""Backbone folders whose configuration, tokenizer or weights are wrong, or carry code."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.known import Format, change_file, damage_file
from tests.hostile.pool import LM, VLM
from tests.hostile.recipes import read, with_key
from tests.hostile.references import equals, same
from tests.hostile.tensor_files import canary_pickle, spoil_tensors
from tests.hostile.values import HUGE, INFINITY, NAN, changed, no_file, shown, written

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
}
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
JSON_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"),
    "generation_config.json",
)
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Config: pass\nclass Model: pass\n"
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "model_type", "text_config", "vision_config"),
)
FORM = Format(
    free=("transformers_version",),
    only=(
        "transformers_version",
        *SIZES,
        *(f"text_config.{name}" for name in SIZES),
        *(f"vision_config.{name}" for name in SIZES if not name.startswith("num_key")),
    ),
    exact=("model_type", "text_config.model_type", "vision_config.model_type"),
    unsaid=("head_dim", "text_config.head_dim", "*_config.model_type"),
)
OF_OTHERS = Format(only=())
OF_GENERATION = Format(
    only=("eos_token_id", "pad_token_id"),
    legal=dict.fromkeys(("eos_token_id", "pad_token_id"), lambda value: isinstance(value, int | list | None)),
    unsaid=("eos_token_id", "pad_token_id"),  # see no_end
)
NO_END = "no end of an answer"
Spoilt = tuple[str, Expect]
Spoil = Callable[[random.Random, Path], Spoilt]


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def odd(draw: random.Random, folder: Path) -> Spoilt:
    """A number or a name of the configuration that cannot be."""
    config = _config(folder)
    inner = config.get("text_config", {})
    key = draw.choice([key for key in INVALID if key in config or key in inner])
    value = draw.choice(INVALID[key])
    where = ("text_config", key) if key in inner and (key not in config or draw.random() < 0.8) else (key,)
    (folder / "config.json").write_text(written(changed(config, where, value)))
    return f"{'.'.join(where)} is {shown(value)}", Expect.REFUSED


def anything(draw: random.Random, folder: Path) -> Spoilt:
    """Anything in what the weights hang on, and in what nobody reads."""
    what, expect = change_file(draw, folder / "config.json", FORM)
    return f"config: {what}", expect


def contradiction(draw: random.Random, folder: Path) -> Spoilt:
    """A configuration of another kind of model, or of none."""
    config = _config(folder)
    changes: tuple[dict[str, Any], ...] = ({"model_type": "qwen2_vl"}, {"model_type": "llava"}, {"model_type": "gpt2"})
    if "text_config" in config:
        changes = ({"model_type": "llama"}, {"text_config": {}}, {"text_config": None}, {"vision_config": {}})
    change_ = draw.choice(changes)
    (folder / "config.json").write_text(json.dumps({**config, **change_}))
    return f"config: {change_}", Expect.REFUSED


def code(draw: random.Random, folder: Path) -> Spoilt:
    """Programs beside the configuration; they are never looked at."""
    (folder / "evil.py").write_text(EVIL)
    config = _config(folder)
    kind = draw.choice(("evil", config["model_type"]))
    changes = {"auto_map": AUTO_MAP, "model_type": kind}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return f"code beside the configuration of a {kind}", Expect.REFUSED if kind == "evil" else Expect.TAKEN


def bytes_of_a_file(draw: random.Random, folder: Path) -> Spoilt:
    """A text that a disk has spoilt."""
    name = draw.choice([name for name in JSON_FILES if (folder / name).exists()])
    form = FORM if name == "config.json" else OF_GENERATION if name.startswith("generation") else OF_OTHERS
    what, expect = damage_file(draw, folder / name, form)
    return f"{name}: {what}", expect


def generation(draw: random.Random, folder: Path) -> Spoilt:
    """Settings of generation that are of another kind."""
    what, expect = change_file(draw, folder / "generation_config.json", OF_GENERATION)
    return f"generation_config.json: {what}", expect


def no_end(draw: random.Random, folder: Path) -> Spoilt:
    """No token that ends an answer, where the model has one: it runs as in transformers, and that is said."""
    path = folder / "generation_config.json"
    content = json.loads(path.read_text())
    ends = content.pop("eos_token_id")
    changes: dict[str, Any] = {
        "gone": {},
        "another name": {"eos_tokmn_id": ends},
        "beyond the vocabulary": {"eos_token_id": draw.choice((99_999, [99_999, 2**20]))},
    }
    kind = draw.choice(sorted(changes))
    path.write_text(json.dumps({**content, **changes[kind]}))
    return f"generation_config.json: {NO_END}: {kind}", Expect.TAKEN


def other_file(draw: random.Random, folder: Path) -> Spoilt:
    """No file where one belongs."""
    name = draw.choice(("config.json", "tokenizer.json"))
    return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED


def pickled(draw: random.Random, folder: Path) -> Spoilt:
    """Weights that are a pickle."""
    (folder / "model.safetensors").unlink()
    (folder / draw.choice(("pytorch_model.bin", "model.safetensors", "tf_model.h5"))).write_bytes(canary_pickle())
    return "weights that are a pickle", Expect.REFUSED


def weights(draw: random.Random, folder: Path) -> Spoilt:
    """Weights that are absent, of another shape, damaged, infinite or no numbers; or others, as good as any."""
    what, expect = spoil_tensors(draw, folder / "model.safetensors")
    return f"weights: {what}", Expect.TAKEN if what.endswith(": more") else expect  # as transformers does


def one_number(draw: random.Random, folder: Path) -> Spoilt:
    """A single weight that is no number, far inside of a matrix."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = draw.choice(sorted(name for name in tensors if "vision" not in name))
    tensors[name].view(-1)[draw.randrange(tensors[name].numel())] = draw.choice((NAN, INFINITY, -INFINITY))
    save_file(tensors, path, {"format": "pt"})
    return f"weights: {name} has one that is no number", Expect.REFUSED


def nothing(draw: random.Random, folder: Path) -> Spoilt:
    """A whole backbone."""
    return "whole", Expect.TAKEN


OF_WEIGHTS: tuple[Spoil, ...] = (pickled, weights, weights, one_number)
OTHERS: tuple[Spoil, ...] = (
    odd, odd, odd, anything, anything, contradiction, code, bytes_of_a_file, bytes_of_a_file, generation, no_end,
    other_file, nothing,
)  # fmt: skip


def make(draw: random.Random, place: Place) -> Case:
    """A backbone with something wrong in it, named by a recipe, an adapter or an option."""
    spoil = draw.choice((*OF_WEIGHTS, *OTHERS))
    vision = draw.random() < 0.5
    folder = place.copy(f"backbones/{'tiny-llava' if vision else 'tiny-llama'}", "backbone")
    what, expect = spoil(draw, folder)
    if spoil is weights and expect is Expect.TAKEN and not what.endswith(": more"):
        if vision:  # other weights, and nobody to ask what they say
            shutil.rmtree(folder)
            place.copies.clear()
            return make(draw, place)
        return own_weights(place, folder, what)
    header = spoil is pickled or what.startswith(("weights: header", "weights: length", "weights: cut"))
    loads = (spoil in OF_WEIGHTS and not header) or "generation" in what or "tokenizer" in what
    laid_out = header or spoil is contradiction or what.endswith((" is gone", "heads is 7"))  # which the weights tell
    ways = ("check", "check") if laid_out else ("check", "check", "preview")
    way = draw.choice(("generate", "adapter", *(() if loads else ways)))
    if way == "generate":
        words = ["generate", "--backbone", "backbone", "--prompt", "what is this ?", "--max-new-tokens", "1"]
    elif way == "adapter":
        adapter = str(place.pool / "adapters" / (VLM if vision else LM))
        words = ["generate", "--adapter", adapter, "--backbone", "backbone", "--prompt", "what ?"]
        words += ["--max-new-tokens", "1"]
    else:
        recipe = with_key(read(place, VLM if vision else LM), "model.backbone.path", "./backbone")
        place.write("recipe.yaml", yaml.safe_dump(recipe))
        words = ["preview", "--config", "recipe.yaml"]
        words = ["check", "--config", "recipe.yaml", "--offline"] if way == "check" else words
    files = {"recipe.yaml": (place.work / "recipe.yaml").read_text()} if way in ("check", "preview") else {}
    reference = same(place, words, files=files)
    return Case(f"{way}: {what}", words, expect, reference=said(reference) if NO_END in what else reference)


def said(reference: Reference) -> Reference:
    """Ask of an answer, beside what it equals, that it warns of having no end."""

    def difference(answer: Answer) -> str | None:
        warned = "no token ends an answer" in answer.err
        return reference(answer) if warned else f"not a word of it: {answer.err[-200:]}"

    return difference


def own_weights(place: Place, folder: Path, what: str) -> Case:
    """A backbone of other weights: its tokens are transformers', and it is refused where they are no numbers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        numbers = bool(torch.isfinite(model(ids).logits).all())
        right = model.generate(ids, max_new_tokens=3, do_sample=False) if numbers else None

    def call() -> Any:
        from subtoken_train import SubTokenModel

        mine = SubTokenModel.from_pretrained(folder)
        return mine.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)

    expect = Expect.TAKEN if numbers else Expect.REFUSED
    return Case(f"SubTokenModel {what}", call, expect, reference=equals(right))

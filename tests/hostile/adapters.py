"""Adapter folders whose configuration, tensors or files are wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.known import Format, change_file, damage_file, damage_or_change, misplaced
from tests.hostile.pool import LM, VLM
from tests.hostile.references import same
from tests.hostile.tensor_files import canary_pickle, decoded, spoil_tensors
from tests.hostile.values import HUGE, INFINITY, NAN, NUMBERS_ONLY, no_file, written

CONFIG, PEFT = "subtoken_config.json", "adapter_config.json"
LORA, ROUTER = "adapter_model.safetensors", "router.safetensors"
NUMBERS = (
    *("lora.rank", "lora.alpha", "lora.dropout", "reducer.keep_ratio", "routing.num_groups", "routing.kept_groups"),
    *("routing.balance_weight", "routing.temperature", "schema_version"),
)
INVALID: dict[str, tuple[Any, ...]] = {
    **{key: (*(v for v in NUMBERS_ONLY if v is not None), NAN, INFINITY, HUGE, -1) for key in NUMBERS},
    "lora.rank": (0, -8, 1_000_000, 2**40, 8.5, 9, "8", True),
    "lora.dropout": (-0.1, 1.5, NAN),
    "reducer.name": ("nope", 5, None, "../x", [], ""),
    "reducer.keep_ratio": (0, -0.25, 1.5, NAN, "0.25", [0.25]),
    "reducer.seed": ("x", 0.5, [], None),
    "reducer.round_up": ("no", 2, [], None),
    "reducer.ranking": ("nope", 5, None),
    "reducer.merge_dropped": ("no", 2, [], None),
    "routing.selector": ("nope", 5, None, "os.system", "static"),
    "routing.num_groups": (0, -16, 7, 15, 10**9, 16.5),
    "routing.kept_groups": (0, 17, -4, 4.5, "4"),
    "routing.layout": ("nope", 5, None),
    "routing.budget": ("nope", 5, None),
    "routing.balance_scope": ("nope", 5, None),
    "routing.query_rank": (0, -4, 1.5, "4", None),
    "routing.selector_options": (5, None, [], {"rank": 3}),
    "packages": (5, None, {}, ["x"], [{"kind": "selector"}]),
    "routing.features": ("norm", 5, None, ["nope"], [5], ["norm", "norm"]),
    "routing.fill": ("nope", 5, None, "learned"),
    "routing.query_conditioned": ("yes", 2, None),
    "routing": (5, "linear", [], True),
    "lora": (5, None, [], {}),
    "backbone": (5, None, [], {}),
    "identity": (5, None, [], {}),
    "identity.digest": ("0" * 64, 5, None, ""),
    "identity.model_type": ("llama2", 5, None),
    "backbone.dtype": ("float128", "os", 5, None),
    "backbone.attention": ("magic", 5),
    "backbone.path": (5, [], "", "nowhere/at/all", "/dev/null", "\x00", "x" * 5000),
    "backbone.revision": (5, [], {}),
    "training": (5, "x", None, []),
    "schema_version": (0, -1, 99, "1", None, 1.5, [], True),
}
FORM = Format(
    free=("versions.*",),
    legal={
        "training.*": lambda value: True,  # some of them of a kind
        "backbone.path": lambda value: isinstance(value, str),
        "backbone.revision": lambda value: value is None or isinstance(value, str),
        "identity.path": lambda value: isinstance(value, str),
        "identity.revision": lambda value: value is None or isinstance(value, str),
    },
    unsaid=("training.*", "lora.*", "reducer.*", "routing.*", "backbone.*"),
    exact=("schema_version", "identity.digest", "identity.model_type"),
)
OF_PEFT = Format(
    free=("auto_mapping", "peft_version", "loftq_config", "megatron_core", "revision", "task_type"),
    only=(
        *("auto_mapping", "peft_version", "loftq_config", "megatron_core", "revision", "task_type", "peft_type", "r"),
        *("lora_alpha", "target_modules", "bias", "use_dora", "use_rslora", "modules_to_save", "layers_to_transform"),
    ),
    unsaid=("*", "*.*"),
    exact=("peft_type", "r", "lora_alpha", "target_modules", "bias"),
)
CONTRADICTIONS = (
    *(("r", 4), ("r", 10**9), ("r", "8"), ("r", NAN), ("lora_alpha", 99)),
    *(("peft_type", "IA3"), ("peft_type", "os.system"), ("peft_type", None)),
    *(("target_modules", ["k_proj"]), ("target_modules", "(a+)+$"), ("use_dora", True), ("bias", "all")),
    ("modules_to_save", ["lm_head"]),
)
PICKLES = ("adapter_model.bin", "pytorch_model.bin", LORA, ROUTER, "model.safetensors", "training_args.bin")


Spoilt = tuple[str, Expect]


def harmless(draw: random.Random, folder: Path) -> Spoilt:
    """Nothing that matters."""
    path = folder / CONFIG
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    (folder / "README.md").write_text("# mine\n")
    return "keys in another order, another card", Expect.TAKEN


def invalid(draw: random.Random, folder: Path) -> Spoilt:
    """A field of the configuration that cannot be."""
    path = folder / CONFIG
    config = json.loads(path.read_text())
    there = {key: INVALID[key] for key in INVALID if "." not in key or isinstance(config.get(key.split(".")[0]), dict)}
    content, what, expect = misplaced(draw, config, there)
    path.write_text(written(content))
    return what, expect


def changed_somewhere(draw: random.Random, folder: Path) -> Spoilt:
    """Anything anywhere in the configuration."""
    what, expect = change_file(draw, folder / CONFIG, FORM)
    return f"configuration: {what}", expect


def text(draw: random.Random, folder: Path) -> Spoilt:
    """The configuration's bytes, or a key twice."""
    path = folder / CONFIG
    if draw.random() < 0.4:
        path.write_bytes(path.read_bytes().replace(b'"rank": 8', b'"rank": 8, "rank": 4'))
        return "rank twice", Expect.REFUSED
    what, expect = damage_file(draw, path, FORM)
    return f"configuration: {what}", expect


def tensors(draw: random.Random, folder: Path) -> Spoilt:
    """LoRA or routers."""
    return spoil_tensors(draw, folder / draw.choice(_present(folder, LORA, ROUTER)))


def other_file(draw: random.Random, folder: Path) -> Spoilt:
    """No file where one belongs."""
    name = draw.choice(_present(folder, CONFIG, PEFT, LORA, ROUTER))
    return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED


def pickled(draw: random.Random, folder: Path) -> Spoilt:
    """A pickle in the place of the tensors."""
    name = draw.choice(PICKLES)
    (folder / (ROUTER if name == ROUTER else LORA)).unlink(missing_ok=True)
    (folder / name).write_bytes(canary_pickle(draw.choice((0, 2, 4))))
    return f"a pickle as {name}", Expect.REFUSED


def merged(draw: random.Random, folder: Path) -> Spoilt:
    """A merged folder whose weights are a pickle, or absent."""
    path = folder / CONFIG
    config = {**json.loads(path.read_text()), "schema_version": 3, "merged": True, "stage2": None}
    path.write_text(json.dumps(config))
    if draw.random() < 0.7:
        (folder / "config.json").write_bytes((Path(config["backbone"]["path"]) / "config.json").read_bytes())
        (folder / "pytorch_model.bin").write_bytes(canary_pickle())
    return "merged, with a pickle or nothing", Expect.REFUSED


def peft(draw: random.Random, folder: Path) -> Spoilt:
    """Peft's own configuration."""
    path = folder / PEFT
    content = json.loads(path.read_text())
    kind = draw.choice(("contradicts", "contradicts", "mutated", "damage"))
    if kind == "contradicts":
        key, value = draw.choice(CONTRADICTIONS)
        path.write_text(json.dumps({**content, key: value}))
        return f"{PEFT}: {key} is {value!r}", Expect.REFUSED
    what, expect = damage_or_change(draw, path, OF_PEFT, kind)
    return f"{PEFT}: {what}", expect


def _present(folder: Path, *names: str) -> list[str]:
    return [name for name in names if (folder / name).exists()]


SPOIL = (
    harmless, invalid, invalid, invalid, changed_somewhere, changed_somewhere, text, peft, peft, tensors, tensors,
    tensors,
    other_file, pickled, merged,
)  # fmt: skip


def tensors_of(answer: Answer) -> dict[str, Any]:
    """LoRA and routers as they were read, in the numbers of 32 bits."""
    _, parts, peft_model = answer.value
    named = [*([] if parts.bank is None else parts.bank.named_parameters()), *peft_model.named_parameters()]
    return {
        name.replace(".default.", "."): tensor.detach().float().numpy()
        for name, tensor in named
        if tensor.device.type != "meta"
    }


def files_in(folder: Path) -> Reference:
    """What was read is what the folder's files hold, decoded by another reader, and finite."""

    def difference(answer: Answer) -> str | None:
        got, right = tensors_of(answer), {}
        for name in _present(folder, LORA, ROUTER):
            right |= decoded((folder / name).read_bytes()) or {}
        with np.errstate(over="ignore"):
            right = {name: array.astype("<f4") for name, array in right.items()}
        if got.keys() != right.keys():
            return f"read {sorted(got.keys() ^ right.keys())[:2]} otherwise than the files have it"
        wrong = [name for name in got if not np.array_equal(got[name], right[name]) or not np.isfinite(got[name]).all()]
        return f"not as in the file, or not finite: {wrong[:2]}" if wrong else None

    return difference


def make(draw: random.Random, place: Place) -> Case:
    """An adapter folder with one thing wrong in it."""
    name = draw.choice((VLM, LM, f"{VLM}_anchor"))
    folder = place.copy(f"adapters/{name}", "adapter")
    spoil = draw.choice(SPOIL)
    what, expect = spoil(draw, folder)
    other = spoil is tensors and expect is Expect.TAKEN  # other numbers, which are none of the original's
    ways = ("read", "read", "read", "export", "export", "generate", *(["evaluate"] if name != LM else []))
    way = "read" if other else draw.choice(ways)
    if way == "read":
        from subtoken_train.artifact.folder import read_adapter

        return Case(
            f"read_adapter {what}", lambda: read_adapter(folder, layout=True), expect, reference=files_in(folder)
        )
    if way == "export":
        words = ["export", "adapter", "out"]
        tensor_files = [f"out/{name}" for name in (LORA, ROUTER)]
        return Case(f"export {what}", words, expect, ("out",), reference=same(place, words, tensor_files))
    if way == "generate":
        words = ["generate", "--adapter", "adapter", "--prompt", "what ?", "--max-new-tokens", "1"]
        words += [] if name == LM else ["--image", str(place.pool / "images/a.png")]
        return Case(f"generate {what}", words, expect, reference=same(place, words))
    words = ["evaluate", "--adapter", "adapter", "--limit", "1", "--max-new-tokens", "1"]
    words += ["--data", str(place.pool / "scenes/dev.json")]
    return Case(f"evaluate {what}", words, expect, reference=same(place, words))

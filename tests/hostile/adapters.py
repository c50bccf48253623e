"""Adapter folders whose configuration, tensors or files are wrong."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hostile.case import Answer, Case, Expect, Place
from hostile.pool import LM, VLM
from hostile.values import HUGE, INFINITY, NAN, NUMBERS_ONLY, changed, damaged, mutated, no_file, shown, written

CONFIG, PEFT, LORA, ROUTER = (
    "subtoken_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "router.safetensors",
)
NUMBERS = (
    "lora.rank",
    "lora.alpha",
    "lora.dropout",
    "reducer.keep_ratio",
    "routing.num_groups",
    "routing.kept_groups",
    "routing.balance_weight",
    "schema_version",
)
INVALID: dict[str, tuple[Any, ...]] = {
    **{key: (*(v for v in NUMBERS_ONLY if v is not None), NAN, INFINITY, HUGE, -1) for key in NUMBERS},
    "lora.rank": (0, -8, 1_000_000, 2**40, 8.5, 9, "8", True),
    "lora.dropout": (-0.1, 1.5, NAN),
    "reducer.name": ("nope", 5, None, "../x", [], ""),
    "reducer.keep_ratio": (0, -0.25, 1.5, NAN, "0.25", [0.25]),
    "reducer.seed": ("x", 0.5, [], None),
    "reducer.round_up": ("no", 2, [], None),
    "routing.selector": ("nope", 5, None, "os.system", "static"),
    "routing.num_groups": (0, -16, 7, 15, 10**9, 16.5),
    "routing.kept_groups": (0, 17, -4, 4.5, "4"),
    "routing.layout": ("nope", 5, None),
    "routing.budget": ("nope", 5, None),
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
PICKLES = (
    "adapter_model.bin",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "router.safetensors",
    "model.safetensors",
    "training_args.bin",
)
FLOATS = (torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int8, torch.int64, torch.uint8, torch.bool)


class Touch:
    """Its pickle makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("../CANARY", "w"))


def canary_pickle(protocol: int = 2) -> bytes:
    """A pickle that touches the canary when it is read."""
    return pickle.dumps(Touch(), protocol=protocol)


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The configuration with a dotted key set."""
    return changed(config, tuple(key.split(".")), value)


def spoil_tensors(draw: random.Random, path: Path) -> tuple[str, Expect]:
    """Damage a safetensors file; what was done and whether it is known to be wrong."""
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    kind = draw.choice(
        (
            "nan",
            "inf",
            "huge",
            "integer",
            "shape",
            "empty",
            "gone",
            "more",
            "header",
            "length",
            "damage",
            "float",
            "pickle",
            "scalar",
            "transposed",
        )
    )
    expect = Expect.REFUSED
    if kind in ("nan", "inf"):
        tensor = tensor.clone()
        tensor.view(-1)[draw.randrange(tensor.numel())] = NAN if kind == "nan" else draw.choice((INFINITY, -INFINITY))
        tensors[name] = tensor
    elif kind == "integer":
        tensors[name] = tensor.to(draw.choice(INTEGERS))
    elif kind == "float":
        tensors[name], expect = tensor.to(draw.choice(FLOATS)), Expect.EITHER
    elif kind == "huge":
        tensors[name], expect = torch.full_like(tensor, 3e38), Expect.EITHER
    elif kind == "shape":
        tensors[name] = torch.zeros(*tensor.shape, 1)
    elif kind == "transposed":
        tensors[name] = tensor.reshape(-1)
    elif kind == "scalar":
        tensors[name] = torch.tensor(1.0)
    elif kind == "empty":
        tensors[name] = torch.zeros(0, *tensor.shape[1:])
    elif kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice((f"{name}x", "../../x", "", "a" * 2000, "\x1b[31m"))] = torch.zeros(2, 2)
    elif kind == "pickle":
        path.write_bytes(canary_pickle())
        return "a pickle with a tensor file's name", expect
    else:
        content = path.read_bytes()
        if kind == "length":
            content = struct.pack("<Q", draw.choice((0, 1, 2**63, 2**40, len(content) * 2, 10**8))) + content[8:]
        elif kind == "header":
            size = struct.unpack("<Q", content[:8])[0]
            header = json.loads(content[8 : 8 + size])
            header[name]["data_offsets"] = draw.choice(([0, 2**62], [10, 0], [-5, 5], [0, 0], "x", None))
            text = json.dumps(header).encode()
            content = struct.pack("<Q", len(text)) + text + content[8 + size :]
        else:
            content, kind = damaged(draw, content)
            expect = Expect.EITHER
        path.write_bytes(content)
        return f"{kind} in {name}" if expect is Expect.REFUSED else kind, expect
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return f"{name}: {kind}", expect


def spoil(draw: random.Random, folder: Path) -> tuple[str, Expect]:
    """Make one thing wrong in an adapter folder."""
    kind = draw.choice(
        (
            "config",
            "config",
            "config",
            "mutated",
            "mutated",
            "text",
            "peft",
            "peft",
            "tensors",
            "tensors",
            "tensors",
            "file",
            "pickle",
            "merged",
            "harmless",
        )
    )
    path = folder / CONFIG
    config = json.loads(path.read_text())
    if kind == "harmless":
        path.write_text(json.dumps(dict(reversed(config.items()))))
        (folder / "README.md").write_text("# mine\n")
        return "keys in another order, another card", Expect.TAKEN
    if kind == "config":
        key = draw.choice([key for key in INVALID if "." not in key or isinstance(config.get(key.split(".")[0]), dict)])
        value = draw.choice(INVALID[key])
        if key.endswith("path") and value == "../x":
            value = "nowhere"
        path.write_text(written(put(config, key, value)))
        return f"{key} is {shown(value)}", Expect.REFUSED
    if kind == "mutated":
        config, what = mutated(draw, config)
        path.write_text(written(config), errors="surrogatepass")
        return f"configuration: {what}", Expect.EITHER
    if kind == "text":
        content, what = damaged(draw, path.read_bytes())
        if draw.random() < 0.4:
            content, what = path.read_bytes().replace(b'"rank": 8', b'"rank": 8, "rank": 4'), "rank twice"
            path.write_bytes(content)
            return what, Expect.REFUSED
        path.write_bytes(content)
        return f"configuration: {what}", Expect.EITHER
    if kind == "peft":
        return spoil_peft(draw, folder / PEFT)
    if kind == "tensors":
        return spoil_tensors(draw, folder / draw.choice([name for name in (LORA, ROUTER) if (folder / name).exists()]))
    if kind == "file":
        name = draw.choice([name for name in (CONFIG, PEFT, LORA, ROUTER) if (folder / name).exists()])
        return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED
    if kind == "pickle":
        name = draw.choice(PICKLES)
        for original in (LORA,) if name != ROUTER else (ROUTER,):
            (folder / original).unlink(missing_ok=True)
        (folder / name).write_bytes(canary_pickle(draw.choice((0, 2, 4))))
        return f"a pickle as {name}", Expect.REFUSED
    config = {**config, "schema_version": 3, "merged": True, "stage2": None}
    path.write_text(json.dumps(config))
    if draw.random() < 0.7:
        source = Path(config["backbone"]["path"])
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        (folder / "pytorch_model.bin").write_bytes(canary_pickle())
    return "merged, with a pickle or nothing", Expect.REFUSED


def spoil_peft(draw: random.Random, path: Path) -> tuple[str, Expect]:
    """Damage peft's own configuration."""
    content = json.loads(path.read_text())
    kind = draw.choice(("contradicts", "contradicts", "mutated", "damage"))
    if kind == "contradicts":
        key, value = draw.choice((("r", 4), ("r", 10**9), ("lora_alpha", 99), ("peft_type", "IA3"), ("peft_type", "os.system"), ("target_modules", ["k_proj"]), ("use_dora", True), ("r", "8"), ("peft_type", None), ("r", NAN), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("target_modules", "(a+)+$")))  # fmt: skip
        path.write_text(json.dumps({**content, key: value}))
        return f"{PEFT}: {key} is {value!r}", Expect.REFUSED
    if kind == "mutated":
        content, what = mutated(draw, content)
        path.write_text(written(content), errors="surrogatepass")
        return f"{PEFT}: {what}", Expect.EITHER
    spoilt, what = damaged(draw, path.read_bytes())
    path.write_bytes(spoilt)
    return f"{PEFT}: {what}", Expect.EITHER


def finite(answer: Answer) -> str | None:
    """What is accepted holds finite floats alone."""
    if answer.value is None:
        return None
    _, parts, peft_model = answer.value
    named = [*([] if parts.bank is None else parts.bank.named_parameters()), *peft_model.named_parameters()]
    wrong = [
        name for name, tensor in named
        if tensor.device.type != "meta" and not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all()))
    ]  # fmt: skip
    return f"not finite or no floats: {wrong[:2]}" if wrong else None


def make(draw: random.Random, place: Place) -> Case:
    """An adapter folder with one thing wrong in it."""
    folder = place.copy(f"adapters/{draw.choice((VLM, LM, f'{VLM}_anchor'))}", "adapter")
    what, expect = spoil(draw, folder)
    way = draw.choice(("read", "read", "read", "export", "export", "evaluate", "generate"))
    if way == "read":
        from subtoken_train.artifact.folder import read_adapter

        return Case(f"read_adapter {what}", lambda: read_adapter(folder, layout=True), expect, complaint=finite)
    if way == "export":
        return Case(f"export {what}", ["export", "adapter", "out"], expect, ("out",))
    if way == "generate":
        return Case(
            f"generate {what}",
            ["generate", "--adapter", "adapter", "--prompt", "what ?", "--max-new-tokens", "1"],
            expect,
        )
    data = str(place.pool / "scenes/dev.json")
    words = ["evaluate", "--adapter", "adapter", "--data", data, "--limit", "1", "--max-new-tokens", "1"]
    if expect is Expect.TAKEN and "context" in (folder / CONFIG).read_text():
        expect = Expect.EITHER
    return Case(f"evaluate {what}", words, Expect.EITHER if expect is Expect.TAKEN else expect)

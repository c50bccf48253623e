"""Adapters, backbones, runs, calibrations and saved caches: their documents, tensors and files, and code in them."""

import io
import json
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.hostile.case import LM, LORA, VLM, Case, Expect, Place, Spoilt, made, read_by
from tests.hostile.grammar import HUGE, INFINITY, NAN, Document, damaged, no_file
from tests.hostile.pool import CACHES, asked_model
from tests.hostile.recipes import RECIPE
from tests.hostile.tensors import Touch, canary_pickle, odd_tensor, spoil_tensors

Make = Callable[[random.Random, Place], Case]
Spoil = Callable[[random.Random, Path], Spoilt]


def of(document: Document, name: str = "", ways: str = "") -> Spoil:
    """A document in a folder, or one that stands alone, spoilt."""

    def spoil(draw: random.Random, path: Path) -> Spoilt:
        what, expect = document.spoil(draw, path / name if name else path, ways)
        return f"{name}: {what}", expect

    return spoil


def inside(name: str, spoil: Spoil) -> Spoil:
    return lambda draw, folder: spoil(draw, folder / name)


def files(*names: str) -> Spoil:
    def spoil(draw: random.Random, folder: Path) -> Spoilt:
        name = draw.choice(names)
        return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED

    return spoil


def whole(draw: random.Random, path: Path) -> Spoilt:
    return "whole", Expect.TAKEN


def reading(original: str, name: str, spoils: Sequence[Spoil], *texts: str) -> Make:
    """Cases of one kind: an original's copy, one of the ways to spoil it, and a command that reads it."""

    def make(draw: random.Random, place: Place) -> Case:
        spoilt = draw.choice(spoils)(draw, place.copy(original, name))
        return read_by(place, draw.choice(texts), spoilt)

    return make


def one_of(*makes: Make) -> Make:
    return lambda draw, place: draw.choice(makes)(draw, place)


CONFIG, PEFT = "subtoken_config.json", "adapter_config.json"
CHOICE = ("nope", "os.system", "../x")  # where one of a few names must stand; what is of another kind is drawn anyway
ADAPTER = Document(
    {
        "lora.alpha routing.balance_weight routing.temperature": (-1,),
        "lora.rank": (0, -8, 1_000_000, 2**40, 8.5, 9), "lora.dropout": (-0.1, 1.5),
        "reducer.name reducer.ranking routing.selector routing.layout routing.budget routing.balance_scope": CHOICE,
        "routing.fill backbone.dtype backbone.attention identity.model_type": CHOICE,
        "reducer.keep_ratio": (0, -0.25, 1.5), "reducer.seed": (0.5,),
        "routing.num_groups": (0, -16, 7, 15, 10**9, 16.5), "routing.kept_groups": (0, 17, -4, 4.5),
        "routing.query_rank": (0, -4, 1.5), "routing.selector_options": ({"rank": 3},),
        "packages": (["x"], [{"kind": "selector"}]), "routing.features": (["nope"], [5], ["norm", "norm"]),
        "lora backbone identity": ({},), "identity.digest": ("0" * 64, ""),
        "backbone.path": ("", "nowhere/at/all", "/dev/null", "\x00", "x" * 5000), "schema_version": (0, -1, 99, 1.5),
    },
    loose="training.*", open="lora.* reducer.* routing.* backbone.*", free="versions.*",
    ways="odd odd odd changed changed bytes",
)  # fmt: skip
OF_PEFT = Document(
    {
        "r": (4, 10**9, "8", NAN), "lora_alpha": (99,), "peft_type": ("IA3", "os.system", None),
        "target_modules": (["k_proj"], "(a+)+$"), "use_dora": (True,), "bias": ("all",),
        "modules_to_save": (["lm_head"],),
    },
    only="peft_type r lora_alpha target_modules bias use_dora use_rslora modules_to_save layers_to_transform",
    open="*", needed="peft_type r target_modules", ways="odd odd changed bytes",
)  # fmt: skip


def adapter_tensors(draw: random.Random, folder: Path) -> Spoilt:
    return spoil_tensors(draw, draw.choice(sorted(folder.glob("*.safetensors"))))


def pickled_adapter(draw: random.Random, folder: Path) -> Spoilt:
    name = draw.choice((LORA, "adapter_model.bin", "pytorch_model.bin", "model.safetensors", "training_args.bin"))
    (folder / LORA).unlink()
    (folder / name).write_bytes(canary_pickle(draw.choice((0, 2, 4))))
    return f"a pickle as {name}", Expect.REFUSED


def merged(draw: random.Random, folder: Path) -> Spoilt:
    config = {**json.loads((folder / CONFIG).read_text()), "schema_version": 3, "merged": True, "stage2": None}
    (folder / CONFIG).write_text(json.dumps(config))
    if draw.random() < 0.7:
        (folder / "config.json").write_bytes((Path(config["backbone"]["path"]) / "config.json").read_bytes())
        (folder / "pytorch_model.bin").write_bytes(canary_pickle())
    return "merged, with a pickle or nothing", Expect.REFUSED


def rank_twice(draw: random.Random, folder: Path) -> Spoilt:
    path = folder / CONFIG
    path.write_bytes(path.read_bytes().replace(b'"rank": 8', b'"rank": 8, "rank": 4'))
    return "rank twice", Expect.REFUSED


def harmless(draw: random.Random, folder: Path) -> Spoilt:
    path = folder / CONFIG
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    (folder / "README.md").write_text("# mine\n")
    return "keys in another order, another card", Expect.TAKEN


SPOILT_ADAPTER = (
    *(of(ADAPTER, CONFIG),) * 6, *(of(OF_PEFT, PEFT),) * 2, *(adapter_tensors,) * 3, files(CONFIG, PEFT, LORA),
    pickled_adapter, merged, rank_twice, harmless,
)  # fmt: skip
ASKED = "generate --adapter adapter --prompt 'what is this ?' --max-new-tokens 1"
SCORED = "evaluate --adapter adapter --limit 1 --max-new-tokens 1 --data {dev}"
adapters = one_of(
    reading(f"adapters/{VLM}", "adapter", SPOILT_ADAPTER, ASKED, SCORED, "export adapter out"),
    reading(f"adapters/{VLM}_anchor", "adapter", SPOILT_ADAPTER, ASKED, SCORED, "export adapter out"),
    reading(f"adapters/{LM}", "adapter", SPOILT_ADAPTER, ASKED, "export adapter out"),
)
BAD: tuple[Any, ...] = ("x", [], {}, -1, NAN, INFINITY, HUGE, 1.5)
SIZES: dict[str, tuple[Any, ...]] = {
    "hidden_size num_attention_heads num_key_value_heads": (*BAD, 0, 2**40, 7), "num_hidden_layers": (*BAD, 10**7),
    "intermediate_size": (*BAD, 2**45), "vocab_size": (*BAD, 0, 2**45),
    "model_type": (5, None, [], "nope", "../x", "os.system", "auto"),
}  # fmt: skip
OF_TEXT: dict[str, tuple[Any, ...]] = {
    " ".join(f"text_config.{each}" for each in keys.split()): values
    for keys, values in SIZES.items()
    if keys != "model_type"
}
WITHIN: dict[str, tuple[Any, ...]] = {**OF_TEXT, "model_type": ("llama",), "text_config": ({},), "vision_config": ({},)}
JUDGED = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size model_type"
BROKEN = Document(only="nothing", open="*", ways="bytes")
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Config: pass\nclass Model: pass\n"


def of_config(odd: dict[str, tuple[Any, ...]], judged: str) -> Spoil:
    document = Document(odd, only=judged, open="*", free="transformers_version", ways="odd odd changed bytes")
    return of(document, "config.json")


def evil_code(draw: random.Random, folder: Path) -> Spoilt:
    (folder / "evil.py").write_text(EVIL)
    config = json.loads((folder / "config.json").read_text())
    kind = draw.choice(("evil", config["model_type"]))
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP, "model_type": kind}))
    return f"code beside the configuration of a {kind}", Expect.REFUSED if kind == "evil" else Expect.TAKEN


def pickled(draw: random.Random, folder: Path) -> Spoilt:
    (folder / "model.safetensors").unlink()
    (folder / draw.choice(("pytorch_model.bin", "model.safetensors", "tf_model.h5"))).write_bytes(canary_pickle())
    return "weights that are a pickle", Expect.REFUSED


def weights(draw: random.Random, folder: Path) -> Spoilt:
    """Of more tensors than a model has, transformers says that it does not use them."""
    what, expect = spoil_tensors(draw, folder / "model.safetensors", more=False)
    return f"weights: {what}", expect


def no_end(draw: random.Random, folder: Path) -> Spoilt:
    """An answer then goes on to the number of tokens that was asked for."""
    path = folder / "generation_config.json"
    content = json.loads(path.read_text())
    ends = content.pop("eos_token_id")
    beyond = {"eos_token_id": draw.choice((99_999, [99_999, 2**20]))}
    path.write_text(json.dumps({**content, **draw.choice(({}, {"eos_tokmn_id": ends}, beyond))}))
    return "no end of an answer", Expect.TAKEN


SPOILT_BACKBONE = (
    *(of(BROKEN, name) for name in ("tokenizer.json", "tokenizer_config.json")), files("config.json", "tokenizer.json"),
    evil_code, *(weights,) * 3, pickled, whole,
)  # fmt: skip
GENERATED = "generate --backbone backbone --prompt 'what is this ?' --max-new-tokens 1"
PREPARED = "check --config {recipe} --offline --model.backbone.path=./backbone"

backbones = one_of(
    reading("backbones/tiny-llama", "backbone", (*SPOILT_BACKBONE, no_end, *(of_config(SIZES, JUDGED),) * 4), GENERATED,
            "generate --adapter {lm} --backbone backbone --prompt 'what is this ?' --max-new-tokens 1"),
    reading("backbones/tiny-llava", "backbone", (*SPOILT_BACKBONE, *(of_config(WITHIN, "text_config"),) * 4), GENERATED,
            "generate --adapter {vlm} --backbone backbone --prompt 'what is this ?' --max-new-tokens 1"),
    reading("backbones/tiny-llava", "backbone", (of_config(WITHIN, "text_config"), evil_code, whole), PREPARED),
)  # fmt: skip
MARKER = Document(
    {"trained": ({}, {"a": "b"}, {"a": [HUGE]}, {"a": [-1]}), "schema_version": (99,)},
    ways="odd changed changed changed bytes bytes",
)
CHECKPOINT, STATE = "checkpoints/step-1", "checkpoints/step-1/state.ckpt"


def members(content: bytes) -> dict[str, bytes] | None:
    """What an archive holds, each member checked by its sum; None where it is none or broken."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, OSError, zlib.error):
        return None


def state_bytes(draw: random.Random, run: Path) -> Spoilt:
    """What lies between the members of an archive means nothing, and is left as it was."""
    content = before = (run / STATE).read_bytes()
    while members(content) == members(before):
        content, what = damaged(draw, before)
    (run / STATE).write_bytes(content)
    return f"state: {what}", Expect.REFUSED


def state_pickle(draw: random.Random, run: Path) -> Spoilt:
    path, form = run / STATE, draw.choice(("alone", "archive", "legacy", "inside"))
    if form == "alone":
        path.write_bytes(canary_pickle())
    elif form == "legacy":
        torch.save({"state_dict": Touch()}, path, _use_new_zipfile_serialization=False)
    elif form == "inside":
        content = torch.load(path, weights_only=True)
        torch.save({**content, draw.choice(("state_dict", "loops", "extra", "callbacks")): Touch()}, path)
    else:
        archive = io.BytesIO()
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(archive, "w") as target:
            for name in source.namelist():
                target.writestr(name, pickle.dumps(Touch(), 2) if name.endswith("data.pkl") else source.read(name))
        path.write_bytes(archive.getvalue())
    return f"state: a pickle that runs something, {form}", Expect.REFUSED


def state_tensors(draw: random.Random, run: Path) -> Spoilt:
    content = torch.load(run / STATE, weights_only=True)
    if draw.random() < 0.3:
        content["state_dict"] = draw.choice(([], None, "x", {}, {next(iter(content["state_dict"])): "x"}, 5))
        what = "no tensors"
    else:
        what = odd_tensor(draw, content["state_dict"], ("nan", "integer", "shape", "gone", "more"))
    torch.save(content, run / STATE)
    return f"state: {what}", Expect.REFUSED


def run_folders(draw: random.Random, run: Path) -> Spoilt:
    """Folders beside the checkpoint that have its kind of name; one that is newer and broken is not passed over."""
    name = draw.choice("step-x step- step-99999999999999999999 step--1 step-2.partial step-1e3 step-٣ step-2".split())
    marked = draw.random() < 0.5
    (run / "checkpoints" / name).mkdir()
    if marked:
        (run / "checkpoints" / name / "COMPLETE").write_text(draw.choice(("", "{}", "null")))
    newer = marked and name in ("step-2", "step-٣", "step-99999999999999999999")
    return f"beside it: {name}", Expect.REFUSED if newer else Expect.TAKEN


SPOILT_RUN = (
    *(of(MARKER, f"{CHECKPOINT}/COMPLETE"),) * 3, *(state_bytes,) * 3, state_pickle, state_tensors,
    files(f"{CHECKPOINT}/COMPLETE", STATE, "recipe.yaml"), of(RECIPE, "recipe.yaml", "bytes"), run_folders, whole,
)  # fmt: skip


def runs(draw: random.Random, place: Place) -> Case:
    spoilt = draw.choice(SPOILT_RUN)(draw, place.copy("stopped", "run"))
    text = draw.choice(("export run out", "export run out", "fit --config run/recipe.yaml --output_dir run --resume"))
    return read_by(place, text, spoilt)


SHARES = {"numbers.shares": ([], [[]], [5]), "numbers.shares.0.0": (-0.1, 1.1), "numbers.keep": ([], [0.5], [2.0] * 9)}
HEADS = {
    "numbers.alpha": ([], [[]], [5], [[0.5]], [[0.5, 0.5]] * 99), "numbers.alpha.0.0": (-0.1, 1.1),
    "numbers.recent": (0, -1, 1.5), "numbers.sinks": (-1, 1.5),
}  # fmt: skip


def calibration(method: str, odd: dict[str, Any]) -> Make:
    document = Document(
        {
            "schema_version": (0, 2), "method": ("nope", "snapkv"), "backbone.digest": ("0" * 64, ""),
            "backbone data numbers": ({}, {"alpha": 1}), "data.samples": (1.5,), **odd,
        },
        loose="settings.*", needed="schema_version method backbone data numbers",
        ways="odd odd odd changed changed bytes file whole",
    )  # fmt: skip
    text = "generate --backbone {llama} --prompt 'Code baran amber falcon.' --max-new-tokens 1 --device cpu"
    text += f" --eviction {method} --eviction-keep 0.5 --eviction-option calibration=made.json"
    return reading(f"calibrations/{method}.json", "made.json", [of(document)], text)


calibrations = one_of(calibration("prefixkv", SHARES), calibration("duo_attention", HEADS))
BLOCK = "packed.layers.*.blocks.*"
RECORD = Document(
    {
        "version": (0, -1, 5, 99), "dtype": ("float16", "os"), "model reducer packed report report.ledger": ({},),
        "model.weights model.backbone.digest model.tokenizer": ("0" * 64,), "compression.keep": (0.25,),
        "compression.eviction": ({"name": "nope"},), "frames": ([5], [{}]), "contexts": ([5], ["a"] * 7),
        "report.payload_bytes": (0, -1, 2**62), "packed.prompt_length": (0, -1, 2**40),
        "packed.layers": ([], [{}], [[]], [{"blocks": []}] * 4),
        "packed.layers.0.blocks packed.layers.0.blocks.0.parts": ([], [{}]),
        "packed.layers.0.fill": ("nope", "stored"),
        "packed.layers.0.blocks.0.page_size packed.layers.0.blocks.0.page_count": (4, 0, -1),
    },
    loose="report.kept_entries",
    open=f"report.ledger.shape.* reducer.* compression.* compression.eviction.* packed.layers.* {BLOCK}.* "
    f"{BLOCK}.parts.*.indexed",
    ways="odd changed",
)  # fmt: skip
model = cache(asked_model)  # the model of a cache, loaded once in a process


def forged(draw: random.Random, path: Path) -> Spoilt:
    """One thing wrong in the record or the tensors of a file whose checksum is right."""
    from subtoken_train.inference import cache_file

    with safe_open(path, "pt") as file:
        record = file.metadata()["subtoken_cache"].partition(" ")[2]
    tensors, expect = load_file(path), Expect.REFUSED
    if draw.random() < 0.4:
        what = odd_tensor(draw, tensors, ("shape", "one more", "empty", "gone", "more"))
    else:
        content, what, expect = RECORD.spoilt(draw, record.encode(), draw.choice(("odd", "changed")))
        record = content.decode("utf-8", "surrogatepass")
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    record = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", record)  # which no UTF-8 has
    save_file(tensors, path, cache_file.sealed(record, tensors))
    return what, expect


def cache_bytes(draw: random.Random, path: Path) -> Spoilt:
    """A sum is over all of them."""
    before = path.read_bytes()
    content, what = damaged(draw, before) if draw.random() < 0.8 else (canary_pickle(), "a pickle")
    path.write_bytes(content)
    return what, Expect.TAKEN if content == before else Expect.REFUSED


@cache
def right_answer(pool: Path, name: str) -> Any:
    return answer_from(model(pool, name), pool / f"caches/{name}.safetensors")


def answer_from(loaded: Any, path: Path) -> Any:
    loaded.load_cache(path)
    return loaded.ask(None, ["what ?"], max_new_tokens=3)


def caches(draw: random.Random, place: Place) -> Case:
    name = draw.choice(CACHES)
    path = place.copy(f"caches/{name}.safetensors", "a.safetensors")
    missing = lambda draw, path: (no_file(draw, path), Expect.REFUSED)  # noqa: E731
    what, expect = draw.choice((*(forged,) * 7, cache_bytes, cache_bytes, missing, whole))(draw, path)
    reference = made(lambda: right_answer(place.pool, name))
    return Case(f"cache {name} {what}", lambda: answer_from(model(place.pool, name), path), expect, reference=reference)

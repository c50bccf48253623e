"""Folders of models: adapters, backbones and runs whose configuration, tensors or files are wrong, or carry code."""

import io
import json
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.hostile.case import LM, VLM, Answer, Case, Expect, Place, Reference, Spoilt, made, read_by
from tests.hostile.files import Touch, canary_pickle, decoded, spoil_tensors, with_one
from tests.hostile.grammar import YAML, Document, Format, anything, is_text, text_or_none
from tests.hostile.recipes import OF_RECIPE, TENSORS, read
from tests.hostile.values import HUGE, INFINITY, NAN, changed, damaged, no_file, written

CONFIG, PEFT = "subtoken_config.json", "adapter_config.json"
LORA, ROUTER = "adapter_model.safetensors", "router.safetensors"
CHOICE = ("nope", "os.system", "../x")  # where one of a few names must stand; what is of another kind is drawn anyway
ADAPTER = Document(
    Format(
        free=("versions.*",),
        legal={
            "training.*": anything, "backbone.path identity.path": is_text,
            "backbone.revision identity.revision": text_or_none,
        },
        unsaid=("training.*", "lora.*", "reducer.*", "routing.*", "backbone.*"),
        exact=("schema_version", "identity.digest", "identity.model_type"),
    ),
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
    "odd odd odd changed changed bytes",
)  # fmt: skip
UNREAD = ("auto_mapping", "peft_version", "loftq_config", "megatron_core", "revision", "task_type")
JUDGED = tuple(
    "peft_type r lora_alpha target_modules bias use_dora use_rslora modules_to_save layers_to_transform".split()
)
OF_PEFT = Document(
    Format(free=UNREAD, only=(*UNREAD, *JUDGED), unsaid=("*", "*.*"), exact=JUDGED[:5]),
    {
        "r": (4, 10**9, "8", NAN), "lora_alpha": (99,), "peft_type": ("IA3", "os.system", None),
        "target_modules": (["k_proj"], "(a+)+$"), "use_dora": (True,), "bias": ("all",),
        "modules_to_save": (["lm_head"],),
    },
    "odd odd changed bytes",
)  # fmt: skip
PICKLES = ("adapter_model.bin", "pytorch_model.bin", LORA, ROUTER, "model.safetensors", "training_args.bin")


def _present(folder: Path, *names: str) -> list[str]:
    return [name for name in names if (folder / name).exists()]


def adapter_file(draw: random.Random, folder: Path, kind: str) -> Spoilt:
    path = folder / CONFIG
    if kind == "harmless":
        path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
        (folder / "README.md").write_text("# mine\n")
        return "keys in another order, another card", Expect.TAKEN
    if kind == "rank twice":
        path.write_bytes(path.read_bytes().replace(b'"rank": 8', b'"rank": 8, "rank": 4'))
        return kind, Expect.REFUSED
    if kind == "tensors":
        return spoil_tensors(draw, folder / draw.choice(_present(folder, LORA, ROUTER)))
    if kind == "file":
        name = draw.choice(_present(folder, CONFIG, PEFT, LORA, ROUTER))
        return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED
    if kind == "pickle":
        name = draw.choice(PICKLES)
        (folder / (ROUTER if name == ROUTER else LORA)).unlink(missing_ok=True)
        (folder / name).write_bytes(canary_pickle(draw.choice((0, 2, 4))))
        return f"a pickle as {name}", Expect.REFUSED
    if kind == "merged":
        config = {**json.loads(path.read_text()), "schema_version": 3, "merged": True, "stage2": None}
        path.write_text(json.dumps(config))
        if draw.random() < 0.7:
            (folder / "config.json").write_bytes((Path(config["backbone"]["path"]) / "config.json").read_bytes())
            (folder / "pytorch_model.bin").write_bytes(canary_pickle())
        return "merged, with a pickle or nothing", Expect.REFUSED
    document = OF_PEFT if kind == "peft" else ADAPTER
    what, expect = document.spoil(draw, folder / (PEFT if kind == "peft" else CONFIG))
    return f"{kind}: {what}", expect


def files_in(folder: Path) -> Reference:
    """What was read is what the folder's files hold, decoded by another reader in 32 bits, and finite."""

    def difference(answer: Answer) -> str | None:
        _, parts, peft_model = answer.value
        named = [*([] if parts.bank is None else parts.bank.named_parameters()), *peft_model.named_parameters()]
        got = {
            name.replace(".default.", "."): tensor.detach().float().numpy()
            for name, tensor in named
            if tensor.device.type != "meta"
        }
        right: dict[str, Any] = {}
        for name in _present(folder, LORA, ROUTER):
            right |= decoded((folder / name).read_bytes()) or {}
        with np.errstate(over="ignore"):
            right = {name: array.astype("<f4") for name, array in right.items()}
        if got.keys() != right.keys():
            return f"read {sorted(got.keys() ^ right.keys())[:2]} otherwise than the files have it"
        wrong = [name for name in got if not np.array_equal(got[name], right[name]) or not np.isfinite(got[name]).all()]
        return f"not as in the file, or not finite: {wrong[:2]}" if wrong else None

    return difference


def adapters(draw: random.Random, place: Place) -> Case:
    name = draw.choice((VLM, LM, f"{VLM}_anchor"))
    folder = place.copy(f"adapters/{name}", "adapter")
    kinds = "harmless config config config config config config peft peft tensors tensors tensors file pickle merged"
    kind = draw.choice((*kinds.split(), "rank twice"))
    what, expect = adapter_file(draw, folder, kind)
    ways = ("read", "read", "read", "export", "export", "generate", *(["evaluate"] if name != LM else []))
    # other numbers are none of the original's
    way = "read" if kind == "tensors" and expect is Expect.TAKEN else draw.choice(ways)
    if way == "read":
        from subtoken_train.artifact.folder import read_adapter

        act = lambda: read_adapter(folder, layout=True)  # noqa: E731
        return Case(f"read_adapter {what}", act, expect, reference=files_in(folder))
    if way == "export":
        return read_by(place, "export adapter out", (what, expect), ("out",), (f"out/{LORA}", f"out/{ROUTER}"))
    text = "generate --adapter adapter --prompt 'what ?' --max-new-tokens 1" + ("" if name == LM else " --image {png}")
    if way == "evaluate":
        text = "evaluate --adapter adapter --limit 1 --max-new-tokens 1 --data {dev}"
    return read_by(place, text, (what, expect))


SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "model_type", "text_config", "vision_config"),
)
BAD: tuple[Any, ...] = ("x", [], {}, -1, NAN, INFINITY, HUGE, 1.5)
ODD_SIZES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (*BAD, 0, 2**40, 7), "num_hidden_layers": (*BAD, 10**7),
    "num_attention_heads": (*BAD, 0, 2**40, 7), "num_key_value_heads": (*BAD, 0, 2**40, 7),
    "head_dim": (*BAD, 0, 2**40), "intermediate_size": (*BAD, 2**45), "vocab_size": (*BAD, 0, 2**45),
    "model_type": (5, None, [], "nope", "../x", "os.system", "auto"),
}  # fmt: skip
OF_CONFIG = Format(
    free=("transformers_version",),
    only=(
        *("transformers_version", *SIZES, *(f"text_config.{name}" for name in SIZES)),
        *(f"vision_config.{name}" for name in SIZES if not name.startswith("num_key")),
    ),
    exact=("model_type", "text_config.model_type", "vision_config.model_type"),
    unsaid=("head_dim", "text_config.head_dim", "*_config.model_type"),
)
ENDS = ("eos_token_id", "pad_token_id")
OF_GENERATION = Format(
    only=ENDS,
    legal=dict.fromkeys(ENDS, lambda value: isinstance(value, int | list | None)),
    unsaid=ENDS,  # see no_end
)
JSON_FILES = {
    "config.json": OF_CONFIG, "generation_config.json": OF_GENERATION,
    **dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "processor_config.json"), Format(only=())),
}  # fmt: skip
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
EVIL = "import pathlib\npathlib.Path('../CANARY').touch()\nclass Config: pass\nclass Model: pass\n"
NO_END = "no end of an answer"


def odd_config(draw: random.Random, folder: Path) -> Spoilt:
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config", {})
    key = draw.choice([key for key in ODD_SIZES if key in config or key in inner])
    nested = key in inner and (key not in config or draw.random() < 0.8)
    odd = {f"text_config.{key}" if nested else key: ODD_SIZES[key]}
    return Document(odd=odd).spoil(draw, folder / "config.json", "odd")


def contradiction(draw: random.Random, folder: Path) -> Spoilt:
    config = json.loads((folder / "config.json").read_text())
    changes: tuple[dict[str, Any], ...] = ({"model_type": "qwen2_vl"}, {"model_type": "llava"}, {"model_type": "gpt2"})
    if "text_config" in config:
        changes = ({"model_type": "llama"}, {"text_config": {}}, {"text_config": None}, {"vision_config": {}})
    change = draw.choice(changes)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return f"config: {change}", Expect.REFUSED


def code(draw: random.Random, folder: Path) -> Spoilt:
    (folder / "evil.py").write_text(EVIL)
    config = json.loads((folder / "config.json").read_text())
    kind = draw.choice(("evil", config["model_type"]))
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP, "model_type": kind}))
    return f"code beside the configuration of a {kind}", Expect.REFUSED if kind == "evil" else Expect.TAKEN


def json_file(draw: random.Random, folder: Path) -> Spoilt:
    way = draw.choice(("bytes", "bytes", "changed", "changed", "changed"))
    name = draw.choice(_present(folder, *JSON_FILES) if way == "bytes" else ("config.json", "generation_config.json"))
    what, expect = Document(JSON_FILES[name]).spoil(draw, folder / name, way)
    return f"{name}: {what}", expect


def no_end(draw: random.Random, folder: Path) -> Spoilt:
    path = folder / "generation_config.json"
    content = json.loads(path.read_text())
    ends = content.pop("eos_token_id")
    beyond = {"eos_token_id": draw.choice((99_999, [99_999, 2**20]))}
    path.write_text(json.dumps({**content, **draw.choice(({}, {"eos_tokmn_id": ends}, beyond))}))
    return f"generation_config.json: {NO_END}", Expect.TAKEN


def no_config(draw: random.Random, folder: Path) -> Spoilt:
    name = draw.choice(("config.json", "tokenizer.json"))
    return f"{name}: {no_file(draw, folder / name)}", Expect.REFUSED


def pickled(draw: random.Random, folder: Path) -> Spoilt:
    (folder / "model.safetensors").unlink()
    (folder / draw.choice(("pytorch_model.bin", "model.safetensors", "tf_model.h5"))).write_bytes(canary_pickle())
    return "weights that are a pickle", Expect.REFUSED


def weights(draw: random.Random, folder: Path) -> Spoilt:
    what, expect = spoil_tensors(draw, folder / "model.safetensors")
    return f"weights: {what}", Expect.TAKEN if what.endswith(": more") else expect  # as transformers does


def one_number(draw: random.Random, folder: Path) -> Spoilt:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = draw.choice(sorted(name for name in tensors if "vision" not in name))
    tensors[name] = with_one(draw, tensors[name], NAN, INFINITY, -INFINITY)
    save_file(tensors, path, {"format": "pt"})
    return f"weights: {name} has one that is no number", Expect.REFUSED


OF_WEIGHTS: tuple[Callable[[random.Random, Path], Spoilt], ...] = (pickled, weights, weights, one_number)
OTHERS = (*(odd_config,) * 3, *(json_file,) * 5, contradiction, code, no_end, no_config, None)


def backbones(draw: random.Random, place: Place) -> Case:
    spoil = draw.choice((*OF_WEIGHTS, *OTHERS))
    vision = draw.random() < 0.5
    folder = place.copy(f"backbones/{'tiny-llava' if vision else 'tiny-llama'}", "backbone")
    what, expect = ("whole", Expect.TAKEN) if spoil is None else spoil(draw, folder)
    if spoil is weights and expect is Expect.TAKEN and not what.endswith(": more"):
        if vision:  # other weights, and nobody to ask what they say
            shutil.rmtree(folder)
            place.copies.clear()
            return backbones(draw, place)
        return own_weights(folder, what)
    header = spoil is pickled or what.startswith(("weights: header", "weights: length", "weights: cut"))
    loads = (spoil in OF_WEIGHTS and not header) or "generation" in what or "tokenizer" in what
    laid_out = header or spoil in (contradiction, json_file) or what.endswith(("heads is 7", "size is 0"))  # of weights
    ways = ("check", "check") if laid_out else ("check", "check", "preview")
    way = draw.choice(("generate", "adapter", *(() if loads else ways)))
    if way in ("generate", "adapter"):
        arm = (
            f"--adapter {{{'vlm' if vision else 'lm'}}} --backbone backbone"
            if way == "adapter"
            else "--backbone backbone"
        )
        case = read_by(place, f"generate {arm} --prompt 'what is this ?' --max-new-tokens 1", (what, expect))
    else:
        own = read(place, VLM if vision else LM)
        recipe = yaml.safe_dump(changed(own, ("model", "backbone", "path"), "./backbone"))
        place.write("recipe.yaml", recipe)
        text = "check --config recipe.yaml --offline" if way == "check" else "preview --config recipe.yaml"
        case = read_by(place, text, (what, expect), files={"recipe.yaml": recipe})
    return Case(case.what, case.act, expect, reference=said(case.reference)) if NO_END in what else case


def said(reference: Reference | None) -> Reference:
    assert reference is not None

    def difference(answer: Answer) -> str | None:
        warned = "no token ends an answer" in answer.err
        return reference(answer) if warned else f"not a word of it: {answer.err[-200:]}"

    return difference


def own_weights(folder: Path, what: str) -> Case:
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
    return Case(f"SubTokenModel {what}", call, expect, reference=made(lambda: right))


MARKER = Document(
    Format(exact=("schema_version", "trained.*.*")),
    {"trained": ({}, {"a": "b"}, {"a": [HUGE]}, {"a": [-1]}), "schema_version": (99,)},
    "odd changed changed changed bytes bytes",
)
PASSED_OVER = "the state has a part of Lightning's that a run which has reached its end may do without"
BETWEEN = "what lies between the members of the archive means nothing, and torch may stumble over it or not"
RUN_FOLDERS = "step-x step- step-99999999999999999999 step--1 step-2.partial step-1e3 step-٣ step-2".split()


def members(content: bytes) -> dict[str, bytes] | None:
    """What an archive holds, each member checked by its sum; None where it is none or broken."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, OSError, zlib.error):
        return None


def state_pickle(draw: random.Random, path: Path) -> Spoilt:
    form = draw.choice(("alone", "archive", "legacy", "inside"))
    if form == "alone":
        path.write_bytes(canary_pickle())
    elif form == "legacy":
        torch.save({"state_dict": Touch()}, path, _use_new_zipfile_serialization=False)
    elif form == "inside":
        content = torch.load(path, weights_only=True)
        torch.save({**content, draw.choice(("state_dict", "loops", "extra", "callbacks")): Touch()}, path)
    else:
        whole = io.BytesIO()
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(whole, "w") as target:
            for name in source.namelist():
                target.writestr(name, pickle.dumps(Touch(), 2) if name.endswith("data.pkl") else source.read(name))
        path.write_bytes(whole.getvalue())
    return f"state: a pickle that runs something, {form}", Expect.REFUSED


def state_parts(draw: random.Random, path: Path, export: bool) -> Spoilt:
    """Tensors or other parts of the state that do not belong there; an export reads the tensors alone."""
    content = torch.load(path, weights_only=True)
    trained = content["state_dict"]
    name, part = draw.choice(sorted(trained)), draw.choice(sorted(content))
    kind = draw.choice(("nan", "integer", "gone", "more", "shape", "no tensors", "part gone", "part odd"))
    expect, what = Expect.REFUSED, f"state: {name} {kind}"
    if kind.startswith("part"):
        value = draw.choice((None, 5, "x", [], {}, [None]))
        what = f"state: without {part}" if kind == "part gone" else f"state: {part} is {value!r}"
        if kind == "part gone":
            del content[part]
        else:
            content[part] = value
        expect = Expect.REFUSED if part == "state_dict" else Expect.TAKEN if export else Expect.EITHER
    elif kind == "gone":
        del trained[name]
    elif kind == "no tensors":
        content["state_dict"] = draw.choice(([], None, "x", {}, {name: "x"}, 5))
    else:
        here = trained[name]
        trained[f"{name}.more" if kind == "more" else name] = {
            "nan": torch.full_like(here, draw.choice((NAN, INFINITY))), "integer": here.to(torch.int64),
            "more": torch.zeros(3), "shape": torch.zeros(1, 2, 3),
        }[kind]  # fmt: skip
    torch.save(content, path)
    return what, expect


def run_folders(draw: random.Random, checkpoint: Path, words: str) -> Spoilt:
    """Folders beside the checkpoint that have its kind of name; one that is newer and broken is not passed over."""
    name, marked = draw.choice(RUN_FOLDERS), draw.random() < 0.5
    checkpoint.with_name(name).mkdir()
    if marked:
        (checkpoint.with_name(name) / "COMPLETE").write_text(draw.choice(("", "{}", "null")))
    later = name in ("step-2", "step-٣", "step-99999999999999999999")
    newer = marked and later and "step-1" not in words
    return f"beside it: {name}", Expect.REFUSED if newer else Expect.TAKEN


def spoilt_run(draw: random.Random, run: Path, text: str) -> Spoilt:
    checkpoint, export = run / "checkpoints/step-1", text.startswith("export")
    kind = draw.choice("marker marker marker strategy bytes bytes bytes pickle parts file recipe names whole".split())
    if kind == "marker":
        what, expect = MARKER.spoil(draw, checkpoint / "COMPLETE")
        return f"marker: {what}", expect
    if kind == "strategy":  # whoever wrote it, an export reads its tensors
        path = checkpoint / "COMPLETE"
        path.write_text(written({**json.loads(path.read_text()), "strategy": "nope"}))
        return "marker: another strategy", Expect.TAKEN if export else Expect.REFUSED
    if kind == "file":
        name = draw.choice(("COMPLETE", "state.ckpt", "../../recipe.yaml"))
        return f"{name}: {no_file(draw, checkpoint / name)}", Expect.REFUSED
    if kind == "recipe":
        what, expect = Document(OF_RECIPE, notation=YAML).spoil(draw, run / "recipe.yaml", "bytes")
        return f"recipe: {what}", expect
    if kind == "names":
        return run_folders(draw, checkpoint, text)
    if kind == "parts":
        return state_parts(draw, checkpoint / "state.ckpt", export)
    if kind == "whole":
        return "a whole run", Expect.TAKEN
    path = checkpoint / "state.ckpt"
    if kind == "pickle":
        return state_pickle(draw, path)
    before = path.read_bytes()
    content, what = damaged(draw, before)
    path.write_bytes(content)
    alike = Expect.EITHER if members(content) == members(before) else Expect.REFUSED
    return f"state: {what}", Expect.TAKEN if content == before else alike


def runs(draw: random.Random, place: Place) -> Case:
    run = place.copy("stopped", "run")
    resume = "fit --config run/recipe.yaml --output_dir run --resume"
    text = draw.choice(("export run out", "export run out", "export run/checkpoints/step-1 out", resume))
    what, expect = spoilt_run(draw, run, text)
    why = "" if expect is not Expect.EITHER else PASSED_OVER if " is " in what or "without" in what else BETWEEN
    if text == resume:
        anyway = ("run/logs", "run/.lock", "run.lock")
        return read_by(place, text, (what, expect), ("run",), TENSORS, anyway=anyway, why=why)
    return read_by(place, text, (what, expect), ("out",), [f"out/{name}" for name in (LORA, ROUTER)], why=why)

"""Files of one kind each: tensors, calibrations, saved caches and the tokenizers of these, benchmarks' own files."""

import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hostile import grammar
from tests.hostile.case import Answer, Case, Expect, Place, Spoilt, made, read_by
from tests.hostile.grammar import NoDocument, parsed_json
from tests.hostile.pool import CACHES, asked_model
from tests.hostile.values import INFINITY, NAN, damaged, no_file, written

INTEGERS = (torch.int8, torch.int64, torch.uint8, torch.bool)
STRANGE_NAMES = ("x", "../../x", "", "a" * 2000, "\x1b[31m")
OFFSETS = ([0, 2**62], [10, 0], [-5, 5], [0, 0], "x", None)


class Touch:
    """Its pickle makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("../CANARY", "w"))


def canary_pickle(protocol: int = 2) -> bytes:
    return pickle.dumps(Touch(), protocol=protocol)


def with_one(draw: random.Random, tensor: Tensor, *values: float) -> Tensor:
    """A copy with another number at one place."""
    tensor = tensor.clone()
    tensor.view(-1)[draw.randrange(max(1, tensor.numel()))] = draw.choice(values)
    return tensor


Change = Callable[[random.Random, Tensor], Tensor]
REFUSED_TENSORS: dict[str, Change] = {
    "nan": lambda draw, tensor: with_one(draw, tensor, NAN),
    "inf": lambda draw, tensor: with_one(draw, tensor, INFINITY, -INFINITY),
    "integer": lambda draw, tensor: tensor.to(draw.choice(INTEGERS)),
    "shape": lambda draw, tensor: torch.zeros(*tensor.shape, 1), "one more": lambda draw, tensor: tensor[None],
    "scalar": lambda draw, tensor: torch.tensor(1.0),
    "empty": lambda draw, tensor: torch.zeros(0, *tensor.shape[1:]),
}  # fmt: skip
ODD_TENSORS: dict[str, Change] = {
    "other floats": lambda draw, tensor: tensor.to(draw.choice((torch.float16, torch.bfloat16))),
    "huge": lambda draw, tensor: torch.full_like(tensor, 3e38),
}


def spoil_tensors(draw: random.Random, path: Path) -> Spoilt:
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    kind = draw.choice((*REFUSED_TENSORS, *ODD_TENSORS, "gone", "more", *FILES))
    if kind in FILES:
        return FILES[kind](draw, path, name)
    if kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice(STRANGE_NAMES)] = torch.zeros(2, 2)
    else:
        tensors[name] = {**REFUSED_TENSORS, **ODD_TENSORS}[kind](draw, tensors[name])
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return f"{name}: {kind}", Expect.TAKEN if kind in ODD_TENSORS else Expect.REFUSED


def _as_pickle(draw: random.Random, path: Path, name: str) -> Spoilt:
    path.write_bytes(canary_pickle(draw.choice((0, 2, 4))))
    return "a pickle with a tensor file's name", Expect.REFUSED


def _length(draw: random.Random, path: Path, name: str) -> Spoilt:
    content = path.read_bytes()
    length = draw.choice((0, 1, 2**63, 2**40, len(content) * 2, 10**8))
    path.write_bytes(struct.pack("<Q", length) + content[8:])
    return f"length of the header {length}", Expect.REFUSED


def _header(draw: random.Random, path: Path, name: str) -> Spoilt:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[name]["data_offsets"] = draw.choice(OFFSETS)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return f"header of {name}", Expect.REFUSED


def _damage(draw: random.Random, path: Path, name: str) -> Spoilt:
    before = decoded(path.read_bytes())
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    assert before is not None
    after, right = decoded(content), False
    if after is not None and before.keys() == after.keys():
        pairs = [(before[key], after[key]) for key in before]
        alike = (one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
        right = all(alike) and all(np.isfinite(other).all() for _, other in pairs)
    return what, Expect.TAKEN if right else Expect.REFUSED


_TYPES = dict(zip("F64 F32 F16 I64 I32 I16 I8 U8 BOOL".split(), "<f8 <f4 <f2 <i8 <i4 <i2 i1 u1 ?".split(), strict=True))


def decoded(content: bytes) -> dict[str, Any] | None:
    """The arrays of a safetensors file, read by the letter of the format; None where it is none.

    The length of the header in 8 bytes, the header in JSON, then the bytes of all tensors without a hole.
    """
    size = int.from_bytes(content[:8], "little")
    try:
        header = parsed_json(content[8 : 8 + size])
        body, found, ends = content[8 + size :], {}, []
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] == "BF16":
                array = (np.frombuffer(body[start:end], "<u2").astype("<u4") << 16).view("<f4")
            else:
                array = np.frombuffer(body[start:end], _TYPES[entry["dtype"]])
            found[name] = array.reshape(entry["shape"])
            ends.append((start, end))
    except (NoDocument, KeyError, TypeError, ValueError, AttributeError):
        return None
    ends.sort()
    whole = [0, *(end for _, end in ends)] == [*(start for start, _ in ends), len(body)]
    return found if whole and content[8:9] == b"{" else None


FILES = {"pickle": _as_pickle, "length": _length, "header": _header, "damage": _damage, "more damage": _damage}


OF_CALIBRATION: dict[str, tuple[Any, ...]] = {
    "schema_version": (0, 2), "method": ("nope", "snapkv"), "backbone.digest": ("0" * 64, ""),
    "backbone data numbers": ({}, {"alpha": 1}), "data.samples": (1.5,),
}  # fmt: skip
OF_METHOD: dict[str, dict[str, tuple[Any, ...]]] = {
    "duo_attention": {
        "numbers.alpha": ([], [[]], [5], [[0.5]], [[0.5, 0.5]] * 99), "numbers.alpha.0.0": (-0.1, 1.1),
        "numbers.recent": (0, -1, 1.5), "numbers.sinks": (-1, 1.5),
    },
    "prefixkv": {
        "numbers.shares": ([], [[]], [5]), "numbers.shares.0.0": (-0.1, 1.1),
        "numbers.keep": ([], [0.5], [2.0] * 9, ["x"] * 9),
    },
}  # fmt: skip
CALIBRATION = grammar.Format(
    more=("settings",),
    optional=("settings.*",),  # how it was made, for the reader
    legal={"settings.*": grammar.anything, "backbone.path": grammar.is_text, "backbone.revision": grammar.text_or_none},
    exact=("schema_version", "method", "backbone.digest", "backbone.model_type"),
)


def calibrations(draw: random.Random, place: Place) -> Case:
    method = draw.choice(list(OF_METHOD))
    path = place.copy(f"calibrations/{method}.json", "made.json")
    odd = draw.choice((OF_CALIBRATION, OF_METHOD[method]))
    spoilt = grammar.Document(CALIBRATION, odd, "odd odd odd changed changed gone bytes file whole").spoil(draw, path)
    text = "generate --backbone {llama} --prompt 'Code baran amber falcon.' --max-new-tokens 1 --device cpu"
    text += f" --eviction {method} --eviction-keep 0.5 --eviction-option calibration=made.json"
    return read_by(place, text, spoilt)


FAR = (-1, -(2**31), 2**31 - 1, 2**62)
RECORD = grammar.Document(
    grammar.Format(
        legal={
            "model.backbone.path": grammar.is_text, "model.backbone.revision": grammar.text_or_none,
            "report.kept_entries": lambda value: value is None or (not isinstance(value, str) and 0 <= value <= 1),
        },
        unsaid=(
            *("report.ledger.shape.*", "reducer.*", "compression.*", "compression.eviction.*"),
            # null, or gone: no pages, no turned values, no fill, an index
            *("packed.layers.*.blocks.*.page_size", "packed.layers.*.blocks.*.page_count", "packed.layers.*.turned"),
            *("packed.layers.*.fill", "packed.layers.*.blocks.*.parts.*.indexed"),
        ),
        exact=("version", "dtype", "model.*", "model.backbone.digest", "model.backbone.model_type", "contexts.*"),
    ),
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
)  # fmt: skip
model = cache(asked_model)  # the model of a cache, loaded once in a process


def odd_tensor(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    name = draw.choice(sorted(tensors))
    kinds = ["shape", "one more", "empty", "gone", "more"]
    codes = name.endswith(("keys", "values", "index"))  # of which any is as good as another
    kinds += ["nan", "inf", "integer"] if tensors[name].is_floating_point() else [] if codes else ["far"] * 3
    kind = draw.choice(kinds)
    if kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice(STRANGE_NAMES)] = torch.zeros(2, 2)
    elif kind == "far":
        tensors[name] = tensors[name].clone()
        limits = torch.iinfo(tensors[name].dtype) if tensors[name].dtype != torch.bool else None
        value = draw.choice(FAR) if limits is None else max(limits.min, min(limits.max, draw.choice(FAR)))
        tensors[name].view(-1)[draw.randrange(max(1, tensors[name].numel()))] = value
    else:
        tensors[name] = REFUSED_TENSORS[kind](draw, tensors[name])
    return f"{name}: {kind}"


def forged(draw: random.Random, path: Path, kind: str) -> Spoilt:
    """One thing wrong in the record or the tensors of a file whose checksum is right."""
    from subtoken_train.inference import cache_file

    with safe_open(path, "pt") as file:
        record: Any = json.loads(file.metadata()["subtoken_cache"].partition(" ")[2])
    tensors, expect = load_file(path), Expect.REFUSED
    if kind == "tensor":
        what = odd_tensor(draw, tensors)
    elif kind == "odd":
        record, what, expect = grammar.misplaced(draw, record, RECORD.odd)
    else:
        record, what, expect = grammar.change(draw, record, RECORD.form)
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, path, cache_file.sealed(written(record), tensors))
    return what, expect


@cache
def right_answer(pool: Path, name: str) -> Any:
    return answer_from(model(pool, name), pool / f"caches/{name}.safetensors")


def answer_from(loaded: Any, path: Path) -> Any:
    loaded.load_cache(path)
    return loaded.ask(None, ["what ?"], max_new_tokens=3)


def caches(draw: random.Random, place: Place) -> Case:
    name = draw.choice(list(CACHES))
    path = place.copy(f"caches/{name}.safetensors", "a.safetensors")
    kinds = "odd odd changed changed tensor tensor tensor file bytes header whole"
    kind, expect = draw.choice(kinds.split()), Expect.REFUSED
    if kind in ("odd", "changed", "tensor"):
        what, expect = forged(draw, path, kind)
    elif kind == "file":
        what = no_file(draw, path)
    elif kind == "bytes":  # a sum is over all of them
        whole = path.read_bytes()
        content, what = damaged(draw, whole) if draw.random() < 0.8 else (canary_pickle(), "a pickle")
        path.write_bytes(content)
        expect = Expect.TAKEN if content == whole else Expect.REFUSED
    elif kind == "header":
        what, _ = draw.choice(list(FILES.values()))(draw, path, "next_position")
    else:
        what, expect = "as it was saved", Expect.TAKEN
    reference = made(lambda: right_answer(place.pool, name))
    return Case(f"cache {name} {what}", lambda: answer_from(model(place.pool, name), path), expect, reference=reference)


def other_tokenizer(draw: random.Random, content: dict[str, Any]) -> str:
    words = content["model"]["vocab"]
    plain = sorted(word for word in words if not word.startswith("<"))
    kind = draw.choice(("exchanged", "exchanged", "renamed", "normalised"))
    if kind == "normalised":
        content["normalizer"] = {"type": "Lowercase"}
        return "a normaliser more"
    one, other = draw.sample(plain, 2)
    if kind == "exchanged":
        words[one], words[other] = words[other], words[one]
        return f"{one!r} and {other!r} exchanged"
    merges = content["model"].get("merges", [])
    merged = {part for merge in merges for part in (merge if isinstance(merge, list) else merge.split())}
    one = draw.choice([word for word in plain if len(word) > 2 and word not in merged] or sorted(words))
    words[f"{one}zzz"] = words.pop(one)
    return f"{one!r} renamed"


def tokenizer_swaps(draw: random.Random, place: Place) -> Case:
    name = draw.choice(list(CACHES))
    folder = place.copy(f"backbones/{'tiny-llava' if name == 'vlm' else 'tiny-llama'}", "backbone")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    expect = Expect.TAKEN if draw.random() < 0.25 else Expect.REFUSED
    what = "the same, written otherwise" if expect is Expect.TAKEN else other_tokenizer(draw, content)
    path.write_text(json.dumps(content, ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, 1))))

    def call() -> Any:
        return answer_from(asked_model(place.pool, name, folder), place.pool / f"caches/{name}.safetensors")

    reference = made(lambda: right_answer(place.pool, name))
    return Case(f"cache {name}, tokenizer: {what}", call, expect, reference=reference, says=("tokenizer",))


POPE = {f"coco_pope_{name}.json": "* *.image *.text *.label" for name in ("adversarial", "random", "popular")}
READ = {  # places of the files that are read, and what stands there is of one kind
    "testdev_balanced_questions.json": "* *.question *.answer *.imageId",
    "v2_OpenEnded_mscoco_val2014_questions.json": "questions questions.* questions.*.question",
    "v2_mscoco_val2014_annotations.json": "annotations annotations.* annotations.*.answers",
    "TextVQA_0.5.1_val.json": "data data.* data.*.answers", "llava_textvqa_val_v051_ocr.jsonl": "* *.image *.text",
    "pid_splits.json": "test test.*", "problems.json": "* *.question *.choices *.answer", **POPE,
}  # fmt: skip
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet")
UNREAD = "the damage lies in a column, or behind a limit, that nobody reads here"


def benchmark_file(draw: random.Random, path: Path) -> Spoilt:
    kind = draw.choice("changed changed changed bytes bytes bytes file whole".split())
    kind = "bytes" if kind == "changed" and path.name not in READ else kind
    if path.suffix in (".json", ".jsonl"):
        notation = grammar.LINES if len(path.read_bytes().strip().splitlines()) > 1 else grammar.JSON
        read = tuple(READ[path.name].split()) if kind == "changed" else ()
        named = {"*.imageId": lambda value: isinstance(value, str | int)}
        form = grammar.Format(only=read, unsaid=("*", "*s.*", "data.*"), legal=named)  # rows more or fewer
        return grammar.Document(form, notation=notation).spoil(draw, path, kind)
    if path.suffix != ".parquet" or kind != "bytes":
        broken = Expect.EITHER if path.suffix == ".tsv" else Expect.REFUSED  # of many rows a limit looks at two
        return grammar.Document(grammar.Format(only=()), notation=grammar.TEXT, broken=broken).spoil(draw, path, kind)
    content, what, expect = grammar.damage(
        draw, path.read_bytes(), grammar.PARQUET.parse, grammar.Format(only=()), broken=Expect.EITHER
    )
    path.write_bytes(content)
    try:
        pq.ParquetFile(io.BytesIO(content))
    except Exception:  # no table at all
        expect = Expect.REFUSED
    return what, expect


def benchmarks(draw: random.Random, place: Place) -> Case:
    layout = draw.choice(("own", "parquet"))
    name = draw.choice(sorted(path.name for path in (place.pool / "benchmarks" / layout).iterdir()))
    folder = place.copy(f"benchmarks/{layout}/{name}", name)
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in SUFFIXES))
    what, expect = benchmark_file(draw, path)
    gone: dict[str, str | bytes | None] = {}
    if (layout, name, what) == ("own", "mme", "absent"):  # one picture's questions; any may be there
        expect, gone = Expect.TAKEN, {f"{name}/{path.relative_to(folder)}": None}
    told = f"{path.relative_to(place.work)}: {what}"
    why = UNREAD if expect is Expect.EITHER else ""
    if draw.random() < 0.7:
        return read_by(place, f"data {name} --root {name} --limit 2", (told, expect), files=gone, why=why)

    def reference(answer: Answer) -> str | None:
        right = whole_samples(place.pool / "benchmarks" / layout / name, name)
        right = [each for each in right if not (gone and f"/{path.stem}.jpg" in each[0])]
        return None if answer.value == right else "other samples than the original's"

    return Case(f"build_task {told}", lambda: samples(folder, name), expect, reference=reference, why=why)


def samples(folder: Path, name: str) -> list[Any]:
    from subtoken_train.evaluation.tasks import build_task
    from subtoken_train.evaluation.tasks.files import check_samples

    task = build_task(name, folder)
    found = task.samples()
    check_samples(task, found)
    return [(each.id, each.prompt, each.reference) for each in found]


whole_samples = cache(samples)

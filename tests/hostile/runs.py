"""Run folders: markers of checkpoints, their state, the recipe beside them."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import Case, Expect, Place
from tests.hostile.known import Format, change_file, damage_file, parsed_yaml
from tests.hostile.recipes import FORM as OF_RECIPE
from tests.hostile.references import same
from tests.hostile.tensor_files import Touch, canary_pickle
from tests.hostile.values import HUGE, INFINITY, NAN, changed, damaged, no_file, shown, written

INVALID_MARKER: dict[str, tuple[Any, ...]] = {
    "step": ("x", None, [], {}, NAN),
    "world_size": ("x", None, [], {}),
    "strategy": (5, None, [], {}, "nope"),
    "trained": (5, "x", None, [], {}, {"a": "b"}, {"a": [HUGE]}, {"a": [-1]}),
    "schema_version": ("x", None, [], 99, {}, NAN, INFINITY, HUGE),
}


FORM = Format(exact=("schema_version", "trained.*.*"))
TENSORS = ("adapter_model.safetensors", "router.safetensors")
PASSED_OVER = "the state has a part of Lightning's that a run which has reached its end may do without"
BETWEEN = "what lies between the members of the archive means nothing, and torch may stumble over it or not"
Spoilt = tuple[str, Expect]
Way = tuple[str, ...]


def make(draw: random.Random, place: Place) -> Case:
    """A run with something wrong in it, to go on with or to export."""
    run = place.copy("stopped", "run")
    checkpoint = run / "checkpoints/step-1"
    words = draw.choice((
        ("export", "run", "out"),
        ("export", "run", "out"),
        ("export", "run/checkpoints/step-1", "out"),
        ("fit", "--config", "run/recipe.yaml", "--output_dir", "run", "--resume"),
    ))  # fmt: skip
    what, expect = SPOIL[draw.choice(KINDS)](draw, checkpoint, words)
    export = words[0] == "export"
    anyway = () if export else ("run/logs", "run/.lock", "run.lock")
    reference = same(place, words, [f"{'out' if export else 'run/adapter'}/{name}" for name in TENSORS])
    passed_over = what.startswith("state without") or " is " in what
    why = "" if expect is not Expect.EITHER else PASSED_OVER if passed_over else BETWEEN
    return Case(f"{words[0]} {what}", words, expect, ("out",) if export else ("run",), anyway, (), reference, why)


def marker(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """A field of the marker that cannot be."""
    path = checkpoint / "COMPLETE"
    if draw.random() < 0.3:
        what, expect = change_file(draw, path, FORM)
        return f"marker: {what}", expect
    content = json.loads(path.read_text())
    key = draw.choice(list(INVALID_MARKER))
    value = draw.choice(INVALID_MARKER[key])
    path.write_text(written(changed(content, (key,), value)))
    other = value == "nope" and words[0] == "export"  # whoever wrote it, its tensors are read
    return f"marker: {key} is {shown(value)}", Expect.TAKEN if other else Expect.REFUSED


def marker_text(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """A marker that a disk has spoilt."""
    path = checkpoint / "COMPLETE"
    what, expect = damage_file(draw, path, FORM)
    return f"marker: {what}", expect


def state(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """A state that a disk has spoilt."""
    path = checkpoint / "state.ckpt"
    before = path.read_bytes()
    content, what = damaged(draw, before)
    path.write_bytes(content)
    if content == before:
        return f"state: {what}", Expect.TAKEN
    return f"state: {what}", Expect.EITHER if members(content) == members(before) else Expect.REFUSED


def members(content: bytes) -> dict[str, bytes] | None:
    """What an archive holds, each member checked by its sum; None where it is none or broken."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, OSError, zlib.error):
        return None


def pickled(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """A state whose pickle runs something, alone or inside of torch's archive."""
    path = checkpoint / "state.ckpt"
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


def tensors(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """Tensors or other parts of the state that do not belong there."""
    path = checkpoint / "state.ckpt"
    content = torch.load(path, weights_only=True)
    trained = content["state_dict"]
    name = draw.choice(sorted(trained))
    kind = draw.choice(("nan", "integer", "gone", "more", "shape", "no tensors", "part gone", "part odd"))
    if kind == "nan":
        trained[name] = torch.full_like(trained[name], draw.choice((NAN, INFINITY)))
    elif kind == "integer":
        trained[name] = trained[name].to(torch.int64)
    elif kind == "gone":
        del trained[name]
    elif kind == "more":
        trained[f"{name}.more"] = torch.zeros(3)
    elif kind == "shape":
        trained[name] = torch.zeros(1, 2, 3)
    elif kind == "no tensors":
        content["state_dict"] = draw.choice(([], None, "x", {}, {name: "x"}, 5))
    elif kind == "part gone":
        part = draw.choice(sorted(content))
        del content[part]
        torch.save(content, path)
        return f"state without {part}", _part(part, words)
    else:
        part = draw.choice(sorted(set(content) - {"state_dict"}))
        content[part] = draw.choice((None, 5, "x", [], {}, [None]))
        torch.save(content, path)
        return f"state: {part} is {content[part]!r}", _part(part, words)
    torch.save(content, path)
    return f"state: {name} {kind}", Expect.REFUSED


def _part(part: str, words: Way) -> Expect:
    """Of a part that is gone or odd: an export reads the tensors alone."""
    if part == "state_dict":
        return Expect.REFUSED
    return Expect.TAKEN if words[0] == "export" else Expect.EITHER


def other_file(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """No file where one belongs."""
    name = draw.choice(("COMPLETE", "state.ckpt", "../../recipe.yaml"))
    return f"{name}: {no_file(draw, checkpoint / name)}", Expect.REFUSED


def recipe(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """The recipe beside it, spoilt."""
    what, expect = damage_file(draw, checkpoint.parent.parent / "recipe.yaml", OF_RECIPE, parsed_yaml)
    return f"recipe: {what}", expect


def names(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """Folders beside the checkpoint that have its kind of name; one that is newer and broken is not passed over."""
    odd = ("step-x", "step-", "step-99999999999999999999", "step--1", "step-2.partial", "step-1e3", "step-٣", "step-2")
    other = checkpoint.with_name(name := draw.choice(odd))
    other.mkdir()
    marked = draw.random() < 0.5
    if marked:
        (other / "COMPLETE").write_text(draw.choice(("", "{}", "null")))
    later = name in ("step-2", "step-٣", "step-99999999999999999999")
    newer = marked and later and words[1] != "run/checkpoints/step-1"
    return f"beside it: {name}", Expect.REFUSED if newer else Expect.TAKEN


def nothing(draw: random.Random, checkpoint: Path, words: Way) -> Spoilt:
    """A whole run."""
    return "a whole run", Expect.TAKEN


SPOIL = {
    "marker": marker, "marker text": marker_text, "state": state, "pickle": pickled, "tensors": tensors,
    "file": other_file, "recipe": recipe, "names": names, "control": nothing,
}  # fmt: skip
KINDS = (*SPOIL, "marker", "state", "state")

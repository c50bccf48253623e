"""Run folders: markers of checkpoints, their state, the recipe beside them."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import Case, Expect, Place
from tests.hostile.tensor_files import Touch, canary_pickle
from tests.hostile.values import HUGE, INFINITY, NAN, changed, damaged, mutated, no_file, shown, written

INVALID_MARKER: dict[str, tuple[Any, ...]] = {
    "step": ("x", None, [], {}, NAN),
    "world_size": ("x", None, [], {}),
    "strategy": (5, None, [], {}, "nope"),
    "trained": (5, "x", None, [], {}, {"a": "b"}, {"a": [HUGE]}, {"a": [-1]}),
    "schema_version": ("x", None, [], 99, {}, NAN, INFINITY, HUGE),
}


def make(draw: random.Random, place: Place) -> Case:
    """A run with something wrong in it, to go on with or to export."""
    run = place.copy("stopped", "run")
    checkpoint = run / "checkpoints/step-1"
    kind = draw.choice(
        (
            "marker",
            "marker",
            "marker text",
            "state",
            "state",
            "state",
            "pickle",
            "tensors",
            "file",
            "recipe",
            "names",
            "control",
        )
    )
    what, expect = SPOIL[kind](draw, checkpoint)
    words = draw.choice((
        ["export", "run", "out"],
        ["export", "run", "out"],
        ["export", "run/checkpoints/step-1", "out"],
        ["fit", "--config", "run/recipe.yaml", "--output_dir", "run", "--resume"],
    ))  # fmt: skip
    writes = ("out",) if words[0] == "export" else ("run",)
    if words[0] == "export" and what.startswith(("marker: strategy", "marker: world_size")):
        expect = Expect.EITHER  # whoever wrote it, its tensors are read
    if expect is Expect.REFUSED and what.startswith("step") and words[1] == "run/checkpoints/step-1":
        expect = Expect.EITHER
    anyway = () if words[0] == "export" else ("run/logs", "run/.lock", "run.lock")
    return Case(f"{words[0]} {what}", words, expect, writes, writes_anyway=anyway)


def marker(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """A field of the marker that cannot be."""
    path = checkpoint / "COMPLETE"
    content = json.loads(path.read_text())
    if draw.random() < 0.3:
        content, what = mutated(draw, content)
        path.write_text(written(content), errors="surrogatepass")
        return f"marker: {what}", Expect.EITHER
    key = draw.choice(list(INVALID_MARKER))
    value = draw.choice(INVALID_MARKER[key])
    path.write_text(written(changed(content, (key,), value)))
    return f"marker: {key} is {shown(value)}", Expect.REFUSED


def marker_text(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """A marker that a disk has spoilt."""
    path = checkpoint / "COMPLETE"
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    return f"marker: {what}", Expect.EITHER


def state(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """A state that a disk has spoilt."""
    path = checkpoint / "state.ckpt"
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    known = what.startswith(("cut", "next to nothing", "UTF-16"))
    return f"state: {what}", Expect.REFUSED if known else Expect.EITHER


def pickled(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
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


def tensors(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
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
        return f"state without {part}", Expect.EITHER
    else:
        part = draw.choice(sorted(set(content) - {"state_dict"}))
        content[part] = draw.choice((None, 5, "x", [], {}, [None]))
        torch.save(content, path)
        return f"state: {part} is {content[part]!r}", Expect.EITHER
    torch.save(content, path)
    return f"state: {name} {kind}", Expect.REFUSED


def other_file(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """No file where one belongs."""
    name = draw.choice(("COMPLETE", "state.ckpt", "../../recipe.yaml"))
    return f"{name}: {no_file(draw, checkpoint / name)}", Expect.REFUSED


def recipe(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """The recipe beside it, spoilt."""
    path = checkpoint.parent.parent / "recipe.yaml"
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    return f"recipe: {what}", Expect.EITHER


def names(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """Folders beside the checkpoint that have its kind of name."""
    name = draw.choice(
        ("step-x", "step-", "step-99999999999999999999", "step--1", "step-2.partial", "step-1e3", "step-٣", "step-2")
    )
    other = checkpoint.with_name(name)
    other.mkdir()
    if draw.random() < 0.5:
        (other / "COMPLETE").write_text(draw.choice(("", "{}", "null")))
    return f"beside it: {name}", Expect.EITHER


def nothing(draw: random.Random, checkpoint: Path) -> tuple[str, Expect]:
    """A whole run."""
    return "a whole run", Expect.TAKEN


SPOIL = {
    "marker": marker, "marker text": marker_text, "state": state, "pickle": pickled, "tensors": tensors,
    "file": other_file,
    "recipe": recipe, "names": names, "control": nothing,
}  # fmt: skip

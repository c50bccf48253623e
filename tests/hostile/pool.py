"""Valid originals of everything that the package reads, made once by the package itself."""

import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from subtoken_train.resources import recipe_text
from tests.hostile.case import LM, VLM
from tests.support.paper_folders import write_benchmarks
from tests.support.places import recipe

REPOSITORY = Path(__file__).resolve().parents[2]
QUESTIONS = 4


def make_pool(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    command("data", "scenes", "--out", folder / "scenes", "--train", "8", "--dev", str(QUESTIONS), "--test", "4")
    (folder / "images").mkdir()
    picture = Image.effect_noise((48, 32), 80).convert("RGB")
    for suffix in ("png", "jpg", "gif", "bmp", "tiff", "webp", "ppm", "ico"):
        picture.save(folder / f"images/a.{suffix}", {"jpg": "JPEG"}.get(suffix, suffix.upper()))
    _recipes(folder)
    for name in (VLM, LM, f"{VLM}_anchor"):
        _adapter(REPOSITORY / "checkpoints/adapters" / name, folder / "adapters" / name)
    for name in ("tiny-llama", "tiny-llava"):
        shutil.copytree(REPOSITORY / "checkpoints" / name, folder / "backbones" / name)
    few = ("--option", "samples=4", "--option", "context_length=300")
    for method in ("prefixkv", "duo_attention"):
        out = folder / f"calibrations/{method}.json"
        command("calibrate", method, "--backbone", folder / "backbones/tiny-llama", "--out", out, *few)
    for name in CACHES:
        model = asked_model(folder, name)
        model.ask(Image.new("RGB", (48, 32)) if name == "vlm" else "Code polya quiet dragon. " * 9, [])
        model.cache.save(folder / f"caches/{name}.safetensors")
    for layout in ("own", "parquet"):
        write_benchmarks(folder / "benchmarks" / layout, own=layout == "own")
    _own_data(folder)
    _run(folder)
    _results(folder)
    return folder


def command(*words: str | Path) -> str:
    from subtoken_train.cli.main import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    assert code == 0, err.getvalue()
    return out.getvalue()


def _recipes(folder: Path) -> None:
    for name in (VLM, LM):
        content = yaml.safe_load(recipe_text(recipe(name)))
        backbone = content["model"]["backbone"]
        backbone["path"] = str(REPOSITORY / backbone["path"])
        content["output_dir"] = "run"
        content["data"]["batch_size"] = 2
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        content["trainer"] |= {"max_steps": 1, "log_every_n_steps": 1, **quiet}
        if name == VLM:
            content["data"]["train_file"] = str(folder / "scenes/train.json")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def _adapter(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    path = target / "subtoken_config.json"
    config = json.loads(path.read_text())
    for band in ("backbone", "identity"):
        config[band]["path"] = str(REPOSITORY / config[band]["path"])
    path.write_text(json.dumps(config, indent=2))
    peft = json.loads((target / "adapter_config.json").read_text())
    peft["base_model_name_or_path"] = config["backbone"]["path"]
    (target / "adapter_config.json").write_text(json.dumps(peft, indent=2))


def _own_data(folder: Path) -> None:
    """Records by lines, folders for ``init`` of three kinds, prompts with a picture and without one."""
    rows = json.loads((folder / "scenes/train.json").read_text())
    (folder / "scenes/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names, picture = [f"images/{number}.png" for number in range(4)], (folder / "images/a.png").read_bytes()
    asked = [[{"type": "image"}, {"type": "text", "text": f"list {number} ."}] for number in range(4)]
    messages = [[{"role": "user", "content": each}, {"role": "assistant", "content": "none"}] for each in asked]
    pairs = zip(names, messages, strict=True)
    tables = {
        "csv": "\n".join(["image,question,answer", *(f'"{name}","list {i} .","none"' for i, name in enumerate(names))]),
        "json": json.dumps([{"images": [name], "messages": said} for name, said in pairs]),
        "txt": "\n\n".join(f"paragraph {i} says {'so ' * 60}" for i in range(60)),
    }
    for suffix, content in tables.items():
        mine = folder / f"own_{suffix}"
        (mine / "images").mkdir(parents=True)
        (mine / f"q.{suffix}").write_text(content + "\n" if suffix == "csv" else content)
        for number, name in enumerate(names if suffix != "txt" else ()):
            (mine / name).write_bytes(picture + bytes([number]))
    for kind, more in (("lm", {}), ("vlm", {"image": "a.png"})):
        prompts = [{"id": name, "prompt": f"what is at {name} ?", **more} for name in "abc"]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


CACHES = ("lm", "vlm")


def asked_model(folder: Path, name: str) -> Any:
    from subtoken_train import SubTokenModel

    if name == "vlm":
        return SubTokenModel.from_pretrained(folder / "adapters" / VLM)
    settings = {"eviction": "ada(knorm)", "eviction_keep": 0.5, "kv_dtype": "int8"}
    return SubTokenModel.from_pretrained(folder / "backbones/tiny-llama", **settings)


def _run(folder: Path) -> None:
    command("fit", "--config", folder / f"{VLM}.yaml", "--output_dir", folder / "run")
    shutil.copytree(folder / "run", folder / "stopped")
    shutil.rmtree(folder / "stopped/adapter")
    data, out = folder / "scenes/dev.json", folder / "scores.json"
    command("evaluate", "--adapter", folder / "run/adapter", "--data", data, "--out", out)


def _results(folder: Path) -> None:
    backbone = folder / "llava-1.5-7b-hf"  # a name of the paper's, so that its rows find the arms
    backbone.symlink_to(folder / "backbones/tiny-llava")
    grid: dict[str, Any] = {
        "out": "results", "batch_size": 4, "limit": QUESTIONS, "anchors": "none",
        "tasks": [{"name": name, "source": str(folder / "scenes")} for name in ("scenes_pope", "scenes_gqa")],
        "arms": [{"adapter": [str(folder / "adapters" / name) for name in (VLM, f"{VLM}_anchor")],
        "backbone": str(backbone)}],
    }  # fmt: skip
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    command("evaluate", "--config", folder / "grid.yaml", "--out", folder / "results")
    small = {**grid, "limit": 1, "tasks": grid["tasks"][:1]}
    small["arms"] = [{**arm, "adapter": arm["adapter"][:1]} for arm in grid["arms"]]
    (folder / "small_grid.yaml").write_text(yaml.safe_dump(small, sort_keys=False))

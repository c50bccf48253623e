"""The adapter folder: found, read strictly, told by its content, loadable with plain peft; what stage 2 starts from."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from subtoken_train.artifact import folder as folders
from subtoken_train.artifact.hub import adapter_folder, find_adapter
from subtoken_train.engine.build import Stage2Config
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import build_reducer
from subtoken_train.resources import resource
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import made_adapter, make_batch, save_backbone
from tests.support.refusals import refuses
from tests.support.run_folders import put
from tests.support.sampling import sampled
from tests.support.text_families import text_family

ADAPTER = resource("checkpoints/adapters/tiny_fastv25_s16k4")
LORA, ROUTER = "adapter_model.safetensors", "router.safetensors"
GATED = RoutingConfig(num_groups=64, kept_groups=16, budget="ranked", value_gate=True, score_prior="output_norm")
ARMS = {
    "routed": (RoutingConfig(num_groups=16, kept_groups=4), None),
    "gated": (GATED, None),
    "token-only": (None, None),
    "router-free": (RoutingConfig(selector="value_norm", num_groups=8, kept_groups=2), None),
    "two stages": (RoutingConfig(), Stage2Config("runs/first/adapter", LoraSettings(rank=2, alpha=4, dropout=0.0))),
    "frozen lora": (RoutingConfig(), Stage2Config("runs/first/adapter")),
}


@pytest.fixture
def write(tmp_path, tiny_family):
    """Writes an arm's folder; returns it and the compressed backbone with random adapters."""
    saved = save_backbone(tiny_family, tmp_path / "backbone")

    def made(name: str):
        routing, stage2 = ARMS[name]
        training = {"name": "second", "steps": 5, "stage1": {"name": "first", "steps": 7}}
        lora, reducer = LoraSettings(rank=4, dropout=0.1), build_reducer("fastv", keep_ratio=0.25)
        return made_adapter(tmp_path / "adapter", saved, reducer, routing, lora, stage2, 0.2, **training)

    return made


@sampled("name", ARMS, every=3)
@torch.no_grad()
def test_a_round_trip_gives_the_same_logits_and_files(write, name):
    folder, backbone = write(name)
    config, reloaded, peft_model = folders.read_adapter(folder)
    assert (config.routing, config.stage2) == ARMS[name]
    assert config.lora == LoraSettings(rank=4, dropout=0.1)
    batch = make_batch([(1, 8), (0, 5)])
    assert torch.equal(reloaded.logits(reloaded.run(batch)), backbone.eval().logits(backbone.run(batch)))
    two = name == "two stages"
    assert list(peft_model.peft_config) == (["default", "output"] if two else ["default"])
    assert (folder / "output").exists() == two
    assert (folder / ROUTER).exists() == (name not in ("token-only", "router-free"))
    if two:
        trained = {name for name, parameter in reloaded.named_parameters() if parameter.requires_grad}
        assert all(".output." in name or name.startswith("bank.") for name in trained)
        assert all("o_proj" in name for name in load_file(folder / "output" / LORA))
        assert all("o_proj" not in name for name in load_file(folder / LORA))
    if name == "gated":
        betas = [gate.beta.item() for gate in reloaded.bank.gates]
        assert betas == [gate.beta.item() for gate in backbone.bank.gates]
        assert 0 not in betas


@torch.no_grad()
@pytest.mark.parametrize("name", ["routed", "two stages"])
def test_plain_peft_loads_either_lora_or_both(write, name):
    """As the model card says; the backbone without routers, so values are whole."""
    folder, backbone = write(name)
    base = AutoModelForImageTextToText.from_pretrained(backbone.family.model.config._name_or_path)
    model = PeftModel.from_pretrained(base, folder)
    assert model.peft_config["default"].r == 4
    if name == "two stages":
        model.load_adapter(str(folder), "output", subfolder="output")
        model.base_model.set_adapter(["default", "output"])
    ours = {name: tensor for name, tensor in backbone.family.model.state_dict().items() if "lora_" in name}
    theirs = {name: tensor for name, tensor in base.state_dict().items() if "lora_" in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    batch = make_batch([(0, 5)])
    shown = model(input_ids=batch.input_ids_BN).logits  # no image: nothing is routed
    assert torch.allclose(shown, backbone.eval().logits(backbone.run(batch)), atol=1e-5)
    if name == "two stages":
        model.base_model.set_adapter(["default"])
        assert not torch.allclose(model(input_ids=batch.input_ids_BN).logits, shown, atol=1e-2)


def test_the_card_names_the_stages(write):
    card = (write("frozen lora")[0] / "README.md").read_text()
    assert "first the q/v LoRA, token-only (name first, steps 7); then, with it frozen, the routers." in card
    assert "o_proj" not in card
    shutil.rmtree("adapter")
    card = (write("two stages")[0] / "README.md").read_text()
    loras = "| LoRA on q and v | rank 4, alpha 32, dropout 0.1 |\n| LoRA on o_proj | rank 2, alpha 4, dropout 0.0 |"
    for words in (loras, "the routers and a LoRA on `o_proj`.", 'set_adapter(["default", "output"])'):
        assert words in card
    assert "| training | name second, steps 5 |" in card


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


REFUSED = {
    "dropped": ("routed", lambda f: edit(f / LORA, lambda t: t.pop(sorted(t)[0])), r"1 tensors \[.*\] are missing"),
    "stranger": (
        "routed",
        lambda f: edit(f / ROUTER, lambda t: t.update(stranger=torch.ones(1))),
        r"1 tensors \['stranger'\] are not",
    ),
    "empty": ("routed", lambda f: edit(f / ROUTER, lambda t: t.update({sorted(t)[0]: torch.empty(0)})), "has shape"),
    "gate": (
        "gated",
        lambda f: edit(f / ROUTER, lambda t: t.pop("gates.2.beta")),
        r"1 tensors \['gates.2.beta'\] are m",
    ),
    "stray": ("token-only", lambda f: save_file({"a": torch.ones(1)}, f / ROUTER), "disagree"),
    "output": (
        "two stages",
        lambda f: edit(f / "output" / LORA, lambda t: t.update(stranger=torch.ones(1))),
        r"output/adapter_model.safetensors .*1 tensors \['stranger'\] are not expected",
    ),
    "no output": ("two stages", lambda f: shutil.rmtree(f / "output"), "output/adapter_config.json is missing"),
    "stray output": (
        "two stages",
        lambda f: put(f, "subtoken_config.json", "stage2.output_lora", None),
        r"holds output/, but its subtoken_config.json names no output LoRA",
    ),
}


@sampled("name", REFUSED, every=2)
def test_files_are_exact(write, name):
    arm, spoil, words = REFUSED[name]
    folder, _ = write(arm)
    spoil(folder)
    refuses(words, folders.read_adapter, folder)


@sampled("folder", sorted(ADAPTER.parent.iterdir()), every=3, ids=lambda path: path.name)
def test_shipped_folders_are_read_whatever_their_schema(folder):
    assert json.loads((folder / "subtoken_config.json").read_text())["schema_version"] <= folders.SCHEMA_VERSION
    config, backbone, _ = folders.read_adapter(folder)
    assert config.stage2 is None
    assert (backbone.bank is None) == (config.routing is None)


@pytest.mark.parametrize("name", [LORA, ROUTER, "subtoken_config.json", "output", "README.md"])
def test_the_digest_is_of_settings_and_tensors_wherever_they_lie(tmp_path, name):
    copy = shutil.copytree(ADAPTER, tmp_path / "moved")
    if name == "output":
        (copy / name).mkdir()
        shutil.copy(copy / LORA, copy / name)
    else:
        (copy / name).write_bytes((copy / name).read_bytes()[:-1] + b"\1")
    assert (folders.adapter_digest(copy) == folders.adapter_digest(ADAPTER)) == (name == "README.md")


def test_a_model_is_told_by_every_column_of_its_rows_and_by_what_no_weight_shows():
    family = text_family("mistral_window", vocab_size=512)
    backbone = CompressedBackbone(family, build_reducer("none"))
    before = folders.model_identity(backbone)
    table = family.model.get_input_embeddings().weight
    assert table.numel() // folders.SAMPLED % table.shape[1] == 0, "as many rows as would hide all columns but one"
    with torch.no_grad():
        table[:, 1:] += 1
        assert folders.model_identity(backbone).weights != before.weights
        table[:, 1:] -= 1
    family.model.config.rms_norm_eps *= 2
    assert folders.model_identity(backbone).weights != before.weights


def test_a_run_stands_for_its_adapter_and_a_backbone_for_itself(tmp_path):
    """The run is a finished one's folder, as ``fit`` leaves it."""
    run = tmp_path / "mine"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    shutil.copytree(ADAPTER, run / "adapter")
    assert adapter_folder(run) == adapter_folder(run / "adapter") == run / "adapter"
    (run / "config.json").write_text("{}")
    assert find_adapter(run) is None
    shutil.rmtree(run / "adapter")
    refuses(r"mine is a run without a finished adapter; 'subtoken-train export ", adapter_folder, run)
    refuses(r"revision 'v1' is for Hub ids, and .* is a folder", find_adapter, run, "v1")


STAGE1 = LoraSettings(rank=4, alpha=8, dropout=0.1)
FASTV = build_reducer("fastv", keep_ratio=0.25)
ROUTING = RoutingConfig(num_groups=16, kept_groups=4)


@pytest.fixture
def source(tmp_path, tiny_family):
    return BackboneConfig(path=str(save_backbone(tiny_family, tmp_path / "backbone")))


@pytest.fixture
def adapter(tmp_path, source):
    return made_adapter(tmp_path / "adapter", source.path, FASTV, None, STAGE1)[0]


@sampled("layout", [False, True], every=2)
def test_the_right_one(adapter, source, layout):
    """Its settings are read, and its tensors fit a loaded model as well as one on the meta device."""
    first = folders.read_first_stage(adapter, FASTV, ROUTING, None)
    assert (first.config.lora, first.reading) == (STAGE1, folders.SAME_TOKENS)
    assert folders.read_first_stage(adapter, FASTV, ROUTING, STAGE1) == first
    family = layout_family(source) if layout else load_family(source)
    tensors = first.tensors(family, source, add_lora(family, STAGE1))
    on_disk = load_file(adapter / "adapter_model.safetensors")
    assert tensors.keys() == on_disk.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in on_disk.items())


def anchor(keep_ratio, name="fastv", **options):
    return build_reducer(name, keep_ratio, round_up=True, **options)


FEWER_GROUPS = RoutingConfig(num_groups=8, kept_groups=4)
READINGS = [
    (build_reducer("none"), ROUTING, folders.LORA_ONLY),
    (build_reducer("none"), None, folders.LORA_ONLY),
    (build_reducer("fastv", 1.0), ROUTING, folders.LORA_ONLY),
    (anchor(0.15625), ROUTING, folders.MATCHED_ANCHOR),
    (anchor(0.15625, matches=0.25), ROUTING, folders.MATCHED_ANCHOR),
    (anchor(0.15625, matches=0.2), ROUTING, None),  # of another arm
    (anchor(0.1568), ROUTING, folders.MATCHED_ANCHOR),  # rounded up to whole tokens
    (anchor(0.1875), FEWER_GROUPS, folders.MATCHED_ANCHOR),
    (anchor(0.15625, stage="decoder"), ROUTING, None),
    (anchor(0.15625, "visionzip"), ROUTING, None),
    (anchor(0.15624), ROUTING, None),  # fewer bytes than stage 2
    (anchor(0.18), ROUTING, None),
    (anchor(0.15625), FEWER_GROUPS, None),
    (anchor(0.15625), None, None),
    (build_reducer("fastv", 0.15625), ROUTING, None),  # not rounded up: an arm of its own
]


def test_the_other_readings_are_named(adapter):
    """LoRA without a reducer, and the anchor with stage 2's bytes, are taken by name; all else is refused."""
    record = json.loads((adapter / "subtoken_config.json").read_text())
    for trained, routing, reading in READINGS:
        (adapter / "subtoken_config.json").write_text(json.dumps({**record, "reducer": asdict(trained)}))
        if reading is not None:
            assert folders.read_first_stage(adapter, FASTV, routing, STAGE1).reading == reading
            continue
        said = refuses("was trained with reducer", folders.read_first_stage, adapter, FASTV, routing, STAGE1)
        said = said.replace(str(adapter), "")
        assert said.endswith("; stage 1 has the recipe's reducer, or none (lora_only), or is the matched anchor")
        assert len(said) < 300


def test_what_stage_2_cannot_start_from(adapter, source, tmp_path):
    with pytest.raises(ValueError, match=r"lora.rank 4 \(the recipe has 16\), lora.alpha 8 \(the recipe has 32\)"):
        folders.read_first_stage(adapter, FASTV, ROUTING, LoraSettings(dropout=0.1))
    routing = RoutingConfig("value_norm", num_groups=8, kept_groups=2)
    folder = made_adapter(tmp_path / "routed", source.path, FASTV, routing, STAGE1)[0]
    refuses(r"routed already has routers \(S8K2 value_norm\)", folders.read_first_stage, folder, FASTV, ROUTING, None)
    with pytest.raises(ValueError, match=r"stage2.adapter .*absent does not exist; train the token-only recipe"):
        folders.read_first_stage(tmp_path / "absent", FASTV, ROUTING, None)
    refuses("not an adapter folder", folders.read_first_stage, tmp_path / "backbone", FASTV, ROUTING, None)


def test_another_backbone(adapter, source, tmp_path):
    config = json.loads((tmp_path / "backbone" / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    elsewhere = BackboneConfig(path=str(other))
    family = layout_family(elsewhere)
    with pytest.raises(ValueError, match=r"was trained on .*backbone' .*but the backbone is .*other"):
        folders.read_first_stage(adapter, FASTV, ROUTING, None).tensors(family, elsewhere, add_lora(family, STAGE1))

"""Short fits of random tiny models that see or read: what trains moves, nothing else does, folders read back."""

import json
import re
from functools import partial

import pytest

from subtoken_train import SubTokenModel
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.english import documents
from subtoken_train.forks import undoing
from tests.support.chats import CHATML, byte_level
from tests.support.commands import refused
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.run_folders import logged
from tests.support.sampling import sampled
from tests.support.text_families import DECODERS, NAMED
from tests.support.tiny import noise, tiny_families
from tests.support.training_memory import RECALL, ROUTING, save_language_model, text_recipe

VISIONZIP, DECODER = "--model.reducer.name=visionzip", "--model.reducer.stage=decoder"
MLP = "--model.routing.selector=mlp"
IN_TOWER_BF16 = [VISIONZIP, MLP, "--model.gradient_checkpointing=true", "--trainer.precision=bf16-mixed"]
FITS = [
    ("qwen2_5_vl", ["--model.reducer.name=fastv"]), ("qwen2_5_vl", [DECODER, MLP]),
    ("internvl", ["--model.reducer.name=fastv"]), ("qwen2_5_vl", [VISIONZIP]), ("qwen2_5_vl", IN_TOWER_BF16),
    ("llava_onevision", IN_TOWER_BF16), ("qwen3_vl", [VISIONZIP]), ("smolvlm", IN_TOWER_BF16),
    ("mistral3", IN_TOWER_BF16), ("glm4v", IN_TOWER_BF16), ("glm4v_moe", [DECODER]),
    ("qwen3_vl_moe", ["--model.reducer.name=fastv"]),
]  # fmt: skip
CAPPED = {"internvl": ("most_tiles", 2), "smolvlm": ("longest", 64), "mistral3": ("longest", 32)}


@pytest.fixture
def seeing_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps of a family on the same scenes."""

    def argv(kind: str, *extra: str) -> list[str]:
        if kind == "llava":
            return tiny_run("--trainer.max_steps=3", "--model.optimizer.warmup_steps=0", *extra)
        path = save_backbone(tiny_families()[kind].build(), tmp_path / "seeing")
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={path}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@sampled(
    ("kind", "extra", "cap"),
    [
        ("qwen2_5_vl", [VISIONZIP, "--model.backbone.image_aspect_ratio=pad"], 5000), ("qwen2_vl", [DECODER], None),
        ("qwen3_vl", [DECODER], None), ("internvl", [VISIONZIP], 3000), ("llava_onevision", [VISIONZIP], None),
        ("smolvlm", [DECODER], 5000), ("mistral3", [DECODER], 1100), ("glm4v", ["--model.reducer.name=fastv"], 7000),
        ("glm4v_moe", [VISIONZIP], None),
    ],
    every=3,
)  # fmt: skip
def test_the_adapter_folder_reads_back(seeing_run, tmp_path, kind, extra, cap):
    assert main(seeing_run(kind, *extra, *([] if cap is None else [f"--model.backbone.max_pixels={cap}"]))) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert (config.identity.model_type, config.backbone.max_pixels) == (kind, cap)
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)
    if kind == "qwen2_5_vl":
        assert backbone.family.max_pixels == cap
        assert config.backbone.image_aspect_ratio == "pad"
        assert backbone.family.pads
        assert backbone.family.visual_tokens((20, 60)) == backbone.family.visual_tokens((60, 60))
    elif kind in CAPPED:
        assert getattr(backbone.family, CAPPED[kind][0]) == CAPPED[kind][1]


def test_a_cap_of_pixels_is_refused_in_words(seeing_run, capsys):
    words = seeing_run("llava_onevision", "--model.backbone.max_pixels=5000")
    assert "max_pixels=5000: llava_onevision scales images to sizes of its own" in refused(capsys, *words)


@sampled("kind, name", [("qwen2_vl", "evs"), ("llava_onevision", "vidcom2"), ("qwen3_vl", "evs")], every=2)
def test_reducers_of_videos_train_on_videos_and_refuse_scenes(seeing_run, tmp_path, capsys, kind, name):
    asked = seeing_run(kind, f"--model.reducer.name={name}", "--model.reducer.keep_ratio=0.6", "--data.val_file=null")
    assert "shows an image, and its reducer chooses among the frames of videos" in refused(capsys, *asked)
    turns = [{"from": "human", "value": "<video>\nwhere ?"}, {"from": "gpt", "value": "left"}]
    for number in range(4):
        (tmp_path / f"v{number}").mkdir()
        for frame in range(3):
            noise(40, 60, seed=4 * number + frame).save(tmp_path / f"v{number}" / f"{frame}.png")
    rows = [{"id": str(number), "video": f"v{number}", "conversations": turns} for number in range(4)]
    (tmp_path / "videos.json").write_text(json.dumps(rows))
    data = [f"--data.train_file={tmp_path / 'videos.json'}", f"--data.image_folder={tmp_path}"]
    assert moved_by_fit(RecipeCLI([*asked[1:], "--data.batch_size=2", *data]))


RANKED = "--model.routing.budget=ranked"
KINDS = {
    "visionzip-linear": ["--model.reducer.name=visionzip"],
    "visionzip-mlp": ["--model.reducer.name=visionzip", "--model.routing.selector=mlp"],
    "visionzip-anchor": ["--model.reducer.name=visionzip", "--model.routing=null"],
    "fastervlm-linear": ["--model.reducer.name=fastervlm"],
    "prumerge-linear": ["--model.reducer.name=prumerge", "--model.reducer.plus=true", "--model.reducer.adaptive=true"],
    "sparsevlm-ranked": ["--model.reducer.name=sparsevlm", "--model.reducer.keep_ratio=0.6", RANKED],
    "dart-linear": ["--model.reducer.name=dart"],
    "pyramiddrop-linear": ["--model.reducer.name=pyramiddrop", "--model.reducer.keep_ratio=0.6"],
    "divprune-ranked": ["--model.reducer.name=divprune", "--model.routing.budget=ranked"],
    "cdpruner-linear": ["--model.reducer.name=cdpruner"],
    "dart-decoder": ["--model.reducer.name=dart", "--model.reducer.stage=decoder"],
    "vispruner-anchor": ["--model.reducer.name=vispruner", "--model.routing=null"],
    "fastv-decoder": ["--model.reducer.stage=decoder"],
    "fastv-query": ["--model.routing.query_conditioned=true"],
    "fastv-bilinear": ["--model.routing.selector=bilinear", "--model.routing.features=[norm, attention]"],
    "fastv-global-gated": ["--model.routing.budget=global", "--model.routing.value_gate=true"],
    "fastv-ranked-prior": ["--model.routing.budget=ranked", "--model.routing.score_prior=value_norm"],
    "fastv-output-prior-mlp": ["--model.routing.score_prior=output_norm", "--model.routing.selector=mlp"],
    "fastv-mean": ["--model.routing.fill=mean", "--model.routing.value_gate=true"],
    "fastv-mean-norm": ["--model.routing.fill=mean", "--model.routing.selector=value_norm"],
    "gated-anchor": ["--model.routing.kept_groups=16", "--model.routing.value_gate=true"],
    "output-norm": ["--model.routing.selector=output_norm"],
}

CELLS = {f"{kind}-{number}": (kind, extra) for number, (kind, extra) in enumerate(FITS)}
CELLS |= {name: ("llava", extra) for name, extra in KINDS.items()}


@sampled(("kind", "extra"), CELLS.values(), every=6, ids=CELLS)
def test_three_steps_move_exactly_the_trainables(seeing_run, kind, extra):
    cli = RecipeCLI(seeing_run(kind, *extra)[1:])
    moved = moved_by_fit(cli)
    layers = cli.model.family.shape.num_layers
    assert len([name for name in moved if "lora_" in name]) == layers * 2 * 2  # on q and v of every layer


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Folders of random tiny language models with the embedded one's tokenizer."""
    folder = tmp_path_factory.mktemp("language-models")
    for name in (*NAMED, *DECODERS):
        save_language_model(folder / name, name)
    save_language_model(folder / "chatml", tokenizer=byte_level(CHATML))
    return folder


@pytest.fixture
def recipe(backbones, tmp_path):
    """Writes a recipe and returns the arguments of ``fit``."""
    return lambda kind="llama", routing=ROUTING, data=RECALL, **bands: text_recipe(
        tmp_path / "recipe.yaml", backbones / kind, data, routing=routing, **bands
    )


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A small corpus file, with its Arrow cache in the test's own folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents("train")[:60]))
    lengths = {"block_length": 96, "context_length": 64, "prefix_tokens": 8, "batch_size": 4}
    return {"train": {"name": str(path)}, **lengths}


@sampled("kind", ["llama", "qwen2", "qwen3", "llama31"], every=3)
@sampled(
    ("selector", "extra"),
    [("linear", []), ("mlp", ["--trainer.precision=bf16-mixed", "--model.gradient_checkpointing=true"])],
    every=4,
)
def test_three_steps_move_exactly_the_trainables_of_texts(recipe, kind, selector, extra):
    moved = moved_by_fit(RecipeCLI([*recipe(kind, {**ROUTING, "selector": selector}), *extra]))
    assert sum("lora_" in name for name in moved) == 2 * 2 * 2
    assert any(name.startswith("bank.") for name in moved)


@sampled("kind", ["phi3", "llama", "qwen3", *(kind for kind in DECODERS if kind != "phi3")], every=10)
def test_a_corpus_trains_and_its_adapter_reads_back(recipe, corpus, tmp_path, kind):
    settings = recipe(kind, data=corpus)
    assert main(["check", *settings, "--offline"]) == 0
    assert main(["fit", *settings]) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.identity.model_type.startswith(kind)
    assert (backbone.reducer.page_size, backbone.reducer.window) == (4, 8)
    assert backbone.bank.config.query_conditioned
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge-lora"]) == 0


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """A file of 60 short chats, one of them with a context, and the band of data that names it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    said = [(f"What is {i} ?" if i else "It is three. " * 8 + "\n\nWhat is it ?", "three") for i in range(60)]
    rows = [[{"role": "user", "content": asked}, {"role": "assistant", "content": told}] for asked, told in said]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
    lengths = {"block_length": 256, "context_length": 128, "prefix_tokens": 32, "batch_size": 6}
    return {"train": {"name": str(path), "documents": "conversations"}, **lengths}


def test_sixty_short_chats_train(recipe, chats, tmp_path, capsys):
    argv = recipe("chatml", data=chats)
    assert main(["check", *argv]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tokens of all 60 chats: \d+ shortest, \d+ median, \d+ longest; block_length 256 cuts none", out)
    assert "59 of 60 chats have no context (a first question of 32 tokens or fewer): they are trained whole" in out
    assert main(["preview", *argv, "--count=2"]) == 0
    assert re.findall(r"answer   trained +\d+  (.*)", capsys.readouterr().out) == ["three<|im_end|>"] * 2
    assert main(["fit", *argv, "--trainer.max_steps=20", "--trainer.log_every_n_steps=1"]) == 0
    losses = logged(tmp_path / "run", "train/loss")
    assert max(losses[-4:]) < min(losses[:4])
    assert capsys.readouterr().err.count("59 of 60 chats have no context") == 1
    _, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert backbone.reducer.name == "quest"


def test_a_conversation_that_the_template_refuses_stops_in_words(recipe, backbones, chats, capsys):
    argv, template = recipe("chatml", data=chats), backbones / "chatml/chat_template.jinja"
    said = [("system", "Be short."), ("user", "hi"), ("assistant", "yes")]
    talk = {"id": "b7", "messages": [{"role": role, "content": text} for role, text in said]}
    with open(chats["train"]["name"], "a") as file:
        file.write(f"\n{json.dumps(talk)}")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    with undoing(partial(template.write_text, template.read_text())):
        template.write_text(refuses + CHATML)
        for command in ("check", "fit"):
            assert main([command, *argv]) == 2
            said = capsys.readouterr()
            assert "record 'b7': the tokenizer's chat template cannot be filled: no system here" in said.err
            assert "Traceback" not in said.err


GATES = {"num_groups": 1, "kept_groups": 1, "budget": "delayed", "byte_share": 0.5, "window": 8, "balance_weight": 20.0}


def test_gates_train_and_their_adapter_decodes(recipe, corpus, tmp_path, capsys):
    """The gates alone move; the share of closed ones rises; the adapter evicts by itself, in the prompt and after."""
    frozen = {"optimizer": {"learning_rate": 0.0, "router_learning_rate": 1.0}, "reducer": {"name": "none"}}
    argv = [*recipe(routing=GATES, data=corpus, loss="full_cache", **frozen), "--trainer.max_steps=12"]
    assert main(["check", *argv, "--offline"]) == 0
    assert re.search(r"gates of heads, 50[.0]* ?% of them open in the end, delay 8", capsys.readouterr().out)
    assert main(["fit", *argv, "--trainer.log_every_n_steps=1"]) == 0
    closed = logged(tmp_path / "run", "train/closed")
    assert closed[-1] > closed[0] + 0.1
    model = SubTokenModel.from_pretrained(tmp_path / "run" / "adapter", eviction_every=4)
    ids = model.tokenizer(" ".join(documents("dev")[:2]), return_tensors="pt").input_ids[:, :200]
    model.generate(ids, context_length=180, max_new_tokens=12)
    assert model.last.cache.evictor.threshold.window == 8

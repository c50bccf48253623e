"""Publishing and loading through the real Hub client, against a server on this machine; the model card."""

import re
import shlex

import httpx2
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from subtoken_train.artifact.card import CardColumn, CardSections, Evaluation, Score, model_card
from subtoken_train.artifact.hub import hub_errors
from subtoken_train.datasets.scenes import write_scenes
from tests.support.hub_server import Hub, Session
from tests.support.places import recipe
from tests.support.sampling import sampled

RECIPE = recipe("tiny_fastv25_s16k4")

LOADED = """
import torch
from subtoken_train import SubTokenModel
from subtoken_train.families.load import BackboneConfig
ours = SubTokenModel.from_pretrained({adapter!r}).backbone
model = SubTokenModel.from_pretrained("alice/mine", revision={revision!r}).backbone
theirs = dict(model.named_parameters())
assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.named_parameters())
print(len(theirs))
"""


@pytest.fixture(scope="module")
def hub(vlm_adapter):
    """A Hub that holds the adapter's backbone as ``lab/tiny``."""
    hub = Hub()
    hub.add("lab/tiny", vlm_adapter.parent / "backbone")
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def session(hub, home):
    session = Session(hub.address, home)
    yield session
    session.close()


@pytest.fixture(scope="module")
def pushed(session, vlm_adapter, tmp_path_factory):
    """``alice/mine``, private: the adapter on branch v1."""
    folder = tmp_path_factory.mktemp("pushed") / "out"
    options = ["--private", "--revision", "v1", "--message", "the first one"]
    return folder, session.run("export", vlm_adapter, folder, *to_hub("alice/mine"), *options)


def to_hub(name):
    return ["--backbone", "lab/tiny", "--push-to-hub", name]


def refused(result):
    """The one line of a command that must fail on its input."""
    assert result.code == 2, result
    lines = [line for line in result.err.splitlines() if line.startswith("subtoken-train: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.err
    return lines[0]


def on_disk(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_private_push_to_a_branch(hub, pushed):
    folder, result = pushed
    repo = hub.repos["alice/mine"]
    assert result.code == 0, result.err
    assert f"published: {hub.address}/alice/mine/commit/{repo.branches['v1']}" in result.out
    assert repo.private
    assert repo.messages == ["initial commit", "the first one"]
    assert repo.files("v1") == on_disk(folder)
    assert repo.files("main") == {}


@pytest.mark.slow
def test_loading_by_revision_and_then_offline(hub, session, home, pushed):
    folder, _ = pushed
    program = LOADED.format(adapter=str(folder), revision="v1")
    assert session.run("-c", program).code == 0
    commit = LOADED.format(adapter=str(folder), revision=hub.repos["alice/mine"].branches["v1"])
    assert session.run("-c", commit).code == 0
    hub.requests.clear()
    offline = Session(hub.address, home, offline=True)
    try:
        result = offline.run("-c", program)
        assert result.code == 0, result.err
        unknown = refused(offline.run("-c", program.replace("alice/mine", "alice/elsewhere")))
        assert "alice/elsewhere@v1 is not in the local cache" in unknown
        assert "HF_HUB_OFFLINE is set" in unknown
        assert "HF_HUB_OFFLINE is set" in refused(
            offline.run("export", folder, folder.parent / "x", *to_hub("alice/y"))
        )
    finally:
        offline.close()
    assert hub.requests == []


def test_commands_take_the_name(session, pushed, hub, tmp_path):
    hub.repos["alice/mine"].branches["main"] = hub.repos["alice/mine"].branches["v1"]
    result = session.run("generate", "--adapter", "alice/mine", "--prompt", "hi", "--max-new-tokens", 2)
    assert result.code == 0, result.err
    assert "2 tokens after" in result.out
    words = refused(session.run("generate", "--adapter", "lab/tiny", "--prompt", "hi"))
    assert "lab/tiny is not an adapter repository: it has no subtoken_config.json" in words
    write_scenes(tmp_path / "scenes", train=2, dev=2, test=2)
    dev = tmp_path / "scenes" / "dev.json"
    result = session.run("evaluate", "--adapter", "alice/mine", "--data", dev, "--max-new-tokens", 2)
    assert result.code == 0, result.err
    assert "tiny: alice/mine" in result.out


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "no Hugging Face token was found: run 'hf auth login', or set HF_TOKEN"),
        ("hf_unknown", "the Hub does not know this token (401)"),
        ("hf_reader", "the token of 'alice' can only read; use one that can write to alice/new"),
        ("hf_other", "the token of 'bob' may not write to alice/new; allowed: bob/..., lab/..."),
    ],
)
def test_tokens_that_may_not(hub, session, vlm_adapter, tmp_path, token, words):
    assert words in refused(session.run("export", vlm_adapter, tmp_path / "out", *to_hub("alice/new"), token=token))
    assert not (tmp_path / "out").exists()
    assert "alice/new" not in hub.repos


def test_repositories_that_may_not_be_written(hub, session, vlm_adapter, tmp_path):
    hub.add("lab/locked", vlm_adapter, read_only=True)
    words = refused(session.run("export", vlm_adapter, tmp_path / "out", *to_hub("lab/locked")))
    assert "this token may not write to lab/locked (403: You don't have the rights to write here)" in words
    words = refused(session.run("export", vlm_adapter, tmp_path / "out", *to_hub("lab/tiny"), "--private"))
    assert "lab/tiny exists and is public; make it private in its settings" in words
    assert not (tmp_path / "out").exists()
    assert hub.repos["lab/tiny"].messages == hub.repos["lab/locked"].messages == ["first"]


@pytest.mark.slow
def test_an_upload_that_fails_loses_nothing(hub, session, vlm_adapter, tmp_path):
    """The folder stays, the repository is as before, and the printed command sends only what had not arrived."""
    adapter = hub.repos["lab/half"] = hub.add("lab/half", vlm_adapter)
    before = adapter.files()
    hub.objects.clear()
    hub.faults = ["ok", "cut", "refuse"]
    line = refused(session.run("export", vlm_adapter, tmp_path / "out", *to_hub("lab/half"), "--message", "two words"))
    assert f"{tmp_path / 'out'} is written, but not published: " in line
    assert adapter.files() == before
    assert len(hub.objects) == 1
    hub.requests.clear()
    result = session.run(*shlex.split(line.split("Try again with: ")[1])[1:])
    assert result.code == 0, result.err
    assert sum(request.startswith("PUT /lfs") for request in hub.requests) == 1
    assert adapter.files() == on_disk(tmp_path / "out")
    assert adapter.messages == ["first", "two words"]


def test_a_new_push_leaves_nothing_of_the_old_one(hub, session, vlm_adapter, tmp_path):
    """Routers of an earlier adapter would make the folder disagree with itself; other files are kept."""
    repo = hub.add("alice/again", vlm_adapter)
    repo.commit("main", {**repo.files(), "output/adapter_model.safetensors": b"old", "picture.png": b"mine"}, "second")
    result = session.run("export", vlm_adapter, tmp_path / "out", *to_hub("alice/again"))
    assert result.code == 0, result.err
    assert repo.files() == {**on_disk(tmp_path / "out"), "picture.png": b"mine"}


def test_fit_asks_first_and_publishes_at_the_end(hub, session, tmp_path):
    """A name that is not the user's costs no training; an upload that fails costs no adapter."""
    write_scenes(tmp_path / "scenes", train=8, dev=2, test=2)
    run, short = tmp_path / "run", "--trainer.max_steps=1 --trainer.log_every_n_steps=1 --data.batch_size=4"
    fit = ["fit", "--config", RECIPE, "--model.backbone.path=lab/tiny", f"--output_dir={run}", *short.split()]
    fit += ["--trainer.enable_progress_bar=false", f"--data.train_file={tmp_path / 'scenes' / 'train.json'}"]
    assert "may not write to bob/mine" in refused(session.run(*fit, "--push_to_hub=bob/mine"))
    local = "--model.backbone.path=checkpoints/tiny-llava"
    assert "is not a Hub id, so nobody else" in refused(session.run(*fit, local, "--push_to_hub=alice/fitted"))
    assert "--private only applies when publishing" in refused(session.run(*fit, "--private"))
    assert not run.exists()
    hub.faults = ["refuse"] * 2
    result = session.run(*fit, "--push_to_hub", "alice/fitted", "--private")
    line = refused(result)
    assert f"adapter folder: {run / 'adapter'}" in result.out
    assert f"{run / 'adapter'} is written, but not published: " in line
    retried = session.run(*shlex.split(line.split("Try again with: ")[1])[1:])
    assert retried.code == 0, retried.err
    repo = hub.repos["alice/fitted"]
    assert repo.private
    assert repo.files() == on_disk(run / "published")
    assert b"push_to_hub" not in repo.files()["recipe.yaml"]
    adapter = on_disk(run / "adapter")
    for name in ("adapter_model.safetensors", "README.md", "training.png"):
        assert repo.files()[name] == adapter[name]
    card = ModelCard(adapter["README.md"].decode())
    assert card.data.base_model == "lab/tiny"
    assert 'SubTokenModel.from_pretrained("alice/fitted")' in card.text


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("alice/mine", "v9", "alice/mine has no revision 'v9'; name a branch, a tag or a commit of it"),
        ("alice/none", None, "alice/none is not on the Hub, or this token may not see it (404)"),
        ("bob/gated", None, "bob/gated is gated: ask for access at"),
    ],
)
def test_what_cannot_be_loaded(hub, session, vlm_adapter, pushed, name, revision, words):
    hub.add("bob/gated", vlm_adapter, gated=True)
    load = f"from subtoken_train import SubTokenModel as m; m.from_pretrained({name!r}, revision={revision!r})"
    assert words in refused(session.run("-c", load))


FETCH = """
from dataclasses import replace
from subtoken_train.artifact import fetch
from subtoken_train.cli.main import dispatch
fetch.MODELS["smollm2"] = replace(fetch.MODELS["smollm2"], hub_id="lab/real")
dispatch(["data", "smollm2", "--out", {!r}])
"""


def test_a_model_is_fetched_from_the_hub_and_then_from_its_cache(hub, session, home, vlm_adapter, tmp_path):
    hub.add("lab/real", vlm_adapter.parent / "backbone")
    asked = session.run("-c", FETCH.format(str(tmp_path / "first")))
    assert (asked.code, "asking the Hub for lab/real" in asked.out) == (0, True), asked
    offline = Session("http://127.0.0.1:9", home, offline=True)
    cached = offline.run("-c", FETCH.format(str(tmp_path / "second")))
    offline.close()
    assert (cached.code, "asking" in cached.out) == (0, False), cached
    for name in ("model.safetensors", "config.json", "tokenizer.json", "fetched.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def answered(status, message=None):
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/api/x"))
    return HfHubHTTPError(f"{status} Error\n\n for url", response=response, server_message=message)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (answered(401), "the Hub does not know this token (401)"),
        (answered(403, "no rights"), "this token may not write to user/name (403: no rights)"),
        (answered(429), "the Hub cannot serve this now (429); try again later"),
        (answered(409), "the Hub refused user/name: 409 Error for url"),
        (httpx2.ConnectError("refused"), "(ConnectError: refused); check the network"),
        (OfflineModeIsEnabled(), "HF_HUB_OFFLINE is set, so the Hub cannot be reached; unset it"),
        (
            caused(LocalEntryNotFoundError("no"), httpx2.ConnectError("down")),
            "user/name@v1 is not in the local cache (",
        ),
        (caused(RuntimeError("thread"), answered(403)), "this token may not write to user/name (403)"),
        (ConnectionError("transfer broke off"), "user/name: transfer broke off"),
    ],
)
def test_wording(error, words):
    with pytest.raises(ValueError, match=re.escape(words)) as raised, hub_errors("user/name", "v1"):
        raise error
    assert "\n" not in str(raised.value)


def test_our_own_mistakes_pass():
    with pytest.raises(KeyError), hub_errors("user/name"):
        raise KeyError("x")


SCORES = (Score("all", "score", 30, 0.5, 0.25, 0.75), Score("list", "f1", 10, 0.123, 0.1, 0.2))


def record_of(backbone, model_type="llava", **changes):
    parts = {"lora": {"rank": 8, "alpha": 16}, "reducer": {"name": "fastv", "keep_ratio": 0.25}}
    parts |= {"routing": {"selector": "linear", "num_groups": 16, "kept_groups": 4}, "stage2": None, "merged": False}
    made_of = {"backbone": {"path": backbone}, "identity": {"model_type": model_type}}
    return {**parts, **made_of, "training": {"name": "mine", "steps": 5}, **changes}


@sampled(
    ("backbone", "licence", "name", "words"),
    [
        ("llava-hf/llava-1.5-7b-hf", "llama2", None, "backbone: llama2."),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "apache-2.0", None, "backbone: apache-2.0."),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "other", "qwen-research", "backbone: qwen-research."),
        ("somebody/else", None, None, "backbone: see the backbone."),
    ],
    every=4,
)
def test_the_licence_is_the_backbones(backbone, licence, name, words):
    card = ModelCard(model_card(record_of(backbone)))
    assert card.data.base_model == backbone
    assert card.data.base_model_relation == "adapter"
    assert (card.data.license, card.data.to_dict().get("license_name")) == (licence, name)
    assert words in card.text
    assert "nominal KV of the routed region | 15.6250%" in card.text


def test_scores_of_several_arms():
    own = CardColumn("mine", {"value groups": "S16K4 linear", "KV nominal": "15.625%"}, SCORES)
    anchor = CardColumn("anchor", {"value groups": "-", "KV nominal": "15.625%"}, SCORES)
    sections = CardSections(recipe="seed: 0\n", evaluation=Evaluation("dev.json", "ab" * 32, own, (anchor,)))
    card = ModelCard(model_card(record_of("llava-hf/llava-1.5-7b-hf"), sections))
    assert "| value groups | S16K4 linear | - |" in card.text
    assert "| list (10, f1) | 12.3 [10.0, 20.0] | 12.3 [10.0, 20.0] |" in card.text
    assert "```yaml\nseed: 0\n```" in card.text
    assert card.data.model_name == "mine"
    found = [(result.metric_type, result.metric_value, result.dataset_name) for result in card.data.eval_results]
    assert found == [("score", 50.0, "dev.json"), ("f1", 12.3, "dev.json")]


def test_a_merged_language_model():
    card = ModelCard(model_card(record_of("Qwen/Qwen2.5-7B", "qwen2", merged=True, routing=None)))
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.base_model_relation == "finetune"
    assert "Merged q/v LoRA for `Qwen/Qwen2.5-7B`" in card.text
    assert "PeftModel" not in card.text


def test_the_router_is_described_with_what_was_set():
    plain = model_card(record_of("somebody/else"))
    assert "| routing | S16K4 linear, contiguous, per_token budget, balance weight 0.01 |" in plain
    assert "| token reducer | fastv, keep ratio 0.25 |" in plain
    assert "docs/choosing.md" in plain
    routing = {"selector": "bilinear", "num_groups": 64, "kept_groups": 16, "budget": "global", "fill": "mean"}
    routing |= {"score_prior": "value_norm", "value_gate": True, "features": ["attention"]}
    reducer = {"name": "fastv", "keep_ratio": 0.25, "ranking": "frozen"}
    card = model_card(record_of("somebody/else", routing=routing, reducer=reducer))
    words = "S64K16 bilinear of rank 16, reads attention, contiguous, global budget, fill mean, value_norm prior"
    assert f"| routing | {words}, value gate, balance weight 0.01 |" in card
    assert "| token reducer | fastv, keep ratio 0.25, ranked by the base weights |" in card

"""benchmarks/real_text.py: contexts hold their facts; budgets that share a pass keep what each keeps alone."""

import json
from itertools import chain

import pytest
import torch

from benchmarks import real_frontier, real_needles, real_results, real_text, real_text_bytes, real_text_trained, rivals
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.recommend import FILE
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import append, contexts_of, prefill
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.reducers import build_reducer
from tests.support import places
from tests.support.places import shown
from tests.support.tiny import tiny_families


@pytest.fixture
def backbone():
    return CompressedBackbone(tiny_families()["llama"].build(), build_reducer("none")).eval()


@pytest.mark.parametrize("notations", [["kvzip"], ["pooled(knorm)"], ["snapkv", "cur", "pooled(h2o)"]])
def test_what_shares_a_pass_keeps_what_each_keeps_alone(backbone, notations):
    ids = torch.randint(10, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = contexts_of(text_batch(backbone.family, [EncodedText((*ids, ids[-1]), len(ids))]))
    methods = [build_eviction(name, **({"window": 4} if name == "snapkv" else {})) for name in notations]
    kinds = (0.5, "model"), (0.2, "model"), (0.3, "int8")
    settings = [Compression(method, keep, kv_dtype=kind) for method in methods for keep, kind in kinds]
    with reading_packed(backbone.family.decoder.config), torch.no_grad():
        caches = [cache for cache, _ in real_text.compressed(backbone, batch, settings)]
        for own, cache in zip(settings, caches, strict=True):
            alone = PackedCache(backbone.family.shape.num_layers)
            prefill(backbone, batch, alone, own)
            assert torch.equal(alone.next_position, cache.next_position)
            held = [[layer.payload_bytes for layer in each.layers] for each in (cache, alone)]
            assert held[0] == held[1]
            assert torch.equal(*(append(backbone, torch.tensor([[5, 6]]), each) for each in (cache, alone)))


def test_a_record_counts_bytes_and_scores_facts_and_text(backbone):
    asked = real_text.contexts(backbone.family.tokenizer, "the cat sat on the mat . " * 400, 1)
    assert len(asked[0].questions) == real_text.FACTS + 1
    some = [real_text.Arm("full cache", Compression()), real_text.Arm("int8", Compression(kv_dtype="int8"))]
    with reading_packed(backbone.family.decoder.config), torch.no_grad():
        whole, bits = real_text.measure(backbone, some, asked).values()
    assert whole["share"] == [1.0]
    assert 0.5 < bits["share"][0] < 0.6
    assert len(whole["facts"][0]) == len(whole["exact"][0]) == real_text.FACTS
    ids = torch.tensor([asked[0].ids + asked[0].questions[0].start + asked[0].questions[0].scored])
    scored = len(asked[0].questions[0].scored)
    with torch.no_grad():
        logprobs = backbone.family.model(ids).logits[0, -scored - 1 : -1].log_softmax(-1)
    assert whole["facts"][0][0] == pytest.approx(-float(logprobs.gather(-1, ids[0, -scored:, None]).sum()), abs=2e-3)


@pytest.mark.parametrize("file", sorted(real_text.OUT.glob("*.jsonl.xz")), ids=lambda file: file.name.partition(".")[0])
def test_records_are_whole(file):
    records = real_text.by_arm(file)
    whole = len(records["full cache"]["facts"])
    controls = {arm.words for arm in chain(*real_text.turned_arms(True).values())}
    assert {len(own["facts"]) for arm, own in records.items() if arm not in controls} == {whole}
    assert {words for some in real_text.arms().values() for words in (arm.words for arm in some)} >= records.keys()


def test_the_table_of_all_arms_and_the_pages_are_of_the_records():
    rows = real_results.frame()
    assert real_results.CSV.read_text() == rows.to_csv(index=False, float_format="%.5g")
    assert not rows.duplicated(["judge", "model", "arm"]).any()
    readme, page = places.ROOT / "README.md", places.ROOT / "docs/real_text.md"
    assert shown(readme, "real") == real_results.facts_table(rows, real_results.README, losses=False)
    assert shown(page, "real") == real_results.facts_table(rows, real_results.PAGE, losses=True)
    assert (shown(page, "ruler"), shown(readme, "speed")) == (real_results.tasks_table(rows), real_results.speed())
    assert shown(readme, "commands") == real_results.commands()
    assert [shown(rivals.PAGE, name) for name in rivals.SHOWN] == [rivals.table(name) for name in rivals.SHOWN]
    assert len(real_results.PAGE) <= 12 >= len(real_results.TASKS)


def test_trained_arms_are_asked_the_same():
    records = real_text.read(real_text_trained.OUT)
    assert len({(each["loss"], each["way"], each["arm"], each["seed"]) for each in records}) == len(records) >= 3
    assert {(len(each["facts"]), len(each["facts"][0])) for each in records} == {(real_text.CONTEXTS, real_text.FACTS)}


@pytest.mark.parametrize("model", real_text_bytes.HEADS)
def test_arms_of_one_budget_are_asked_the_same(model):
    records = real_text.read(real_text_bytes.records_of(model))
    assert len({real_text_bytes.key(each) for each in records}) == len(records)
    assert {(len(each["facts"]), len(each["facts"][0])) for each in records} <= {(real_text.CONTEXTS, real_text.FACTS)}
    assert {each["size"] for each in records} <= real_text_bytes.SIZES.keys()


def test_every_arm_of_one_budget_is_a_recipe(capsys):
    """Names and values of its settings; the arms differ in what they say they do alone."""
    some = real_text_bytes.LEARNS, real_text_bytes.STARTS, real_text_bytes.ROUTERS
    every = real_text_bytes.arms(*some, ["21.9%"])
    flags = [arm.argv("smollm2", real_text.NETS / "smollm2.json") for arm in every]
    assert len(set(map(tuple, flags))) == len(every) == 22
    recipe = places.ROOT / f"recipes/real/{real_text_bytes.RECIPE}.yaml"
    for arm, argv in zip(every[::7], flags[::7], strict=True):
        cli = RecipeCLI(["--config", str(recipe), *argv])
        assert cli.model.routing_config.byte_pool == "all"
        assert (cli.model.routing_config.warm_start is None) == (arm.start == "nothing")
        assert (cli.model.optimizer_config.learning_rate == 0) == ("LoRA" not in arm.learns)
        assert cli.trainer.max_steps == {"untrained": 1, "router and LoRA, 320 steps": 320}.get(arm.learns, 160)


def test_the_maps_of_needles_are_of_the_record():
    record = json.loads(real_needles.RECORD.read_text())
    assert len(record["kinds"]) == 30
    assert real_needles.PICTURE.read_text() == real_needles.picture(record)
    full, *others = real_needles.figure(record).axes
    scores = record["arms"]["full cache"]["scores"]
    assert sum(int(text.get_text()) for text in full.texts) == pytest.approx(100 * sum(scores) / 2)
    assert len(others) >= 1


def test_the_page_the_picture_and_what_the_command_reads_are_of_the_records():
    models = {name: real_frontier.blind(name) for name in real_text.NAMES}
    assert all("full cache" in records for records in models.values())
    found, names = real_frontier.measured(models), list(real_text.NAMES)
    assert shown(real_frontier.CHOOSING, "frontier") == real_frontier.table(found, names)
    own = real_frontier.shipped(
        text=(real_text.NAMES, real_frontier.winners(found, names)), tasks=real_frontier.measured_on_tasks()
    )
    assert FILE.read_text(encoding="utf-8") == own
    assert real_frontier.SVG_FILE.read_text(encoding="utf-8") == real_frontier.picture(models["qwen05"])

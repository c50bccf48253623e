"""The model card: what the Hub's reader finds in it, and what a person does."""

from __future__ import annotations

from huggingface_hub import ModelCard

from subtoken_train.artifact.card import CardColumn, CardSections, Evaluation, Score, model_card
from tests.support.sampling import sampled

SCORES = (Score("all", "score", 30, 0.5, 0.25, 0.75), Score("list", "f1", 10, 0.123, 0.1, 0.2))


def record(backbone, model_type="llava", **changes):
    plain = {
        "backbone": {"path": backbone},
        "lora": {"rank": 8, "alpha": 16},
        "reducer": {"name": "fastv", "keep_ratio": 0.25},
        "routing": {"selector": "linear", "num_groups": 16, "kept_groups": 4},
        "identity": {"model_type": model_type},
        "training": {"name": "mine", "steps": 5},
        "stage2": None,
        "merged": False,
    }
    return {**plain, **changes}


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
    card = ModelCard(model_card(record(backbone)))
    assert card.data.base_model == backbone
    assert card.data.base_model_relation == "adapter"
    assert (card.data.license, card.data.to_dict().get("license_name")) == (licence, name)
    assert words in card.text
    assert "nominal KV of the routed region | 15.6250%" in card.text


def test_scores_of_several_arms():
    own = CardColumn("mine", {"value groups": "S16K4 linear", "KV nominal": "15.625%"}, SCORES)
    anchor = CardColumn("anchor", {"value groups": "-", "KV nominal": "15.625%"}, SCORES)
    sections = CardSections(recipe="seed: 0\n", evaluation=Evaluation("dev.json", "ab" * 32, own, (anchor,)))
    card = ModelCard(model_card(record("llava-hf/llava-1.5-7b-hf"), sections))
    assert "| value groups | S16K4 linear | - |" in card.text
    assert "| list (10, f1) | 12.3 [10.0, 20.0] | 12.3 [10.0, 20.0] |" in card.text
    assert "```yaml\nseed: 0\n```" in card.text
    assert card.data.model_name == "mine"
    found = [(result.metric_type, result.metric_value, result.dataset_name) for result in card.data.eval_results]
    assert found == [("score", 50.0, "dev.json"), ("f1", 12.3, "dev.json")]


def test_a_merged_language_model():
    card = ModelCard(model_card(record("Qwen/Qwen2.5-7B", "qwen2", merged=True, routing=None)))
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.base_model_relation == "finetune"
    assert "Merged q/v LoRA for `Qwen/Qwen2.5-7B`" in card.text
    assert "PeftModel" not in card.text


def test_the_router_is_described_with_what_was_set():
    plain = model_card(record("somebody/else"))
    assert "| routing | S16K4 linear |" in plain
    assert "| token reducer | fastv, keep ratio 0.25 |" in plain
    assert "docs/choosing.md" in plain
    routing = {
        "selector": "bilinear",
        "num_groups": 64,
        "kept_groups": 16,
        "budget": "global",
        "score_prior": "value_norm",
    }
    routing |= {"value_gate": True, "features": ["attention"], "fill": "mean"}
    reducer = {"name": "fastv", "keep_ratio": 0.25, "ranking": "frozen"}
    card = model_card(record("somebody/else", routing=routing, reducer=reducer))
    words = "S64K16 bilinear, global budget, value_norm prior, value gate, reads attention, fill mean"
    words += " (a value vector per layer and sample, beside the nominal KV)"
    assert f"| routing | {words} |" in card
    assert "| token reducer | fastv, keep ratio 0.25, ranked by the base weights |" in card

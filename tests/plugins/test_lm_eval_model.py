import json
import logging
import shutil

import pytest
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from subtoken_train.datasets.english import documents  # noqa: E402
from subtoken_train.inference.arm_spec import ArmSpec  # noqa: E402
from subtoken_train.plugins.lm_eval_model import SubTokenLM  # noqa: E402
from tests.support.chat_servers import serving_model  # noqa: E402
from tests.support.sampling import sampled  # noqa: E402

TEXTS = [" ".join(text.split()[: 30 + 6 * i]) for i, text in enumerate(documents("dev")[:8])]
ROWS = [{"question": text, "choices": [" of", " the method", " a", " in this"], "answer": 1} for text in TEXTS]
DATA = DatasetDict({"test": Dataset.from_list(ROWS)})
COMMON = {"test_split": "test", "doc_to_target": "answer", "custom_dataset": lambda **_: DATA}
CHOICE = {"task": "choice", "output_type": "multiple_choice", "doc_to_text": "{{question}}\nA:"}
CHOICE |= {"doc_to_choice": "choices"}
ANSWER = {
    "task": "answer", "output_type": "generate_until", "doc_to_text": "{{question}}",
    "generation_kwargs": {"until": ["\n", " the"], "max_gen_toks": 12, "do_sample": False},
}  # fmt: skip
EVICTED = {"eviction": "snapkv", "eviction_keep": 0.3, "eviction_options": "window=4", "context": 12}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """The harness asks pip and the drivers for a second, every time."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def backbone(text_adapter):
    return str(text_adapter.parent / "backbone")


@pytest.fixture(scope="module")
def reference(backbone):
    """The harness's own model."""
    model = AutoModelForCausalLM.from_pretrained(backbone).eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(backbone), batch_size=4)


def ours(backbone, **given):
    return SubTokenLM(**{"backbone": backbone, "device": "cpu", "batch_size": 4, **given})


def evaluate(model, config, **further):
    return lm_eval.simple_evaluate(
        model=model, tasks=[ConfigurableTask(config={**COMMON, **config})], bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False), **{"num_fewshot": 0, **further},
    )  # fmt: skip


def responses(results, name):
    rows = sorted(results["samples"][name], key=lambda row: row["doc_id"])
    return [value for row in rows for value in row["filtered_resps"]]


def request(kind, *arguments):
    return Instance(kind, {}, arguments, 0)


@sampled("fewshot", [0, 2], every=2)
def test_uncompressed_scores_are_those_of_the_harness_model(backbone, reference, fewshot):
    got, wanted = (evaluate(each, CHOICE, num_fewshot=fewshot) for each in (ours(backbone), reference))
    assert got["results"]["choice"]["acc,none"] == wanted["results"]["choice"]["acc,none"]
    for (value, greedy), (other, same) in zip(responses(got, "choice"), responses(wanted, "choice"), strict=True):
        assert (value, greedy) == (pytest.approx(other, abs=1e-4), same)
    info = got["config"]["subtoken"]
    assert info["prompts"] == len(ROWS)  # four choices each, one pass
    assert info["entries_after"] == info["entries_before"] > 0


def test_uncompressed_answers_are_those_of_the_harness_model(backbone, reference):
    got, wanted = (evaluate(model, ANSWER) for model in (ours(backbone), reference))
    assert responses(got, "answer") == responses(wanted, "answer")
    assert len(set(responses(got, "answer"))) > 1


def test_compressed_scores_differ_and_say_what_was_kept(backbone, reference):
    model = ours(backbone, **EVICTED, protocol="context_first")
    results = evaluate(model, CHOICE)
    wanted = responses(evaluate(reference, CHOICE), "choice")
    assert min(abs(a - b) for (a, _), (b, _) in zip(responses(results, "choice"), wanted, strict=True)) > 1e-4
    info = results["config"]["subtoken"]
    assert info["arguments"]["eviction"] == "snapkv"
    assert 0.1 < info["region_fraction_measured"] <= 0.3
    assert 0 < info["entries_after"] < 0.6 * info["entries_before"]
    assert json.loads(json.dumps(info)) == info
    assert "(token, layer) pairs kept" in model.report()


@pytest.mark.filterwarnings("ignore:a sequence is longer than the 1,024 positions")
@sampled(
    "compression",
    [{}, {**EVICTED, "kv_dtype": "int8"}, {"reducer": "quest", "keep_ratio": 0.5, "context": 12}],
    every=3,
)
def test_rolling_scores_are_those_of_a_full_cache(backbone, reference, compression, caplog):
    texts = [*TEXTS[:3], " ".join(TEXTS) * 3, ""]
    asked = [request("loglikelihood_rolling", text) for text in texts]
    model = ours(backbone, **compression)
    assert len(model.tok_encode(texts[3])) > model.max_length  # several windows
    with caplog.at_level(logging.WARNING):
        got = model.loglikelihood_rolling(asked, disable_tqdm=True)
        model.loglikelihood_rolling(asked[:1], disable_tqdm=True)
    # the harness adds up in single precision
    assert got == pytest.approx(reference.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-6, abs=1e-4)
    assert caplog.text.count("without a context that could be compressed") == 1
    assert "had nothing to compress" in model.report()


@pytest.mark.filterwarnings("ignore:a sequence is longer than the 1,024 positions")
@sampled("protocol", ["query_aware", "context_first"], every=2)
def test_empty_contexts_and_long_prompts(backbone, reference, protocol):
    long = " ".join(TEXTS) * 3
    asked = [request("loglikelihood", context, " the end") for context in ("", "A ", long, long + " b")]
    got = ours(backbone, protocol=protocol, context=8).loglikelihood(asked, disable_tqdm=True)
    wanted = reference.loglikelihood(asked, disable_tqdm=True)
    assert [v for v, _ in got] == pytest.approx([v for v, _ in wanted], abs=1e-4)
    answers = [request("generate_until", long, {"until": [], "max_gen_toks": 9})]
    assert ours(backbone).generate_until(answers, True) == reference.generate_until(answers, True)


def test_finished_requests_are_kept_and_not_run_again(backbone, tmp_path):
    path = str(tmp_path / "kept")
    first, model = evaluate(ours(backbone), CHOICE, use_cache=path), ours(backbone)
    assert responses(evaluate(model, CHOICE, use_cache=path), "choice") == responses(first, "choice")
    assert model.runner.counted.prompts == 0
    assert "no prompt was run" in model.report()
    with pytest.raises(ValueError, match="name another file"):
        evaluate(ours(backbone, kv_dtype="int8"), CHOICE, use_cache=path)


@pytest.mark.slow
def test_finished_requests_of_another_training_are_not_read(text_adapter, backbone, tmp_path):
    adapter, path = shutil.copytree(text_adapter, tmp_path / "adapter"), str(tmp_path / "kept")
    evaluate(ours(backbone, adapter=str(adapter), context=16), CHOICE, use_cache=path)
    tensors = load_file(adapter / "router.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, adapter / "router.safetensors")
    with pytest.raises(ValueError, match="name another file"):
        evaluate(ours(backbone, adapter=str(adapter), context=16), CHOICE, use_cache=path)


def test_the_tokenizer_s_chat_format(backbone, reference, monkeypatch):
    model = ours(backbone)
    template = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    for each in (model, reference):
        monkeypatch.setattr(each.tokenizer, "chat_template", template)
    got, wanted = (evaluate(each, CHOICE, apply_chat_template=True) for each in (model, reference))
    scores = [value for value, _ in responses(wanted, "choice")]
    assert [value for value, _ in responses(got, "choice")] == pytest.approx(scores, abs=1e-4)


def test_answers_that_leave_no_room_and_models_that_see_are_refused_and_model_args_go_first(backbone, vlm_adapter):
    general = {"batch_size": 1, "device": "cpu", "max_batch_size": None}
    model = SubTokenLM.create_from_arg_string(f"backbone={backbone},batch_size=3", general)
    assert (model.arguments.batch_size, SubTokenLM.last) == ("3", model)
    with pytest.raises(ValueError, match=f"{model.max_length} tokens after a prompt leave no room"):
        model.generate_until([request("generate_until", "a", {"max_gen_toks": model.max_length})], True)
    with pytest.raises(ValueError, match="text tasks have none"):
        ours(str(vlm_adapter.parent / "backbone"))


def test_the_harness_s_own_ways_to_a_model_answer_alike(backbone):
    """``hf`` around the model, and ``local-completions`` through the server, which says no log-likelihoods."""
    spec = ArmSpec(backbone=backbone, eviction="knorm", eviction_keep=0.5)
    model, settings = spec.load("cpu"), {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    asked = [request("generate_until", text, settings) for text in TEXTS[:2]]
    rows = [model.tokenizer(text, return_tensors="pt") for text in TEXTS[:2]]
    new = [model.generate(**row, max_new_tokens=6, do_sample=False)[0, row["input_ids"].shape[1] :] for row in rows]
    wanted = [model.tokenizer.decode(ids, skip_special_tokens=True).split("\n")[0] for ids in new]
    assert HFLM(pretrained=model, tokenizer=model.tokenizer).generate_until(asked, disable_tqdm=True) == wanted
    pytest.importorskip("tenacity")  # of the harness's clients of servers
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    how = {"model": "tiny", "tokenizer": backbone, "tokenized_requests": False, "tokenizer_backend": "huggingface"}
    with serving_model(spec, model=model) as served:
        client = LocalCompletionsAPI(base_url=f"{served.url}/v1/completions", max_retries=1, **how)
        assert client.generate_until(asked, disable_tqdm=True) == wanted
        with pytest.raises(Exception, match="400 Client Error"):
            client.loglikelihood([request("loglikelihood", "a", " b")], disable_tqdm=True)

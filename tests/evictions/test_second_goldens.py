"""The golden tests themselves, on a second set of inputs: other sizes, two samples, outputs by plain loops here.

What a golden test compares must come from its file: it passes with another batch, length, number of heads and budget.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.evictions import test_h2o, test_knorm, test_pyramidkv, test_snapkv, test_streaming_llm
from tests.support.prompt_views import dense_attention

B, H, h, T, D, WINDOW, KERNEL, CAPACITY, LAYERS = 2, 6, 3, 37, 8, 5, 3, 17, 3


def best(scores, count, window):
    """Places of the best of all but the last ``window`` entries, and those, [..., count]."""
    length = len(scores)
    order = sorted(range(length - window), key=lambda place: (-float(scores[place]), place))[: count - window]
    return sorted(order) + list(range(length - window, length))


def per_row(scores, count, window):
    return torch.tensor([[best(row, count, window) for row in sample] for sample in scores])


def pooled(scores, kernel):
    half = kernel // 2
    rows = scores.flatten(0, -2).tolist()
    means = [[sum(row[max(0, j - half) : j + half + 1]) / kernel for j in range(len(row))] for row in rows]
    return torch.tensor(means).view_as(scores)


def grouped(scores, how="mean"):
    parts = scores.view(B, h, H // h, -1)
    return parts.mean(2) if how == "mean" else parts.amax(2)


def write(folder, name, params, **tensors):
    place = folder / "golden" / name
    place.mkdir(parents=True)
    (place / "set_a.json").write_text(json.dumps({"params": params}))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, place / "set_a.safetensors")


def pyramid_counts():
    """The factory's: from base = capacity - window, by whole-number steps."""
    base = CAPACITY - WINDOW
    most = 2 * base - base // 20
    most = min(most, T - WINDOW)
    least = 2 * base - most if most == T - WINDOW else base // 20
    return [most - layer * ((most - least) // (LAYERS - 1)) + WINDOW for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("second"), torch.Generator().manual_seed(5)
    query, key = (torch.randn(B, heads, T, D, generator=made) for heads in (H, h))
    repeated = key.repeat_interleave(H // h, 1)
    matrix = torch.stack([dense_attention(query[i], key[i], [True] * T, D**-0.5) for i in range(B)])
    given, wide = {"queries": query, "keys": key}, {"queries": query, "keys_repeated": repeated}
    sizes = {"window_size": WINDOW, "kernel_size": KERNEL, "max_capacity_prompt": CAPACITY, "pooling": "avgpool"}
    sums, before = matrix.sum(2), T - WINDOW
    write(folder, "h2o_factory_prompt", sizes, **wide, kept_positions=per_row(sums, CAPACITY, WINDOW))
    kv = per_row(grouped(sums), CAPACITY, WINDOW)
    write(folder, "h2o_factory_prompt_kvhead", {**sizes, "gqa_score_agg": "mean"}, **given, kept_positions=kv)
    seen = grouped(sums / torch.arange(T, 0, -1))
    kept = {"n_kept": CAPACITY}
    write(folder, "kvpress_observed_attention", kept, **given, scores=seen, kept_positions=per_row(seen, CAPACITY, 0))
    norms = -key.norm(dim=-1)
    write(folder, "kvpress_knorm", kept, keys=key, scores=norms, kept_positions=per_row(norms, CAPACITY, 0))
    late = matrix[:, :, before:, :before].sum(2)
    filled = torch.nn.functional.pad(pooled(late, KERNEL), (0, WINDOW))
    places = per_row(filled, CAPACITY, WINDOW)
    write(folder, "snapkv_original_avgpool", sizes, **wide, kept_positions=places)
    for how in ("mean", "max"):
        scores = pooled(grouped(late, how), KERNEL)
        places = per_row(torch.nn.functional.pad(scores, (0, WINDOW)), CAPACITY, WINDOW)
        write(folder, f"snapkv_factory_kvhead_{how}", sizes, **given, pooled_scores=scores, kept_positions=places)
    press = grouped(filled) / WINDOW
    places = per_row(press, CAPACITY, WINDOW)
    write(folder, "kvpress_snapkv", {**sizes, **kept}, **given, scores=press, kept_positions=places)
    counts = pyramid_counts()
    scores = torch.nn.functional.pad(pooled(grouped(late), KERNEL), (0, WINDOW))
    layers = {f"kept_positions_layer{i}": per_row(scores, count, WINDOW) for i, count in enumerate(counts)}
    params = {**sizes, "num_hidden_layers": LAYERS, "beta": 20}
    write(folder, "pyramidkv_factory", params, **given, **layers, kept_count=torch.tensor(counts))
    ends = torch.tensor([*range(3), *range(T - 14, T)]).expand(B, h, -1)
    write(folder, "kvpress_streamingllm", {"n_sink": 3}, keys=key, kept_positions=ends)
    return folder


CASES = {
    "h2o_factory_prompt": lambda f: test_h2o.test_golden_factory(f, "h2o_factory_prompt", "keys_repeated"),
    "h2o_factory_prompt_kvhead": lambda f: test_h2o.test_golden_factory(f, "h2o_factory_prompt_kvhead", "keys"),
    "kvpress_observed_attention": test_h2o.test_golden_observed_attention,
    "kvpress_knorm": test_knorm.test_golden_press,
    "snapkv_original_avgpool": test_snapkv.test_golden_original,
    "snapkv_factory_kvhead_mean": lambda f: test_snapkv.test_golden_factory_per_kv_head(f, "mean"),
    "snapkv_factory_kvhead_max": lambda f: test_snapkv.test_golden_factory_per_kv_head(f, "max"),
    "kvpress_snapkv": lambda f: test_snapkv.test_golden_press(f, "kvpress_snapkv"),
    "pyramidkv_factory": test_pyramidkv.test_golden_places,
    "kvpress_streamingllm": lambda f: test_streaming_llm.test_golden_other_code(
        f, "kvpress_streamingllm", lambda params: params["n_sink"]
    ),
}


@pytest.fixture(autouse=True)
def _no_table(monkeypatch):
    """These are no originals: nothing of them belongs in the table."""
    monkeypatch.delenv("SUBTOKEN_GOLDEN_TABLE", raising=False)


@pytest.mark.parametrize("name", CASES)
def test_other_sizes(second, name):
    CASES[name](second)

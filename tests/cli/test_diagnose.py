"""``subtoken-train diagnose`` on a shipped adapter: files, table, and wrong input in one line."""

import csv
import re

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import write_scenes
from tests.support.commands import refused
from tests.support.places import ROOT
from tests.support.sampling import sampled

ADAPTERS = ROOT / "checkpoints" / "adapters"
ROUTED = str(ADAPTERS / "tiny_fastv25_s16k4")
TINY = str(ADAPTERS.parent / "tiny-llava")
FILES = ["figure1.png", "figure1a.csv", "figure1b.csv", "groups.csv", "layers.csv", "layers.png"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, train=4, dev=12, test=4)
    return str(folder / "dev.json")


def test_files_and_table(data, tmp_path, capsys):
    assert main(["diagnose", "--adapter", ROUTED, "--data", data, "--limit", "8"]) == 0
    folder = tmp_path / "runs" / "diagnostics" / "tiny_fastv25_s16k4-seed0"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    out, err = capsys.readouterr()
    assert ("largest share" in out, "the adapter's own is per_token" in out, "8/8 prompts" in err) == (True, True, True)
    layers = (folder / "layers.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in layers[1:]] == [[str(i), "4", "0.25"] for i in range(6)]
    assert (folder / "figure1b.csv").read_text().splitlines()[1].startswith("0,48,")  # 8 prompts x 6 layers
    assert len((folder / "figure1b.csv").read_text().splitlines()) == 1 + 16
    words = "tiny_fastv25_s16k4-seed0 exists; choose another --out"
    assert words in refused(capsys, "diagnose", "--adapter", ROUTED, "--data", data)


def test_a_language_model_reads_english(text_adapter, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["diagnose", "--adapter", str(text_adapter), "--limit", "3", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert "the adapter's own" not in capsys.readouterr().out  # Figure 1 is under its own, global budget
    histogram = [line.split(",") for line in (out / "figure1a.csv").read_text().splitlines()[1:6]]
    assert sum(int(tokens) for _, _, tokens, _ in histogram) == 3 * 2 * 256  # prompts x layers x kept context tokens
    assert sum(int(groups) * int(tokens) for _, groups, tokens, _ in histogram) == 3 * 2 * 256
    argv = ["diagnose", "--adapter", text_adapter, "--data", "x.json", "--out", tmp_path / "b"]
    assert "--data x.json has prompts with images, but a language model reads text" in refused(capsys, *argv)


EVICTION_FILES = ["eviction.png", "eviction_layers.csv", "eviction_prompts.csv"]


@sampled("adapter", ["tiny_fastv25_s16k4", "tiny_fastv25_s16k4_anchor"], every=2)
def test_an_eviction_on_an_adapter_with_and_without_routers(data, tmp_path, capsys, adapter):
    asked = ["--eviction", "vl_cache", "--eviction-keep", "0.5", "--eviction-option", "budgets=pyramid"]
    assert main(["diagnose", "--adapter", str(ADAPTERS / adapter), "--data", data, "--limit", "4", *asked]) == 0
    folder = tmp_path / "runs" / "diagnostics" / f"{adapter}-seed0-vl_cache"
    assert sorted(path.name for path in folder.iterdir()) == EVICTION_FILES
    captured = capsys.readouterr()
    assert "hit rate" in captured.out
    assert "vl_cache 0.5: what it would keep, beside what up to 16 tokens read" in captured.out
    rows = [line.split(",") for line in (folder / "eviction_layers.csv").read_text().splitlines()]
    kept = [float(row[2]) for row in rows[1:]]
    assert len(kept) == 6
    assert kept == sorted(kept, reverse=True)
    assert len((folder / "eviction_prompts.csv").read_text().splitlines()) == 1 + 4 * 6


def test_a_backbone_alone(data, tmp_path, capsys):
    """VL-Cache's Figures 2, 3 and 9 are of a model as it is."""
    asked = ["--eviction", "vl_cache", "--eviction-keep", "0.1", "--scope", "all"]
    assert main(["diagnose", "--backbone", TINY, "--data", data, "--limit", "2", *asked]) == 0
    folder = tmp_path / "runs" / "diagnostics" / "tiny-llava-vl_cache"
    assert sorted(path.name for path in folder.iterdir()) == EVICTION_FILES
    assert re.search(r"correlates over layers: -?[01]\.\d{3} \(Pearson\)", capsys.readouterr().out)
    with (folder / "eviction_layers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert 0 <= float(row["prompt_sparsity"]) <= 1
            assert 0 <= float(row["body_coverage"]) <= 1

"""Hours, memory, disk and downloads before a run: sums by hand, what a fit leaves, the command of what is missing."""

import re
from dataclasses import replace

import pytest
import torch

from subtoken_train.artifact.hub import check_fetched
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.run_plan import Reading, RunPlan, added, plan_of_fit, plan_of_recipe, training_step
from subtoken_train.datasets.known_files import absent
from subtoken_train.families.load import published_config
from subtoken_train.ledger.flops import PEAKS, UTILISATION, DecoderSize, TrainingFlops
from subtoken_train.training.memory import checkpoint_bytes, estimate_memory, record_rows
from subtoken_train.training.preflight import lay_out, nominal_prompt
from tests.support.commands import checked, printed, refused
from tests.support.places import recipe
from tests.support.refusals import refuses
from tests.support.training_memory import tiny_fit

H100 = PEAKS["H100"]


def laid_out(name: str, *options: str):
    cli = RecipeCLI(["--config", str(recipe(name)), *options])
    parts = lay_out(cli.model, offline=True)
    return cli, parts, nominal_prompt(parts.family, cli.datamodule)


def test_the_peaks_are_those_of_lightnings_table():
    from lightning.fabric.utilities.throughput import _CUDA_FLOPS

    assert {name: _CUDA_FLOPS[key][torch.bfloat16] for name, key in (("H100", "h100 sxm"), ("A100", "a100"))} == PEAKS


def test_the_assumed_utilisation_is_what_a_step_of_7b_was_measured_at():
    """LLaMA-2-7B under Quest, 2,048 rows in 0.290 s on an H200: results/speed/gpu-suite-earlier.json."""
    size = DecoderSize.of(published_config("meta-llama/Llama-2-7b-hf"), 32, 128)
    flops = TrainingFlops(size, [2 * 2 * 16 * 4096] * 32)
    step = flops.sample([2048] * 32) + float(flops.head(torch.tensor([2048])))
    assert step / 0.290 / H100 == pytest.approx(UTILISATION, rel=0.02)


def test_one_sample_costs_what_a_batch_of_one_does():
    flops = TrainingFlops(DecoderSize(32, 48, 4, 2, 8, 40), [0, 5, 5])
    shorter = float(flops.layers(torch.tensor([9]), 0, 1) + flops.layers(torch.tensor([4]), 1, 3))
    assert flops.sample([9, 4, 4]) == pytest.approx(shorter)


def test_a_recipe_is_counted_by_hand():
    """Count 768,010,438 bytes / 665,298 records / 4 = 289 tokens of text, and 144 left of an image's 576 in 94 %."""
    cli, parts, prompt = laid_out("llava7b_fastv25_s16k4")
    needs, trained = plan_of_fit(cli, parts, prompt), [10_486_272 // 32] * 32
    size = DecoderSize(4096, 11008, 32, 32, 128, 32064)
    forward, both = TrainingFlops(size, [0] * 32), TrainingFlops(size, trained)

    def run(rows: int) -> float:
        return 640_000 * (both.sample([rows] * 32) + forward.sample([rows] * 32) + 4.0 * rows * 4096 * 32064)

    mean = 625_298 / 665_298 * run(289 + 144) + 40_000 / 665_298 * run(289)
    assert needs.flops == pytest.approx((0.9 * mean, 1.1 * mean), rel=1e-4)
    assert needs.work == "10,000 steps of 64 records of about 830 tokens, a mean that is estimated"
    assert needs.disk == (("3 checkpoints", 3 * 12 * 10_486_272), ("the adapter", 4 * 10_486_272))
    (weights, size_there, _), (data, unknown, command) = needs.missing
    assert (weights, size_there) == ("weights of llava-hf/llava-1.5-7b-hf", 2 * 7_063_427_072)
    assert (data, unknown) == ("data/llava/llava_v1_5_mix665k.json", None)
    assert command == "subtoken-train data llava665k --root data/llava"
    hours, slower = mean / H100 / UTILISATION / 3600, 989.4 / 312
    assert hours == pytest.approx(15, abs=0.5)
    said = "\n".join(needs.lines(2.5))
    assert f"about {hours:.0f} hours ± 10 % of one H100 or about {slower * hours:.0f} hours ± 10 % of one A100" in said
    assert f"on eight   about {60 * hours / 8:.0f} minutes ± 10 % of 8 H100s or about {slower * hours / 8:.0f}" in said
    on_a100 = f"{2.5 * slower * hours:.2f} ± 10 % on A100s, at 2.5 a GPU hour"
    assert f"money      {2.5 * hours:.2f} ± 10 % on H100s or {on_a100}" in said
    assert "20.89 GiB on each device at the peak, fits a GPU of 24 GB\n" in said
    assert "money" not in "\n".join(needs.lines())
    # on eight devices an eighth of 13.16 GiB of frozen weights, two layers gathered, what trains whole in part
    held = dict(estimate_memory(parts, replace(training_step(cli, parts, prompt), strategy="zero3", processes=8)).parts)
    assert held["frozen weights"] == 2 * 7_063_427_072 // 8
    assert needs.shared == sum(held.values()) < needs.memory


def test_pictures_of_different_sizes_leave_a_range():
    needs = plan_of_fit(*laid_out("qwenvl7b_fastv25_s16k4"))
    assert re.search(r"records of \d+ to 2,048 tokens$", needs.work)
    assert needs.flops[1] > 3 * needs.flops[0]


@pytest.mark.parametrize(
    ("memory", "shared", "words"),
    [
        (15 * 10**9, None, ", fits a GPU of 16 GB"),
        (15 * 10**9 + 1, None, ", fits a GPU of 24 GB"),
        (79 * 10**9 + 1, 30 * 2**30, ", more than a GPU of 80 GB; eight of 40 GB hold it under zero3"),
        (79 * 10**9 + 1, None, ", more than a GPU of 80 GB"),
    ],
)
def test_the_gpus_that_hold_a_run(memory, shared, words):
    _, line = RunPlan("?", None, memory=memory, shared=shared).lines()
    assert line.endswith(f"at the peak{words}")


def test_lengths_that_were_read_are_one_figure_and_settings_count():
    cli, parts, prompt = laid_out("tiny_fastv25_s16k4")
    low, high = plan_of_fit(cli, parts, prompt).flops
    read = plan_of_fit(cli, parts, prompt, Reading(tokens=[100, 500]))  # max_length cuts the second
    assert read.flops[0] == read.flops[1]
    assert low < read.flops[0] < high
    assert "600 steps of 32 records of 130 tokens" in read.work
    cli, parts, prompt = laid_out("tiny_fastv25_s16k4", "--model.distillation.weight=1")
    assert plan_of_fit(cli, parts, prompt).flops[0] > low
    cli, parts, prompt = laid_out("tiny_fastv25_s16k4", "--trainer.max_steps=-1", "--trainer.max_epochs=2")
    unknown = plan_of_fit(cli, parts, prompt)
    assert unknown.flops is None
    assert "compute    not known: trainer.max_steps is not set" in next(unknown.lines())


def test_rows_are_those_that_a_layer_computes():
    """A cut in the decoder leaves the first layers whole; what leaves the cache alone is computed."""
    _, parts, _ = laid_out("tiny_fastv25_s16k4", "--model.reducer.stage=decoder")
    assert record_rows(parts, 90, 64) == [90, 90, 42, 42, 42, 42]
    _, parts, _ = laid_out("tinylm_quest25_s16k12")
    assert record_rows(parts, 600, 512) == [600] * 4


@pytest.mark.parametrize("optimizer", ["adamw", "paged_adamw_8bit"])
def test_a_checkpoint_is_what_trains_and_its_moments(optimizer):
    cli, parts, prompt = laid_out("tiny_fastv25_s16k4", f"--model.optimizer.name={optimizer}")
    adapter, whole = checkpoint_bytes(parts, optimizer)
    held = dict(estimate_memory(parts, training_step(cli, parts, prompt)).parts)
    assert (adapter, whole - adapter) == (held["LoRA + routers"], held["optimiser state"])


@pytest.mark.slow
def test_a_fit_leaves_files_of_that_size(tmp_path, tiny_family, capsys):
    argv = tiny_fit(tmp_path, tiny_family)()
    cli = RecipeCLI(argv[1:])
    parts = lay_out(cli.model, offline=True)
    (_, three), (_, adapter) = plan_of_fit(cli, parts, nominal_prompt(parts.family, cli.datamodule)).disk
    assert main(argv) == 0
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.ckpt")
    written = sum(path.stat().st_size for path in (tmp_path / "run" / "adapter").glob("*.safetensors"))
    assert three / 3 <= state.stat().st_size <= 1.05 * three / 3 + 100_000  # names and loops
    assert adapter <= written <= adapter + 20_000


def test_runs_add_up():
    one = RunPlan("a", (1.0, 2.0), memory=5, disk=(("x", 3),), missing=(("w", 1, "get"),))
    both = added([one, RunPlan("b", (10.0, 10.0), memory=7, disk=(("y", 4),), missing=(("w", 1, "get"),))])
    assert (both.work, both.flops, both.memory) == ("2 runs", (11.0, 12.0), 7)
    assert (sum(size for _, size in both.disk), both.missing) == (7, (("w", 1, "get"),))
    assert added([one, RunPlan("?", None)]).work == "1 of 2 runs, others not known"


def test_a_table_has_its_sum_and_its_queue(capsys, tmp_path):
    """Stage 2 comes with the run that it starts from, and waits for it; the others are the array."""
    arms = "".join(f"  - adapter: runs/llava7b_fastv25_s16k4{end}/adapter\n" for end in ("", "_anchor", "_stage2"))
    (tmp_path / "grid.yaml").write_text(f"out: o\ntasks: [pope]\narms:\n{arms}")
    said = printed(capsys, "sweep", "--grid", "grid.yaml", "--dry-run", "--price", "2")
    runs = [plan_of_recipe(RecipeCLI(["--config", name])) for name in re.findall(r"fit --config (\S+)", said)]
    hours = [sum(run.flops) / 2 / H100 / UTILISATION / 3600 for run in runs]
    assert len(hours) == 4
    assert f"about {sum(hours):.0f} hours ± 10 % of one H100" in said
    assert f"money      {2 * sum(hours):,.2f} ± 10 % on H100s or " in said
    queue = f"3 jobs in an array, the longest about {max(hours[:3]):.0f} hours ± 10 % of one H100"
    assert said.endswith(f"  --slurm    {queue}; 1 more when the runs that they start from stand\n")
    script = printed(capsys, "sweep", "--grid", "grid.yaml", "--slurm")
    assert "#SBATCH --array=0-2\n" in script
    assert f"#  --slurm    {queue}; 1 more" in script


def test_check_ends_with_what_a_run_needs(capsys):
    lines = checked(capsys, ["--offline", "--config", "tinylm_quest25_s16k12"])
    place = lines.index("what it needs (a prediction)")
    compute = r"compute [\d.e+]+ to [\d.e+]+ FLOPs: 150 steps of 8 records of 512 to 1,024 tokens"
    assert re.fullmatch(compute, lines[place + 1])
    assert lines[place + 2] == "time on a CPU; 'subtoken-train check' measures the pace of small models"
    assert not any(line.startswith("missing") for line in lines)
    lines = checked(capsys, ["--offline", "--config", "llama7b_quest25_s16k12"])
    assert "missing data set Salesforce/wikitext (300.41 MiB): fetched by the first run" in lines
    settings = {"budget": "bytes", "num_groups": 64, "kept_groups": 64, "byte_share": 0.125, "warm_start": "none.json"}
    routing = [f"--model.routing.{name}={value}" for name, value in settings.items()]
    lines = checked(capsys, ["--offline", "--config", "tiny_lora_only", *routing])
    assert "missing none.json (size not known here): subtoken-train calibrate kvzap" in lines


def test_an_evaluation_says_what_its_prompts_need(capsys, tmp_path):
    arm = "{backbone: llava-hf/llava-1.5-7b-hf, reducer: fastv, keep_ratio: [1, 0.25]}"
    (tmp_path / "grid.yaml").write_text(f"out: o\nlimit: 100\ntasks: [pope]\narms: [{arm}]\n")
    said = printed(capsys, "evaluate", "--config", "grid.yaml", "--check", "--price", "1000")
    flops = TrainingFlops(DecoderSize(4096, 11008, 32, 32, 128, 32064), [0] * 32)
    total = 100 * (flops.sample([576] * 32) + flops.sample([144] * 32))
    assert f"compute    {total:.1e} FLOPs: compressed regions of 200 nominal prompts" in said
    assert f"money      {1000 * total / H100 / UTILISATION / 3600:,.2f} on H100s or " in said
    assert "missing    weights of llava-hf/llava-1.5-7b-hf (13.16 GiB): hf download llava-hf/llava-1.5-7b-hf" in said


def test_missing_data_and_a_missing_model_name_their_command(capsys, tmp_path, monkeypatch):
    for path, hint in (
        ("a/llava_v1_5_mix665k.json", "get it: subtoken-train data llava665k --root a"),
        ("data/scenes/train.json", "get it: subtoken-train data scenes"),
        ("data/english_text/train.jsonl", "get it: subtoken-train data english"),
        ("mine.json", "check the path"),
    ):
        assert str(absent("data file", path)) == f"data file {path} does not exist; {hint}"
    monkeypatch.chdir(tmp_path)
    command = "subtoken-train data smollm2 --out my/models/smollm2"
    words = f"backbone my/models/smollm2 is not on this machine; get it (92 MB): {command}"
    name = "recipes/real/smollm2_kvzip25_s16k12.yaml"
    assert refused(capsys, "check", "--config", name, "--model.backbone.path", "my/models/smollm2") == words
    refuses("get it", plan_of_recipe, RecipeCLI(["--config", name, "--model.backbone.path", "my/models/smollm2"]))
    assert refused(capsys, "generate", "--backbone", "my/models/smollm2", "--prompt", "hi") == words
    check_fetched("mine/smollm2")  # an id of the Hub

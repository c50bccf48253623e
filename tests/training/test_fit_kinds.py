"""Each kind of LLaVA recipe trains a few steps and moves exactly what it should; the language models' are elsewhere."""

from __future__ import annotations

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.artifact.identity import identify
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.reducers.fitprune import PruneSchedules
from tests.support.helpers import moved_by_fit
from tests.support.kvzap_files import written
from tests.support.sampling import sampled

KINDS = {
    "visionzip-linear": ["--model.reducer.name=visionzip"],
    "visionzip-mlp": ["--model.reducer.name=visionzip", "--model.routing.selector=mlp"],
    "visionzip-anchor": ["--model.reducer.name=visionzip", "--model.routing=null"],
    "fastervlm-linear": ["--model.reducer.name=fastervlm"],
    "prumerge-linear": ["--model.reducer.name=prumerge", "--model.reducer.plus=true", "--model.reducer.adaptive=true"],
    "sparsevlm-ranked": [
        "--model.reducer.name=sparsevlm",
        "--model.reducer.keep_ratio=0.6",
        "--model.routing.budget=ranked",
    ],
    "pyramiddrop-linear": ["--model.reducer.name=pyramiddrop", "--model.reducer.keep_ratio=0.6"],
    "divprune-ranked": ["--model.reducer.name=divprune", "--model.routing.budget=ranked"],
    "cdpruner-linear": ["--model.reducer.name=cdpruner"],
    "dart-linear": ["--model.reducer.name=dart"],
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


@sampled("extra", KINDS.values(), every=9, ids=KINDS)
def test_three_steps_move_exactly_the_trainables(tiny_run, extra):
    cli = RecipeCLI(tiny_run("--trainer.max_steps=3", "--model.optimizer.warmup_steps=0", *extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert sum("lora_" in name for name in moved) == 4 * 2 * 2


@sampled(
    "kind",
    [
        "visionzip-mlp",
        "fastervlm-linear",
        "prumerge-linear",
        "sparsevlm-ranked",
        "pyramiddrop-linear",
        "divprune-ranked",
        "cdpruner-linear",
        "dart-decoder",
        "fastv-bilinear",
        "fastv-global-gated",
        "fastv-ranked-prior",
        "fastv-mean-norm",
    ],
    every=9,
)
def test_adapter_folders_read_back(tiny_run, tmp_path, kind):
    assert main(tiny_run("--trainer.max_steps=1", *KINDS[kind])) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert backbone.reducer.name == config.reducer.name == kind.split("-")[0]
    assert backbone.bank.config == config.routing


@pytest.mark.slow
def test_fitprune_trains_by_its_calibration_and_reads_back(tiny_run, tiny_family, tmp_path):
    backbone = BackboneConfig(str(tmp_path / "backbone"))
    schedule = PruneSchedules([[1.0, 0.5, 0.25, 0.25]])
    file = written(tmp_path / "schedules.json", "fitprune", schedule, identify(load_family(backbone), backbone))
    argv = tiny_run(
        "--trainer.max_steps=3",
        "--model.optimizer.warmup_steps=0",
        "--model.reducer.name=fitprune",
        "--model.reducer.keep_ratio=0.5",
        f"--model.reducer.calibration={file}",
    )
    cli = RecipeCLI(argv[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert sum("lora_" in name for name in moved) == 4 * 2 * 2
    assert main([*argv, f"--output_dir={tmp_path / 'again'}"]) == 0
    config, backbone, _ = read_adapter(tmp_path / "again" / "adapter")
    assert (config.reducer.name, backbone.reducer.calibration) == ("fitprune", file)

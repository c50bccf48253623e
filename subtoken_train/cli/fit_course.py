"""A run of ``subtoken-train fit``: compare it with an earlier run, open its folder, train, draw and export it."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.artifact.folder import write_adapter
from subtoken_train.artifact.hub import check_destination, check_published
from subtoken_train.artifact.whole_folder import RECIPE_FILE, check_target
from subtoken_train.cli.export import publish
from subtoken_train.cli.recipe import LOGS, RecipeCLI
from subtoken_train.cli.recipe_source import read_recipe
from subtoken_train.cli.recipes import SUFFIX
from subtoken_train.cli.run_plan import card_sections
from subtoken_train.cli.terminal import PROGRAM, USER_ERRORS, one_line
from subtoken_train.datasets.unknown_tokens import say_unknown
from subtoken_train.documents import check_regular, read_yaml, real_path
from subtoken_train.errors import UncutError, check_package, shell_words
from subtoken_train.families.load import family_class, with_processor
from subtoken_train.outputs import write_whole
from subtoken_train.resources import find_recipe
from subtoken_train.training.checkpoints import incomplete, newest_complete, state_path
from subtoken_train.training.module import adapter_config
from subtoken_train.training.preflight import check_bytes, lay_out, nominal_prompt
from subtoken_train.training.run_checkpoints import RunStopped
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import check_fit, check_parts, shares_weights
from subtoken_train.training.trained_tensors import check_resumable, finished_parts, trained_shapes


def run_fit(cli: RecipeCLI) -> int:
    """Train, leave the adapter, and publish it where that was asked for; returns the exit code."""
    resume = newest_complete(cli.checkpoints) if cli.config.resume else None
    if cli.config.resume and resume is None:
        ignored = "".join(f"; {folder.name} is not complete" for folder in incomplete(cli.checkpoints))
        none = f"nothing to resume: no complete checkpoint in {cli.checkpoints}{ignored}"
        raise ValueError(f"{none}; run without --resume")
    folder, destination, trainer = RunFolder(cli.output_dir, cli.replaces), cli.destination, cli.trainer
    try:
        if trainer.is_global_zero:  # the others of a run wait for it where they start to talk to each other
            if cli.replaces:
                _check_held(cli)
            folder.check(resume is not None)
            if destination is not None:
                check_published(cli.model.backbone_config.path)
                check_destination(destination)
            _open_run(cli, resume, folder)
        code = train(cli, resume, folder)
        if code or not trainer.is_global_zero:
            return code
        try:
            adapter = export(cli, cli.output_dir, None if destination is None else destination.repo_id)
        except BaseException:
            _say_where_to_go_on(cli, folder, f"{PROGRAM}: the adapter could not be written")
            raise
    except USER_ERRORS:
        folder.close(keep=False)
        raise
    finally:
        folder.close(keep=bool(cli.trainer.global_step))
    print(f"adapter folder: {adapter}\nnext: subtoken-train evaluate --adapter {shell_words(adapter)} --data FILE")
    if destination is not None:
        retry = ["subtoken-train", "export", str(adapter), str(cli.output_dir / "published")]
        retry += ["--push-to-hub", destination.repo_id, *(["--private"] if destination.private else [])]
        publish(adapter, destination, retry)
    return 0


def _check_held(cli: Any) -> None:
    """Refuse to rename a folder (with ``--overwrite`` alone) that holds what the run reads."""
    folder: Path = cli.output_dir
    held = "{} lies in {}, which --overwrite would rename; {}"
    for key, text in _flat({"data": cli.config.data, "model": cli.config.model}):
        if isinstance(text, str | Path) and text != "set" and _lies_in(Path(text), folder):
            raise ValueError(held.format(f"{key} ({text})", folder, "choose another --output_dir"))
    for path in filter(None, map(find_recipe, cli.source.words.configs)):
        if _lies_in(path, folder) and real_path(path) != real_path(folder / RECIPE_FILE):
            raise ValueError(held.format(f"the recipe {path}", folder, "move it elsewhere"))


def _lies_in(path: Path, folder: Path) -> bool:
    try:
        return path.absolute().is_relative_to(folder.absolute()) or real_path(path).is_relative_to(real_path(folder))
    except (OSError, ValueError):  # a text that is no path: too long, or with a null byte
        return False


# A checkpoint restores or presupposes these; others (devices, loggers, workers, intervals) may change freely.
_OF_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip", "limit_train_batches")
_DECISIVE = ("seed_everything", "model.", "data.", *(f"trainer.{key}" for key in _OF_TRAINER))
# Files may have moved, memory may be saved; the order of the data refuses a batch that is not the same in total.
_FREE_LEAVES = ("path", "num_workers", "batch_size", "val_batch_size", "gradient_checkpointing")
_FREE_ENDINGS = ("_file", "_root", "_folder", "_dir")
_MAX_LISTED = 4


def compare_recipes(saved: Path, now: str) -> str:
    """Compare the recipe that a run keeps with the present one; returns a note on what may change but matters."""
    before, after = dict(_flat(read_recipe(saved))), dict(_flat(yaml.safe_load(now)))
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    leaves = {key: key.rpartition(".")[2] for key in differing if key.startswith(_DECISIVE) and key in before}
    decisive = [key for key, leaf in leaves.items() if leaf not in _FREE_LEAVES and not leaf.endswith(_FREE_ENDINGS)]
    changes = {key: f"{key}: {before.get(key)}, here {after.get(key)}" for key in differing}
    if decisive:
        listed = "; ".join(changes[key] for key in decisive[:_MAX_LISTED])
        more = f"; and {len(decisive) - _MAX_LISTED} more" if len(decisive) > _MAX_LISTED else ""
        raise UncutError(f"the run began with another recipe ({listed}{more}); resume with {saved}, or start over")
    return "; ".join(changes[key] for key in differing if key in ("trainer.max_steps", "trainer.max_epochs"))


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf, and ``set`` for every group: where it is off, its name holds null."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield prefix + key, "set"
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_SCORE = "eval/accuracy"
_LOSSES = {"train/loss": "training", "val/loss": "validation"}
_USAGE = re.compile(r"group_usage_entropy/layer_(\d+)")
_INCHES, _COLOURS = (4.4, 3.0), 256
"""Size of a chart, a hundred pixels to an inch; with so few colours noise stays below 100 kB."""

Courses = Mapping[str, Mapping[int, float]]


def csv_parts(folder: Path) -> list[Path]:
    """List the CSV logs of a run, from its first part to its last resume."""
    found = (folder / LOGS).glob("csv*/metrics.csv")
    return sorted(found, key=lambda path: int(path.parent.name.removeprefix("csv").lstrip("-") or 1))


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Read metric -> step -> value from all parts of a run; where two parts made a step, the later one's."""
    course: dict[str, dict[int, float]] = {}
    for part in csv_parts(folder):
        check_regular(part)
        for row in csv.DictReader(part.read_text(encoding="utf-8").splitlines()):
            for name, value in row.items():
                if value and name != "step":
                    course.setdefault(name, {})[int(row["step"])] = float(value)
    return course


def picture_of_run(folder: Path) -> bytes | None:
    """Return a PNG of a run's course; None where no loss was logged, or it cannot be drawn, which is said on stderr."""
    try:
        return draw_run(folder)
    except Exception as error:
        print(f"no picture of the training: {one_line(error)}", file=sys.stderr)
        return None


def draw_run(folder: Path) -> bytes | None:
    """Return a PNG of a run's course, None where no loss was logged."""
    courses = logged(folder)
    losses = {words: courses[name] for name, words in _LOSSES.items() if name in courses}
    if not losses:
        return None
    check_package("matplotlib", "report", "drawing it")
    from subtoken_train.evaluation.charts import axes_in_a_row, draw_cells, draw_lines, image_of

    usage = {int(found[1]): course for name, course in courses.items() if (found := _USAGE.fullmatch(name))}
    scores = scores_beside_anchor(folder, courses)
    figure, axes = axes_in_a_row(1 + bool(usage) + bool(scores), _INCHES)
    left = iter(axes)
    draw_lines(next(left), losses, "loss", "step", "per answer token")
    if usage:
        steps = sorted(next(iter(usage.values())))
        rows = [[usage[layer].get(step, float("nan")) for step in steps] for layer in sorted(usage)]
        title, ends = "evenness of group usage", (steps[0], steps[-1] + 1)
        draw_cells(next(left), rows, title, "step", "layer", min(usage), ends)
    if scores:
        draw_lines(next(left), scores, "score midway", "step", _SCORE)
    file = io.BytesIO()
    image_of(figure).quantize(_COLOURS).save(file, "PNG", optimize=True)
    return file.getvalue()


def scores_beside_anchor(folder: Path, courses: Courses) -> dict[str, Mapping[int, float]]:
    """Read scores by step of a run and, if it lies beside it and answered the same questions, its anchor or arm."""
    if _SCORE not in courses:
        return {}
    own, is_anchor = {"this run": courses[_SCORE]}, folder.name.endswith(SUFFIX)
    other = folder.with_name(folder.name.removesuffix(SUFFIX) if is_anchor else f"{folder.name}{SUFFIX}")
    if not (other / RECIPE_FILE).is_file():
        return own
    asked = [read_yaml(place / RECIPE_FILE).get("evaluation") for place in (folder, other)]
    scores = logged(other).get(_SCORE) if asked[0] == asked[1] else None
    return own if scores is None else {**own, "routed run" if is_anchor else "anchor": scores}


def _open_run(cli: RecipeCLI, resume: Path | None, folder: RunFolder) -> None:
    saved, note = cli.output_dir / RECIPE_FILE, ""
    if resume:
        note = compare_recipes(saved, cli.recipe_text()) if saved.is_file() else ""
        check_target(cli.output_dir / "adapter", overwrite=True)  # which the run writes anew at its end
    check_fit(cli.trainer, cli.model)
    cli.datamodule.read()
    cli.datamodule.check_images(family_class(cli.model.backbone_config), cli.model.reducer_config)
    module = cli.model
    if shares_weights(cli.trainer.strategy):  # no process loads weights before the others are there to share them
        parts = lay_out(module)
        family = with_processor(parts.family, module.backbone_config)
    else:
        parts, family = module.parts, module.family
    check_parts(type(cli.trainer.strategy), parts)
    if resume:
        here = {f"compressed.{name}": shape for name, shape in trained_shapes(parts).items()}
        check_resumable(resume, cli.trainer, here)
        said = [f"resuming from {resume}"]
        if ignored := incomplete(cli.checkpoints):
            said.append(f"ignored, not complete: {', '.join(folder.name for folder in ignored)}")
        said += [f"differs from the first part, as does the learning rate's schedule: {note}"] if note else []
        print(*said, sep="\n", file=sys.stderr)
    prompt = nominal_prompt(family, cli.datamodule)
    parts.reducer.layer_tokens(prompt.tokens, parts.family.shape.num_layers)
    check_bytes(parts, prompt)
    cli.datamodule.rehearse(family, cli.trainer)
    if module.first_stage is not None:
        print(f"stage 2 on {module.first_stage.folder}: {module.first_stage.reading}", file=sys.stderr)
    if line := say_unknown(family.tokenizer, cli.datamodule.some_texts(family.tokenizer), "training data"):
        print(line, file=sys.stderr)
    folder.open(resume is not None)
    if folder.aside is not None:
        print(folder.said(), file=sys.stderr)
    write_whole(cli.output_dir / RECIPE_FILE, cli.recipe_text())


def train(cli: RecipeCLI, resume: Path | None, folder: RunFolder) -> int:
    """Fit and return the exit code; whatever ends it after a step, the user learns where to go on."""
    try:
        # weights_only: a checkpoint is data, nothing in it is run
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=resume and state_path(resume), weights_only=True)
    except RunStopped as stopped:
        if not (cli.trainer.is_global_zero or stopped.alone):
            return 0  # all stop alike; another code, and Lightning kills process 0 before it has said why
        _say_where_to_go_on(cli, folder, f"{PROGRAM}: {stopped.reason}")
        return stopped.exit_code
    except USER_ERRORS as error:
        if not cli.trainer.global_step:  # no step was made
            raise
        _say_where_to_go_on(cli, folder, f"{PROGRAM}: error: {one_line(error)}")
        return 2
    except OSError as error:  # a full disk or a dropped network under a logger
        _say_where_to_go_on(cli, folder, f"{PROGRAM}: stopped: {one_line(error)}")
        return 1
    except Exception:
        _say_where_to_go_on(cli, folder, f"{PROGRAM}: stopped by an error")
        raise
    return 0


def export(cli: RecipeCLI, folder: Path, repo_id: str | None = None) -> Path:
    """Write the adapter folder of a finished run; ``repo_id`` is the Hub name that its card speaks of."""
    module = cli.model
    parts, peft_model = finished_parts(module)
    training = {"name": folder.name, "steps": cli.trainer.global_step, "seed": cli.config.seed_everything}
    config = adapter_config(module, parts.family, training)
    sections = card_sections(cli, parts, folder / RECIPE_FILE, folder.name, None, repo_id)
    sections = replace(sections, picture=picture_of_run(folder))
    return write_adapter(folder / "adapter", config, parts, peft_model, overwrite=True, sections=sections)


def _say_where_to_go_on(cli: RecipeCLI, folder: RunFolder, reason: str) -> None:
    print(f"\n{reason}", file=sys.stderr)
    if not cli.trainer.is_global_zero:
        return
    if newest := newest_complete(cli.output_dir / "checkpoints"):
        command = f"subtoken-train fit --config {shell_words(cli.output_dir / RECIPE_FILE)} --resume"
        print(f"last good checkpoint: {newest}\ncontinue with: {command}", file=sys.stderr)
    else:
        logs = f"; its logs: {cli.output_dir / 'logs'}" if cli.trainer.global_step and cli.output_dir.is_dir() else ""
        print(f"no checkpoint was written; start again with the same command{logs}", file=sys.stderr)
    if folder.aside is not None:
        print(folder.said(), file=sys.stderr)

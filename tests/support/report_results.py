"""Results folders made without a model, the tasks that they answer, and what can be asked of a drawing."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from subtoken_train.evaluation.charts import image_of
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.results import ArmFacts, Manifest, SampleRecord, SampleWriter, prompt_digest
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evaluation.tasks.task import Sample, Task

ROWS = 40
KINDS = ("colour", "count")


class FakeAccuracy(TaskMetric):
    def compute(self) -> dict[str, float]:
        accuracy = sum(self.score(*row) for row in self.rows) / len(self.rows)
        return {"accuracy": accuracy, "worst": accuracy**2}

    @staticmethod
    def score(prediction, reference) -> float:
        return float(prediction == reference["answer"])


@dataclass
class FakeTask(Task):
    """``ROWS`` questions; reports never ask for them."""

    name: ClassVar[str] = "fake"
    modality: ClassVar[str] = "image"
    hub_id: ClassVar[str | None] = "nobody/nothing"
    rows: ClassVar[int | None] = ROWS
    primary: ClassVar[str] = "accuracy"
    where: ClassVar[str] = "nowhere"

    def samples(self) -> list[Sample]:
        raise AssertionError("a report reads records alone")

    def metric(self) -> TaskMetric:
        return FakeAccuracy()


def register(monkeypatch, *names: str, primary: str = "accuracy") -> None:
    for name in names:
        monkeypatch.setitem(TASKS, name, type("FakeTask", (FakeTask,), {"name": name, "primary": primary}))


def facts(name: str, nominal: float = 1.0, **changes) -> ArmFacts:
    standard = {
        "backbone": "llava-hf/llava-1.5-7b-hf", "adapter": "adapters/lora", "reducer": "-", "groups": "-",
        "eviction": "-", "protocol": "query_aware", "acts": "in prefill" if nominal < 1 else "-", "anchor": None,
        "trained": True, "seed": None,
    }  # fmt: skip
    return ArmFacts(name=name, nominal_kv=nominal, **{**standard, **changes})


def answers(right: Iterable[int], wrong: str = "no") -> list[str]:
    """``yes`` for the samples of ``right``, ``wrong`` for all others."""
    chosen = set(right)
    return ["yes" if i in chosen else wrong for i in range(ROWS)]


def write_run(
    folder: Path,
    arm: ArmFacts,
    task: str,
    predictions: list[str],
    *,
    rows: int | None = None,
    expected: int | None = ROWS,
    primary: str = "accuracy",
    digest: str = "the same samples",
    source: str | None = None,
    overhead: int = 0,
    index: int = 0,
    new_tokens: int = 3,
    paper: float | None = None,
) -> Path:
    place = folder / arm.name / task
    sha = hashlib.sha256(digest.encode()).hexdigest()
    asked = len(predictions) if rows is None else rows
    Manifest(arm, task, {}, source, asked, expected, primary, [], sha, {"batch_size": 4}, paper).write(place)
    SampleWriter(place).append(
        record(i, text, arm.nominal_kv, overhead, new_tokens, index) for i, text in enumerate(predictions)
    )
    return place


def write_subtasks(folder: Path, arm: ArmFacts, task: str, key: str, right: dict[str, float], primary: str) -> None:
    """Write ten answers to each of several tasks, a share ``right`` of them right; ``key`` names it in a reference."""
    rows = [(name, i < round(10 * share)) for name, share in right.items() for i in range(10)]
    place = write_run(folder, arm, task, [], rows=len(rows), expected=None, primary=primary)
    made = []
    for i, (name, hit) in enumerate(rows):
        own = record(i, "kite" if hit else "nothing", arm.nominal_kv)
        made.append(replace(own, kind=name, reference={key: name, "answers": ["kite"]}))
    SampleWriter(place).append(made)


def record(i: int, said: str, share: float, overhead: int = 0, new_tokens: int = 3, index: int = 0) -> SampleRecord:
    """Sixteen visual tokens of 1,000 bytes in two layers, and 8,000 bytes of text."""
    kept = max(1, round(16 * share))
    region = round(32_000 * share) + overhead
    return SampleRecord(
        id=str(i), kind=KINDS[i % 2], prompt_sha256=prompt_digest(f"<image>\nIs it {i}?"), reference={"answer": "yes"},
        prediction=said,
        score=0.123,  # stale on purpose: reports score again
        kv_bytes=8_000 + region, dense_kv_bytes=40_000, region_bytes=region, region_dense_bytes=32_000,
        index_bytes=index, entries_before=32, entries_after=2 * kept, values_after=2.0 * kept, new_tokens=new_tokens,
        batch_size=4, prefill_seconds=0.1, decode_seconds=0.2,
    )  # fmt: skip


def paper_grid(folder: Path, tasks: Iterable[str], routed: Iterable[int] = range(30)) -> None:
    """An uncompressed arm, an anchor and a routed arm on every task: 36, 24 and (by default) 30 of 40 right."""
    reduced = {"reducer": "fastv 0.15625"}
    routing = {"reducer": "fastv 0.25", "groups": "S16K4 linear", "anchor": "fastv25_s16k4_anchor"}
    for task in tasks:
        write_run(folder, facts("lora_only"), task, answers(range(36)))
        write_run(folder, facts("fastv25_s16k4_anchor", 0.15625, **reduced), task, answers(range(4, 28)))
        write_run(folder, facts("fastv25_s16k4", 0.15625, **routing), task, answers(routed))


def clipped_texts(figure: Figure) -> list[str]:
    image_of(figure)  # lays everything out
    unseen = {text for axis in figure.findobj(Axis) for text in _beyond(axis)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in unseen]
    boxes = {text.get_text(): text.get_window_extent() for text in texts}
    assert boxes
    width, height = figure.bbox.width, figure.bbox.height
    return [
        words
        for words, box in boxes.items()
        if box.x0 < -0.5 or box.y0 < -0.5 or box.x1 > width + 0.5 or box.y1 > height + 0.5
    ]


def _beyond(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu")


def find_browser() -> str:
    if (browser := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        pytest.skip(f"no browser here (looked for {', '.join(BROWSERS)})")
    return browser

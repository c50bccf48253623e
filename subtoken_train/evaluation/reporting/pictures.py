"""Samples and pictures from a task's own files, and kept visual tokens drawn over a picture.

What it does not show: value groups, layers before the last, and grids that are no square (Qwen-VL at native sizes).
Files are looked for on disk only; nothing is downloaded for a report.

Legend: t visual tokens.
"""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

from PIL import Image

from subtoken_train.datasets.records import open_image
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.results.manifest import Manifest
from subtoken_train.evaluation.results.store import SampleRecord, prompt_digest
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.functional.images import pad_to_square

NOT_AVAILABLE = "question and picture are not available"
SIDE = 224
"""Longer side of a thumbnail, in pixels."""
DIMMED, FOG, BARS = 0.82, (128, 128, 128), (122, 116, 104)
"""How far a dropped token goes towards which colour, and the bars of a padded picture (CLIP's mean)."""


class TaskFiles:
    """The samples of tasks, read when one is asked for and held until the report is done.

    Args:
        data_root: folder with a folder per task; None: where the manifests say that the files were.
    """

    def __init__(self, data_root: Path | None = None) -> None:
        self.data_root = data_root
        self._samples: dict[str, dict[str, Sample] | str] = {}

    def metric(self, manifest: Manifest) -> TaskMetric:
        """The task's metric."""
        return build_task(manifest.task, manifest.source, **manifest.options).metric()

    def sample(self, manifest: Manifest, record: SampleRecord) -> tuple[Sample | None, str]:
        """The sample of a record, or why it is not there."""
        samples = self._of_task(manifest)
        if isinstance(samples, str):
            return None, samples
        sample = samples.get(record.id)
        if sample is None or prompt_digest(sample.prompt, sample.choices) != record.prompt_sha256:
            return (
                None,
                f"{NOT_AVAILABLE}: the files of {manifest.task} here hold another sample",
            )
        return sample, ""

    def image(self, sample: Sample) -> tuple[Image.Image | None, str]:
        """The sample's picture, or why there is none."""
        if len(sample.images) > 1:
            return None, f"the sample has {len(sample.images)} pictures: not drawn"
        try:
            return open_image(sample.images[0]), ""
        except ValueError as error:
            return None, f"the picture is not available: {error}"

    def _of_task(self, manifest: Manifest) -> dict[str, Sample] | str:
        """All samples by id, or why they are not there."""
        source = manifest.source if self.data_root is None else str(self.data_root / manifest.task)
        if manifest.source is None and TASKS[manifest.task].hub_id is None:
            source = None  # drawn by the task itself
        elif source is None or not Path(source).exists():
            place = "they were read from the Hub" if source is None else f"no {source}"
            return f"{NOT_AVAILABLE} ({place}); --data-root names the folder that holds {manifest.task}/"
        key = repr((manifest.task, source, manifest.options))
        if key not in self._samples:
            try:
                task = build_task(manifest.task, source, **manifest.options)
                self._samples[key] = {sample.id: sample for sample in task.samples()}
            except (OSError, ValueError) as error:
                self._samples[key] = f"{NOT_AVAILABLE}: {error}"
        return self._samples[key]


def kept_bits(kept_visual: str, grid_bits: int | None) -> list[bool] | None:
    """The tokens of a square grid, row by row, True where one is kept; None where they are no square.

    Args:
        kept_visual: as in ``SampleRecord``; up to three bits more than tokens, which fill the last digit.
        grid_bits: how many bits every sample of the run has; None where the numbers differ, as they do for a model
            that reads pictures in their own shape: then a square number is chance.
    """
    if grid_bits is None:
        return None
    side = math.isqrt(grid_bits)
    if grid_bits - side * side > 3:
        return None
    bits = bin(int(kept_visual, 16))[2:].zfill(grid_bits)
    return [bit == "1" for bit in bits[: side * side]]


def kept_over(image: Image.Image, kept_t: list[bool]) -> Image.Image:
    """A thumbnail of the padded square that the model saw, dropped tokens dimmed."""
    side = math.isqrt(len(kept_t))
    size = (max(1, SIDE // side) * side,) * 2
    seen = pad_to_square(image, BARS).resize(size)
    depth = Image.new("L", (side, side))
    depth.putdata([0 if kept else round(255 * DIMMED) for kept in kept_t])
    return Image.composite(Image.new("RGB", size, FOG), seen, depth.resize(size, Image.Resampling.NEAREST))


def thumbnail(image: Image.Image) -> Image.Image:
    """The picture, small."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    return small


def data_uri(image: Image.Image) -> str:
    """The picture as text that an HTML page may hold."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

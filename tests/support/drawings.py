"""What can be asked of a drawing by matplotlib, and a Chromium of this machine, which draws pages."""

import shutil

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from subtoken_train.evaluation.charts import image_of


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
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here (looked for {', '.join(BROWSERS)})")
    return browser

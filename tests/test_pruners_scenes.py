"""The picture of visual pruners is drawn from the committed report."""

from xml.etree import ElementTree

import pytest

from benchmarks.pruners_scenes import SVG_FILE, WHOLE, drawing, figure, means
from tests.support.drawings import clipped_texts


def test_the_picture_is_drawn_from_the_committed_csv():
    text = SVG_FILE.read_text(encoding="utf-8")
    assert text == drawing()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name, _ in means() if name != WHOLE)


def test_its_bars_are_the_means():
    drawn = figure()
    assert clipped_texts(drawn) == []
    heights = sorted(bar.get_height() for bar in drawn.axes[0].patches)
    assert heights == pytest.approx(sorted(mean for (name, _), mean in means().items() if name != WHOLE))

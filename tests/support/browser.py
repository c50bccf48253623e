"""A Chromium of this machine, for tests that look at pages."""

from __future__ import annotations

import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu")


def find_browser() -> str:
    """The program's path; skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here (looked for {', '.join(BROWSERS)})")
    return browser

"""``docs/decoding.md``: its code runs, and its figures are those of the tests and records that it names."""

import pytest

from tests.kernels import test_interpreter
from tests.support.readme_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "decoding.md"


@pytest.mark.slow
def test_its_code_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = [block for block in blocks(PAGE) if block.mark == "run"]
    exec(compile(block.text, str(PAGE), "exec"), {})
    assert "KV" in capsys.readouterr().out


def test_its_counts_are_those_of_the_tests():
    pytest.importorskip("triton", reason="triton is not installed")
    assert f"{test_interpreter.SHARES * test_interpreter.DRAWN} drawn layers" in PAGE.read_text()

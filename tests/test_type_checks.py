"""A program that uses the package is type-checked against it: mypy reads its types and finds what is misspelt."""

from __future__ import annotations

import pytest
from mypy import api

from tests.support.places import ROOT

RIGHT = """
from subtoken_train import KVBudget, SubTokenModel

model = SubTokenModel.from_pretrained("a", eviction="kvzip", eviction_keep=0.42, kv_dtype="int8", groups=(16, 12))
answers: list[str] = model.ask("text", ["question"], max_new_tokens=8)
share: float = KVBudget(keep_ratio=0.25, num_groups=16, kept_groups=4).total_kv_fraction
"""
WRONG = """
from subtoken_train import SubTokenModel, SubTokenModle

SubTokenModel.from_pretrained("a", evictoin="kvzip")
SubTokenModel.from_pretrained("a", kv_dtype="int7")
SubTokenModel(None, None, eviction_kep=0.5)
"""


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "subtoken_train/py.typed").read_bytes() == b""


@pytest.mark.slow
def test_misspelt_keywords_words_and_names_are_found(tmp_path, monkeypatch):
    """With the project's own settings, whose cache the linter has filled."""
    monkeypatch.chdir(ROOT)

    def said(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        out, err, code = api.run(["--config-file", "pyproject.toml", "--no-error-summary", str(path)])
        assert err == ""
        return code, out

    assert said(RIGHT) == (0, "")
    code, out = said(WRONG)
    assert code == 1
    assert 'Module "subtoken_train" has no attribute "SubTokenModle"; maybe "SubTokenModel"?' in out
    assert (
        'Unexpected keyword argument "evictoin" for "from_pretrained" of "SubTokenModel"; did you mean "eviction"?'
        in out
    )
    assert "has incompatible type \"Literal['int7']\"" in out
    assert 'Unexpected keyword argument "eviction_kep" for "SubTokenModel"; did you mean "eviction_keep"?' in out
    assert out.count("error:") == 4

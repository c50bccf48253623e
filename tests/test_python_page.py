"""``docs/python.md``: its code runs as it stands, in a checkout."""

from tests.support.readme_blocks import ROOT, blocks
from tests.support.sampling import sampled

PAGE = ROOT / "docs" / "python.md"
CODE = [block for block in blocks(PAGE) if block.mark == "run"]


@sampled("block", CODE, every=3, ids=lambda block: block.place)
def test_its_code_runs(block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(block.text, str(PAGE), "exec"), {})
    assert capsys.readouterr().out


def test_all_of_it_is_code_that_runs():
    assert len(CODE) == len(blocks(PAGE)) == 3

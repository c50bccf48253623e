"""README's table is that of the committed records."""

from benchmarks.front_table import END, PAGE, START, table


def test_readme_shows_the_records():
    assert PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0] == table()

"""docs/papers.md: what its generator makes, with every row of every table of the papers, and true claims of tests."""

import re

import papers
import pytest
from papers import overview

from .conftest import ROOT
from .test_reproduce_rows import SCORED, SHARED

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
# Typed from the papers, by table: the numbers of each row. Mao's Table 1 has three to a row, of which two are stars.
NUMBERS = {
    "Schlag et al. 2021, Table 1": """26.6 27.7; 25.5 26.8; 24.2 24.4; 24.9 25.3; 26.7 27.7; 26.2 26.9; 26.2 27.1""",
    "Schlag et al. 2021, Table 2": """33.0 34.1; 37.1 38.3; 34.1 35.5; 39.0 39.6; 36.1 37.2; 27.9 29.6; 31.1 33.0;
        29.7 31.5; 32.2 33.8; 30.0 31.8""",
    "Schlag et al. 2021, Table 3": "30.4 32.1; 29.2 31.2; 29.7 31.5; 28.1 31.1",
    "Schlag et al. 2021, Table 4": "> 260 > 260; 27.8 29.4; 65.7 65.5; 29.3 30.1; 26.4 27.4; 24.6 25.5",
    "Schlag et al. 2021, Table 5": "38.0 38.8; 36.0 37.0; 37.7 38.8; 33.9 35.0",
    "Schlag et al. 2021, Table 6": "d_dot 256; d_dot 384; d_dot 512",
    "Schlag et al. 2021, Section 6.3": "66 K words/s; 63 K words/s; 63 K words/s; 33 K words/s; 57 K words/s",
    "Schlag et al. 2021, Figure 1": "DPFP-1",
    "Schlag et al. 2021, Figures 2 and 4": "softmax linear dpfp-1 dpfp-2 dpfp-3; favor-64 favor-128 favor-512",
    "Schlag et al. 2021, Figures 3 and 5": "sum-dpfp-1 delta-dpfp-1; tanh tanh-dpfp-1; delta-favor-128",
    "Mao 2022, Table 1": """22.6; 20.0; 21.6; 20.1; 19.7; 17.1; 18.8; 17.1; N/A; diverges""",
    "Mao 2022, Table 2": "14.5; 19.4; 16.8; 16.1; 16.4; 14.6",
    "Mao 2022, Table 3": "20.5 19.0; 27.2 30.7; 21.9 20.5; 22.1 20.7; 21.9 20.5",
    "Mao 2022, Figure 1": "decay, delta, attention",
    "Choi 2024, Table 1": "Pythia-410m; RetNet-430m; StripedMamba-430m; Pythia-1B; RetNet-1B",
    "Choi 2024, Table 2": """47.43 38.23; 43.49 39.01; 44.63 36.67; 46.21 37.83; 47.23 38.27; 40.05 36.78; 50.38 40.88;
        49.72 41.66; 48.81 39.92; 49.29 40.96; 51.33 41.11; 47.80 39.72; 49.30 41.46; 51.47 44.97; 53.66 45.29""",
    "Choi 2024, Table 3": "33.55 35.52; 45.27 39.35; 39.78 37.66",
    "Choi 2024, Table 4": """89.48 25.77; 10.84 51.40; 8.14 55.60; 11.38 49.99; 13.95 47.43; 12.24 48.81; 11.72 49.29;
        11.31 49.72; 7.92 56.10; 6.02 62.70; 9.24 54.30; 15.33 44.25; 9.73 51.47; 9.02 53.66""",
    "Choi 2024, Figure 1": "RetNet-430M and StripedMamba-430M",
}


def test_the_page_is_what_its_generator_makes() -> None:
    assert overview.page() == PAGE, "run python tools/papers_page.py"


@pytest.mark.parametrize("name", NUMBERS)
def test_every_row_of_a_table_of_the_papers_is_there(name: str) -> None:
    (section,) = (text for title, text in SECTIONS.items() if title.startswith(f"{name}:"))
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    wanted = [" ".join(cells.split()) for cells in NUMBERS[name].split(";")]
    for cells in set(wanted):
        found = [row for row in rows if re.search(rf"\| {re.escape(cells)}(?![\d.])", row)]
        assert len(found) >= wanted.count(cells), cells


def test_the_page_has_no_other_sections_and_all_rows_of_the_command() -> None:
    assert [title.split(":")[0] for title in SECTIONS] == sorted(NUMBERS, key=[t.split(":")[0] for t in SECTIONS].index)
    for name, table in papers.TABLES.items():
        for row in table.rows:
            assert SECTIONS[table.title].count(f"`{name} {row}`") == 1


def test_rows_that_are_said_to_be_trained_and_scored_by_tests_are() -> None:
    of_papers = {name: count for name, count in SCORED.items() if name.split()[0] in papers.TABLES}
    trained = {" ".join(name.split()[:2]) for name in of_papers} | {f"schlag-table4 {row}" for row in SHARED}
    trained.add("mao-table2 gpt2")
    scored = {" ".join(name.split()[:2]) for name, count in of_papers.items() if count}
    scored |= {f"schlag-table4 {row}" for row in SHARED}
    for words, expected in (("trained", trained), ("scored", scored)):
        lines = re.findall(r"^.*`((?:schlag|mao|choi)-table\d [\w-]+)`(.*)$", PAGE, flags=re.MULTILINE)
        assert {name for name, rest in lines if words in re.sub("trained as", "", rest)} == expected
    told = [word for x in overview.sections() for line in x.lines for word in line.verified.split(", ") if word]
    assert set(told) == {*overview.WORDS, "as the row"}

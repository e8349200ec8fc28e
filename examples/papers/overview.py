"""The source of docs/papers.md: each table and figure of the papers, its rows, and what was verified of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from papers import TABLES
from papers.choi import TABLE_4
from papers.grid import trained_as

WORDS = {
    "program": "a model of two layers was given the weights of one of the authors' published program, and both gave "
    "the same log-probabilities, in float64 to 4e-15 (DPFP to 3e-6, where ours adds 1e-5 to the sums of features; "
    "Transformer-XL to 2e-7, whose distances are encoded in float32). The program's CUDA kernels were replaced by "
    "their equations. Left out were positions, and the 1e-5 that it adds to the divisors of attention normalisation: "
    "with weights ten times as large as the initial ones it moves a log-probability by up to 0.02. Of Mao's package "
    "the two update rules were compared, to 3e-15. All this was done once, by hand: no test repeats it",
    "equations": "tests hold outputs and gradients against the paper's equations, written a second time",
    "source": "tests hold the converted model against transformers' model of the checkpoint",
    "built": "a test gives the row's command to fairseq and builds its model, made small",
    "trained": "a test trains the row, made small, for two updates on made-up data in the real layout",
    "scored": "a test also scores it as the paper does",
    "scaled down": "it was trained scaled down, with one to three seeds ([results](results.md))",
    "run": "it was run at all of the paper's sizes, with three seeds ([associative retrieval](synthetic.md))",
    "counted": "the number of parameters is the paper's",
}
"""What was verified, in the order of their strength for one row."""

MORE = {"wikitext103": "what-differs-from-the-papers-code", "wmt14": "what-differs-from-the-paper"}
"""Sections of the folders' READMEs with what differs for all rows of a table."""


@dataclass(frozen=True)
class Line:
    """A row of the page.

    `name`: on the command line, or in the paper. `model`: in the paper's words. `numbers`: the paper's. `command`: what
    runs it. `verified`: some of `WORDS`. `differs`: from the paper, for this row alone.
    """

    name: str
    model: str = ""
    numbers: str = ""
    command: str = ""
    verified: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Section:
    """A table or figure of a paper.

    `title`: for the heading. `text`: what holds for all rows. `lines`: its rows.
    """

    title: str
    text: str
    lines: Sequence[Line]


# By table, patterns of a row's name and what was verified; the first that fits counts.
_VERIFIED: dict[str, tuple[tuple[str, str], ...]] = {
    "schlag-table1": (
        ("standard", "built, scaled down"),
        ("linear|dpfp-256|performer-256", "equations, built, scaled down"),
        ("", "equations, built"),
    ),
    "schlag-table2": (
        ("small-delta-network", "program, equations, trained, scored, scaled down"),
        ("small-(linear-)?transformer", "program, equations, built, scaled down"),
        ("medium-(linear-transformer|delta-network)", "program, equations, built, counted"),
        ("", "program, equations, built"),
    ),
    "schlag-table3": (
        ("positions-yes-normalization-yes", "program, equations, trained"),
        ("", "program, equations, built"),
    ),
    "schlag-table4": (
        ("^delta-network", "program, equations, trained, scored, scaled down, counted"),
        ("^linear-transformer$", "program, equations, built, scaled down, counted"),
        ("transformer-xl-(64|384)", "program, equations, trained, scored, scaled down, counted"),
        ("transformer-xl", "program, equations, built, scaled down, counted"),
        ("", "program, equations, built"),
    ),
    "schlag-table5": (
        ("dpfp-sum$", "equations, trained"),
        ("dpfp-sum", "equations, built"),
        ("", "program, equations, built"),
    ),
    "mao-table1": (
        ("delta-baseline$", "equations, trained"),
        ("kernel|decay", "program, equations, built"),
        ("", "equations, built"),
    ),
    "mao-table2": (
        ("gpt2", "source, trained"),
        ("local", "equations, trained"),
        ("decay-16", "program, equations, built, scaled down"),
        ("gated-16", "equations, built, scaled down"),
        ("decay", "program, equations, built"),
        ("", "equations, built"),
    ),
    "mao-table3": (
        ("base", "built"),
        ("decay-32", "program, equations, trained, scored"),
        ("decay", "program, equations, built"),
        ("", "equations, trained"),
    ),
    "choi-table2": (
        ("mha", "source, built"),
        ("400m-ffn-retnet", "equations, trained, scored, counted"),
        ("400m-scratch-retnet|1b-attention-hybrid", "equations, trained, counted"),
        ("ffn-mamba", "equations, trained"),
        ("mamba", "equations, built"),
        ("", "equations, built, counted"),
    ),
    "choi-table3": (("ffn-frozen", "equations, trained, counted"), ("", "equations, built, counted")),
}

# By table, patterns of a row's name and what differs in that row; all that fit count.
_DIFFERS: dict[str, tuple[tuple[str, str], ...]] = {
    "schlag-table1": (
        ("384", "in the paper's Table 6 alone, without a result"),
        ("performer", "FAVOR+ as in the language models' program; the translation models' is not published"),
    ),
    "schlag-table4": (
        ("no-normalization", "of the paper's first version"),
        ("transformer-xl", "u and v are each layer's own"),
    ),
    "schlag-table5": (("m-32|nu-2", "in the paper's text alone, without a result"),),
    "mao-table1": (
        ("kernel", "the update of the published kernel; which one the number is of is not known"),
        ("delta-(baseline|no-normalization)$", "the update of Eq. 6; which one the number is of is not known"),
        ("gated|decay", "no 1/sqrt(d); open"),
        ("decay-baseline", "no such run in the paper"),
    ),
    "mao-table2": (("gated|decay", "no 1/sqrt(d); open"),),
    "mao-table3": (("decay", "no 1/sqrt(d); open"),),
    "choi-table2": (("mamba", "464.6 M parameters, the paper says 430 M"),),
}

_TEXT = {
    "schlag-table1": "Before training, the data are prepared as [examples/wmt14](../examples/wmt14/README.md) says.",
    "schlag-table4": "Scaled down, states that are carried over make the delta rule worse, where the paper says "
    "slightly better; less so if they are emptied by chance "
    "([results](results.md#what-trains-states-that-are-carried-over)).",
    "schlag-table5": "The Transformer of this table is that of Table 2.",
    "mao-table1": "The Pile is no longer distributed. On WikiText-2 both decay and "
    "gated were better with 1/sqrt(d) (`--scale-read-out`), with three seeds each.",
    "choi-table2": "`benchmarks.sh` and `summarize.py` score the models.",
    "choi-table3": "The fourth row of the paper's table, unfrozen, is `400m-ffn-retnet` of Table 2.",
}

_RETRIEVAL = "python examples/synthetic/run.py"
_RUN = "equations, run"
_SPEED = "python benchmarks/training.py --device cuda"
_NEXT = "python benchmarks/generation.py --device cuda"


def _retrieval(setting: int, models: str, differs: str = "", verified: str = _RUN) -> Line:
    command = f"`{_RETRIEVAL} --setting {setting} --models {models}`"
    return Line(models, command=command, verified=verified, differs=differs)


_OTHERS: dict[str, tuple[Section, ...]] = {
    "schlag": (
        Section(
            "Schlag et al. 2021, Figure 1: the features of DPFP",
            "The four features of two numbers (Eq. 33 to 36).",
            [Line("DPFP-1", command=f"`{_RETRIEVAL} --draw`", verified="equations")],
        ),
        Section(
            "Schlag et al. 2021, Figures 2 and 4: capacity (Setting 1)",
            "All models and sizes have three seeds. The evaluation asks for all keys, the authors' program for the "
            "first 200; [associative retrieval](synthetic.md) compares each statement.",
            [
                _retrieval(1, "softmax linear dpfp-1 dpfp-2 dpfp-3"),
                _retrieval(
                    1,
                    "favor-64 favor-128 favor-512",
                    "queries and keys are scaled; the program reads nothing from S = 100 on",
                ),
            ],
        ),
        Section(
            "Schlag et al. 2021, Figures 3 and 5: update rules (Setting 2)",
            "All models but the last have three seeds at all sizes. `--evaluate-length S` evaluates as the authors' "
            "program.",
            [
                _retrieval(2, "sum-dpfp-1 delta-dpfp-1 delta-dpfp-2 delta-linear"),
                _retrieval(2, "tanh tanh-dpfp-1", "trained as all others; the program has another rate and batch"),
                _retrieval(2, "delta-favor-64", "not in the figures; the paper had no numbers"),
                _retrieval(
                    2,
                    "delta-favor-128",
                    "in the program's list of commands alone; here at the three smallest sizes",
                    verified="equations",
                ),
            ],
        ),
        Section(
            "Schlag et al. 2021, Table 6: features by m and nu",
            "With keys of 64 numbers: 2 m and 2 nu x 64.",
            [
                Line(
                    f"d_dot {size}",
                    f"m = {size // 2}, nu = {size // 128}",
                    "",
                    f"rows `*-{size}` of `schlag-table1`",
                    "equations",
                )
                for size in (256, 384, 512)
            ],
        ),
        Section(
            "Schlag et al. 2021, Section 6.3: time and memory of the small language models",
            "Words per second in training, and memory. The command trains that architecture in its batch, in "
            "float32; `--precision bf16` takes another. Not measured as it is now "
            "([what was measured](gpu.md#what-was-measured)). `train.log` of the row has words per second, as `wps`.",
            [
                Line(name, "", numbers, f"`{_SPEED} --parts lm-small --models {model}`, of the row `{row}`")
                for name, numbers, model, row in (
                    ("Linear Transformer", "66 K words/s, 13 GB", "sum", "schlag-table2 small-linear-transformer"),
                    ("Delta Network", "63 K words/s, 14 GB", "delta", "schlag-table2 small-delta-network"),
                    ("Transformer", "33 K words/s, 17 GB", "softmax", "schlag-table2 small-transformer"),
                    ("DPFP, nu = 1", "63 K words/s", "dpfp-1", "schlag-table5 dpfp-delta"),
                    ("Performer, m = 16", "57 K words/s", "favor", "schlag-table5 performer-delta"),
                )
            ],
        ),
    ),
    "mao": (
        Section(
            "Mao 2022, Figure 1: time and memory of the next token",
            "Measured on a CPU ([performance](performance.md)), with 8 texts at a time; the paper's is of a Quadro RTX "
            "4000. On a GPU not yet.",
            [
                Line("decay, delta, attention", command="`python benchmarks/generation.py`", differs="another machine"),
                *(
                    Line(
                        f"the same on a GPU, batch of {batch}", command=f"`{_NEXT} --batch {batch}`", differs="not run"
                    )
                    for batch in (1, 32)
                ),
            ],
        ),
    ),
    "choi": (
        Section(
            "Choi 2024, Table 1: the models",
            "",
            [
                Line("Pythia-410m", "", "24 layers, 1024", "`--arch fast_weight_lm_pythia_410m`", "source, counted"),
                Line("RetNet-430m", "", "24 layers, 1024", "`--arch fast_weight_lm_retnet_430m`", "equations, counted"),
                Line(
                    "StripedMamba-430m",
                    "",
                    "24 layers, 1024",
                    "`--arch fast_weight_lm_stripedmamba_430m`",
                    "equations",
                    "464.6 M parameters, the paper says 430 M ([why](../examples/xatl/README.md))",
                ),
                Line("Pythia-1B", "", "16 layers, 2048", "`--arch fast_weight_lm_pythia_1b`", "source, counted"),
                Line("RetNet-1B", "", "16 layers, 2048", "`--arch fast_weight_lm_retnet_1b`", "equations, counted"),
            ],
        ),
        Section(
            "Choi 2024, Table 4: beside published models",
            "Perplexity on LAMBADA, then accuracies. `examples/xatl/summarize.py RUNS` makes it. Models without a row "
            "are others', whose numbers the paper cites.",
            [
                Line(
                    each.model,
                    each.tokens,
                    each.numbers,
                    f"`choi-table2 {each.row}`" if each.row else "",
                    "as the row" if each.row else "",
                )
                for each in TABLE_4
            ],
        ),
        Section(
            "Choi 2024, Figure 1: accuracy over the training",
            "Of the checkpoints that `benchmarks.sh` scored.",
            [
                Line(
                    "RetNet-430M and StripedMamba-430M",
                    "from scratch and transferred",
                    "",
                    "`examples/xatl/summarize.py RUNS --figure FILE`",
                    "",
                    "nothing to draw yet",
                )
            ],
        ),
    ),
}


def sections() -> list[Section]:
    """All of the page's, paper by paper: first those with rows for `reproduce.py`."""
    found = []
    for paper, others in _OTHERS.items():
        found += [_of_table(name) for name in TABLES if name.startswith(f"{paper}-")]
        found += others
    return found


def _of_table(name: str) -> Section:
    table = TABLES[name]
    readme = f"../examples/{table.folder}/README.md" + (f"#{MORE[table.folder]}" if table.folder in MORE else "")
    text = f"{_TEXT.get(name, '')} What differs for all rows: [{table.folder}]({readme}).".strip()
    lines = []
    for row, told in table.rows.items():
        trained = trained_as(name, row)
        command = f"`{name} {row}`" + (f", trained as `{trained}`" if trained != row else "")
        lines.append(
            Line(
                f"`{row}`",
                told.model,
                " ".join(told.numbers),
                command,
                next(words for pattern, words in _VERIFIED[name] if re.search(pattern, row)),
                "; ".join(words for pattern, words in _DIFFERS.get(name, ()) if re.search(pattern, row)),
            )
        )
    return Section(table.title, text, lines)


def page() -> str:
    """The page, in Markdown."""
    parts = [
        "# The papers, row by row",
        "Each table and figure of the three papers, with the command that makes a row, what was verified of it, and "
        "what differs. This page is made by `python tools/papers_page.py` from the rows that "
        "[examples/reproduce.py](experiments.md) runs.",
        "A command with a table's name stands for `examples/reproduce.py TABLE ROW train [SOURCE] DATA OUT` and the "
        "same with `evaluate DATA OUT`; the READMEs say how SOURCE and DATA are made. **No translation or language "
        "model has been trained at full size.** Verified means:",
        "\n".join(f"- **{word}**: {meaning}." for word, meaning in WORDS.items()),
    ]
    for section in sections():
        parts += [f"## {section.title}", *([section.text] if section.text else []), _table(section.lines)]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Line]) -> str:
    header = ("row", "model", "the paper", "command", "verified", "differs")
    rows = [(x.name, x.model, x.numbers, x.command, x.verified, x.differs) for x in lines]
    used = [number for number in range(len(header)) if any(row[number] for row in rows)]
    written = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line[number] for number in used) + " |" for line in written)

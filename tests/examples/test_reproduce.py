"""examples/reproduce.py: the command lines of the papers' rows, what is refused, and what is kept."""

import re
import shlex
import shutil
from pathlib import Path
from typing import BinaryIO

import papers
import pytest

from .conftest import EXAMPLES, options, refused, reproduce_command, shell_words

ROWS = [(name, row) for name, table in papers.TABLES.items() for row in table.rows]
FILES = """CONVERTED/model.pt CONVERTED/dict.txt TRAINED/checkpoint_best.pt TRAINED/checkpoint_last.pt TRAINED/dict.txt
    UNFINISHED/checkpoint_best.pt DATA/dict.txt OTHER/dict.txt""".split()


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders with the files that the command looks for, of which only one has something in it."""
    for path in (tmp_path / name for name in FILES):
        path.parent.mkdir(exist_ok=True)
        path.write_text("of another model 1\n" if path.parent.name == "OTHER" else "")
    return {path.name: path for path in [*tmp_path.iterdir(), tmp_path / "OUT"]}


def printed(reproduce, *words: object, **env: str) -> list[list[str]]:
    """The commands of a call, the programs without their folders."""
    status, out, err = reproduce("--print", *words, **env)
    assert status == 0, err
    commands = [shlex.split(line) for line in out.splitlines()]
    return [[Path(first).name, *others] for first, *others in commands]


CALLS = (Path(__file__).parent / "commands.txt").read_text().removeprefix("$ ").split("\n$ ")


@pytest.mark.parametrize("block", CALLS, ids=lambda block: block.split("\n")[0])
def test_a_row_is_these_command_lines(block: str, reproduce) -> None:
    """Written by hand. S, a SOURCE that is a checkpoint, is a file that is there."""
    (env, call), *lines = [shell_words(re.sub(r"\bS\b", "README.md", line)) for line in block.strip().split("\n")]
    assert printed(reproduce, *call, **env) == [words for _, words in lines]


OTHERS = "(transformer-xl|local|linformer|abc)-"  # that have no update rule
SOFTMAX = "1 standard|2 (small|medium)-transformer|mao.* (base|gpt2)$"
WANTED = f"""
--arch: schlag-table1 = fast_weight_transformer_wmt_en_de_big; small|schlag-table5 = fast_weight_lm_wiki103_small
--arch: schlag = fast_weight_lm_wiki103_medium; mao-table3 = fast_weight_lm_baevski_wiki103
--arch: mao = fast_weight_lm_gpt2_small; mha = fast_weight_lm_pythia_410m; 1b = fast_weight_lm_retnet_1b
--arch: mamba = fast_weight_lm_stripedmamba_430m; choi = fast_weight_lm_retnet_430m
--mixers: {OTHERS} = \\1
--local-window: local-32 = 32
--linformer-slots: linformer-64 = 64
--abc-slots: abc-32 = 32
--transformer-xl-memory: transformer-xl- = 384
--fast-weight-attention: standard = none; schlag-table1 = encoder,decoder,cross
--softmax-attention-layers: schlag-table1 = -; {SOFTMAX}|mha = all; 400m.*hybrid = 2,12; 1b.*hybrid = 2,8
--update-rule: {SOFTMAX}|{OTHERS}|choi = -; kernel = delta-mao; schlag-table3|delta = delta
--update-rule: mao.*(decay|gated) = \\1;  = sum
--feature-map: {SOFTMAX}|{OTHERS}|choi = -; performer = favor-schlag; dpfp = dpfp; schlag = elu
--feature-map: baseline|no-normalization = relu;  = identity
--normalization: {SOFTMAX}|{OTHERS}|choi = -; normalization-yes = sum,attention,removal; delta-baseline = sum,attention
--normalization: schlag-table3|delta|schlag.*no-normalization = sum; schlag-table1|baseline = attention
--normalization: schlag = sum,attention;  = none
--feature-dim: {SOFTMAX}|{OTHERS} = -; mao-table1 = 4; mao.*-(\\d+) = \\1
--favor-features: 1 performer-64 = 32; 1 performer-256 = 128; 1 performer-384 = 192; 1 performer-512 = 256
--favor-features: small-performer = 8; performer.*-m-32 = 32; performer = 16
--dpfp-nu: dpfp-256|-nu-2 = 2; dpfp-384 = 3; dpfp-512 = 4; dpfp = 1
--transfer: choi.*embeddings = embeddings,output; choi.*ffn = embeddings,output,feed-forward
--transfer: choi.*wo = embeddings,output,feed-forward,output-projection
--transfer: choi.*attention = embeddings,output,feed-forward,attention
--freeze: 3 ffn = embeddings,output,feed-forward; 3 wo = embeddings,output,feed-forward,output-projection
--square-projections: schlag-table1|mao|choi = -;  = none
--adaptive-softmax-dropout: schlag-table1|mao|choi = -;  = 0.1
--projection-bias: (small|medium)-transformer = none
--text-streams: schlag-table[14]|mao|choi = -; small|table5 = 96;  = 56
--max-update: choi.*1b = 50000; choi = 75000
"""
"""What a row must ask for by its name and the papers: of an option's patterns the first that fits "TABLE ROW" counts; -
is for nothing. FAVOR+ and DPFP: Table 6, and d_dot = 2 m or 2 nu d_key with d_key = 64."""


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda name: name)
def test_a_row_is_the_model_that_its_name_says(table: str, row: str, reproduce) -> None:
    recipe = papers.TABLES[table].rows[row].recipe
    (train,) = printed(reproduce, table, row, "train", *["S"] * recipe.sources, "D", "O")
    asked = options(train)
    wanted: dict[str, list[str]] = {}
    for option, _, cases in (line.partition(": ") for line in WANTED.strip().splitlines()):
        for pattern, value in (case.split(" = ") for case in cases.split("; ")):
            found = re.search(pattern, f"{table} {row}")
            wanted.setdefault(option, []).extend([found.expand(value)] if found else [])
    for option in wanted.keys() if table.startswith("choi") else wanted.keys() - {"--max-update"}:
        assert asked.get(option, "-") == next(iter(wanted[option]), "-"), option
    for option, given in {
        "--no-token-positional-embeddings": "positions-no" in row or table == "schlag-table4",
        "--unfreeze-threshold": row == "wo-lit",
        "--transfer-from": recipe.sources and "scratch" not in row,
        "--carry-over-state": table == "schlag-table4",
        "--adaptive-softmax-bias": "--square-projections" in asked,
    }.items():
        assert (option in asked) == given, option
    assert len(asked) == sum(word.startswith("--") for word in train)  # none overrides another


@pytest.mark.parametrize("table", reproduce_command.ALL)
def test_the_readme_has_the_list_of_the_papers_numbers(table: str, reproduce) -> None:
    listed = [line for line in reproduce("--list", table)[1].splitlines() if line.startswith("|")]
    assert len(listed) > 2 + 2
    assert "\n".join(listed) in (EXAMPLES / reproduce_command.ALL[table].folder / "README.md").read_text()


@refused("""
--list mao -> TABLE is mao; it must be one of schlag-table1, schlag-table2,
 -> it takes TABLE ROW train|evaluate
schlag-table2 small-delta-network learn DATA OUT -> after ROW comes learn; it must be train or evaluate
mao-table1 add-baseline train DATA OUT -> mao-table1 add-baseline train takes SOURCE DATA OUT
schlag-table2 small-delta-network train nowhere OUT -> DATA is nowhere, which holds no dict.txt; prepare.sh makes it
schlag-table1 linear train DATA OUT -> which holds no preparation.json
schlag-table2 small-delta-network evaluate DATA OUT -> OUT, which holds no checkpoint_best.pt
CHECKPOINT=a/x.pt schlag-table2 small-delta-network evaluate DATA TRAINED -> it must be the name of a file in OUT
MODE=folded schlag-table2 small-delta-network evaluate DATA TRAINED -> MODE is folded; it must be sliding, carried, con
MODE=context-512 mao-table3 decay-32 evaluate DATA TRAINED -> N a number below the length, 512
GPUS=5 schlag-table2 small-delta-network train DATA OUT -> GPUS x UPDATE_FREQ is 5; it must divide the batch of 96
UPDATE_FREQ=two schlag-table4 delta-network train DATA OUT -> UPDATE_FREQ is two; it must be a positive number
UPDATE_FREQ=2 schlag-table4 delta-network train DATA OUT -> with state carried over it must be 1
UPDATE_FREQ=5 schlag-table1 linear train DATA OUT -> must divide the batch of 172032 tokens
PRECISION=half mao-table1 add-baseline train TRAINED DATA OUT -> it must be fp16, bf16 or fp32
mao-table1 add-baseline train DATA DATA OUT -> it must be a folder with model.pt or checkpoint_best.pt
mao-table1 add-baseline train UNFINISHED DATA OUT -> its training is not finished
mao-table3 decay-32 train UNFINISHED DATA OUT -> there is no dict.txt beside
choi-table2 400m-scratch-mha train CONVERTED OTHER OUT -> whose dict.txt is not that of SOURCE
""")
def test_wrong_use_is_refused_and_leaves_nothing_behind(env: dict, words: list, message: str, places: dict, reproduce):
    status, out, err = reproduce(*(places.get(word, word) for word in words), **env)
    assert status == 1 and message in err and not out
    assert not places["OUT"].exists() and len(list(places["TRAINED"].iterdir())) == 3


def test_a_score_is_of_its_model_its_data_its_options_and_its_kernels(places, monkeypatch, reproduce, tmp_path) -> None:
    """A score of another evaluation is measured again, and not shown; a failure is no score."""
    data, out, runs, failures = places["DATA"], places["TRAINED"], [], [1]
    for name in ("valid.bin", "valid.idx", "test.bin"):
        (data / name).write_text(name)

    def stream(words: list[str], log: BinaryIO) -> int:
        runs.append(options(words)["--path"])
        log.write(f"one\ntwo\nx | Loss (base 2): 5.0, Perplexity: {len(runs)}.00\n".encode())
        return failures.pop() if failures else 0

    def score(*given: str, data: Path = data, **env: str) -> str:
        words = ("schlag-table2", "small-delta-network", "evaluate", data, out, *given)
        _, said, err = reproduce(*words, SPLITS="valid", MODE="context-0", **env)
        return said.replace(f"{out}: ", "").replace("valid, context-0", "V").removesuffix("00\n") + err

    monkeypatch.setattr(reproduce_command, "stream", stream)
    failed = score()
    assert "\none\ntwo\nx | Loss" in failed and "context-0-valid.log.unfinished says more" in failed
    again = "scoring V (context-0-valid.log is of other"
    assert score() == "scoring V\nV: Perplexity: 2." and score() == "V: Perplexity: 2."
    assert score("--fp16") == f"{again} options)\nV: Perplexity: 3." and score("--fp16") == "V: Perplexity: 3."
    assert score(FASTWEIGHTS_CPU_ISA="scalar") == f"{again} options and kernels)\nV: Perplexity: 4."
    (data / "test.bin").write_text("another test set")
    shutil.copytree(data, tmp_path / "copy")
    assert score() == f"{again} kernels)\nV: Perplexity: 5." and score(data=tmp_path / "copy") == "V: Perplexity: 5."
    for number, name in enumerate(("valid.bin", "valid.idx", "dict.txt", "words.json"), 6):
        (data / name).write_text('{"valid": {"subwords": 1, "words": 1}}')
        assert score() == f"{again} data)\nV: Perplexity: {number}."
    (out / "checkpoint_best.pt").write_text("other weights")
    assert score(data=tmp_path / "copy") == f"{again} model and data)\nV: Perplexity: 10."
    for said in (b"", b"scored: []\n"):
        (out / "context-0-valid.log").write_bytes(said)
        assert score().startswith("scoring V (context-0-valid.log does not say what it is of)\nV: Perplexity: 1")
    assert "Perplexity: 13." in score(CHECKPOINT="checkpoint_last.pt") and runs[-1] == f"{out}/checkpoint_last.pt"
    assert score() == "V: Perplexity: 12."

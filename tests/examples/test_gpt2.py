"""The scripts of examples/gpt2: from a Hugging Face folder and raw text to fine-tuned models.

Most tests have programs in fairseq's place that note how they were called. The slow ones run fairseq, on a GPT-2 of 2
layers with random weights and some lines of text: the options at a call's end override what the scripts set.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.conftest import import_plugin

from .conftest import ROOT, WIKITEXT103, options, run_script

GPT2 = ROOT / "examples" / "gpt2"
PREPARE, TARGET = GPT2 / "prepare.sh", GPT2 / "target.sh"
ROWS = {f"{row.parent.name}/{row.stem}": row for row in sorted(GPT2.glob("table*/*.sh"))}
DECAY = ROWS["table1/decay-no-feature-map"]

sys.path.append(str(GPT2))  # as when its program is started
encode = import_module("encode")

# Head dimension 32: keys of 4 and 16 numbers are folded, those of 32 are not.
SIZES = {"n_embd": 64, "n_head": 2}
TINY_MODEL = (
    "--decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 2 --decoder-ffn-embed-dim 256"
    " --max-target-positions 24"
).split()
TINY_TRAINING = "--cpu --num-workers 0 --warmup-updates 1 --max-update 2 --batch-size 2 --tokens-per-sample 16".split()

DOCUMENTS = {
    "train": [
        "the cat sat on the mat,\nand the other cats sat there:\n\n  that is the theme",
        "naïve – 日本 👩‍🔬\ttabs, \r\nand an end of text <|endoftext|> in the midst",
        "the theme of cats " * 40,
    ],
    "valid": ["the mat of the cats\n" * 20, "is it?"],
}

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with random weights, through the conversion."""
    import_plugin()
    from fairseq_fastweights.conversion.huggingface import from_huggingface
    from tests.conversion import sources

    folder = tmp_path_factory.mktemp("converted")
    from_huggingface(sources.save(folder / "huggingface", sources.model(False, **SIZES)), folder / "gpt2")
    return folder / "gpt2"


def write_documents(folder: Path) -> Path:
    """`DOCUMENTS`, in two of the forms that prepare.sh takes."""
    (folder / "train").mkdir(parents=True)
    first, *others = DOCUMENTS["train"]
    (folder / "train" / "00.txt").write_text(first + "\n", encoding="utf-8")
    lines = [json.dumps({"text": text, "meta": {}}) + "\n" for text in others]
    (folder / "train" / "01.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "val.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS["valid"]), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`DOCUMENTS` as prepare.sh leaves them."""
    folder = tmp_path_factory.mktemp("gpt2-data")
    result = run_script(PREPARE, folder / "bin", converted, write_documents(folder / "text"), env={"WORKERS": "1"})
    assert result.returncode == 0, result.stderr
    assert {path.name for path in folder.iterdir()} == {"bin", "text"}
    return folder / "bin"


@pytest.fixture(scope="session")
def target(converted: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What target.sh leaves, run as a person runs it."""
    out = tmp_path_factory.mktemp("target") / "out"
    arguments = ["train", converted, data, out, *TINY_TRAINING, *TINY_MODEL]
    result = run_script(TARGET, *arguments, env={"PRECISION": "fp32"})
    assert result.returncode == 0, result.stderr
    assert "done training" in result.stdout and (out / "train.log").read_text() == result.stdout
    return out


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders with nothing but the names that the scripts look for."""
    for folder, names in (
        ("gpt2", ("model.pt", "dict.txt", "encoder.json", "vocab.bpe", "byte_level.json")),
        ("target", ("checkpoint_best.pt", "dict.txt")),
        ("training", ("checkpoint_best.pt",)),
        ("data", ("dict.txt",)),
        ("text", ("train.txt", "valid.txt")),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    return {name.upper(): tmp_path / name for name in ("gpt2", "target", "training", "data", "text", "out")}


# --- the rows of the tables


def test_there_is_a_script_for_each_row_that_the_code_can_run() -> None:
    rules, how = ("add", "delta", "gated", "decay"), ("baseline", "no-normalization", "no-feature-map")
    table1 = [f"table1/{rule}-{one}" for rule in rules for one in how]
    table2 = ["table2/gpt2", *(f"table2/{rule}-{m}" for rule in ("gated", "decay") for m in (16, 32))]
    assert sorted(ROWS) == sorted([*table1, *table2])
    assert all(os.access(row, os.X_OK) for row in (PREPARE, TARGET, *ROWS.values()))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_settings_of_the_paper(name: str, places: dict[str, Path], commands) -> None:
    (train,) = commands(ROWS[name], "train", places["TARGET"], places["DATA"], places["OUT"])
    asked = options(train)
    assert asked["--arch"] == "fast_weight_lm_gpt2_small" and "--fp16" in asked
    assert asked["--transfer-from"] == str(places["TARGET"] / "checkpoint_best.pt")
    assert (asked["--tokens-per-sample"], asked["--batch-size"], asked["--clip-norm"]) == ("1024", "32", "1.0")
    assert (asked["--optimizer"], asked["--lr"], asked["--max-update"]) == ("adam", "0.0006", "100000")
    assert asked["--validate-interval-updates"] == asked["--save-interval-updates"] == "4000"
    if name == "table2/gpt2":
        assert asked["--softmax-attention-layers"] == "all" and "--update-rule" not in asked
        return
    rule, *how = ROWS[name].stem.split("-")
    assert asked["--update-rule"] == {"add": "sum"}.get(rule, rule)
    assert asked["--feature-dim"] == ("4" if "table1" in name else how[0])
    assert asked["--feature-map"] == ("relu" if how in (["baseline"], ["no", "normalization"]) else "identity")
    normalization = {"attention"} if how == ["baseline"] else set()
    if rule == "delta":
        normalization |= {"sum"}
    assert set(asked["--normalization"].split(",")) == (normalization or {"none"})


def test_the_target_starts_from_the_converted_model_and_can_be_a_source_when_it_is_trained(places, commands) -> None:
    call = [TARGET, "train", places["GPT2"], places["DATA"], places["OUT"]]
    (train,) = commands(*call)
    assert options(train)["--transfer-from"] == str(places["GPT2"] / "model.pt")
    assert not (places["OUT"] / "dict.txt").exists()
    (places["OUT"] / "train.log").write_text(
        "2026-01-01 00:00:00 | INFO | fairseq_cli.train | done training in 1.0 seconds\n"
    )
    commands(*call)
    assert (places["OUT"] / "dict.txt").exists()


def test_a_row_is_scored_on_the_validation_set_in_segments(places, commands) -> None:
    (scored,) = commands(DECAY, "evaluate", places["DATA"], places["TARGET"], "--fp16")
    asked = options(scored)
    assert (asked["--gen-subset"], asked["--tokens-per-sample"], asked["--context-window"]) == ("valid", "1024", "0")
    assert asked["--path"] == str(places["TARGET"] / "checkpoint_best.pt") and "--fp16" in asked


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_batch_is_divided_and_the_precision_is_chosen(precision: str, places, commands) -> None:
    env = {"GPUS": "2", "UPDATE_FREQ": "4", "PRECISION": precision}
    (train,) = commands(DECAY, "train", places["TARGET"], places["DATA"], places["OUT"], "--seed", 2, env=env)
    asked = options(train)
    assert (asked["--distributed-world-size"], asked["--update-freq"], asked["--batch-size"]) == ("2", "4", "4")
    assert [flag for flag in ("--fp16", "--bf16") if flag in asked] == [f"--{precision}"] * (precision != "fp32")
    assert asked["--seed"] == "2"


@pytest.mark.parametrize(
    ("script", "arguments", "env", "message"),
    [
        (DECAY, [], {}, "ROW.sh train SOURCE DATA OUT"),
        (DECAY, ["learn", "TARGET", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (DECAY, ["train", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (DECAY, ["train", "nowhere", "DATA", "OUT"], {}, "SOURCE is nowhere; it must be a folder with model.pt or"),
        (DECAY, ["train", "DATA", "DATA", "OUT"], {}, "it must be a folder with model.pt or checkpoint_best.pt"),
        (DECAY, ["train", "TRAINING", "DATA", "OUT"], {}, "its training is not finished"),
        (DECAY, ["train", "TARGET", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (DECAY, ["train", "TARGET", "DATA", "OUT"], {"GPUS": "3"}, "it must divide the batch of 32"),
        (DECAY, ["train", "TARGET", "DATA", "OUT"], {"PRECISION": "half"}, "PRECISION is half; it must be fp16"),
        (DECAY, ["evaluate", "DATA", "OUT"], {}, "which holds no checkpoint_best.pt"),
        (PREPARE, ["OUT", "GPT2"], {}, "prepare.sh OUT SOURCE FOLDER"),
        (PREPARE, ["OUT", "TARGET", "TEXT"], {}, "which holds no encoder.json; from-huggingface makes it"),
        (PREPARE, ["OUT", "GPT2", "nowhere"], {}, "there is no folder nowhere"),
        (PREPARE, ["OUT", "GPT2", "GPT2"], {}, "holds no train, neither a file nor a folder of files"),
        (PREPARE, ["OUT", "GPT2", "TEXT"], {"VALID_TOKENS": "0"}, "--valid-tokens: 0 is not a positive whole number"),
        (PREPARE, ["TARGET", "GPT2", "TEXT"], {}, "is finished, but with another dictionary than that of SOURCE"),
        (PREPARE, ["TRAINING", "GPT2", "TEXT"], {}, "is there, but is not what this script makes"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    script: Path, arguments: list[str], env: dict[str, str], message: str, places: dict[str, Path]
) -> None:
    (places["TARGET"] / "dict.txt").write_text("of another model 1\n")
    result = run_script(script, *(places.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0
    assert message in result.stderr
    assert not list(places["OUT"].parent.glob("*.unfinished")) and not places["OUT"].exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name != "table2/gpt2"])
def test_a_row_is_fine_tuned_from_the_target(name: str, target, data, tmp_path, commands, fairseq) -> None:
    out = tmp_path / "out"
    arguments = [target, data, out, *TINY_TRAINING, *TINY_MODEL]
    (train,) = commands(ROWS[name], "train", *arguments, env={"PRECISION": "fp32"})
    fairseq(train)
    asked = options(train)
    checkpoint = torch.load(out / "checkpoint_best.pt", weights_only=False)
    for option in ("--update-rule", "--feature-map", "--normalization", "--feature-dim"):
        assert str(checkpoint["cfg"]["model"][option[2:].replace("-", "_")]) == asked[option]
    keys = checkpoint["model"]["decoder.layers.0.self_attn.k_proj.weight"]
    size = int(asked["--feature-dim"]) if asked["--feature-map"] == "identity" else 32
    assert keys.shape == (2 * size, 64)  # of two heads


@pytest.mark.slow
def test_the_target_is_the_converted_model_trained_on_and_scored(target, converted, data, tmp_path) -> None:
    log = (target / "train.log").read_text()
    assert f"transfer from {converted / 'model.pt'}" in log
    first, last = (
        torch.load(folder / name, weights_only=False)["model"]["decoder.embed_tokens.weight"]
        for folder, name in ((converted, "model.pt"), (target, "checkpoint_best.pt"))
    )
    assert 0 < (first - last).abs().max() < 0.1
    result = run_script(ROWS["table2/gpt2"], "evaluate", data, target, "--cpu", "--tokens-per-sample", "16")
    assert result.returncode == 0, result.stderr
    scored = float(result.stdout.split("Perplexity: ")[1])
    validations = [line for line in log.splitlines() if "| valid | " in line]
    in_training = float(json.loads(validations[-1].split("| valid | ")[1])["valid_ppl"])
    assert scored == pytest.approx(in_training, abs=0.02)  # both are rounded

    summary = subprocess.run(
        [sys.executable, WIKITEXT103 / "summarize.py", target.parent], capture_output=True, text=True
    )
    assert "valid, context 0" in summary.stdout and f"{scored:.2f}" in summary.stdout and not summary.stderr


# --- prepare.sh


@pytest.mark.slow
def test_prepared_text_is_the_documents_in_the_models_subwords(converted: Path, data: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    from fairseq_fastweights.data.byte_level_bpe import ByteLevelBPE

    assert (data / "dict.txt").read_text() == (converted / "dict.txt").read_text()
    dictionary = Dictionary.load(str(data / "dict.txt"))
    decode = ByteLevelBPE(Namespace(byte_level_folder=str(converted))).decode
    for split, documents in DOCUMENTS.items():
        lines = data_utils.load_indexed_dataset(str(data / split), dictionary)
        assert all(line[-1] == dictionary.eos() and dictionary.unk() not in line for line in lines)
        # In the midst of a text, <|endoftext|> is the same symbol as the one between texts.
        texts = [decode(" ".join(dictionary[number] for number in line[:-1])) for line in lines]
        assert texts == documents
    again = run_script(PREPARE, data, converted, "FOLDER")
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer that needs no model: a subword for each character."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in encode.TOKENIZER:
        (folder / name).write_text(name)
    monkeypatch.setattr(encode, "load_tokenizer", lambda source: lambda text: " ".join(map(str, map(ord, text))))
    return folder


def test_files_are_found_by_their_names_in_order(tmp_path: Path) -> None:
    for name in ("train.jsonl.zst", "train/b.txt", "train/a.jsonl", "train/notes.md", "val.txt.gz", "valid/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {
        split: [str(path.relative_to(tmp_path)) for path in encode.find_files(tmp_path, split)]
        for split in encode.NAMES
    }
    assert found == {
        "train": ["train.jsonl.zst", "train/a.jsonl", "train/b.txt"],
        "valid": ["valid/c.txt", "val.txt.gz"],
    }


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_documents_are_what_stands_between_separators_or_on_lines_of_json(packed: str, tmp_path: Path) -> None:
    if packed == ".zst" and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    texts = ["a\u2028b\r\nc\n\nd", "  e ", "f<|endoftext|>\ng"]
    forms = {
        ".txt": "\n<|endoftext|>\n".join([*texts[:2], "", texts[2]]) + "\n",
        ".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:2], " \n", texts[2]]),
    }
    for kind, content in forms.items():
        path = tmp_path / f"text{kind}"
        path.write_bytes(content.encode())
        if packed == ".gz":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        elif packed:
            subprocess.run(["zstd", "-q", path], check=True)
        assert list(encode.documents(path.with_name(path.name + packed))) == texts


def test_a_separator_may_end_as_lines_of_windows_do(tmp_path: Path) -> None:
    """Line ends within a document stay what they are."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"a\r\nb\r\n<|endoftext|>\r\n\r\n<|endoftext|>\r\nc\r\n")
    assert list(encode.documents(path)) == ["a\r\nb", "c"]
    path.write_bytes(b"a\r\n\r\n<|endoftext|>\r\nc\r\n<|endoftext|>")
    assert list(encode.documents(path)) == ["a\r\n", "c"]


def write_json_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_no_more_documents_are_taken_than_asked_for_and_nothing_is_done_twice(source: Path, tmp_path: Path, capsys):
    path = write_json_lines(tmp_path / "train.jsonl", *({"text": "abc"} for _ in range(9)))
    write_json_lines(tmp_path / "valid.jsonl", {"text": "de"})
    call = [str(source), str(tmp_path), str(tmp_path), "--train-tokens"]
    assert encode.main([*call, "9"]) == 0
    # Each has 3 subwords and an end: two have 8, three 12.
    assert (tmp_path / "train.bpe").read_text() == "97 98 99\n" * 3
    assert (tmp_path / "valid.bpe").read_text() == "100 101\n"
    assert "3 documents, 12 tokens" in capsys.readouterr().out

    before = (tmp_path / "valid.bpe").stat()
    assert encode.main([*call, "8"]) == 0
    assert (tmp_path / "train.bpe").read_text() == "97 98 99\n" * 2
    assert (tmp_path / "valid.bpe").stat() == before
    write_json_lines(path, {"text": "f"})
    assert encode.main([*call, "8"]) == 0
    assert (tmp_path / "train.bpe").read_text() == "102\n"


def test_any_number_of_processes_gives_the_same_text_in_the_same_order(source: Path, tmp_path: Path) -> None:
    for split in encode.NAMES:
        write_json_lines(tmp_path / f"{split}.jsonl", *({"text": chr(97 + i % 26) * (i + 1)} for i in range(300)))
    texts = []
    for workers in ("1", "3"):
        (out := tmp_path / workers).mkdir()
        assert encode.main([str(source), str(tmp_path), str(out), "--workers", workers]) == 0
        texts.append([(out / f"{split}.bpe").read_text() for split in encode.NAMES])
    assert texts[0] == texts[1] and len(texts[0][0].splitlines()) == 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "train.jsonl: line 2 is no JSON object with a text in it"),
        ("train.jsonl", b'{"text": "a"}\n{"text": "b"\n', "line 2 is no JSON object"),
        ("train.jsonl", b'{"text": 1}\n', "line 1 is no JSON object"),
        ("train.txt", b"a\n\xff\n", "train.txt is not text in UTF-8"),
        ("train.txt", b" \n<|endoftext|>\n", "there is no text"),
        ("train.txt.gz", b"no such thing", "is damaged, or not what its name says"),
        ("train.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], "is damaged, or not what its name says"),
        ("train.txt.zst", b"no such thing", "is damaged, or not what its name says"),
    ],
)
def test_text_that_is_not_right_is_refused_and_nothing_looks_finished(
    name: str, content: bytes, message: str, source: Path, tmp_path: Path, capfd
) -> None:
    if name.endswith(".zst") and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    (tmp_path / name).write_bytes(content)
    (tmp_path / "valid.txt").write_text("a\n")
    assert encode.main([str(source), str(tmp_path), str(tmp_path)]) == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "train.bpe").exists() and not (tmp_path / "train.json").exists()

"""The scripts of examples/xatl: from a Hugging Face folder and raw text to models that were trained on.

Most tests have programs in fairseq's place that note how they were called. The slow ones run fairseq, on a Pythia of 2
layers with random weights and some lines of text: the options at a call's end override what the scripts set.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from fairseq.optim.lr_scheduler.cosine_lr_scheduler import CosineLRSchedule, CosineLRScheduleConfig
from fairseq.optim.sgd import SGD

from tests.conftest import import_plugin

from .conftest import ROOT, options, run_script

XATL = ROOT / "examples" / "xatl"
PREPARE, ROW = XATL / "prepare.sh", XATL / "row.sh"
ROWS = {f"{row.parent.name}/{row.stem}": row for row in sorted(XATL.glob("table*/*.sh"))}
FFN = ROWS["table2/400m-ffn-retnet"]
LIT = ROWS["table3/wo-lit"]

sys.path.append(str(XATL))  # as when its program is started
lambada = import_module("lambada")

# As sources.NEOX, with heads of 8, of which 2 dimensions are turned; retention has 4 or 8 heads.
TINY_MODEL = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 28 --decoder-attention-heads 2 --rotary-dim 2"
    " --max-target-positions 24"
).split()
TINY_TRAINING = (
    "--cpu --num-workers 0 --warmup-updates 1 --max-update 3 --batch-size 2 --tokens-per-sample 16 --log-interval 1"
).split()
FP32 = {"PRECISION": "fp32"}

E_IO = {"embeddings", "output"}
GROUPS = {
    "embeddings": E_IO,
    "ffn": E_IO | {"feed-forward"},
    "wo": E_IO | {"feed-forward", "output-projection"},
    "attention": E_IO | {"feed-forward", "attention"},
}
DOCUMENTS = {
    "train": ["the cat sat on the mat, and the other cats sat there"] * 20,
    "valid": ["the theme is a mat"] * 9,
}

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="session")
def pythia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX with random weights, through the command that converts it."""
    import_plugin()
    from tests.conversion import sources

    folder = tmp_path_factory.mktemp("pythia")
    made = sources.save(folder / "huggingface", sources.model(True))
    command = [sys.executable, "-m", "fairseq_fastweights.conversion", "from-huggingface", made, folder / "pythia"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "pythia"


@pytest.fixture(scope="session")
def data(pythia: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`DOCUMENTS` as prepare.sh leaves them."""
    folder = tmp_path_factory.mktemp("xatl-data")
    for split, documents in DOCUMENTS.items():
        (folder / f"{split}.txt").write_text("\n<|endoftext|>\n".join(documents))
    result = run_script(PREPARE, folder / "bin", pythia, folder, env={"WORKERS": "1"})
    assert result.returncode == 0, result.stderr
    return folder / "bin"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Folders with nothing but the names that the scripts look for."""
    for folder, names in (
        ("pythia", ("model.pt", "dict.txt")),
        ("data", ("dict.txt",)),
        ("trained", ("checkpoint_best.pt",)),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    return {name.upper(): tmp_path / name for name in ("pythia", "data", "trained", "out")}


# --- the rows of the tables


def test_there_is_a_script_for_each_row_that_the_code_can_run() -> None:
    table2 = [f"400m-scratch-{model}" for model in ("mha", "retnet", "hybrid")]
    table2 += [f"400m-embeddings-{model}" for model in ("mha", "retnet")]
    table2 += [f"400m-ffn-{model}" for model in ("mha", "retnet", "hybrid")]
    table2 += [f"400m-wo-{model}" for model in ("mha", "retnet")]
    table2 += ["1b-scratch-retnet", "1b-ffn-retnet", "1b-attention-hybrid"]
    table3 = ["ffn-frozen", "wo-frozen", "wo-lit"]
    assert sorted(ROWS) == sorted([*(f"table2/{row}" for row in table2), *(f"table3/{row}" for row in table3)])
    assert all(os.access(script, os.X_OK) for script in (PREPARE, ROW, XATL / "lambada.py", *ROWS.values()))
    readme = (XATL / "README.md").read_text()
    assert all(f"| `{name.split('/')[1]}.sh` |" in readme for name in ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_settings_of_the_paper(name: str, places: dict[str, Path], commands) -> None:
    (train,) = commands(ROWS[name], "train", places["PYTHIA"], places["DATA"], places["OUT"])
    asked = options(train)
    assert "--bf16" in asked and "--fp16" not in asked
    assert (asked["--optimizer"], asked["--adam-betas"], asked["--weight-decay"]) == ("adam", "(0.9, 0.95)", "0.1")
    assert (asked["--lr"], asked["--min-lr"], asked["--lr-scheduler"]) == ("0.0003", "3e-05", "cosine")
    assert (asked["--warmup-updates"], asked["--warmup-init-lr"]) == ("2000", "0")
    assert (asked["--tokens-per-sample"], asked["--batch-size"]) == ("2048", "1024")
    size, what, model = (
        name.removeprefix("table2/").split("-") if "table2" in name else ("400m", name[7:].split("-")[0], "retnet")
    )
    assert asked["--max-update"] == {"400m": "75000", "1b": "50000"}[size]
    # "The same schedule as the pythia paper but stopped early": that has 143,000 updates.
    assert int(asked["--lr-period-updates"]) + int(asked["--warmup-updates"]) == 143_000
    pythia, retnet = {"400m": ("pythia_410m", "retnet_430m"), "1b": ("pythia_1b", "retnet_1b")}[size]
    assert asked["--arch"] == f"fast_weight_lm_{pythia if model == 'mha' else retnet}"
    hybrid = {"400m": "2,12", "1b": "2,8"}[size]
    assert asked.get("--softmax-attention-layers") == {"mha": "all", "hybrid": hybrid, "retnet": None}[model]
    if what == "scratch":
        assert not {"--transfer", "--transfer-from", "--freeze"} & set(asked)
    else:
        assert set(asked["--transfer"].split(",")) == GROUPS[what]
        assert asked["--transfer-from"] == str(places["PYTHIA"] / "model.pt")
    if "table3" in name:
        assert asked["--freeze"] == asked["--transfer"]
    assert asked.get("--unfreeze-threshold") == ("0.01" if name == "table3/wo-lit" else None)
    assert asked.get("--unfreeze-patience") == ("1" if name == "table3/wo-lit" else None)
    assert ("--unfreeze-interval" in asked) == (name == "table3/wo-lit")


@pytest.mark.parametrize("name", ["table2/400m-ffn-retnet", "table2/1b-ffn-retnet"])
def test_a_row_stops_at_the_learning_rate_that_is_told(name: str, places: dict[str, Path], commands) -> None:
    (train,) = commands(ROWS[name], "train", places["PYTHIA"], places["DATA"], places["OUT"])
    asked = options(train)
    names = ("min-lr", "warmup-updates", "warmup-init-lr", "lr-period-updates", "max-update")
    settings = {option.replace("-", "_"): float(asked[f"--{option}"]) for option in names}
    cfg = CosineLRScheduleConfig(lr=[float(asked["--lr"])], **settings)
    sgd = Namespace(lr=cfg.lr, momentum=0, weight_decay=0)
    scheduler = CosineLRSchedule(cfg, SGD(sgd, [torch.zeros(1, requires_grad=True)]))
    assert scheduler.step_update(2000) == pytest.approx(0.0003)
    assert scheduler.step_update(143_000 - 1) == pytest.approx(0.00003, abs=1e-9)
    (told,) = re.findall(rf"([\d.]+) where {'400M' if '400m' in name else '1B'} rows", (XATL / "README.md").read_text())
    assert f"{scheduler.step_update(int(asked['--max-update'])):.6f}" == told.ljust(8, "0")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_batch_is_divided_and_the_precision_is_chosen(precision: str, places, commands) -> None:
    env = {"GPUS": "8", "UPDATE_FREQ": "16", "PRECISION": precision}
    call = [LIT, "train", places["PYTHIA"], places["DATA"], places["OUT"], "--unfreeze-interval", 500]
    (train,) = commands(*call, env=env)
    asked = options(train)
    assert (asked["--distributed-world-size"], asked["--update-freq"], asked["--batch-size"]) == ("8", "16", "8")
    assert [flag for flag in ("--fp16", "--bf16") if flag in asked] == [f"--{precision}"] * (precision != "fp32")
    assert ("--fp16-no-flatten-grads" in asked) == (precision == "fp16")
    assert asked["--unfreeze-interval"] == "500"


def test_a_row_is_scored_on_the_validation_set_in_segments(places, commands) -> None:
    (scored,) = commands(FFN, "evaluate", places["DATA"], places["TRAINED"], "--bf16")
    asked = options(scored)
    assert (asked["--gen-subset"], asked["--tokens-per-sample"], asked["--context-window"]) == ("valid", "2048", "0")
    assert asked["--path"] == str(places["TRAINED"] / "checkpoint_best.pt") and "--bf16" in asked


@pytest.mark.parametrize(
    ("script", "arguments", "env", "message"),
    [
        (FFN, [], {}, "ROW.sh train SOURCE DATA OUT"),
        (FFN, ["learn", "PYTHIA", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (FFN, ["train", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (FFN, ["train", "nowhere", "DATA", "OUT"], {}, "SOURCE is nowhere; it must be a folder with model.pt"),
        (FFN, ["train", "TRAINED", "DATA", "OUT"], {}, "there is no dict.txt beside"),
        (FFN, ["train", "PYTHIA", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (FFN, ["train", "PYTHIA", "OTHER", "OUT"], {}, "whose dict.txt is not that of SOURCE"),
        (ROWS["table2/400m-scratch-mha"], ["train", "PYTHIA", "OTHER", "OUT"], {}, "whose dict.txt is not that of"),
        (FFN, ["train", "PYTHIA", "DATA", "OUT"], {"GPUS": "3"}, "it must divide the batch of 1024"),
        (FFN, ["train", "PYTHIA", "DATA", "OUT"], {"PRECISION": "half"}, "PRECISION is half; it must be bf16"),
        (FFN, ["evaluate", "DATA", "OUT"], {}, "which holds no checkpoint_best.pt"),
        (ROW, ["7b", "--", "train", "PYTHIA", "DATA", "OUT"], {}, "SIZE is 7b; it must be 400m or 1b"),
        (PREPARE, ["OUT", "PYTHIA"], {}, "prepare.sh OUT SOURCE FOLDER"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    script: Path, arguments: list[str], env: dict[str, str], message: str, places: dict[str, Path]
) -> None:
    other = places["OUT"].parent / "other"
    other.mkdir()
    (other / "dict.txt").write_text("of another model 1\n")
    words = {**places, "OTHER": other}
    result = run_script(script, *(words.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0
    assert message in result.stderr
    assert not list(places["OUT"].parent.glob("*.unfinished")) and not places["OUT"].exists()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["model"]


def tiny(name: str) -> list[str]:
    """The options that make a row small; a hybrid of two layers has softmax in the second."""
    return [*TINY_TRAINING, *TINY_MODEL, *(["--softmax-attention-layers", "2"] if "hybrid" in name else [])]


KINDS = ["table2/400m-scratch-retnet", "table2/1b-attention-hybrid", "table3/ffn-frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name not in KINDS])
def test_every_row_trains(name: str, pythia: Path, data: Path, tmp_path: Path, commands, fairseq) -> None:
    (train,) = commands(ROWS[name], "train", pythia, data, tmp_path / "out", *tiny(name), env=FP32)
    fairseq(train)
    trained = weights(tmp_path / "out" / "checkpoint_best.pt")
    assert all(x.isfinite().all() for x in trained.values() if x.is_floating_point())
    assert ("decoder.layers.0.self_attn.g_proj.weight" in trained) == ("mha" not in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_each_kind_trains_what_it_says(
    name: str, pythia: Path, data: Path, tmp_path: Path, commands, fairseq
) -> None:
    """One of each kind: from scratch, transferred into a hybrid, frozen. The real ones are in bfloat16, as these."""
    (train,) = commands(ROWS[name], "train", pythia, data, tmp_path / "out", *tiny(name))
    assert "--bf16" in train
    fairseq(train)
    trained = weights(tmp_path / "out" / "checkpoint_best.pt")
    assert "decoder.layers.0.self_attn.g_proj.weight" in trained
    assert ("decoder.layers.1.self_attn.g_proj.weight" in trained) == ("hybrid" not in name)
    # fairseq writes bfloat16 as float32.
    source = {key: x.bfloat16().float() for key, x in weights(pythia / "model.pt").items()}
    # A warm-up of one update, then 0.0003 in each: what was transferred is still near the source, or there.
    distance = {
        part: max((trained[key] - source[key]).abs().max().item() for key in source if part in key and key in trained)
        for part in ("embed_tokens", "fc1.weight", "layers.0.self_attn.q_proj.w", "layers.1.self_attn.out_proj.w")
    }
    near = dict.fromkeys(distance, "scratch" not in name)
    near["layers.0.self_attn.q_proj.w"] = False
    near["layers.1.self_attn.out_proj.w"] = "attention" in name
    assert {part: how < 0.01 for part, how in distance.items()} == near, distance
    assert (distance["fc1.weight"] == 0) == ("frozen" in name)


@pytest.mark.slow
def test_a_row_runs_from_the_first_command_to_the_last(pythia, data, tmp_path, commands, fairseq, caplog) -> None:
    """LIT: what was transferred is frozen until the loss does not improve, a restart included; then scored."""
    caplog.set_level(logging.INFO)
    out = tmp_path / "out"
    call = [LIT, "train", pythia, data, out, *tiny("lit"), "--unfreeze-interval", 2, "--unfreeze-threshold", 0.99]
    result = run_script(*call, env=FP32)
    assert result.returncode == 0, result.stderr
    log = result.stdout
    assert f"transfer from {pythia / 'model.pt'}" in log and "done training" in log
    assert (out / "train.log").read_text() == log
    source, frozen = weights(pythia / "model.pt"), weights(out / "checkpoint_best.pt")
    names = [name for name in source if re.search(r"fc\d|out_proj|embed_tokens|output_projection", name)]
    assert len(names) == 2 * 6 + 2
    assert all(torch.equal(source[name], frozen[name]) for name in names)

    (again,) = commands(*call, "--max-update", 6, env=FP32)
    fairseq(again)
    assert "frozen parameters are trained from here on: after 4 updates" in caplog.text
    trained = weights(out / "checkpoint_last.pt")
    assert not any(torch.equal(source[name], trained[name]) for name in names if name.endswith("weight"))

    (scored,) = commands(LIT, "evaluate", data, out, "--cpu", "--tokens-per-sample", 16)
    fairseq(scored)
    assert "Perplexity: " in caplog.text


# --- lambada.py

PASSAGES = ["the cat sat on the mat", "that is the  theme", "and the other cats sat there:"]


def write_passages(path: Path, *texts: object) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.slow
def test_last_words_are_scored_as_one_would_by_hand(pythia: Path, tmp_path: Path, capsys) -> None:
    """Against transformers' model and tokenizer, a passage at a time."""
    import transformers

    folder = pythia.parent / "huggingface"
    model = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # The last passage ends as the model would have it.
    draw, words = random.Random(0), "the cat sat on mat and other cats there that is theme".split()
    while True:
        text = " ".join(draw.choices(words, k=6))
        with torch.no_grad():
            best = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].argmax().item()
        if re.fullmatch(r" \w+", word := tokenizer.decode([best])):
            break
    passages = [*PASSAGES, text + word]
    total, said = 0.0, 0
    for text in passages:
        context = tokenizer(text[: text.rindex(" ")].rstrip()).input_ids
        whole = tokenizer(text).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
        steps = range(len(context) - 1, len(whole) - 1)
        total += sum(logits[t, whole[t + 1]].item() for t in steps)
        said += all(logits[t].argmax().item() == whole[t + 1] for t in steps)

    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(pythia / "model.pt", out / "checkpoint_best.pt")
    file = write_passages(tmp_path / "lambada.jsonl", *passages)
    assert said == 1
    for batch in ("1", "3"):
        (out / "lambada.json").unlink(missing_ok=True)
        assert lambada.main([str(pythia), str(out), str(file), "--batch", batch, "--cpu"]) == 0
        result = json.loads((out / "lambada.json").read_text())
        assert result["passages"] == len(passages) and result["accuracy"] == pytest.approx(said / len(passages))
        assert result["perplexity"] == pytest.approx(math.exp(-total / len(passages)), rel=1e-4)
    file.unlink()
    assert lambada.main([str(pythia), str(out), str(file)]) == 0  # is done
    assert capsys.readouterr().out.count("LAMBADA, 4 passages: accuracy") == 3


def test_a_result_stands_for_its_checkpoint_and_its_file_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """With a model's score in the model's place, another one each time."""
    accuracies = iter((0.25, 0.5, 0.75, 0.125))
    monkeypatch.setattr(lambada, "load", lambda *_: (torch.nn.Identity(), Namespace(pad=int), str.strip))
    monkeypatch.setattr(lambada, "encode_passage", lambda *_: None)
    monkeypatch.setattr(lambada, "score", lambda *_: {"passages": 2, "accuracy": next(accuracies), "perplexity": 9.0})
    first, second = (write_passages(tmp_path / f"{name}.jsonl", *PASSAGES) for name in ("first", "second"))
    best, last = (tmp_path / f"checkpoint_{name}.pt" for name in ("best", "last"))
    best.touch()
    last.touch()

    def printed(file: Path, *flags: str) -> str:
        assert lambada.main([str(tmp_path), str(tmp_path), str(file), "--cpu", *flags]) == 0
        return re.findall(r"accuracy (\S+) %", capsys.readouterr().out)[0]

    other = ("--checkpoint", "checkpoint_last.pt")
    assert printed(first) == printed(first) == "25.00"
    assert printed(first, *other) == printed(first, *other) == "50.00"
    assert printed(first) == "25.00"
    assert {path.name for path in tmp_path.glob("lambada*")} == {"lambada.json", "lambada.checkpoint_last.json"}
    later = best.stat().st_mtime + 100
    os.utime(best, (later, later))
    assert printed(first) == "75.00" and printed(first, *other) == "50.00"
    assert printed(second, *other) == "12.50"
    (tmp_path / "lambada.checkpoint_last.json").rename(tmp_path / "lambada.json")  # by its name of another checkpoint
    os.utime(tmp_path / "lambada.json", (later, later))
    with pytest.raises(StopIteration):
        printed(second)
    assert lambada.main([str(tmp_path), str(tmp_path), str(first), "--checkpoint", "a/x.pt"]) == 1
    assert "--checkpoint is a/x.pt; it must be the name of a file in OUT" in capsys.readouterr().err


@pytest.mark.slow
def test_lambada_runs_as_a_command(pythia: Path, tmp_path: Path) -> None:
    """In a process where nothing of the plugin was imported before."""
    shutil.copy(pythia / "model.pt", tmp_path / "checkpoint_best.pt")
    file = write_passages(tmp_path / "lambada.jsonl", *PASSAGES)
    command = [sys.executable, XATL / "lambada.py", pythia, tmp_path, file, "--cpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path}: LAMBADA, 3 passages: accuracy" in result.stdout


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "two words"}\n{"text": "one"}\n', "line 2 must be a JSON object whose text is a passage"),
        ('{"text": " one "}\n', "line 1 must be"),
        ('{"text": "two words"\n', "line 1 must be"),
        ('["two words"]\n', "line 1 must be"),
        ('{"text": 3}\n', "line 1 must be"),
        ("", "is empty"),
        (None, "No such file"),
        ('{"text": "two words"}\n', "dict.txt; SOURCE must be a converted model"),
    ],
)
def test_what_is_no_test_is_refused(lines: str | None, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "file.jsonl"
    if lines is not None:
        file.write_text(lines)
    assert lambada.main([str(tmp_path), str(tmp_path), str(file)]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("lambada*"))

"""Small corpora and models for the examples, and ways to see and to run their commands."""

import gzip
import json
import logging
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import popen_fork
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, command, import_plugin

EXAMPLES = ROOT / "examples"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# As when their programs are started.
sys.path += [str(EXAMPLES / folder) for folder in ("", "gpt2", "smollm2", "wmt14", "xatl")]
import reproduce as reproduce_command  # noqa: E402
from common import steps  # noqa: E402

SIZES = "--{0}-layers {1} --{0}-embed-dim {2} --{0}-ffn-embed-dim {3} --{0}-attention-heads {4} "
WIDTHS = "--decoder-input-dim 32 --decoder-output-dim 32 "
BANDS = "--adaptive-input-cutoff 50,100 --adaptive-softmax-cutoff 50,100"
LLAMA = "--kv-heads 2 --max-target-positions 64 --rms-norm-eps 1e-6 --rotary-dim 8 --rotary-base 10000"
TINY = {
    "wikitext103": SIZES.format("decoder", 1, 32, 8, 2) + WIDTHS + BANDS,
    "gpt2": SIZES.format("decoder", 2, 64, 256, 2) + "--max-target-positions 24",
    # Heads of 8, of which 2 dimensions are turned; retention has 4 or 8 heads.
    "xatl": SIZES.format("decoder", 2, 16, 28, 2) + "--rotary-dim 2 --max-target-positions 24",
    "wmt14": SIZES.format("encoder", 1, 32, 32, 2) + SIZES.format("decoder", 1, 32, 32, 2),
    "smollm2": SIZES.format("decoder", 2, 32, 64, 4) + WIDTHS + LLAMA,
}
TINY["finetuning"] = TINY["wikitext103"]
"""Small models by the folder of a table: at a call's end these options override the call's."""


def tiny(table: str, row: str) -> list[str]:
    """The options that make a row's model small."""
    flags = TINY[reproduce_command.ALL[table].folder].split()
    unread = [BANDS] if table == "carried" else ["--rotary-dim 2"] if re.search("scratch-(mamba|retnet)", row) else []
    for words in unread:
        flags = " ".join(flags).replace(words, "").split()
    if "hybrid" in row:  # of two layers, the second has softmax
        flags += ["--softmax-attention-layers", "2"]
    if found := re.fullmatch(r"(.*)-(6|12|30)(-transfer)?", row if table == "smollm2" else ""):
        flags += ["--mixers", f"softmax,{found[1]}:1"]
        if found[1] == "gated-delta":
            flags += ["--gated-delta-kv-heads", "2"]
    if table == "mao-table3" and not re.match("base|linformer|abc", row):  # a head of this size has keys of 16
        flags += ["--feature-dim", "8"]
    return flags


def shell_words(line: str) -> tuple[dict[str, str], list[str]]:
    """A call as one types it: settings of the environment, and the words after them."""
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words if re.match("[A-Z_0-9]+=", word))
    return env, words[len(env) :]


def refused(text: str) -> pytest.MarkDecorator:
    """Cases of lines `[NAME=VALUE ...] WORD ... -> MESSAGE`."""
    lines = [line.split(" -> ") for line in text.strip().splitlines()]
    return pytest.mark.parametrize(("env", "words", "message"), [(*shell_words(call), told) for call, told in lines])


def options(words: list[str]) -> dict[str, str]:
    """The options of a call by name; the last one of a kind counts, as for argparse."""
    following = [*words[1:], "--"]
    return {a: "" if b.startswith("--") else b for a, b in zip(words, following, strict=True) if a.startswith("--")}


def run_script(script: Path, *arguments: object, fails: bool = False, cwd: Path = ROOT, **env: object) -> str:
    """Runs a script, in the repository's root, with this Python's fairseq; returns its output."""
    settings = {"PATH": PATH, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in env.items()}}
    words = [sys.executable if script.suffix == ".py" else "bash", str(script), *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **settings}, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done
    return done.stdout + done.stderr


def write_programs(folder: Path, bodies: Mapping[str, str]) -> str:
    """Programs of these bodies, in bash; returns a PATH with them first."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), PATH])


STUB = """
printf "%s\\0" "${0##*/}" "$@" > "$CALLS/$(date +%s%N)"
for word; do
    [ "${before:-}" != --destdir ] || dest=$word
    [ "${before:-}" != --trainpref ] || encoded=${word%/*}
    before=$word
done
"""
INTERRUPTION = '[ -z "${INTERRUPT:-}" ] || { kill -"$INTERRUPT" $PPID; sleep 0.5; exit 1; }'
"""Of the script that runs this, if the environment asks for it."""


class Programs:
    """Runs scripts with programs that note how they were called; `bodies` are their further lines in bash."""

    def __init__(self, folder: Path, bodies: Mapping[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        self.path = write_programs(folder, {name: STUB + body for name, body in bodies.items()})

    def run(self, script: Path, *arguments: object, **how: Any) -> tuple[str, list]:
        """Returns the script's output, and the calls in their order; `how` is as of `run_script`."""
        calls = self.folder / "calls"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        said = run_script(script, *arguments, **{"PATH": self.path, "CALLS": calls, **how})
        return said, [call.read_text().rstrip("\0").split("\0") for call in sorted(calls.iterdir())]


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[object, str, str]]:
    """Runs a program; returns its status, stdout and stderr."""

    def call(script: Path, *arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return call


def program(words: Sequence[str]) -> str:
    return Path(words[0]).name.removeprefix("fairseq-").replace("-", "_")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose programs are fairseq's run in copies of this process, which saves the seconds of importing it."""

    def child(words: Sequence[str], how: Mapping[str, Any]) -> None:
        os.setsid()
        for number in (1, 2):
            os.dup2(how["stdout"].fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1) for number in (1, 2))
        logging.basicConfig(format="x | %(levelname)s | %(name)s | %(message)s", stream=sys.stdout, force=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(how["env"])
        command(program(words), *words[1:])

    def popen(words: Sequence[str], **how: Any) -> Any:
        if not Path(words[0]).name.startswith("fairseq-"):
            return subprocess.Popen(words, **how)
        import_module(f"fairseq_cli.{program(words)}")
        # Process.start would first wait for those that have ended, and a step's own wait would find none.
        return popen_fork.Popen(multiprocessing.Process(target=child, args=(words, how)))

    monkeypatch.setattr(steps, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


@pytest.fixture
def reproduce(forked: None, monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """Runs reproduce.py, and returns its stdout and stderr."""

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(steps.Runner, "pause", 0.02)
    for name in ("GPUS", "UPDATE_FREQ", "PRECISION", "CHECKPOINT", "SPLITS", "MODE"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object, fails: bool = False, **env: str) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            status = reproduce_command.main([str(word) for word in words])
        said = capsys.readouterr()
        assert status == fails, said
        return said.out, said.err

    return call


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """wiki.{train,valid,test}.tokens; more than 10,000 vocabulary entries, for the bands of adaptive softmax."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = random.Random(1)
    vocabulary = ["the", "<unk>", ",", ".", "@-@", "–", "日本", "naïve"] + [f"w{i}" for i in range(10_200)]
    for split, first, drawn in (("train", [vocabulary], 8), ("valid", [], 4), ("test", [], 4)):
        paragraphs = first + [draw.choices(vocabulary[:40], k=40) for _ in range(drawn)]
        lines = [" \n", " = Title = \n", " \n", *(f" {' '.join(words)} \n" for words in paragraphs)]
        (folder / f"wiki.{split}.tokens").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tokens` as prepare.sh leaves them."""
    out = tmp_path_factory.mktemp("data") / "bin"
    texts = " ".join(f"--{split}pref {tokens}/wiki.{split}.tokens" for split in ("train", "valid", "test"))
    command("preprocess", *f"--only-source --destdir {out} {texts}".split())
    return out


@pytest.fixture(scope="session")
def published(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Transformer, trained by fairseq, beside its dictionary."""
    folder = tmp_path_factory.mktemp("published")
    flags = f"""{data} --task language_modeling --arch transformer_lm_baevski_wiki103 {TINY["wikitext103"]}
        --tokens-per-sample 16 --batch-size 2 --max-update 1 --optimizer adam --num-workers 0 --cpu
        --criterion adaptive_loss --ddp-backend legacy_ddp --save-dir {folder}"""
    command("train", *flags.split())
    shutil.copy(data / "dict.txt", folder)
    (folder / "checkpoint_best.pt").rename(folder / "model.pt")
    return folder


FIRST = "the cat sat on the mat,\nand the other cats sat there:\n\n  that is the theme"
OTHERS = ["naïve – 日本 👩‍🔬\ttabs, \r\nand an end of text <|endoftext|> in the midst", "the theme of cats " * 40]
DOCUMENTS = {"train": [FIRST, *OTHERS], "valid": ["the mat of the cats\n" * 20, "is it?"]}


def convert(folder: Path, neox: bool, script: str, **sizes: int) -> Path:
    """A converted model with random weights; beside it, in `data`, `DOCUMENTS` as `script` prepares them."""
    import_plugin()
    from fairseq_fastweights.conversion.from_huggingface import from_huggingface
    from tests.conversion import sources

    from_huggingface(sources.save(folder / "huggingface", sources.model(neox, **sizes)), folder / "source")
    (train := folder / "text" / "train").mkdir(parents=True)  # in two of the forms that prepare.sh takes
    (train / "00.txt").write_text(FIRST + "\n", encoding="utf-8")
    lines = [json.dumps({"text": document, "meta": {}}) + "\n" for document in OTHERS]
    (train / "01.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "text" / "val.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS["valid"]), encoding="utf-8")
    run_script(EXAMPLES / script, folder / "data", folder / "source", folder / "text", WORKERS=2)
    return folder / "source"


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted GPT-2. Head dimension 32: keys of 4 and 16 numbers are folded, those of 32 are not."""
    return convert(tmp_path_factory.mktemp("gpt2"), False, "gpt2/prepare.sh", n_embd=64, n_head=2)


@pytest.fixture(scope="session")
def pythia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("pythia"), True, "xatl/prepare.sh")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that examples/smollm2 converts, beside `data`; in place of the published one a random one."""
    import gguf

    from tests.conversion import llamas, test_gguf

    folder = tmp_path_factory.mktemp("smollm2")
    model = llamas.model("Llama", tie_word_embeddings=True, **test_gguf.SETTINGS)
    test_gguf.write(folder / "model.gguf", model, gguf.GGMLQuantizationType.Q4_1)
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(f" {'the cat ' * 24}sat on the mat . \n" * 4)
    env = {"GGUF": folder / "model.gguf", "VALID_WORDS": 60, "TEST_WORDS": 10, "WORKERS": 1}
    run_script(EXAMPLES / "smollm2" / "prepare.sh", folder / "out", folder, **env)
    return folder / "out" / "source"

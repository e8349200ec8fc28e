"""What cannot be converted is refused in one message that names it, and leaves nothing behind."""

from __future__ import annotations

import argparse
import errno
import io
import json
import multiprocessing
import re
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import sources

SAFETENSORS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "gpt2": sources.save(folder / "gpt2", sources.model(False)),
        "neox": sources.save(folder / "neox", sources.model(True)),
        "shards": sources.save(folder / "shards", sources.model(False), shards=3),
        "bin": sources.save(folder / "bin", sources.model(False), form="bin"),
    }


def setting(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({n: v for n, v in config.items() if v != "gone"}))

    return apply


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def cut(name: str, share: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return apply


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = torch.load(folder / "pytorch_model.bin", weights_only=True)
        state = change(state) or state
        torch.save(state, folder / "pytorch_model.bin")

    return apply


class Harmful:
    """Unpickled by an unsafe loader, this makes a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


def names_place(place: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["transformer.wte.weight"] = place
        path.write_text(json.dumps(index))

    return apply


NAME = "transformer.h.0.mlp.c_fc.weight"
BAD = {
    # The folder.
    "no config": ("gpt2", remove("config.json"), "config.json: there is no such file"),
    "config cut": ("gpt2", cut("config.json", 0.5), "config.json: this is not JSON"),
    "config a list": ("gpt2", write("config.json", b"[]"), "config.json: this must hold a JSON object, not list"),
    "no weights": ("gpt2", remove(SAFETENSORS), "there are no weights; it must hold one of model.safetensors, "),
    "no tokenizer": ("gpt2", remove("tokenizer.json"), "there is no tokenizer; it must hold tokenizer.json, or"),
    # Its configuration.
    "another family": ("gpt2", setting(model_type="llama"), "model_type is 'llama'; it must be one of gpt2, gpt_neox"),
    "no family": ("gpt2", setting(model_type="gone"), "model_type is None"),
    "no size": ("gpt2", setting(n_layer="gone"), "n_layer is None; it must be a positive whole number"),
    "size 0": ("neox", setting(hidden_size=0), "hidden_size is 0; it must be a positive whole number"),
    "heads": ("gpt2", setting(n_head=5), "n_head is 5; it must be a divisor of n_embd, 12"),
    "layer scale": (
        "gpt2",
        setting(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True; only False is supported",
    ),
    "no scale": ("gpt2", setting(scale_attn_weights=False), "scale_attn_weights is False; only True is supported"),
    "cross": ("gpt2", setting(add_cross_attention=True), "add_cross_attention is True; only False"),
    "epsilon": ("gpt2", setting(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06; only 1e-05 is supported"),
    "activation": (
        "gpt2",
        setting(activation_function="silu"),
        "activation_function is 'silu'; it must be one of gelu",
    ),
    "activation of neox": ("neox", setting(hidden_act="quick_gelu"), "hidden_act is 'quick_gelu'; it must be one of"),
    "dropout": ("gpt2", setting(resid_pdrop=1.5), "resid_pdrop is 1.5; it must be at least 0 and less than 1"),
    "no biases": ("neox", setting(attention_bias=False), "attention_bias is False; only True is supported"),
    "rope type": (
        "neox",
        setting(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        "rope_type is 'linear' and rope_scaling is None; only 'default' and null",
    ),
    "rope scaling": ("neox", setting(rope_scaling={"type": "dynamic"}), "rope_scaling is {'type': 'dynamic'}"),
    "rotary share": (
        "neox",
        setting(rope_parameters={"partial_rotary_factor": 1.5}),
        "rotary_pct is 1.5; it must be more than 0 and at most 1",
    ),
    "odd rotary": (
        "neox",
        setting(rope_parameters={"partial_rotary_factor": 0.375}),
        "rotary_pct is 0.375; of 8 dimensions a head it must take an even number",
    ),
    "end of text": ("gpt2", setting(eos_token_id=272), "eos_token_id is 272; it must be one number, from 0 to .* 271"),
    "two ends": ("gpt2", setting(eos_token_id=[1, 2]), r"eos_token_id is \[1, 2\]; it must be one number"),
    "end in text": (
        "gpt2",
        setting(eos_token_id=5),
        "eos_token_id is 5, which in tokenizer.json is .* a piece of text",
    ),
    # Its tokenizer.
    "tokenizer's size": (
        "gpt2",
        setting(vocab_size=280),
        "tokenizer.json: the tokenizer has 272 word types, but the model, in config.json's vocab_size, 280",
    ),
    "larger tokenizer": ("neox", setting(vocab_size=271), "tokenizer has 272 word types, but the model, .* 271"),
    # Its weights.
    "safetensors cut": ("gpt2", cut(SAFETENSORS, 0.7), "model.safetensors: the file is broken or cut short"),
    "safetensors cut to a few bytes": (
        "gpt2",
        cut(SAFETENSORS, 0.0001),
        "model.safetensors: the file is broken or cut",
    ),
    "safetensors of text": (
        "gpt2",
        write(SAFETENSORS, b"version https://git-lfs"),
        "model.safetensors: the file is br",
    ),
    "a shard": (
        "shards",
        lambda f: min(f.glob("model-*.safetensors")).unlink(),
        r"of \d shards 1 missing: model-00001-of-0000\d.safetensors",
    ),
    "a shard elsewhere": (
        "shards",
        names_place("../x.safetensors"),
        "names '../x.safetensors'; it must be a .safetenso",
    ),
    "a shard of a kind": ("shards", names_place("x.bin"), "names 'x.bin'; it must be a .safetensors file in the same"),
    "no places": ("shards", write("model.safetensors.index.json", b"{}"), "weight_map is missing"),
    "bin cut": ("bin", cut("pytorch_model.bin", 0.7), "pytorch_model.bin: .*broken"),
    "bin empty": ("bin", write("pytorch_model.bin", b"\0"), "pytorch_model.bin: .*broken"),
    "code": ("bin", weights(lambda s: s | {"x": Harmful()}), "pytorch_model.bin: refused: it holds something else"),
    "an object": (
        "bin",
        weights(lambda s: s | {"x": argparse.Namespace()}),
        "pytorch_model.bin: refused: it holds Namespace under 'x', not weights",
    ),
    "a list": ("bin", weights(lambda s: list(s.values())), "pytorch_model.bin: refused: it holds list, not weights"),
    "whole numbers": (
        "bin",
        weights(lambda s: s | {NAME: s[NAME].to(torch.int8)}),
        f"weight '{NAME}' is int8; it must be float16",
    ),
    "not tied": (
        "bin",
        weights(lambda s: s | {"lm_head.weight": s["lm_head.weight"] + 1}),
        "tie_word_embeddings is true in config.json, but lm_head.weight is not transformer.wte.weight",
    ),
    "a vocabulary of another size": (
        "bin",
        setting(vocab_size=288),
        r"transformer.wte.weight +\(272, 12\) +\(288, 12\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_it_is_named_and_nothing_is_left(folders, tmp_path, monkeypatch, capsys, case):
    base, spoil, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[base], tmp_path / "source")
    spoil(tmp_path / "source")
    assert main(["from-huggingface", "source", "target"]) == 2
    error = capsys.readouterr().err
    assert "from-huggingface: error: " in error and "Traceback" not in error
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_weights_that_do_not_fit_are_in_one_table(folders, tmp_path, capsys):
    shutil.copytree(folders["bin"], tmp_path / "source")

    def spoil(state: dict) -> None:
        del state["transformer.ln_f.bias"]
        state["transformer.h.1.ln_1.weight"] = torch.ones(5)
        state["transformer.h.2.ln_1.weight"] = torch.ones(12)

    weights(spoil)(tmp_path / "source")
    assert main(["from-huggingface", str(tmp_path / "source"), str(tmp_path / "target")]) == 2
    lines = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert "the weights do not fit config.json (3 of 30):" in rows[0][0]
    assert rows[1:] == [
        ["weight", "found", "expected"],
        ["transformer.h.1.ln_1.weight", "(5,)", "(12,)"],
        ["transformer.h.2.ln_1.weight", "(12,)", "nothing of this name"],
        ["transformer.ln_f.bias", "missing", "(12,)"],
    ]


@pytest.fixture(scope="module")
def converted(folders, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "neox"
    assert main(["from-huggingface", str(folders["neox"]), str(target)]) == 0
    return target


@pytest.mark.parametrize("command", ["from-huggingface", "to-huggingface"])
def test_nothing_is_overwritten(folders, converted, tmp_path, capsys, command):
    source = folders["neox"] if command == "from-huggingface" else converted
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        assert main([command, str(source), str(tmp_path / name)]) == 2
        assert f"{name}: TARGET exists; nothing is overwritten" in capsys.readouterr().err
    assert main([command, str(source), str(tmp_path / "no" / "where")]) == 2
    assert "TARGET's parent folder must exist" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("failing", ["torch.save", "safetensors.torch.save_file"])
def test_a_failure_in_the_middle_leaves_nothing(folders, converted, tmp_path, monkeypatch, failing):
    def fail(content, file, **_):
        Path(file if isinstance(file, Path) else file.name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(failing, fail)
    back = failing != "torch.save"
    with pytest.raises(KeyboardInterrupt):
        if back:
            main(["to-huggingface", str(converted), str(tmp_path / "target")])
        else:
            main(["from-huggingface", str(folders["neox"]), str(tmp_path / "target")])
    assert not list(tmp_path.iterdir())


def run_limited(size: int, *arguments: str) -> tuple[int, str]:
    """The exit code of a conversion that can write no file larger than `size`, and what it prints of errors."""
    # Python ignores SIGXFSZ, so that a file that grows too large is an error of the call that writes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with redirect_stderr(io.StringIO()) as said:
        return main(list(arguments)), said.getvalue()


@pytest.mark.parametrize("command", ["from-huggingface", "to-huggingface"])
@pytest.mark.parametrize("size", [100, 16_000])  # where the file begins, and amid the weights
def test_a_file_that_cannot_be_written_is_one_line(folders, converted, tmp_path, command, size):
    source, target = folders["neox"] if command == "from-huggingface" else converted, tmp_path / "target"
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:  # the limit is for good
        code, said = process.submit(run_limited, size, command, str(source), str(target)).result()
    assert code == 2 and "Traceback" not in said
    last = said.splitlines()[-1]
    assert f"{command}: error: {target}: TARGET cannot be written: model." in last and "File too large" in last
    assert not list(tmp_path.iterdir())


def test_any_file_that_cannot_be_written_is_named_with_the_target(folders, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fairseq_fastweights.conversion.tokenizer.Tokenizer.write", fail)
    assert main(["from-huggingface", str(folders["gpt2"]), str(tmp_path / "target")]) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path / 'target'}: TARGET cannot be written: [Errno {errno.ENOSPC}] No space left" in error
    assert not list(tmp_path.iterdir())


def checkpoint(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = torch.load(folder / "model.pt", weights_only=True)
        change(state["model"])
        torch.save(state, folder / "model.pt")

    return apply


BACK = {
    "no record": (remove("conversion.json"), "SOURCE must be a folder that from-huggingface wrote"),
    "record": (write("conversion.json", b"{}"), "conversion.json: weights must be a list of names"),
    "no checkpoint": (remove("model.pt"), "model.pt: there is no such checkpoint"),
    "cut": (cut("model.pt", 0.5), "model.pt: .*broken"),
    "no model": (lambda f: torch.save([1], f / "model.pt"), "model.pt: this is not a checkpoint of fairseq's"),
    "weights": (
        checkpoint(lambda m: m.pop("decoder.layers.1.fc1.bias")),
        r"decoder.layers.1.fc1.bias +missing +\(28,\)",
    ),
    "code": (lambda f: torch.save({"model": Harmful()}, f / "model.pt"), "model.pt: refused: it holds something else"),
}


@pytest.mark.parametrize("case", BACK)
def test_on_the_way_back_too(converted, tmp_path, monkeypatch, capsys, case):
    spoil, message = BACK[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(converted, tmp_path / "source")
    spoil(tmp_path / "source")
    assert main(["to-huggingface", "source", "target"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

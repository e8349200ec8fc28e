"""What cannot be converted is refused in one message that names it, and leaves nothing behind."""

from __future__ import annotations

import argparse
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
from typing import Any

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import sources


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Sources of from-huggingface, and "converted", one of to-huggingface."""
    folder = tmp_path_factory.mktemp("sources")
    made = {
        "gpt2": sources.save(folder / "gpt2", sources.model(False)),
        "neox": sources.save(folder / "neox", sources.model(True)),
        "shards": sources.save(folder / "shards", sources.model(False), shards=3),
        "bin": sources.save(folder / "bin", sources.model(False), in_bin=True),
    }
    assert main(["from-huggingface", str(made["neox"]), str(folder / "converted")]) == 0
    return made | {"converted": folder / "converted"}


Spoil = Callable[[Path], object]


def edit(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def cut(name: str, share: float) -> Spoil:
    return edit(name, lambda content: content[: int(len(content) * share)])


def setting(**changes: object) -> Spoil:
    return edit("config.json", lambda content: json.dumps(json.loads(content) | changes).encode())


def shard(place: str) -> Spoil:
    """Says that the embeddings are in the file `place`."""
    return edit(INDEX, lambda content: re.sub(rb'(wte.weight": )"[^"]+"', rf'\1"{place}"'.encode(), content))


def another_shard(folder: Path) -> None:
    """What is in one of them is in this one too."""
    shutil.copy(max(folder.glob("model-*")), folder / "x.safetensors")
    shard("x.safetensors")(folder)


def weights(change: Callable[[dict[str, Any]], object], name: str = "pytorch_model.bin") -> Spoil:
    """With what `change` makes of a file that torch.save wrote."""
    return lambda folder: torch.save(change(torch.load(folder / name, weights_only=True)), folder / name)


class Harmful:
    """Unpickled by an unsafe loader, this makes a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


SAFETENSORS, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LAYER, ROPE = "transformer.h.0.mlp.c_fc.weight", "rope_parameters"
BAD: list[tuple[str, Spoil, str]] = [
    # The folder.
    ("gpt2", shutil.rmtree, "source: SOURCE must be a folder"),
    ("gpt2", lambda f: (f / "config.json").unlink(), "config.json: there is no such file"),
    ("gpt2", cut("config.json", 0.5), "config.json: this is not JSON"),
    ("gpt2", edit("config.json", lambda _: b"[]"), "config.json: this must hold a JSON object, not list"),
    ("gpt2", lambda f: (f / SAFETENSORS).unlink(), "there are no weights; it must hold one of model.safetensors, "),
    ("gpt2", lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer; it must hold tokenizer.json, or"),
    # Its configuration.
    ("gpt2", setting(model_type="bert"), "model_type is 'bert'; it must be one of gpt2, gpt_neox, llama"),
    ("gpt2", setting(n_layer=None), "n_layer is None; it must be a positive whole number"),
    ("gpt2", setting(n_head=5), "n_head is 5; it must be a divisor of n_embd, 12"),
    ("gpt2", setting(scale_attn_by_inverse_layer_idx=True), "_layer_idx is True; only False is supported"),
    ("gpt2", setting(scale_attn_weights=False), "scale_attn_weights is False; only True is supported"),
    ("gpt2", setting(add_cross_attention=True), "add_cross_attention is True; only False"),
    ("gpt2", setting(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06; only 1e-05 is supported"),
    ("gpt2", setting(activation_function="silu"), "activation_function is 'silu'; it must be one of gelu"),
    ("gpt2", setting(resid_pdrop=1.5), "resid_pdrop is 1.5; it must be at least 0 and less than 1"),
    ("gpt2", setting(tie_word_embeddings=1), "tie_word_embeddings is 1; it must be true or false"),
    ("neox", setting(attention_bias=False), "attention_bias is False; only True is supported"),
    ("neox", setting(num_attention_heads=3), "num_attention_heads is 3; it must be a divisor of hidden_size, 16"),
    ("neox", setting(**{ROPE: {"rope_type": "linear"}}), "is 'linear' and rope_scaling is None; only 'default' and"),
    ("neox", setting(rope_scaling={"type": "dynamic"}), "rope_scaling is {'type': 'dynamic'}"),
    ("neox", setting(**{ROPE: {"partial_rotary_factor": 1.5}}), "rotary_pct is 1.5; it must be more than 0 and at mo"),
    ("neox", setting(**{ROPE: {"partial_rotary_factor": 0.375}}), "is 0.375; of 8 dimensions a head it must take an"),
    ("neox", setting(**{ROPE: {"rope_theta": 0}}), "rotary_emb_base is 0; it must be more than 0"),
    ("gpt2", setting(eos_token_id=272), "eos_token_id is 272; it must be one number, from 0 to .* 271"),
    ("gpt2", setting(eos_token_id=[5, 271]), "eos_token_id is 5, which in tokenizer.json is .* a piece of text"),
    ("gpt2", setting(eos_token_id=5), "eos_token_id is 5, which in tokenizer.json is .* a piece of text"),
    # Its tokenizer.
    ("gpt2", setting(vocab_size=280), "json: the tokenizer has 272 word types, but the model, in .*vocab_size, 280"),
    ("neox", setting(vocab_size=271), "tokenizer has 272 word types, but the model, .* 271"),
    # Its weights.
    ("gpt2", cut(SAFETENSORS, 0.7), "model.safetensors: the file is broken or cut short"),
    ("gpt2", edit(SAFETENSORS, lambda _: b"version https://git-lfs"), "model.safetensors: the file is br"),
    ("shards", lambda f: min(f.glob("model-*")).unlink(), r"of \d shards 1 missing: model-00001-of-0000\d.safetensors"),
    ("shards", shard("../x.safetensors"), "names '../x.safetensors'; it must be a .safetenso"),
    ("shards", shard("x.bin"), "names 'x.bin'; it must be a .safetensors file in the same"),
    ("shards", edit(INDEX, lambda _: b"{}"), "weight_map is missing"),
    ("shards", another_shard, "x.safetensors: weight '.*' is in another file too"),
    ("bin", cut(BIN, 0.7), "pytorch_model.bin: .*broken"),
    ("bin", weights(lambda s: s | {"x": Harmful()}), "pytorch_model.bin: refused: it holds something else"),
    ("bin", weights(lambda s: s | {"x": argparse.Namespace()}), "bin: refused: it holds Namespace under 'x', not weig"),
    ("bin", weights(lambda s: list(s.values())), "pytorch_model.bin: refused: it holds list, not weights"),
    ("bin", weights(lambda s: s | {LAYER: s[LAYER].to(torch.int8)}), f"weight '{LAYER}' is int8; it must be float16"),
    (
        "bin",
        weights(lambda s: s | {"lm_head.weight": s["lm_head.weight"] + 1}),
        "tie_word_embeddings is true in config.json, but lm_head.weight is not transformer.wte.weight",
    ),
    ("bin", setting(vocab_size=288), r"transformer.wte.weight +\(272, 12\) +\(288, 12\)"),
    # On the way back.
    ("converted", edit("conversion.json", lambda _: b"{}"), "conversion.json: weights must be a list of names"),
    ("converted", lambda f: (f / "model.pt").unlink(), "model.pt: there is no such checkpoint"),
    ("converted", cut("model.pt", 0.5), "model.pt: .*broken"),
    ("converted", lambda f: torch.save([1], f / "model.pt"), "model.pt: this is not a checkpoint of fairseq's"),
    (
        "converted",
        weights(lambda s: s["model"].pop("decoder.layers.1.fc1.bias") is None or s, "model.pt"),
        r"decoder.layers.1.fc1.bias +missing +\(28,\)",
    ),
    ("converted", lambda f: torch.save({"model": Harmful()}, f / "model.pt"), "model.pt: refused: it holds something"),
]


@pytest.mark.parametrize(("base", "spoil", "message"), BAD)
def test_it_is_named_and_nothing_is_left(folders, tmp_path, monkeypatch, capsys, base, spoil, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[base], "source")
    spoil(Path("source"))
    before = sorted(tmp_path.iterdir())
    command = "to-huggingface" if base == "converted" else "from-huggingface"
    assert main([command, "./source", "target"]) == 2
    error = capsys.readouterr().err
    assert f"{command}: error: " in error and "Traceback" not in error
    assert re.search(message, error), error
    assert sorted(tmp_path.iterdir()) == before


def test_all_weights_that_do_not_fit_are_in_one_table(folders, tmp_path, capsys):
    def spoil(state: dict[str, Any]) -> dict[str, Any]:
        del state["transformer.ln_f.bias"]
        return state | {f"transformer.h.{i}.ln_1.weight": torch.ones(size) for i, size in ((1, 5), (2, 12))}

    shutil.copytree(folders["bin"], tmp_path / "source")
    weights(spoil)(tmp_path / "source")
    assert main(["from-huggingface", str(tmp_path / "source"), str(tmp_path / "target")]) == 2
    first, *rows = capsys.readouterr().err.splitlines()
    assert "the weights do not fit config.json (3 of 30):" in first
    assert [re.split(r" {2,}", row.strip()) for row in rows] == [
        ["weight", "found", "expected"],
        ["transformer.h.1.ln_1.weight", "(5,)", "(12,)"],
        ["transformer.h.2.ln_1.weight", "(12,)", "nothing of this name"],
        ["transformer.ln_f.bias", "missing", "(12,)"],
    ]


WAYS = pytest.mark.parametrize(("command", "base"), [("from-huggingface", "neox"), ("to-huggingface", "converted")])


@WAYS
def test_nothing_is_overwritten(folders, tmp_path, capsys, command, base):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        assert main([command, str(folders[base]), str(tmp_path / name)]) == 2
        assert f"{name}: TARGET exists; nothing is overwritten" in capsys.readouterr().err
    assert main([command, str(folders[base]), str(tmp_path / "no" / "where")]) == 2
    assert "TARGET's parent folder must exist" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "folder").iterdir())


@WAYS
def test_a_failure_in_the_middle_leaves_nothing(folders, tmp_path, monkeypatch, command, base):
    def fail(content, file, **_):
        Path(file if isinstance(file, Path) else file.name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.save" if base == "neox" else "safetensors.torch.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        main([command, str(folders[base]), str(tmp_path / "target")])
    assert not list(tmp_path.iterdir())


def run_limited(size: int, *arguments: str) -> tuple[int, str]:
    """The exit code of a conversion that can write no file larger than `size`, and what it prints of errors."""
    # Python ignores SIGXFSZ, so that a file that grows too large is an error of the call that writes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with redirect_stderr(io.StringIO()) as said:
        return main(list(arguments)), said.getvalue()


@WAYS
@pytest.mark.parametrize("size", [100, 16_000])  # where the file begins, and amid the weights
def test_a_file_that_cannot_be_written_is_one_line(folders, tmp_path, command, base, size):
    target = tmp_path / "target"
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:  # the limit is for good
        code, said = process.submit(run_limited, size, command, str(folders[base]), str(target)).result()
    assert code == 2 and "Traceback" not in said
    last = said.splitlines()[-1]
    assert f"{command}: error: {target}: TARGET cannot be written: model." in last and "File too large" in last
    assert not list(tmp_path.iterdir())

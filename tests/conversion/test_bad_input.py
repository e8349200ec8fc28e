"""A source that cannot be converted is refused in one message that names it, and leaves nothing behind."""

import argparse
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import sources

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(save, tmp_path_factory) -> dict[str, Path]:
    """Sources of from-huggingface; of to-huggingface "converted" and "run", which is exported to "exported"."""
    folder = tmp_path_factory.mktemp("sources")
    forms: dict[str, dict[str, Any]] = {"gpt2": {}, "neox": {}, "shards": {"shards": 3}, "bin": {"in_bin": True}}
    made = {name: sources.save(folder / name, sources.model(name == "neox"), **form) for name, form in forms.items()}
    assert main(["from-huggingface", str(made["neox"]), str(folder / "converted")]) == 0
    save(folder / "run", "--update-rule gated")
    assert main(["to-huggingface", str(folder / "run"), str(folder / "exported")]) == 0
    return made | {name: folder / name for name in ("converted", "run", "exported")}


def edit(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def cut(name: str) -> Spoil:
    return edit(name, lambda content: content[: len(content) * 6 // 10])


def gone(name: str) -> Spoil:
    return lambda folder: min(folder.glob(name)).unlink()


def link(name: str, target: str) -> Spoil:
    """With a link in the place of a file, to one beside the folder or to a device."""

    def spoil(folder: Path) -> None:
        (folder.parent / "secret").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def setting(**changes: object) -> Spoil:
    return lambda folder: sources.set_config(folder, **changes)


def shard(place: str) -> Spoil:
    """Says that the embeddings are in the file `place`."""
    return edit(INDEX, lambda content: re.sub(rb'(wte.weight": )"[^"]+"', rf'\1"{place}"'.encode(), content))


def weights(change: Callable[[dict[str, Any]], object], name: str = "pytorch_model.bin") -> Spoil:
    """With a file of torch.save changed by `change`."""
    return lambda folder: torch.save(change(torch.load(folder / name, weights_only=True)), folder / name)


def safetensors(change: Callable[[dict], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return spoil


def flip(folder: Path) -> None:
    """Changes a bit of the last weight."""
    content = bytearray((folder / SAFETENSORS).read_bytes())
    content[-1] ^= 1
    (folder / SAFETENSORS).write_bytes(content)


def checkpoint(change: Callable[[dict], Any]) -> Spoil:
    return weights(change, "checkpoint_best.pt")


def options(**changes: Any) -> Spoil:
    return checkpoint(lambda state: state["cfg"]["model"].update(changes) or state)


def moved(name: str) -> Spoil:
    """With a link to a file beside the folder, of the same contents."""

    def spoil(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to((folder.parent / "elsewhere").absolute())

    return spoil


def without_dictionary(folder: Path) -> None:
    (folder / "dict.txt").unlink()
    checkpoint(lambda state: state["cfg"]["task"].update(data="nowhere") or state)(folder)


class Harmful:
    """Unpickled by an unsafe loader, this makes a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


COMMANDS = {"neox": "from-huggingface", "converted": "to-huggingface"}
FC1 = "model.layers.1.fc1.bias"
SAFETENSORS, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LAYER, HEAD = "transformer.h.0.mlp.c_fc.weight", "lm_head.weight"
OTHERS = {f"transformer.h.{i}.ln_1.weight": torch.ones(size) for i, size in ((1, 5), (2, 12))}
MISFITS = r"""the weights do not fit config.json \(3 of 30\):
 +weight +found +expected
 +transformer.h.1.ln_1.weight +\(5,\) +\(12,\)
 +transformer.h.2.ln_1.weight +\(12,\) +nothing of this name
 +transformer.ln_f.bias +missing +\(12,\)
$"""
BAD: list[tuple[str, Spoil, str]] = [
    # The folder and its configuration.
    ("gpt2", shutil.rmtree, "source: SOURCE must be a folder"),
    ("gpt2", gone("config.json"), "config.json: there is no such file"),
    ("gpt2", cut("config.json"), "config.json: this is not JSON"),
    ("gpt2", edit("config.json", lambda _: b"[]"), "config.json: this must hold a JSON object, not list"),
    ("gpt2", gone(SAFETENSORS), "there are no weights; it must hold one of model.safetensors, "),
    ("gpt2", gone("tokenizer.json"), "there is no tokenizer; it must hold tokenizer.json, or"),
    ("gpt2", setting(n_layer=10**9), "config.json: n_layer is 1000000000; it must be at most 10000"),
    ("gpt2", setting(eos_token_id=[5, 271]), "eos_token_id is 5, which in tokenizer.json is no added token"),
    ("gpt2", setting(vocab_size=2000), "json: the tokenizer has 272 entries, but the model, in .*vocab_size, 2000"),
    # Its weights.
    ("gpt2", cut(SAFETENSORS), "model.safetensors: the file is broken or cut short"),
    ("shards", gone("model-*"), r"of \d shards 1 missing: model-00001-of-0000\d.safetensors"),
    ("shards", shard("../x.safetensors"), "names '../x.safetensors'; it must be a .safetenso"),
    ("shards", shard("x.bin"), "names 'x.bin'; it must be a .safetensors file in the same"),
    ("shards", edit(INDEX, lambda _: b"{}"), "weight_map is missing"),
    (
        "shards",
        lambda f: [shutil.copy(max(f.glob("model-*")), f / "x.safetensors"), shard("x.safetensors")(f)],
        "x.safetensors: weight '.*' is in another file too",
    ),
    ("bin", cut(BIN), "pytorch_model.bin is cut short"),
    ("bin", weights(lambda s: s | {"x": Harmful()}), "is refused: it asks for .*open, which no"),
    ("bin", weights(lambda s: s | {"x": argparse.Namespace()}), "bin: refused: it holds Namespace under 'x', not weig"),
    ("bin", weights(lambda s: list(s.values())), "pytorch_model.bin: refused: it holds list, not weights"),
    ("bin", weights(lambda s: s | {LAYER: s[LAYER].to(torch.int8)}), f"weight '{LAYER}' is int8; it must be float16"),
    ("bin", weights(lambda s: s | {HEAD: s[HEAD] + 1}), f"is true in config.json, but {HEAD} is not transformer.wte.w"),
    ("bin", weights(lambda s: {n: x for n, x in s.items() if n != "transformer.ln_f.bias"} | OTHERS), MISFITS),
    # Links, of which the contents would be published with the model.
    ("gpt2", link("special_tokens_map.json", "../secret"), "special_tokens_map.json is a link to .*/secret; it must b"),
    ("neox", link("generation_config.json", "/dev/zero"), "config.json is a link to /dev/zero; it must be a file in"),
    ("neox", link("chat_template.jinja", "nowhere"), "chat_template.jinja cannot be read"),
    ("neox", lambda f: (f / "vocab.json").mkdir(), "vocab.json is a folder; it must be a regular file"),
    ("converted", link("huggingface/tokenizer_config.json", "../../secret"), "config.json is a link to .*/secret; it"),
    ("converted", link("huggingface/chat_template.jinja", "/dev/zero"), "jinja is a link to /dev/zero; it must be"),
    (
        "converted",
        lambda f: [shutil.move(f / "huggingface", f.parent), link("huggingface", "../huggingface")(f)],
        "huggingface/config.json is a link to ",
    ),
    # On the way back.
    ("converted", edit("conversion.json", lambda _: b"{}"), "conversion.json: weights must be a list of names"),
    ("converted", gone("model.pt"), "model.pt: there is no such checkpoint"),
    ("converted", cut("model.pt"), "source/model.pt is cut short"),
    ("converted", lambda f: torch.save([1], f / "model.pt"), "model.pt: this is not a checkpoint of fairseq's"),
    ("converted", weights(lambda s: {"model": s["model"] | {"x": 1}}, "model.pt"), "this is not a checkpoint of fairs"),
    ("converted", weights(lambda s: {"model": s["model"] | {"x": torch.ones(2)}}, "model.pt"), r"x +\(2,\) +nothing"),
    ("converted", lambda f: torch.save({"model": Harmful()}, f / "model.pt"), "model.pt is refused: it asks for .*ope"),
    # Runs of fairseq, and exported models.
    ("run", gone("checkpoint_best.pt"), "source: there is no checkpoint; it must hold one of"),
    ("run", shutil.rmtree, "source: there is no such checkpoint"),
    ("run", without_dictionary, "checkpoint_best.pt: there is no dict.txt in source or nowhere; the option data"),
    ("run", moved("dict.txt"), "dict.txt is a link to .*/elsewhere; it must be a file in source, so copy it there"),
    ("exported", moved("fairseq/dict.txt"), "fairseq/dict.txt is a link to .*/elsewhere; it must be a file in source"),
    ("run", cut("checkpoint_best.pt"), "checkpoint_best.pt is cut short"),
    ("run", checkpoint(lambda s: s | {"x": Harmful()}), "checkpoint_best.pt is refused: it asks for .*open"),
    ("run", checkpoint(lambda s: {"model": [1]}), "checkpoint_best.pt: this is not a checkpoint of fairseq's"),
    ("run", checkpoint(lambda s: {"model": s["model"]}), "checkpoint_best.pt: "),
    ("run", lambda f: (f / "dict.txt").write_text("w0 1\nw1 1\n"), "checkpoint_best.pt: .*dictionary (digest|size) is"),
    ("run", lambda f: (f / "dict.txt").write_text("w0\n"), "checkpoint_best.pt: .*dictionary"),
    ("run", checkpoint(lambda s: s["model"].pop("decoder.layers.1.fc1.bias") is None or s), r"Missing key.*1\.fc1\.bi"),
    ("run", options(decoder_ffn_embed_dim=48), "checkpoint_best.pt: .*size mismatch"),
    ("run", options(update_rule="delta"), "best.pt: the checkpoint does not fit the model: .*mixers is 'gated'"),
    ("run", options(character_embeddings=True, character_filters="[(1, 4)]"), "best.pt: "),
    ("run", options(quant_noise_pq=0.1), "best.pt: "),
    ("exported", lambda f: (f / "config.json").write_text("{"), "config.json: this is not JSON"),
    ("exported", gone(SAFETENSORS), "source: there are no weights; it must hold one of"),
    ("exported", cut(SAFETENSORS), "model.safetensors: the file is broken or cut short"),
    ("exported", flip, "model.safetensors is damaged: its weights do not have the digest"),
    ("exported", lambda f: shutil.rmtree(f / "fairseq"), "fairseq/dict.txt: there is no such file; the weights belong"),
    ("exported", lambda f: (f / "fairseq/dict.txt").write_text("w0 1\n"), "dict.txt: it has 5 entries, .* is 44"),
    ("exported", lambda f: (f / "fairseq/dict.txt").write_text("w0\n"), "dict.txt: this is not a dictionary"),
    ("exported", safetensors(lambda s: s.pop(FC1) is None or s), rf"{FC1} +missing +\(32,\)"),
    ("exported", safetensors(lambda s: s | {"x": torch.ones(2)}), r"x +\(2,\) +nothing of this name"),
    ("exported", safetensors(lambda s: s | {FC1: s[FC1].to(torch.int8)}), f"weight '{FC1}' is int8"),
    ("exported", setting(tie_word_embeddings=True), "config.json ties lm_head.weight to model.embed_tokens.weight"),
    ("exported", setting(intermediate_size=48), rf"{FC1} +\(32,\) +\(48,\)"),
    ("exported", setting(mixers=["gated", "hebb"]), "config.json: mixers is 'hebb'; it must be one of sum, gated"),
    ("exported", setting(mixer_settings={"windo": 3}), "config.json: mixer_settings holds 'windo'; it may hold"),
    ("exported", setting(hiden_size=3), "config.json: hiden_size is 3; there is no setting of this name"),
    ("exported", setting(format_version=2), "config.json: format_version is 2; this version"),
    ("exported", setting(num_hidden_layers=9999, mixers=None), "fit config.json: num_hidden_layers is 9999, and"),
    ("exported", setting(mixers=[[], "gated"]), r"config.json: mixers is '\[\]'; it must be one of"),
]


@pytest.mark.parametrize(("base", "spoil", "message"), BAD)
def test_it_is_named_and_nothing_is_left(folders, tmp_path, monkeypatch, capsys, base, spoil, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[base], "source")
    spoil(Path("source"))
    before = sorted(tmp_path.iterdir())
    command = "to-huggingface" if base in ("converted", "run") else "from-huggingface"
    assert main([command, "./source", "target"]) == 2
    error = capsys.readouterr().err
    place = "source" if base in ("run", "exported") else ""
    assert error.startswith(f"python -m fairseq_fastweights.conversion {command}: error: {place}"), error
    assert re.search(message, error), error
    first, *others = error.splitlines()
    assert not others or "the weights do not fit" in first  # of which a table follows
    assert sorted(tmp_path.iterdir()) == before


def test_of_the_original_files_those_of_known_names_come_back(folders, tmp_path, capsys):
    """Whatever else somebody put beside them."""
    shutil.copytree(folders["converted"], tmp_path / "ours")
    kept = tmp_path / "ours" / "huggingface"
    (kept / "chat_template.jinja").symlink_to("config.json")  # within the folder
    assert main(["to-huggingface", str(tmp_path / "ours"), str(tmp_path / "plain")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'plain'} is the model as a folder for transformers")
    for name in (SAFETENSORS, INDEX, BIN, "modeling_mine.py", "note.txt"):
        (kept / name).write_bytes(b"other")
    (kept / "link").symlink_to("/dev/zero")
    (kept / "folder").mkdir()
    assert main(["to-huggingface", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    plain, back = ({x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("plain", "back"))
    assert back == plain and plain["chat_template.jinja"] == plain["config.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())


@pytest.mark.parametrize("base", COMMANDS)
def test_nothing_is_overwritten_and_a_failure_in_the_middle_leaves_nothing(
    folders, tmp_path, monkeypatch, capsys, base
):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        assert main([COMMANDS[base], str(folders[base]), str(tmp_path / name)]) == 2
        assert f"{name}: TARGET exists; nothing is overwritten" in capsys.readouterr().err
    assert main([COMMANDS[base], str(folders[base]), str(tmp_path / "no" / "where")]) == 2
    assert "TARGET's parent folder must exist" in capsys.readouterr().err

    def fail(content, file, **_):
        Path(file if isinstance(file, Path) else file.name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.save" if base == "neox" else "safetensors.torch.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        main([COMMANDS[base], str(folders[base]), str(tmp_path / "target")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("base", COMMANDS)
@pytest.mark.parametrize("size", [100, 16_000])  # where the file begins, and amid the weights
def test_a_file_that_cannot_be_written_is_one_line(folders, tmp_path, capsys, base, size):
    target, (before, most) = tmp_path / "target", resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a file that grows too large is an error of the call that writes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        assert main([COMMANDS[base], str(folders[base]), str(target)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{COMMANDS[base]}: error: {target}: TARGET cannot be written: model." in said and "File too large" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("base", "part"), [("neox", "from_huggingface.read_json"), ("converted", "to_huggingface._has_original_mixers")]
)
def test_a_bug_keeps_its_traceback(folders, tmp_path, monkeypatch, base, part):
    monkeypatch.setattr(f"fairseq_fastweights.conversion.{part}", lambda *_: int("bug"))
    with pytest.raises(ValueError, match="'bug'"):
        main([COMMANDS[base], str(folders[base]), str(tmp_path / "target")])
    assert not list(tmp_path.iterdir())

"""What a user of the translation model can get wrong: a clear error, and nothing written over."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import QUIET, command, spawn
from tests.tasks.conftest import SMALL, TRANSLATION, generate, train_translation


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--encoder-update-rule delta", "encoder_update_rule is 'delta'; it must be sum: .* no order"),
        ("--cross-update-rule decay", "cross_update_rule is 'decay'; it must be sum"),
        ("--fast-weight-attention self", "fast_weight_attention is 'self'; .* encoder, decoder, cross"),
        ("--cross-self-attention --no-cross-attention", "cross_self_attention is set .* without 'decoder'"),
        ("--normalization removal", "the sum rule removes nothing"),
        ("--feature-map favor --feature-dim 7", "feature_dim is 7.*even"),
        ("--encoder-attention-heads 3", "num_heads is 3.*divisor of embed_dim, 16"),
        ("--share-all-embeddings", "--share-all-embeddings requires a joined dictionary"),
        (
            "--load-alignments --criterion label_smoothed_cross_entropy_with_alignment",
            "load_alignments is True; it must be left out",
        ),
    ],
)
def test_options_that_cannot_work_are_named(pairs, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        train_translation(pairs.data, tmp_path / "new", *flags.split())
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--update-rule hebb", "invalid choice: 'hebb'.*sum.*gated.*decay.*delta"),
        ("--feature-map cosine", "invalid choice: 'cosine'.*elu.*favor"),
        ("--fast-weight-backend cuda", "invalid choice: 'cuda'"),
    ],
)
def test_unknown_choices_are_refused_by_the_command_line(pairs, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        train_translation(pairs.data, tmp_path / "new", *flags.split())
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err, flags=re.DOTALL)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_exit_code_is_not_zero(pairs, tmp_path):
    flags = [*SMALL, *QUIET, "--optimizer", "adam", "--max-tokens", "160", "--save-dir", str(tmp_path / "new")]
    result = spawn("train", str(pairs.data), *TRANSLATION, *flags, "--encoder-update-rule", "delta")
    assert result.returncode != 0
    assert (
        result.stderr.strip().splitlines()[-1].startswith("ValueError: encoder_update_rule is 'delta'; it must be sum")
    )
    assert not list(tmp_path.rglob("*.pt"))


# ---------------------------------------------------------------------------------- alignments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--print-alignment", "print_alignment is 'hard'; it must be left out"),
        ("--print-alignment soft", "print_alignment is 'soft'; it must be left out"),
        ("--replace-unk", "replace_unk is '.*'; it must be left out"),
    ],
)
def test_a_memory_does_not_align_words(pairs, translator, tmp_path, capsys, flags, message):
    (tmp_path / "input").write_text("e1 e2\n")
    path = ["--path", str(translator / "checkpoint_last.pt"), "--input", str(tmp_path / "input")]
    with pytest.raises(ValueError, match=message):
        command("interactive", str(pairs.data), *TRANSLATION, *QUIET, *path, *flags.split())
    assert not re.search(r"^H-", capsys.readouterr().out, flags=re.MULTILINE)
    if "align" in flags:  # fairseq-generate replaces words in raw text only
        with pytest.raises(ValueError, match=message):
            generate(pairs.data, translator / "checkpoint_last.pt", tmp_path / "out", *flags.split())


# ----------------------------------------------------------------------------------- positions


@pytest.mark.slow
def test_sources_longer_than_the_model_are_named(pairs, tmp_path, capsys):
    train_translation(pairs.data, tmp_path, "--max-source-positions", "6", "--max-update", "1")
    path = tmp_path / "checkpoint_last.pt"
    longest = max(len(line.split()) + 1 for line in pairs.lines("test", "en"))
    assert longest > 6
    # fairseq's own words.
    with pytest.raises(Exception, match=r"[Ss]ize.* invalid .*max_positions=\(6, 1024\)"):
        generate(pairs.data, path, tmp_path / "out")
    found = generate(pairs.data, path, tmp_path / "out", "--skip-invalid-size-inputs-valid-test")
    fitting = [i for i, line in enumerate(pairs.lines("test", "en")) if len(line.split()) < 6]
    assert sorted(found) == fitting
    (tmp_path / "input").write_text("e1 " * 6 + "\n")
    with pytest.raises(Exception, match=r"[Ss]ize.* invalid .*max_positions=\(6, 1024\)"):
        command(
            "interactive", str(pairs.data), *TRANSLATION, *QUIET, "--path", str(path), "--input", f"{tmp_path}/input"
        )
    assert "H-0" not in capsys.readouterr().out


# ------------------------------------------------------------------- checkpoints that do not fit


def with_dictionary(data: Path, folder: Path, language: str, change: str) -> Path:
    """The same data with another dictionary: two of its words have changed places, or one more is there."""
    shutil.copytree(data, folder)
    path = folder / f"dict.{language}.txt"
    lines = path.read_text().splitlines()
    if change == "order":
        lines[0], lines[1] = lines[1], lines[0]
    else:
        lines.append("another 1")
    path.write_text("\n".join(lines) + "\n")
    return folder


CHANGES = [
    ("en", "size", "source dictionary size is 24 in the checkpoint and 25 in the model"),
    ("de", "size", "target dictionary size is 24 in the checkpoint and 25 in the model"),
    ("en", "order", "source dictionary digest is .* in the checkpoint and .* in the model"),
    ("de", "order", "target dictionary digest is"),
]


@pytest.mark.parametrize(("language", "change", "message"), CHANGES, ids=[f"{x[0]}-{x[1]}" for x in CHANGES])
def test_other_dictionaries_than_the_checkpoints_are_refused(pairs, translator, tmp_path, language, change, message):
    data = with_dictionary(pairs.data, tmp_path / "data", language, change)
    path = translator / "checkpoint_last.pt"
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        generate(data, path, tmp_path / "out")
    assert path.read_bytes() == before
    (output,) = (tmp_path / "out").iterdir()
    assert "H-" not in output.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--update-rule sum --feature-map dpfp",
            "decoder update rule is 'delta' in the checkpoint and 'sum' in the model",
        ),
        (
            "--update-rule delta --feature-map elu",
            "encoder feature map is 'dpfp' in the checkpoint and 'elu' in the model",
        ),
        ("--update-rule delta --feature-map dpfp --dpfp-nu 2", "encoder feature dim is 16 in the checkpoint and 32"),
        (
            "--update-rule delta --feature-map dpfp --fast-weight-attention encoder,decoder",
            "cross update rule is 'sum' in the checkpoint and 'none, softmax attention' in the model",
        ),
        (
            "--update-rule delta --feature-map dpfp --encoder-ffn-embed-dim 48",
            "size mismatch for encoder.layers.0.fc1.weight",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_kept(pairs, translator, tmp_path, flags, message):
    shutil.copy(translator / "checkpoint_last.pt", tmp_path)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    with pytest.raises(Exception) as error:
        train_translation(pairs.data, tmp_path, *flags.split(), "--max-update", "70")
    # fairseq wraps what a model says of a checkpoint; both are printed.
    said = [str(error.value), str(error.value.__context__)]
    assert any(re.search(message, text) for text in said), said
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_overrides_of_what_the_weights_were_made_for_are_refused(pairs, translator, tmp_path):
    path = translator / "checkpoint_last.pt"
    for overrides, message in (
        ({"fast_weight_attention": "encoder,decoder"}, "cross update rule is 'sum' .* softmax"),
        ({"cross_update_rule": "delta"}, "cross_update_rule is 'delta'; it must be sum"),
        ({"normalization": "sum,attention"}, "decoder normalization is 'sum' .* 'attention,sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(pairs.data, path, tmp_path / "out", "--model-overrides", str(overrides))


@pytest.mark.parametrize("kind", ["missing", "empty", "truncated"])
def test_a_bad_checkpoint_is_named(pairs, translator, tmp_path, kind):
    bad = tmp_path / "bad.pt"
    if kind == "truncated":
        bad.write_bytes((translator / "checkpoint_last.pt").read_bytes()[:-2000])
    elif kind == "empty":
        bad.write_bytes(b"")
    with pytest.raises(Exception) as error:
        generate(pairs.data, bad, tmp_path / "out")
    assert str(bad) in str(error.value)

"""What a user of the translation model can get wrong: a clear error, and nothing written over."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import QUIET, command
from tests.tasks.conftest import SAME_MODEL, TRANSLATION, generate, train_translation


# What the model's options may be, and which checkpoints fit it, is in tests/models.
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mixers delta,softmax:3", "mixers is 'delta,softmax:3', in which '3' is not within 1 to"),
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


def test_a_memory_does_not_align_words(pairs, translator, tmp_path, capsys):
    path = translator / "checkpoint_last.pt"
    with pytest.raises(ValueError, match="print_alignment is 'hard'; it must be left out"):
        generate(pairs.data, path, tmp_path / "out", "--print-alignment")
    # fairseq-generate replaces words in raw text only.
    (tmp_path / "input").write_text("e1 e2\n")
    flags = ["--path", str(path), "--input", str(tmp_path / "input"), "--replace-unk"]
    with pytest.raises(ValueError, match=r"replace_unk is '.*'; it must be left out"):
        command("interactive", str(pairs.data), *TRANSLATION, *QUIET, *flags)
    assert not re.search(r"^H-", capsys.readouterr().out, flags=re.MULTILINE)


def test_sources_longer_than_the_model_are_named(pairs, translator, tmp_path):
    path, shorter = translator / "checkpoint_last.pt", ["--model-overrides", "{'max_source_positions': 6}"]
    lengths = [len(line.split()) for line in pairs.lines("test", "en")]
    assert max(lengths) >= 6
    # fairseq's own words.
    with pytest.raises(Exception, match=r"[Ss]ize.* invalid .*max_positions=\(6, 1024\)"):
        generate(pairs.data, path, tmp_path / "out", *shorter)
    found = generate(pairs.data, path, tmp_path / "out", *shorter, "--skip-invalid-size-inputs-valid-test")
    assert sorted(found) == [i for i, length in enumerate(lengths) if length < 6]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--fast-weight-attention encoder,decoder",
            "cross mixers is 'sum' in the checkpoint and 'softmax' in the model",
        ),
        ("--encoder-ffn-embed-dim 48", "size mismatch for encoder.layers.0.fc1.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_kept(pairs, translator, tmp_path, flags, message):
    kept = Path(shutil.copy(translator / "checkpoint_last.pt", tmp_path))
    before = kept.read_bytes()
    with pytest.raises(Exception) as error:
        train_translation(pairs.data, tmp_path, *SAME_MODEL, *flags.split(), "--max-update", "70")
    # fairseq wraps what a model says of a checkpoint; both are printed.
    assert any(re.search(message, str(said)) for said in (error.value, error.value.__context__))
    assert kept.read_bytes() == before and list(tmp_path.iterdir()) == [kept]


def test_overrides_of_what_the_weights_were_made_for_are_refused(pairs, translator, tmp_path):
    overrides = "{'normalization': 'sum,attention'}"
    with pytest.raises(ValueError, match=r"decoder delta normalization is 'sum' .* 'attention,sum'"):
        generate(pairs.data, translator / "checkpoint_last.pt", tmp_path / "out", "--model-overrides", overrides)


@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_a_bad_checkpoint_is_named(pairs, translator, tmp_path, kind):
    bad = tmp_path / "bad.pt"
    if kind == "truncated":
        bad.write_bytes((translator / "checkpoint_last.pt").read_bytes()[:-2000])
    with pytest.raises(Exception, match=re.escape(str(bad))):
        generate(pairs.data, bad, tmp_path / "out")

"""examples/wmt14/multi30k.sh and summarize.py: models of one budget, and their table beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.conftest import options, write_training
from tests.examples.wmt14.conftest import MULTI30K, SUMMARY, Programs, summarize

# --- multi30k.sh


@pytest.mark.slow
def test_the_models_of_the_comparison_have_one_budget(stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    (programs.folder / "log").write_text("".join([*(f"H-{n}\t-1\t▁die\n" for n in range(6)), SUMMARY]))
    env = {"GENERATED": programs.folder / "log", "UPDATES": "70", "SUBSETS": "test"}
    result, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "--", "--lr", "0.1", env=env)
    assert result.returncode == 0, result.stderr
    trainings = {options(call)["--save-dir"]: options(call) for call in calls if call[0] == "fairseq-train"}
    special = {"--save-dir", "--fast-weight-attention", "--feature-map", "--favor-features", "--dpfp-nu"}
    common = [{key: call[key] for key in call if key not in special} for call in trainings.values()]
    assert len(common) == 4 and all(one == common[0] for one in common)
    assert common[0]["--max-update"] == "70" and common[0]["--lr"] == "0.1" and "--cpu" in common[0]
    own = {Path(name).name: {key: call[key] for key in special & set(call)} for name, call in trainings.items()}
    assert [one.pop("--save-dir") for one in own.values()] == list(trainings)
    assert own == {
        "softmax": {"--fast-weight-attention": "none"},
        "linear": {"--feature-map": "elu"},
        "favor": {"--feature-map": "favor", "--favor-features": "64"},
        "dpfp": {"--feature-map": "dpfp", "--dpfp-nu": "2"},
    }
    assert len([call for call in calls if call[0] == "fairseq-generate"]) == 4
    again, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "--", "--lr", "0.1", env=env)
    assert again.returncode == 0 and not calls and "training" not in again.stdout
    other, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "linear", env={**env, "UPDATES": "80"})
    assert other.returncode != 0 and not calls and "linear was begun with UPDATES=70 --lr 0.1, and" in other.stderr


def test_options_reach_a_training_as_they_are(stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    given = ["--optimizer-overrides", "{}", "--task", "a {} 'b'"]
    _, calls = programs.run(MULTI30K, stub_data, tmp_path / "o {}", "linear", "--", *given, env={"TRAIN_FAILS": "1"})
    assert [call[0] for call in calls] == ["fairseq-train"] and calls[0][-4:] == given
    assert options(calls[0])["--save-dir"] == str(tmp_path / "o {}" / "linear")


def test_a_training_of_the_comparison_that_was_cut_off_goes_on(
    stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    out = tmp_path / "out"
    cut, calls = programs.run(MULTI30K, stub_data, out, "dpfp", env={"TRAIN_FAILS": "1"})
    assert cut.returncode != 0 and "training fails" in cut.stderr and len(calls) == 1
    _again, calls = programs.run(MULTI30K, stub_data, out, "dpfp", env={"DEVICE": "gpu"})
    assert calls[0][0] == "fairseq-train" and (out / "dpfp" / "checkpoint_last.pt").exists()
    assert "--cpu" not in calls[0] and "--cpu" not in calls[1]
    assert (out / "dpfp" / "train.log").read_text().count("training fails") == 2


# --- summarize.py


def write_run(folder: Path, updates: int, finished: bool = True, arch: str = "", **results: float) -> Path:
    """A run as fairseq and generate.sh leave it."""
    write_training(folder, updates, finished, f"fairseq_cli.train | {{'model': Namespace(arch='{arch}', cpu=True)}}")
    for subset, bleu in results.items():
        values = {"bleu": bleu, "signature": "tok:13a", "compound_split_bleu": bleu + 1, "tokens_per_second": 2345.6}
        values |= {"compound_split_signature": "tok:none", "options": ["--beam", "4"]}  # type: ignore[dict-item]
        (folder / f"generate-{subset}.json").write_text(json.dumps(values))
    return folder


@pytest.mark.slow
def test_a_summary_has_the_papers_bleu_beside_ours(tmp_path: Path) -> None:
    big = "fast_weight_transformer_wmt_en_de_big"
    write_run(tmp_path / "dpfp-512", 40, arch=big, valid=25.5, test=26.25)
    write_run(tmp_path / "standard", 40, arch=big, valid=25.5, test=27.0)
    write_run(tmp_path / "linear", 20, arch="fast_weight_transformer_multi30k_en_de", valid=33, test=34)
    result = summarize(tmp_path, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert not result.stderr and result.stdout == (tmp_path / "t.md").read_text()
    assert result.stdout.splitlines() == [
        "| model | parameters | updates | valid BLEU, paper | valid BLEU | test BLEU, paper | test BLEU | test, "
        "compound-split | train subwords/s | generate subwords/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| standard | 1,234,567 | 40 | 26.6 | 25.50 | 27.7 | 27.00 | 28.00 | 1,000 | 2,346 |",
        "| linear | 1,234,567 | 20 | – | 33.00 | – | 34.00 | 35.00 | 1,000 | 2,346 |",
        "| dpfp-512 | 1,234,567 | 40 | 26.2 | 25.50 | 27.1 | 26.25 | 27.25 | 1,000 | 2,346 |",
        "",
        "- BLEU: `tok:13a`",
        "- Compound-split BLEU: `tok:none`",
        "- Generated with: `--beam 4`",
    ]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_says_what_is_unfinished_missing_or_different(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", 50, finished=False, test=9)
    with (cut / "train.log").open("a") as log:
        log.write('2026-01-01 00:00:00 | INFO | train_inner | {"num_upd')
    result = cut / "generate-test.json"
    result.write_text(result.read_text().replace("tok:13a", "tok:zh"))
    damaged = write_run(tmp_path / "damaged", 20, test=9)
    (damaged / "generate-valid.json").write_text("{}")
    write_run(tmp_path / "unscored", 20, valid=9)
    (write_run(tmp_path / "early", 0) / "train.log").write_text("starting\n")
    result = summarize(tmp_path, "cut", "damaged", "unscored", "early", "never")
    assert result.returncode == 0 and "paper" not in result.stdout
    assert "| cut | 1,234,567 | 50 (unfinished) | – | 9.00 | 10.00 | 1,000 | 2,346 |" in result.stdout
    assert "| never | missing |" in result.stdout and "| early | missing |" in result.stdout
    assert "- BLEU (cut test): `tok:zh`\n- BLEU (damaged test, unscored valid): `tok:13a`" in result.stdout
    for message in (
        "cut/train.log is of an unfinished training: it ends at update 50, last validation at update 40",
        "cut/train.log has a damaged line",
        "damaged/generate-valid.json is no result of generate.sh",
        "unscored/generate-test.json is missing: unscored is trained, but was not scored on test",
        "early/train.log ends before the model was built",
        "never/train.log is missing",
    ):
        assert message in result.stderr


def test_a_training_that_went_on_is_one_training(tmp_path: Path) -> None:
    log = write_run(tmp_path / "a", 20, finished=False) / "train.log"
    later = write_run(tmp_path / "b", 40) / "train.log"
    log.write_text(log.read_text() + later.read_text())
    assert "| a | 1,234,567 | 40 | – | – | – | 1,000 | – |" in summarize(tmp_path, "a").stdout
    log.write_text(later.read_text() + log.read_text().split("done training")[0])
    assert "40 (unfinished)" in summarize(tmp_path, "a").stdout


@pytest.mark.parametrize(
    ("folder", "message"), [("nowhere", "no folder"), (".", "no folder with a training or a result")]
)
def test_nothing_to_summarize_is_an_error(folder: str, message: str, tmp_path: Path) -> None:
    result = summarize(tmp_path / folder)
    assert result.returncode == 1 and message in result.stderr and not result.stdout

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

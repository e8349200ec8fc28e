"""fairseq-train with a transfer: one command, a report before it trains, and at the published model's full width."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import tasks
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.tasks.fast_weight_language_modeling  # noqa: F401
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from tests.conftest import evaluate, train
from tests.conversion.transfers import save_as_in_2019
from tests.models.conftest import Fairseq

ADAPTIVE = """--adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss
    --adaptive-input-factor 2 --adaptive-softmax-factor 2 --ddp-backend legacy_ddp --lr 0.003""".split()
BAEVSKI = ["--arch", "fast_weight_lm_baevski_wiki103", *ADAPTIVE]


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Transformer that was trained a little."""
    folder = tmp_path_factory.mktemp("source")
    train(corpus, folder, "--arch", "transformer_lm_baevski_wiki103", *ADAPTIVE, "--max-update", "30")
    shutil.move(folder / "checkpoint_last.pt", folder / "model.pt")
    shutil.copy(corpus / "dict.txt", folder)
    return folder


@pytest.mark.slow
def test_without_swapping_evaluation_is_the_sources(corpus, source, tmp_path):
    flags = [*BAEVSKI, "--transfer-from", str(source), "--softmax-attention-layers", "all"]
    train(corpus, tmp_path, *flags, "--max-update", "1", "--lr", "1e-30")
    flags = ["--tokens-per-sample", "16", "--gen-subset", "valid"]
    loss, tokens = evaluate(corpus, tmp_path / "checkpoint_last.pt", *flags)
    expected, of = evaluate(corpus, source / "model.pt", *flags)
    assert tokens == of and loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_one_command_swaps_and_trains_and_what_it_leaves_needs_no_source(corpus, source, tmp_path):
    moved = shutil.copytree(source, tmp_path / "source")
    flags = [*BAEVSKI, "--update-rule", "decay", "--feature-dim", "4", "--transfer-from", str(moved)]
    log = train(corpus, tmp_path / "model", *flags)
    # The report stands before what fairseq says first of the model.
    assert 0 < log.index("transfer from") < log.index("num. shared model params")
    first = float(re.findall(r'"loss": "([^"]+)"', log)[0])
    fresh = train(corpus, tmp_path / "fresh", *flags[:-2])
    assert first < float(re.findall(r'"loss": "([^"]+)"', fresh)[0])
    shutil.rmtree(moved)
    swapped, scratch = (
        evaluate(corpus, tmp_path / name / "checkpoint_last.pt", "--tokens-per-sample", "16")[0]
        for name in ("model", "fresh")
    )
    assert swapped < scratch


def test_a_dry_run_reports_and_leaves_data_and_checkpoints_alone(source, tmp_path, caplog):
    # There is nothing but a dictionary, so that data would be missed.
    (tmp_path / "data").mkdir()
    shutil.copy(source / "dict.txt", tmp_path / "data")
    save = tmp_path / "save"
    save.mkdir()
    (save / "checkpoint_last.pt").write_bytes(b"of another run")
    flags = [*BAEVSKI, "--update-rule", "decay", "--transfer-from", str(source), "--freeze", "output", "--dry-run"]
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "data", save, *flags)
    assert stopped.value.code == 0
    assert "none of them" in caplog.text and "num. shared" not in caplog.text
    assert (save / "checkpoint_last.pt").read_bytes() == b"of another run"
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"dict.txt", "checkpoint_last.pt"}


@pytest.mark.slow
def test_the_published_model_at_its_full_width(tmp_path):
    """267,744 types and 1024 dimensions in the format of 2019: read, evaluated, swapped and stepped once.

    Two of its 16 layers, which are alike: 71 of 247 million parameters.
    """
    fairseq = Fairseq(tmp_path)
    words = [f"w{i}" for i in range(267_740)]
    data = fairseq.data(words)
    sizes = "--tokens-per-sample 512 --max-target-positions 512 --criterion adaptive_loss"

    def build(arch: str, flags: str = "--decoder-layers 2"):
        args = fairseq.parse(arch, f"{sizes} {flags}", words)
        task = tasks.setup_task(args)
        torch.manual_seed(1)
        return task.build_model(convert_namespace_to_omegaconf(args).model).eval()

    with torch.device("meta"):  # sizes without numbers
        published = build("transformer_lm_baevski_wiki103", "")
    assert sum(parameter.numel() for parameter in published.parameters()) == 246_933_504
    folder = tmp_path / "published"
    model = build("transformer_lm_baevski_wiki103")
    save_as_in_2019(model, folder)
    shutil.copy(data / "dict.txt", folder)
    tokens = torch.randint(4, len(words), (2, 17), generator=torch.Generator().manual_seed(0))
    sample = {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": None},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": 32,
    }
    task = tasks.setup_task(fairseq.parse("fast_weight_lm_baevski_wiki103", sizes, words))
    criterion = AdaptiveLoss(task, sentence_avg=False)
    with torch.no_grad():
        expected = criterion(model, sample)[0].item()
        scores = model.get_normalized_probs(model(tokens[:1, :4]), log_probs=True)

    arch, taken = "fast_weight_lm_baevski_wiki103", f"--decoder-layers 2 --transfer-from {folder}"
    same = build(arch, f"{taken} --softmax-attention-layers all")
    with torch.no_grad():
        assert criterion(same, sample)[0].item() == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(same.get_normalized_probs(same(tokens[:1, :4]), log_probs=True), scores, atol=1e-5)

    swapped = build(arch, f"{taken} --update-rule decay --feature-dim 32").train()
    attention = swapped.decoder.layers[1].self_attn
    assert isinstance(attention, FastWeightAttention)
    assert attention.q_proj.weight.shape == (8 * 32, 1024)
    optimizer = torch.optim.SGD(swapped.parameters(), lr=1e-3)
    loss = criterion(swapped, sample)[0] / 32
    loss.backward()
    optimizer.step()
    assert loss.isfinite() and all(parameter.isfinite().all() for parameter in swapped.parameters())

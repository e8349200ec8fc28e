"""fairseq-train with a transfer: one command, a report before it trains, and at the published model's full width."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from fairseq import tasks
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from tests.conftest import evaluate, train
from tests.conversion.transfers import save_as_in_2019
from tests.models.conftest import Fairseq

DECAY = "--decoder-normalize-before --update-rule decay --feature-dim 4 --lr 0.003".split()


@pytest.mark.slow
def test_one_command_swaps_and_trains_and_what_it_leaves_needs_no_source(corpus, trained, tmp_path):
    flags = ["--tokens-per-sample", "16"]
    expected = evaluate(corpus, trained / "model.pt", *flags)
    source = ["--transfer-from", str(shutil.copytree(trained, tmp_path / "source"))]
    softmax = ["--decoder-normalize-before", "--softmax-attention-layers", "all", "--lr", "1e-30", "--max-update", "1"]
    train(corpus, tmp_path / "same", *softmax, *source)
    log = train(corpus, tmp_path / "swapped", *DECAY, *source)
    # The report stands before what fairseq says first of the model.
    assert 0 < log.index("transfer from") < log.index("num. shared model params")
    logs = [log, train(corpus, tmp_path / "fresh", *DECAY)]
    first = [float(re.findall(r'"loss": "([^"]+)"', log)[0]) for log in logs]
    shutil.rmtree(tmp_path / "source")
    names = ("same", "swapped", "fresh")
    same, *others = (evaluate(corpus, tmp_path / name / "checkpoint_last.pt", *flags) for name in names)
    assert same == pytest.approx(expected, abs=1e-5)
    assert first[0] < first[1] and others[0][0] < others[1][0]


def test_a_dry_run_reports_and_leaves_data_and_checkpoints_alone(trained, tmp_path, caplog):
    # There is nothing but a dictionary, so that data would be missed.
    (tmp_path / "data").mkdir()
    shutil.copy(trained / "dict.txt", tmp_path / "data")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"of another run")
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "data", tmp_path, *DECAY, "--transfer-from", str(trained), "--freeze", "output", "--dry-run")
    assert stopped.value.code == 0
    assert "none of them" in caplog.text and "num. shared" not in caplog.text
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"of another run"
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"dict.txt", "checkpoint_last.pt"}


@pytest.mark.slow
def test_the_published_model_at_its_full_width(tmp_path):
    """267,744 types and 1024 dimensions in the format of 2019: read, evaluated, swapped and stepped once.

    Two of its 16 layers, which are alike: 71 of 247 million parameters.
    """
    fairseq, words = Fairseq(tmp_path), [f"w{i}" for i in range(267_740)]
    sizes = "--tokens-per-sample 512 --max-target-positions 512 --criterion adaptive_loss"

    def build(arch: str, flags: str = "--decoder-layers 2"):
        args = fairseq.parse(arch, f"{sizes} {flags}", words)
        torch.manual_seed(1)
        return tasks.setup_task(args).build_model(convert_namespace_to_omegaconf(args).model).eval()

    with torch.device("meta"):  # sizes without numbers
        published = build("transformer_lm_baevski_wiki103", "")
    assert sum(parameter.numel() for parameter in published.parameters()) == 246_933_504
    model = build("transformer_lm_baevski_wiki103")
    folder = save_as_in_2019(model, tmp_path / "published")
    shutil.copy(fairseq.data(words) / "dict.txt", folder)
    tokens = torch.randint(4, len(words), (2, 17), generator=torch.Generator().manual_seed(0))
    inputs = {"src_tokens": tokens[:, :-1], "src_lengths": None}
    sample = {"net_input": inputs, "target": tokens[:, 1:].contiguous(), "ntokens": 32}
    task = tasks.setup_task(fairseq.parse("fast_weight_lm_baevski_wiki103", sizes, words))
    criterion = AdaptiveLoss(task, sentence_avg=False)

    arch, taken = "fast_weight_lm_baevski_wiki103", f"--decoder-layers 2 --transfer-from {folder}"
    same = build(arch, f"{taken} --softmax-attention-layers all")
    with torch.no_grad():
        losses = [criterion(x, sample)[0].item() for x in (model, same)]
        scores = [x.get_normalized_probs(x(tokens[:1, :4]), log_probs=True) for x in (model, same)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and torch.allclose(*scores, atol=1e-5)

    swapped = build(arch, f"{taken} --update-rule decay --feature-dim 32").train()
    attention = swapped.decoder.layers[1].self_attn
    assert isinstance(attention, FastWeightAttention) and attention.q_proj.weight.shape == (8 * 32, 1024)
    optimizer = torch.optim.SGD(swapped.parameters(), lr=1e-3)
    loss = criterion(swapped, sample)[0] / 32
    loss.backward()
    optimizer.step()
    assert loss.isfinite() and all(parameter.isfinite().all() for parameter in swapped.parameters())

"""All parameters together are trained as one after the other, and a gradient that is no number ends the run."""

from pathlib import Path

import pytest
import torch
from fairseq import trainer as fairseq_trainer

from tests.conftest import train
from tests.tasks.conftest import losses, slow, weights

FLAGS = "--no-token-positional-embeddings --lr 0.003 --clip-norm 0.5 --weight-decay 0.01 --no-epoch-checkpoints".split()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("", 1e-5), slow("--bf16", 2e-3), slow("--memory-efficient-fp16", 2e-3)]
)
def test_a_run_goes_on_in_the_other_way(precision, tolerance, our_fairseq, corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, *precision.split()]
    expected = train(corpus, tmp_path / "old", *flags, "--use-old-adam", "--max-update", "6")
    for name, ways in (("first", ["", "--use-old-adam"]), ("second", ["--use-old-adam", ""])):
        logs = [
            train(corpus, tmp_path / name, *flags, "--max-update", str(3 * i), *way.split())
            for i, way in enumerate(ways, 1)
        ]
        found = [x for log in logs for x in losses(log, "gnorm")]
        assert found == pytest.approx(losses(expected, "gnorm"), rel=max(tolerance, 2e-3))  # 3 decimals
        one, two = (weights(tmp_path / folder / "checkpoint_last.pt") for folder in (name, "old"))
        for key, x in one.items():
            torch.testing.assert_close(x, two[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("last", [3, 6])
def test_on_a_gpu_a_step_of_no_numbers_is_left_out_and_ends_the_run(
    last, our_fairseq, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(corpus, tmp_path / "before", *FLAGS, "--max-update", "2")
    kind = fairseq_trainer.Trainer
    clip, read, prepare = kind.clip_grad_norm, kind._read_grad_norms, kind._prepare_sample
    given, prepared = [], []

    def spoil(self, clip_norm):
        if self.get_num_updates() == 2:
            for p in self.optimizer.params:
                p.grad.fill_(torch.nan)
        return clip(self, clip_norm)

    monkeypatch.setattr(kind, "clip_grad_norm", spoil)
    monkeypatch.setattr(kind, "_read_grad_norms", lambda self, x, of: given.append(of) or read(self, x, of))
    monkeypatch.setattr(kind, "_reads_late", lambda self, norm: True)
    monkeypatch.setattr(kind, "_prepare_sample", lambda self, x, *more: prepared.append(x) or prepare(self, x, *more))
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        train(corpus, tmp_path / "run", *FLAGS, "--max-update", str(last))
    if last == 3:  # nothing came after it: the checkpoint is not written
        assert not (tmp_path / "run" / "checkpoint_last.pt").exists()
        return
    # The update after it noticed it, changed nothing, and looked for the reason in the batch that it came from.
    assert len(given) == 4 and prepared[-1] is given[2][0]
    kept, expected = (weights(tmp_path / path) for path in ("run/crash.pt", "before/checkpoint_last.pt"))
    for name, x in kept.items():  # but for the weights' decay
        torch.testing.assert_close(x, expected[name], rtol=0.003 * 0.01 * 2, atol=1e-6)

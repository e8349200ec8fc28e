"""The rule and the mixer of docs/your-own-rule.md work, as they stand there."""

from __future__ import annotations

import re

import pytest

from tests.conftest import QUIET, ROOT, SMALL_MODEL, spawn

PAGE = ROOT / "docs" / "your-own-rule.md"


@pytest.mark.slow
def test_a_rule_and_a_mixer_in_a_folder_of_ones_own_train_and_score(corpus, tmp_path):
    page = PAGE.read_text()
    for name, code in re.findall(r"```python\n# (my_rules/\w+\.py)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    task = ["--user-dir", str(tmp_path / "my_rules"), "--task", "fast_weight_language_modeling", "--carry-over-state"]
    common = [*task, *"--tokens-per-sample 16 --batch-size 4".split(), *QUIET]
    model = [*SMALL_MODEL, *"--mixers oja,average:2 --average-decay 0.8".split()]
    train = [*"--optimizer adam --lr 0.01 --max-update 99 --save-dir".split(), str(tmp_path)]
    trained = spawn("train", str(corpus), *common, *model, *train)
    assert trained.returncode == 0, trained.stderr
    losses = [float(loss) for loss in re.findall(r'"train_loss": "([\d.]+)"', trained.stderr + trained.stdout)]
    assert losses[-1] < losses[0] - 0.5
    scored = spawn("eval_lm", str(corpus), *common, "--path", str(tmp_path / "checkpoint_last.pt"))
    assert "Perplexity: " in scored.stderr + scored.stdout

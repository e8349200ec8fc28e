"""What contexts of 0 and of 480 are in Mao's (2022) Table 3, on a text of 23 tokens, windows of 8 and a context of 6.

The model counts: how probable a token is to it depends on nothing but the number of words in the window before it. So
the scores tell what each token has seen.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.conftest import QUIET, TASK, binarise, command

WORDS = [f"w{i}" for i in range(22)]  # and the line's end, the 23rd token
STOCK = [*TASK[:2], "--task", "language_modeling"]
COUNTING = """--arch fast_weight_lm --update-rule sum --feature-map identity --normalization none --decoder-layers 1
    --decoder-embed-dim 4 --decoder-input-dim 4 --decoder-output-dim 4 --decoder-ffn-embed-dim 4 --dropout 0
    --decoder-attention-heads 1 --no-token-positional-embeddings --tokens-per-sample 8 --batch-size 1
    --optimizer adam --lr 0 --max-update 1 --disable-validation""".split()
# Words of the text before each token, in its window. Worked out by hand.
SEEN = {
    # Segments of 8, each scored whole: tokens 0 to 7, 8 to 15, 16 to 22. Before a segment's first token fairseq puts
    # the last one of the segment before; before the text's first one, a line end, which is no word of it.
    0: [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7],
    # Windows of 8 of which the last 2 are scored: tokens 0 and 1, 2 and 3, ... 20 and 21, and 22 alone. Before them
    # comes a context of 6, and what fairseq puts before that: 7 words before the first of the two, 8 before the second.
    # Up to token 7 there are no more words than these.
    6: [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7],
}  # fmt: skip


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """The text; a model of which each word writes the same value under the same key, a line end none; and the
    logarithm of a token's probability after 0, 1, ... 8 words, as the model gives it."""
    from fairseq import checkpoint_utils

    folder = tmp_path_factory.mktemp("counted")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(" ".join(WORDS) + "\n")
    data, path = binarise(folder), folder / "checkpoint_last.pt"
    command("train", str(data), *TASK, *QUIET, *COUNTING, "--save-dir", str(folder))
    checkpoint = torch.load(path, weights_only=False)
    weights = checkpoint["model"]
    eos, words = 2, list(range(4, 4 + len(WORDS)))
    for name, weight in weights.items():
        if weight.is_floating_point() and "layer_norm" not in name:
            weight.zero_()
    weights["decoder.embed_tokens.weight"][words, 0] = 1
    weights["decoder.embed_tokens.weight"][eos, 1] = 1
    for name in "qk":
        weights[f"decoder.layers.0.self_attn.{name}_proj.bias"].fill_(1)
    weights["decoder.layers.0.self_attn.v_proj.weight"][2, 0] = 0.04
    weights["decoder.layers.0.self_attn.out_proj.weight"].copy_(torch.eye(4))
    weights["decoder.output_projection.weight"][[*words, eos], 2] = -3
    torch.save(checkpoint, path)

    [model], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data)})
    lines = torch.tensor([[eos, *words[:8]], [eos, *words[:-9:-1]], [*words[:9]]])
    with torch.no_grad():
        scores = model.eval().get_normalized_probs(model(lines), log_probs=True)[..., [eos, *words]]
    after = scores[0, :, 0]
    # Which token, which words, and whether a line end is among them: it makes no difference.
    torch.testing.assert_close(scores[:2], after[None, :, None].expand(2, -1, len(words) + 1))
    torch.testing.assert_close(scores[2, :-1], after[1:, None].expand(-1, len(words) + 1))
    assert all(abs(a - b) > 0.01 for a, b in pairwise(sorted(after.tolist()))), "no two counts may look alike"
    return data, path, after.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of fairseq and what it calls
@pytest.mark.parametrize(
    ("context", "task", "batch"), [(0, TASK, "3"), (0, STOCK, "1"), (6, TASK, "1"), (6, STOCK, "3")]
)
def test_each_token_sees_the_words_that_its_context_says(context: int, task: list[str], batch: str, counted) -> None:
    data, model, score_after = counted
    window = ["--tokens-per-sample", "8", "--context-window", str(context), "--batch-size", batch]
    log = command("eval_lm", str(data), *task, *QUIET, "--path", str(model), *window, "--output-word-probs")
    samples = re.findall(r"^(\d+) (\S+ \[.*)$", log, flags=re.MULTILINE)
    text = "\t".join(words for _, words in sorted(samples, key=lambda sample: int(sample[0])))
    found = re.findall(r"(\S+) \[(-[\d.]+)\]", text)
    assert [word for word, _ in found] == [*WORDS, "</s>"] and "Evaluated 23 tokens" in log
    wanted = [score_after[words] for words in SEEN[context]]
    assert [float(score) for _, score in found] == pytest.approx(wanted, abs=2e-6)  # the log has six decimals
    [perplexity] = re.findall(r"Perplexity: ([\d.]+)", log)
    assert float(perplexity) == pytest.approx(math.exp(-sum(wanted) / len(wanted)), abs=0.006)

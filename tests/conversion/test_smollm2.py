"""SmolLM2-135M-Instruct, as examples/smollm2/prepare.sh converts it: a published model's own weights and words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import sources

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(os.environ.get("FASTWEIGHTS_SMOLLM2", ROOT / "data" / "smollm2" / "source"))
LOGITS = 1e-4  # of some tens; no difference was seen


@pytest.mark.skipif(
    not (SOURCE / "model.pt").is_file(),
    reason=f"there is no {SOURCE}, which examples/smollm2/prepare.sh data/smollm2 FOLDER makes",
)
@torch.no_grad()
def test_a_published_model_answers_and_is_the_same_in_transformers(tmp_path: Path) -> None:
    assert main(["to-huggingface", str(SOURCE), str(tmp_path / "folder")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert type(theirs) is transformers.LlamaForCausalLM and theirs.num_parameters() == 134_515_008
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = theirs.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :])
    ours, _, numbers = sources.load(SOURCE, theirs)
    expected = theirs(answer).logits
    assert (ours(numbers[answer])[0][..., numbers] - expected).abs().max() <= LOGITS

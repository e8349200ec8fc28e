"""`to-huggingface --as CLASS`: transformers' own classes compute the same as a model that fits them in fairseq."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.trained_models import load_for_causal_lm
from tests.conversion import llamas, sources
from tests.huggingface.conftest import LOGITS

LLAMA = "--decoder-normalize-before --rms-norm-eps 0.01 --swiglu --projection-bias none --no-scale-embedding"
LLAMA += " --no-token-positional-embeddings --kv-heads 1"
HYBRID = f"{LLAMA} --mixers gated-delta:1,softmax:2 --gated-delta-value-dim 3 --query-key-norm-eps 0.01"
OLMO = (
    f"{HYBRID} --gated-delta-negative-eigenvalues --gated-delta-key-dim 5 --output-norm-layers 2 --softmax-joint-norm"
)
ROTATED = "--rotary-dim 8 --rotary-base 99"
QWEN = f"{HYBRID} --zero-centered-norms --softmax-output-gate --rotary-dim 4 --gated-delta-key-heads 1"
QWEN += " --gated-delta-eps 0.01 --fast-weight-heads 4 --gated-delta-conv 3"
FITS = {
    "olmo_hybrid": OLMO,
    "olmo_hybrid, rotated": f"{OLMO} {ROTATED} --share-decoder-input-output-embed",
    "qwen3_5_text": QWEN,
    "llama": f"{LLAMA} {ROTATED} --mixers softmax --rotary-scaling llama3:8,1,4,32",
    "mistral": f"{LLAMA} {ROTATED} --mixers softmax --head-dim 8",
    "qwen3": f"{LLAMA} {ROTATED} --mixers softmax --query-key-norm-eps 0.01",
}


@pytest.mark.parametrize("case", FITS)
@torch.no_grad()
def test_transformers_own_class_is_the_model(case, save, tmp_path, capsys):
    kind = case.split(",")[0]
    ours = save(tmp_path / "run", FITS[case])
    written = ["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder"), "--as", kind]
    assert main(written) == 0, capsys.readouterr().err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert type(theirs).__module__.startswith("transformers.models.") and theirs.config.model_type == kind
    tokens = torch.randint(4, 44, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = ours(tokens)[0]
    assert expected.std() > 0.3
    assert (theirs(tokens).logits - expected).abs().max() <= LOGITS
    _, tokenizer = load_for_causal_lm(tmp_path / "run")
    same = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert same("w1 w2 w3").input_ids == tokenizer("w1 w2 w3").input_ids
    assert theirs.generation_config.eos_token_id == 2 and theirs.config.eos_token_id == 2
    # And this package reads it, as any published model.
    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0, capsys.readouterr().err
    again, _, numbers = sources.load(tmp_path / "back", theirs)
    assert (again(numbers[tokens])[0][..., numbers] - expected).abs().max() <= LOGITS


@torch.no_grad()
def test_a_converted_model_gets_its_sources_numbers_and_tokenizer_back(tmp_path, capsys):
    source = llamas.model("Llama")
    llamas.save(tmp_path / "theirs", source)
    llamas.describe(tmp_path / "theirs", {"eos_token": "<|end|>", "chat_template": "x"}, begins=True)
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    for kind in ("llama", "mistral"):
        assert main(["to-huggingface", str(tmp_path / "ours"), str(tmp_path / kind), "--as", kind]) == 0
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        tokens = torch.arange(40)[None]
        assert made.config.model_type == kind and torch.equal(made(tokens).logits, source(tokens).logits)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / kind / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert main(["to-huggingface", str(tmp_path / "ours"), str(tmp_path / "no"), "--as", "olmo_hybrid"]) == 2
    assert "; a model of this class differs in 3: " in (error := capsys.readouterr().err), error


REFUSED = [
    ("", "llama", r"differs in \d+: .*mixers is \['delta', 'delta'\], of llama \['softmax', 'softmax'\]"),
    (FITS["llama"], "qwen3", "differs in 1: query_key_norm_eps is None, of qwen3 0.01"),
    (FITS["qwen3"], "olmo_hybrid", r"differs in 2: output_norm_layers is \[\], of olmo_hybrid \[1, 2\]; softmax_j"),
    (OLMO, "qwen3_5_text", "gated_delta_eps is 1e-05, of qwen3_5_text 0.01; .*softmax_output_gate is False, of"),
    (f"{OLMO} --mask-special-symbols", "olmo_hybrid", r"differs in 1: masked_tokens is \[0, 1, 3\], of olmo_hybrid"),
    (f"{OLMO} --gated-delta-eps 0.1", "olmo_hybrid", "differs in 1: gated_delta_eps is 0.1, of olmo_hybrid 1e-05"),
    (f"{OLMO} --gated-delta-kv-heads 1", "olmo_hybrid", "differs in 1: gated_delta_kv_heads is 1, of olmo_hybrid 0"),
    (f"{OLMO} --gated-delta-gate-rank 2", "olmo_hybrid", "differs in 1: gated_delta_gate_rank is 2, of olmo_hybrid 0"),
    (f"{FITS['llama']} --projection-bias qkv", "qwen2", "reads all tokenizers as Qwen2Tokenizer; this one is none"),
    (FITS["llama"].replace("--swiglu", ""), "llama", "differs in 1: swiglu is False, of llama True"),
]


@pytest.mark.parametrize(("flags", "kind", "message"), REFUSED)
def test_models_that_do_not_fit_a_class_are_named_and_nothing_is_left(flags, kind, message, save, tmp_path, capsys):
    save(tmp_path / "run", flags)
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder"), "--as", kind]) == 2
    assert re.search(rf"checkpoint_best.pt: --as is {kind}.* {message}", error := capsys.readouterr().err), error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

"""`to-huggingface` gives models with fairseq's logits and generations, and `from-huggingface` every bit back."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.trained_models import load_for_causal_lm
from fairseq_fastweights.mixers.registry import MIXERS
from fairseq_fastweights.models.description import config_of, new_name
from tests.huggingface.conftest import LOGITS, said

# Of gradients' norms; those of biases of keys are nothing but rounding.
GRADIENTS = 1e-4
BANDS = "--adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25 --adaptive-input-factor 2"
BANDS += " --adaptive-softmax-factor 2 --adaptive-input"
SETTINGS = {
    "sum with FAVOR+": "--update-rule sum --feature-map favor --favor-features 6",
    "FAVOR+ as in Schlag's program": "--update-rule sum --feature-map favor-schlag --favor-features 6",
    "decay with ReLU": "--update-rule decay --feature-map relu --feature-dim 5 --decoder-learned-pos",
    "delta with DPFP": "--feature-map dpfp --dpfp-nu 2 --normalization removal --scale-read-out --no-attention-bias",
    "heads": "--fast-weight-heads 4 --softmax-attention-layers 2 --decoder-normalize-before --no-scale-embedding",
    "options": "--mixers local:1,mamba:2 --local-window 3 --mamba-state 4 --layernorm-embedding",
    "biases": "--mixers gated-delta:1,mamba:2 --gated-delta-bias --mamba-bias",
    "rotary": "--mixers softmax,window-sum:2 --window-sum-window 3 --rotary-dim 4 --rotary-base 100"
    " --no-token-positional-embeddings",
    "parallel": "--mixers gated,softmax:2 --parallel-residual --decoder-normalize-before --activation-fn gelu",
    "norms behind": "--mixers gated-delta:1,softmax:2 --output-norm-layers 2 --decoder-normalize-before --swiglu"
    " --rms-norm-eps 0.01 --query-key-norm-eps 0.01 --softmax-joint-norm",
    "norms around 1": "--mixers gated:1,softmax:2 --zero-centered-norms --rms-norm-eps 0.01 --query-key-norm-eps 0.01"
    " --softmax-output-gate --decoder-normalize-before --output-norm-layers all",
    "heads that do not divide the width": "--mixers kimi-delta --fast-weight-heads 3 --kimi-delta-key-dim 4"
    " --kimi-delta-value-dim 6 --kimi-delta-gate-bias",
    "as in flash-linear-attention": "--mixers delta-net:1,gla:2 --delta-net-gate --gla-value-dim 6 --gla-rank 3",
    "retention with weights": "--mixers retention --retention-rms-norm --retention-value-dim 6 --retention-eps 0.01",
    "no norm at the end": "--decoder-normalize-before --no-decoder-final-norm",
    "tied": "--share-decoder-input-output-embed --mask-special-symbols --activation-fn gelu_accurate",
    "tied, of another size": "--share-decoder-input-output-embed --decoder-input-dim 12 --decoder-output-dim 12",
    "sizes": "--decoder-input-dim 12 --decoder-output-dim 20 --activation-fn tanh",
    "bands": f"{BANDS} --adaptive-softmax-dropout 0.1",
    "tied bands": f"{BANDS} --tie-adaptive-weights",
    "tied bands and projections": f"{BANDS} --tie-adaptive-weights --tie-adaptive-proj",
    "bands without square projections": f"{BANDS.replace('factor 2', 'factor 1')} --square-projections none"
    " --tie-adaptive-weights --tie-adaptive-proj --adaptive-softmax-bias --adaptive-softmax-dropout 0.1",
    "bands of the output with biases": "--adaptive-softmax-cutoff 10,25 --adaptive-softmax-bias",
    "square projections that start as the identity": f"{BANDS} --square-projections identity",
    "bands of the output alone": "--adaptive-softmax-cutoff 10,25",
    "odd width": "--decoder-embed-dim 15 --decoder-input-dim 15 --decoder-output-dim 15 --decoder-attention-heads 3",
}
# Of architectures that differ in their sizes alone, one: cut small they are the same.
ARCHITECTURES = {
    "fast_weight_lm_wiki103_small": BANDS.replace("factor 2", "factor 1"),
    "fast_weight_lm_baevski_wiki103": BANDS,
    "fast_weight_lm_gpt2_small": "",
    "fast_weight_lm_pythia_70m": "--rotary-dim 2 --softmax-attention-layers 2",
    "fast_weight_lm_retnet_430m": "",
    "fast_weight_lm_stripedmamba_430m": "",
}
NAMES = list(MIXERS)
CASES = {
    **{
        f"{first}, {second}": (f"--mixers {first}:1,{second}:2", "fast_weight_lm")
        for first, second in zip(NAMES[::2], [*NAMES[1::2], NAMES[0]], strict=False)
    },
    **{name: (flags, "fast_weight_lm") for name, flags in SETTINGS.items()},
    **{name: (flags, name) for name, flags in ARCHITECTURES.items()},
    "fairseq's own": ("--decoder-normalize-before", "transformer_lm"),
}


def test_all_kinds_of_architectures_are_here():
    ours = {name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if model == "fast_weight_lm" != name}
    kinds = {name.rsplit("_", 1)[0] for name in ours}
    assert kinds == {name.rsplit("_", 1)[0] for name in ARCHITECTURES}
    assert all(any(name in case for case in CASES) for name in MIXERS)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_model_is_fairseqs_and_gives_its_bits_back(case, save, fairseq, tmp_path):
    flags, arch = CASES[case]
    theirs = save(tmp_path / "run", flags, arch)
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    directly, _ = load_for_causal_lm(tmp_path / "run")
    for made in (ours, directly):  # tied weights stay tied
        assert made.num_parameters() == sum(x.numel() for x in theirs.parameters())
        assert set(dict(made.named_parameters())) == set(dict(ours.named_parameters()))

    tokens = torch.randint(4, 44, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 2
    tokens[0, :3] = torch.tensor([1, 1, 2])  # padding, and where the text begins after it
    logits = ours(tokens, attention_mask=tokens.ne(1).long()).logits
    expected = theirs.get_normalized_probs(theirs(tokens), log_probs=True)
    assert expected.std() > 0.1  # so that the bound says something
    real = tokens.ne(1)
    assert (logits.log_softmax(-1) - expected)[real].abs().max() <= LOGITS
    if theirs.decoder.adaptive_softmax is None:
        assert (logits - theirs(tokens)[0])[real].abs().max() <= LOGITS
    else:
        assert (logits - expected)[real].abs().max() <= LOGITS

    assert_same_steps_and_gradients(theirs, ours, tokens)

    prompt = tokens[1:, :4]
    made, expected = (
        ours.generate(prompt, max_new_tokens=9, do_sample=False)[0].tolist(),
        greedy(fairseq, theirs, prompt),
    )
    assert made == expected or [*made, 2] == expected  # fairseq ends a text where it is as long as it may be

    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    back = torch.load(tmp_path / "back" / "model.pt", weights_only=True)
    before, after = torch.load(tmp_path / "run" / "checkpoint_best.pt", weights_only=True)["model"], back["model"]
    assert set(after) - set(before) <= {"decoder.settings_version"} and set(before) <= set(after)
    for name in before:
        assert torch.equal(before[name], after[name]) or name.endswith("_float_tensor"), name
    again = config_of(Namespace(**back["cfg"]["model"]), theirs.decoder.dictionary)
    left_open = {"mixer_settings": {}} if arch == "transformer_lm" else {}  # by fairseq's own model
    assert said(again) | left_open == said(ours.config)
    assert (tmp_path / "back" / "dict.txt").read_bytes() == (tmp_path / "run" / "dict.txt").read_bytes()


def assert_same_steps_and_gradients(theirs: Any, ours: Any, tokens: torch.Tensor) -> None:
    """With one set of weights fairseq's model and that of transformers take the same decode steps, and learn alike."""
    states: dict[Any, Any] = {}
    cache = None
    for time in range(6):
        out = ours(tokens[1:, time : time + 1], past_key_values=cache, use_cache=True)
        step = theirs(tokens[1:, : time + 1], incremental_state=states)
        cache, expected = out.past_key_values, theirs.get_normalized_probs(step, log_probs=True)
        assert (out.logits.log_softmax(-1) - expected).abs().max() <= LOGITS, time
    # Gradients of a random projection of the logits, or of the adaptive softmax's input: fairseq's cannot go back.
    adaptive, mask = theirs.decoder.adaptive_softmax is not None, tokens.ne(1)
    with torch.enable_grad():
        outs = [(ours.model if adaptive else ours)(tokens, attention_mask=mask.long())[0], theirs(tokens)[0]]
        weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
        for out in outs:
            (out * weights).sum().backward()
    found = dict(ours.named_parameters(remove_duplicate=False))
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            assert adaptive and found[new_name(name)].grad is None
            continue
        error = (found[new_name(name)].grad - parameter.grad).norm()
        assert error <= GRADIENTS * parameter.grad.norm() + GRADIENTS, name


def greedy(fairseq: Any, model: Any, prompt: torch.Tensor) -> list[int]:
    """The continuation of a prompt by fairseq's generator; the prompt begins with </s>; at most nine words more."""
    options = SimpleNamespace(beam=1, max_len_a=0, max_len_b=12, min_len=1, sampling=False)
    task = fairseq.task()
    generator = task.build_generator([model], options)
    sample = {"net_input": {"src_tokens": prompt[:, 1:], "src_lengths": torch.tensor([prompt.shape[1] - 1])}}
    hypotheses = task.inference_step(generator, [model], sample, prefix_tokens=prompt[:, 1:])
    return [2, *hypotheses[0][0]["tokens"].tolist()]

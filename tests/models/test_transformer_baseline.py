"""With `--softmax-attention-layers all` the model is fairseq's Transformer; other layers differ in attention alone."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from tests.ops.agreement import relative_error

ALL, NO_POSITIONS = "--softmax-attention-layers all", "--no-token-positional-embeddings"
CUTOFFS = "--adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25"
ADAPTIVE = f"--adaptive-input {CUTOFFS} --adaptive-input-factor 2 --adaptive-softmax-factor 2"
# Options of fairseq's `transformer_lm`; each has to mean the same here.
OPTIONS = {
    "base": "",
    "pre-norm": "--decoder-normalize-before",
    "no final norm": "--decoder-normalize-before --no-decoder-final-norm",
    "learned positions": "--decoder-learned-pos",
    "no positions": NO_POSITIONS,
    "tied": "--share-decoder-input-output-embed --no-scale-embedding",
    "other widths in and out": "--decoder-input-dim 8 --decoder-output-dim 12",
    "gelu, embedding norm": "--activation-fn gelu --layernorm-embedding",
    "NormFormer": "--scale-fc --scale-attn --scale-heads --scale-resids",
    "characters": "--character-embeddings --character-filters [(1,8),(2,8)]",
    "adaptive": ADAPTIVE,
    "adaptive, tied": f"{ADAPTIVE} --tie-adaptive-weights --tie-adaptive-proj",
    "adaptive to the last type": "--adaptive-softmax-cutoff 10,44 --adaptive-input --adaptive-input-cutoff 10,44",
    "checkpointed": "--checkpoint-activations",
    "layers dropped": "--decoder-layerdrop 0.4",
    "layers pruned": "--decoder-layers 3 --decoder-layers-to-keep 0,2",
    "Baevski & Auli": f"{CUTOFFS} --decoder-layers 2",
}

SAME = 1e-6  # the same operations in the same order, but for kernels that are chosen by layout


@pytest.mark.parametrize("name", OPTIONS)
def test_all_layers_softmax_is_fairseqs_transformer(fairseq, text, name):
    arch = "_baevski_wiki103" if name == "Baevski & Auli" else ""
    theirs = fairseq.build(OPTIONS[name], arch=f"transformer_lm{arch}")
    ours = fairseq.build(f"{OPTIONS[name]} --softmax-attention-layers all", arch=f"fast_weight_lm{arch}", seed=1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    tokens, pad = text(3, 12), theirs.decoder.dictionary.pad()
    tokens[1, 9:] = pad
    real = tokens != pad
    results = []
    for model in (theirs, ours):
        out, state = model(tokens), {}
        steps = [model(tokens[::2, :t], incremental_state=state)[0] for t in range(1, 5)]
        model.train()
        torch.manual_seed(3)  # of dropout
        trained = model(tokens)[0][real]
        results.append((out[0][real], model.eval().get_normalized_probs(out, True)[real], torch.cat(steps, 1), trained))
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) <= SAME


@pytest.mark.parametrize("layers", ["", ",", "2", " 3 , 1,1", " all "])
def test_layers_are_counted_from_one(fairseq, layers):
    args = fairseq.tiny("fast_weight_lm", "--decoder-layers 3")
    args.softmax_attention_layers = layers
    for number, layer in enumerate(fairseq.task().build_model(args).decoder.layers, 1):
        softmax = "all" in layers or str(number) in layers
        assert type(layer.self_attn) is (SoftmaxAttention if softmax else FastWeightAttention)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (ALL, ""),
        (f"{ALL} {NO_POSITIONS}", "layers 1, 2 (softmax)"),
        (f"{ALL} {NO_POSITIONS} --rotary-dim 4", ""),
        (f"--mixers delta,local:2 {NO_POSITIONS}", "layers 2 (local)"),
        (f"--mixers delta,transformer-xl:2 {NO_POSITIONS}", ""),
    ],
)
def test_layers_that_tell_no_positions_apart_are_told(fairseq, caplog, flags, named):
    fairseq.build(flags)
    said = (
        [f"no_token_positional_embeddings is set, but there is no information about positions in {named}"]
        if named
        else []
    )
    assert [record.getMessage() for record in caplog.records] == said


def test_softmax_layers_have_no_state_to_carry(fairseq, text):
    for layers, named in (("all", "layers 1, 2"), ("2", "layers 2")):
        model = fairseq.build(f"--softmax-attention-layers {layers}")
        with pytest.raises(ValueError, match=rf"cannot be carried over through {named} \(softmax\)"):
            model(text(2, 5), continues=torch.zeros(2, dtype=torch.bool))

"""With `--softmax-attention-layers all` the model is fairseq's Transformer: its names, its numbers,
its options. Other layers differ in their attention alone."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention

ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25"
    " --adaptive-input-factor 2 --adaptive-softmax-factor 2"
)

# Options of fairseq's `transformer_lm`; each has to mean what it means there.
OPTIONS = {
    "base": "",
    "pre-norm": "--decoder-normalize-before",
    "no final norm": "--decoder-normalize-before --no-decoder-final-norm",
    "learned positions": "--decoder-learned-pos",
    "no positions": "--no-token-positional-embeddings",
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
}

# The same operations in the same order; rounding may differ where kernels are chosen by layout.
SAME = 1e-6


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def our_version_of(fairseq, theirs, flags: str, arch: str = "fast_weight_lm"):
    ours = fairseq.build(f"{flags} --softmax-attention-layers all", arch=arch, seed=1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_all_layers_softmax_is_fairseqs_transformer(fairseq, text, flags):
    theirs = fairseq.build(flags, arch="transformer_lm")
    ours = our_version_of(fairseq, theirs, flags)
    tokens = text(3, 12)
    tokens[1, 9:] = theirs.decoder.dictionary.pad()
    real = tokens != theirs.decoder.dictionary.pad()
    for training in (False, True):
        outputs = []
        for model in (theirs, ours):
            model.train(training)
            torch.manual_seed(3)  # of dropout
            outputs.append(model(tokens))
        assert relative_error(outputs[1][0][real], outputs[0][0][real]) <= SAME
        if not training:
            probabilities = [
                model.get_normalized_probs(out, log_probs=True)[real]
                for model, out in zip((theirs, ours), outputs, strict=True)
            ]
            assert relative_error(*reversed(probabilities)) <= SAME


BAEVSKI = "--adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25 --decoder-layers 2"


def test_the_architecture_of_baevski_and_auli_is_fairseqs(fairseq, text):
    theirs = fairseq.build(BAEVSKI, arch="transformer_lm_baevski_wiki103")
    ours = our_version_of(fairseq, theirs, BAEVSKI, arch="fast_weight_lm_baevski_wiki103")
    out, expected = ours(text(2, 12)), theirs(text(2, 12))
    assert relative_error(out[0], expected[0]) <= SAME
    log_probs = [m.get_normalized_probs(o, True) for m, o in ((ours, out), (theirs, expected))]
    assert relative_error(*log_probs) <= SAME


def test_generation_with_softmax_layers_is_fairseqs(fairseq, text):
    theirs = fairseq.build(arch="transformer_lm")
    ours = our_version_of(fairseq, theirs, "")
    states: tuple[dict, dict] = ({}, {})
    for t in range(1, 8):
        out, expected = (
            model(text(2, 8)[:, :t], incremental_state=state)[0]
            for model, state in zip((ours, theirs), states, strict=True)
        )
        assert relative_error(out, expected) <= SAME


@pytest.mark.parametrize(
    ("layers", "softmax"),
    [("", []), ("2", [2]), ("1,3", [1, 3]), (" 3 , 1", [1, 3]), ("1,2,3", [1, 2, 3])],
)
def test_layers_are_counted_from_one(fairseq, layers, softmax):
    args = fairseq.tiny("fast_weight_lm", "--decoder-layers 3")
    args.softmax_attention_layers = layers
    model = fairseq.task().build_model(args)
    kinds = [type(layer.self_attn) for layer in model.decoder.layers]
    assert kinds == [SoftmaxAttention if number in softmax else FastWeightAttention for number in (1, 2, 3)]


@pytest.mark.parametrize("flags", [OPTIONS["base"], OPTIONS["adaptive, tied"]], ids=["", "adapt"])
@pytest.mark.parametrize(
    ("rule", "added"),
    [
        ("--update-rule sum", []),
        ("--update-rule sum --feature-map relu", ["feature_map.weight", "feature_map.bias"]),
        ("--update-rule sum --feature-map favor", ["feature_map.features"]),
        ("--update-rule gated", ["gate_proj.weight", "gate_proj.bias"]),
        (
            "--update-rule decay",
            [f"{name}_decay_proj.{kind}" for name in ("key", "value") for kind in ("weight", "bias")],
        ),
        ("--update-rule delta", ["beta_proj.weight", "beta_proj.bias"]),
    ],
)
def test_names_are_fairseqs_but_for_gates_maps_and_settings(fairseq, flags, rule, added):
    theirs = fairseq.build(flags, arch="transformer_lm").state_dict()
    ours = fairseq.build(f"{rule} {flags}").state_dict()
    new = {f"decoder.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in added}
    assert set(ours) - set(theirs) == new | {"decoder.settings_version"}
    assert set(theirs) <= set(ours)
    assert all(ours[name].shape == theirs[name].shape for name in theirs)


def test_a_hybrid_takes_both_kinds_of_weights_from_a_transformer(fairseq, text):
    theirs = fairseq.build(arch="transformer_lm")
    hybrid = fairseq.build("--update-rule sum --softmax-attention-layers 2", seed=1)
    hybrid.load_state_dict(theirs.state_dict())
    for name, weight in theirs.named_parameters():
        assert torch.equal(hybrid.state_dict()[name], weight), name
    assert hybrid(text(2, 5))[0].isfinite().all()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--softmax-attention-layers all", "layers 1, 2 (softmax)"),
        ("--mixers delta,local:2", "layers 2 (local)"),
        ("--softmax-attention-layers all --rotary-dim 4", ""),
        ("--mixers delta,transformer-xl:2", ""),
    ],
)
def test_layers_that_tell_no_positions_apart_are_told(fairseq, caplog, flags, named):
    fairseq.build(flags)
    assert not caplog.records
    fairseq.build(f"{flags} --no-token-positional-embeddings")
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [f"no_token_positional_embeddings is set, but nothing tells positions apart in {named}"] if named else []
    )


def test_softmax_layers_have_no_state_to_carry(fairseq, text):
    for layers, named in (("all", "layers 1, 2"), ("2", "layers 2")):
        model = fairseq.build(f"--softmax-attention-layers {layers}")
        with pytest.raises(ValueError, match=rf"cannot be carried over through {named} \(softmax\)"):
            model(text(2, 5), continues=torch.zeros(2, dtype=torch.bool))

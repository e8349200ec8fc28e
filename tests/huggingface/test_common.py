"""The most telling of transformers' own model tests (test_model_tester_mixin.py runs all of them, where they are)."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from fairseq_fastweights.conversion.trained_models import weights_of
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM, FastWeightModel
from fairseq_fastweights.huggingface.vocabulary import sinusoidal_positions
from fairseq_fastweights.layers import MASKED_LOGIT
from fairseq_fastweights.mixers.registry import MIXERS
from fairseq_fastweights.models.description import config_of
from tests.conftest import ROOT
from tests.huggingface.conftest import said
from tests.huggingface.test_generation import SIZES, build, draw

BANDS = {"adaptive_input_cutoffs": [10, 25], "adaptive_softmax_cutoffs": [10, 25]}
BANDS |= {"adaptive_input_factor": 2.0, "adaptive_softmax_factor": 2.0}
FLAGS = "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25"
SIZES_THERE = "--decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64 --decoder-ffn-embed-dim 48"


@pytest.mark.parametrize(
    ("mixers", "settings"),
    [
        *((name, {}) for name in MIXERS),
        ("sum", {"mixer_settings": {"feature_map": "favor"}}),
        ("decay", {"tie_word_embeddings": False, "input_size": 12, "output_size": 20}),
        ("gated", {**BANDS, "tie_adaptive_projections": True}),
        ("gated", {**BANDS, "tie_word_embeddings": False}),
    ],
)
@torch.no_grad()
def test_a_saved_model_is_loaded_the_same(mixers, settings, tmp_path):
    model, tokens = build(mixers, **settings), draw(2, 6)
    model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and type(loaded) is FastWeightForCausalLM
    assert said(loaded.config) == said(model.config)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    tied = model.config.tie_word_embeddings
    shared = {id(x) for x in loaded.lm_head.parameters()} & {id(x) for x in loaded.model.embed_tokens.parameters()}
    assert len(shared) == ((5 if "adaptive_input_cutoffs" in settings else 1) if tied else 0)  # 3 bands, 2 projections
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert (half(tokens).logits - model(tokens).logits).norm() <= 0.1 * model(tokens).logits.norm()
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_weights_that_are_not_those_of_their_digest_are_refused(tmp_path):
    build("delta").save_pretrained(tmp_path, max_shard_size="10KB")
    path = max(tmp_path.glob("model-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for kind in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match=f"{path.name} is damaged: its weights do not have the digest"):
            kind.from_pretrained(tmp_path)


def test_the_configuration_says_everything(tmp_path):
    config = FastWeightConfig(**SIZES, mixers="delta,local:2", mixer_settings={"normalization": ["sum"]})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert config.auto_map == {} and "auto_map" not in saved  # TRL reads it, and so do the Auto classes
    assert (
        saved["format_version"] == 1 and saved["mixers"] == ["delta", "local"] and saved["model_type"] == "fast_weight"
    )
    assert {"pre_norm", "hidden_act", "dropout", "layerdrop", "max_position_embeddings"} <= set(
        saved
    )  # all as by default
    assert said(transformers.AutoConfig.from_pretrained(tmp_path)) == said(config)


SQUARE = f"{FLAGS} --adaptive-input-factor 1 --adaptive-softmax-factor 1 --adaptive-softmax-bias --square-projections"


@pytest.mark.parametrize(
    "flags",
    [
        *("", "--init-std 0.02", FLAGS, f"{SQUARE} identity", f"{SQUARE} none"),
        *(f"--feature-map {name} --favor-features 32" for name in ("favor", "favor-schlag")),
    ],
)
def test_new_weights_start_as_fairseqs(flags, fairseq):
    """Drawn by `_init_weights` alone, as those of a model are that are not in a checkpoint."""
    for name in MIXERS if flags in ("", "--init-std 0.02") else ("sum",):
        theirs = fairseq.build(f"--mixers {name} {SIZES_THERE} {flags}")
        config = config_of(theirs.decoder.args, theirs.decoder.dictionary)
        ours = FastWeightForCausalLM.from_pretrained(None, config=config, state_dict={})
        for key, expected in weights_of(theirs).items():
            x = ours.state_dict()[key]
            if x.numel() < 64:  # so few say little
                assert x.isfinite().all() and x.abs().max() < 20, f"{name}: {key}"
                continue
            # Six standard errors of the difference between two samples' means and deviations.
            error = 6 * (2 / x.numel()) ** 0.5 * expected.std() + 1e-7
            assert abs(x.mean() - expected.mean()) <= error and abs(x.std() - expected.std()) <= error, f"{name}: {key}"
    embeddings = [x for x in ours.modules() if isinstance(x, nn.Embedding)]
    assert all(not x.weight[1].any() and x.weight[2:].all() for x in embeddings)
    # Weights that are loaded stay, beside those that are drawn.
    state = {key: x for key, x in ours.state_dict().items() if "layers.1" not in key and "q_proj" not in key}
    again = FastWeightForCausalLM.from_pretrained(None, config=config, state_dict=dict(state))
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in state.items())


def test_the_vocabulary_can_be_resized(tmp_path):
    for tied in (True, False):
        model, tokens = build("delta", tie_word_embeddings=tied), draw(2, 6)
        before = model(tokens).logits
        model.resize_token_embeddings(50)
        after = model(tokens).logits
        assert after.shape[-1] == 50 == model.config.vocab_size
        assert torch.allclose(after[..., :44], before, atol=1e-6)
        model.save_pretrained(tmp_path)
        assert torch.equal(FastWeightForCausalLM.from_pretrained(tmp_path)(tokens).logits, after)
    for sizes in ({"new_num_tokens": 50}, {"pad_to_multiple_of": 64}):
        with pytest.raises(ValueError, match=r"adaptive_input_cutoffs is \[10, 25\]: .* cannot be resized"):
            build("delta", **BANDS).resize_token_embeddings(**sizes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_vocabulary_cut_below_masked_tokens_works_and_is_saved(tied, whole, tmp_path):
    model, tokens = build("delta", masked_tokens=[0, 3, 39, 43], tie_word_embeddings=tied), draw(2, 6) % 20
    before = model(tokens).logits
    resized = model if whole else model.model
    assert resized.resize_token_embeddings(19, pad_to_multiple_of=10).num_embeddings == 20
    assert model.config.masked_tokens == [0, 3]
    if whole:
        assert torch.allclose(model(tokens).logits, before[..., :20], atol=1e-6)
        for new in (30, 40):
            model.resize_token_embeddings(new, mean_resizing=new == 30)
            assert model(tokens).logits.shape[-1] == new and model(tokens).logits.isfinite().all()
        assert model.resize_token_embeddings() is model.get_input_embeddings()
    resized.save_pretrained(tmp_path)
    again = type(resized).from_pretrained(tmp_path)
    assert torch.equal(again(tokens)[0], resized(tokens)[0])


@pytest.mark.parametrize(
    ("factor", "why"), [(1e300, "leaves none for cluster 2"), (1e-300, "it makes more than 10{9}")]
)
def test_a_factor_that_bands_cannot_have_is_refused(factor, why):
    with pytest.raises(ValueError, match=f"adaptive_input_factor is {factor:g}: .*{why}".replace("+", "[+]")):
        build("delta", **BANDS | {"adaptive_input_factor": factor, "adaptive_softmax_factor": factor})


RESIZED = [
    ({"new_num_tokens": 2}, "new_num_tokens is 2; it must be more than bos_token_id, 2"),
    ({"new_num_tokens": 1}, "new_num_tokens is 1; it must be more than pad_token_id, 1"),
    ({"new_num_tokens": 9}, "new_num_tokens is 9; it must be more than eos_token_id, 9"),
    ({"new_num_tokens": 0}, "new_num_tokens is 0; it must be at least 1"),
    ({"new_num_tokens": "20"}, "new_num_tokens is '20'; it must be an integer"),
    ({"new_num_tokens": 20, "pad_to_multiple_of": 2.5}, "pad_to_multiple_of is 2.5; it must be an integer of at"),
]


@pytest.mark.parametrize(("sizes", "message"), RESIZED)
def test_a_vocabulary_that_cannot_be_is_refused_by_name(sizes, message):
    model = build("delta")
    model.generation_config.eos_token_id = [2, 9]
    with pytest.raises(ValueError, match=message):
        model.resize_token_embeddings(**sizes)
    assert model.get_input_embeddings().num_embeddings == 44


@pytest.mark.parametrize("mixers", ["delta,softmax:2", "mamba,transformer-xl:2"])
def test_gradient_checkpointing_changes_no_gradient(mixers):
    model, tokens = build(mixers, dropout=0.0).train(), draw(2, 6)
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if options is not None:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        # With a cache, which must hold the states, layers are not checkpointed.
        for use_cache in (None, True):
            model.zero_grad()
            out = model(tokens, labels=tokens, use_cache=use_cache)
            assert (out.past_key_values is None) == (use_cache is None)
            out.loss.backward()
            gradients.append({name: x.grad.clone() for name, x in model.named_parameters()})
    # Nor in the part of a text after a cache.
    cache = model(tokens[:, :4], use_cache=True).past_key_values
    after, whole = model(tokens[:, 4:], past_key_values=cache).logits, model(tokens).logits
    assert torch.allclose(after, whole[:, 4:], atol=1e-5)
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert torch.allclose(gradient, other[name], atol=1e-7), name


@torch.no_grad()
def test_outputs_have_transformers_forms():
    model, tokens = build("gated"), draw(2, 6)
    out = model(tokens, labels=tokens, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and all(x.shape == (2, 6, 16) for x in out.hidden_states)
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    expected = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(out.loss, expected)
    as_tuple = model(tokens, labels=tokens, output_hidden_states=True, return_dict=False)
    assert torch.equal(as_tuple[0], out.loss) and torch.equal(as_tuple[1], out.logits) and len(as_tuple) == 4
    assert torch.equal(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])
    places = torch.arange(6)[None]
    assert torch.equal(model(tokens, position_ids=places).logits, out.logits)
    assert not torch.allclose(model(tokens, position_ids=places + 1).logits, out.logits)
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded).logits, out.logits)
    masked = build("gated", masked_tokens=[0, 1, 3])(tokens).logits
    assert (masked[..., [0, 1, 3]] == MASKED_LOGIT).all() and (masked[..., [2, 4]] > MASKED_LOGIT).all()
    bands = build("gated", **BANDS, tie_word_embeddings=False)(tokens).logits
    assert torch.allclose(bands.exp().sum(-1), torch.ones(2, 6), atol=1e-5)  # they are log-probabilities


def test_layers_are_dropped_in_training_alone():
    model, tokens = build("gated", layerdrop=1.0, dropout=0.0), draw(2, 6)
    whole, cut = model(tokens).logits, model.train()(tokens).logits
    assert not torch.allclose(whole, cut)
    x = model.model.embed_scale * model.get_input_embeddings()(tokens)
    x = model.model.layer_norm(x + sinusoidal_positions(torch.arange(6), 16, torch.float32))
    assert torch.allclose(model.lm_head(x), cut, atol=1e-6)


def test_auto_classes_make_models_of_a_configuration():
    config = FastWeightConfig(**SIZES)
    assert type(transformers.AutoModelForCausalLM.from_config(config)) is FastWeightForCausalLM
    assert type(transformers.AutoModel.from_config(config)) is FastWeightModel
    half = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    with torch.device("meta"):
        tokens, mask = draw(1, 3).to("meta"), torch.ones(1, 3)
        assert FastWeightForCausalLM(config)(tokens, attention_mask=mask).logits.shape == (1, 3, 44)


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "fairseq_fastweights.huggingface")
    with pytest.raises(ImportError, match="huggingface needs transformers: pip install transformers"):
        importlib.import_module("fairseq_fastweights.huggingface")


def test_nothing_of_it_needs_fairseq():
    """Neither the models nor the modules below them import fairseq, or a part of this package that does."""
    package = ROOT / "fairseq_fastweights"
    left, seen = [package / "huggingface" / "__init__.py"], set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [f"{names[0]}.{alias.name}" for alias in node.names] if names else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] != "fairseq", path
                if name.startswith("fairseq_fastweights"):
                    at = ROOT.joinpath(*name.split("."))
                    left += [file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()]
    folders = {path.relative_to(package).parts[0] for path in seen if path.parent != package}
    assert folders == {"files", "huggingface", "mixers", "ops"} and len(seen) > 40
    assert Path(package / "mixers" / "registry.py") in seen

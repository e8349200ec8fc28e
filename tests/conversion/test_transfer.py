"""Which of a Transformer's weights a model takes, in which form they may be saved, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import tasks

from fairseq_fastweights.conversion.groups import GROUPS, attention_of, group_of, parse_groups
from fairseq_fastweights.conversion.source import read_source
from fairseq_fastweights.conversion.transfer import transfer
from tests.conversion.transfers import save_as_in_2019, save_as_today
from tests.models.conftest import WORDS, Fairseq
from tests.models.test_checkpoints import with_former_name

ADAPTIVE = "--adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25 --decoder-layers 2"
PRE_NORM = "--decoder-normalize-before --share-decoder-input-output-embed"


@pytest.fixture(scope="module")
def fairseq(tmp_path_factory: pytest.TempPathFactory) -> Fairseq:
    return Fairseq(tmp_path_factory.mktemp("fairseq"))


def make_source(
    fairseq: Fairseq, folder: Path, flags: str = PRE_NORM, arch: str = "transformer_lm", save=save_as_today
):
    """A Transformer, saved in `folder` beside its dictionary. Norms and biases are not all ones and zeros."""
    model = fairseq.build(flags, arch=arch, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    save(model, folder)
    shutil.copy(fairseq.data() / "dict.txt", folder)
    return model


def take(fairseq: Fairseq, folder: Path, flags: str = "", arch: str = "fast_weight_lm", words=WORDS, seed: int = 3):
    """The model that training starts with."""
    args = fairseq.tiny(arch, f"{flags} --transfer-from {folder}", words)
    torch.manual_seed(seed)
    return tasks.setup_task(args).build_model(args).eval()


@pytest.fixture(scope="module")
def source(fairseq, tmp_path_factory):
    """A pre-norm Transformer with tied embeddings, and its folder."""
    folder = tmp_path_factory.mktemp("source")
    return make_source(fairseq, folder), folder


@pytest.fixture(scope="module")
def baevski(fairseq, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baevski")
    return make_source(fairseq, folder, ADAPTIVE, "transformer_lm_baevski_wiki103", save_as_in_2019), folder


@pytest.fixture(scope="module")
def text():
    """`text(batch, time)`: tokens without padding, special types left out."""
    generator = torch.Generator().manual_seed(0)
    return lambda batch, time: torch.randint(4, 4 + len(WORDS), (batch, time), generator=generator)


def log_probs(model, tokens):
    return model.get_normalized_probs(model(tokens), log_probs=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "flags", "save"),
    [
        ("baevski_wiki103", ADAPTIVE, save_as_in_2019),
        ("", PRE_NORM, save_as_today),
        ("", "", save_as_in_2019),
        ("", "--decoder-learned-pos --decoder-output-dim 12", save_as_today),
    ],
)
def test_without_swapping_the_model_is_the_source(fairseq, text, tmp_path, arch, flags, save):
    theirs, ours = (
        (f"transformer_lm_{arch}", f"fast_weight_lm_{arch}") if arch else ("transformer_lm", "fast_weight_lm")
    )
    model = make_source(fairseq, tmp_path, flags, theirs, save)
    same = take(fairseq, tmp_path, f"{flags} --softmax-attention-layers all", ours)
    tokens = text(3, 12)
    # The tolerance that is asked for; on one machine they are equal to the bit.
    assert torch.allclose(log_probs(same, tokens), log_probs(model, tokens), rtol=0, atol=1e-5)
    other = fairseq.build(f"{flags} --softmax-attention-layers all", arch=ours)
    assert not torch.allclose(log_probs(other, tokens), log_probs(model, tokens), rtol=0, atol=1e-2)


def test_half_precision_is_taken_for_what_it_is(fairseq, source, tmp_path):
    model, folder = source
    state = torch.load(folder / "model.pt", weights_only=True)
    state["model"] = {name: x.half() if x.is_floating_point() else x for name, x in state["model"].items()}
    torch.save(state, tmp_path / "model.pt")
    shutil.copy(folder / "dict.txt", tmp_path)
    taken = take(fairseq, tmp_path, f"{PRE_NORM} --softmax-attention-layers all")
    for name, parameter in taken.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).half().float())


# Rows and columns of Mao's Table 1, and more.
@pytest.mark.parametrize(
    ("update_rule", "how"),
    [
        ("sum", "--feature-map relu --feature-dim 4 --normalization attention"),
        ("decay", "--feature-map relu --feature-dim 4 --normalization attention"),
        ("delta", "--feature-map relu --feature-dim 4 --normalization none"),
        ("gated", "--feature-map relu --feature-dim 4 --normalization none"),
        ("sum", "--feature-map identity --feature-dim 4 --normalization none"),
        ("gated", "--feature-map identity --feature-dim 4 --normalization none"),
        ("delta", "--feature-dim 8"),
        ("decay", "--feature-dim 8"),
        ("delta", "--feature-map favor --normalization sum --softmax-attention-layers 2"),
    ],
)
def test_every_rule_takes_a_finite_first_step(fairseq, baevski, text, update_rule, how):
    _, folder = baevski
    flags = f"{ADAPTIVE} --decoder-embed-dim 16 --update-rule {update_rule} {how}"
    model = take(fairseq, folder, flags, "fast_weight_lm_baevski_wiki103").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    tokens = text(2, 17)
    for _ in range(2):
        output = model(tokens[:, :-1])
        logits, targets = model.decoder.adaptive_softmax(output[0], tokens[:, 1:].reshape(-1))
        parts = [(x, y) for x, y in zip(logits, targets, strict=True) if y is not None]
        loss = sum(torch.nn.functional.cross_entropy(x, y, reduction="sum") for x, y in parts) / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(torch.isfinite, map(torch.tensor, losses))), losses
    assert all(parameter.isfinite().all() for parameter in model.parameters())


SWAPPED = "--update-rule decay --feature-dim 4"


@pytest.mark.parametrize("groups", [[group] for group in GROUPS] + [["embeddings", "feed-forward"], list(GROUPS)])
def test_a_group_is_taken_and_nothing_else(fairseq, tmp_path, groups):
    model = make_source(fairseq, tmp_path, "--decoder-normalize-before")
    flags = "--decoder-normalize-before --softmax-attention-layers 2 --update-rule gated"
    fresh = fairseq.build(flags, seed=3)
    taken = take(fairseq, tmp_path, f"{flags} --transfer {','.join(groups)}")
    seen = set()
    for name, parameter in taken.named_parameters():
        group = group_of(name, layers=2, pre_norm=True)
        if group in groups:
            assert torch.equal(parameter, model.get_parameter(name)), name
            seen.add(group)
        else:
            assert torch.equal(parameter, fresh.get_parameter(name)), name
    assert seen == set(groups)


@pytest.mark.parametrize(
    ("name", "pre_norm", "post_norm"),
    [
        ("embed_tokens.weight", "embeddings", "embeddings"),
        ("embed_tokens.embeddings.2.1.weight", "embeddings", "embeddings"),
        ("embed_positions.weight", "embeddings", "embeddings"),
        ("project_in_dim.weight", "embeddings", "embeddings"),
        ("layers.0.self_attn.q_proj.bias", "attention", "attention"),
        ("layers.0.self_attn.v_proj.weight", "attention", "attention"),
        ("layers.0.self_attn.out_proj.weight", "output-projection", "output-projection"),
        ("layers.0.self_attn_layer_norm.weight", "attention", "feed-forward"),
        ("layers.0.fc1.weight", "feed-forward", "feed-forward"),
        ("layers.0.fc2.bias", "feed-forward", "feed-forward"),
        ("layers.0.final_layer_norm.bias", "feed-forward", "attention"),
        ("layers.11.final_layer_norm.bias", "feed-forward", "output"),
        ("layer_norm.weight", "output", "output"),
        ("output_projection.weight", "output", "output"),
        ("adaptive_softmax.tail.0.2.weight", "output", "output"),
        ("layers.0.self_attn.value_decay_proj.bias", None, None),
        ("layers.0.self_attn.feature_map.weight", None, None),
        ("layers.0.encoder_attn.q_proj.weight", None, None),
    ],
)
def test_norms_go_with_what_they_precede(name, pre_norm, post_norm):
    assert group_of(f"decoder.{name}", 12, True) == pre_norm
    assert group_of(f"decoder.{name}", 12, False) == post_norm
    assert group_of(f"encoder.{name}", 12, True) is None
    # The attention that it is of or stands before, where it is of that group.
    number = int(name.split(".")[1]) if name.startswith("layers") else None
    for expected, is_pre_norm in ((pre_norm, True), (post_norm, False)):
        if expected == "attention":
            follows = number + ("final" in name)
            assert attention_of(f"decoder.{name}", is_pre_norm) == f"decoder.layers.{follows}.self_attn."
    assert number is not None or attention_of(f"decoder.{name}", True) is None


def test_every_parameter_of_fairseqs_transformer_has_a_group(fairseq):
    flags = "--scale-fc --scale-attn --scale-heads --scale-resids --layernorm-embedding --decoder-input-dim 8"
    for more in ("", "--character-embeddings --character-filters [(1,8),(2,8)]", "--decoder-output-dim 12"):
        model = fairseq.build(f"{flags} {more}" if "char" not in more else more, arch="transformer_lm")
        for name, _ in model.named_parameters():
            assert group_of(name, 2, True) in GROUPS, name


@pytest.mark.parametrize("group", ["embeddings", "output"])
def test_what_is_tied_goes_with_either_group(fairseq, baevski, group):
    model, folder = baevski
    taken = take(fairseq, folder, f"{ADAPTIVE} --transfer {group}", "fast_weight_lm_baevski_wiki103")
    for name in ("embed_tokens.embeddings.1.0.weight", "adaptive_softmax.tail.0.2.weight"):
        assert torch.equal(taken.get_parameter(f"decoder.{name}"), model.get_parameter(f"decoder.{name}"))
    own = "decoder.adaptive_softmax.head.class_proj.weight"
    assert torch.equal(taken.get_parameter(own), model.get_parameter(own)) == (group == "output")


def report_of(caplog, build) -> dict[str, list[str]]:
    with caplog.at_level(logging.INFO):
        build()
    text = next(record.getMessage() for record in caplog.records if "transfer from" in record.getMessage())
    return {row.split("  ")[0]: row.split()[-5:] for row in text.splitlines()[1:] if row[-1].isdigit() or "new" in row}


def test_the_report_counts_parameters(fairseq, source, caplog):
    _, folder = source
    flags = f"{PRE_NORM} {SWAPPED} --softmax-attention-layers 2 --transfer embeddings,attention,output --freeze output"
    report = report_of(caplog, lambda: take(fairseq, folder, flags))
    head = 16 * 16 + 16  # a projection and its bias
    assert report == {
        "parameters": ["kept", "rescaled", "folded", "new", "frozen"],
        # Tied to the output.
        "embeddings": [str(44 * 16), "0", "0", "0", str(44 * 16)],
        "output": [str(2 * 16), "0", "0", "0", str(2 * 16)],
        "feed-forward": ["0", "0", "0", f"{2 * (2 * 16 * 32 + 32 + 16 + 32):,}", "0"],
        "output-projection": ["0", "0", "0", str(2 * head), "0"],
        # The norms, and layer 2; the values of layer 1; its queries and keys of 4 numbers for each of 2 heads.
        "attention": [str(2 * 32 + 3 * head), str(head), str(2 * (8 * 16 + 8)), "0", "0"],
        "none of them": ["0", "0", "0", str(head + 8 * 16 + 8), "0"],
        "all": report["all"],
    }
    counts = [
        [int(n.replace(",", "")) for n in row] for name, row in report.items() if name not in ("parameters", "all")
    ]
    assert [f"{sum(column):,}" for column in zip(*counts, strict=True)] == report["all"]


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        ("--update-rule decay", True),
        ("--update-rule gated", True),
        ("--update-rule delta --feature-map relu --normalization none", True),
        ("--update-rule decay --scale-read-out", False),
        ("--update-rule decay --transfer feed-forward", False),
        ("--update-rule gated --feature-map relu --normalization attention", False),
        ("--update-rule delta", False),
        ("--update-rule sum --feature-map identity --normalization none", False),
        ("--update-rule retention", False),
    ],
)
def test_the_report_advises_to_keep_the_attentions_scale(fairseq, source, caplog, flags, advised):
    _, folder = source
    with caplog.at_level(logging.INFO):
        take(fairseq, folder, f"{PRE_NORM} {flags}")
    assert ("with scale_read_out they start nearer" in caplog.text) == advised


def misfits(fairseq, folder: Path, flags: str, **more) -> list[list[str]]:
    with pytest.raises(ValueError, match="do not fit the model; nothing was transferred") as error:
        take(fairseq, folder, flags, **more)
    return [line.split() for line in str(error.value).splitlines()[2:]]


def test_all_that_does_not_fit_is_listed_at_once(fairseq, source, tmp_path):
    _, folder = source
    state = torch.load(folder / "model.pt", weights_only=True)
    weights = state["model"]
    for kind in ("weight", "bias"):
        del weights[f"decoder.layers.1.fc1.{kind}"]
        weights[f"decoder.layers.2.fc2.{kind}"] = torch.zeros(3, 4)
    weights["encoder.version"] = torch.zeros(1)
    weights["encoder.embed_tokens.weight"] = torch.zeros(5, 6)
    weights["decoder.layers.0.self_attn.q_proj.weight"] = torch.zeros(16, 12)
    weights["decoder.output_projection.weight"] = weights["decoder.output_projection.weight"] + 1
    state["cfg"]["model"]["decoder_attention_heads"] = 4
    torch.save(state, tmp_path / "model.pt")
    shutil.copy(folder / "dict.txt", tmp_path)
    assert misfits(fairseq, tmp_path, f"{PRE_NORM} {SWAPPED}") == [
        "other option decoder_attention_heads 4 2".split(),
        "not tied decoder.embed_tokens.weight differs from decoder.output_projection.weight".split(),
        "wrong shape decoder.layers.0.self_attn.q_proj.weight 16 x 12 16 x 16".split(),
        "missing decoder.layers.1.fc1.weight - 32 x 16".split(),
        "missing decoder.layers.1.fc1.bias - 32".split(),
        "left over decoder.layers.2.fc2.weight 3 x 4 -".split(),
        "left over decoder.layers.2.fc2.bias 3 x 4 -".split(),
        "left over encoder.embed_tokens.weight 5 x 6 -".split(),
    ]
    # Of weights that are tied, the first is named.
    weights["decoder.embed_tokens.weight"] = torch.zeros(44, 12)
    torch.save(state, tmp_path / "model.pt")
    tied = "wrong shape decoder.embed_tokens.weight 44 x 12 44 x 16".split()
    assert misfits(fairseq, tmp_path, f"{PRE_NORM} {SWAPPED}")[1] == tied
    # What is not taken need not fit.
    flags = f"{PRE_NORM} {SWAPPED} --transfer output-projection"
    assert misfits(fairseq, tmp_path, flags) == ["left over encoder.embed_tokens.weight 5 x 6 -".split()]


def test_a_group_that_the_source_lacks_is_named(fairseq, source, tmp_path):
    _, folder = source
    state = torch.load(folder / "model.pt", weights_only=True)
    state["model"] = {name: x for name, x in state["model"].items() if ".fc" not in name and "final" not in name}
    torch.save(state, tmp_path / "model.pt")
    shutil.copy(folder / "dict.txt", tmp_path)
    number = f"{2 * (2 * 16 * 32 + 32 + 16 + 32):,}"
    assert misfits(fairseq, tmp_path, PRE_NORM) == [
        f"missing group feed-forward none of it {number} parameters".split()
    ]
    take(fairseq, tmp_path, f"{PRE_NORM} --transfer embeddings,attention,output,output-projection")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--share-decoder-input-output-embed", "decoder_normalize_before"),
        (f"{PRE_NORM} --activation-fn gelu", "activation_fn"),
        (f"{PRE_NORM} --no-scale-embedding", "no_scale_embedding"),
        (f"{PRE_NORM} --no-token-positional-embeddings", "no_token_positional_embeddings"),
        (f"{PRE_NORM} --decoder-attention-heads 4", "decoder_attention_heads"),
        (f"{PRE_NORM} --rotary-dim 4 --softmax-attention-layers 2", "rotary_dim"),
        (f"{PRE_NORM} --parallel-residual", "parallel_residual"),
    ],
)
def test_options_that_give_weights_another_meaning_are_named(fairseq, source, flags, named):
    assert [row[:3] for row in misfits(fairseq, source[1], flags) if row[0] == "other"] == [["other", "option", named]]


@pytest.mark.parametrize("masked", [True, False], ids=["source", "model"])
def test_a_mask_that_only_one_of_the_two_has_is_named(fairseq, tmp_path, masked):
    """As in a transfer from a converted GPT-2 to --arch fast_weight_lm: what was masked has no trained output."""
    mask = "--mask-special-symbols"
    common = f"{PRE_NORM} --softmax-attention-layers all"
    make_source(fairseq, tmp_path, f"{common} {mask}" if masked else common, "fast_weight_lm")
    flags = common if masked else f"{common} {mask}"
    assert misfits(fairseq, tmp_path, flags) == [f"other option mask_special_symbols {masked} {not masked}".split()]
    take(fairseq, tmp_path, f"{flags} --transfer attention,feed-forward,output-projection")
    take(fairseq, tmp_path, f"{common} {mask}" if masked else common)


def test_models_of_other_heads_take_what_does_not_depend_on_them(fairseq, source):
    take(fairseq, source[1], f"{PRE_NORM} --decoder-attention-heads 4 --transfer embeddings,output,feed-forward")


@pytest.mark.parametrize("flags", ["--update-rule gated", "--softmax-attention-layers 2"])
def test_attention_is_not_swapped_into_other_heads(fairseq, source, flags):
    flags = f"{PRE_NORM} --fast-weight-heads 4 {flags}"
    assert misfits(fairseq, source[1], flags) == ["other option fast_weight_heads 2 4".split()]
    take(fairseq, source[1], f"{flags} --transfer embeddings,output,feed-forward,output-projection")


def test_fast_weight_layers_with_the_sources_heads_take_its_attention(fairseq, source):
    model, folder = source
    flags = f"{PRE_NORM} --update-rule gated --fast-weight-heads 2 --decoder-attention-heads 4"
    taken = take(fairseq, folder, flags)
    name = "decoder.layers.1.self_attn.k_proj.weight"
    assert torch.equal(taken.get_parameter(name), model.get_parameter(name))
    # In a hybrid the layers with ordinary attention are those that do not fit.
    assert misfits(fairseq, folder, f"{flags} --softmax-attention-layers 2") == [
        "other option decoder_attention_heads 2 4".split()
    ]


def test_local_attention_keeps_all_weights_and_is_the_source_within_its_window(fairseq, source, text, caplog):
    model, folder = source
    tokens = text(2, 9)
    local = take(fairseq, folder, f"{PRE_NORM} --mixers local --local-window 9")
    assert torch.allclose(log_probs(local, tokens), log_probs(model, tokens), atol=1e-5)
    report = report_of(caplog, lambda: take(fairseq, folder, f"{PRE_NORM} --mixers local --local-window 4"))
    kept, *others = report["all"]
    assert kept == f"{sum(p.numel() for p in model.parameters()):,}" and set(others[:3]) == {"0"}


@pytest.mark.parametrize("mixer", ["abc", "linformer", "transformer-xl", "mamba", "gated-delta"])
def test_mixers_of_other_kinds_start_with_weights_of_their_own(fairseq, source, text, mixer):
    _, folder = source
    model = take(fairseq, folder, f"{PRE_NORM} --mixers {mixer}:2,softmax:1 --transfer embeddings,feed-forward")
    own, theirs = model.state_dict(), read_source(folder / "model.pt").weights
    parameters = {name for name, _ in model.named_parameters() if ".self_attn." in name}
    assert parameters and not any(name in theirs and torch.equal(own[name], theirs[name]) for name in parameters)
    assert torch.equal(own["decoder.layers.1.fc1.weight"], theirs["decoder.layers.1.fc1.weight"])
    assert model(text(2, 9))[0].isfinite().all()


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
def test_retention_starts_with_attention_of_its_own(fairseq, tmp_path, caplog, pre_norm):
    """Choi 2024, Sec. 3.2: in hybrids attention goes to the softmax layers; norms go with what they precede."""
    common = "--decoder-normalize-before" if pre_norm else ""
    model = make_source(fairseq, tmp_path, f"{common} --decoder-layers 3")
    flags = f"{common} --decoder-layers 3 --update-rule retention --fast-weight-heads 4 --softmax-attention-layers 2"
    with caplog.at_level(logging.INFO):
        taken = take(fairseq, tmp_path, f"{flags} --freeze all")
    # The norm before layer 1 with post-norm is the embeddings' or nobody's; that of layer 3 stands in layer 2.
    norms = ("0.self_attn_layer_norm", "2.self_attn_layer_norm") if pre_norm else ("1.final_layer_norm",)
    new = [f"decoder.layers.{norm}." for norm in norms]
    new += [f"decoder.layers.{i}.self_attn.{p}_proj." for i in (0, 2) for p in "qkvg"]
    for name, parameter in taken.named_parameters():
        if name.startswith(tuple(new)):
            assert parameter.requires_grad, name
            assert ".g_proj" in name or not torch.equal(parameter, model.get_parameter(name)), name
        else:
            assert not parameter.requires_grad and torch.equal(parameter, model.get_parameter(name)), name
    rows = {line.split("  ")[0]: line.split()[-5:] for line in caplog.text.splitlines() if line.count("  ") > 4}
    numbers = [f"{n:,}" for n in (3 * (16 * 16 + 16) + 2 * 16, 2 * 4 * (16 * 16 + 16) + len(norms) * 2 * 16)]
    assert rows["attention"] == [numbers[0], "0", "0", "0", numbers[0]]
    assert rows["none of them"] == ["0", "0", "0", numbers[1], "0"]


def test_attention_of_a_hybrid_with_retention_goes_with_its_output_projection(fairseq, source, caplog):
    model, folder = source
    flags = f"{PRE_NORM} --update-rule retention --softmax-attention-layers 2"
    with caplog.at_level(logging.INFO):
        taken = take(fairseq, folder, f"{flags} --transfer attention")
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    of_layer = [*projections, "self_attn_layer_norm"]
    expected = {f"decoder.layers.1.{name}.{kind}" for name in of_layer for kind in ("weight", "bias")}
    fresh = fairseq.build(flags, seed=3)
    for name, parameter in taken.named_parameters():
        assert torch.equal(parameter, (model if name in expected else fresh).get_parameter(name)), name
    assert "of output-projection are tied to" not in caplog.text
    taken = take(fairseq, folder, f"{flags} --transfer output-projection")
    for name, parameter in taken.named_parameters():
        assert torch.equal(parameter, (model if ".out_proj." in name else fresh).get_parameter(name)), name


def test_a_transfer_of_nothing_is_refused(fairseq, source):
    flags = f"{PRE_NORM} --update-rule retention"
    with pytest.raises(ValueError, match="transfer is attention, of which the model has nothing: its mixers"):
        take(fairseq, source[1], f"{flags} --transfer attention")
    take(fairseq, source[1], flags)


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        (WORDS[:-1], "44 types, that of the data 43"),
        ((*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]), "type 9 is 'w5' in .* and 'w6' in that of the data"),
        ((*WORDS[:-1], "other"), "type 43 is 'w39' in .* and 'other'"),
    ],
    ids=["smaller", "another order", "another word"],
)
def test_another_dictionary_is_refused(fairseq, source, words, difference):
    with pytest.raises(ValueError, match=difference) as error:
        take(fairseq, source[1], PRE_NORM, words=words)
    message = str(error.value)
    assert "published dictionary of the Baevski & Auli checkpoint, for one, is in another order" in message
    assert f"fairseq-preprocess --srcdict {source[1] / 'dict.txt'}" in message


def test_files_that_are_not_there_are_named(fairseq, source, tmp_path):
    with pytest.raises(ValueError, match=rf"there is no file {tmp_path}/model.pt; it must be a folder with model.pt"):
        take(fairseq, tmp_path)
    with pytest.raises(ValueError, match=rf"there is no file {tmp_path}/x.pt"):
        take(fairseq, tmp_path / "x.pt")
    shutil.copy(source[1] / "model.pt", tmp_path)
    with pytest.raises(ValueError, match=rf"there is no {tmp_path}/dict.txt"):
        take(fairseq, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and nothing", "cut short, damaged or no checkpoint"),
        ({"model": {"weight": torch.zeros(2)}, "args": None, "cfg": None}, "not a checkpoint that fairseq wrote"),
        ({"optimizer": 1}, "is not one of fairseq"),
        (
            {"model": {"weight": torch.zeros(2)}, "args": None, "cfg": None, "extra_state": {"train_iterator": {}}}
            | {"optimizer_history": [{"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}]},
            "holds no Transformer language model",
        ),
    ],
)
def test_what_is_no_checkpoint_of_a_language_model_is_refused(fairseq, source, tmp_path, content, message):
    file = tmp_path / "model.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    shutil.copy(source[1] / "dict.txt", tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        take(fairseq, tmp_path)
    assert str(file) in str(error.value)


def test_models_with_fast_weights_are_no_source(fairseq, tmp_path):
    for number, flags in enumerate(("", "--softmax-attention-layers 1")):
        folder = tmp_path / str(number)
        make_source(fairseq, folder, f"{PRE_NORM} {flags}", "fast_weight_lm")
        with pytest.raises(ValueError, match=r"a model with other mixers.*--finetune-from-model"):
            take(fairseq, folder, PRE_NORM)
    # The same model with ordinary attention in all layers is one.
    make_source(fairseq, tmp_path / "all", f"{PRE_NORM} --softmax-attention-layers all", "fast_weight_lm")
    take(fairseq, tmp_path / "all", PRE_NORM)


def test_sources_whose_settings_have_their_former_name_are_known(fairseq, tmp_path):
    for layers, refused in (("1", True), ("all", False)):
        folder = tmp_path / layers
        model = make_source(fairseq, folder, f"{PRE_NORM} --softmax-attention-layers {layers}", "fast_weight_lm")
        state = torch.load(folder / "model.pt", weights_only=True)
        state["model"] = with_former_name(state["model"])
        torch.save(state, folder / "model.pt")
        if refused:
            with pytest.raises(ValueError, match=r"a model with other mixers.*--finetune-from-model"):
                take(fairseq, folder, PRE_NORM)
        else:
            name = "decoder.layers.0.fc1.weight"
            assert torch.equal(take(fairseq, folder, PRE_NORM).get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--transfer heads", "transfer is 'heads'; it must be all, none, or comma-separated: embeddings, output"),
        ("--transfer none", "transfer is 'none'"),
        ("--freeze everything", "freeze is 'everything'"),
        ("--transfer output --freeze output,attention", "freeze is 'output,attention', but transfer is 'output'"),
        ("--unfreeze-threshold 0.01", "unfreeze_threshold is 0.01, but freeze is none"),
        ("--freeze all --unfreeze-threshold 0 --unfreeze-interval 5", "unfreeze_threshold is 0; it must be above 0"),
        ("--freeze all --unfreeze-threshold 1 --unfreeze-interval 5", "unfreeze_threshold is 1; .* below 1"),
        ("--freeze all --unfreeze-threshold 0.01", "unfreeze_interval is None; with unfreeze_threshold"),
        ("--freeze all --unfreeze-threshold 0.01 --unfreeze-interval 0", "unfreeze_interval is 0"),
        (
            "--freeze all --unfreeze-threshold 0.01 --unfreeze-interval 5 --unfreeze-patience 0",
            "unfreeze_patience is 0; it must be at least 1",
        ),
        ("--freeze all --unfreeze-interval 5", "unfreeze_interval is 5; it needs unfreeze_threshold"),
        ("--freeze all --unfreeze-patience 2", "unfreeze_patience is 2; it needs unfreeze_threshold"),
        ("--ddp-backend fully_sharded", "ddp_backend is fully_sharded; with transfer_from"),
        ("--update-rule gated --feature-dim 9", "feature_dim is 9.*at most the 8 numbers"),
        ("--update-rule delta --no-attention-bias", "no_attention_bias is set"),
        ("--softmax-attention-layers all --freeze all", "freeze is 'all', which leaves nothing to train"),
    ],
)
def test_options_that_cannot_work_are_named(fairseq, source, flags, message):
    with pytest.raises(ValueError, match=message):
        take(fairseq, source[1], f"{PRE_NORM} {flags}")


def test_a_model_that_is_no_transformer_is_refused(source):
    read = read_source(source[1] / "model.pt")
    with pytest.raises(ValueError, match="Linear is no Transformer; it must be fast_weight_lm"):
        transfer(torch.nn.Linear(1, 1), read, frozenset(GROUPS))


@pytest.mark.parametrize("flags", ["--transfer output", "--freeze output", "--dry-run"])
def test_options_of_a_transfer_need_one(fairseq, flags):
    args = fairseq.tiny("fast_weight_lm", flags)
    with pytest.raises(ValueError, match="it needs transfer_from, which is not set"):
        tasks.setup_task(args).build_model(args)


def test_a_model_that_is_loaded_takes_nothing(fairseq, source, tmp_path):
    args = fairseq.tiny("fast_weight_lm", f"{PRE_NORM} --transfer-from {tmp_path / 'gone'}")
    tasks.setup_task(args).build_model(args, from_checkpoint=True)


def test_groups_are_read():
    assert parse_groups("x", " output , attention ") == {"output", "attention"}
    assert parse_groups("x", "all") == set(GROUPS)
    assert parse_groups("x", "none") == parse_groups("x", "") == frozenset()
    with pytest.raises(ValueError, match="x is 'all,output'"):
        parse_groups("x", "all,output")

"""The weights of a Transformer that a model takes, and the report on them."""

import logging
import re
import shutil
import sys

import pytest
import torch
from fairseq import tasks

from fairseq_fastweights.conversion.transfer.options import GROUPS, parse_groups
from fairseq_fastweights.conversion.transfer.weights import attention_of, group_of
from tests.conftest import train
from tests.conversion.transfers import PRE_NORM, make_source, save_as_in_2019, save_as_today, take
from tests.models.conftest import SIZES

ADAPTIVE = "--adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25 --decoder-layers 2"
HEAD = 16 * 16 + 16  # a projection and its bias


def log_probs(model, tokens):
    return model.get_normalized_probs(model(tokens), log_probs=True)


def assert_taken(model, sources) -> None:
    """That each parameter is that of the model which `sources(name)` gives."""
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, sources(name).get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "flags", "save"),
    [
        ("_baevski_wiki103", ADAPTIVE, save_as_in_2019),
        ("", PRE_NORM, save_as_today),
        ("", "", save_as_in_2019),
        ("", "--decoder-learned-pos --decoder-output-dim 12", save_as_today),
    ],
)
def test_without_swapping_the_model_is_the_source(fairseq, text, tmp_path, arch, flags, save):
    model = make_source(fairseq, tmp_path, flags, f"transformer_lm{arch}", save)
    flags, arch, tokens = f"{flags} --softmax-attention-layers all", f"fast_weight_lm{arch}", text(3, 12)
    expected = log_probs(model, tokens)
    assert torch.allclose(log_probs(take(fairseq, tmp_path, flags, arch), tokens), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(log_probs(fairseq.build(flags, arch=arch), tokens), expected, rtol=0, atol=1e-2)


BAEVSKI = "fast_weight_lm_baevski_wiki103"
WITHOUT_HEADS = " ".join(f"--{name} {number}" for name, number in SIZES.items() if "heads" not in name)


def take_heads(fairseq, folder, flags=""):
    """The model of the published checkpoint's architecture, which has 8 heads if nothing else is asked for."""
    args = fairseq.parse(BAEVSKI, f"{WITHOUT_HEADS} {ADAPTIVE} --transfer-from {folder} {flags}")
    return tasks.setup_task(args).build_model(args).eval()


@pytest.mark.parametrize("save", [save_as_in_2019, save_as_today])
@pytest.mark.parametrize("heads", [8, 16])
def test_a_model_has_as_many_heads_as_the_settings_of_its_source_say(fairseq, text, tmp_path, caplog, heads, save):
    """Whichever number that is; and a command that asks for another one is refused."""
    caplog.set_level(logging.INFO)
    options = f"{ADAPTIVE} --decoder-attention-heads {heads}"
    model = make_source(fairseq, tmp_path, options, "transformer_lm_baevski_wiki103", save)
    taken, tokens = take_heads(fairseq, tmp_path, "--softmax-attention-layers all"), text(3, 12)
    assert torch.allclose(log_probs(taken, tokens), log_probs(model, tokens), rtol=0, atol=1e-5)
    assert taken.decoder.args.decoder_attention_heads == heads  # as its checkpoints then say
    assert all(
        mixer.num_heads == heads for mixer in take_heads(fairseq, tmp_path, "--update-rule decay").decoder.mixers
    )
    told = f"the settings of {tmp_path}/model.pt say decoder_attention_heads {heads}"
    assert told + (", and so has the model, not 8 as its architecture" if heads == 16 else "\n") in caplog.text


def test_other_heads_than_the_source_has_are_refused(fairseq, tmp_path, monkeypatch, caplog):
    options = f"{ADAPTIVE} --decoder-attention-heads 16"
    make_source(fairseq, tmp_path, options, "transformer_lm_baevski_wiki103", save_as_in_2019)
    for heads, words in ((4, []), (8, ["--decoder-attention-heads", "8"]), (8, ["model.decoder_attention_heads=8"])):
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
        with pytest.raises(ValueError, match=rf"other option +decoder_attention_heads +16 +{heads}$"):
            take_heads(fairseq, tmp_path, f"--decoder-attention-heads {heads}")
    monkeypatch.setattr(sys, "argv", ["fairseq-train"])
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=False)
    for wrong in (3, 0):
        checkpoint["args"].decoder_attention_heads = wrong
        torch.save(checkpoint, tmp_path / "model.pt")
        with pytest.raises(
            ValueError, match=f"{tmp_path}/model.pt has decoder_attention_heads {wrong} in its settings"
        ):
            take_heads(fairseq, tmp_path)
    del checkpoint["args"].decoder_attention_heads
    torch.save(checkpoint, tmp_path / "model.pt")
    take_heads(fairseq, tmp_path)
    assert "do not say decoder_attention_heads; it is taken for 8" in caplog.text


def test_a_group_is_taken_and_nothing_else(fairseq, source):
    model, folder = source
    flags = f"{PRE_NORM} --softmax-attention-layers 2 --update-rule gated"
    fresh = fairseq.build(flags, seed=3)
    of_name = {name: {group_of(name, 2, True)} for name, _ in fresh.named_parameters()}
    of_name["decoder.embed_tokens.weight"] = {"embeddings", "output"}  # it is tied
    assert set().union(*of_name.values()) == {*GROUPS, None}
    for groups in [*({group} for group in GROUPS), {"embeddings", "feed-forward"}, set(GROUPS)]:
        taken = take(fairseq, folder, f"{flags} --transfer {','.join(groups)}")
        assert_taken(taken, lambda name, groups=groups: model if groups & of_name[name] else fresh)


@pytest.mark.parametrize(
    ("names", "pre_norm", "post_norm"),
    [
        ("embed_tokens.embeddings.2.1.weight embed_positions.weight", "embeddings", "embeddings"),
        ("layers.0.self_attn.q_proj.bias layers.0.self_attn.v_proj.weight", "attention", "attention"),
        ("layers.0.self_attn.out_proj.weight", "output-projection", "output-projection"),
        ("layers.0.self_attn_layer_norm.weight", "attention", "feed-forward"),
        ("layers.0.fc1.weight layers.0.fc2.bias", "feed-forward", "feed-forward"),
        ("layers.0.final_layer_norm.bias", "feed-forward", "attention"),
        ("layers.11.final_layer_norm.bias", "feed-forward", "output"),
        ("layer_norm.weight output_projection.weight adaptive_softmax.tail.0.2.weight", "output", "output"),
        ("layers.0.self_attn.value_decay_proj.bias layers.0.encoder_attn.q_proj.weight", None, None),
    ],
)
def test_norms_go_with_the_part_after_them(names, pre_norm, post_norm):
    for name in names.split():
        number = int(name.split(".")[1]) if name.startswith("layers") else None
        for expected, is_pre_norm in ((pre_norm, True), (post_norm, False)):
            assert group_of(f"decoder.{name}", 12, is_pre_norm) == expected
            # The attention that it is of or stands before, where it is of that group.
            if expected == "attention":
                follows = number + ("final" in name)
                assert attention_of(f"decoder.{name}", is_pre_norm) == f"decoder.layers.{follows}.self_attn."
        assert group_of(f"encoder.{name}", 12, True) is None
        assert number is not None or attention_of(f"decoder.{name}", True) is None


def test_every_parameter_of_fairseqs_transformer_has_a_group(fairseq):
    scales = "--scale-fc --scale-attn --scale-heads --scale-resids --decoder-input-dim 8 --decoder-output-dim 12"
    for flags in (f"--layernorm-embedding {scales}", "--character-embeddings --character-filters [(1,8),(2,8)]"):
        for name, _ in fairseq.build(flags, arch="transformer_lm").named_parameters():
            assert group_of(name, 2, True) in GROUPS, name


def test_groups_are_read():
    for words, groups in (("all", GROUPS), (" output , attention ", ("output", "attention")), ("none", ()), ("", ())):
        assert parse_groups("x", words) == set(groups)


@pytest.fixture
def reported(fairseq, caplog):
    """`reported(source, flags)`: the model, the rows of the report on it, and all that was logged."""
    caplog.set_level(logging.INFO)

    def reported(folder, flags: str):
        caplog.clear()
        model = take(fairseq, folder, flags)
        rows = [re.split(" {2,}", row) for row in caplog.text.splitlines()]
        return model, {row[0]: row[1:] for row in rows if len(row) == 6}, caplog.text

    return reported


def test_the_report_counts_parameters(source, reported):
    flags = "--update-rule decay --feature-dim 4 --softmax-attention-layers 2 --transfer embeddings,attention,output"
    _, report, log = reported(source[1], f"{PRE_NORM} {flags} --freeze output")
    expected = {
        "embeddings": [44 * 16, 0, 0, 0, 44 * 16],  # tied to the output
        "output": [2 * 16, 0, 0, 0, 2 * 16],
        "feed-forward": [0, 0, 0, 2 * (2 * 16 * 32 + 32 + 16 + 32), 0],
        "output-projection": [0, 0, 0, 2 * HEAD, 0],
        # The norms, and layer 2; the values of layer 1; its queries and keys of 4 numbers for each of 2 heads.
        "attention": [2 * 32 + 3 * HEAD, HEAD, 2 * (8 * 16 + 8), 0, 0],
        "none of them": [0, 0, 0, HEAD + 8 * 16 + 8, 0],
    }
    expected["all"] = [sum(column) for column in zip(*expected.values(), strict=True)]
    assert report.pop("parameters") == ["kept", "rescaled", "folded", "new", "frozen"]
    assert report == {group: [f"{n:,}" for n in numbers] for group, numbers in expected.items()}
    assert "704 parameters of embeddings are tied to output" in log


# Rows and columns of Mao's Table 1, and more.
@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        ("decay --feature-dim 4", True),
        ("gated --feature-map identity --feature-dim 4 --normalization none", True),
        ("delta --feature-map relu --feature-dim 4 --normalization none", True),
        ("decay --scale-read-out", False),
        ("decay --transfer feed-forward", False),
        ("decay --feature-map relu --feature-dim 4 --normalization attention", False),
        ("sum --feature-map identity --feature-dim 4 --normalization none", False),
        ("delta --feature-map favor --normalization sum --softmax-attention-layers 2", False),
        ("retention", False),
        # Mixers that take nothing of attention.
        ("--mixers mamba:1,gated-delta:2 --transfer embeddings,feed-forward", False),
    ],
)
def test_the_report_advises_to_keep_the_attentions_scale(source, text, reported, flags, advised):
    model, _, log = reported(source[1], f"{PRE_NORM} {flags if flags.startswith('--') else f'--update-rule {flags}'}")
    assert ("with scale_read_out they start nearer" in log) == advised
    log_probs(model.train(), text(2, 17)).mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_local_attention_keeps_weights_and_is_the_source_in_its_window(source, text, reported):
    model, folder = source
    local, *_ = reported(folder, f"{PRE_NORM} --mixers local --local-window 9")
    assert torch.allclose(log_probs(local, text(2, 9)), log_probs(model, text(2, 9)), atol=1e-5)
    _, report, _ = reported(folder, f"{PRE_NORM} --mixers local --local-window 4")
    assert report["all"][:4] == [f"{sum(p.numel() for p in model.parameters()):,}", "0", "0", "0"]


@pytest.mark.parametrize("common", ["--decoder-normalize-before", ""], ids=["pre-norm", "post-norm"])
def test_retention_starts_with_attention_of_its_own(fairseq, tmp_path, reported, common):
    """Choi 2024, Sec. 3.2: in hybrids attention goes to the softmax layers; norms go with the part after them."""
    model = make_source(fairseq, tmp_path, f"{common} --decoder-layers 3")
    flags = "--decoder-layers 3 --update-rule retention --fast-weight-heads 4 --softmax-attention-layers 2"
    taken, report, _ = reported(tmp_path, f"{common} {flags} --freeze all")
    # The norm before layer 1 with post-norm is the embeddings' or nobody's; that of layer 3 stands in layer 2.
    norms = ("0.self_attn_layer_norm", "2.self_attn_layer_norm") if common else ("1.final_layer_norm",)
    new = [f"decoder.layers.{norm}." for norm in norms]
    new += [f"decoder.layers.{i}.self_attn.{p}_proj." for i in (0, 2) for p in "qkvg"]
    for name, parameter in taken.named_parameters():
        own = name.startswith(tuple(new))
        assert parameter.requires_grad == own, name
        assert ".g_proj" in name or torch.equal(parameter, model.get_parameter(name)) != own, name
    numbers = [f"{n:,}" for n in (3 * HEAD + 2 * 16, 2 * 4 * HEAD + len(norms) * 2 * 16)]
    assert report["attention"] == [numbers[0], "0", "0", "0", numbers[0]]
    assert report["none of them"] == ["0", "0", "0", numbers[1], "0"]


def test_attention_beside_retention_goes_with_its_output_projection(fairseq, source, reported):
    model, folder = source
    flags = f"{PRE_NORM} --update-rule retention --softmax-attention-layers 2"
    fresh = fairseq.build(flags, seed=3)
    taken, _, log = reported(folder, f"{flags} --transfer attention")
    assert_taken(taken, lambda name: model if name.startswith("decoder.layers.1.self_attn") else fresh)
    assert "of output-projection are tied to" not in log
    taken, *_ = reported(folder, f"{flags} --transfer output-projection")
    assert_taken(taken, lambda name: model if ".out_proj." in name else fresh)


def test_a_dry_run_reports_and_leaves_data_and_checkpoints_alone(trained, tmp_path, caplog):
    (tmp_path / "data").mkdir()
    shutil.copy(trained / "dict.txt", tmp_path / "data")  # nothing else, so that data would be missed
    (tmp_path / "checkpoint_last.pt").write_bytes(b"of another run")
    with pytest.raises(SystemExit) as stopped:
        train(
            tmp_path / "data",
            tmp_path,
            "--decoder-normalize-before",
            "--transfer-from",
            str(trained),
            "--freeze",
            "output",
            "--dry-run",
        )
    assert stopped.value.code == 0
    assert "none of them" in caplog.text and "num. shared" not in caplog.text
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"of another run"
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"dict.txt", "checkpoint_last.pt", ".training.lock"}

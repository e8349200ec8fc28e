"""A transfer that is impossible is refused by name, before anything is copied."""

import shutil
from pathlib import Path

import pytest
import torch
from fairseq import tasks

from fairseq_fastweights.conversion.transfer.base_model import read_base_model
from fairseq_fastweights.conversion.transfer.options import GROUPS
from fairseq_fastweights.conversion.transfer.weights import Transfer
from tests.conversion.transfers import PRE_NORM, changed, make_source, take
from tests.models.conftest import WORDS

SWAPPED = "--update-rule decay --feature-dim 4"
HEADS = "--decoder-attention-heads 4"
FFN = f"{2 * (2 * 16 * 32 + 32 + 16 + 32):,}"  # parameters of the feed-forward group


def misfits(fairseq, folder: Path, flags: str) -> list[str]:
    """The rows of the table, without the spaces between columns."""
    with pytest.raises(ValueError, match="do not fit the model; nothing was transferred") as error:
        take(fairseq, folder, flags)
    return [" ".join(line.split()) for line in str(error.value).splitlines()[2:]]


def test_all_that_does_not_fit_is_listed_at_once(fairseq, source, tmp_path):
    state = torch.load(shutil.copytree(source[1], tmp_path / "x") / "model.pt", weights_only=True)
    weights = state["model"]
    del weights["decoder.layers.1.fc1.bias"]
    shapes = {"layers.2.fc2.weight": (3, 4), "embed_positions.weights": (1,)}
    shapes["layers.0.self_attn.q_proj.weight"] = (16, 12)
    weights |= {f"decoder.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    weights |= {"encoder.version": torch.zeros(1), "encoder.embed_tokens.weight": torch.zeros(5, 6)}
    weights["decoder.output_projection.weight"] = weights["decoder.output_projection.weight"] + 1
    state["cfg"]["model"]["decoder_attention_heads"] = 4
    torch.save(state, tmp_path / "x" / "model.pt")
    assert misfits(fairseq, tmp_path / "x", f"{PRE_NORM} {SWAPPED}") == [
        "other option decoder_attention_heads 4 2",
        "not tied decoder.embed_tokens.weight differs from decoder.output_projection.weight",
        "wrong shape decoder.layers.0.self_attn.q_proj.weight 16 x 12 16 x 16",
        "missing decoder.layers.1.fc1.bias - 32",
        "left over decoder.layers.2.fc2.weight 3 x 4 -",
        "left over encoder.embed_tokens.weight 5 x 6 -",
    ]
    # Of weights that are tied, the first is named.
    weights["decoder.embed_tokens.weight"] = torch.zeros(44, 12)
    torch.save(state, tmp_path / "x" / "model.pt")
    tied = "wrong shape decoder.embed_tokens.weight 44 x 12 44 x 16"
    assert misfits(fairseq, tmp_path / "x", f"{PRE_NORM} {SWAPPED}")[1] == tied
    # Weights that are not taken need not fit.
    flags = f"{PRE_NORM} {SWAPPED} --transfer output-projection"
    assert misfits(fairseq, tmp_path / "x", flags) == ["left over encoder.embed_tokens.weight 5 x 6 -"]
    # Norms stand elsewhere.
    post_norm = misfits(fairseq, source[1], "--share-decoder-input-output-embed")
    assert post_norm[0] == "other option decoder_normalize_before True False"


def test_a_group_that_the_source_lacks_is_named(fairseq, source, tmp_path):
    lacking = changed(source[1], tmp_path, lambda s: {n: s[n] for n in s if ".fc" not in n and "final" not in n})
    assert misfits(fairseq, lacking, PRE_NORM) == [f"missing group feed-forward none of it {FFN} parameters"]
    take(fairseq, lacking, f"{PRE_NORM} --transfer embeddings,attention,output,output-projection")


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--activation-fn gelu", "activation_fn relu gelu"),
        ("--no-scale-embedding", "no_scale_embedding False True"),
        ("--no-token-positional-embeddings", "no_token_positional_embeddings False True"),
        ("--rotary-dim 4 --softmax-attention-layers 2", "rotary_dim 0 4"),
        ("--parallel-residual", "parallel_residual False True"),
        # Symbols that the base model masks have no trained output.
        ("--mask-special-symbols", "mask_special_symbols False True"),
        # Heads cut queries, keys and values up.
        (HEADS, "decoder_attention_heads 2 4"),
        ("--fast-weight-heads 4 --update-rule gated", "fast_weight_heads 2 4"),
        ("--fast-weight-heads 4 --softmax-attention-layers 2", "fast_weight_heads 2 4"),
        # Those of fast weight layers may be the source's where others are not.
        (f"--fast-weight-heads 2 {HEADS}", ""),
        (f"--fast-weight-heads 2 {HEADS} --softmax-attention-layers 2", "decoder_attention_heads 2 4"),
    ],
)
def test_options_that_give_weights_another_meaning_are_named(fairseq, source, flags, row):
    (model, folder), name = source, "decoder.layers.1.self_attn.out_proj.weight"
    if row:
        assert misfits(fairseq, folder, f"{PRE_NORM} {flags}") == [f"other option {row}"]
        flags += " --transfer output-projection"  # which does not depend on any of them
    taken = take(fairseq, folder, f"{PRE_NORM} {flags}")
    assert torch.equal(taken.get_parameter(name), model.get_parameter(name))


def test_an_option_that_a_checkpoint_lacks_is_fairseqs_default(fairseq, source, tmp_path):
    state = torch.load(shutil.copytree(source[1], tmp_path / "x") / "model.pt", weights_only=True)
    del state["cfg"]["model"]["no_scale_embedding"]
    torch.save(state, tmp_path / "x" / "model.pt")
    rows = misfits(fairseq, tmp_path / "x", f"{PRE_NORM} --no-scale-embedding")
    assert rows == ["other option no_scale_embedding False True"]


ONE_WEIGHT = {"model": {"weight": torch.zeros(2)}, "args": None, "cfg": None}
HISTORY = [{"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}]
NO_DECODER = {**ONE_WEIGHT, "extra_state": {"train_iterator": {}}, "optimizer_history": HISTORY}


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, WORDS, "there is no file FOLDER/model.pt; it must be a folder with model.pt"),
        (b"", None, "there is no FOLDER/dict.txt"),
        (b"", WORDS, "FOLDER/model.pt.*is empty"),
        (b"PK\x03\x04 and nothing", WORDS, "FOLDER/model.pt.*cut short"),
        ({"optimizer": 1}, WORDS, "FOLDER/model.pt.*is not one of fairseq"),
        (ONE_WEIGHT, WORDS, "FOLDER/model.pt.*not a checkpoint that fairseq wrote"),
        (NO_DECODER, WORDS, "FOLDER/model.pt.*holds no Transformer language model"),
        (b"", WORDS[:-1], "43 types, that of the data 44.*published dictionary of the Baevski & Auli checkpoint"),
        (b"", (*WORDS[:-1], "other"), "type 43 is 'other' in .* 'w39'.*fairseq-preprocess --srcdict FOLDER/dict.txt"),
        (b"", (*WORDS[:5], "w6", "w5", *WORDS[7:]), "type 9 is 'w6' in FOLDER/dict.txt and 'w5' in that of the data"),
    ],
)
def test_files_without_a_language_model_or_the_datas_words_are_refused(fairseq, tmp_path, content, words, message):
    if words is not None:
        shutil.copy(fairseq.data(words) / "dict.txt", tmp_path)
    file = tmp_path / "model.pt"
    if content is not None:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(ValueError, match=message.replace("FOLDER", str(tmp_path))):
        take(fairseq, tmp_path, "")
    if content is None:
        with pytest.raises(ValueError, match=rf"there is no file {tmp_path}/x.pt"):
            take(fairseq, tmp_path / "x.pt", "")


@pytest.mark.parametrize("layers", ["", "--softmax-attention-layers 1", "--softmax-attention-layers all"])
def test_models_with_fast_weights_are_no_source_and_those_without_are(fairseq, tmp_path, layers):
    model = make_source(fairseq, tmp_path, f"{PRE_NORM} {layers}", "fast_weight_lm")
    if "all" in layers:
        name = "decoder.layers.0.fc1.weight"
        taken = take(fairseq, tmp_path, PRE_NORM)
        assert torch.equal(taken.get_parameter(name), model.get_parameter(name))
    else:
        with pytest.raises(ValueError, match=r"a model with other mixers.*--finetune-from-model"):
            take(fairseq, tmp_path, PRE_NORM)


# With which weights cannot be held: they are not said to be frozen.
NOT_HELD = ("fp16", "use-bmuf", "zero-sharding os", "ddp-backend slowmo", "ddp-backend fully_sharded", "tpu")
UNFREEZE = "--freeze all --unfreeze-threshold 0.01 --unfreeze-interval 5"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--transfer heads", "transfer is 'heads'; it must be all, none, or comma-separated: embeddings, output"),
        ("--transfer none", "transfer is 'none'; with transfer_from it must name something"),
        ("--freeze all,output", "freeze is 'all,output'"),
        ("--transfer output --freeze output,attention", "freeze is 'output,attention', but transfer is 'output'"),
        ("--unfreeze-threshold 0.01", "unfreeze_threshold is 0.01, but freeze is none"),
        *(
            (f"{UNFREEZE} --unfreeze-threshold {x}", f"threshold is {x}.0; it must be above 0 and below 1")
            for x in "01"
        ),
        ("--freeze all --unfreeze-threshold 0.01", "unfreeze_interval is None; with unfreeze_threshold"),
        (f"{UNFREEZE} --unfreeze-interval 0", "unfreeze_interval is 0"),
        (f"{UNFREEZE} --unfreeze-patience 0", "unfreeze_patience is 0; it must be at least 1"),
        *((f"--freeze all --unfreeze-{x} 5", f"{x} is 5; it needs unfreeze_thre") for x in ("interval", "patience")),
        *((f"{UNFREEZE} --{x}", f"{x.replace('-', '_').replace(' ', ' is ')}.*; with unfreeze_thr") for x in NOT_HELD),
        ("--update-rule gated --feature-dim 9", "feature_dim is 9.*at most the 8 numbers"),
        ("--update-rule delta --no-attention-bias", "no_attention_bias is set"),
        ("--softmax-attention-layers all --freeze all", "freeze is 'all', which leaves nothing to train"),
        (
            "--update-rule retention --transfer attention",
            "transfer is attention, of which the model has nothing.*must be of emb",
        ),
        ("--mixers mamba --transfer output-projection", "transfer is output-projection, of which the model has nothin"),
        *(
            (f"--mixers {mixer}", "transferred; with transfer embeddings,output,feed-forward they would")
            for mixer in ("local --no-attention-bias", "delta-net", "gla,delta:2")
        ),
        ("--mixers mamba --mamba-expansion 1", "mamba_expansion is 1; in place of .*transfer must be embeddings,outpu"),
        ("--mixers window-sum --rotary-dim 4", r"transferred\ndifference .*\nother option +rotary_dim +0 +4"),
    ],
)
def test_options_that_cannot_work_are_named(fairseq, source, flags, message):
    with pytest.raises(ValueError, match=message):
        take(fairseq, source[1], f"{PRE_NORM} {flags}")


def test_options_need_a_transfer_and_a_loaded_model_takes_nothing(fairseq, source, tmp_path):
    for flags in ("--transfer output", "--freeze output", "--dry-run"):
        args = fairseq.tiny("fast_weight_lm", flags)
        with pytest.raises(ValueError, match="it needs transfer_from, which is not set"):
            tasks.setup_task(args).build_model(args)
    args = fairseq.tiny("fast_weight_lm", f"{PRE_NORM} --transfer-from {tmp_path / 'gone'}")
    tasks.setup_task(args).build_model(args, from_checkpoint=True)
    with pytest.raises(ValueError, match="Linear is no Transformer; it must be fast_weight_lm"):
        Transfer(torch.nn.Linear(1, 1), read_base_model(source[1] / "model.pt"), frozenset(GROUPS))

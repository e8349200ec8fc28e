"""Models of Llama's and Qwen's shape whose attention becomes a fast weight memory."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.attention_transfer import AttentionTransfer, build_attention
from fairseq_fastweights.conversion.source import read_source
from fairseq_fastweights.conversion.swap import ADDITIVE_SCALE, check_swap, fold_map, swap
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from tests.conftest import QUIET, TASK, binarise, command, import_plugin
from tests.conversion import llamas, sources

WIDTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8
SHAPE = {"kv_heads": KV_HEADS, "head_dim": DIM, "projection_bias": "none", "query_key_norm_eps": 1e-3}


@pytest.fixture
def attention() -> SoftmaxAttention:
    torch.manual_seed(0)
    made = SoftmaxAttention(WIDTH, HEADS, **SHAPE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def swapped(attention: SoftmaxAttention, **options) -> FastWeightAttention:
    torch.manual_seed(1)
    new = FastWeightAttention(WIDTH, HEADS, **SHAPE | options)
    check_swap(new)
    weights = {n: p.detach() for n, p in attention.named_parameters() if not n.startswith("out_proj.")}
    if isinstance(new.q_norm, torch.nn.Identity):
        weights = {n: p for n, p in weights.items() if "norm" not in n}
    with torch.no_grad():
        for name, (values, _) in swap(new, weights).items():
            new.get_parameter(name).copy_(values)
        new.out_proj.weight.copy_(attention.out_proj.weight)
    return new


@torch.no_grad()
def test_at_full_size_a_memory_reads_the_sources_grouped_projections(attention):
    new = swapped(attention, update_rule="sum", feature_map="identity", normalization=frozenset())
    x = torch.randn(7, 1, WIDTH)
    q, k, v = (p(x)[:, 0].unflatten(-1, (-1, DIM)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k, read = attention.q_norm(q), attention.k_norm(k), torch.zeros(7, HEADS, DIM)
    for t in range(7):
        for head in range(HEADS):
            shared = head // 2
            read[t, head] = sum((q[t, head] @ k[j, shared]) * v[j, shared] for j in range(t + 1)) * ADDITIVE_SCALE
    expected = attention.out_proj(read.flatten(1))
    assert torch.allclose(new(x)[0][:, 0], expected, rtol=1e-4, atol=1e-5)  # sums in another order


def test_heads_that_share_keys_share_the_folded_map_and_values_the_mean_of_what_gates_let_in(attention):
    q, k = attention.q_proj.weight.detach(), attention.k_proj.weight.detach()
    fold = fold_map(q, k, HEADS, 3)
    new = swapped(attention, query_key_norm_eps=None, update_rule="decay", feature_dim=3)
    for shared in range(KV_HEADS):
        queries = [q[head * DIM : (head + 1) * DIM] for head in range(HEADS) if head // 2 == shared]
        both = torch.cat([*queries, k[shared * DIM : (shared + 1) * DIM]], dim=1).double()
        kept = (fold[shared] @ both).square().sum()
        # Of all maps with orthonormal rows none keeps more, by the theorem of Eckart and Young.
        assert torch.allclose(kept, torch.linalg.svdvals(both)[:3].square().sum(), rtol=1e-10)
    folded = torch.einsum("hmd,hdw->hmw", fold[[0, 0, 1, 1]], q.double().unflatten(0, (HEADS, DIM)))
    assert torch.allclose(new.q_proj.weight.double(), folded.flatten(0, 1), atol=1e-6)
    folded = torch.einsum("hmd,hdw->hmw", fold, k.double().unflatten(0, (KV_HEADS, DIM)))
    assert torch.allclose(new.k_proj.weight.double(), folded.flatten(0, 1), atol=1e-6)
    let_in = (1 - new.value_decay_proj.bias.sigmoid()).view(KV_HEADS, 2, DIM).mean(1).view(-1, 1)
    assert torch.allclose(new.v_proj.weight, let_in * attention.v_proj.weight, rtol=1e-5)
    with pytest.raises(ValueError, match="feature_dim is 3; with query_key_norm_eps it must be the 8 numbers"):
        swapped(attention, update_rule="gated", feature_dim=3)


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3"])
def converted(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    source = llamas.model(request.param, tie_word_embeddings=request.param == "Qwen2", head_dim=DIM)
    assert main(["from-huggingface", str(llamas.save(folder / "theirs", source)), str(folder / "ours")]) == 0
    return folder / "ours"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A text, in the numbers of `llamas.tokenizer`; all converted folders have one dictionary."""
    folder = tmp_path_factory.mktemp("data")
    numbers = [" ".join(map(str, llamas.tokenizer().encode(line).ids)) for line in [llamas.TEXT, "the cat"] * 4]
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in numbers))
    words = "".join(f"{i} 1\n" for i in range(400) if i != 1)
    (folder / "dict.txt").write_text(words)
    return binarise(folder, "--srcdict", str(folder / "dict.txt"))


def train(data: Path, converted: Path, save_dir: Path, *flags: str) -> tuple[str, list[float]]:
    """The log, and the losses of training by update."""
    shape = (converted / "options.txt").read_text().split()
    settings = "--optimizer adam --tokens-per-sample 16 --batch-size 4 --max-update 4 --disable-validation".split()
    settings += ["--lr", "0.003", "--save-dir", str(save_dir), "--transfer-from", str(converted)]
    log = command("train", str(data), *TASK, *shape, *QUIET, *settings, *flags)
    return log, [float(loss) for loss in re.findall(r'"loss": "([^"]+)"', log)]


OWN = "embeddings,output,feed-forward"
CONVERSIONS = [
    ("gated", ["--update-rule", "gated", "--scale-read-out"]),
    ("decay", ["--mixers", "decay:1,softmax:2"]),
    ("delta", ["--update-rule", "delta"]),
    ("gated delta", ["--mixers", "gated-delta", "--gated-delta-key-heads", "2", "--transfer", OWN]),
]


@pytest.mark.parametrize("flags", [flags for _, flags in CONVERSIONS], ids=[name for name, _ in CONVERSIONS])
def test_a_converted_model_trains(converted, data, tmp_path, flags):
    log, losses = train(data, converted, tmp_path, *flags)
    assert "transfer from" in log and len(losses) == 4 and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    k = state.get("decoder.layers.0.self_attn.k_proj.weight")
    assert k.shape[0] == (12 if "gated-delta" in flags else KV_HEADS * DIM)


def test_attention_transfer_trains_the_memories_alone_towards_the_attention(converted, data, tmp_path):
    flags = ["--update-rule", "sum", "--feature-map", "relu", "--normalization", "attention", "--criterion"]
    _, losses = train(data, converted, tmp_path, *flags, "attention_transfer", "--max-update", "12", "--lr", "0.01")
    assert losses[-1] < 0.7 * losses[0]
    before = torch.load(converted / "model.pt", weights_only=False)["model"]
    after = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    moved = {n for n, x in after.items() if n in before and "version" not in n and not torch.equal(x, before[n])}
    assert moved and all(".self_attn." in name for name in moved)


@torch.no_grad()
def test_each_layer_is_compared_on_what_the_sources_own_layer_reads(converted):
    """With the source itself for a model, whose attentions pass for mixers, nothing is left to learn."""
    import_plugin()
    source = read_source(converted / "model.pt")
    model, _, _ = sources.load(converted, llamas.model("Llama"))
    tokens = torch.randint(4, 400, (2, 9))
    tokens[0, 7:] = model.decoder.padding_idx
    hidden = model.decoder.extract_features(tokens)[1]["inner_states"]
    inputs = [layer.self_attn_layer_norm(x) for layer, x in zip(model.decoder.layers, hidden, strict=False)]
    given = [mixer(x)[0] for mixer, x in zip(model.decoder.mixers, inputs, strict=True)]
    for number, (x, y) in enumerate(zip(inputs, given, strict=True)):
        assert torch.allclose(build_attention(source, number)(x)[0], y, atol=1e-6)
    with pytest.raises(ValueError, match="the model must have a mixer other than softmax"):
        AttentionTransfer(source, model.decoder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--criterion", "attention_transfer", "--transfer", OWN], "transfer is .* it must be all"),
        (["--criterion", "attention_transfer", "--carry-over-state"], "carry_over_state is set; with criterion att"),
        (["--criterion", "attention_transfer", "--softmax-attention-layers", "all"], "a mixer other than softmax"),
        (["--kv-heads", "3"], "kv_heads is 3; it must be a divisor of the 4 heads"),
        (["--head-dim", "-2"], "head_dim is -2; it must be positive"),
        (["--rms-norm-eps=-1"], "rms_norm_eps is -1.0; it must be at least 0"),
        (["--quant-noise-pq", "0.1"], "quant_noise_pq is 0.1; with swiglu it must be 0"),
        (["--rms-norm-eps", "0.5"], "other option +rms_norm_eps +1e-06 +0.5"),
        (["--mixers", "softmax", "--rotary-scaling", "linear:2"], "other option +rotary_scaling +linear:2"),
    ],
)
def test_options_that_do_not_fit_are_named(data, tmp_path, flags, message):
    source = llamas.save(tmp_path / "theirs", llamas.model("Llama"))
    assert main(["from-huggingface", str(source), str(tmp_path / "ours")]) == 0
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path / "ours", tmp_path / "run", *flags)

"""Models of Llama's and Qwen's shape whose attention becomes a fast weight memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

import fairseq_fastweights.huggingface  # noqa: F401
from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.transfer.base_model import read_base_model
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.tasks.attention_transfer_criterion import AttentionTransfer, build_attention
from tests.conftest import QUIET, TASK, binarise, command, import_plugin
from tests.conversion import llamas, sources

WIDTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("converted"), {}
    for kind in ("Llama", "Qwen2", "Qwen3"):
        source = llamas.model(kind, tie_word_embeddings=kind == "Qwen2", head_dim=DIM)
        made[kind] = folder / kind
        assert main(["from-huggingface", str(llamas.save(folder / f"{kind}-theirs", source)), str(made[kind])]) == 0
    return made


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


def words(data: Path, converted: Path, *flags: str) -> list[str]:
    """The options of a call of fairseq-train, which starts from a converted model."""
    shape = (converted / "options.txt").read_text().split()
    settings = "--optimizer adam --tokens-per-sample 16 --batch-size 4 --max-update 4 --disable-validation".split()
    return [str(data), *TASK, *shape, *QUIET, *settings, "--lr", "0.003", "--transfer-from", str(converted), *flags]


def train(data: Path, converted: Path, save_dir: Path, *flags: str) -> list[float]:
    """The losses of training by update."""
    log = command("train", *words(data, converted, *flags), "--save-dir", str(save_dir))
    return [float(loss) for loss in re.findall(r'"loss": "([^"]+)"', log)]


OWN = "embeddings,output,feed-forward"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("Llama", ["--update-rule", "gated", "--scale-read-out", "--feature-dim", "4"]),
        ("Llama", ["--mixers", "window-sum", "--window-sum-window", "4"]),
        ("Qwen2", ["--mixers", "decay:1,softmax:2"]),
        ("Qwen3", ["--update-rule", "delta"]),
        ("Qwen3", ["--mixers", "gated-delta", "--gated-delta-key-heads", "2", "--transfer", OWN]),
    ],
    ids=["gated", "window-sum", "decay", "delta", "gated-delta"],
)
def test_a_converted_model_trains(converted, data, tmp_path, kind, flags):
    losses = train(data, converted[kind], tmp_path, *flags)
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    rows = state["decoder.layers.0.self_attn.k_proj.weight"].shape[0]
    assert rows == {"gated": KV_HEADS * 4, "gated-delta": KV_HEADS * WIDTH // HEADS}.get(flags[1], KV_HEADS * DIM)


@pytest.mark.parametrize(
    ("kind", "mixer"),
    [
        ("Qwen2", "--update-rule sum --feature-map relu --normalization attention"),
        ("Qwen3", "--mixers window-sum --window-sum-window 3"),
        ("Llama", "--mixers kimi-delta --kimi-delta-bias --kimi-delta-key-dim 8 --kimi-delta-value-dim 8"),
    ],
)
def test_attention_transfer_trains_memories_alone_towards_the_attention(converted, data, tmp_path, kind, mixer):
    flags = [*mixer.split(), "--criterion", "attention_transfer", "--max-update", "12", "--lr", "0.01"]
    losses = train(data, converted[kind], tmp_path, *flags)
    assert losses[-1] < 0.7 * losses[0]
    before = torch.load(converted[kind] / "model.pt", weights_only=False)["model"]
    after = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    moved = {n for n, x in after.items() if n in before and "version" not in n and not torch.equal(x, before[n])}
    assert moved and all(".self_attn." in name for name in moved)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_each_layer_is_compared_on_what_the_sources_own_layer_reads(converted, kind):
    """With the source itself for a model, each attention is that of the source, and there is nothing to learn."""
    import_plugin()
    source = read_base_model(converted[kind] / "model.pt")
    model, dictionary, _ = sources.load(converted[kind], llamas.model(kind))
    tokens = torch.randint(4, 400, (2, 9))
    tokens[0, 7:] = dictionary.pad()
    hidden = model.decoder.extract_features(tokens)[1]["inner_states"]
    for number, layer in enumerate(model.decoder.layers):
        x = layer.self_attn_layer_norm(hidden[number])
        assert torch.allclose(build_attention(source, number)(x)[0], layer.self_attn(x)[0], atol=1e-6)
    with pytest.raises(ValueError, match="the model must have a mixer other than softmax"):
        AttentionTransfer(source, model.decoder)


class Constant(Mixer):
    """Gives the same number everywhere, and notes its inputs."""

    def __init__(self, value: float) -> None:
        super().__init__(WIDTH)
        self.value, self.read = torch.nn.Parameter(torch.tensor(value)), []

    def forward(self, x, state=None, padding=None, **options):
        self.read.append(x)
        return self.value.expand(x.shape), {"state": x}


def test_errors_are_relative_and_layers_read_what_the_attentions_give(converted):
    import_plugin()
    source = read_base_model(converted["Llama"] / "model.pt")
    model, dictionary, _ = sources.load(converted["Llama"], llamas.model("Llama"))
    tokens = torch.randint(4, 400, (2, 9))
    tokens[0, 7:] = dictionary.pad()
    with torch.no_grad():
        hidden = model.decoder.extract_features(tokens)[1]["inner_states"]
        inputs = [layer.self_attn_layer_norm(x) for layer, x in zip(model.decoder.layers, hidden, strict=False)]
        targets = [m(x, None, tokens.eq(1))[0] for m, x in zip(model.decoder.mixers, inputs, strict=True)]
    passed = []
    for layer, value in zip(model.decoder.layers, (0.0, 0.5), strict=True):
        layer.self_attn = Constant(value)
        layer.final_layer_norm.register_forward_hook(lambda norm, *_: passed.append(norm))
    mixers = model.decoder.mixers
    errors = AttentionTransfer(source, model.decoder).errors(model, {"src_tokens": tokens})
    assert passed == [model.decoder.layers[0].final_layer_norm]  # nothing is computed after the last mixer
    real = tokens.t().ne(1)
    for mixer, x, target, error in zip(mixers, inputs, targets, errors, strict=True):
        assert torch.allclose(mixer.read[0][real], x[real], atol=1e-5)
        expected = (mixer.value - target[real]).square().sum() / target[real].square().sum()
        assert torch.allclose(error, expected, rtol=1e-4)
    errors.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {f"decoder.layers.{i}.self_attn.value" for i in (0, 1)}
    assert mixers[0](inputs[0])[0].sum() == 0  # they are themselves again


def test_gradients_of_several_processes_are_added_up_or_it_is_refused(converted):
    import_plugin()
    from fairseq_fastweights.tasks.attention_transfer_criterion import AttentionTransferCriterion

    call = words(converted["Llama"], converted["Llama"], "--criterion", "attention_transfer")
    args = options.parse_args_and_arch(options.get_training_parser("fast_weight_language_modeling"), call)
    criterion = AttentionTransferCriterion(tasks.setup_task(args))
    waiting = SimpleNamespace(module=DistributedDataParallel.__new__(DistributedDataParallel))
    with pytest.raises(ValueError, match="with several processes ddp_backend must be legacy_ddp"):
        criterion(waiting, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--criterion", "attention_transfer", "--transfer", OWN], "transfer is .* it must be all, as without --trans"),
        (["--criterion", "attention_transfer", "--carry-over-state"], "carry_over_state is set; with criterion att"),
        (["--kv-heads", "3"], "kv_heads is 3; it must be a divisor of num_heads, 4"),
        (["--head-dim", "-2"], "head_dim is -2; it must be at least 0"),
        (["--rms-norm-eps=-1"], "rms_norm_eps is -1.0; it must be at least 0"),
        (
            ["--quant-noise-pq", "0.1", "--quant-noise-pq-block-size", "4"],
            "quant_noise_pq is 0.1; with swiglu it must be 0",
        ),
        (["--rms-norm-eps", "0.5"], "other option +rms_norm_eps +1e-06 +0.5"),
        (["--mixers", "softmax", "--rotary-scaling", "linear:2"], "other option +rotary_scaling +linear:2"),
        (["--mixers", "gated-delta", "--gated-delta-key-heads", "2"], "gated_delta_key_heads is 2; in place of"),
        (["--kv-heads", "1"], r"wrong shape +decoder.layers.0.self_attn.k_proj.weight +16 x 24 +8 x 24"),
        (["--projection-bias", "qkv"], r"missing +decoder.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_options_that_do_not_fit_are_named(converted, flags, message):
    call = words(converted["Llama"], converted["Llama"], *flags)
    with pytest.raises(ValueError, match=message):
        args = options.parse_args_and_arch(options.get_training_parser("fast_weight_language_modeling"), call)
        task = tasks.setup_task(args)
        task.build_model(args)
        task.build_criterion(args)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_a_converted_model_with_a_memory_is_exported_and_taken_back(tmp_path, capsys, kind):
    import_plugin()
    theirs, ours, run, out = (tmp_path / name for name in ("theirs", "ours", "run", "out"))
    settings = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}, "head_dim": 8}
    source = llamas.model(kind, **settings)
    assert main(["from-huggingface", str(llamas.save(theirs, source, pieces=kind == "Llama")), str(ours)]) == 0
    # The first layer as training leaves it, with the memory that took its attention's place.
    state = torch.load(ours / "model.pt", weights_only=False)
    state["cfg"]["model"] |= {"softmax_attention_layers": "", "mixers": "gated:1,softmax:2", "scale_read_out": True}
    heads = {f"decoder.layers.0.self_attn.gate_proj.{n}": torch.randn(s) for n, s in (("weight", (4, 24)), ("bias", 4))}
    state["model"] |= heads
    del state["model"]["decoder.settings_version"]
    run.mkdir()
    (run / "dict.txt").write_bytes((ours / "dict.txt").read_bytes())
    torch.save(state, run / "model.pt")
    expected, words, numbers = sources.load(run, source)
    state["model"]["decoder.settings_version"] = expected.decoder.settings_version
    torch.save(state, run / "checkpoint_best.pt")
    arguments = ["to-huggingface", str(ours), str(out), "--checkpoint", str(run / "checkpoint_best.pt")]
    assert main(arguments) == 0, capsys.readouterr().err

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    text = "the cat 12345 é"
    real = [int(numbers[i]) for i in llamas.tokenizer(kind == "Llama").encode(text).ids]
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == [words.eos(), *real]
    logits = model(tokens).logits
    assert logits.std() > 0.5 and (logits - expected(tokens)[0]).abs().max() <= 1e-5
    assert tokenizer.decode(real) == text

    assert main(["from-huggingface", str(out), str(tmp_path / "back")]) == 0
    assert f"--bpe tokenizer_json --tokenizer-json-folder {tmp_path / 'back'}" in capsys.readouterr().out
    back = torch.load(tmp_path / "back" / "model.pt", weights_only=False)["model"]
    assert all(torch.equal(back[name], values) for name, values in state["model"].items())

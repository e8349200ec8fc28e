"""A language model and its training in plain PyTorch, the peer of fairseq-train.

Both share the code of text, batches and their order, adaptive input and adaptive softmax, and the settings: sizes,
dropout, places of the norms, Adam's learning rate and betas, clipping, and precision (with bf16, weights in bfloat16
and Adam's copies in float32). Its own are the layers, compiled as one graph, torch's fused Adam, and the loop.
"""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import Tensor, nn
from torch.nn import functional as F

from harness.trainings import FLA, Training


class SoftmaxAttention(nn.Module):
    """Causal attention by torch's kernels, with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        # (batch, heads, time, head_dim), as the kernels take it
        read = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(-2))


class DeltaNet(nn.Module):
    """flash-linear-attention's layer of that name, with the feature map and normalisation of Schlag et al. (2021).

    Unlike the layer of Schlag et al., it applies SiLU to values and a norm to outputs.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        layers = importlib.import_module("fla.layers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one recommends its convolution
            self.layer = layers.DeltaNet(
                hidden_size=width, num_heads=heads, use_short_conv=False, qk_activation="elu", qk_norm="sum"
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Layer(nn.Module):
    """A mixer and a feed-forward network, each beside a residual connection."""

    def __init__(self, args: Any, mixer: nn.Module) -> None:
        super().__init__()
        width = args.decoder_embed_dim
        self.mixer, self.before = mixer, args.decoder_normalize_before
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(args.dropout)
        inner = args.decoder_ffn_embed_dim
        self.feed_forward = nn.Sequential(
            nn.Linear(width, inner),
            nn.ReLU(),
            nn.Dropout(args.activation_dropout or args.relu_dropout),
            nn.Linear(inner, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        # Pre-norm is x + f(norm(x)), post-norm norm(x + f(x)).
        for norm, block in zip(self.norms, (self.mixer, self.feed_forward), strict=True):
            # pre-norm or post-norm, as --decoder-normalize-before says
            x = x + self.dropout(block(norm(x))) if self.before else norm(x + self.dropout(block(x)))
        return x


class PlainModel(nn.Module):
    """Adaptive input, sinusoidal positions, layers, adaptive softmax; its output is the sum of the tokens' losses."""

    def __init__(self, args: Any, dictionary: Any, mixer: Callable[[], nn.Module]) -> None:
        super().__init__()
        clusters = [
            [int(end) for end in text.split(",")] for text in (args.adaptive_input_cutoff, args.adaptive_softmax_cutoff)
        ]
        width, self.pad = args.decoder_embed_dim, dictionary.pad()
        self.embeddings = AdaptiveInput(
            len(dictionary), self.pad, args.decoder_input_dim, args.adaptive_input_factor, width, clusters[0]
        )
        self.scale = 1.0 if args.no_scale_embedding else math.sqrt(width)
        self.register_buffer("positions", sinusoids(args.tokens_per_sample, width))
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(Layer(args, mixer()) for _ in range(args.decoder_layers))
        normalized = args.decoder_normalize_before and not args.no_decoder_final_norm
        self.norm = nn.LayerNorm(width) if normalized else nn.Identity()
        self.softmax = AdaptiveSoftmax(
            len(dictionary),
            args.decoder_output_dim,
            clusters[1],
            args.adaptive_softmax_dropout,
            factor=args.adaptive_softmax_factor,
            adaptive_inputs=self.embeddings if args.tie_adaptive_weights else None,
            tie_proj=args.tie_adaptive_proj,
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.scale * self.embeddings(tokens) + self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        # One pair for the head and one for each cluster of rarer entries; without targets a cluster has no loss.
        pairs = zip(*self.softmax(self.norm(x), targets.view(-1)), strict=True)
        losses = [
            F.cross_entropy(logits, ids, ignore_index=self.pad, reduction="sum")
            for logits, ids in pairs
            if ids is not None
        ]
        return torch.stack(losses).sum()


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width), the encodings of positions of Vaswani et al. (2017)."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Optimizer:
    """Fused Adam; for weights in 16 bits it keeps copies in float32, as fairseq's --bf16."""

    def __init__(self, model: nn.Module, lr: float, clip_norm: float) -> None:
        self.weights = list(model.parameters())
        half = self.weights[0].dtype != torch.float32
        self.copies = [nn.Parameter(p.detach().float()) for p in self.weights] if half else self.weights
        self.adam = torch.optim.Adam(self.copies, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.clip_norm = clip_norm

    def step(self, tokens: int) -> None:
        """An update after the backward pass of the sum of so many tokens' losses; unused weights have no gradient."""
        # Gradients in float32, over the number of tokens and clipped; then the step, and weights in 16 bits again.
        pairs = [(p, copy) for p, copy in zip(self.weights, self.copies, strict=True) if p.grad is not None]
        if self.copies is not self.weights:
            for _, copy in pairs:
                copy.grad = torch.empty_like(copy)
            torch._foreach_copy_([copy.grad for _, copy in pairs], [p.grad for p, _ in pairs])
        torch._foreach_mul_([copy.grad for _, copy in pairs], 1 / tokens)
        nn.utils.clip_grad_norm_([copy for _, copy in pairs], self.clip_norm, foreach=True)
        self.adam.step()
        if self.copies is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in pairs], [copy for _, copy in pairs])
        for p in (*self.weights, *self.copies):
            p.grad = None


def train(training: Training, arguments: list[str], update: Callable[[Callable[[], Any], int], None]) -> None:
    """Trains as `fairseq-train` would with these arguments, until `update` ends it by an exception.

    `update` gets, for each update, a function that makes it and the number of tokens that it predicts.
    """
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[training.precision]
    shape = args.decoder_embed_dim, args.decoder_attention_heads
    mixer = (
        (lambda: DeltaNet(*shape))
        if training.implementation == FLA
        else lambda: SoftmaxAttention(*shape, args.attention_dropout)
    )
    model = PlainModel(args, task.source_dictionary, mixer).to(training.device, dtype)
    for layer in model.layers:
        layer.compile()
    optimizer = Optimizer(model, args.lr[0], args.clip_norm)
    for batch in batches(task, cfg):

        def step(batch: Any = batch) -> None:
            on_device = utils.move_to_cuda(batch) if training.device == "cuda" else batch
            model(on_device["net_input"]["src_tokens"], on_device["target"]).backward()
            optimizer.step(batch["ntokens"])

        update(step, batch["ntokens"])


def batches(task: Any, cfg: Any) -> Iterator[Any]:
    """The batches of fairseq-train, epoch after epoch."""
    data = cfg.dataset
    each = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=data.max_tokens,
        max_sentences=data.batch_size,
        required_batch_size_multiple=data.required_batch_size_multiple,
        seed=cfg.common.seed,
    )
    while True:
        yield from each.next_epoch_itr(shuffle=True)

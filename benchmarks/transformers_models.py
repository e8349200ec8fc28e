"""Hugging Face's models on a CPU before and after `integrations.transformers.install`: a prompt, and a token after it.

Random models of the real classes, Qwen3-Next and Kimi-Linear of about 100 million parameters. Both ways take turns, and
their logits are compared first. Needs transformers:

    .venv/bin/python benchmarks/transformers_models.py --threads 2 [--rounds 5] [--out results.json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import records
from harness.memory import keep_freed_memory
from harness.program import make_parser, parse
from harness.turns import compare
from transformers import KimiLinearConfig, KimiLinearForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from fairseq_fastweights.integrations import transformers as fast

PEER = "transformers"
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
    "num_attention_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
QUICK = SIZES | {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
QUICK |= {"layer_types": SIZES["layer_types"][:4]}


def qwen3_next(**sizes: Any) -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=352,
            shared_expert_intermediate_size=352,
        )
    )


def kimi_linear(**sizes: Any) -> Any:
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            **sizes,
            num_key_value_heads=8,
            linear_num_heads=8,
            linear_head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=352,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
        )
    )


MODELS: dict[str, Callable[..., Any]] = {"Qwen3-Next": qwen3_next, "Kimi-Linear": kimi_linear}


def calls_of(model: Any, prompt: int) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """A prompt, and a token after a prompt, both ways."""
    text = torch.randint(2, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(1))
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    with fast.install(model):
        installed = {name: x for name, x in vars(module).items() if before[name] is not x}
    prefill, token, logits = {}, {}, []
    for name, functions in (("installed", installed), (PEER, {name: before[name] for name in installed})):
        vars(module).update(functions)
        with torch.no_grad():
            first = model(text, use_cache=True)
        logits.append(first.logits)
        # To put functions in their places takes microseconds; all that `install` does, milliseconds.
        prefill[name] = partial(_with, module, functions, lambda: model(text).logits)
        token[name] = partial(_with, module, functions, partial(_next, model, text[:, :1], first.past_key_values))
    error = float((logits[0] - logits[1]).abs().max())
    if not error <= 1e-3:
        raise RuntimeError(f"logits differ by {error:g}: what is measured is not the same")
    return prefill, token


def _with(module: Any, functions: dict[str, Any], call: Callable[[], Any]) -> Any:
    vars(module).update(functions)
    return call()


def _next(model: Any, token: torch.Tensor, cache: Any) -> torch.Tensor:
    """The logits after one more token, which joins the cache: it grows alike in both."""
    return model(token, past_key_values=cache).logits


def main() -> None:
    parser = make_parser(__doc__, "--threads", "--rounds", "--out", "--quick", rounds=5)
    parser.set_defaults(device="cpu")
    options = parse(parser)
    keep_freed_memory()
    rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make(**(QUICK if options.quick else SIZES)).eval()
        time = 20 if options.quick else 2048
        prefill, token = calls_of(model, time)
        rows += compare(name, "prefill", time, prefill, options.rounds)
        rows += compare(name, "token", 1, token, options.rounds)
        rows[-1]["parameters"] = sum(p.numel() for p in model.parameters())
    if options.out is not None:
        records.write(records.describe_run("models", "cpu", rows=rows), options.out)


if __name__ == "__main__":
    main()

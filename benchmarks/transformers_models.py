"""Hugging Face's models before and after `integrations.transformers.install`, on a CPU: a prompt, and a token after it.

    python benchmarks/transformers_models.py [--threads 2] [--rounds 5] [--out FILE]

Random models of the real classes: Qwen3-Next and Kimi-Linear of about 100 million parameters. Both ways take turns in
one process, and logits are compared first. Ratios are what is to be read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from fairseq_fastweights.integrations import transformers as fast

SIZES = {
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


def qwen3_next() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
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


def kimi_linear() -> Any:
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            **SIZES,
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


MODELS: dict[str, Callable[[], Any]] = {"Qwen3-Next": qwen3_next, "Kimi-Linear": kimi_linear}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.no_grad()
def measure(model: Any, prompt: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows with the medians of both ways, after one round that does not count."""
    text = torch.randint(2, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(1))
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "transformers": nullcontext,
        "installed": fast.install,
    }
    logits = []
    for way in ways.values():
        with way():
            logits.append(model(text).logits)
    error = float((logits[0] - logits[1]).abs().max())
    if not error <= 1e-3:
        raise RuntimeError(f"logits differ by {error:g}: what is measured is not the same")
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            with way():
                cache = model(text[:, :64], use_cache=True).past_key_values
                steps = [seconds(lambda cache=cache: model(text[:, :1], past_key_values=cache)) for _ in range(tokens)]
                times = {"prefill": seconds(lambda: model(text)), "token": statistics.median(steps)}
            for part, spent in times.items() if number else ():
                taken.setdefault((part, name), []).append(spent)
    rows = []
    for part in ("prefill", "token"):
        before, after = (statistics.median(taken[part, name]) for name in ways)
        rows.append({"part": part, "before": before, "after": after, "ratio": before / after, "logits": error})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times Hugging Face's models before and after install().")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=20, help="tokens after it")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    results: list[dict[str, Any]] = []
    for name in options.models:
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        size = sum(p.numel() for p in model.parameters())
        for row in measure(model, options.prompt, options.tokens, options.rounds):
            results.append({"model": name, "parameters": size, **row})
            print(
                f"{name} ({size / 1e6:.0f}M), {row['part']}: {row['before'] * 1e3:.1f} ms before, "
                f"{row['after'] * 1e3:.1f} ms after, {row['ratio']:.2f} times as fast; "
                f"logits within {row['logits']:.1e}"
            )
    if options.out is not None:
        options.out.write_text(json.dumps({"threads": options.threads, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

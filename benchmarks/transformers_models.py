"""Hugging Face's models on a CPU before and after `integrations.transformers.install`: a prompt, and a token after it.

Random models of the real classes, Qwen3-Next and Kimi-Linear of about 100 million parameters. Both ways take turns, and
their logits are compared first. Needs transformers:

    .venv/bin/python benchmarks/transformers_models.py --threads 2 [--rounds 5] [--out results.json]
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from harness.turns import Calls, Comparison, run

from fairseq_fastweights.integrations import transformers as fast

FOUR_LAYERS = [*["linear_attention"] * 3, "full_attention"]
SIZES: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
SIZES["layer_types"] = FOUR_LAYERS * 3
QUICK_SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
QUICK_SIZES["layer_types"] = FOUR_LAYERS
BOTH = {"num_attention_heads": 8, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
BOTH |= {"num_experts_per_tok": 2, "moe_intermediate_size": 352}
# By model its class and what its configuration has beside the sizes and `BOTH`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": (
        "Qwen3Next",
        {
            **{"num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
            **{"num_experts": 4, "shared_expert_intermediate_size": 352},
        },
    ),
    "Kimi-Linear": (
        "KimiLinear",
        {
            **{"num_key_value_heads": 8, "linear_num_heads": 8, "linear_head_dim": 64, "num_local_experts": 4},
            **{"kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
            "v_head_dim": 64,
        },
    ),
}


def calls_of(model: Any, prompt: int) -> tuple[Calls, Calls]:
    """A prompt, and a token after a prompt, both ways."""
    text = torch.randint(2, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(1))
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    with fast.install(model):
        installed = {name: x for name, x in vars(module).items() if before[name] is not x}
    prefill, token, logits = {}, {}, []
    for name, functions in (("installed", installed), ("transformers", {name: before[name] for name in installed})):
        vars(module).update(functions)
        with torch.no_grad():
            first = model(text, use_cache=True)
        logits.append(first.logits)
        # To put functions in their places takes microseconds; all that `install` does, milliseconds.
        prefill[name] = partial(_with, module, functions, model, text)
        # One more token, which joins the cache: it grows alike in both.
        token[name] = partial(_with, module, functions, model, text[:, :1], past_key_values=first.past_key_values)
    error = float((logits[0] - logits[1]).abs().max())
    if not error <= 1e-3:
        raise RuntimeError(f"logits differ by {error:g}: what is measured is not the same")
    return prefill, token


def _with(module: Any, functions: dict[str, Any], model: Any, text: torch.Tensor, **options: Any) -> Any:
    vars(module).update(functions)
    return model(text, **options).logits


def comparisons(sizes: dict[str, Any]) -> Iterator[Comparison]:
    for name, (kind, settings) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes, **BOTH, **settings)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        time = 20 if sizes is QUICK_SIZES else 2048
        prefill, token = calls_of(model, time)
        yield name, "prefill", time, prefill
        yield name, "token", 1, token


def main() -> None:
    run(__doc__, "models", comparisons, SIZES, QUICK_SIZES)


if __name__ == "__main__":
    main()

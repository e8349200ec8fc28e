"""How the paper's translation models are trained and scored (Schlag et al. 2021, Sec. 6.2 and App. E)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from papers.rows import BEST, ROOT, Call, Places, RowError, positive, require, shown, training

GENERATE = ROOT / "examples" / "wmt14" / "generate.sh"
ACCUMULATED = 3 * 16
"""GPUs and batches added up: those of the paper."""
BATCH = ACCUMULATED * 3584
OPTIONS = """
    --max-tokens-valid 3584
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 0 --dropout 0.3
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 --max-epoch 45
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6, "max_len_a": 1, "max_len_b": 50}'
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric
"""


class Translation:
    """A recipe of `fairseq-train` and generate.sh."""

    sources = False

    def training(self, row: str, places: Places, options: list[str], env: Mapping[str, str]) -> Call:
        gpus = positive(env, "GPUS")
        if not env.get("UPDATE_FREQ") and ACCUMULATED % gpus:
            raise RowError(f"GPUS is {gpus}; it must divide {ACCUMULATED}, or UPDATE_FREQ must be given too")
        update_freq = positive(env, "UPDATE_FREQ", ACCUMULATED // gpus)
        if BATCH % (gpus * update_freq):
            raise RowError(f"GPUS x UPDATE_FREQ is {gpus * update_freq}; it must divide the batch of {BATCH} tokens")
        tokens = BATCH // gpus // update_freq
        shared = f"--max-tokens {tokens} {OPTIONS} {_detokenization(places.data)}"
        return training(places, "translation", f"{row} {shared}", options, gpus, update_freq)

    def evaluations(self, places: Places, options: list[str], env: Mapping[str, str]) -> list[Call]:
        return [Call(["bash", shown(GENERATE), str(places.data), str(places.out), *options])]

    def check(self, verb: str, places: Places, env: Mapping[str, str]) -> None:
        require("DATA", places.data, "preparation.json")
        if verb == "evaluate" and not (places.out / BEST).exists():
            raise RowError(f"OUT is {places.out}, which holds no {BEST}")

    def finish(self, places: Places) -> None:
        pass


def _detokenization(data: Path) -> str:
    """Validation BLEU is of text without subwords and tokens, as generate.sh has it."""
    if not (data / "subwords.codes").exists():
        return "--eval-bleu-remove-bpe sentencepiece"
    target = json.loads((data / "preparation.json").read_text(encoding="utf-8"))["made from"]["target"]
    languages = shlex.quote(json.dumps({"source_lang": target, "target_lang": target}))
    return f"--eval-bleu-remove-bpe --eval-bleu-detok moses --eval-bleu-detok-args {languages}"


TRANSLATION = Translation()

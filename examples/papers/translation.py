"""How the paper's translation models are trained and scored (Schlag et al. 2021, Sec. 6.2 and App. E)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.commands import ROOT, shown
from common.files import UserError
from common.identity import split_files

from papers.rows import BEST, Places, Scoring, positive, require, training

_SUBSETS = ("valid", "test")
GENERATE = ROOT / "examples" / "wmt14" / "generate.sh"


@dataclass(frozen=True)
class Translation:
    """A recipe of `fairseq-train` and generate.sh."""

    options: str  # of fairseq-train, for all rows
    tokens: int  # target subwords of a batch, at most
    accumulated: int = 1  # GPUs and batches added up for an update
    generate: str = ""  # options of generate.sh
    sources = False

    def training(self, row: str, places: Places, options: list[str], env: Mapping[str, str]) -> list[str]:
        gpus = positive(env, "GPUS")
        if not env.get("UPDATE_FREQ") and self.accumulated % gpus:
            raise UserError(f"GPUS is {gpus}; it must divide {self.accumulated}, or UPDATE_FREQ must be given too")
        update_freq = positive(env, "UPDATE_FREQ", self.accumulated // gpus)
        # The paper's batch, whatever it is divided among.
        batch = self.accumulated * self.tokens
        if batch % (gpus * update_freq):
            raise UserError(f"GPUS x UPDATE_FREQ is {gpus * update_freq}; it must divide the batch of {batch} tokens")
        shared = f"--max-tokens {batch // gpus // update_freq} {self.options}"
        if "--eval-bleu" in self.options:
            shared += f" {_detokenization(places.data)}"
        return training(places, "translation", f"{row} {shared}", options, gpus, update_freq)

    def evaluations(self, places: Places, options: list[str], env: Mapping[str, str]) -> list[Scoring]:
        words = ["bash", shown(GENERATE), str(places.data), str(places.out), *self.generate.split(), *options]
        subsets = env.get("SUBSETS", "")
        folder = f"evaluation-{subsets.replace(' ', '-')}" if subsets else "evaluation"
        reads = [path for subset in _SUBSETS for path in split_files(places.data, subset)]
        return [Scoring(words, f"{subsets} BLEU".strip(), folder, places.out / BEST, reads)]

    def scores(self, title: str, places: Places, log: str) -> dict[str, float]:
        found = {subset: places.out / f"generate-{subset}.json" for subset in title.split()[:-1] or _SUBSETS}
        return {f"{name} BLEU": json.loads(path.read_text(encoding="utf-8"))["bleu"] for name, path in found.items()}

    def check(self, verb: str, places: Places, env: Mapping[str, str]) -> None:
        require("DATA", places.data, "preparation.json")
        if verb == "evaluate" and not (places.out / BEST).exists():
            raise UserError(f"OUT is {places.out}, which holds no {BEST}")

    def finish(self, places: Places) -> None:
        pass


def _detokenization(data: Path) -> str:
    """Validation BLEU is of text without subwords and tokens, as generate.sh has it."""
    if not (data / "subwords.codes").exists():
        return "--eval-bleu-remove-bpe sentencepiece"
    target = json.loads((data / "preparation.json").read_text(encoding="utf-8"))["made from"]["target"]
    languages = shlex.quote(json.dumps({"source_lang": target, "target_lang": target}))
    return f"--eval-bleu-remove-bpe --eval-bleu-detok moses --eval-bleu-detok-args {languages}"


# GPUs and accumulated batches as in the paper.
TRANSLATION = Translation(
    """
    --max-tokens-valid 3584
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 0 --dropout 0.3
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 --max-epoch 45
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6, "max_len_a": 1, "max_len_b": 50}'
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric
    """,
    tokens=3584,
    accumulated=3 * 16,
)

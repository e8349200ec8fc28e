"""How the papers' language models are trained and scored."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.commands import ROOT, program, shown
from common.fairseq_logs import find_in
from common.files import UserError, write_whole
from common.identity import split_files

from papers.rows import BEST, Places, Scoring, plugin, positive, require, training

TASK = "fast_weight_language_modeling"
STATE_SIZE = ROOT / "examples" / "wikitext103" / "state_size.py"
STATE = "state"
"""The name of its number among the scores."""


@dataclass(frozen=True)
class LanguageModel:
    """A recipe of `fairseq-train` and `fairseq-eval-lm`.

    Its modes of evaluation are: sliding, a window of `length` tokens that moves on by one token, the only one that is
    scored; carried, segments, each starting with the state that the one before left; context-N, windows, of which the
    first N tokens are only read, but for the text's first window; memory-M-N, segments of N, with a Transformer-XL's
    memory of M positions, in which longer distances than `length` count as `length`.
    """

    options: str  # of fairseq-train, for all rows
    batch: int  # segments of an update; they are divided among GPUs and accumulated batches
    length: int  # tokens of a segment
    modes: tuple[str, ...]
    in_order: bool = False  # whether the segments are of as many streams, in the order of the text
    splits: str = "valid test"  # those that are scored
    checkpoint: str = BEST  # which of OUT is scored
    precisions: dict[str, str] = field(default_factory=dict)  # options by precision; the first is the default
    sources: bool = False  # whether a training starts from a model
    same_dictionary: bool = False  # whether the data must be cut into the source's subwords
    becomes_source: bool = False  # whether other models can start from a trained one
    counts_state: bool = False  # whether the size of a trained model's state is counted, too
    evaluate: str = ""  # options of fairseq-eval-lm

    def training(self, row: str, places: Places, options: list[str], env: Mapping[str, str]) -> list[str]:
        gpus, update_freq = positive(env, "GPUS"), positive(env, "UPDATE_FREQ")
        if self.batch % (gpus * update_freq):
            raise UserError(f"GPUS x UPDATE_FREQ is {gpus * update_freq}; it must divide the batch of {self.batch}")
        if self.modes[0].startswith(("carried", "memory")) and update_freq != 1:
            raise UserError(
                f"UPDATE_FREQ is {update_freq}; with state carried over it must be 1, because each of the "
                f"{self.batch} streams has a row of the batch to itself"
            )
        # Without --required-batch-size-multiple fairseq cuts a batch that is no multiple of 8, as 28 to 24.
        batch = f"--batch-size {self.batch // gpus // update_freq} --required-batch-size-multiple 1"
        batch += f" --text-streams {self.batch}" if self.in_order else ""
        shared = f"{self._precision(env)} --tokens-per-sample {self.length} {batch} {self.options}"
        return training(places, TASK, f"{row} {shared}", options, gpus, update_freq)

    def _precision(self, env: Mapping[str, str]) -> str:
        if not self.precisions:
            return ""
        chosen = env.get("PRECISION") or next(iter(self.precisions))
        if chosen not in self.precisions:
            *others, last = self.precisions
            raise UserError(f"PRECISION is {chosen}; it must be {', '.join(others)} or {last}")
        return self.precisions[chosen]

    def evaluations(self, places: Places, options: list[str], env: Mapping[str, str]) -> list[Scoring]:
        checkpoint = self._scored(places, env)
        modes = [env["MODE"]] if env.get("MODE") else self.modes
        calls = []
        # A program for each way and split, in the order of the paper's columns.
        for mode in modes:
            for split in (env.get("SPLITS") or self.splits).split():
                words = [program("fairseq-eval-lm"), str(places.data), "--path", str(checkpoint), "--gen-subset", split]
                words += ["--user-dir", shown(plugin()), "--task", TASK]
                # One process: with several, fairseq reports the perplexity of each one's share.
                words += [*self._mode(mode), *"--distributed-world-size 1 --no-progress-bar".split()]
                words += [*self.evaluate.split(), *options]
                name = f"{mode}-{split}" + ("" if checkpoint.name == BEST else f".{checkpoint.stem}")
                reads = split_files(places.data, split)
                calls.append(Scoring(words, f"{split}, {mode}", name, checkpoint, reads))
        if self.counts_state and not env.get("MODE"):
            words = [shown(STATE_SIZE), str(places.data), str(checkpoint)]
            reads = split_files(places.data, "test")
            calls.append(Scoring(words, STATE, "state", checkpoint, reads))
        return calls

    def scores(self, title: str, places: Places, log: str) -> dict[str, float]:
        """Perplexity, and if prepare.sh cut words into subwords that of a word, too: the text is equally probable. Of
        `STATE` the size of the state.
        """
        if title == STATE:
            return {STATE: float(find_in(log, "state", r"State: ([\d,]+)")[-1].replace(",", ""))}
        found = find_in(log, "perplexity", r"Loss \(base 2\): ([\d.]+|inf|nan), Perplexity: ([\d.]+|inf|nan)")[-1]
        scores = {title: float(found[1])}
        counted = places.data / "words.json"
        if counted.exists():
            counts = json.loads(counted.read_text(encoding="utf-8"))[title.split(",")[0]]
            # The loss of a text in bits, over its words in place of its subwords.
            scores[f"{title}, per word"] = 2 ** (float(found[0]) * counts["subwords"] / counts["words"])
        return scores

    def _mode(self, mode: str) -> list[str]:
        name, *texts = mode.split("-")
        numbers = [int(text) for text in texts if text.isascii() and text.isdecimal()]
        words = ["--tokens-per-sample", str(self.length)]
        if mode == "sliding":
            return [*words, "--context-window", str(self.length - 1)]
        if mode == "carried":
            return [*words, "--carry-over-state"]
        if name == "context" and len(numbers) == len(texts) == 1 and numbers[0] < self.length:
            return [*words, "--context-window", str(numbers[0])]
        if name == "memory" and len(numbers) == len(texts) == 2 and numbers[1] > 0:
            overrides = f"{{'transformer_xl_memory': {numbers[0]}, 'transformer_xl_clamp_len': {self.length}}}"
            return ["--tokens-per-sample", texts[1], "--carry-over-state", "--model-overrides", overrides]
        raise UserError(
            f"MODE is {mode}; it must be sliding, carried, context-N, N a number below the length, {self.length}, or "
            "memory-M-N"
        )

    def _scored(self, places: Places, env: Mapping[str, str]) -> Path:
        name = env.get("CHECKPOINT") or self.checkpoint
        if Path(name).name != name:
            raise UserError(f"CHECKPOINT is {name}; it must be the name of a file in OUT")
        return places.out / name

    def check(self, verb: str, places: Places, env: Mapping[str, str]) -> None:
        require("DATA", places.data, "dict.txt")
        if verb == "evaluate":
            checkpoint = self._scored(places, env)
            if not checkpoint.exists():
                raise UserError(f"OUT is {places.out}, which holds no {checkpoint.name}")
        elif places.checkpoint is not None:
            self._check_source(places, places.checkpoint)

    def _check_source(self, places: Places, checkpoint: Path) -> None:
        if not checkpoint.exists():
            raise UserError(f"SOURCE is {places.source}; it must be a folder with model.pt or {BEST}, or a checkpoint")
        dictionary = checkpoint.with_name("dict.txt")
        if not dictionary.exists():
            raise UserError(
                f"SOURCE is {places.source}, but there is no dict.txt beside {checkpoint}: its training is not "
                "finished, or the dictionary was left behind"
            )
        if self.same_dictionary and not filecmp.cmp(dictionary, places.data / "dict.txt", shallow=False):
            raise UserError(
                f"DATA is {places.data}, whose dict.txt is not that of SOURCE, {places.source}; prepare.sh takes SOURCE"
            )

    def finish(self, places: Places) -> None:
        # A model can be SOURCE once its dictionary is beside it.
        if self.becomes_source:
            write_whole(places.out / "dict.txt", (places.data / "dict.txt").read_bytes())


# adaptive_loss leaves the weights of bands that a batch does not touch without a gradient: only legacy_ddp takes that.
_ADAPTIVE = "--criterion adaptive_loss --ddp-backend legacy_ddp --optimizer adam"
# The input and the softmax as the authors' program has them, which grew out of Transformer-XL's.
_WIKITEXT103 = (
    f"{_ADAPTIVE} --clip-norm 0.25 --square-projections none --adaptive-softmax-bias --adaptive-softmax-dropout 0.1"
    " --lr 0.00025 --lr-scheduler cosine"
)

# Schlag et al. 2021, Sec. 6.3 and App. F.
SMALL = LanguageModel(
    f"--arch fast_weight_lm_wiki103_small {_WIKITEXT103} --warmup-updates 2000 --max-update 500000",
    batch=96,
    length=256,
    modes=("sliding",),
    in_order=True,
)
_MEDIUM = f"--arch fast_weight_lm_wiki103_medium {_WIKITEXT103}"
MEDIUM = LanguageModel(
    f"{_MEDIUM} --warmup-updates 2000 --max-update 400000", batch=56, length=384, modes=("sliding",), in_order=True
)
# State that is carried over is validated as it is evaluated: as one stream.
_CARRIED = "--carry-over-state --batch-size-valid 1"
MEDIUM_CARRIED = LanguageModel(
    f"{MEDIUM.options} {_CARRIED}", batch=MEDIUM.batch, length=MEDIUM.length, modes=("carried",)
)


def transformer_xl(memory: int, target: int) -> LanguageModel:
    """App. F: a Transformer-XL, trained with memory and segments of 384, scored with others; the schedule is that of
    the authors' script."""
    options = f"{_MEDIUM} --warmup-updates 1000 --max-update 200000 {_CARRIED}"
    return replace(MEDIUM_CARRIED, options=options, modes=(f"memory-{memory}-{target}",))


# Mao 2022, Sec. 5 and App. B: the checkpoint of Baevski and Auli on WikiText-103. "At the end of the training", says
# the paper of the scored checkpoint, and not at its best.
BAEVSKI = LanguageModel(
    f"--transfer-from SOURCE --arch fast_weight_lm_baevski_wiki103 {_ADAPTIVE} --clip-norm 0.1",
    batch=26,
    length=512,
    modes=("context-0", "context-480"),
    checkpoint="checkpoint_last.pt",
    sources=True,
)

# Peng et al. 2022, whose numbers Mao's Table 3 has: trained from scratch, as fairseq trains Baevski and Auli's model.
BAEVSKI_SCRATCH = LanguageModel(
    "--arch fast_weight_lm_baevski_wiki103 --criterion adaptive_loss --ddp-backend legacy_ddp --optimizer nag"
    " --clip-norm 0.1 --lr 1.0 --lr-scheduler cosine --t-mult 2 --lr-period-updates 270000 --lr-shrink 0.75"
    " --min-lr 0.0001 --stop-min-lr 1e-09 --warmup-updates 16000 --warmup-init-lr 1e-07 --max-update 286000",
    batch=144,  # 73,728 tokens
    length=512,
    modes=BAEVSKI.modes,
)

# Epochs' ends are no occasion to validate or save: how often they come depends on the size of the text.
_SAVED = "--validate-interval 1000000 --save-interval 1000000 --keep-interval-updates 1"

# Mao 2022, Sec. 4 and App. A. In float16 the plugin computes the normalisers of attention normalisation in float32, as
# the paper does.
GPT2 = LanguageModel(
    "--transfer-from SOURCE --arch fast_weight_lm_gpt2_small --optimizer adam --clip-norm 1.0"
    " --lr 0.0006 --lr-scheduler cosine --min-lr 1.2e-05 --warmup-updates 4000 --max-update 100000"
    f" {_SAVED} --validate-interval-updates 4000 --save-interval-updates 4000",
    batch=32,
    length=1024,
    modes=("context-0",),
    splits="valid",
    precisions={"fp16": "--fp16", "bf16": "--bf16", "fp32": ""},
    sources=True,
    becomes_source=True,
)

# Choi 2024, Sec. 4. The learning rate is Pythia's of 143,000 updates, "stopped early": the scheduler counts its period
# after the warm-up.
_XATL = (
    "--optimizer adam --adam-betas '(0.9, 0.95)' --weight-decay 0.1 --clip-norm 1.0"
    " --lr 0.0003 --lr-scheduler cosine --min-lr 3e-05 --warmup-updates 2000 --warmup-init-lr 0"
    f" --lr-period-updates 141000 {_SAVED} --validate-interval-updates 1000 --save-interval-updates 1000"
)


def _xatl(updates: int) -> LanguageModel:
    return LanguageModel(
        f"{_XATL} --max-update {updates}",
        batch=1024,
        length=2048,
        modes=("context-0",),
        splits="valid",
        # Gradients in one vector would move weights that are frozen for a time.
        precisions={"bf16": "--bf16", "fp16": "--fp16 --fp16-no-flatten-grads", "fp32": ""},
        sources=True,
        same_dictionary=True,
    )


XATL_400M, XATL_1B = _xatl(75_000), _xatl(50_000)

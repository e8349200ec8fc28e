"""A text that fairseq's generator makes in a batch is the one that it makes alone, with every option."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.search import LexicallyConstrainedBeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.token_generation_constraints import pack_constraints

from fairseq_fastweights.command_line import told
from tests.models.translation import EOS, PAD, batch, build, sentences, shifted

pytestmark = pytest.mark.usefixtures("our_fairseq")
# Float64 models, whose log-probabilities fairseq rounds to float32.
ROUNDING = 1e-4
OPTIONS: list[dict[str, Any]] = [
    {},
    *({"beam": n} for n in (1, 5, 60)),
    *({"max_len_a": a, "max_len_b": b} for a, b in ((0.5, 8), (1.5, 1))),
    {"min_len": 9},
    {"min_len": 8, "max_len_b": 8, "no_repeat_ngram_size": 1},
    *(
        {"match_source_len": True, **others}
        for others in ({"beam": 27}, {"prefix_size": 5}, {"no_repeat_ngram_size": 1})
    ),
    {"unnormalized": True},
    *({"lenpen": x} for x in (0.0, 3.0)),
    *({"unkpen": x} for x in (3.0, -3.0, math.inf)),
    *({"prefix_size": n, **others} for n in (2, 9) for others in ({}, {"beam": 1, "min_len": 4})),
    *({"no_repeat_ngram_size": n} for n in (1, 2, 3)),
    {"sampling": True, "sampling_topk": 1, "beam": 2, "temperature": 0.01},
    {"sampling": True, "sampling_topp": 1e-6, "beam": 2},
    *({"temperature": x} for x in (0.01, 3.0)),
    *({"diverse_beam_groups": n, "diverse_beam_strength": 1.0, "beam": 4} for n in (2, 4)),
    *({"diversity_rate": 0.5, **others} for others in ({}, {"beam": 30}, {"no_repeat_ngram_size": 2})),
    {"lm_weight": 0.7},
    {"score_reference": True},
]
OF_SOURCES: list[dict[str, Any]] = [
    *({"constraints": kind, **others} for kind in ("ordered", "unordered") for others in ({}, {"beam": 1})),
    *({"constraints": "unordered", "max_len_b": 6, "prefix_size": n} for n in (0, 2)),
    {"constraints": "ordered", "prefix_size": 2, "beam": 1},
    *({"print_alignment": kind} for kind in ("hard", "soft")),
    {"print_alignment": "hard", "prefix_size": 9},
    {"print_alignment": "hard", "score_reference": True},
]
ELSEWHERE = {
    "no_early_stop no_beamable_mm": "fairseq does nothing with them",
    "nbest sacrebleu replace_unk lm_path print_step no_seed_provided eos_token": "the commands read them, afterwards",
    "decoding_format retain_iter_history iter_decode_eos_penalty iter_decode_max_iter iter_decode_with_beam "
    "iter_decode_force_max_iter iter_decode_with_external_reranker": "another generator's",
    "retain_dropout retain_dropout_modules": "no two texts are alike",
}


def test_every_option_of_generation_is_tried() -> None:
    tried = {name for options in OPTIONS + OF_SOURCES for name in options}
    assert tried.isdisjoint(elsewhere := " ".join(ELSEWHERE).split())
    assert tried | set(elsewhere) | {"_name"} == {field.name for field in fields(GenerationConfig)} | {"_name"}


def settings(**options: Any) -> Namespace:
    return Namespace(
        **{**{field.name: field.default for field in fields(GenerationConfig)}, "max_len_b": 12, "beam": 3, **options}
    )


def decided(model: Any) -> Any:
    """The model with larger weights, to which not all tokens are nearly the same, and in float64."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(6 if "embed" in name or "output" in name else 1.5)
    return model.double()


def assert_as_alone(make: Callable[[list[int]], Any], rows: int) -> list[list[dict[str, Any]]]:
    """Texts, scores and alignments that `make` gives rows together are those that it gives each alone."""
    together = make(list(range(rows)))
    for row, found in enumerate(together):
        alone = make([row])[0]
        assert [x["tokens"].tolist() for x in found] == [x["tokens"].tolist() for x in alone], row
        assert found, f"row {row} has no text"
        for one, other in zip(found, alone, strict=True):
            for name in ("score", "positional_scores"):
                ours, theirs = torch.as_tensor(one[name]), torch.as_tensor(other[name])
                assert theirs.isfinite().all()
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=ROUNDING)
            assert str(one["alignment"]) == str(other["alignment"])
    return together


# The second is no beginning of a text, and ends with a line; the fourth has two lines, the last is none.
PROMPTS = [[7], [5, 9, 11, 4, 8, 6, EOS], [4, 4, 5, 4], [12, 9, EOS, 13, 20], []]
LANGUAGE_MODELS = [("--mixers gated-delta --no-token-positional-embeddings", options) for options in OPTIONS]
LANGUAGE_MODELS += [
    (f"--mixers {mixer}", options)
    for mixer in ("delta", "softmax", "window-sum", "mamba", "local", "retention,softmax:2")
    for options in ({"no_repeat_ngram_size": 2}, {"min_len": 9, "beam": 1})
]


@pytest.mark.parametrize(("flags", "options"), [x for x in LANGUAGE_MODELS if "match_source_len" not in x[1]], ids=str)
def test_a_language_model_goes_on_from_a_prompt_as_from_it_alone(fairseq, flags, options):
    model, task, beginning = decided(fairseq.build(flags)), fairseq.task(), torch.tensor([EOS])
    extra = {"lm_model": decided(fairseq.build(seed=5)), "lm_weight": 0.7} if "lm_weight" in options else {}

    def make(rows: list[int]) -> Any:
        generator = task.build_generator([model], settings(**options), extra_gen_cls_kwargs=dict(extra))
        texts = [torch.tensor(PROMPTS[row], dtype=torch.long) for row in rows]
        scored = "score_reference" in options
        begun = [
            x if row == 1 and not scored else torch.cat([beginning, x]) for row, x in zip(rows, texts, strict=True)
        ]
        source, target = (collate_tokens(x, PAD) for x in (begun, [torch.cat([x, beginning]) for x in texts]))
        sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}, "target": target}
        prefix = target[:, : options["prefix_size"]] if "prefix_size" in options else None
        return task.inference_step(generator, [model], sample, prefix_tokens=prefix)

    for prompt, found in zip(PROMPTS, assert_as_alone(make, len(PROMPTS)), strict=True):
        kept = [*prompt, EOS][: options.get("prefix_size", len(prompt))]
        for text in (hypothesis["tokens"].tolist() for hypothesis in found):
            assert text[: len(kept)] == kept and text[-1] == EOS
            assert "score_reference" in options or len(text) > options.get("min_len", 1)


SOURCES, TARGETS = sentences((5, 9, 1, 7, 3)), sentences((3, 8, 1, 5, 6), seed=4)
CONSTRAINTS = [[[7, 8], [9]], [[5]], [], [[6, 7, 8]], [[10], [11], [12, 13]]]


class Bigrams(torch.nn.Module):
    """A language model to fuse with."""

    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.scores = torch.nn.Embedding(words, words)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.scores(tokens),)

    def get_normalized_probs(self, out: Any, log_probs: bool, sample: Any) -> torch.Tensor:
        return out[0].log_softmax(-1)


TRANSLATIONS = [("transformer", options) for options in OPTIONS + OF_SOURCES]
TRANSLATIONS += [
    ("fast_weight_transformer", options) for options in (OF_SOURCES[2], {"max_len_a": 1.5, "max_len_b": 1})
]


@pytest.mark.parametrize(("arch", "options"), TRANSLATIONS, ids=str)
def test_a_translation_is_that_of_its_source_alone(arch, options):
    model = decided(build(arch))
    dictionary = model.decoder.dictionary
    task: Any = SimpleNamespace(target_dictionary=dictionary)
    extra = {"lm_model": Bigrams(len(dictionary)), "lm_weight": 0.7} if "lm_weight" in options else {}

    def make(rows: list[int]) -> Any:
        arguments = {"extra_gen_cls_kwargs": dict(extra)}
        generator = FairseqTask.build_generator(task, [model], settings(**options), **arguments)
        targets = [TARGETS[row] for row in rows]
        net_input = {**batch([SOURCES[row] for row in rows]), "prev_output_tokens": shifted(targets)}
        sample = {"net_input": net_input, "target": collate_tokens(targets, PAD), "id": torch.tensor(rows)}
        prefix = sample["target"][:, : options["prefix_size"]] if options.get("prefix_size") else None
        wanted = [[torch.tensor(words) for words in CONSTRAINTS[row]] for row in rows]
        constraints = pack_constraints(wanted) if "constraints" in options else None
        named = {"prefix_tokens": prefix, "constraints": constraints}
        return FairseqTask.inference_step(task, generator, [model], sample, **named)

    made = assert_as_alone(make, len(SOURCES))
    for source, target, constraints, found in zip(SOURCES, TARGETS, CONSTRAINTS, made, strict=True):
        texts = [hypothesis["tokens"].tolist() for hypothesis in found]
        alike = {"sampling", "diverse_beam_groups", "prefix_size"}  # which may find a text twice
        assert len({tuple(text) for text in texts}) == len(texts) or not alike.isdisjoint(options)
        if "score_reference" in options:
            continue
        most = int(options.get("max_len_a", 0) * len(source) + options.get("max_len_b", 12))
        for text in texts:
            assert text.index(EOS) == len(text) - 1 <= most
            if "match_source_len" in options:
                assert len(text) == len(source) or "prefix_size" in options
            elif "prefix_size" in options:
                kept = min(options["prefix_size"], most)
                assert text[:kept] == target[:kept].tolist()[: len(text)]
        if "constraints" in options and options.get("max_len_b", 12) == 12 and "prefix_size" not in options:
            assert all(str(words)[1:-1] in str(texts[0]) for words in constraints)


class Given(FairseqIncrementalDecoder):
    """A model that gives the same logits after every text."""

    def __init__(self, dictionary: Any, logits: dict[int, float]) -> None:
        super().__init__(dictionary)
        self.logits = torch.zeros(len(dictionary))
        for token, logit in logits.items():
            self.logits[token] = logit

    def forward(self, prev_output_tokens: torch.Tensor, **others: Any) -> tuple[torch.Tensor, dict[str, list[None]]]:
        return self.logits.expand(*prev_output_tokens.shape, -1).clone(), {"attn": [None]}

    def max_positions(self) -> int:
        return 20

    def reorder_incremental_state(self, *others: Any) -> None:
        pass


SEARCHES: list[dict[str, Any]] = [
    {},
    {"sampling": True},
    {"sampling": True, "sampling_topk": 5},
    {"sampling": True, "sampling_topp": 0.9},
    {"diverse_beam_groups": 2, "beam": 4},
    {"diversity_rate": 0.5},
    {"no_repeat_ngram_size": 1},
]


@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_a_prompt_stays_however_improbable_its_words(fairseq, options):
    """Also if the model gives them no probability at all, and if it repeats n-grams that may not be repeated."""
    task, prompt = fairseq.task(), [5, 6, 6, EOS, 7, 8]
    source = torch.tensor([[EOS, *prompt]])
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([7])}}
    for logits in ({}, {5: -12.0}, {6: -math.inf, EOS: -400.0}):
        model = FairseqLanguageModel(Given(task.dictionary, logits))
        for temperature in (1.0, 0.1, 1e-38):
            generator = task.build_generator([model], settings(temperature=temperature, **options))
            for found in task.inference_step(generator, [model], sample)[0]:
                assert found["tokens"][:6].tolist() == prompt and found["score"].isfinite()


@torch.no_grad()
def test_samples_come_from_the_words_that_were_asked_for(fairseq):
    """Top-k and top-p of the tokens that other options leave; the scores are the model's."""
    dictionary = fairseq.task().dictionary
    lprobs = torch.tensor([0.4, 0.3, 0.2, 0.1] + [0.0] * 40).log().expand(50, 2, 44)
    left = lprobs.clone().index_fill_(2, torch.tensor([0]), -math.inf)  # 0.5, 0.33 and 0.17 of it
    for options, scores, support in (
        ({"sampling_topk": 2}, lprobs, {0, 1}),
        ({"sampling_topk": 99}, lprobs, {0, 1, 2, 3}),
        ({"sampling_topp": 0.6}, lprobs, {0, 1}),
        ({"sampling_topp": 1.0}, lprobs, {0, 1, 2, 3}),
        ({"sampling_topp": 0.4}, left, {1}),
        ({"sampling_topp": 0.6}, left, {1, 2}),
        ({"sampling_topk": 1}, left - 1000, {1}),
    ):
        torch.manual_seed(0)
        for step in (0, 1):
            found, words, _ = Sampling(dictionary, **options).step(step, scores.clone(), torch.zeros(50, 2, step))
            assert set(words.unique().tolist()) == support
            assert torch.equal(found, scores.gather(2, words[..., None])[..., 0])


def test_an_improbable_word_of_an_ensemble_has_a_score(fairseq):
    """The mean of probabilities that float32 cannot hold, with a generator and with a scorer."""
    task, rare = fairseq.task(), 7
    models = [FairseqLanguageModel(Given(task.dictionary, {rare: x})).eval() for x in (-200.0, -300.0)]
    expected = -200 - math.log(43) - math.log(2)
    target = torch.tensor([[rare]])
    sample = {"net_input": {"prev_output_tokens": torch.tensor([[EOS]])}, "target": target}
    for model in models:
        model.forward = lambda prev_output_tokens, model=model: model.decoder(prev_output_tokens)
    scored = SequenceScorer(task.dictionary).generate(models, sample)[0][0]
    source = {"src_tokens": target, "src_lengths": torch.tensor([1])}
    generator = SequenceGenerator(models, task.dictionary, max_len_b=3)
    made = generator.generate(models, {"net_input": source}, prefix_tokens=target)[0][0]
    for found in (scored, made):
        assert found["positional_scores"][0].item() == pytest.approx(expected, rel=1e-6)


REFUSED = [
    ({"max_len_b": 5}, "--max-len-a, --max-len-b .* allow a sample's text 5 tokens, but its prompt has 6"),
    ({"max_len_a": 0.5, "max_len_b": 1, "min_len": 9}, "--min-len is 9, but .* allow a sample's text 4 tokens"),
    ({"match_source_len": True}, "--match-source-len is set, but a language model has no source"),
    ({"constraints": "ordered"}, "--constraints is set, but the batch has none"),
    ({"print_alignment": "hard"}, "--print-alignment is set, but the model has no attention over a source"),
    ({"sampling": True, "sampling_topk": 2, "sampling_topp": 0.5}, "--sampling-topk and --sampling-topp exclude"),
    ({"lm_model": Bigrams(43)}, "--lm-path: the language model has 43 tokens; they must be the 44 of the target"),
    ({"logits": math.nan}, r"--path: the model's probabilities after 0 tokens are not numbers \(NaN\)"),
    ({"logits": math.nan, "sampling": True}, "--path: the model's probabilities after 0 tokens are not numbers"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_generation_that_cannot_be_ends_in_one_line(fairseq, options, message):
    task, prompt = fairseq.task(), torch.tensor([[EOS, 5, 6, 6, EOS, 7, 8]])
    options, extra = dict(options), {"lm_model": options.get("lm_model")}
    model = FairseqLanguageModel(Given(task.dictionary, dict.fromkeys(range(44), options.pop("logits", 0.0))))
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([7])}}
    with pytest.raises((ValueError, AssertionError), match=message) as error:
        generator = task.build_generator([model], settings(**options), extra_gen_cls_kwargs=extra)
        task.inference_step(generator, [model], sample)
    assert told(error.value) == str(error.value)


def test_candidates_are_taken_in_turns_by_how_many_constraints_they_meet(fairseq):
    """Also if scores differ by more than 100."""
    search = LexicallyConstrainedBeamSearch(fairseq.task().dictionary, "unordered")
    search.init_constraints(pack_constraints([[torch.tensor([5])]]), 2)
    search.constraint_states[0][0] = search.constraint_states[0][0].advance(5)
    lprobs = torch.full((1, 2, 44), -math.inf)
    lprobs[0, :, 4], lprobs[0, 0, 6], lprobs[0, 1, 6] = -1, -2, -160
    found, words, beams = search.step(1, lprobs, torch.tensor([[[-150.0], [-1.0]]]))
    assert found.tolist() == [[-151, -2, -152, -161]]
    assert words.tolist() == [[4, 4, 6, 6]] and beams.tolist() == [[0, 1, 0, 1]]


def test_constraints_with_a_language_model_are_refused(fairseq):
    with pytest.raises(NotImplementedError, match="--constraints is not supported with a language model"):
        fairseq.task().build_dataset_for_inference([torch.tensor([5])], [1], constraints=torch.zeros(1, 1))

"""Settings are read and never run: a checkpoint may be anybody's; and those that changed since it was written."""

import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.hydra_train import hydra_main
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from fairseq_fastweights.conversion.files.checkpoints import configuration

settings = pytest.importorskip("fairseq.settings", reason="needs tools/build_fairseq.py's fairseq")
literal = settings.literal
pytestmark = pytest.mark.usefixtures("our_fairseq")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        (" {'beam': -1, 'x': [None, True]} ", {"beam": -1, "x": [None, True]}),
        ("[(512, 3)] * 2 + [(8, 1 + 2 - 4)]", [(512, 3), (512, 3), (8, -1)]),
        ("2 * 'ab'", "abab"),
        ("[" + "1," * 200_000 + "]", [1] * 200_000),  # a text of its own size may be long
    ],
    ids=range(5),
)
def test_literals_sums_and_products_are_read(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "x", "[0] * 10**9", "[0] * 1000 * 1000", "1000000 * 'a'", "{**{}}", "(lambda: 1)()", "[",
     "[[[0] * 99] * 99] * 99", "('ab' * 999,) * 999", "('a' * 99_999) + ('a' * 99_999)",
     "[" + "'a' * 9_999, " * 99 + "]", "[{1: [2, 3], 4: {5}}] * 9_999", "1 + [1]", "[x for x in (1,)]",
     "(" * 5000, "f'{1}'", "1 / 2"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is no literal"):
        literal(text)
    with pytest.raises(TypeError, match="a setting must be a string, not list"):  # as eval refuses it
        literal([text])


def save(path, **parts):
    """Writes a checkpoint without weights."""
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {"model": {}, "optimizer_history": [history | {"num_updates": 0}]}
    torch.save(state | {"extra_state": {"train_iterator": {"epoch": 1}}} | parts, path)


@pytest.mark.parametrize(
    ("arch", "setting"),
    [("transformer_lm", "character_filters"), ("fconv_lm", "decoder_layers"), ("fconv_lm", "decoder_attention")],
)
def test_a_checkpoint_that_loads_runs_nothing(tmp_path, arch, setting):
    Dictionary().save(str(tmp_path / "dict.txt"))
    task = tasks.setup_task(Namespace(task="language_modeling", data=str(tmp_path), tokens_per_sample=8))
    marker = tmp_path / "ran"
    args = Namespace(arch=arch, task="language_modeling", data=str(tmp_path), character_embeddings=True)
    setattr(args, setting, f"__import__('pathlib').Path({str(marker)!r}).touch()")
    save(tmp_path / "model.pt", args=args)
    with pytest.raises(ValueError, match="is no literal"):
        checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], task=task)
    assert not marker.exists()


VARIABLE, LITERAL = "${oc.env:SECRET}", "it must be a literal, without ${...}"


@pytest.mark.parametrize(
    ("parts", "overrides", "message"),
    [
        ({"cfg": {"model": {"a": VARIABLE}}}, {}, f"setting cfg.model.a is '{VARIABLE}'; {LITERAL}"),
        ({"cfg": {"task": Namespace(a=[{"b": (VARIABLE,)}])}}, {}, f"setting cfg.task.a.b is '{VARIABLE}'; {LITERAL}"),
        ({"cfg": {"task": {"a": "${.b}" * 99}}}, {}, f"setting cfg.task.a is '{'${.b}' * 40}'; {LITERAL}"),
        ({"args": Namespace(lr=VARIABLE)}, {}, f"setting args.lr is '{VARIABLE}'; {LITERAL}"),
        ({"cfg": {}}, {"data": "a${b}"}, f"setting overrides.data is 'a${{b}}'; {LITERAL}"),
        ({"cfg": {"model": {"dropout": math.nan}}}, {}, "setting cfg.model.dropout is nan; it must be a finite number"),
        ({"cfg": {"model": {"a": {"unkpen": -math.inf}}}}, {}, "setting cfg.model.a.unkpen is -inf; it must be a fin"),
        ({"cfg": {"model": {"a": [0] * 5000}}}, {}, "setting cfg.model.a is one of more than 5,000 values, which are"),
        ({"cfg": "a: &a [x]\nb: [*a, *a]"}, {}, "setting cfg is of type str; it must hold settings by name"),
        ({"args": {"arch": "x"}}, {}, "setting args is of type dict; it must hold settings by name"),
        ({"cfg": {"task": "???"}}, {}, "setting cfg.task is of type str; it must hold settings by name"),
    ],
)  # fmt: skip
def test_a_checkpoints_settings_are_numbers_and_texts(tmp_path, monkeypatch, parts, overrides, message):
    monkeypatch.setenv("SECRET", "hunter2")
    path = str(tmp_path / "model.pt")
    save(path, **parts)
    with pytest.raises(ValueError) as error:
        checkpoint_utils.load_checkpoint_to_cpu(path, overrides)
    assert str(error.value).startswith(f"{path} is refused: {message}")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("clip_norm", math.nan, "setting clip_norm is nan; it must be a finite number"),
        ("lr", [0.1, math.inf], "setting lr is inf; it must be a finite number"),
        (
            "update_freq",
            [1] * 5000,
            "setting optimization.update_freq is one of more than 5,000 values, which are too many",
        ),
        ("save_dir", "a${b}", f"setting save_dir is 'a${{b}}'; {LITERAL}"),
        ("clip_norm", math.inf, None),
        ("stop_min_lr", -math.inf, None),
        ("save_dir", "a\\", None),  # hydra's language of overrides has other meanings for these three
        ("save_dir", "choice(1,2)", None),
        ("save_dir", "'\\'\n\" é", None),
        ("bpe", "../../x", None),
    ],
    ids=range(10),
)
def test_options_are_numbers_and_texts_as_they_are_given(option, value, message):
    args = options.parse_args_and_arch(options.get_training_parser(), [".", "--arch", "lstm"])
    setattr(args, option, value)
    if message:
        with pytest.raises(ValueError) as error:
            convert_namespace_to_omegaconf(args)
        assert str(error.value) == message
        return
    cfg = convert_namespace_to_omegaconf(args)
    assert value in (cfg.optimization.get(option), cfg.checkpoint.get(option), cfg.get(option))


def test_what_a_config_json_says_becomes_no_interpolation():
    with pytest.raises(
        ValueError, match=r"^data is '\$\{oc\.env:SECRET\}'; it must be a literal, without \$\{\.\.\.\}$"
    ):
        configuration({"data": VARIABLE})


def test_options_of_hydra_are_numbers():
    with initialize_config_module("fairseq.config", version_base="1.1"):
        cfg = compose("config", ["optimization.clip_norm=nan"])
    with pytest.raises(ValueError, match=r"^setting optimization\.clip_norm is nan; it must be a finite number$"):
        hydra_main.__wrapped__(cfg)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: &a [1, {b: c}]\nd: *a", {"a": [1, {"b": "c"}], "d": [1, {"b": "c"}]}),
        ("", None),
        ("- &a0 {x: 1}\n" + "".join(f"- &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(20)), "than 100,000"),
        ("- &a0 [x]\n" + "".join(f"- &a{i + 1} [*a{i}, *a{i}]\n" for i in range(20)), "than 100,000"),
        ("&a [*a]", "inf values"),
        ("a: [1", "expected"),
        ("[" * 500, "recursion"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("{[1]: 2}", "unhashable key"),
        ("!!timestamp 2000-99-99", "month must be"),
    ],
    ids=range(10),
)  # fmt: skip
def test_yaml_is_read_and_its_aliases_multiply_nothing(tmp_path, text, found):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    if not isinstance(found, str):
        with path.open(encoding="utf-8") as file:
            assert settings.read_yaml(file) == found
        return
    with path.open(encoding="utf-8") as file, pytest.raises(ValueError, match=rf"^{path} cannot be .*{found}") as error:
        settings.read_yaml(file)
    assert "\n" not in str(error.value)


CFG = {
    "task": {"data": "here", "tokens_per_sample": 16, "sample_break_mode": "none"},
    "dataset": {"batch_size": 4, "max_tokens": None, "num_workers": 1},
    "common": {"seed": 1, "log_interval": 1},
    "distributed_training": {"distributed_world_size": 1},
}


@pytest.mark.parametrize(
    ("part", "options", "told"),
    [
        ("task", {"data": "moved"}, ""),
        ("task", {"tokens_per_sample": 32}, "tokens_per_sample was 16 and is 32"),
        ("dataset", {"num_workers": 2, "batch_size": None, "max_tokens": 99}, "batch_size was 4 and is None, max_to"),
        ("common", {"seed": 2, "log_interval": 5}, "seed was 1 and is 2"),
        ("distributed_training", {"distributed_world_size": 3}, "distributed_world_size was 1 and is 3"),
    ],
)
def test_the_settings_that_make_batches_are_told(part, options, told):
    from fairseq.changed_settings import of_data

    former, now = OmegaConf.create(CFG), OmegaConf.create({**CFG, part: {**CFG[part], **options}})
    assert of_data(former, now).startswith(told) and bool(told) == bool(of_data(former, now))
    former = SimpleNamespace(**{**former, "task": Namespace(**CFG["task"])})  # of a task without a dataclass
    assert of_data(former, now).startswith(told) and of_data(None, now) == ""


MODEL = {"dropout": 0.1, "layers": 2, "width": 4, "activation_fn": "relu", "share_embeddings": False, "heads": "${no}"}


def build(settings, task):
    assert settings.width % 2 == 0
    return torch.nn.Sequential(*(torch.nn.Linear(settings.width, 4) for _ in range(settings.layers)))


@pytest.mark.parametrize("kind", [OmegaConf.create, lambda settings: Namespace(**settings)])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dropout": 0.2, "layers": 3}, "^x.pt does not fit the model: layers is 2 in the checkpoint and 3 in the mo"),
        ({"width": 3, "layers": 1}, "layers is 2 .*; width is 4 in the checkpoint and 3 in the"),  # makes no model
        ({"activation_fn": "gelu"}, "'relu' in the checkpoint and 'gelu' in the model"),
        ({"share_embeddings": True}, "share_embeddings is False in"),
        ({"dropout": 0.2}, None),
    ],
)
def test_only_what_does_not_fit_is_told(monkeypatch, kind, options, told):
    from fairseq import changed_settings, models

    monkeypatch.setattr(models, "build_model", build)
    former, now = (SimpleNamespace(model=kind(settings)) for settings in (MODEL, {**MODEL, "heads": 1, **options}))
    weights = build(former.model, None).state_dict()

    def check():
        changed_settings.check_computation("x.pt", former, now)
        if told is not None:  # loading has failed
            changed_settings.check_shapes("x.pt", former, now, weights, None)

    if told is None:
        check()
        return
    with pytest.raises(ValueError, match=told) as error:
        check()
    assert "dropout" not in str(error.value)

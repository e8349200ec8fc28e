"""Options of a command that no model can follow are refused by name, before data are read and a model is made."""

from __future__ import annotations

import pytest
import torch
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig

from fairseq_fastweights.command_line import option_names
from fairseq_fastweights.models.option_checks import RANGES, check_criterion, check_ranges

SHARED = "--share-decoder-input-output-embed"
TRANSLATE = "--task translation --source-lang en --target-lang de"
ROTARY = "--mixers softmax --rotary-dim 4"
COMMANDS = [
    # (arguments after the data, the first words of the error)
    ("--arch fast_weight_lm --decoder-layers 0", "decoder_layers is 0; it must be at least 1"),
    ("--arch fast_weight_lm --decoder-layers -1", "decoder_layers is -1; it must be at least 1"),
    ("--arch fast_weight_lm_wiki103_small --decoder-layerdrop 2", "decoder_layerdrop is 2.0; it must be from 0 to 1"),
    ("--arch fast_weight_lm --dropout -0.1", "dropout is -0.1; it must be from 0 to 1"),
    ("--arch fast_weight_lm --update-freq 0", "update_freq is 0; it must be at least 1"),
    ("--arch fast_weight_lm --update-freq 4,0", "update_freq is 0; it must be at least 1"),
    ("--arch fast_weight_lm --lr -1", "lr is -1.0; it must be at least 0"),
    ("--arch fast_weight_lm --batch-size 0", "batch_size is 0; it must be at least 1"),
    ("--arch fast_weight_lm --required-batch-size-multiple 0", "required_batch_size_multiple is 0; it must be at"),
    ("--arch fast_weight_lm --seed -1", "seed is -1; it must be from 0 to 4294967295"),
    ("--arch fast_weight_lm --favor-features 8", "favor_features is 8; it needs feature_map favor, and feature_map"),
    ("--arch fast_weight_lm --feature-map elu --dpfp-nu 2", "dpfp_nu is 2; it needs feature_map dpfp, and"),
    ("--arch fast_weight_lm --mixers delta --local-window 8", "local_window is 8; it needs a layer of local, and"),
    ("--arch fast_weight_lm --mixers hebb", "mixers is 'hebb', in which 'hebb' is no mixer"),
    ("--arch fast_weight_lm --softmax-attention-layers 7", "softmax_attention_layers is '7'; it must be 'all' or"),
    ("--arch fast_weight_lm --no-cuda-graphs", "no_cuda_graphs is set; it needs compile, which is not"),
    (f"--arch fast_weight_transformer_tiny {TRANSLATE} --no-cuda-graphs", "no_cuda_graphs is set; it needs compile,"),
    ("--arch fast_weight_lm --optimizer adam --adam-betas 0.9", "adam_betas is '0.9'; it must be two numbers"),
    ("--arch fast_weight_lm --optimizer adam --adam-betas (2,0)", "adam_betas is '(2,0)'; it must be two numbers"),
    ("--arch fast_weight_lm --lr-scheduler polynomial_decay --total-num-update 0", "total_num_update is 0; it must"),
    ("--arch fast_weight_lm --restore-file /nowhere/x.pt", "restore_file is '/nowhere/x.pt', and there is no such"),
    ("--arch fast_weight_lm --task translation", "task is translation; with arch fast_weight_lm it must be"),
    ("--arch fast_weight_lm_gpt2_small --task translation", "task is translation; with arch fast_weight_lm_gpt2_small"),
    ("--arch fast_weight_transformer", "task is fast_weight_language_modeling; with arch fast_weight_transformer it"),
    (f"--arch fast_weight_transformer {TRANSLATE} --encoder-layers 0", "encoder_layers is 0; it must be at least 1"),
    (f"--arch fast_weight_transformer_tiny {TRANSLATE} --favor-features 8", "favor_features is 8; it needs"),
    (
        f"--arch fast_weight_transformer_tiny {TRANSLATE} --encoder-layers-to-keep 0,2",
        "encoder_layers_to_keep is [0, 2]; it must be comma-separated numbers from 0 to 1, each once",
    ),
    (
        f"--arch fast_weight_transformer_tiny {TRANSLATE} --decoder-layers-to-keep 0,0",
        "decoder_layers_to_keep is [0, 0]",
    ),
    *(
        (f"--arch fast_weight_lm --cuda-graphs {flags}", f"cuda_graphs is set, and {start}; one of them must go: ")
        for flags, start in (
            ("--cpu", "cpu is set"),
            ("--amp", "amp is set"),
            ("--ddp-backend fully_sharded", "ddp_backend is fully_sharded"),
            ("--checkpoint-activations", "checkpoint_activations is set"),
            ("--offload-activations", "offload_activations is set"),
            ("--decoder-layerdrop 0.5", "decoder_layerdrop is 0.5"),
            ("--quant-noise-pq 0.1", "quant_noise_pq is 0.1"),
            ("--quant-noise-scalar 0.1", "quant_noise_scalar is 0.1"),
            ("--base-layers 1", "base_layers is 1"),
            ("--feature-map favor", "feature_map is favor"),
            ("--compile --no-cuda-graphs", "no_cuda_graphs is set"),
        )
    ),
]
MODELS = [
    ("--decoder-attention-heads 3", "decoder_attention_heads is 3; it must be a divisor of decoder_embed_dim, 16"),
    ("--init-std -1", "init_std is -1.0; it must be above 0"),
    ("--init-std nan", "init_std is nan; it must be a finite number"),
    (f"{SHARED} --decoder-input-dim 8", "decoder_input_dim is 8 and decoder_output_dim 16; with share_decoder_input_o"),
    (f"{SHARED} --decoder-output-dim 8", "decoder_input_dim is 16 and decoder_output_dim 8; with share_decoder_input_"),
    (f"{SHARED} --character-embeddings", "share_decoder_input_output_embed is set; with character_embeddings it must"),
    ("--character-embeddings --character-filters 7", "character_filters is '7'; it must be a list of pairs"),
    (f"{ROTARY} --rotary-base -5", "rotary_base is -5.0; it must be above 0"),
    (f"{ROTARY} --rotary-scaling banana", "rotary_scaling is 'banana'; it must be linear:FACTOR or"),
    ("--quant-noise-pq 0.1 --quant-noise-pq-block-size 5", "quant_noise_pq_block_size is 5; it must divide"),
]
INFERENCE = [
    ("dataset", "batch_size", 0, "batch_size is 0; it must be at least 1"),
    ("dataset", "shard_id", 1, "shard_id is 1; it must be less than num_shards, 1"),
    ("eval_lm", "context_window", -1, "context_window is -1; it must be at least 0"),
    ("interactive", "buffer_size", -1, "buffer_size is -1; it must be at least 0"),
    ("generation", "beam", 0, "beam is 0; it must be at least 1"),
    ("generation", "nbest", 6, "nbest is 6; it must be at most beam, 5"),
    ("generation", "min_len", 201, "min_len is 201; it must be at most max_len_b, 200"),
]


@pytest.mark.parametrize(("flags", "message"), COMMANDS)
def test_options_of_a_training_are_refused_as_they_are_read(fairseq, flags, message):
    parser = options.get_training_parser("fast_weight_language_modeling")
    with pytest.raises(ValueError) as refused:
        options.parse_args_and_arch(parser, [str(fairseq.data()), *flags.split()])
    assert str(refused.value).startswith(message)


def test_cuda_graphs_need_a_gpu(fairseq, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda_graphs is set; it needs a GPU, and torch sees none"):
        fairseq.parse("fast_weight_lm", "--cuda-graphs")


def test_layers_that_are_there_may_be_kept(fairseq):
    parser = options.get_training_parser("fast_weight_language_modeling")
    flags = f"--arch fast_weight_transformer_tiny {TRANSLATE} --encoder-layers-to-keep 0,1 --decoder-layers-to-keep 1"
    assert options.parse_args_and_arch(parser, [str(fairseq.data()), *flags.split()]).encoder_layers_to_keep == [0, 1]


@pytest.mark.parametrize(("flags", "message"), MODELS)
def test_options_that_make_no_model_are_refused(fairseq, flags, message):
    with pytest.raises(ValueError) as refused:
        fairseq.build(flags)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(("group", "option", "value", "message"), INFERENCE)
def test_options_of_an_evaluation_are_refused(fairseq, group, option, value, message):
    cfg, model = FairseqConfig(), fairseq.build()
    model.prepare_for_inference_(cfg)
    setattr(getattr(cfg, group), option, value)
    with pytest.raises(ValueError) as refused:
        model.prepare_for_inference_(cfg)
    assert str(refused.value) == message


def test_every_range_is_of_an_option_and_allows_fairseqs_defaults(fairseq):
    assert set(RANGES) <= option_names()
    for group in (*vars(FairseqConfig()).values(), fairseq.tiny("fast_weight_lm_wiki103_small")):
        check_ranges(group)


@pytest.mark.parametrize(
    ("name", "adaptive", "message"),
    [
        ("cross_entropy", True, "criterion is cross_entropy; with adaptive_softmax_cutoff it must be adaptive_loss"),
        ("adaptive_loss", False, "criterion is adaptive_loss; it needs adaptive_softmax_cutoff, which is not set"),
    ],
)
def test_the_criterion_is_that_of_the_softmax(name, adaptive, message):
    class Criterion:
        _name = name

    check_criterion(Criterion, not adaptive)
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_criterion(Criterion, adaptive)

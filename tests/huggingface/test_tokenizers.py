"""The tokenizer of an exported folder gives the numbers that fairseq gives, and gives the text back."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fairseq.data import Dictionary

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.from_huggingface import from_huggingface
from fairseq_fastweights.conversion.to_huggingface import to_huggingface
from fairseq_fastweights.conversion.tokenizers import settings, tokenizer_json
from fairseq_fastweights.conversion.trained_models import find_run, load_for_causal_lm
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM
from tests.conversion import llamas, sources
from tests.conversion.test_tokenizer import whole
from tests.models.conftest import WORDS

LINES = ["w1 w2 w3", " w4\tw5  nothing ", "", "w6 <unk> </s> w7\x1cw8\u3000w9\x85w10 W1"]
TEXTS = [
    "the cat sat",
    "and  the other cats   sat there,",
    "Grüße: e\u0301 that <pad> is <s> the theme 🎉",
    "x<|endoftext|>y",
]


def test_words_are_those_of_the_lines(save, tmp_path):
    save(tmp_path / "run")
    model, tokenizer = load_for_causal_lm(tmp_path / "run")
    assert type(model) is FastWeightForCausalLM and not model.training
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "dict.txt").rename(tmp_path / "data" / "dict.txt")
    _, elsewhere = load_for_causal_lm(tmp_path / "run" / "checkpoint_best.pt", data=tmp_path / "data")
    assert elsewhere.get_vocab() == tokenizer.get_vocab()
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    expected = [2]
    for line in LINES:
        expected += dictionary.encode_line(line, add_if_not_exist=False).tolist()  # with </s> at its end
    assert tokenizer("\n".join(LINES) + "\n").input_ids == expected
    assert tokenizer.convert_ids_to_tokens(range(44)) == ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    assert tokenizer.decode(tokenizer("w1 w2").input_ids, skip_special_tokens=True) == "w1 w2"
    batch = tokenizer(["w1", "w2 w3 w4"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[1, 1, 2, 5], [2, 6, 7, 8]] and set(batch) == {"input_ids", "attention_mask"}
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_parts_of_texts_are_decoded_with_the_spaces_between_them(save, tmp_path, capsys):
    save(tmp_path / "run")
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "folder")
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    ids = tokenizer("w1 w2 <unk> w3").input_ids
    for skipped, text in ((True, "w1 w2 w3"), (False, "</s> w1 w2 <unk> w3")):
        assert tokenizer.decode(ids, skip_special_tokens=skipped) == text
        for n in range(1, len(ids)):
            parts = tokenizer.batch_decode([ids[:n], ids[n:]], skip_special_tokens=skipped)
            assert "".join(parts).strip() == text, n
    assert "".join(tokenizer.decode(number) for number in ids) == "</s> w1 w2 <unk> w3"
    assert tokenizer.decode([]) == tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    capsys.readouterr()
    prompt = tokenizer("w1 w2", return_tensors="pt")
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "suppress_tokens": [0, 1, 2, 3]}
    written = model.generate(**prompt, **options, streamer=streamer)[0]
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert len(text.split()) == 6 and f"w1 w2{capsys.readouterr().out.rstrip()}" == text
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipeline("w1 w2", **options)[0]["generated_text"] == text


def test_texts_begin_as_in_training(save, tmp_path):
    save(tmp_path / "run", "--add-bos-token")
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")("w1").input_ids == [0, 5]
    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    assert torch.load(tmp_path / "back" / "model.pt", weights_only=True)["cfg"]["task"]["add_bos_token"] is True


@pytest.mark.parametrize("neox", [False, True], ids=["gpt2", "neox"])
def test_pieces_are_those_of_the_byte_level_bpe(neox, save, tmp_path, capsys):
    """The folder of a model that was made of GPT-2 or GPT-NeoX, and trained on with fast weights."""
    source = sources.model(neox)
    sources.save(tmp_path / "theirs", source)
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    dictionary = Dictionary.load(str(tmp_path / "converted" / "dict.txt"))
    words = tuple(dictionary.symbols[4:])
    trained = save(tmp_path / "run", "--mixers gated,softmax:2 --mask-special-symbols", words=words)
    run = ["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]
    assert main(run) == 2  # nothing says where the BPE is
    error = capsys.readouterr().err
    assert "dict.txt: these are numbers" in error and "its tokenizer.json and tokenizer_words.json, or" in error
    assert main([*run, "--tokenizer", str(tmp_path / "converted")]) == 0
    # The same of the converted folder and the checkpoint that was trained from it.
    last = str(tmp_path / "run" / "checkpoint_best.pt")
    other = ["to-huggingface", str(tmp_path / "converted"), str(tmp_path / "other"), "--checkpoint", last]
    assert main(other) == 0
    for name in ("tokenizer.json", "config.json", "fairseq/tokenizer_words.json"):
        assert (tmp_path / "folder" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    bpe = whole(tmp_path / "converted")
    for text in TEXTS:
        numbers = dictionary.encode_line(bpe.encode(text), add_if_not_exist=False, append_eos=False)
        assert tokenizer(text).input_ids == [2, *numbers.tolist()], text
        if "endoftext" not in text:
            assert tokenizer.decode(numbers) == bpe.decode(dictionary.string(numbers)), text
    if not neox:  # the files of fairseq's own `--bpe gpt2` give the same
        (tmp_path / "gpt2").mkdir()
        for name in ("encoder.json", "vocab.bpe"):
            shutil.copy(tmp_path / "converted" / name, tmp_path / "gpt2")
        out = [
            "to-huggingface",
            str(tmp_path / "run"),
            str(tmp_path / "of_gpt2"),
            "--tokenizer",
            str(tmp_path / "gpt2"),
        ]
        assert main(out) == main(["from-huggingface", str(tmp_path / "of_gpt2"), str(tmp_path / "again")]) == 0
        assert f"--bpe gpt2 --gpt2-encoder-json {tmp_path / 'again'}/encoder.json" in capsys.readouterr().out
        other = transformers.AutoTokenizer.from_pretrained(tmp_path / "of_gpt2")
        assert [other(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    assert tokenizer.pad_token_id == 1 and tokenizer.eos_token_id == tokenizer.bos_token_id == 2
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    with torch.no_grad():
        expected = trained(batch.input_ids)[0]
        assert (model(**batch).logits - expected)[batch.attention_mask == 1].abs().max() <= 1e-5
    # A pipeline takes both.
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    made = pipeline("the cat", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert made.startswith("the cat")

    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    assert f"--tokenizer-json-folder {tmp_path / 'back'}" in capsys.readouterr().out
    for name, place in (("dict.txt", "run"), *((name, "converted") for name in tokenizer_json.FILES)):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / place / name).read_bytes()


@pytest.mark.parametrize("given", ["converted", "converted/model.pt"])
def test_the_tokenizer_beside_the_weights_source_is_found(given, save, tmp_path):
    sources.save(tmp_path / "theirs", sources.model(False))
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    words = tuple(Dictionary.load(str(tmp_path / "converted" / "dict.txt")).symbols[4:])
    save(tmp_path / "run", words=words)
    path = tmp_path / "run" / "checkpoint_best.pt"
    state = torch.load(path, weights_only=True)
    state["cfg"]["task"]["transfer_from"] = str(tmp_path / given)
    torch.save(state, path)
    assert find_run(path).pieces == tmp_path / "converted"


def test_paths_of_another_type_are_refused_by_name(tmp_path):
    for name, arguments in (("path", (3,)), ("data", ("x", 3)), ("tokenizer", ("x", None, 3))):
        with pytest.raises(ValueError, match=f"{name} is a int; it must be the path of a file or a folder"):
            find_run(*arguments)
    for convert in (from_huggingface, to_huggingface):
        for arguments in ((None, tmp_path / "new"), (tmp_path, None)):
            with pytest.raises(ValueError, match="is a NoneType; it must be the path of a file or a folder"):
                convert(*arguments)


def test_the_pieces_must_be_those_of_the_dictionary(save, tmp_path):
    """A dictionary of a text lacks pieces that others are made of; `--bpe gpt2` has its two files alone."""
    sources.save(tmp_path / "theirs", sources.model(False))
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    (tmp_path / "converted" / "tokenizer_words.json").unlink()
    words = tuple(Dictionary.load(str(tmp_path / "converted" / "dict.txt")).symbols[4:])
    save(tmp_path / "run", words=words)
    _, tokenizer = load_for_causal_lm(tmp_path / "run", tokenizer=tmp_path / "converted")
    whole = tokenizer("the cat").input_ids
    _, numbers = load_for_causal_lm(tmp_path / "run", tokenizer="words")
    assert numbers(" ".join(words[number - 4] for number in whole[1:])).input_ids == whole
    save(tmp_path / "run", words=words[:-9])
    with pytest.raises(
        ValueError, match=r"encoder.json: dict.txt lacks \d+ of its words, '.*' for one; it must have all"
    ):
        load_for_causal_lm(tmp_path / "run", tokenizer=tmp_path / "converted")


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
TOKENIZER = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "model_max_length": 33, "padding_side": "right"}
TOKENIZER |= {"truncation_side": "left", "clean_up_tokenization_spaces": True, "cls_token": "th", "mask_token": "none"}
GENERATION = {"eos_token_id": [1, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.25, "max_new_tokens": 7}
GENERATION |= {"repetition_penalty": 1 + 1 / 3, "bad_words_ids": [[6, 7], [8]], "suppress_tokens": [9, 5000]}


def templates(folder: Path, how: str) -> Any:
    """Writes a folder's chat templates in one of the forms that they have had; returns the tokenizer's settings."""
    if how == "file":
        (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
        return {"chat_template": "not this one"}
    if how == "setting":
        return {"chat_template": CHAT}
    if how == "files":
        (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("é" + CHAT, encoding="utf-8")
        return {}
    return {"chat_template": [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "é" + CHAT}]}


@pytest.mark.parametrize("how", ["file", "setting", "files", "settings"])
def test_chat_templates_and_settings_go_in_and_out(how, tmp_path):
    """Folders of an unchanged model, of one with linear attention, and of that one on the way back."""
    theirs, converted, run, out = (tmp_path / name for name in ("theirs", "converted", "run", "out"))
    llamas.save(theirs, llamas.model("Llama"))
    llamas.describe(theirs, TOKENIZER | templates(theirs, how) | {"extra_special_tokens": ["the", "none"]})
    (theirs / "generation_config.json").write_text(json.dumps(GENERATION))
    assert main(["from-huggingface", str(theirs), str(converted)]) == 0
    assert main(["to-huggingface", str(converted), str(tmp_path / "same")]) == 0
    source = transformers.AutoTokenizer.from_pretrained(theirs)
    chat = [{"role": "user", "content": "the cat"}]
    names = [None, "tool_use"] if how in ("files", "settings") else [None]
    expected = {name: source.apply_chat_template(chat, tokenize=False, chat_template=name) for name in names}
    assert expected[None] == "<|begin|>[user] the cat<|end|>\n"
    same = transformers.AutoTokenizer.from_pretrained(tmp_path / "same")
    assert same.chat_template == source.chat_template and same.model_max_length == 33
    assert json.loads((tmp_path / "same" / "generation_config.json").read_text()) == GENERATION

    state = torch.load(converted / "model.pt", weights_only=True)
    state["cfg"]["model"] |= {"softmax_attention_layers": "", "mixers": "sum:1,softmax:2"}
    del state["model"]["decoder.settings_version"]
    run.mkdir()
    (run / "dict.txt").write_bytes((converted / "dict.txt").read_bytes())
    torch.save(state, run / "model.pt")
    memory, words, _ = sources.load(run, llamas.model("Llama"))
    state["model"]["decoder.settings_version"] = memory.decoder.settings_version
    torch.save(state, run / "checkpoint_best.pt")
    assert main(["to-huggingface", str(converted), str(out), "--checkpoint", str(run / "checkpoint_best.pt")]) == 0
    assert main(["from-huggingface", str(out), str(tmp_path / "back")]) == 0
    assert main(["to-huggingface", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    for folder in (out, tmp_path / "again"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for name, text in expected.items():
            assert tokenizer.apply_chat_template(chat, tokenize=False, chat_template=name) == text
        # It begins texts as fairseq does, so that its own words there are not the template's.
        assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 2
        assert tokenizer.convert_tokens_to_ids("<|end|>") == 2 and tokenizer.bos_token == "<|end|>"
        assert tokenizer.convert_tokens_to_ids("<|begin|>") == words.index("0")
        for name in ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces"):
            assert getattr(tokenizer, name) == TOKENIZER[name], name
        assert tokenizer.cls_token == "th" and tokenizer.mask_token is None  # none is no word
        assert tokenizer.extra_special_tokens == ["the"] and tokenizer.pad_token_id == 1
        made = transformers.GenerationConfig.from_pretrained(folder).to_dict()
        assert made["eos_token_id"] == [2, words.index("5")] and made["suppress_tokens"] == [1, words.index("9")]
        assert made["bad_words_ids"] == [[words.index("6"), words.index("7")], [words.index("8")]]
        for name in set(GENERATION) - {*settings.TOKEN_IDS, "eos_token_id"}:
            assert made[name] == GENERATION[name], name


# As in the tokenizer_config.json of published models, with this test's first and last tokens.
HEADER = "<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|end|>"
LLAMA_3 = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
LLAMA_3 |= {"clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"]}
LLAMA_3 |= {"chat_template": f"{{% for m in messages %}}{{{{ (bos_token if loop.first else '') + '' }}}}{HEADER}"}
LLAMA_3["chat_template"] += "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
MISTRAL = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|begin|>", "eos_token": "<|end|>", "legacy": True}
MISTRAL |= {"add_bos_token": True, "add_eos_token": False, "sp_model_kwargs": {}, "use_default_system_prompt": False}
MISTRAL["unk_token"] = "<|begin|>"
MISTRAL["chat_template"] = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token + ' ' }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TALK = [{"role": "user", "content": "the cat  sat"}, {"role": "assistant", "content": "that is the theme"}]


@pytest.mark.parametrize("end", [None, "<|begin|>"])
@pytest.mark.parametrize(("kind", "settings"), [("Llama", LLAMA_3), ("Mistral", MISTRAL)], ids=["llama 3", "mistral"])
def test_a_conversation_keeps_its_numbers(kind, settings, end, tmp_path):
    """An unchanged model, and the same as transformers would read it in the dictionary's numbers."""
    theirs, converted, same = (tmp_path / name for name in ("theirs", "converted", "same"))
    source = llamas.model(kind, **({"sliding_window": None} if kind == "Mistral" else {}))
    llamas.save(theirs, source, pieces=kind == "Mistral")
    llamas.describe(theirs, settings, begins=True)
    chosen = [] if end is None else ["--end-of-text", end]
    assert main(["from-huggingface", str(theirs), str(converted), *chosen]) == 0
    assert main(["to-huggingface", str(converted), str(same)]) == 0
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (theirs, same))
    model, renumbered = load_for_causal_lm(converted)
    words = Dictionary.load(str(converted / "dict.txt"))
    last = 1 if end is None else 0
    ours = [words.eos() if i == last else words.index(str(i)) for i in range(source.config.vocab_size)]
    assert words.unk() not in ours and model.config.eos_token_id == words.eos()
    # The first token of every text is there once, as in training.
    assert before("the cat").input_ids[:2].count(0) == 1
    for tokenizer, numbers in ((after, range(len(ours))), (renumbered, ours)):
        for text in ("the cat", ""):
            assert tokenizer(text).input_ids == [numbers[i] for i in before(text).input_ids], text
        said = before.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
        assert said.count(0) == 1 and said.count(1) >= 1
        found = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
        assert found == [numbers[i] for i in said]


def test_special_words_of_a_byte_level_bpe_stay_special(save, tmp_path):
    sources.save(tmp_path / "theirs", sources.model(True))
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    words = tuple(Dictionary.load(str(tmp_path / "converted" / "dict.txt")).symbols[4:])
    save(tmp_path / "run", words=words)
    _, tokenizer = load_for_causal_lm(tmp_path / "run", tokenizer=tmp_path / "converted")
    numbers = tokenizer("the<|padding|> cat<|endoftext|>    x").input_ids
    assert tokenizer.decode(numbers, skip_special_tokens=True) == "the cat    x"


BAD = [
    ({"padding_side": "up"}, {}, "tokenizer_config.json: padding_side is 'up'; this is no value of this setting"),
    ({"model_max_length": "9"}, {}, "tokenizer_config.json: model_max_length is '9'"),
    ({"model_max_length": math.nan}, {}, "tokenizer_config.json: model_max_length is nan; this is no value of this"),
    ({}, {"length_penalty": math.inf, "num_beams": 2}, "generation_config.json: length_penalty is inf; it must be a f"),
    ({}, {"exponential_decay_length_penalty": [5, math.nan]}, "exponential_decay_length_penalty is nan; it must be a"),
    ({"chat_template": 3}, {}, "tokenizer_config.json: chat_template must be a text, or a list of names and texts"),
    ({"chat_template": [{"name": "a"}]}, {}, "tokenizer_config.json: chat_template must be"),
    ({}, {"max_new_tokens": -1}, "generation_config.json: .*max_new_tokens"),
]


@pytest.mark.parametrize(("tokenizer", "generation", "message"), BAD)
def test_settings_that_cannot_be_are_named(tokenizer, generation, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=message):
        settings.tokenizer_arguments(tmp_path, [], {})
        settings.generation_config(tmp_path, FastWeightConfig(), lambda number: number)


def test_templates_are_files_of_the_folder(tmp_path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "theirs" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "theirs" / "additional_chat_templates" / ".hidden.jinja").write_text("x")
    assert settings.read_templates(tmp_path / "theirs", {}) == {}
    for name in ("chat_template.jinja", "additional_chat_templates/a.jinja"):
        (tmp_path / "theirs" / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ValueError, match=f"{name} is a link to .*secret; it must be a file in"):
            settings.read_templates(tmp_path / "theirs", {})
        (tmp_path / "theirs" / name).unlink()
    (tmp_path / "theirs" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja, line 1: not UTF-8"):
        settings.read_templates(tmp_path / "theirs", {})

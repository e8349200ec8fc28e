"""What the scripts of examples/wmt14/ refuse, with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.wmt14.conftest import GENERATE, MULTI30K, PREPARE, Programs


@pytest.mark.parametrize(
    ("script", "arguments", "env", "message"),
    [
        (GENERATE, ["DATA"], {}, "generate.sh DATA OUT [OPTION ...]"),
        (GENERATE, ["DATA", "MODEL", "--quiet"], {}, "OPTION is --quiet; it must not be given"),
        (GENERATE, ["DATA", "MODEL", "--remove-bpe=subword_nmt"], {}, "OPTION is --remove-bpe=subword_nmt"),
        (GENERATE, ["DATA", "MODEL", "--gen-subset", "test"], {}, "OPTION is --gen-subset; set SUBSETS"),
        (GENERATE, ["DATA", "MODEL"], {"SUBSETS": "test2"}, "SUBSETS is test2; it must be valid, test or both"),
        (MULTI30K, ["DATA"], {}, "multi30k.sh DATA OUT [MODEL ...]"),
        (MULTI30K, ["nowhere", "OUT"], {}, "DATA is nowhere, which holds no preparation.json"),
        (MULTI30K, ["DATA", "OUT", "gamma"], {}, "MODEL is gamma; it must be one of softmax linear favor dpfp"),
        (MULTI30K, ["DATA", "OUT"], {"UPDATES": "many"}, "UPDATES is many; it must be a positive number"),
        (MULTI30K, ["DATA", "OUT", "linear"], {"DEVICE": "abacus"}, "DEVICE is abacus; it must be cpu or gpu"),
        (PREPARE, [], {}, "prepare.sh OUT [FOLDER]"),
        (PREPARE, ["OUT"], {"TGT": "fr"}, "SRC is en and TGT fr; without FOLDER they must be en and de"),
        (PREPARE, ["OUT", "TEXT"], {"TGT": "en"}, "source and target are both en"),
        (PREPARE, ["OUT", "TEXT"], {"SRC": "../x"}, "SRC is '../x'; it must be the short name of a language"),
        (PREPARE, ["OUT", "TEXT"], {"SUBWORDS": "letters"}, "SUBWORDS is letters; it must be sentencepiece or bpe"),
        (
            PREPARE,
            ["OUT", "TEXT"],
            {"VOCABULARY": "32k"},
            "VOCABULARY is '32k'; it must be a whole number of at least 1",
        ),
        (PREPARE, ["OUT"], {"MAX_LENGTH": "0"}, "MAX_LENGTH is '0'; it must be a whole number of at least 1"),
        (PREPARE, ["OUT", "TEXT"], {"MAX_RATIO": "nan"}, "MAX_RATIO is 'nan'; it must be a number of at least 1"),
        (PREPARE, ["OUT", "TEXT"], {"WORKERS": "-1"}, "WORKERS is '-1'; it must be a whole number of at least 1"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    script: Path, arguments: list[str], env: dict[str, str], message: str, stub_data: Path, parallel: Path,
    tmp_path: Path, programs: Programs,
) -> None:  # fmt: skip
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "checkpoint_best.pt").touch()
    places = {"DATA": stub_data, "TEXT": parallel, "OUT": tmp_path / "OUT", "MODEL": tmp_path / "MODEL"}
    result, calls = programs.run(script, *(places.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0 and message in result.stderr
    assert not calls and not (tmp_path / "OUT").exists() and not (tmp_path / "OUT.unfinished").exists()
    assert len(list((tmp_path / "MODEL").iterdir())) == 1

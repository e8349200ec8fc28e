"""No call can run code from a file or write where a file says, except those in a list, each with a reason.

Searched are this project's Python files and those of fairseq as it is installed.
"""

import ast
import warnings
from pathlib import Path

import fairseq
import fairseq_cli
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    **{name: ROOT / name for name in ("fairseq_fastweights", "examples", "patches", "tools", "benchmarks")},
    "fairseq": Path(fairseq.__file__).parent,
    "fairseq_cli": Path(fairseq_cli.__file__).parent,
}

RUNS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "runpy.run_path", "runpy.run_module"),
    *("code.interact", "importlib.util.spec_from_file_location", "imp.load_source"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
    *("asyncio.create_subprocess_shell", "commands.getoutput"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.load", "cPickle.loads", "_pickle.loads"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "joblib.load", "pandas.read_pickle"),
    *("marshal.load", "marshal.loads", "shelve.open", "jsonpickle.decode"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "torch.hub.load_state_dict_from_url"),
    *("torch.ops.load_library", "torch.classes.load_library", "ctypes.CDLL", "ctypes.cdll.LoadLibrary"),
    *("torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline"),
}
"""Calls that no argument makes harmless."""
HANDED_ON = RUNS | {"torch.load", "yaml.load"}


OF_ITS_OWN = "its name comes from this project or from fairseq, not from a file"
BETWEEN_PROCESSES = "data from another process of the same run"
MEDIA = "a program of its own for audio or video, with files of its own or that its user names; no command for text"
CORPORA = "a program of its own that downloads published corpora; its lines have names that it or its user sets"
HUB = "downloads a published model, when its user asks for that one"

LISTED = {
    "fairseq_fastweights/integrations/transformers.py: import_module, import_module": OF_ITS_OWN,
    "fairseq_fastweights/ops/libraries.py: ctypes.CDLL, torch.ops.load_library": "kernels, compiled with the package",
    "tools/build_fairseq.py: unpack_archive": "the source of fairseq, whose hash pip has compared",
    "tools/faults.py: import_module": OF_ITS_OWN,
    "tools/mutation.py: compile, import_module": "modules of this project, and mutants, which do not run",
    "tools/native_build.py: importlib.util.spec_from_file_location": OF_ITS_OWN,
    "tools/native_toolchain.py: runpy.run_path": "the version in the torch that is installed",
    "benchmarks/build_causal_product.py: torch.utils.cpp_extension.load": "a peer's kernel, from its hashed source",
    "tools/site_pages.py: import_module": OF_ITS_OWN,
    "examples/common/command_line.py: importlib.util.spec_from_file_location": OF_ITS_OWN,
    "fairseq_fastweights/freed_memory.py: ctypes.CDLL": "the C library that Python itself uses",
    "fairseq/distributed/utils.py: pickle.loads, torch.load": BETWEEN_PROCESSES,
    "fairseq/models/__init__.py: import_module": "modules in a folder that is code",
    "fairseq/tasks/__init__.py: import_module": "modules in a folder that is code",
    "fairseq/utils.py: import_module": "--user-dir",
    "fairseq/data/fasta_dataset.py: shell=True, shell=True": "the path of a file, which is quoted",
    "fairseq/scoring/bleu.py: ctypes.cdll.LoadLibrary": "fairseq's own library",
    "fairseq/models/speech_to_text/hub_interface.py: torch.hub.load": HUB,
    "fairseq/examples/adaptive_span/__init__.py: import_module": "modules in a folder that is code",
    "fairseq/examples/bart/summarize.py: torch.hub.load": HUB,
    "fairseq/examples/multilingual/data_scripts/check_iswlt_test_data.py: shell=True": CORPORA,
    "fairseq/examples/multilingual/data_scripts/download_ted_and_extract.py: shell=True": CORPORA,
    "fairseq/examples/multilingual/data_scripts/download_wmt19_and_before.py: shell=True, shell=True": CORPORA,
    "fairseq/examples/MMPT/mmpt/modules/retri.py: pickle.load, pickle.load": MEDIA,
    "fairseq/examples/MMPT/mmpt/modules/vectorpool.py: pickle.load": MEDIA,
    "fairseq/examples/MMPT/mmpt/processors/dedupprocessor.py: pickle.load": MEDIA,
    "fairseq/examples/MMPT/mmpt/processors/dsprocessor.py: pickle.load": MEDIA,
    "fairseq/examples/MMPT/mmpt/processors/how2processor.py: pickle.load, pickle.load, pickle.load, pickle.load": MEDIA,
    "fairseq/examples/MMPT/mmpt/tasks/retritask.py: pickle.load": MEDIA,
    "fairseq/examples/MMPT/scripts/text_token_extractor/pretokenization.py: pickle.load, pickle.load": MEDIA,
    "fairseq/examples/hubert/simple_kmeans/dump_km_label.py: joblib.load": MEDIA,
    "fairseq/examples/speech_recognition/infer.py: allow_pickle": MEDIA,
    "fairseq/examples/speech_synthesis/preprocessing/denoiser/pretrained.py: torch.hub.load_state_dict_from_url": MEDIA,
    "fairseq/examples/speech_to_speech/benchmarking/data_utils.py: allow_pickle": MEDIA,
    "fairseq/examples/textless_nlp/gslm/metrics/abx_metrics/dump_abx_feats.py: joblib.load": MEDIA,
    "fairseq/examples/textless_nlp/gslm/metrics/asr_metrics/ppx.py: torch.hub.load": MEDIA,
    "fairseq/examples/textless_nlp/gslm/speech2unit/clustering/cluster_kmeans.py: allow_pickle": MEDIA,
    "fairseq/examples/textless_nlp/gslm/speech2unit/clustering/quantize_with_kmeans.py: joblib.load": MEDIA,
    "fairseq/examples/textless_nlp/gslm/tools/resynthesize_speech.py: joblib.load": MEDIA,
}
"""The calls that remain, by file, each with the reason."""


def is_literal(node: ast.expr | None, *values: object) -> bool:
    return isinstance(node, ast.Constant) and node.value in values


def names_a_package(node: ast.expr) -> bool:
    """True if the name of a module begins with that of a package that is written there."""
    while isinstance(node, ast.BinOp):
        node = node.left
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return isinstance(node, ast.Constant)


def danger(call: ast.Call, name: str) -> str | None:
    """The danger of a call of the function `name`, in a word or two; None if there is none."""
    given = {word.arg: word.value for word in call.keywords}
    method = name.rpartition(".")[2]
    if name in RUNS:
        return name
    if "shell" in given and not is_literal(given["shell"], False):
        return "shell=True"
    if name == "torch.load" and not is_literal(given.get("weights_only"), True):
        return "torch.load"
    if name in ("yaml.load", "yaml.load_all"):
        loader = call.args[1] if len(call.args) > 1 else given.get("Loader")
        return None if loader and ast.unparse(loader).endswith(("SafeLoader", "BaseLoader")) else "yaml.load"
    pickles = call.args[2] if name == "numpy.load" and len(call.args) > 2 else given.get("allow_pickle")
    if pickles is not None and not is_literal(pickles, False):
        return "allow_pickle"
    if method in ("extractall", "unpack_archive") and not is_literal(given.get("filter"), "data"):
        return method
    if name in ("importlib.import_module", "import_module") and not names_a_package(call.args[0]):
        return "import_module"
    if "trust_remote_code" in given and not is_literal(given["trust_remote_code"], False):
        return "trust_remote_code"
    return None


def found_in(text: str) -> list[str]:
    """The dangerous calls in a program, by names that do not depend on how they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old programs of fairseq, about their strings
        nodes = list(ast.walk(ast.parse(text)))
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    calls = [node for node in nodes if isinstance(node, ast.Call)]
    dangers = [danger(call, full(call.func)) for call in calls]
    # A function that is passed on is called elsewhere, with arguments that are not known here.
    called = {id(call.func) for call in calls}
    others = [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in called]
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    handed_on = [name for node in others if (name := full(node)) in HANDED_ON and name not in own]
    return [each for each in dangers if each] + handed_on


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.system('x')", ["os.system"]),
        ("from os import system as run\nrun(x)", ["os.system"]),
        ("import subprocess as s\ns.run(x, check=True, shell=True)", ["shell=True"]),
        ("from subprocess import call\ncall(x, shell=y)\ncall(x, shell=False)", ["shell=True"]),
        ("import torch as th\nth.load(x, 'cpu')\nth.load(x, weights_only=True)", ["torch.load"]),
        ("import torch\ntorch.load(weights_only=False, f=x)\nmap(torch.load, x)", ["torch.load", "torch.load"]),
        ("from pickle import loads as f\nf(x)\nimport _pickle as p\np.loads(x)", ["pickle.loads", "_pickle.loads"]),
        ("import torch\nload = torch.load\nload(x)\nrun = eval", ["torch.load", "eval"]),
        ("import yaml\nyaml.load(x)\nyaml.load(x, Loader=yaml.SafeLoader)\nyaml.safe_load(x)", ["yaml.load"]),
        ("import numpy as np\nnp.load(x)\nnp.load(x, allow_pickle=True)\nnp.load(x, None, True)", ["allow_pickle"] * 2),
        ("a.extractall(x)\na.extractall(x, filter='data')\na.extractall(x, filter='tar')", ["extractall"] * 2),
        ("eval(x)\nmodel.eval()\nexec(x)\n__import__(x)", ["eval", "exec", "__import__"]),
        ("import importlib as i\ni.import_module(x)\ni.import_module('a.' + x)\ni.import_module(f'a.{x}')",
         ["import_module"]),
        ("A.from_pretrained(x, trust_remote_code=True)", ["trust_remote_code"]),
    ],
)  # fmt: skip
def test_the_search_finds(text, found):
    assert found_in(text) == found


def search(folders):
    """The calls found in folders, file by file, as `LISTED` has them."""
    found = []
    for name in folders:
        for path in sorted(FOLDERS[name].rglob("*.py")):
            if calls := found_in(path.read_text(encoding="utf-8")):
                place = path.relative_to(FOLDERS[name]).as_posix()
                found.append(f"{name}/{place}: {', '.join(sorted(calls))}")
    return found


def listed(folders):
    return [place for place in LISTED if place.partition("/")[0] in folders]


def test_dangerous_calls_of_this_project_are_listed():
    own = FOLDERS.keys() - {"fairseq", "fairseq_cli"}
    assert sorted(search(own)) == sorted(listed(own)) and not found_in((ROOT / "setup.py").read_text())


def test_dangerous_calls_of_fairseq_are_listed(our_fairseq):
    assert sorted(search(["fairseq", "fairseq_cli"])) == sorted(listed(["fairseq", "fairseq_cli"]))

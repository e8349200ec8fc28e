"""Patches an unpacked source of fairseq 0.12.2, by `patches/*.patch` and the whole files in `patches/files/`."""

import ast
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "patches"
FILES = PATCHES / "files"
VERSION = (FILES / "fairseq/version.txt").read_text(encoding="utf-8").strip()
# Modules of the plugin that fairseq gets copies of. It cannot import them: the plugin works without fairseq, this
# fairseq without the plugin, and --user-dir refuses a package that something has imported before.
_FILES = "bounded_loading checkpoint_pickles digests integrity text_files zip_records"
SHARED = [*(f"files/{name}.py" for name in _FILES.split()), "invalid_input.py", "model_sizes.py", "suggestions.py"]


class BuildError(Exception):
    """Something that ends the build; its text is for the person who started it."""


def apply_patches(source: Path) -> None:
    """Patches the source in a folder; raises `BuildError` if it is another one, and leaves that half patched."""
    make_calls_safe(source)
    for patch in in_order():
        git("apply", str(patch), folder=source, doing=f"apply {patch.name} to the source of fairseq 0.12.2")
    shutil.copytree(FILES, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHARED:
        text = (ROOT / "fairseq_fastweights" / name).read_text(encoding="utf-8")
        # fairseq has them all in one folder.
        text = re.sub(r"^from \.\.", "from .", text, flags=re.MULTILINE)
        (source / "fairseq" / Path(name).name).write_text(text, encoding="utf-8")


def make_calls_safe(source: Path) -> None:
    """Replaces calls that would run code out of a file or a setting, in all modules; patches are for the result."""
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (safe := with_safe_calls(text)) != text:
            path.write_text(safe, encoding="utf-8")


def with_safe_calls(text: str) -> str:
    """A module with `literal` for `eval`, no shell for `os.system`, `read_yaml`, and tensors alone loaded."""
    code = text.encode()
    starts = [0, *itertools.accumulate(map(len, code.splitlines(keepends=True)))]
    ends = []  # of calls, without their last parenthesis
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        is_load = ast.unparse(call.func) in ("torch.load", "th.load")
        if is_load and not any(word.arg == "weights_only" for word in call.keywords):
            assert call.end_lineno and call.end_col_offset
            ends.append(starts[call.end_lineno - 1] + call.end_col_offset - 1)
    for end in sorted(ends, reverse=True):  # from the last, so that the others stay where they are
        comma = b"" if code[:end].rstrip().endswith(b",") else b","
        code = code[:end] + comma + b" weights_only=True" + code[end:]
    safe = re.sub(r", Loader=yaml\.\w+\)", ")", code.decode())
    calls = {r"(?<![\w.])eval\(": "literal", r"\bos\.system\(": "run_without_shell"}
    calls |= {r"\byaml\.(?:safe_)?load\(": "read_yaml"}
    for pattern, name in calls.items():
        safe, count = re.subn(pattern, f"{name}(", safe)
        if count:
            first_import = re.compile("^(?=(?:import|from) (?!__future__))", re.MULTILINE)
            safe = first_import.sub(f"from fairseq.settings import {name}\n", safe, count=1)
    return safe


def in_order() -> list[Path]:
    """All patches; each is for a source that has those before it."""
    return sorted(PATCHES.glob("*.patch"))


def git(*arguments: str, folder: Path, doing: str) -> str:
    """Runs git in a folder, whatever its settings and the repository around it, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    result = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, encoding="utf-8")
    if result.returncode:
        lines = re.findall("^(?:error|fatal): (.*)", result.stderr, re.MULTILINE)
        raise BuildError(f"cannot {doing}: {lines[0] if lines else result.stderr.strip()}")
    return result.stdout

"""Pages are true: links lead somewhere, commands and paths are there, examples run."""

import ast
import doctest
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import site_pages
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from fairseq_fastweights.ops import RULES
from tests.conftest import SMALL_MODEL, TASK, import_plugin

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "native", "cpu", "cuda", "docs", "examples", "fairseq_fastweights", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "fairseq_fastweights").rglob("*.py")
    if re.search(r">>> (?!.*\+SKIP)", path.read_text(encoding="utf-8"))
)
REFERENCE = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_are_true(module: str) -> None:
    found = doctest.testmod(import_module(module.removesuffix(".__init__")), extraglobs={"torch": torch})
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_examples_and_describes_its_arguments(name: str) -> None:
    module, _, member = name.rpartition(".")
    shown = getattr(import_module(module), member)
    # The plural is the name that the site's reader of docstrings knows.
    found = re.search(r"^ *Examples:\n *>>> ", shown.__doc__, flags=re.MULTILINE)
    assert found or (isinstance(shown, type) and issubclass(shown, Exception))
    assert not re.search(r"^ *others: as", shown.__doc__, flags=re.MULTILINE)
    for argument in () if isinstance(shown, type) else inspect.signature(shown).parameters:
        assert re.search(rf"^ *\**{argument}: ", shown.__doc__, flags=re.MULTILINE), argument


def test_the_reference_has_all_public_operations_maps_and_classes() -> None:
    shown = {name.rpartition(".")[2] for name in REFERENCE}
    maps = import_module("fairseq_fastweights.mixers.feature_maps").FEATURE_MAPS.values()
    mixers = import_module("fairseq_fastweights.mixers.registry").MIXERS.values()
    operations = {
        name for name in import_module("fairseq_fastweights.ops").__all__ if name.endswith(("_rule", "_scan"))
    }
    models = set(import_module("fairseq_fastweights.huggingface").__all__)
    assert operations | models | {x.__name__ for x in maps} | {kind._made.__name__ for kind in mixers} <= shown


def test_the_guide_agrees_with_the_records_of_rules_and_mixers() -> None:
    options = import_module("fairseq_fastweights.models.description")
    build_mixer = import_module("fairseq_fastweights.mixers.registry").build_mixer
    sizes = {"num_heads": 2, "fast_weight_heads": 2, "max_positions": 9}
    layers = {name: build_mixer(name, 16, sizes) for name in options.MIXERS}
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{name}`" for name in options.MEMORIES) in page
    for name, kind in options.MIXERS.items():
        said = f"{RULES[name].equation} | {RULES[name].source}" if name in UPDATE_RULES else ""
        normalization = options.write_normalization(kind.normalization)
        papers = f"`{kind.feature_map}` | `{normalization}` |" if name in options.MEMORIES else ""
        assert re.search(rf"^\| `{name}` \| {re.escape(said)}.*{re.escape(papers)}$", page, flags=re.MULTILINE), name
    reference = (ROOT / "docs" / "api" / "ops.md").read_text(encoding="utf-8")
    for name, rule in RULES.items():
        function = f"{name.replace('-', '_')}_rule"
        assert not hasattr(ops, function) or f"| `{function}` | {rule.equation} | {rule.source} |\n" in reference
    # The abilities of mixers follow from the classes.
    for attribute, value, said in (
        ("carries", False, "- All but (.*) can carry their state"),
        ("takes_starts", False, "- All but (.*) work with `--separate-documents`"),
        ("needs_positions", True, "- (.*) do not see how far apart words are"),
        ("takes_attention", False, "- All but (.*) can start from a trained model's attention"),
    ):
        able = {name for name, layer in layers.items() if getattr(layer, attribute) is value}
        assert able == set(re.findall(r"`(.*?)`", re.search(said, page)[1]))  # type: ignore[index]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere_and_nothing_is_left_to_be_filled_in(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z_]+@|\bTODO\b|\bFIXME\b|\bTBD\b", written)
    text = re.sub(r"```.*?```", "", written, flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert "://" in target or (file.exists() and (not anchor or anchor in anchors(file))), target
    # Every row of a table has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\n?)+", re.sub(r"\\\|", "", plain), flags=re.MULTILINE):
        assert len({len(line.split("|")) for line in table.splitlines()}) == 1, table


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_all_pages_of_a_git_checkout_are_looked_at() -> None:
    command = ["git", "ls-files", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert {ROOT / name for name in listed} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_programs_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*(?: [a-z][\w-]*)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    known = {word for line in targets for word in line.split()}
    assert {word.rstrip(".") for word in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, flags=re.MULTILINE)} <= known
    files = re.findall(r"(?<![\w/.-])(?:benchmarks|examples|tools)/[\w/]+\.(?:py|sh)\b", text)
    assert [file for file in files if not (ROOT / file).is_file()] == []
    modules = re.findall(r"python -m (fairseq_fastweights[\w.]*)", text)
    assert [
        x
        for x in modules
        if not list(ROOT.glob(f"{x.replace('.', '/')}.py")) + list(ROOT.glob(f"{x.replace('.', '/')}/__main__.py"))
    ] == []


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file of it imports, anywhere within."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fairseq_fastweights":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("fairseq_fastweights."):
            yield str(node.module).split(".")[1]


def test_folders_import_from_those_further_down_the_list_alone() -> None:
    """The list of CONTRIBUTING, which has all folders and files of the package."""
    rows = re.findall(r"^\| `fairseq_fastweights/(.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    place = {name: row for row, names in enumerate(rows) for name in re.findall(r"(\w+)(?:/|\.py)(?=`)", names)}
    for path in sorted((ROOT / "fairseq_fastweights").rglob("*.py")):
        name = path.relative_to(ROOT / "fairseq_fastweights").parts[0].removesuffix(".py")
        for other in set(imported(path)) if name != "__init__" else ():
            assert place[name] <= place[other], f"{path}: {other}"


def figure(name: str) -> list[tuple[str, str]]:
    """The files and functions of a figure of CONTRIBUTING, from top to bottom."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"<!-- the way of {name}:")[2]
    rows = re.findall(r"^  ([\w/]+\.py) +([\w.]+)", text.split("```")[1], flags=re.MULTILINE)
    assert len(rows) == text.split("```")[1].count("\n  ")
    return rows


def calls_during(run: Callable[[], object]) -> Iterator[tuple[str, str]]:
    """The files and functions of the package that run, in their order."""
    package, calls = f"{ROOT / 'fairseq_fastweights'}/", list[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append((frame.f_code.co_filename.removeprefix(package), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return iter(calls)


def test_the_ways_of_a_tensor_and_of_an_option_are_as_drawn(tmp_path: Path) -> None:
    """Each function of CONTRIBUTING's two figures runs, and in that order."""
    from fairseq import options, tasks
    from fairseq.data import Dictionary

    def build() -> None:
        words = [str(tmp_path), *TASK, *SMALL_MODEL, "--mixers", "gated-delta"]
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        tasks.setup_task(args).build_model(args)

    import_plugin()
    Dictionary().save(str(tmp_path / "dict.txt"))
    layer, x = import_module("fairseq_fastweights.mixers.gated_delta").GatedDelta(64, 4), torch.randn(32, 2, 64)
    layer(x)
    ways = {"a tensor": lambda: layer(x), "an option": build}
    if import_module("fairseq_fastweights.ops.backends").why_not("cpu", torch.float32):
        del ways["a tensor"]  # without kernels it goes another way
    for name, run in ways.items():
        drawn, called = figure(name), calls_during(run)
        assert len(drawn) > 8
        for file, function in drawn:
            assert (file, function.rpartition(".")[2]) in called, (name, file, function)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of fairseq's that a page shows in full, with its variables in their places."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        VARIABLES.update(re.findall(r'^(\w+)="(.*)"$', block, flags=re.MULTILINE))
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"fairseq-(preprocess|train|eval-lm|interactive|generate)\)? (.*)", line)
            if found and "..." not in line and "my_rules" not in line:  # that page is run by a test of its own
                filled = re.sub(r"\$(\w+)", lambda name: VARIABLES[name[1]], found[2])
                yield (
                    found[1],
                    shlex.split(filled.replace("$(cat qwen/options.txt)", "--arch fast_weight_lm"), comments=True),
                )


VARIABLES: dict[str, str] = {}
SHOWN = [
    pytest.param(name, words, id=f"{page.stem}-{number}-{name}")
    for page in GUIDES
    for number, (name, words) in enumerate(commands(page))
]


@pytest.mark.parametrize(("name", "words"), SHOWN)
def test_fairseq_takes_the_commands_as_the_pages_show_them(name: str, words: list[str], monkeypatch: Any) -> None:
    from fairseq import options

    monkeypatch.chdir(ROOT)  # where --user-dir fairseq_fastweights is
    import_plugin()
    makers = {"preprocess": "preprocessing", "train": "training", "eval-lm": "eval_lm", "generate": "generation"}
    maker = getattr(options, f"get_{makers.get(name, 'interactive_generation')}_parser")
    parser = maker()
    if name == "preprocess":
        assert parser.parse_args(words)
    else:
        assert options.parse_args_and_arch(parser, words)


# Files that a command or a program in the pages writes, or that they tell to put there.
WRITES = re.compile(
    r"""--(?:destdir|save-dir|out|tensorboard-logdir|include_path)[ =](\S+) |
    --(?:\w+pref|user-dir|config-dir)[ ](\S+) | (?:to|from)-huggingface[ ]\S+[ ](\S+) |
    prepare\.sh[ ](\S+)(?:[ ]\S+[ ](\S+))? |
    packed_documents\.py[ ]\S+[ ](\S+) |
    mkdir[ ](?:-p[ ])?(\S+) | [^->=]>[ ]?([\w./-]+) | ^\#[ ]([\w-]+/[\w.-]+\.(?:py|yaml))$ |
    (?:save_pretrained|TrainingArguments|open|Path)\([^()\n]*?"([\w./-]+)" """,
    re.VERBOSE | re.MULTILINE,
)


def test_git_and_lint_ignore_files_that_the_pages_make() -> None:
    """A clone in which all commands were typed looks as before to git, and `make lint` to ruff, which asks git."""
    pages = [*GUIDES, *(page for page in PAGES if page.is_relative_to(ROOT / "examples"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = "\n".join(re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    names = {name.removeprefix("$PWD/") for found in WRITES.findall(blocks) for name in found}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("no checkout of git")
    own = {name.partition("/")[0] for name in listed.splitlines()}
    made = sorted(x for x in names if re.fullmatch(r"[a-z][\w./-]*", x) and x.partition("/")[0] not in own)
    assert {"train.txt", "data-bin/lm", "checkpoints/lm", "hf-lm", "my_rules", "my_rules/oja.py"} <= set(made)
    folders = [name if "." in Path(name).name else f"{name}/" for name in made]
    ignored = subprocess.run(["git", "check-ignore", *folders], cwd=ROOT, capture_output=True, text=True).stdout
    assert sorted(set(folders) - set(ignored.split())) == []
    assert "respect-gitignore" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # it is ruff's default


def test_the_readme_is_a_page_and_its_example_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 112
    mixers = import_module("fairseq_fastweights.mixers.registry").MIXERS
    assert {
        name for name, kind in mixers.items() if f"`{name}`" not in text or kind._made.__name__ not in text
    } == set()
    [example] = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (1000, 2, 512) and names["next_out"].shape == (1, 2, 512)


def test_the_dockerfile_types_the_commands_of_the_readme() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 12
    typed = "\n".join(re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    assert "RUN make setup" in lines and lines[-1] == 'CMD ["make", "demo"]'
    assert {"make setup", "make demo"} <= set(re.findall(r"^(make \w+)", typed, re.MULTILINE))
    # What the README asks for: Python, git, make and a C++ compiler; and its wheels of torch for CPUs.
    assert re.search(r"^FROM python:3\.1[0-3]$", "\n".join(lines), re.MULTILINE)
    assert any(re.search(r"apt-get install --yes git make g\+\+ ", line) for line in lines)
    [environment] = [line.split()[1:] for line in lines if line.startswith("ENV ")]
    assert environment[0] in typed and environment[1] == "FASTWEIGHTS_BUILD_ISA=all"
    kept_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".venv", "build", "dist", "site", "fairseq_fastweights/_native_*"} <= set(kept_out)


def test_the_example_that_averages_checkpoints_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    [example] = [
        x for x in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL) if "average" in x
    ]
    folder = tmp_path / "checkpoints" / "lm"
    folder.mkdir(parents=True)
    for number, value in ((1, 1.0), (2, 2.0), (3, 6.0)):
        model = {"weight": torch.full((2,), value), "steps": torch.tensor(number)}
        torch.save({"model": model, "cfg": {"number": number}}, folder / f"checkpoint{number}.pt")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    average = torch.load(folder / "average.pt")
    assert average["model"]["weight"].tolist() == [3.0, 3.0] and average["model"]["steps"] == 3
    assert average["cfg"] == {"number": 3}


def test_the_version_is_the_same_wherever_it_stands() -> None:
    stands = {"setup.py": r'version="(.+)",', "CITATION.cff": r"version: (.+)", "CHANGELOG.md": r"## ([\d.]+)"}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in stands}
    found = [re.findall(rf"^ *{pattern}$", texts[file], flags=re.MULTILINE)[0] for file, pattern in stands.items()]
    assert len(set(found)) == 1, found


@pytest.mark.parametrize("page", site_pages.pages_with_tables(), ids=page_name)
def test_the_tables_of_options_and_names_are_those_of_the_code(page: Path) -> None:
    """`python tools/site_pages.py` makes them anew."""
    import_plugin()
    text = page.read_text(encoding="utf-8")
    assert "\n| --- |" in text and text == site_pages.with_tables(text)


def test_a_mixer_of_the_registry_gets_its_place_in_the_reference() -> None:
    text = (ROOT / "docs" / "api" / "mixers.md").read_text(encoding="utf-8")
    lacking = "".join(line for line in text.splitlines(keepends=True) if "Mamba" not in line)
    made = site_pages.with_tables(lacking)
    assert (
        "Mamba" not in lacking
        and made.count("| [`Mamba`](") == made.count("\n::: fairseq_fastweights.mixers.mamba.Mamba\n") == 1
    )
    assert sorted(made.splitlines()) == sorted(text.splitlines())


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    """Each part of a quoted message between its `...` stands in a string of the package, the tools or fairseq."""
    import fairseq
    import fairseq_cli

    library = Path(fairseq.__file__).parent
    files = [ROOT / "setup.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "fairseq_fastweights").rglob("*.py")]
    folders = (library, library / "optim", library / "distributed", Path(fairseq_cli.__file__).parent)
    files += [path for folder in folders for path in folder.glob("*.py")]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    strings = {
        x.value for tree in trees for x in ast.walk(tree) if isinstance(x, ast.Constant) and type(x.value) is str
    }
    told = "\n".join(strings)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\| --- .*\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    messages = [message for table in tables for message in re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)]
    assert len(messages) == sum(table.count("\n") for table in tables) > 40
    assert all(max(len(part.strip(";:,(). ")) for part in x.split("...")) > 8 for x in messages)
    # The command line puts the option's name before the message.
    parts = {part.strip() for x in messages for part in re.sub(r"^argument --?[\w-]+:(?: is)?", "", x).split("...")}
    lacking = sorted(part for part in parts if part.strip(";:,(). ") not in told)
    assert not lacking, "\n".join(lacking)


def test_the_page_for_users_of_other_libraries_names_what_is_there() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["out"].shape == (1, 8, 3, 5) and names["y"].shape == (2, 10, 64)
    named = re.findall(r"`ops\.(\w+)", page)
    assert len(named) >= 5 and all(hasattr(ops, name) for name in named)
    classes = re.findall(r"`(\w+)\.([A-Z]\w+)`, `--mixers ([\w-]+)`", page)
    mixers = import_module("fairseq_fastweights.mixers.registry").MIXERS
    assert len(classes) == 6 and set(re.findall(r"--mixers ([\w-]+)", page)) <= {*mixers}
    for module, name, mixer in classes:
        assert mixers[mixer]._made is getattr(import_module(f"fairseq_fastweights.mixers.{module}"), name)

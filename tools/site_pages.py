"""A hook of MkDocs: brings pages from outside docs/ into the site, and makes tables and derivations from the code.

    python tools/site_pages.py    writes the tables of options, architectures and public names into docs/

mkdocs.yml names this file. Links are written as they work in the repository; here they become the site's. A link to a
source file or a record, which the site does not have, becomes its name.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import partial
from html import escape, unescape
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {path.parent.name: path for path in sorted((ROOT / "examples").glob("*/README.md"))}
SITE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "native/README.md": "kernels/shared.md",
    "cpu/README.md": "kernels/cpu.md",
    "cuda/README.md": "kernels/cuda.md",
    **{f"examples/{name}/README.md": f"experiments/{name}.md" for name in EXAMPLES},
    **{f"benchmarks/results/{path.name}": f"{path.name}" for path in (ROOT / "benchmarks" / "results").glob("*.png")},
}
"""Files outside docs/, by their path in the repository, and their place in the site."""

PHONE_LINE = 38
"""Characters of code in a line of a phone of 390 pixels."""

REPOSITORY = {place: path for path, place in SITE.items()}


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/."""
    from mkdocs.structure.files import File

    for path, place in SITE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Makes the parts that follow from the code, and the site's links of the repository's."""
    place = page.file.src_uri
    page.meta["tags"] = config.extra["searched_as"].get(place, [])  # the search puts pages with these words first
    made = re.sub(r"^<!-- derivations -->$", lambda _: derivations(), markdown, flags=re.MULTILINE)
    made = re.sub(r"^<!--\n(:::.*?)\n-->$", r"\1", made, flags=re.MULTILINE | re.DOTALL)  # where code hosts show tables
    return outside_of_code(made, lambda text: site_links(text, place, config.repo_url))


def on_page_content(html: str, **_: Any) -> str:
    """Marks inline code that is too long for one line of a phone, and the words within that stay in one piece."""

    def marked(found: re.Match[str]) -> str:
        if len(unescape(found[1])) <= PHONE_LINE:
            return found[0]
        # A path that is longer than a line may break behind its marks.
        words = (
            re.sub(r"[^/.,_=|:]+[/.,_=|:]*", r"<span>\g<0></span><wbr>", word)
            if len(unescape(word)) > PHONE_LINE
            else f"<span>{word}</span>"
            for word in found[1].split(" ")
        )
        return f'<code class="long">{" ".join(words)}</code>'

    return re.sub(r"(?<!<pre>)(?<!</span>)<code>([^<]*)</code>", marked, html)


def outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Changes all but blocks of code."""
    # With a group in its pattern, split() also returns the separators, at odd places.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def site_links(text: str, place: str, repository: str = "") -> str:
    """Links between files of the repository as links between pages of the site.

    Args:
        text: Markdown without blocks of code.
        place: the page's own in the site.
        repository: the published repository, to which links to files outside the site lead; without it these files
            are named only.
    """
    here = Path(REPOSITORY.get(place, f"docs/{place}")).parent

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if "://" in target or not target:
            return found[0]
        path = os.path.normpath(here / target)
        if path in SITE or path.startswith("docs/"):
            there = SITE.get(path, path.removeprefix("docs/"))
            target = os.path.relpath(there, Path(place).parent) + (f"#{anchor}" if anchor else "")
            return f"{found['picture']}[{found['text']}]({target})"
        if not (ROOT / path).exists():
            return found[0]  # a broken link, which MkDocs tells
        if repository:
            return f"[{found['text']}]({repository.rstrip('/')}/blob/HEAD/{path})"
        return found["text"] if Path(path).name in found["text"] else f"{found['text']} (`{path}`)"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, text)


PURPOSES = {
    "mixers": "mixers update_rule softmax_attention_layers",
    "features and gates": (
        "feature_map feature_dim dpfp_nu favor_features normalization scale_read_out query_key_norm_eps "
        "retention_rms_norm retention_eps softmax_output_gate softmax_joint_norm _conv _negative_eigenvalues _eps "
        "delta_net_gate _gate_rank kimi_delta_gate_bias delta_product_writes gla_rank mamba_dt_rank mamba_conv"
    ),
    "heads and state": (
        "fast_weight_heads kv_heads head_dim _key_heads _key_dim _value_dim _kv_heads retention_value_dim mamba_state "
        "mamba_expansion gla_key_dim"
    ),
    "context": (
        "rotary_dim rotary_base rotary_scaling local_window window_sum_window linformer_slots abc_slots "
        "transformer_xl_memory transformer_xl_clamp_len transformer_xl_same_length carry_over_state "
        "reset_state_probability text_streams separate_documents"
    ),
    "architecture": (
        "rms_norm_eps zero_centered_norms output_norm_layers swiglu parallel_residual no_attention_bias "
        "projection_bias _bias mamba_bias init_std square_projections adaptive_softmax_bias mask_special_symbols"
    ),
    "conversion": "transfer_from transfer freeze unfreeze_threshold unfreeze_patience unfreeze_interval dry_run",
    "speed": "fast_weight_backend compile no_cuda_graphs cuda_graphs",
}
"""By purpose, the options of language models. `_conv` is that of each mixer that has no entry of its own for it."""


def own_option(name: str) -> tuple[str, str]:
    """A mixer and the name of its own option `--<mixer>-<name>`; two times "" for any other option."""
    from fairseq_fastweights.mixers.registry import MIXERS, option_name

    found = ((mixer, own) for mixer, kind in MIXERS.items() for own in kind.options if option_name(mixer, own) == name)
    return next(found, ("", ""))


def options_for(purpose: str) -> str:
    """Makes the table of the options for a purpose, with the mixers that read each; options in no table are an error.

    Options of several mixers that say the same are one row.
    """
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig
    from fairseq.tasks.language_modeling import LanguageModelingConfig

    from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModelConfig
    from fairseq_fastweights.tasks.fast_weight_language_modeling import FastWeightLanguageModelingConfig

    of_model = added_fields(FastWeightLanguageModelConfig, TransformerLanguageModelConfig)
    of_task = added_fields(FastWeightLanguageModelingConfig, LanguageModelingConfig)
    placed = {name: place for place, names in PURPOSES.items() for name in names.split()}
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in (*of_model, *of_task):
        mixer, own = own_option(field.name)
        is_shared = bool(own) and field.name not in placed
        name = f"_{own}" if is_shared else field.name
        if field.metadata.get("help") and placed[name] == purpose:
            shown, *others = row(field)
            shown = f"`--MIXER{name.replace('_', '-')}`" if is_shared else shown
            rows.setdefault((name, shown, *others), []).extend([mixer] if mixer else readers(field.name))
    order = list(placed)
    lines = sorted(rows.items(), key=lambda line: order.index(line[0][0]))
    read = [(*cells, shown_readers(names)) for (_, *cells), names in lines]
    columns = len(OPTION_COLUMNS) if any(cells[-1] for cells in read) else len(OPTION_COLUMNS) - 1
    return table(OPTION_COLUMNS[:columns], (cells[:columns] for cells in read))


OPTION_COLUMNS = ("option", "default", "meaning", "mixers")


def readers(name: str) -> list[str]:
    """The mixers that read an option of several mixers."""
    from fairseq_fastweights.mixers.registry import MIXERS
    from fairseq_fastweights.models.description import OPTIONS_OF_MIXERS

    return [mixer for mixer, kind in MIXERS.items() if OPTIONS_OF_MIXERS.get(name) in kind.arguments(mixer)]


def shown_readers(names: list[str]) -> str:
    """Names of mixers, of which those with an update rule of the papers are "rules"."""
    from fairseq_fastweights.mixers.registry import MIXERS
    from fairseq_fastweights.mixers.update_rules import UPDATE_RULES

    if set(UPDATE_RULES) <= set(names):
        names = ["rules", *(name for name in names if name not in UPDATE_RULES)]
    lacking = [name for name in MIXERS if name not in names and name not in UPDATE_RULES]
    if len(lacking) < 7 and names[:1] == ["rules"]:
        return f"all but {', '.join(f'`{name}`' for name in lacking)}"
    return ", ".join("rules" if name == "rules" else f"`{name}`" for name in names)


def translation_model_options() -> str:
    """Makes the table of options that only translation models have, or with another help text."""
    from fairseq_fastweights.models.fast_weight_options import FastWeightOptions
    from fairseq_fastweights.models.fast_weight_transformer import FastWeightTransformerOptions

    shared = {(field.name, field.metadata.get("help")) for field in fields(FastWeightOptions)}
    own = (x for x in fields(FastWeightTransformerOptions) if (x.name, x.metadata.get("help")) not in shared)
    return table(OPTION_COLUMNS[:3], (row(field) for field in own if field.metadata.get("help")))


def options_of_language_models_alone() -> str:
    """Lists the options of language models that translation models lack."""
    from fairseq_fastweights.models.fast_weight_options import FastWeightLanguageModelOptions, FastWeightOptions

    lacking = added_fields(FastWeightLanguageModelOptions, FastWeightOptions)
    return ", ".join(f"`--{field.name.replace('_', '-')}`" for field in lacking)


def added_fields(config: Any, base: Any) -> list[Any]:
    """The fields of a dataclass that fairseq's does not have."""
    inherited = {field.name for field in fields(base)}
    return [field for field in fields(config) if field.name not in inherited]


def row(field: Any) -> tuple[str, str, str]:
    """An option as a row of a table: its name, its default, and the first sentence of its help."""
    if field.default is MISSING or field.default is None or field.default == "":
        default = ""
    elif isinstance(field.default, bool):
        default = "on" if field.default else "off"
    else:
        default = f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"
    described = re.sub(r" \(default: ([^()]*)\)$", "" if default else r" (default: \1)", str(field.metadata["help"]))
    meaning, *details = re.split(r"\. (?=[A-Z-])", described)
    if details and (said := re.search(r" \(default: .*", details[-1])) and "(default: " not in meaning:
        meaning += said[0]
    choices = [f"`{choice.value}`" for choice in field.type] if hasattr(field.type, "__members__") else []
    if choices:
        meaning = f"{re.split(': |; ', meaning)[0]}: {', '.join(choices)}"
    meaning = re.sub(r"(?<![\w`-])--[a-z][\w-]*|<\w+>", r"`\g<0>`", meaning)
    return f"`--{field.name.replace('_', '-')}`", default, meaning


def architectures() -> str:
    """Makes the table of named architectures."""
    for module in ("fast_weight_lm", "fast_weight_transformer"):
        importlib.import_module(f"fairseq_fastweights.models.{module}")
    from fairseq.models import ARCH_CONFIG_REGISTRY

    named = sorted((name, set_up) for name, set_up in ARCH_CONFIG_REGISTRY.items() if name.startswith("fast_weight_"))
    rows = ((f"`{name}`", (inspect.getdoc(set_up) or "sizes by options").split("\n")[0]) for name, set_up in named)
    return table(("`--arch`", "what it is"), rows)


def derivations() -> str:
    """Makes a section of the comment at the head of each kernel file that has equations."""
    sections = []
    for folder in ("cpu", "cuda"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_code = path.suffix in (".h", ".cuh", ".cu", ".cpp")
            lines = takewhile(
                lambda line: line.startswith("//"), path.read_text("utf-8").splitlines() if is_code else ()
            )
            comment = "\n".join(line[2:].removeprefix(" ").rstrip() for line in lines)
            if "=" in comment:
                sections.append(f"## {path.relative_to(ROOT)}\n\n{as_markdown(comment)}\n")
    return "\n".join(sections)


def as_markdown(comment: str) -> str:
    """A comment as Markdown: indented lines are equations."""
    parts: list[str] = []
    for indented, lines in groupby(comment.split("\n"), key=lambda line: line.startswith("  ")):
        text = "\n".join(lines)
        escaped = re.sub(r"([\\*_`\[\]])", r"\\\1", escape(text, quote=False))
        parts.append(f"```text\n{text}\n```" if indented else escaped)
    return "\n\n".join(parts)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def public_names(page: str) -> str:
    """Makes the table of the names that a page of the reference describes, for readers of the sources."""
    rows = []
    for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE):
        shown = importlib.import_module(name.rpartition(".")[0]).__dict__[name.rpartition(".")[2]]
        file = Path(inspect.getsourcefile(inspect.unwrap(shown)) or "").relative_to(ROOT).as_posix()
        summary = (inspect.getdoc(shown) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append((f"[`{shown.__name__}`](../../{file})", summary))
    return table(("name, and its source", "what it is"), rows)


def with_mixers(page: str) -> str:
    """The reference of mixers with the classes of the registry that it lacks; any other page as it is."""
    from fairseq_fastweights.mixers.registry import MIXERS

    if "::: fairseq_fastweights.mixers.registry." not in page:
        return page
    # Several names of the registry may make one class.
    classes = dict.fromkeys(kind._made for kind in MIXERS.values())
    lines = [f"::: {mixer.__module__}.{mixer.__qualname__}\n" for mixer in classes]
    end = page.rindex("-->")
    return page[:end] + "".join(line for line in lines if line not in page) + page[end:]


TABLES: dict[str, Callable[[str], str]] = {
    **{f"options for {purpose}": partial(lambda purpose, page: options_for(purpose), purpose) for purpose in PURPOSES},
    "options of translation models": lambda page: translation_model_options(),
    "options of language models alone": lambda page: options_of_language_models_alone(),
    "architectures": lambda page: architectures(),
    "public names": public_names,
}
"""Makes the text between the comments `<!-- NAME -->` and `<!-- /NAME -->` of a page in docs/."""


def with_tables(page: str) -> str:
    """A page with its tables as they follow from the code."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- {name} -->\n\n{TABLES[name](page)}\n\n<!-- /{name} -->"

    page = with_mixers(page)
    pattern = r"^<!-- (?P<name>[a-z ]+) -->\n.*?^<!-- /(?P=name) -->$"
    return re.sub(pattern, made, page, flags=re.MULTILINE | re.DOTALL)


def pages_with_tables() -> list[Path]:
    """Lists the pages that have such tables."""
    return [ROOT / "docs" / "options.md", *sorted((ROOT / "docs" / "api").glob("*.md"))]


def main() -> None:
    for path in pages_with_tables():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

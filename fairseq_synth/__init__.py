"""Synthesizer (arXiv 2005.00743) for fairseq: ``--user-dir "$(python -m fairseq_synth)"``.

Importing this package repairs the host where it needs it (`compat`), then registers the model and its
architectures with fairseq.
"""

from . import compat  # noqa: F401, I001  (first: what follows meets a checked and repaired host)
from . import architectures  # noqa: F401

__version__ = "0.1.0"

"""Synthesizer (arXiv 2005.00743) for fairseq: ``--user-dir "$(python -m fairseq_synth)"``.

Importing this package, or a module of it other than ``models.plugin``, changes nothing elsewhere. `register` makes it
a plugin of fairseq. With ``--user-dir`` fairseq imports ``models/``, whose plugin module calls `register`.
"""

__version__ = "1.0.0"
_registered = False


def register() -> None:
    """Registers models and architectures with fairseq, and repairs fairseq where it needs it (`host`), once.

    Raises SynthesizerError if fairseq or torch does not fit, or ``FAIRSEQ_SYNTH_NO_REPAIRS`` names no repair.
    """
    global _registered
    if _registered:
        return
    from . import host

    host.repair_fairseq()  # first: what follows meets a checked and repaired fairseq
    from . import architectures

    architectures.register()
    _registered = True

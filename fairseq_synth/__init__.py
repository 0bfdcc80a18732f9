"""Implements Synthesizer (arXiv 2005.00743) for fairseq: ``--user-dir "$(python -m fairseq_synth)"``.

Importing this package changes nothing elsewhere, and neither does importing a module of it, except for
``models.plugin``. `register` makes the package a plugin of fairseq. With ``--user-dir`` fairseq imports the modules in
``models/``, and the only one there calls `register`.
"""

__version__ = "1.0.0"


def register() -> None:
    """Registers the models and architectures with fairseq, and repairs fairseq where that is needed (see `host`).

    A second call changes nothing; both functions that are called here see to that. If modules of this package were
    reloaded in between, as in a notebook, `architectures.register` puts their new classes in place of the old ones.

    Raises SynthesizerError if fairseq or torch does not fit, or if ``FAIRSEQ_SYNTH_NO_REPAIRS`` names a repair that
    does not exist.
    """
    from . import host

    host.repair_fairseq()
    # This import has to come second: it imports the models, which need a checked and repaired fairseq.
    from . import architectures

    architectures.register()

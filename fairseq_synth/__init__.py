"""Implements Synthesizer (arXiv 2005.00743) for fairseq: ``--user-dir "$(python -m fairseq_synth)"``.

Importing this package changes nothing elsewhere, and neither does importing a module of it, except for
``models.plugin``. `register` makes the package a plugin of fairseq. With ``--user-dir`` fairseq imports the modules in
``models/``, and the only one there calls `register`.
"""

__version__ = "1.0.0"


def register() -> None:
    """Registers the models and architectures with fairseq, and repairs fairseq where that is needed (see `host`).

    A second call changes nothing. But if modules of this package were reloaded in between, as in a notebook, their new
    classes are registered in place of the old ones.

    Raises SynthesizerError if fairseq or torch does not fit, or if ``FAIRSEQ_SYNTH_NO_REPAIRS`` names a repair that
    does not exist.
    """
    from . import host

    # first, so that the import of the models meets a fairseq that is checked and repaired
    host.repair_fairseq()
    from . import architectures

    architectures.register()

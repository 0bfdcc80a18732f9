"""The one exception for a user's mistake."""


class SynthesizerError(ValueError):
    """A flag, a file or a sentence that cannot be used; its message names it and the mend.

    The command-line tools print it as one line, without a traceback (see `compat.explain`).
    """

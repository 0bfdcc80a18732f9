"""The plugin's entry: fairseq imports it for ``--user-dir``."""

from .. import register

register()

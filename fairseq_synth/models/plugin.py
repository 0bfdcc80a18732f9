"""Registers the plugin when fairseq imports this module for ``--user-dir``."""

from .. import register

register()

"""Repairs without which the plugin does not run, or computes or measures something wrong."""

from . import batches, loading, stock_layers  # noqa: F401  (each import registers its repairs)

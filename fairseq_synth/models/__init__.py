"""What fairseq imports of a ``--user-dir``: every module here, after the package."""

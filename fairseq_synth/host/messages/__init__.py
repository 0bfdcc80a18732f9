"""Explains mistakes that fairseq does not: one line that names the flag or file, before anything is lost.

The messages for errors that fairseq raises itself are in `..message_table`.
"""

from . import checkpoints, data_files, flags, generation, training  # noqa: F401  (each import registers its repairs)

"""Holds only the plugin's entry: fairseq imports every module here by itself, in any order, for a ``--user-dir``.

The models themselves are one folder up, where programs can import them without making the plugin.
"""

"""``python -m fairseq_synth`` prints this folder, for ``--user-dir``."""

import os

print(os.path.dirname(os.path.abspath(__file__)))

"""Says in one line that ``--user-dir`` names the clone instead of the plugin in it.

fairseq imports every module in the folder ``models`` of a ``--user-dir``. The plugin is the folder ``fairseq_synth``
beside this one.
"""

import sys
from pathlib import Path

clone = Path(__file__).resolve().parent.parent
sys.exit(f"fairseq_synth: error: --user-dir {clone}: is the clone; give the plugin in it, {clone / 'fairseq_synth'}")

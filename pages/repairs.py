"""Renders the bugs in fairseq that the plugin works around, as its repairs describe them."""

from typing import TYPE_CHECKING

from .markdown import markdown_table

if TYPE_CHECKING:
    from fairseq_synth.host.repairs import Repair


def load_repairs() -> dict[str, "Repair"]:
    """Returns {name: workaround} for the bugs in fairseq that the plugin works around, sorted by name."""
    # These modules import torch and fairseq, which takes seconds, and only two pages need them.
    from fairseq_synth import register
    from fairseq_synth.host.repairs import REPAIRS

    register()  # importing the plugin's repairs fills REPAIRS
    return dict(sorted(REPAIRS.items()))


def bug_table() -> str:
    """Returns a table in Markdown with the symptom of each bug, and the versions of fairseq that have it."""
    rows = []
    for name, repair in load_repairs().items():
        symptom = repair.symptom.replace("|", "\\|")  # "|" alone would end the cell
        rows.append([f"`{name}`", symptom, repair.versions])
    return markdown_table(["name", "symptom", "fairseq versions"], rows)

"""Renders the bugs of fairseq that the plugin works around, as its repairs describe them."""

from fairseq_synth import register
from fairseq_synth.host.repairs import REPAIRS, Repair

from .markdown import markdown


def load_repairs() -> dict[str, Repair]:
    """Returns the repairs by the name with which each can be switched off, sorted by that name."""
    register()  # importing the plugin's repairs fills REPAIRS
    return dict(sorted(REPAIRS.items()))


def bug_table() -> str:
    """Returns a table of all bugs in Markdown."""
    rows = []
    for name, repair in load_repairs().items():
        symptom = repair.symptom.replace("|", "\\|")
        rows.append([f"`{name}`", symptom, repair.versions])
    return markdown(["name", "symptom", "fairseq versions"], rows)

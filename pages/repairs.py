"""The bugs of fairseq that the plugin works around, as the docstrings of its repairs describe them."""

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from fairseq_synth import register
from fairseq_synth.host.repairs import REPAIRS

from .markdown import markdown


class Bug(NamedTuple):
    """A bug of fairseq that a repair works around."""

    repair: str  # the name by which the repair can be switched off
    symptom: str
    versions: str  # the versions of fairseq that have the bug


def load_bugs() -> list[Bug]:
    """Returns the bugs, sorted by the name of the repair."""
    register()  # importing the plugin fills REPAIRS
    bugs = []
    for name in sorted(REPAIRS):
        bugs.append(describe(name, REPAIRS[name]))
    return bugs


def describe(name: str, repair: Callable[[], bool]) -> Bug:
    """Reads symptom and versions from the first paragraph of a docstring, of the form "symptom (versions)"."""
    docstring = inspect.cleandoc(repair.__doc__ or "")
    first_paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = re.fullmatch(r"(?P<symptom>.*) \((?P<versions>[^()]*)\)\.", first_paragraph)
    assert match, f"{name}: its docstring must start with one sentence, 'symptom (versions).'"
    first_sentence = match["symptom"].split(". ")[0]
    return Bug(repair=name, symptom=first_sentence, versions=match["versions"])


def bug_table() -> str:
    """Returns a table of all bugs in Markdown."""
    rows = []
    for bug in load_bugs():
        symptom = bug.symptom.replace("``", "`").replace("|", "\\|")
        rows.append([f"`{bug.repair}`", symptom, bug.versions])
    return markdown(["name", "symptom", "fairseq versions"], rows)

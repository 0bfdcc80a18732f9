"""README.md and docs/: their length, links, versions and the list of repairs."""

import re

import pytest

import fairseq_synth
from fairseq_synth.host.repairs import REPAIRS
from recipes.steps import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1500


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """To files that exist, and within a page to its headings."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}, link


def test_every_page_is_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert all(f"({page})" in readme for page in PAGES if page != "README.md")


def test_every_repair_is_listed():
    page = (ROOT / "docs" / "fairseq-bugs.md").read_text()
    assert all(f"|`{name}`|" in page for name in REPAIRS)


def test_one_version():
    assert f"\nversion: {fairseq_synth.__version__}\n" in (ROOT / "CITATION.cff").read_text()

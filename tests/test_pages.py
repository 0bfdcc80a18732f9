"""pages/: tables, intervals and pictures from the files of results/."""

import re

import pytest

from fairseq_synth.inspect.drawing import stored_digest
from pages import analysis, convert, figures, pictures, records, tables
from recipes.catalog import TABLES
from recipes.steps import ROOT, UserError, dump
from scripts import make_tables

SHORT = TABLES["multi30k_cpu"]


def cell(model, seed, bleu=None, dataset="en-de", hardware="H100", **others):
    """A record of a training, of translation if it has a BLEU."""
    figures = {} if bleu is None else {"bleu": bleu, "chrf": 2 * bleu}
    curve = {"updates": [350, 700], "valid_loss": [7 - (bleu or 0) / 10, 5 - (bleu or 0) / 10]}
    record = {"dataset": dataset, "model": model, "seed": seed, "figures": figures, "signatures": {"bleu": "s"}}
    record.update(updates=7000, minutes=22, parameters=2e6 if model == "random" else 1e6, curve=curve, command="")
    return {**record, "versions": {"torch": "2"}, "hardware": hardware, "commit": "c", **others}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes records into a results/ of the test's own."""
    monkeypatch.setattr(records, "ROOT", tmp_path)

    def to(folder, *found):
        for number, record in enumerate(found):
            dump(tmp_path / "results" / folder / f"{record['model']}-{record['seed']}-{number}.json", record)

    return to


@pytest.fixture
def results(write):
    """A Transformer in three runs, and models that lie 2.5, 3, 3.5 above; 0.5 above and below; 5 below in one run."""
    bleus = {"transformer": (31, 32, 33), "random": (33.5, 35, 36.5), "dense": (31.5, 31.5), "fixed_random": (26,)}
    found = [cell(model, n, bleu) for model, some in bleus.items() for n, bleu in enumerate(some, 1)]
    write("multi30k_cpu/gpu", *found)
    return write


def found(figure="bleu"):
    rows = records.rows_of(SHORT, SHORT.columns[0], records.load_cells("multi30k_cpu"))
    return records.differences(SHORT, rows, figure)


def test_intervals_of_known_values(results):
    """9 runs, 3 degrees of freedom beside the means of models and seeds; the rest has a variance of 0.7708 / 3.

    t(3) at 1 - 0.05 / 6 is 4.857, so that a single run has ± 4.857 × root(2 × 0.2569) = 3.48.
    """
    cells = {model: difference.cell() for model, difference in found().items()}
    assert cells == {"random": "**+3.00 ± 2.01**", "dense": "+0.00 ± 2.46", "fixed_random": "**-5.00 ± 3.48**"}
    assert found("valid_loss")["random"].mean == pytest.approx(-0.3)
    assert found("chrf")["random"].mean == 6


def test_single_runs_have_no_interval(write):
    write("multi30k_cpu/gpu", cell("transformer", 1, 30))
    assert list(pictures.of_tables()) == []
    write("multi30k_cpu/gpu", cell("random", 1, 29.996))
    assert found()["random"].cell() == "+0.00" and not found()["random"].excludes_zero
    assert "minus" not in tables.results("multi30k_cpu", "en-de")  # one run is no difference to be told


def test_what_the_pages_have_not(results):
    """A round trip that loses something, a model beside the rows of its table, and what did not run."""
    figures = {"bleu": 45, "chrf": 66, "round_trip": 99.93}
    results("multi30k_cpu/gpu", cell("dynamicconv", 1, figures=figures), cell("relative_random_vanilla_sum", 1, 45))
    text = tables.results("multi30k_cpu", "en-de")
    assert "|`dynamicconv`|1.00M|45.00|**+14.00 ± " in text and "A perfect translation would score BLEU 99.93." in text
    assert "|`relative_random_vanilla_sum` †|" in text and "† [not the paper's](deviations.md#" in text
    assert "`dense_vanilla`" in re.search("Not run yet: (.*)", text)[1] and "|`dense_vanilla`|" not in text
    assert "En-De" in tables.quality() and "En-Fr" not in tables.quality()
    assert "dynamicconv" in str([picture.panels for picture in pictures.of_tables()])


def test_what_nobody_has_run(write):
    text = tables.results("table7")
    assert text.splitlines()[0] == "|model|AG News, paper|IMDb, paper|steps/s, paper|"
    assert "Nobody has run `scripts/reproduce.sh table7 --dataset DATASET --variant MODEL --seed N` yet." in text
    assert tables.results("multi30k_cpu", "en-fr").startswith("Nobody has run ")
    assert list(pictures.choice()) == [] and list(pictures.of_tables()) == []


def test_several_figures_and_one_that_is_missing(write):
    """In one cell; the first is compared. Without BLEU nothing is said of a perfect translation."""
    signatures = {"meteor": "METEOR|no Java", "rougeL": "ROUGE-L|no text"}
    for model, some in {"transformer": (8, 9), "dense": (10, 11.5), "random": (None,)}.items():
        for seed, rouge in enumerate(some, 1):
            figures = {"bleu4": 1.0, "rougeL": rouge, "meteor": None, "cider": 3.0, "round_trip": 99.0}
            more = {"figures": figures, "signatures": signatures}
            write(
                "dailydialog_cpu/cpu", cell(model, seed, dataset="dailydialog", hardware="a CPU, 1 thread(s)", **more)
            )
    text = tables.results("dailydialog_cpu")
    assert "|1.00 ± 0.00 (2) / 10.75 ± 1.06 (2) / no Java / 3.00 ± 0.00 (2)|+2.25 ± " in text
    assert "|minus the Transformer, ROUGE-L|" in text and "perfect translation" not in text


def test_pictures(results, tmp_path):
    """Drawn once, and again when the results change; --check draws nothing."""
    names = {"multi30k_cpu-en-de-valid-loss.png", "six-kinds-of-s.png", "which-one.png"}
    assert {p.name for p in pictures.render(check=True, folder=tmp_path)} == names and not list(tmp_path.glob("*.png"))
    assert {p.name for p in pictures.render(check=False, folder=tmp_path)} == names
    assert pictures.render(check=True, folder=tmp_path) == []
    assert pictures.rounds(records.Speed(1.5, 1.25, 2)) == [[0.25], [0.5]] and stored_digest(tmp_path / "which-one.png")
    results("multi30k_cpu/gpu", cell("factorized_dense", 1, 20))
    assert len(pictures.render(check=True, folder=tmp_path)) == 2


def test_no_two_lines_are_alike(results):
    assert "fill_between" in str(next(pictures.of_tables()))  # the band over runs, of few lines
    results("multi30k_cpu/gpu", *(cell(model, 1, 35) for model in SHORT.models()))
    (panel,) = next(p for p in pictures.of_tables() if p.name == "multi30k_cpu-en-de-valid-loss.png").panels
    colors = [options["color"] for call, _, options in panel.calls if call == "plot"]
    assert len(colors) == len({*colors}) == len(SHORT.models()) - 1 and "fill_between" not in str(panel)


@pytest.mark.parametrize("end, part", [("<!-- end -->\n", "names no table"), ("", "<!-- end")])
def test_the_pages_blocks(end, part, monkeypatch, tmp_path):
    """Each name is a table or a block, and each block is closed."""
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"<!-- results: x -->\n{end}")
    with pytest.raises(UserError, match=part):
        make_tables.rendered()


def test_the_pages_are_what_results_say():
    """Every table in README.md and docs/, and every picture."""
    for page, text in make_tables.rendered().items():
        assert page.read_text(encoding="utf-8") == text, page
    assert pictures.render(check=True) == []


def test_conversions_are_ordered_by_updates(monkeypatch):
    load, before = records.load, convert.table("multi30k_cpu")
    monkeypatch.setattr(records, "load", lambda *where: [{**r, "runs": r["runs"][::-1]} for r in load(*where)])
    assert convert.table("multi30k_cpu") == before


def test_every_picture_is_on_a_page_and_drawn():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    drawn = [pictures.kinds(), *pictures.choice(), *pictures.of_speed(), *pictures.of_tables(), *analysis.pictures()]
    assert {picture.name for picture in drawn} == set(re.findall(r"([\w-]+\.png)\)", pages))
    assert {path.name for path in (ROOT / "docs").glob("*.png")} == {picture.name for picture in drawn}


# ---- figures in sentences


def figure(words, text=""):
    return f"about <!-- figure: {words} -->{text}<!-- end --> times"


@pytest.mark.parametrize(
    "words, text",
    [
        ("lead multi30k_cpu en-de bleu random", "3.0 ± 2.0"),
        ("lead multi30k_cpu en-de valid_loss random", "0.30 ± 0.20"),  # lower is better
        ("lead multi30k_cpu en-de chrf random", "6.0 ± 4.0"),
        ("deficit multi30k_cpu en-de bleu fixed_random", "5.0 ± 3.5"),
        ("score multi30k_cpu en-de bleu transformer", "32.0"),
        ("ahead multi30k_cpu en-de bleu", "`random`"),
        ("behind multi30k_cpu en-de bleu", "`fixed_random`"),
        ("undecided multi30k_cpu en-de valid_loss", "`dense`"),
    ],
)
def test_figures_in_sentences_follow_the_results(words, text, results):
    assert figures.fill_in("README.md", figure(words, "an old text")) == figure(words, text)


def test_leads_after_more_updates_are_of_the_seeds_that_went_on(write):
    leads = {"multi30k_cpu": {1: 3, 2: 9}, "multi30k_14k": {1: 2, 2: 8}, "multi30k_28k": {1: 1}}
    for table, lead_of_seed in leads.items():
        for seed, lead in lead_of_seed.items():
            baseline = cell("transformer", seed, 50, "en-fr")
            write(f"{table}/cpu", baseline, cell("random_vanilla", seed, 50 + lead, "en-fr"))
    assert figures.lead_after("7000", "bleu", "random_vanilla") == "3.0"
    assert figures.lead_after("28000", "bleu", "random_vanilla") == "1.0"
    assert figures.pairs_after("7000", "random_vanilla") == "1"


@pytest.mark.parametrize(
    "text, problem",
    [
        (figure("nope"), "x.md: '<!-- figure: nope -->': choose from speed-up, "),
        (figure("speed-up nope random"), "not in the results \\('nope'\\)"),
        (figure("speed-up gpu-step"), "not in the results .*missing"),
        (figure("lead multi30k_cpu en-de bleu fixed_random"), "not better than the Transformer"),
        ("is <!-- figure: bugs -->37\n", "has its '<!-- end -->' on the same line"),
        ("- <!-- figure: bugs -->37<!-- end --> bugs", "begins a line or an item of a list"),
        ("\n<!-- figure: bugs -->37<!-- end --> bugs", "begins a line or an item of a list"),
    ],
)
def test_a_figure_that_cannot_be_given_names_page_and_comment(text, problem, results):
    with pytest.raises(UserError, match=problem):
        figures.fill_in("x.md", text)


def test_the_examples_of_the_figures_are_what_results_say():
    examples = figures.__doc__.split("Examples:")[1].strip().splitlines()
    for example in examples:
        words, text = re.split(r"\s{3,}", example.strip())
        if not text.endswith("…"):
            assert figures.compute("the docstring", words) == text, words

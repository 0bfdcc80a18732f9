"""pages/: tables, confidence intervals, figures in sentences and pictures from the files of results/."""

import re
import sys
from typing import NamedTuple

import pytest

from fairseq_synth.inspect.drawing import stored_digest
from pages import analysis, convert, figures, notes, pictures, records, table_pictures, tables, variant_pictures
from recipes.catalog import TABLES
from recipes.steps import ROOT, UserError, dump
from scripts import make_tables

SHORT = TABLES["multi30k_cpu"]


def make_record(model, seed, bleu=None, dataset="en-de", hardware="H100", **more):
    """Returns the record of a run, of a translation if it has a BLEU, which chrF and loss follow."""
    scores = {} if bleu is None else {"bleu": bleu, "chrf": 2 * bleu}
    loss = 5 - (bleu or 0) / 10
    record = {
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "figures": scores,
        "signatures": {"bleu": "s"},
        "updates": 7000,
        "minutes": 22,
        "parameters": 2e6 if model == "random" else 1e6,
        "curve": {"updates": [350, 700], "valid_loss": [loss + 2, loss]},
        "command": "",
        "versions": {"torch": "2"},
        "hardware": hardware,
        "commit": "c",
    }
    return {**record, **more}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes records to a folder of a results/ in which nothing else is."""
    monkeypatch.setattr(records, "ROOT", tmp_path)

    def write_records(folder, *written):
        for number, record in enumerate(written):
            dump(tmp_path / "results" / folder / f"{record['model']}-{record['seed']}-{number}.json", record)

    return write_records


@pytest.fixture
def results(write):
    """Writes runs of four models: the differences to the Transformer's BLEU are given beside each."""
    write(
        "multi30k_cpu/gpu",
        make_record("transformer", 1, 31),
        make_record("transformer", 2, 32),
        make_record("transformer", 3, 33),
        make_record("random", 1, 33.5),  # +2.5
        make_record("random", 2, 35),  # +3
        make_record("random", 3, 36.5),  # +3.5
        make_record("dense", 1, 31.5),  # +0.5
        make_record("dense", 2, 31.5),  # -0.5
        make_record("fixed_random", 1, 26),  # -5
    )
    return write


@pytest.fixture
def show(tmp_path, monkeypatch):
    """Returns a function that makes a picture the only one that a page shows."""

    def show_picture(name):
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "README.md").write_text("No picture.")
        (tmp_path / "docs" / "x.md").write_text(f"![A picture]({name})")
        monkeypatch.setattr(pictures, "ROOT", tmp_path)

    return show_picture


def compute_differences(metric="bleu"):
    """Returns {model: its difference to the Transformer} on En-De."""
    en_de = SHORT.columns[0]
    return records.compute_differences(SHORT, records.load_column(SHORT, en_de), metric)


# ---- intervals


def test_intervals_of_known_values(results):
    """9 runs, less the means of 4 models and 3 seeds (one of which is given), leave 3 degrees of freedom.

    The residuals have a variance of 0.7708 / 3. t(3) at 1 - 0.05 / 6 is 4.857, so that a model with a single run has
    an interval of ± 4.857 × root(2 × 0.2569) = 3.48.
    """
    cells = {model: difference.cell() for model, difference in compute_differences().items()}
    assert cells == {"random": "**+3.00 ± 2.01**", "dense": "+0.00 ± 2.46", "fixed_random": "**-5.00 ± 3.48**"}
    assert compute_differences("valid_loss")["random"].mean == pytest.approx(-0.3)
    assert compute_differences("chrf")["random"].mean == 6


def test_single_runs_have_no_interval(write):
    write("multi30k_cpu/gpu", make_record("transformer", 1, 30), make_record("random", 1, 29.996))
    difference = compute_differences()["random"]
    assert difference.cell() == "+0.00"
    assert not difference.excludes_zero
    assert "minus" not in tables.results_table("multi30k_cpu", "en-de")


def test_a_run_is_compared_with_the_baseline_on_the_same_machine():
    run = make_record("random", 1, hardware="Intel, 1 thread(s)")
    gpu = make_record("transformer", 1, hardware="H100")
    other_cpu = make_record("transformer", 1, hardware="AMD, 1 thread(s)")
    same_cpu = make_record("transformer", 1, hardware="Intel, 1 thread(s)")
    other_seed = make_record("transformer", 2, hardware="Intel, 1 thread(s)")
    assert records.find_run_with_same_seed(run, [gpu, other_cpu, same_cpu, other_seed]) is same_cpu
    assert records.find_run_with_same_seed(run, [gpu, other_cpu, other_seed]) is other_cpu
    assert records.find_run_with_same_seed(run, [gpu, other_seed]) is gpu
    assert records.find_run_with_same_seed(run, [other_seed]) is None


# ---- tables


def test_a_table_shows_other_models_and_round_trips_but_no_model_without_a_run(results):
    """The fixture has written runs of the Transformer, whose run with seed 1 has BLEU 31, but none of dense_vanilla.

    The figure round_trip is the BLEU of a perfect translation. The models of `make_record` have 1.00M parameters.
    """
    figures_with_round_trip = {"bleu": 45, "chrf": 66, "round_trip": 99.93}
    results(
        "multi30k_cpu/gpu",
        make_record("dynamicconv", 1, figures=figures_with_round_trip),
        make_record("relative_random_vanilla_sum", 1, 45),
    )
    text = tables.results_table("multi30k_cpu", "en-de")
    assert "|`dynamicconv`|1.00M|45.00|**+14.00 ± " in text  # 14 = 45 - 31
    assert "BLEU of a perfect translation: 99.93" in text
    assert "|`relative_random_vanilla_sum` †|" in text
    assert "† [not in the paper](deviations.md#" in text
    assert "dense_vanilla" not in text


def test_quality_tables_have_only_columns_that_have_run(results):
    text = tables.quality_tables()
    assert "En-De BLEU" in text
    assert "En-Fr" not in text
    assert "Language models" not in text


def test_a_table_that_nobody_has_run_shows_the_papers_figures(write):
    text = tables.results_table("table7")
    assert text.splitlines()[0] == "|model|AG News, paper|IMDb, paper|steps/s, paper|"
    assert "We have not run `scripts/reproduce.sh table7 --dataset DATASET --variant MODEL --seed N` yet." in text
    assert tables.results_table("multi30k_cpu", "en-fr").startswith("We have not run ")


def test_several_figures_share_a_cell_and_a_missing_figure_says_why(write):
    """The table of DailyDialog shows BLEU-4, ROUGE-L, METEOR and CIDEr in one cell, and compares ROUGE-L.

    METEOR has no figure, as there is no Java. The model `random` has no ROUGE-L either, so that it cannot be compared.
    """
    signatures = {"meteor": "METEOR|no Java", "rougeL": "ROUGE-L|no text"}
    rouge_by_run = {
        ("transformer", 1): 8,
        ("transformer", 2): 9,
        ("dense", 1): 10,
        ("dense", 2): 11.5,
        ("random", 1): None,
    }
    for (model, seed), rouge in rouge_by_run.items():
        scores = {"bleu4": 1.0, "rougeL": rouge, "meteor": None, "cider": 3.0, "round_trip": 99.0}
        record = make_record(model, seed, None, "dailydialog", figures=scores, signatures=signatures)
        write("dailydialog_cpu/cpu", record)
    text = tables.results_table("dailydialog_cpu")
    # the cell of `dense`, with the means of two seeds, and its difference in ROUGE-L: 10.75 - 8.5
    assert "|1.00 ± 0.00 (2) / 10.75 ± 1.06 (2) / no Java / 3.00 ± 0.00 (2)|+2.25 ± " in text
    assert "|minus the Transformer, ROUGE-L|" in text
    # The figure round_trip is the BLEU of a perfect translation. It is not shown, as the runs have no BLEU but BLEU-4.
    assert "perfect translation" not in text


@pytest.mark.parametrize("minutes, text", [((0.41, 0.44), "0.4 minutes"), ((0.41, 0.96), "0.4 to 1.0 minutes")])
def test_minutes_that_look_alike_are_one_number(minutes, text):
    runs = [make_record("random", 1, minutes=minute) for minute in minutes]
    assert f"; {text} on a GPU, " in notes.describe_duration(runs)


def test_the_order_of_runs_in_a_conversion_record_has_no_meaning(monkeypatch):
    expected = convert.conversion_table("multi30k_cpu")
    reversed_records = records.load_records("convert", "multi30k_cpu-*")
    for record in reversed_records:
        record["runs"].reverse()
    monkeypatch.setattr(records, "load_records", lambda folder, file_pattern: reversed_records)
    assert convert.conversion_table("multi30k_cpu") == expected


@pytest.mark.parametrize("end, part", [("<!-- end -->\n", "names no table"), ("", "<!-- end")])
def test_a_block_of_a_page_needs_a_known_name_and_an_end(end, part, monkeypatch, tmp_path):
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"<!-- results: x -->\n{end}")
    with pytest.raises(UserError, match=part):
        make_tables.render_pages()


def test_the_pages_are_what_results_say():
    """Every table in README.md and docs/, and every picture."""
    for page, text in make_tables.render_pages().items():
        assert page.read_text(encoding="utf-8") == text, page
    assert pictures.render(pictures.collect_pictures().drawable, check=True) == []


# ---- pictures


def list_calls(panel, method):
    """Returns the arguments and options of the calls of a method of matplotlib's axes."""
    return [(arguments, options) for name, arguments, options in panel.calls if name == method]


def test_pictures_are_drawn_once_and_again_when_the_results_change(results, show, tmp_path):
    """Three pictures can be drawn: the one that a page shows, and two that need no page.

    A new result outdates the two of them that show results; six-kinds-of-s.png shows none.
    """
    show("multi30k_cpu-en-de-valid-loss.png")
    names = {"multi30k_cpu-en-de-valid-loss.png", "six-kinds-of-s.png", "which-one.png"}

    def render(check):
        """Returns the names of the pictures that are missing or outdated, and draws them unless `check` is true."""
        outdated_paths = pictures.render(pictures.collect_pictures().drawable, check, tmp_path)
        return {path.name for path in outdated_paths}

    assert render(check=True) == names
    assert not list(tmp_path.glob("*.png"))
    assert render(check=False) == names
    assert render(check=True) == set()
    assert stored_digest(tmp_path / "which-one.png")
    results("multi30k_cpu/gpu", make_record("factorized_dense", 1, 20))
    assert len(render(check=True)) == 2


def test_a_few_models_share_a_panel_with_bands(results):
    (panel,) = table_pictures.draw_table_picture("multi30k_cpu-en-de-valid-loss.png").panels
    lines = list_calls(panel, "plot")
    assert [options["label"] for _, options in lines] == ["fixed_random", "dense", "random"]
    assert len({options["color"] for _, options in lines}) == 3
    assert len(list_calls(panel, "fill_between")) == 2  # fixed_random has one seed


def test_many_models_have_a_panel_each_the_best_first(results):
    results("multi30k_cpu/gpu", *(make_record(model, 4, 35) for model in SHORT.models()))
    results("multi30k_cpu/gpu", make_record("dynamicconv", 1, 60))
    picture = table_pictures.draw_table_picture("multi30k_cpu-en-de-valid-loss.png")
    lines = [list_calls(panel, "plot") for panel in picture.panels]
    assert all(len(lines_of_panel) == 1 for lines_of_panel in lines)
    assert len(lines) == len(SHORT.models())
    assert lines[0][0][1]["label"] == "dynamicconv"


def test_no_losses_can_be_compared_without_a_run_of_the_baseline(write):
    write("multi30k_cpu/gpu", make_record("random", 1, 35), make_record("dense", 1, 36))
    name = "multi30k_cpu-en-de-valid-loss.png"
    with pytest.raises(table_pictures.CannotDrawError, match="no run of .* as many updates as a run of the baseline"):
        table_pictures.draw_table_picture(name)


def test_single_runs_are_hollow_dots_without_a_mean(results):
    (panel,) = table_pictures.draw_scores("x.png", SHORT, SHORT.columns[0]).panels
    dots = list_calls(panel, "scatter")
    hollow = [arguments[1] for arguments, options in dots if options.get("facecolors") == "white"]
    strokes = [arguments[1] for arguments, options in dots if options.get("marker") == "|"]
    assert hollow == [["fixed_random"]]
    assert strokes == [["random"], ["transformer"], ["dense"]]  # the best first


class Stage(NamedTuple):
    """A stage of a training: a table of runs that continue those of the table before."""

    table: str
    updates: int  # at the end of the stage
    seeds: tuple[int, ...]  # the seeds whose runs have reached the end of the stage
    transformer_bleu_of_seed_0: int  # a run with seed N has N more


STAGES = [
    Stage("multi30k_cpu", updates=7000, seeds=(1, 2, 3), transformer_bleu_of_seed_0=50),
    Stage("multi30k_14k", updates=14000, seeds=(1, 2), transformer_bleu_of_seed_0=52),
    Stage("multi30k_28k", updates=28000, seeds=(1, 2), transformer_bleu_of_seed_0=53),
]


def test_continued_trainings_show_the_seeds_that_reached_the_end(write):
    """The means are of seeds 1 and 2, as seed 3 has not reached the last stage.

    A model that has not reached it, relative_random_vanilla, is left out.
    """
    for stage in STAGES:
        for seed in stage.seeds:
            transformer_bleu = stage.transformer_bleu_of_seed_0 + seed
            write(f"{stage.table}/cpu", make_record("transformer", seed, transformer_bleu, "en-fr"))
            write(f"{stage.table}/cpu", make_record("random_vanilla", seed, transformer_bleu + 5, "en-fr"))
    write("multi30k_14k/cpu", make_record("relative_random_vanilla", 1, 60, "en-fr"))
    picture = table_pictures.draw_table_picture("multi30k_28k-en-fr-curves.png")
    loss_panel, score_panel = picture.panels
    assert [options["label"] for _, options in list_calls(loss_panel, "plot")] == ["transformer", "random_vanilla"]
    assert len(list_calls(loss_panel, "fill_between")) == 2  # a band for each of the two models

    transformer_arguments, transformer_options = list_calls(score_panel, "errorbar")[0]
    updates, mean_bleu = transformer_arguments
    assert updates == [stage.updates for stage in STAGES]
    assert mean_bleu == [51.5, 53.5, 54.5]  # e.g. in the first stage the mean of 51 and 52
    # The bars end at the lowest and at the highest seed, each of which is 0.5 from the mean.
    lengths_below = [0.5, 0.5, 0.5]
    lengths_above = [0.5, 0.5, 0.5]
    assert transformer_options["yerr"] == [lengths_below, lengths_above]
    assert "means over 2 seeds" in picture.below


def test_a_variant_without_figures_has_no_row(results):
    (picture,) = variant_pictures.draw_choice()
    (row_names, _), *_ = list_calls(picture.panels[0], "set_yticks")
    assert row_names[1] == ["random", "fixed_random", "dense"]


def test_the_range_of_rounds_is_given_as_distances():
    speed = records.SpeedUp(ratio=1.5, lowest=1.25, highest=2)
    assert variant_pictures.get_distances_to_rounds(speed) == [[0.25], [0.5]]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("multi30k_cpu-en-de-scores.png", "results/multi30k_cpu has runs of only 1 for en-de"),
        ("multi30k_cpu-en-fr-valid-loss.png", "results/multi30k_cpu has runs of only 0 for en-fr"),
        ("multi30k_28k-en-fr-curves.png", "no training of results/multi30k_28k has gone through all its stages"),
        ("nope.png", "no picture has this name"),
    ],
)
def test_a_shown_picture_that_cannot_be_drawn_is_a_problem(name, reason, write, show, monkeypatch):
    """The command says in one line which page shows it, and why it cannot be drawn; with --check and without.

    The results have runs of one model alone, on En-De: too few to be compared ("runs of 1 of en-de").
    """

    def render_no_pages():
        """Takes the place of `make_tables.render_pages`, so that no page is written."""
        return {}

    def render_no_pictures(*_):
        """Takes the place of `pictures.render`, so that no picture is drawn."""
        return []

    write("multi30k_cpu/gpu", make_record("random", 1, 30))
    show(name)  # on the page docs/x.md
    monkeypatch.setattr(make_tables, "render_pages", render_no_pages)
    monkeypatch.setattr(pictures, "render", render_no_pictures)
    rest_of_line = "[^\\n]*"
    error = f"^error: docs/x.md: {name} cannot be drawn: {rest_of_line}{reason}$"
    for argv in (["make_tables.py"], ["make_tables.py", "--check"]):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit, match=error):
            make_tables.main()


def test_every_picture_is_on_a_page_and_drawn():
    collected = pictures.collect_pictures()
    names = {picture.name for picture in collected.drawable}
    assert collected.problems == []
    assert names == set(pictures.find_shown_pictures())
    assert names == {path.name for path in (ROOT / "docs").glob("*.png")}


def test_analysis_has_no_pictures_without_results(write):
    assert list(analysis.pictures()) == []
    assert variant_pictures.draw_choice() == []
    assert variant_pictures.draw_speeds() == []


# ---- figures in sentences


def comment(words, text=""):
    """Returns a sentence with a figure."""
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
    assert figures.fill_in("README.md", comment(words, "an old text")) == comment(words, text)


def test_leads_after_more_updates_are_of_the_seeds_that_went_on(write):
    leads = {"multi30k_cpu": {1: 3, 2: 9}, "multi30k_14k": {1: 2, 2: 8}, "multi30k_28k": {1: 1}}
    for table, lead_of_seed in leads.items():
        for seed, lead in lead_of_seed.items():
            baseline = make_record("transformer", seed, 50, "en-fr")
            write(f"{table}/cpu", baseline, make_record("random_vanilla", seed, 50 + lead, "en-fr"))
    assert figures.lead_after("7000", "bleu", "random_vanilla") == "3.0"
    assert figures.lead_after("28000", "bleu", "random_vanilla") == "1.0"
    assert figures.pairs_after("7000", "random_vanilla") == "one seed"


@pytest.mark.parametrize(
    "text, problem",
    [
        (comment("nope"), "x.md: '<!-- figure: nope -->': choose from speed-up, "),
        (comment("speed-up nope random"), "not in the results \\('nope'\\)"),
        (comment("speed-up gpu-step"), "not in the results .*missing"),
        (comment("lead multi30k_cpu en-de bleu fixed_random"), "not better than the Transformer"),
        ("is <!-- figure: bugs -->37\n", "has its '<!-- end -->' on the same line"),
        ("- <!-- figure: bugs -->37<!-- end --> bugs", "is at the start of a line or of a list item"),
        ("\n<!-- figure: bugs -->37<!-- end --> bugs", "is at the start of a line or of a list item"),
    ],
)
def test_a_figure_that_cannot_be_given_names_page_and_comment(text, problem, results):
    with pytest.raises(UserError, match=problem):
        figures.fill_in("x.md", text)


def test_every_example_of_a_figure_can_be_computed():
    """Their values change when more runs are recorded."""
    examples = figures.__doc__.split("version 1.0:")[1].strip().splitlines()
    assert len(examples) > 15
    for example in examples:
        words, _ = re.split(r"\s{3,}", example.strip())
        assert figures.compute_figure("the docstring", words)


def test_versions_are_sorted_by_their_numbers():
    records = [{"versions": {"torch": version}} for version in ("2.13.0+cpu", "2.6.0", "2.13.0+cpu")]
    assert notes.describe_versions(records) == "torch 2.6.0 and 2.13.0+cpu"

"""Checks the modules of pages/: tables, confidence intervals, figures in sentences and pictures, from results/."""

import re
import sys
from typing import NamedTuple

import pytest

from fairseq_synth.inspect.drawing import stored_digest
from pages import analysis, convert, figures, notes, pictures, records, table_pictures, tables, variant_pictures
from recipes.catalog import TABLES
from recipes.steps import ROOT, UserError, dump
from scripts import make_tables

MULTI30K_CPU = TABLES["multi30k_cpu"]  # the table to which most tests write results


def make_record(model, seed, bleu=None, dataset="en-de", hardware="H100", **other_fields):
    """Returns the record of a run, as `pages.records` reads it from a file of results/.

    Args:
        model, seed, dataset, hardware: what was trained, and where.
        bleu: the BLEU of the test set. The other metrics follow from it: chrF is 2 * BLEU, and the last validation loss
            is 5 - BLEU / 10. Without a BLEU, the record has no scores and the loss 5.
        other_fields: fields of the record that replace the default ones.
    """
    if bleu is None:
        scores = {}
        last_loss = 5.0
    else:
        scores = {"bleu": bleu, "chrf": 2 * bleu}
        last_loss = 5 - bleu / 10
    record = {
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "figures": scores,
        "signatures": {"bleu": "s"},
        "updates": 7000,
        "minutes": 22,
        "parameters": 2e6 if model == "random" else 1e6,
        "curve": {"updates": [350, 700], "valid_loss": [last_loss + 2, last_loss]},
        "command": "",
        "versions": {"torch": "2"},
        "hardware": hardware,
        "commit": "c",
    }
    record.update(other_fields)
    return record


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes records to a folder of results/. No other results exist during the test."""
    monkeypatch.setattr(records, "ROOT", tmp_path)

    def write_records(folder, *records_to_write):
        """Writes each record to a file MODEL-SEED-NUMBER.json. `folder` is a path below results/."""
        for number, record in enumerate(records_to_write):
            file_name = f"{record['model']}-{record['seed']}-{number}.json"
            dump(tmp_path / "results" / folder / file_name, record)

    return write_records


@pytest.fixture
def results(write):
    """Writes runs of four models, and returns the function `write` for further runs.

    The arguments of `make_record` are the model, the seed and the BLEU. A comment beside each run says by how much its
    BLEU differs from that of the Transformer with the same seed.
    """
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
    """Returns a function that replaces README.md and docs/ by pages on which there is a single picture."""

    def show_picture(name):
        """Lets the page docs/x.md show the picture with this file name."""
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "README.md").write_text("No picture.")
        (tmp_path / "docs" / "x.md").write_text(f"![A picture]({name})")
        monkeypatch.setattr(pictures, "ROOT", tmp_path)

    return show_picture


def compute_differences(metric="bleu"):
    """Returns {model: its difference to the Transformer} on En-De, from the written runs of multi30k_cpu."""
    en_de = MULTI30K_CPU.columns[0]
    runs_by_model = records.load_column(MULTI30K_CPU, en_de)
    return records.compute_differences(MULTI30K_CPU, runs_by_model, metric)


# ---- intervals


def test_intervals_of_known_values(results):
    """The differences of three models have the confidence intervals that the following calculation gives.

    There are 9 runs. Each of the 4 models and each of the 3 seeds has an effect, and one of these 7 effects follows
    from the others. So the residuals have 9 - 6 = 3 degrees of freedom. Their sum of squares is 0.7708, so that the
    variance of a run is 0.7708 / 3 = 0.2569.

    Three intervals hold together with a probability of 95 %, so that the quantile of Student's t with 3 degrees of
    freedom is taken at 1 - 0.05 / 6. It is 4.857. The difference of n runs of a model and n runs of the Transformer has
    the variance 2 × 0.2569 / n. The half widths of the intervals are

        n = 1, fixed_random: 4.857 × root(2 × 0.2569) = 3.48
        n = 2, dense: 3.48 / root(2) = 2.46
        n = 3, random: 3.48 / root(3) = 2.01
    """
    cells = {model: difference.cell() for model, difference in compute_differences().items()}
    assert cells == {"random": "**+3.00 ± 2.01**", "dense": "+0.00 ± 2.46", "fixed_random": "**-5.00 ± 3.48**"}
    # The BLEU of `random` is higher by 3. As `make_record` computes them, the loss is lower by 3 / 10, and chrF higher
    # by 2 × 3.
    assert compute_differences("valid_loss")["random"].mean == pytest.approx(-0.3)
    assert compute_differences("chrf")["random"].mean == 6


def test_single_runs_have_no_interval(write):
    write("multi30k_cpu/gpu", make_record("transformer", 1, 30), make_record("random", 1, 29.996))
    """The difference of two runs has no interval and is not significant, and the table has no column of differences.

    The difference is -0.004. It is rounded to +0.00 and not to -0.00.
    """
    difference = compute_differences()["random"]
    assert difference.cell() == "+0.00"
    assert not difference.excludes_zero
    # A column of differences would be headed "minus the Transformer".
    assert "minus" not in tables.results_table("multi30k_cpu", "en-de")


def test_a_run_is_compared_with_the_baseline_on_the_same_machine():
    """A run is compared with a run of the baseline that has the same seed.

    Of several, it is the one on the same hardware, or else one on the same kind of device (CPU or GPU), or else any.
    """
    run = make_record("random", 1, hardware="Intel, 1 thread(s)")
    run_on_gpu = make_record("transformer", 1, hardware="H100")
    run_on_other_cpu = make_record("transformer", 1, hardware="AMD, 1 thread(s)")
    run_on_same_cpu = make_record("transformer", 1, hardware="Intel, 1 thread(s)")
    run_with_other_seed = make_record("transformer", 2, hardware="Intel, 1 thread(s)")
    # Each assertion leaves out the run that was chosen before.
    all_runs = [run_on_gpu, run_on_other_cpu, run_on_same_cpu, run_with_other_seed]
    assert records.find_run_with_same_seed(run, all_runs) is run_on_same_cpu
    assert records.find_run_with_same_seed(run, [run_on_gpu, run_on_other_cpu, run_with_other_seed]) is run_on_other_cpu
    assert records.find_run_with_same_seed(run, [run_on_gpu, run_with_other_seed]) is run_on_gpu
    assert records.find_run_with_same_seed(run, [run_with_other_seed]) is None


# ---- tables


def test_a_table_shows_other_models_and_round_trips_but_no_model_without_a_run(results):
    """A table has rows for all models with a run, even if the table does not list them, and names the round-trip BLEU.

    The model dynamicconv is not a Synthesizer, and relative_random_vanilla_sum is not in the paper. The fixture
    `results` has written a run of the Transformer with seed 1, whose BLEU is 31, but no run of dense_vanilla. The
    figure round_trip is the BLEU of a perfect translation. The models of `make_record` have 1.00M parameters.
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
    """The fixture `results` has written runs on En-De, but none on En-Fr and none of language models."""
    text = tables.quality_tables()
    assert "En-De BLEU" in text
    assert "En-Fr" not in text
    assert "Language models" not in text


def test_a_table_that_nobody_has_run_shows_the_papers_figures(write):
    """A table without runs has the paper's columns and says by which command it can be run.

    The paper has figures for table7, but none for multi30k_cpu.
    """
    text = tables.results_table("table7")
    assert text.splitlines()[0] == "|model|AG News, paper|IMDb, paper|steps/s, paper|"
    assert "We have not run `scripts/reproduce.sh table7 --dataset DATASET --variant MODEL --seed N` yet." in text
    assert tables.results_table("multi30k_cpu", "en-fr").startswith("We have not run ")


def test_several_figures_share_a_cell_and_a_missing_figure_says_why(write):
    """The table of DailyDialog shows BLEU-4, ROUGE-L, METEOR and CIDEr in one cell, and compares ROUGE-L.

    METEOR has no figure, as there is no Java. The model `random` has no ROUGE-L either, so that it cannot be compared.
    """

    def write_run(model, seed, rouge):
        """Writes a run on DailyDialog in which only ROUGE-L depends on the model and the seed."""
        record = make_record(
            model,
            seed,
            dataset="dailydialog",
            figures={"bleu4": 1.0, "rougeL": rouge, "meteor": None, "cider": 3.0, "round_trip": 99.0},
            signatures={"meteor": "METEOR|no Java", "rougeL": "ROUGE-L|no text"},
        )
        write("dailydialog_cpu/cpu", record)

    write_run("transformer", seed=1, rouge=8)
    write_run("transformer", seed=2, rouge=9)
    write_run("dense", seed=1, rouge=10)
    write_run("dense", seed=2, rouge=11.5)
    write_run("random", seed=1, rouge=None)
    text = tables.results_table("dailydialog_cpu")
    # This is the cell of `dense`, with means ± standard deviations of two seeds, and its difference in ROUGE-L: the
    # mean of 10 and 11.5 is 10.75, that of the Transformer is 8.5, and 10.75 - 8.5 is 2.25.
    assert "|1.00 ± 0.00 (2) / 10.75 ± 1.06 (2) / no Java / 3.00 ± 0.00 (2)|+2.25 ± " in text
    assert "|minus the Transformer, ROUGE-L|" in text
    # The figure round_trip is the BLEU of a perfect translation. It is not shown, as the runs have no BLEU but BLEU-4.
    assert "perfect translation" not in text


@pytest.mark.parametrize("minutes, text", [((0.41, 0.44), "0.4 minutes"), ((0.41, 0.96), "0.4 to 1.0 minutes")])
def test_minutes_that_look_alike_are_one_number(minutes, text):
    """Two durations that are equal after rounding are printed as one number, and others as a range."""
    runs = [make_record("random", 1, minutes=minute) for minute in minutes]
    assert f"; {text} on a GPU, " in notes.describe_duration(runs)


def test_the_order_of_runs_in_a_conversion_record_has_no_meaning(monkeypatch):
    """The table of conversions is the same if the runs in the records of results/convert/ are in reverse order."""
    expected = convert.conversion_table("multi30k_cpu")
    reversed_records = records.load_records("convert", "multi30k_cpu-*")
    for record in reversed_records:
        record["runs"].reverse()
    monkeypatch.setattr(records, "load_records", lambda folder, file_pattern: reversed_records)
    assert convert.conversion_table("multi30k_cpu") == expected


@pytest.mark.parametrize("end, error", [("<!-- end -->\n", "names no table"), ("", "<!-- end")])
def test_a_block_of_a_page_needs_a_known_name_and_an_end(end, error, monkeypatch, tmp_path):
    """A block with the unknown name x is refused, and so is a block without an end."""
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"<!-- results: x -->\n{end}")
    with pytest.raises(UserError, match=error):
        make_tables.render_pages()


def test_the_pages_are_what_results_say():
    """Every table and figure in README.md and docs/, and every picture, is up to date with the files of results/."""
    for page, expected_text in make_tables.render_pages().items():
        assert page.read_text(encoding="utf-8") == expected_text, page
    outdated_pictures = pictures.render(pictures.collect_pictures().drawable, check=True)
    assert outdated_pictures == []


# ---- pictures


class AxesCall(NamedTuple):
    """The arguments of a call of a method of matplotlib's axes."""

    arguments: list  # by position
    options: dict  # by name


def list_calls(panel, method):
    """Returns the calls of a method of matplotlib's axes, such as "plot", by which a panel is drawn."""
    return [AxesCall(arguments, options) for name, arguments, options in panel.calls if name == method]


def test_pictures_are_drawn_once_and_again_when_the_results_change(results, show, tmp_path):
    """The script draws pictures that are missing or outdated, and no others. With --check, it draws none.

    Three pictures can be drawn: the one that a page shows, and two that need no page. A new result outdates the two of
    them that show results; six-kinds-of-s.png shows none.
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
    """The losses of three models are lines of different colors in one panel, the worst model first.

    The lines of models with several seeds have a band.
    """
    (panel,) = table_pictures.draw_table_picture("multi30k_cpu-en-de-valid-loss.png").panels
    lines = list_calls(panel, "plot")
    assert [line.options["label"] for line in lines] == ["fixed_random", "dense", "random"]
    colors = {line.options["color"] for line in lines}
    assert len(colors) == 3
    bands = list_calls(panel, "fill_between")
    assert len(bands) == 2  # those of dense and random; fixed_random has one seed


def test_many_models_have_a_panel_each_the_best_first(results):
    """The losses of all models of the table have a panel each, with a single line, and so has dynamicconv.

    There are as many panels as the table has models: the Transformer has none, since all others are compared with it,
    and dynamicconv is not one of the table's models. It is the best model, as it has the highest BLEU and therefore the
    lowest loss.
    """
    models = MULTI30K_CPU.models()
    results("multi30k_cpu/gpu", *[make_record(model, seed=4, bleu=35) for model in models])
    results("multi30k_cpu/gpu", make_record("dynamicconv", seed=1, bleu=60))
    picture = table_pictures.draw_table_picture("multi30k_cpu-en-de-valid-loss.png")
    assert len(picture.panels) == len(models)
    for panel in picture.panels:
        assert len(list_calls(panel, "plot")) == 1
    (line_of_first_panel,) = list_calls(picture.panels[0], "plot")
    assert line_of_first_panel.options["label"] == "dynamicconv"


def test_no_losses_can_be_compared_without_a_run_of_the_baseline(write):
    """Without a run of the Transformer, the picture of losses minus the Transformer's cannot be drawn."""
    write("multi30k_cpu/gpu", make_record("random", 1, 35), make_record("dense", 1, 36))
    name = "multi30k_cpu-en-de-valid-loss.png"
    with pytest.raises(table_pictures.CannotDrawError, match="no run of .* as many updates as a run of the baseline"):
        table_pictures.draw_table_picture(name)


def test_single_runs_are_hollow_dots_without_a_mean(results):
    """A model with one run has a hollow dot. The other models have a stroke at the mean of their runs."""
    en_de = MULTI30K_CPU.columns[0]
    (panel,) = table_pictures.draw_scores("x.png", MULTI30K_CPU, en_de).panels
    models_of_hollow_dots = []
    models_of_strokes = []
    for call in list_calls(panel, "scatter"):
        _scores, models = call.arguments
        if call.options.get("facecolors") == "white":
            models_of_hollow_dots.append(models)
        if call.options.get("marker") == "|":
            models_of_strokes.append(models)
    assert models_of_hollow_dots == [["fixed_random"]]
    assert models_of_strokes == [["random"], ["transformer"], ["dense"]]  # the best first


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

    The model relative_random_vanilla has not reached the last stage with any seed. It is left out.
    """
    for stage in STAGES:
        for seed in stage.seeds:
            transformer_bleu = stage.transformer_bleu_of_seed_0 + seed
            write(
                f"{stage.table}/cpu",
                make_record("transformer", seed, transformer_bleu, dataset="en-fr"),
                make_record("random_vanilla", seed, transformer_bleu + 5, dataset="en-fr"),
            )
    write("multi30k_14k/cpu", make_record("relative_random_vanilla", seed=1, bleu=60, dataset="en-fr"))
    picture = table_pictures.draw_table_picture("multi30k_28k-en-fr-curves.png")
    loss_panel, score_panel = picture.panels
    loss_lines = list_calls(loss_panel, "plot")
    assert [line.options["label"] for line in loss_lines] == ["transformer", "random_vanilla"]
    assert len(list_calls(loss_panel, "fill_between")) == 2  # a band for each of the two models

    score_line_of_transformer = list_calls(score_panel, "errorbar")[0]
    updates, mean_bleu = score_line_of_transformer.arguments
    assert updates == [stage.updates for stage in STAGES]
    assert mean_bleu == [51.5, 53.5, 54.5]  # in the first stage, for example, this is the mean of 51 and 52
    # The bars end at the lowest and at the highest seed, each of which is 0.5 from the mean.
    lengths_below = [0.5, 0.5, 0.5]
    lengths_above = [0.5, 0.5, 0.5]
    assert score_line_of_transformer.options["yerr"] == [lengths_below, lengths_above]
    assert "means over 2 seeds" in picture.below


def test_a_variant_without_figures_has_no_row(results):
    """The picture of quality and speed has a row for each of the three Synthesizers that the fixture has written."""
    (picture,) = variant_pictures.draw_choice()
    names_of_rows = list_calls(picture.panels[0], "set_yticks")[0]
    _places, models = names_of_rows.arguments
    assert models == ["random", "fixed_random", "dense"]


def test_the_range_of_rounds_is_given_as_distances():
    """The bar of a speed-up of 1.5 reaches down to the lowest round, 1.25, and up to the highest round, 2."""
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
    """The command says in one line which page shows the picture, and why it cannot be drawn; with --check and without.

    The results have runs of a single model, on En-De. At least two models are needed for a comparison.
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
    """The pictures that the code can draw, those that pages show, and the PNG files of docs/ are the same ones."""
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


def make_sentence(words, figure=""):
    """Returns a sentence with a figure between two comments, the first of which has the words that stand for it."""
    return f"about <!-- figure: {words} -->{figure}<!-- end --> times"


@pytest.mark.parametrize(
    "words, figure",
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
def test_figures_in_sentences_follow_the_results(words, figure, results):
    """An old figure is replaced by the current one, which follows from the runs of the fixture `results`.

    The intervals are those of `test_intervals_of_known_values`.
    """
    old_sentence = make_sentence(words, "an old figure")
    assert figures.fill_in("README.md", old_sentence) == make_sentence(words, figure)


def test_leads_after_more_updates_are_of_the_seeds_that_went_on(write):
    """A lead after 7,000 updates is the mean over the seeds that were trained for 28,000 updates: only seed 1."""

    def write_runs(table, seed, lead):
        """Writes a run of the Transformer, and a run of random_vanilla whose BLEU is higher by `lead`."""
        write(
            f"{table}/cpu",
            make_record("transformer", seed, bleu=50, dataset="en-fr"),
            make_record("random_vanilla", seed, bleu=50 + lead, dataset="en-fr"),
        )

    write_runs("multi30k_cpu", seed=1, lead=3)  # after 7,000 updates
    write_runs("multi30k_cpu", seed=2, lead=9)
    write_runs("multi30k_14k", seed=1, lead=2)
    write_runs("multi30k_14k", seed=2, lead=8)
    write_runs("multi30k_28k", seed=1, lead=1)
    assert figures.lead_after("7000", "bleu", "random_vanilla") == "3.0"
    assert figures.lead_after("28000", "bleu", "random_vanilla") == "1.0"
    assert figures.pairs_after("7000", "random_vanilla") == "one seed"


@pytest.mark.parametrize(
    "text, error",
    [
        (make_sentence("nope"), "x.md: '<!-- figure: nope -->': choose from speed-up, "),
        (make_sentence("speed-up nope random"), "not in the results \\('nope'\\)"),
        (make_sentence("speed-up gpu-step"), "not in the results .*missing"),
        (make_sentence("lead multi30k_cpu en-de bleu fixed_random"), "not better than the Transformer"),
        ("is <!-- figure: bugs -->37\n", "has its '<!-- end -->' on the same line"),
        ("- <!-- figure: bugs -->37<!-- end --> bugs", "is at the start of a line or of a list item"),
        ("\n<!-- figure: bugs -->37<!-- end --> bugs", "is at the start of a line or of a list item"),
    ],
)
def test_a_figure_that_cannot_be_given_names_page_and_comment(text, error, results):
    """A figure is refused if its words are wrong, if it is not in the results, or if its comments are misplaced."""
    with pytest.raises(UserError, match=error):
        figures.fill_in("x.md", text)


def test_every_example_of_a_figure_can_be_computed():
    """Each example in the docstring of pages/figures.py stands for a figure of the real results.

    The docstring has a line for each example: its words, spaces, and its value. The values are not compared, as they
    change when more runs are recorded.
    """
    _introduction, examples_text = figures.__doc__.split("version 1.0:")
    examples = examples_text.strip().splitlines()
    assert len(examples) > 15
    for example in examples:
        words, _value = re.split(r"\s{3,}", example.strip())
        assert figures.compute_figure("the docstring", words)


def test_versions_are_sorted_by_their_numbers():
    """Version 2.6.0 comes before 2.13.0, though not in the order of the alphabet, and each version is named once."""
    runs = [{"versions": {"torch": version}} for version in ("2.13.0+cpu", "2.6.0", "2.13.0+cpu")]
    assert notes.describe_versions(runs) == "torch 2.6.0 and 2.13.0+cpu"

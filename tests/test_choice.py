"""recipes/choice.py: which function to choose."""

import json

import numpy
import pytest

from fairseq_synth.inspect.drawing import stored_digest
from recipes import choice, render
from recipes.tables import TABLES


def cell(table, dataset, model, seed, **figures):
    """A record of a training."""
    figures = {"figures": figures, "parameters": 2e6 if model == "random" else 1e6, "curve": {}, "hardware": "H100"}
    return f"{table}/gpu", {"dataset": dataset, "model": model, "seed": seed, **figures}


def benchmark(folder, name, **figures):
    """A record of a benchmark: a figure for each model."""
    about = {"benchmark": name, "hardware": "h", "flags": {"dtype": "bf16"}}
    return folder, {
        **about,
        "model": name,
        "figures": {spec.replace("_and_", "+"): {**f} for spec, f in figures.items()},
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Translation in three runs, a language model in two, and speeds."""
    monkeypatch.setattr(render, "ROOT", tmp_path)
    records = [cell("multi30k_cpu", "en-de", "transformer", seed, bleu=30 + seed) for seed in (1, 2, 3)]
    # differences of 2.5, 3 and 3.5; of 0.5 and -0.5; of -5
    records += [cell("multi30k_cpu", "en-de", "random", seed, bleu=32 + 1.5 * seed) for seed in (1, 2, 3)]
    records += [cell("multi30k_cpu", "en-de", "dense", seed, bleu=30 + seed + d) for seed, d in ((1, 0.5), (2, -0.5))]
    records += [cell("multi30k_cpu", "en-de", "fixed_random", 1, bleu=26)]
    # of another recipe, 0.5 and 1.5
    records += [cell("multi30k", "en-de", "transformer", seed, bleu=40) for seed in (1, 2)]
    records += [cell("multi30k", "en-de", "random", seed, bleu=39.5 + seed) for seed in (1, 2)]
    records += [cell("ptb_cpu", "ptb", "relative_random", 1, ppl=50)]
    records += [cell("ptb_cpu", "ptb", "transformer", seed, ppl=100) for seed in (1, 2)]
    records += [cell("ptb_cpu", "ptb", "dense", seed, ppl=90 + seed) for seed in (1, 2)]
    records += [cell("ptb_cpu", "ptb", "lightconv_lm", seed, ppl=50 + seed) for seed in (1, 2)]
    step = {"1024 tokens": 1.2, "1024 tokens from": 1.1, "1024 tokens to": 1.25}
    faster, slower = ({name: value * factor for name, value in step.items()} for factor in (1.5, 0.5))
    records += [
        benchmark("speed_cpu", "step_corpus", random=step, fixed_random=faster, dense=slower),
        benchmark("speed_gpu", "step_corpus", random={"4096 tokens": 0.9}),
        benchmark("speed_cpu", "block_causal", random={"4x1024": 3}, relative_random={"4x1024": 4}),
        benchmark("speed_gpu", "block_causal", relative_random={"4x1024": 0.8}),
        benchmark("speed_cpu", "memory_sources", relative_random={"4x1024": 0.5}),
        benchmark("speed_cpu", "memory_causal", relative_random={"16x1024": 1.5, "16x1024 MiB": 9}),
    ]
    for folder, record in records:
        path = tmp_path / "results" / folder / f"{record['model']}{record.get('seed', '')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return tmp_path / "results"


def test_intervals_hold_together(results):
    """9 runs, 3 degrees of freedom beside the means of models and seeds; the rest has a variance of 0.7708 / 3.

    t(3) at 1 - 0.05 / 6 is 4.857, so that a single run has ± 4.857 × root(2 × 0.2569) = 3.48.
    """
    found = choice.differences("multi30k_cpu", "en-de")
    assert {model: str(difference) for model, difference in found.items()} == {
        "random": "+3.00 ± 2.01",
        "dense": "+0.00 ± 2.46",
        "fixed_random": "-5.00 ± 3.48",
    }
    assert found["random"].is_ahead and found["fixed_random"].is_behind and found["random"].cell == "**+3.00 ± 2.01**"
    assert not found["dense"].is_ahead and not found["dense"].is_behind and found["dense"].cell == "+0.00 ± 2.46"
    lower = choice.differences("ptb_cpu", "ptb")["dense"]
    assert lower.gain == 8.5 and lower.is_ahead and not lower.is_behind  # less perplexity is better


def test_none_of_the_intervals_misses(monkeypatch):
    """Of eleven models that differ by chance alone, with two seeds: in 95 % of all draws or more."""
    random, held = numpy.random.default_rng(0), 0
    models = TABLES["multi30k_cpu"].models()[1:12]
    for _ in range(400):
        drawn = [
            cell("", "en-de", model, seed, bleu=random.normal())
            for model in ("transformer", *models)
            for seed in (1, 2)
        ]
        monkeypatch.setattr(choice, "load_cells", lambda table, records=[record for _, record in drawn]: records)
        found = choice.differences("multi30k_cpu", "en-de").values()
        held += not any(difference.is_ahead or difference.is_behind for difference in found)
    assert held >= 0.95 * 400


def test_a_run_that_two_pairs_share(monkeypatch):
    """A baseline of one seed beside runs of two machines moves both differences."""
    drawn = [
        cell("", "en-de", model, seed, bleu=value)
        for model, seed, value in (
            ("transformer", 1, 30),
            ("transformer", 2, 31),
            ("random", 1, 30),
            ("random", 2, 32),
            ("dense", 1, 29),
            ("dense", 1, 29),
        )
    ]
    monkeypatch.setattr(choice, "load_cells", lambda table: [record for _, record in drawn])
    found = choice.differences("multi30k_cpu", "en-de")
    assert found["dense"].half_width == pytest.approx(found["random"].half_width * 1.5**0.5)


def test_what_is_chosen(results):
    """The fastest one that is not behind, though others are faster; no single run, no baseline of another kind."""
    translation, language_models, long_text = choice.advice().splitlines()
    assert translation == (
        "- **Translation**: on a CPU `random` trains fastest of the functions whose BLEU is not behind the "
        "Transformer's (+3.00 ± 2.01): on a CPU 1.20 times and on a GPU 0.90 times as fast as stock fairseq."
    )
    assert "`dense` trains fastest" in language_models and "lightconv" not in language_models
    said = (
        "`relative_random` (on a CPU 4.00 times and on a GPU 0.80 times as fast as stock fairseq, with 0.67 times its "
    )
    said += (
        "memory in a causal block and 2.00 times its memory in a padded block on a CPU) take sentences of any length"
    )
    assert said in long_text
    said = "the fastest of them is `random` (on a CPU 3.00 times)"  # not of those that take any length
    assert said in long_text and "relative_random_vanilla" not in long_text


def test_equally_fast_functions(results):
    """Where rounds overlap with those of the fastest, all are named, and the one with the best figure is taken."""
    for highest, names in ((1.25, "`random` and `dense` train"), (1.1, "`dense` trains")):
        step = {"1024 tokens": 1.1, "1024 tokens from": 1.0, "1024 tokens to": highest}
        fastest = {"1024 tokens": 1.3, "1024 tokens from": 1.2}
        _, record = benchmark("speed_cpu", "step_corpus", random=step, dense=fastest)
        (results / "speed_cpu" / "step_corpus.json").write_text(json.dumps(record))
        assert choice.advice().startswith(f"- **Translation**: on a CPU {names} fastest of the functions")
        assert ("Of these `random` has the best BLEU (+3.00 ± 2.01)" in choice.advice()) == (highest == 1.25)


def test_tables(results):
    rows = choice.quality().splitlines()
    recipes = "En-De, short recipe, BLEU | En-De, recipe of Wu et al. 2021, BLEU"
    assert rows[0] == f"| model | parameters | {recipes} | PTB, perplexity |"  # what has run
    assert "| `random` | 2.00 | **+3.00 ± 2.01** | +1.00 ± 6.35 |  |" in rows
    assert "| `random_vanilla` |  |  |  |  |" in rows
    assert rows[-1].startswith("| `lightconv_lm` |  |  |  | **-48.50")  # no Synthesizer, but one of the intervals
    rows = choice.cost().splitlines()
    assert "| `random` | 1.20 | 0.90 |  |  |  |" in rows and "- memory, CPU: memory_causal; h; bf16" in rows


def test_the_picture(results, tmp_path):
    """A cross for each model that has both, from the slowest to the fastest round; none without speeds."""
    (picture,) = choice.pictures()
    crosses = [options for method, _, options in picture.panels[0].calls if method == "errorbar"]
    assert [options["label"] for options in crosses] == ["random", "fixed_random", "dense"]
    assert crosses[0]["xerr"] == [[0.1], [0.05]] and crosses[0]["yerr"] == [2.01]
    assert choice.pace("unheard of") == "whose speed is not measured"
    picture.save(tmp_path)
    assert stored_digest(tmp_path / "which-one.png") == picture.digest()
    for path in results.glob("speed_*/*.json"):
        path.unlink()
    assert list(choice.pictures()) == [] and choice.advice() == ""

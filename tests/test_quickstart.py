"""What the quickstart says while it trains, and how it reads its surroundings."""

import pytest

from recipes import quickstart
from recipes.command import UserError


@pytest.mark.parametrize(
    "value, threads",
    [("3", 3), ("4,2", 4), (" 2 ", 2), ("", None), ("abc", None), ("0", None), ("-1", None), (None, None)],
)
def test_threads_of_openmp(monkeypatch, value, threads):
    """A list, for nested loops, is legal; what OpenMP does not understand it leaves out."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert quickstart.asked_threads() == threads


def test_progress_says_how_long_it_takes(capsys):
    line = "2026-01-01 | INFO | train_inner | epoch 002: loss=3, ppl=8.5, wps=9, num_updates=200, lr=0.1, wall=30\n"
    quickstart.show_progress(500, line)
    assert capsys.readouterr().out == "  update 200 of 500: training perplexity 8.5, 30 s, 45 s left\n"
    quickstart.show_progress(500, "a line of fairseq's log\n")
    assert capsys.readouterr().out == ""


def test_scores_of_other_flags_are_not_shown(tmp_path, dry, monkeypatch, recipes_environment):
    """Also where the checkpoints were removed."""
    run = tmp_path / "numbers-en-de-bpe300-random_vanilla-seed1"
    run.mkdir()
    (run / "quickstart").write_text("max_update=200\nflags=\n")
    (run / "scores.json").write_text("{}")
    monkeypatch.setattr(quickstart, "prepare", lambda *args: None)
    (tmp_path / "numbers-en-de-bpe300").mkdir()
    (tmp_path / "numbers-en-de-bpe300" / "settings").write_text("src=en\ntgt=de\n")
    monkeypatch.delenv("DRY_RUN")
    quickstart.main(["--out", str(tmp_path), "--max-update", "200"])
    with pytest.raises(UserError, match="other settings .*max_update=200, asked for max_update=400"):
        quickstart.main(["--out", str(tmp_path), "--max-update", "400"])


def test_numbers_are_learned_small_and_without_capitals(tmp_path, dry, recipes_environment, capsys):
    """A sentence of one's own may have a capital letter: all text is lowercased, as translate.sh then does with it."""
    quickstart.main(["--out", str(tmp_path), "--", "--dropout", "0.2"])
    commands = capsys.readouterr().out.splitlines()
    (train,) = (line for line in commands if line.startswith("+ fairseq-train"))
    assert "--encoder-layers 2 --decoder-layers 2" in train and train.index("--decoder-layers") < train.index("0.2")
    assert any("clean_pairs" in line and "--lowercase" in line for line in commands)
    assert any(line.startswith("echo 'Eighty-one hours ago' | ") for line in commands)

"""Runs the stock command lines as a user runs them: shared by the tests of the command line and of the recipes."""

import contextlib
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import checkpoint_utils
from fairseq_cli import preprocess, train

from fairseq_synth.errors import explain

ROOT = Path(__file__).resolve().parent.parent
USER_DIR = ["--user-dir", str(ROOT / "fairseq_synth")]
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --synth-max-length 24 "
    "--share-all-embeddings --dropout 0.1"
).split()
RECIPE = (
    "--optimizer adam --lr 0.01 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 "
    "--num-workers 0 --no-progress-bar --log-format json --log-interval 1 --seed 7"
).split()
TEST_SENTENCES = 21  # no multiple of 8


def run_cli(main, *argv, stdin=None):
    """Runs a command line in this process; returns what it printed and logged."""
    out, log = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    old = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["fairseq", *map(str, argv)], io.StringIO(stdin or "")
    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        del checkpoint_utils.save_checkpoint.best  # the host's only state between runs
    try:
        with contextlib.redirect_stdout(out):
            main()
    finally:
        sys.argv, sys.stdin = old
        logging.getLogger().removeHandler(handler)
    return out.getvalue(), log.getvalue()


def complaint(main, *argv):
    """The one line that a user sees of a command line that fails, run in this process."""
    with pytest.raises(BaseException) as caught:
        run_cli(main, *argv)
    line = explain(caught.value)
    assert line and "\n" not in line, repr(caught.value)
    return line


def command(name, *argv, check=True, **kwargs):
    """Runs a command line in its own process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import sys; from fairseq_cli.{name} import cli_main; sys.exit(cli_main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, env=environment, **kwargs
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def make_text(prefix, sentences, shortest=1, longest=12, target=reversed):
    """Writes PREFIX.en, random words, and PREFIX.de, what `target` makes of them."""
    rng = random.Random(str(prefix.name))
    with open(f"{prefix}.en", "w") as en, open(f"{prefix}.de", "w") as de:
        for _ in range(sentences):
            words = [f"w{rng.randrange(20)}" for _ in range(rng.randint(shortest, longest))]
            print(*words, file=en)
            print(*target(words), file=de)


def make_data(folder):
    """Raw text and binarised data: the target is the source backwards."""
    for split, sentences in [("train", 300), ("valid", 13), ("test", TEST_SENTENCES)]:
        make_text(folder / split, sentences)
    make_text(folder / "long", 3, shortest=30, longest=30)
    argv = ["-s", "en", "-t", "de", "--joined-dictionary", "--trainpref", folder / "train"]
    argv += ["--validpref", folder / "valid", "--testpref", f"{folder}/test,{folder}/long"]
    run_cli(preprocess.cli_main, *argv, "--destdir", folder / "bin")
    return folder


def fit(data, save, *flags, arch="transformer_synth_random_vanilla_multi30k", small=SMALL, main=train.cli_main):
    argv = [data / "bin", *USER_DIR, "--arch", arch, *small, *RECIPE, "--save-dir", save, *flags]
    return run_cli(main, *argv)[1]


def losses(log):
    """{updates: loss} of the training log."""
    lines = re.findall(r"\{.*\"train_wall\".*\}$", log, flags=re.M)
    return {int(r["num_updates"]): r["loss"] for r in map(json.loads, lines) if "loss" in r}

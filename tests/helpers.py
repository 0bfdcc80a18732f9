"""Functions and constants that several test files use: small models and data, command lines, and checks.

Importing this file registers the plugin, so that fairseq knows the architectures of this project.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import warm
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq_cli import eval_lm, generate, interactive, preprocess, train, validate

import fairseq_synth
from fairseq_synth.architectures import VARIANTS
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.errors import explain
from fairseq_synth.heads import build_synthesizer, parse_heads
from fairseq_synth.host.layers import FAST_PATH_COPIES
from fairseq_synth.logits import Bias
from fairseq_synth.positions import take_column_bias
from fairseq_synth.synthesizers import SYNTHESIZERS, Synthesizer
from recipes.steps import ROOT, UserError

fairseq_synth.register()
# flags of fairseq's commands: the plugin; the size of a small model for translation; a short training
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
# For a process that ends after an update or two. fairseq's thread that loads batches ahead may still be at work then,
# and a thread inside PyTorch aborts the process when Python ends.
NO_THREAD = ["--data-buffer-size", "0"]
# {kind of model: the architecture that the tests build, and fairseq's architecture of the same size}
KINDS = {
    "translation": ("transformer_synth_random_vanilla_multi30k", "transformer_multi30k"),
    "language_model": ("transformer_lm_synth_random_vanilla_ptb", "transformer_lm_ptb"),
    "encoder": ("roberta_synth_random_vanilla_agnews", "roberta_agnews"),
}
# {kind of model: its stacks of layers}
SIDES = {"translation": ("encoder", "decoder"), "language_model": ("decoder",), "encoder": ("encoder",)}
TEST_SENTENCES = 21  # in the test set of the fixture `data`; not a multiple of 8
# Commands that start a worker process to load data. From the second call in one process on, ending it takes 5 seconds.
READERS = (generate.cli_main, interactive.cli_main, validate.cli_main, eval_lm.cli_main)
# What --encoder-synthesizer may name: every function alone and mixed with the next one, every mixture that has an
# architecture, and one mixture of three. A new function is covered as soon as it is registered.
NAMES = list(SYNTHESIZERS)
SPECS = [*NAMES, *(f"{a}+{b}" for a, b in zip(NAMES, NAMES[1:])), "random+dense+vanilla"]
SPECS += [spec for spec in VARIANTS if spec not in SPECS]


class Distance(Synthesizer):
    """A function that the paper does not have: ``S_ij = -|i - j|``, without parameters or a longest length."""

    has_max_length = False

    def forward(self, inputs):
        rows, columns = torch.arange(inputs.start, inputs.start + inputs.x.size(0)), torch.arange(inputs.src_len)
        return [Bias(-(rows[:, None] - columns).abs().float()[None, None])]


class Columns(Synthesizer):
    """A function that the paper does not have: ``S_ij = c_j``, so that all rows are equal."""

    def __init__(self, num_heads, head_dim, max_length, rank):
        super().__init__(num_heads, head_dim, max_length, rank)
        self.c = torch.nn.Parameter(torch.empty(num_heads, max_length))

    def reset_parameters(self):
        torch.nn.init.normal_(self.c)

    def forward(self, inputs):
        return [Bias(take_column_bias(self.c, inputs))]


def make_dictionary(words: int = 40) -> Dictionary:
    """Returns a dictionary of fairseq with the words w0, w1, ... from index 4 on."""
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def future_mask(length, dtype=torch.float32):
    """Returns fairseq's mask of the future, (length, length): 0 on and below the diagonal, -inf above it."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def padding_mask(lengths):
    """Returns a mask (B, S) for sentences of these lengths, which is true for the padding behind them."""
    return torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]


def make_attention(
    spec, mixture="convex", embed_dim=6, num_heads=2, max_length=12, rank=3, seed=0, beyond_length="refuse", **kwargs
):
    """Returns a self-attention with the function `spec`, such as "random+vanilla", in each of its heads.

    Its parameters are moved away from initial values that would hide a mistake, such as zeros and equal weights.
    """
    torch.manual_seed(seed)
    groups = parse_heads(spec, num_heads)
    built = build_synthesizer(groups, mixture, embed_dim // num_heads, max_length, rank, beyond_length)
    module = SyntheticAttention(embed_dim, num_heads, built, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def make_task(words=40, tokens_per_sample=24):
    """Returns an object with all that a model asks of its task."""
    dictionary = make_dictionary(words)
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary")
    cfg = SimpleNamespace(tokens_per_sample=tokens_per_sample)
    return SimpleNamespace(**dict.fromkeys(names, dictionary), max_positions=lambda: tokens_per_sample, cfg=cfg)


def make_model(arch="transformer_synth_random_vanilla_multi30k", seed=1, words=40, **flags):
    """Returns a small model of an architecture in eval mode, with its initial weights. flags: as --arch has them."""
    sizes = dict(
        encoder_embed_dim=16,
        encoder_ffn_embed_dim=24,
        encoder_layers=2,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_attention_heads=2,
        dropout=0.1,
        synth_max_length=24,
    )
    if arch.startswith(("transformer_lm", "lightconv_lm")):
        sizes.update(
            decoder_embed_dim=16, decoder_ffn_embed_dim=24, tokens_per_sample=flags.get("synth_max_length", 24)
        )
    if arch.startswith("roberta"):
        sizes.update(max_positions=flags.get("synth_max_length", 24))
    args = argparse.Namespace(arch=arch, **{**sizes, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, make_task(words, args.synth_max_length)).eval()


def used_weights(state_dict):
    """Returns the weights that a model uses, without the copies and the buffer of fairseq 0.12.2 that nothing reads."""
    dead = (*FAST_PATH_COPIES, "_float_tensor")
    return {name: weight for name, weight in state_dict.items() if name.split(".")[-1] not in dead}


def make_synth(spec, kind="translation", **flags):
    """Returns a small model of a kind with the functions `spec` in every layer, its weights moved by `perturb`."""
    sides = {f"{side}_synthesizer": spec for side in SIDES[kind]}
    return perturb(make_model(KINDS[kind][0], **{**sides, **flags}))


def compute_logits(model, source, target):
    """Runs a model of any kind; returns its logits (B, T, words) and the tokens (B, T) that its rows belong to."""
    names = {base.__name__ for base in type(model).__mro__}
    if "FairseqEncoderDecoderModel" in names:
        return model(source, None, target)[0], target
    tokens = target if "FairseqLanguageModel" in names else source
    return model(tokens)[0], tokens


def perturb(model, seed=3, std=0.3):
    """Adds noise to all parameters but the embeddings, so that a bias of 0 or an even mixture hides no mistake."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "output_projection" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def pad_batch(sentences, left, pad=1):
    """Returns lists of token numbers as one batch (B, T), padded on the left or on the right."""
    width = max(len(sentence) for sentence in sentences)
    batch = torch.full((len(sentences), width), pad)
    for row, sentence in zip(batch, sentences):
        start = width - len(sentence) if left else 0
        row[start : start + len(sentence)] = torch.tensor(sentence)
    return batch


def run_cli(main, *argv, stdin=None, form=None):
    """Runs a command, such as fairseq_cli.train.cli_main, in this process, and returns what it printed and logged.

    argv: its arguments. stdin: what it reads from standard input. form: logging's format of a line of the log.
    """
    if main in READERS:
        argv = (*argv, "--num-workers", "0")
    out, log = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter(form))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        del checkpoint_utils.save_checkpoint.best  # the only state that fairseq keeps from one training to the next
    try:
        with (
            mock.patch.object(sys, "argv", ["fairseq", *map(str, argv)]),
            mock.patch.object(sys, "stdin", io.StringIO(stdin or "")),
            mock.patch.object(validate, "reset_logging"),  # it removes every second handler, whoever added it
            contextlib.redirect_stdout(out),
        ):
            main()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
    return out.getvalue(), log.getvalue()


def get_error_line(main, *argv, stdin=None):
    """Runs a command that fails, as `run_cli` does, and returns the one line that a user sees of its error."""
    with pytest.raises(BaseException) as error:
        run_cli(main, *argv, stdin=stdin)
    line = explain(error.value)
    assert line and "\n" not in line, repr(error.value)
    return line


def run_program(name, *argv, check=True, **kwargs):
    """Runs fairseq-NAME in its own, warm process and returns its CompletedProcess; check: it has to succeed.

    kwargs: of `warm.run`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import sys; from fairseq_cli.{name} import cli_main; sys.exit(cli_main())"
    process = warm.run(["-c", code, *argv], env=environment, **kwargs)
    if check:
        assert process.returncode == 0, process.stderr
    return process


def make_text(prefix, sentences, shortest=1, longest=12, target=reversed):
    """Writes sentences of random words to PREFIX.en, and what `target` returns for each to PREFIX.de."""
    rng = random.Random(str(prefix.name))
    with open(f"{prefix}.en", "w") as en, open(f"{prefix}.de", "w") as de:
        for _ in range(sentences):
            words = [f"w{rng.randrange(20)}" for _ in range(rng.randint(shortest, longest))]
            print(*words, file=en)
            print(*target(words), file=de)


def make_data(folder):
    """Fills the folder of the fixture `data`: text, and binarised data in its subfolder bin."""
    for split, sentences in [("train", 300), ("valid", 13), ("test", TEST_SENTENCES)]:
        make_text(folder / split, sentences)
    make_text(folder / "long", 3, shortest=30, longest=30)
    argv = ["-s", "en", "-t", "de", "--joined-dictionary", "--trainpref", folder / "train"]
    argv += ["--validpref", folder / "valid", "--testpref", f"{folder}/test,{folder}/long"]
    run_cli(preprocess.cli_main, *argv, "--destdir", folder / "bin")
    return folder


def train_model(data, save, *flags, arch="transformer_synth_random_vanilla_multi30k", small=SMALL, main=train.cli_main):
    """Trains a small model of DATA/bin with fairseq-train in this process, and returns the log. save: --save-dir."""
    argv = [data / "bin", *USER_DIR, "--arch", arch, *small, *RECIPE, "--save-dir", save, *flags]
    return run_cli(main, *argv)[1]


def read_losses(log):
    """Returns the losses of a training's log (--log-format json), as {number of updates: loss as it is printed}."""
    losses = {}
    for line in re.findall(r"\{.*\"train_wall\".*\}$", log, flags=re.M):
        record = json.loads(line)
        if "loss" in record:
            losses[int(record["num_updates"])] = record["loss"]
    return losses


def run_script(name, *argv, env=None, **kwargs):
    """Runs scripts/NAME, or another program by its path; returns its CompletedProcess. env: additional variables."""
    command = [ROOT / "scripts" / name, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, **kwargs)


def assert_refused(function, *argv, part):
    """Checks that function([*argv]) raises a UserError whose message is one line that matches `part`.

    part: a regular expression, or several that all have to match somewhere.
    """
    with pytest.raises(UserError) as error:
        function(list(map(str, argv)))
    message = str(error.value)
    assert "\n" not in message, message
    for pattern in [part] if isinstance(part, str) else part:
        assert re.search(pattern, message), message


def flag_value(line, name):
    """Returns the value of a flag in a line with a command: the last one, as argparse does."""
    return re.findall(rf" {name} (\S+)", line)[-1]


def wait_for(condition, seconds=120):
    """Waits until condition() is true; fails after so many seconds."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"not within {seconds} seconds"
        time.sleep(0.02)


def children(pid):
    """Returns the numbers of the processes that a process has started and that have not ended."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid):
    """Whether a process is at work: it has not ended, and is no zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def run_programs_in_process():
    """Lets recipes/ call fairseq-train, fairseq-preprocess etc. in this process, as long as the context is open.

    Some tests of the whole way, such as test_any_locale, start the programs themselves.
    """
    from recipes import prepare, score, steps
    from recipes import train as recipes_train

    programs = {
        "fairseq-preprocess": preprocess.cli_main,
        "fairseq-train": train.cli_main,
        "fairseq-generate": generate.cli_main,
        "fairseq-eval-lm": eval_lm.cli_main,
        "fairseq-validate": validate.cli_main,
    }

    def run(argv, log=None, watch=None):
        """Stands in for recipes.steps.run; writes the log, but calls no `watch` for its lines."""
        program, *arguments = argv
        if str(program) not in programs or steps.dry_run():
            return steps.run(argv, log, watch)
        steps.show(argv)
        printed, logged = run_cli(programs[program], *arguments, form="| %(levelname)s | %(name)s | %(message)s")
        with open(log, "a" if watch else "w") as file:
            file.write(printed + logged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "run", run)
        patch.setattr(score, "run_command", run)
        patch.setattr(recipes_train, "run_command", run)
        yield

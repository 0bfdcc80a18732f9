"""Functions and constants that several test files use.

- Small models and data: `make_attention`, `make_model`, `make_synth`, `make_dictionary`, `make_data`, `make_text`.
- Commands: `run_cli` runs a command of fairseq in this process, `train_model` runs fairseq-train, `run_program` runs a
  command in a process of its own, and `run_script` runs a file of scripts/.
- Expected errors: `get_error_line` for commands of fairseq, `assert_refused` for functions of recipes/.

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
import shlex
import shutil
import subprocess
import sys
import time
import warnings
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
from fairseq_synth.errors import SynthesizerError, explain
from fairseq_synth.heads import build_synthesizer, parse_heads
from fairseq_synth.host.layers import FAST_PATH_COPIES
from fairseq_synth.logits import Bias
from fairseq_synth.masks import causal_mask
from fairseq_synth.positions import take_column_bias
from fairseq_synth.synthesizers import SYNTHESIZERS, Synthesizer
from recipes.steps import ROOT, UserError

fairseq_synth.register()
# flags of fairseq's commands: which plugin to load
USER_DIR = ["--user-dir", str(ROOT / "fairseq_synth")]
# flags of fairseq-train: the sizes of a small model for translation, which takes sentences of up to 24 tokens
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --synth-max-length 24 "
    "--share-all-embeddings --dropout 0.1"
).split()
# flags of fairseq-train: a short training that logs each update in JSON, for `read_losses`
RECIPE = (
    "--optimizer adam --lr 0.01 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 "
    "--num-workers 0 --no-progress-bar --log-format json --log-interval 1 --seed 7"
).split()
# flags of fairseq-train for a process that ends after an update or two. fairseq's thread that loads batches ahead may
# still be at work then, and a thread inside PyTorch aborts the process when Python ends.
NO_THREAD = ["--data-buffer-size", "0"]
# For each kind of model: a Synthesizer's architecture, and fairseq's own architecture of the same size.
KINDS = {
    "translation": ("transformer_synth_random_vanilla_multi30k", "transformer_multi30k"),
    "language_model": ("transformer_lm_synth_random_vanilla_ptb", "transformer_lm_ptb"),
    "encoder": ("roberta_synth_random_vanilla_agnews", "roberta_agnews"),
}
# For each kind of model: its stacks of layers, which begin the names of its flags (--encoder-synthesizer).
SIDES = {"translation": ("encoder", "decoder"), "language_model": ("decoder",), "encoder": ("encoder",)}
# The size of the test set of the fixture `data`. It is not a multiple of 8, of which fairseq makes batches.
TEST_SENTENCES = 21
# The commands that start a worker process to load data, which `run_cli` prevents: from the second call in one process
# on, ending such a worker takes 5 seconds.
READERS = (generate.cli_main, interactive.cli_main, validate.cli_main, eval_lm.cli_main)
# Values of --encoder-synthesizer that tests go through: NAMES has every function. SPECS also has a mixture of each
# function with the next one, every mixture that has an architecture, and one mixture of three functions. A new function
# is covered as soon as it is registered.
NAMES = list(SYNTHESIZERS)
MIXTURES_OF_TWO = [f"{name}+{next_name}" for name, next_name in zip(NAMES, NAMES[1:])]
SPECS = [*NAMES, *MIXTURES_OF_TWO, "random+dense+vanilla"]
SPECS += [spec for spec in VARIANTS if spec not in SPECS]


class Distance(Synthesizer):
    """A new function for tests of registering one: ``S_ij = -|i - j|``, without parameters and for any length."""

    has_max_length = False

    def forward(self, inputs):
        """Returns the logits as one term (1, 1, T, S)."""
        query_positions = torch.arange(inputs.start, inputs.start + inputs.x.size(0))
        key_positions = torch.arange(inputs.src_len)
        distances = (query_positions[:, None] - key_positions[None, :]).abs().float()  # (T, S)
        return [Bias(-distances[None, None])]  # (1, 1, T, S)


class Columns(Synthesizer):
    """A new function for tests of registering one: ``S_ij = c_j`` with a parameter c, so that all rows are equal."""

    def __init__(self, num_heads, head_dim, max_length, rank):
        super().__init__(num_heads, head_dim, max_length, rank)
        self.c = torch.nn.Parameter(torch.empty(num_heads, max_length))

    def reset_parameters(self):
        """Draws c from the standard normal distribution."""
        torch.nn.init.normal_(self.c)

    def forward(self, inputs):
        """Returns the logits as one term, with a row for all queries."""
        return [Bias(take_column_bias(self.c, inputs))]


def make_dictionary(words: int = 40) -> Dictionary:
    """Returns a dictionary of fairseq with the words w0, w1, ... from index 4 on. `words` is their number."""
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def future_mask(length, dtype=torch.float32):
    """Returns fairseq's mask of the future, (length, length): 0 on and below the diagonal, -inf above it."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def padding_mask(lengths):
    """Returns a mask (B, S) for sentences of these lengths, which is True where a sentence has ended."""
    positions = torch.arange(max(lengths))
    return positions[None, :] >= torch.tensor(lengths)[:, None]


def make_attention(
    spec, mixture="convex", embed_dim=6, num_heads=2, max_length=12, rank=3, seed=0, beyond_length="refuse", **kwargs
):
    """Returns a self-attention with the function `spec`, such as "random+vanilla", in each of its heads.

    Noise is added to its parameters, because initial values such as zeros and equal weights could hide a mistake.

    Args:
        spec: the functions of the heads, as --encoder-synthesizer takes them.
        mixture: how a mixture weighs its functions, --synth-mixture.
        embed_dim, num_heads: the sizes of the attention.
        max_length: the longest sentence, --synth-max-length.
        rank: the rank of the factorized functions.
        seed: the seed of the initial values and of the noise.
        beyond_length: what happens to longer sentences, --synth-beyond-length.
        kwargs: the other arguments of `SyntheticAttention`.
    """
    torch.manual_seed(seed)
    groups = parse_heads(spec, num_heads)
    built = build_synthesizer(groups, mixture, embed_dim // num_heads, max_length, rank, beyond_length)
    module = SyntheticAttention(embed_dim, num_heads, built, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def run_attention(module, x, gradient, monkeypatch, *, padding=None, is_causal=False, attend=None):
    """Runs a self-attention forward and backward, and returns its results by name.

    They are "out", the output for real tokens (0 for padding), "x", the gradient for the input, and for each trained
    parameter its gradient.

    Args:
        module: a SyntheticAttention.
        x: the input (T, B, C).
        gradient: the gradient for the output (T, B, C).
        monkeypatch: pytest's fixture.
        padding: a mask (B, T), true for padding.
        is_causal: whether rows see no later columns.
        attend: the function that computes softmax(S) V, with the arguments of `computations.attend`; None: that one.
    """
    x = x.detach().requires_grad_()
    with monkeypatch.context() as patch:
        if attend is not None:
            patch.setattr("fairseq_synth.attention.attend", attend)
        attn_mask = causal_mask(x) if is_causal else None
        out, _ = module(x, x, x, key_padding_mask=padding, attn_mask=attn_mask)
        if padding is not None:
            is_real = (~padding).t().unsqueeze(-1)  # (T, B, 1)
            out = out * is_real.to(out.dtype)
        module.zero_grad()
        out.backward(gradient)
    results = {"out": out.detach(), "x": x.grad}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            results[name] = parameter.grad
    return results


def make_task(words=40, tokens_per_sample=24):
    """Returns an object that stands in for fairseq's task when a model is built.

    Args:
        words: the number of words in its dictionaries.
        tokens_per_sample: the longest sentence or block of text.
    """
    dictionary = make_dictionary(words)
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        dictionary=dictionary,
        output_dictionary=dictionary,
        max_positions=lambda: tokens_per_sample,
        cfg=SimpleNamespace(tokens_per_sample=tokens_per_sample),
    )


def make_model(arch="transformer_synth_random_vanilla_multi30k", seed=1, words=40, **flags):
    """Returns a small model with its initial weights, in eval mode.

    Args:
        arch: the architecture, as --arch takes it. fairseq's own architectures can be given too.
        seed: the seed of the initial weights.
        words: the number of words in its dictionary.
        flags: other flags of fairseq-train, such as encoder_layers=3 for --encoder-layers 3.
    """
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
    """Returns a state dict without the entries that no model reads, which fairseq 0.12.2 adds to it."""
    unused_names = (*FAST_PATH_COPIES, "_float_tensor")
    return {name: weight for name, weight in state_dict.items() if name.split(".")[-1] not in unused_names}


def make_synth(spec, kind="translation", **flags):
    """Returns a small Synthesizer in eval mode, with noise added to its weights.

    Args:
        spec: the functions of the heads of every layer, such as "random+vanilla".
        kind: a key of KINDS: "translation", "language_model" or "encoder".
        flags: other flags of fairseq-train, such as encoder_layers=3 for --encoder-layers 3.
    """
    sides = {f"{side}_synthesizer": spec for side in SIDES[kind]}
    return perturb(make_model(KINDS[kind][0], **{**sides, **flags}))


def compute_logits(model, source, target):
    """Runs a model of any kind; returns its logits (B, T, words) and the tokens (B, T) that they belong to.

    Args:
        model: a translation model, a language model or an encoder.
        source: (B, S), the tokens that an encoder reads; not used for a language model.
        target: (B, T), the tokens that a decoder reads; not used for an encoder.
    """
    base_classes = {base.__name__ for base in type(model).__mro__}
    if "FairseqEncoderDecoderModel" in base_classes:
        logits, _extra = model(source, None, target)
        return logits, target
    tokens = target if "FairseqLanguageModel" in base_classes else source
    logits, _extra = model(tokens)
    return logits, tokens


def perturb(model, seed=3, std=0.3):
    """Adds noise to the parameters of a model, except to the embeddings, and returns the same model.

    Otherwise initial values, such as a bias of 0 or a mixture with equal weights, could hide a mistake.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "output_projection" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def pad_batch(sentences, left, pad=1):
    """Returns sentences, which are lists of token numbers, as one batch (B, T).

    Args:
        sentences: the sentences.
        left: whether the padding is on the left; otherwise it is on the right.
        pad: the number of the padding token.
    """
    width = max(len(sentence) for sentence in sentences)
    batch = torch.full((len(sentences), width), pad)
    for row, sentence in zip(batch, sentences):
        start = width - len(sentence) if left else 0
        row[start : start + len(sentence)] = torch.tensor(sentence)
    return batch


def remove_flags(arguments, *names):
    """Returns the arguments of a command without the flags that have these names, and without the flags' values.

    Args:
        arguments: a list of strings, such as RECIPE.
        names: the names, such as "--seed". Each of these flags has to be there, with one value.
    """
    rest = list(arguments)
    for name in names:
        position = rest.index(name)
        del rest[position : position + 2]  # the name and its value
    return rest


def run_cli(main, *argv, stdin=None, form=None):
    """Runs a command of fairseq in this process; returns a pair of strings: what it printed, and what it logged.

    Args:
        main: the function of the command, such as fairseq_cli.train.cli_main.
        argv: the arguments of the command; they are converted to strings.
        stdin: the text that it reads from standard input.
        form: the format of a line of the log, as for logging.Formatter; by default only the message.
    """
    if main in READERS:
        argv = (*argv, "--num-workers", "0")
    out = io.StringIO()
    log = io.StringIO()
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
    """Runs a command that has to fail, as `run_cli` does; returns the one line in which a user sees its error."""
    with pytest.raises(BaseException) as error:
        run_cli(main, *argv, stdin=stdin)
    line = explain(error.value)
    assert line, repr(error.value)
    assert "\n" not in line, repr(error.value)
    return line


def run_program(name, *argv, check=True, **kwargs):
    """Runs a command of fairseq in a process of its own, and returns a subprocess.CompletedProcess.

    Args:
        name: "train" for fairseq-train, "generate" for fairseq-generate, and so on.
        argv: the arguments of the command.
        check: whether the command has to succeed.
        kwargs: the other arguments of `warm.run`, which starts the process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import sys; from fairseq_cli.{name} import cli_main; sys.exit(cli_main())"
    process = warm.run(["-c", code, *argv], env=environment, **kwargs)
    if check:
        assert process.returncode == 0, process.stderr
    return process


def make_text(prefix, sentences, shortest=1, longest=12, target=reversed):
    """Writes random sentences to PREFIX.en and PREFIX.de, always the same ones for the same file name.

    Args:
        prefix: a path without the language.
        sentences: how many sentences to write.
        shortest, longest: the bounds of the number of words in a sentence.
        target: returns the words of the German sentence for those of the English one; by default the reversed sentence.
    """
    rng = random.Random(str(prefix.name))
    with open(f"{prefix}.en", "w") as en, open(f"{prefix}.de", "w") as de:
        for _ in range(sentences):
            words = [f"w{rng.randrange(20)}" for _ in range(rng.randint(shortest, longest))]
            print(*words, file=en)
            print(*target(words), file=de)


def make_data(folder):
    """Fills the folder of the fixture `data`, which describes its contents, and returns the folder."""
    for split, sentences in [("train", 300), ("valid", 13), ("test", TEST_SENTENCES)]:
        make_text(folder / split, sentences)
    make_text(folder / "long", 3, shortest=30, longest=30)
    flags = ["-s", "en", "-t", "de", "--joined-dictionary"]
    texts = ["--trainpref", folder / "train", "--validpref", folder / "valid"]
    texts += ["--testpref", f"{folder}/test,{folder}/long"]
    run_cli(preprocess.cli_main, *flags, *texts, "--destdir", folder / "bin")
    return folder


def train_model(data, save, *flags, arch="transformer_synth_random_vanilla_multi30k", small=SMALL, main=train.cli_main):
    """Trains a small model with fairseq-train in this process, and returns the log.

    Args:
        data: the folder of the fixture `data`, or another one with binarised data in its subfolder bin.
        save: the folder for the checkpoints, --save-dir.
        flags: other flags of fairseq-train; they take precedence.
        arch: the architecture, --arch.
        small: the flags that set the sizes of the model.
        main: the function of the command; tests can pass a changed one.
    """
    argv = [data / "bin", *USER_DIR, "--arch", arch, *small, *RECIPE, "--save-dir", save, *flags]
    _printed, log = run_cli(main, *argv)
    return log


def read_losses(log):
    """Returns the training losses in the log of `train_model`: {number of updates: the loss as it is printed}."""
    losses = {}
    for line in re.findall(r"\{.*\"train_wall\".*\}$", log, flags=re.M):
        record = json.loads(line)
        if "loss" in record:
            losses[int(record["num_updates"])] = record["loss"]
    return losses


def run_script(name, *argv, env=None, **kwargs):
    """Runs a file of scripts/ in a process of its own, and returns a subprocess.CompletedProcess.

    Args:
        name: the name of the file, such as "train.sh", or the path of another program.
        argv: the arguments; they are converted to strings.
        env: environment variables in addition to those of this process.
        kwargs: the other arguments of subprocess.run.
    """
    command = [ROOT / "scripts" / name, *map(str, argv)]
    environment = dict(os.environ)
    if env is not None:
        environment.update(env)
    return subprocess.run(command, capture_output=True, text=True, env=environment, **kwargs)


def assert_refused(function, *argv, part):
    """Checks that a command of recipes/ raises a UserError whose message is one line that matches `part`.

    Args:
        function: the function of the command, such as recipes.train.main; it takes a list of arguments.
        argv: the arguments; they are converted to strings.
        part: a regular expression that has to match somewhere in the message, or several of them.
    """
    with pytest.raises(UserError) as error:
        function([str(argument) for argument in argv])
    message = str(error.value)
    assert "\n" not in message, message
    patterns = [part] if isinstance(part, str) else part
    for pattern in patterns:
        assert re.search(pattern, message), message


def flag_value(line, name):
    """Returns the value of a flag in a printed command: the last one if the flag occurs twice, as argparse does.

    Args:
        line: the printed command.
        name: the name of the flag, such as "--seed".
    """
    values = re.findall(rf" {name} (\S+)", line)
    return values[-1]


def wait_for(condition, seconds=120):
    """Waits until condition() returns a true value; fails the test if that takes longer than `seconds`."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"not within {seconds} seconds"
        time.sleep(0.02)


def children(pid):
    """Returns the process numbers of the children of the process `pid`."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(number) for number in numbers]


def is_alive(pid):
    """Returns whether the process `pid` has not ended yet. A zombie has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()  # "PID (NAME) STATE …", where NAME may have spaces
    except OSError:
        return False
    state = status.rpartition(")")[2].split()[0]
    return state != "Z"


@contextlib.contextmanager
def run_programs_in_process():
    """Lets recipes/ call fairseq-train, fairseq-preprocess, sacremoses etc. in this process in a with statement.

    This saves the time in which a new process imports torch and fairseq, or prepares the tables of sacremoses. Only a
    few tests start the programs in processes of their own, as users do, for example test_any_locale.
    """
    from recipes import prepare, score, steps, translate
    from recipes import train as recipes_train
    from scripts import average_checkpoints, classify

    programs = {
        "average_checkpoints.py": average_checkpoints.main,
        "classify.py": classify.main,
        "fairseq-preprocess": preprocess.cli_main,
        "fairseq-train": train.cli_main,
        "fairseq-generate": generate.cli_main,
        "fairseq-eval-lm": eval_lm.cli_main,
        "fairseq-validate": validate.cli_main,
    }

    def run(argv, log=None, watch=None):
        """Replaces recipes.steps.run: calls the function of the program, and writes what it prints to the file `log`.

        Unlike the original, it does not call `watch` for the lines of the log. The original is called in three cases:
        for a program that is not in `programs`, for a dry run, which only prints the command, and after an error.
        """
        program, *arguments = argv
        if str(program) == "python":
            program, *arguments = arguments
        main = programs.get(Path(program).name)
        if main is None or steps.dry_run():
            return steps.run(argv, log, watch)
        assert log is not None, "the commands of recipes/ give each program of `programs` a log"
        try:
            printed, logged = run_cli(main, *arguments, form="| %(levelname)s | %(name)s | %(message)s")
        except SynthesizerError:
            return steps.run(argv, log, watch)  # fails again, with the error line that users see
        steps.show(argv)
        # The original, too, adds to a log that it watches, which is that of a training, and replaces any other log. A
        # training may be continued, and its log has all parts.
        mode = "a" if watch else "w"
        with open(log, mode) as file:
            file.write(printed + logged)

    run_in_shell = steps.shell

    def shell(command, stdout=subprocess.PIPE, stdin_text=None):
        """Replaces recipes.steps.shell: runs two programs in this process, and any other command in a shell."""
        words = shlex.split(command)
        if is_tokenization(words):
            stdout.write(tokenize_in_process(words))
            return None
        program, *arguments = words
        if program == "fairseq-interactive":
            printed, _ = run_cli(interactive.cli_main, *arguments, stdin=stdin_text)
            return printed
        return run_in_shell(command, stdout, stdin_text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "run", run)
        patch.setattr(score, "run_command", run)
        patch.setattr(recipes_train, "run_command", run)
        patch.setattr(steps, "shell", shell)
        patch.setattr(translate, "shell", shell)
        yield


def is_tokenization(words):
    """Returns whether the words of a shell command are ``sacremoses OPTIONS < FILE``.

    It returns False if sacremoses is not the program of this environment. A test may put another program with this name
    on the PATH, which then has to be started.
    """
    if words[0] != "sacremoses" or "|" in words:
        return False
    program = shutil.which("sacremoses")
    return program is not None and Path(program).parent == Path(sys.executable).parent


def tokenize_in_process(words):
    """Returns what the shell command ``sacremoses OPTIONS < FILE`` prints, as bytes, without a new process.

    `words`: the words of this command.
    """
    from click.testing import CliRunner
    from sacremoses.cli import cli

    _program, *options, _reads_from, file = words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # sacremoses uses a function that click is to remove
        result = CliRunner().invoke(cli, options, input=Path(file).read_bytes(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes

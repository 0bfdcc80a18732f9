"""Provides functions and constants that several test files use.

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
# Flags of fairseq's commands: the folder of the plugin to load.
USER_DIR = ["--user-dir", str(ROOT / "fairseq_synth")]
# Flags of fairseq-train: the sizes of a small model for translation, which takes sentences of up to 24 tokens.
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --synth-max-length 24 "
    "--share-all-embeddings --dropout 0.1"
).split()
# Flags of fairseq-train: a short training that logs each update in JSON. The function `read_losses` reads this log.
RECIPE = (
    "--optimizer adam --lr 0.01 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 "
    "--num-workers 0 --no-progress-bar --log-format json --log-interval 1 --seed 7"
).split()
# Flags of fairseq-train for a process that ends after one or two updates. By default, fairseq has a thread that loads
# batches ahead. If this thread is still inside PyTorch when Python ends, the process aborts. These flags switch it off.
NO_THREAD = ["--data-buffer-size", "0"]
# For each kind of model: a Synthesizer's architecture, and fairseq's own architecture of the same size.
KINDS = {
    "translation": ("transformer_synth_random_vanilla_multi30k", "transformer_multi30k"),
    "language_model": ("transformer_lm_synth_random_vanilla_ptb", "transformer_lm_ptb"),
    "encoder": ("roberta_synth_random_vanilla_agnews", "roberta_agnews"),
}
# For each kind of model: its stacks of layers. The names of flags begin with these words, as in --encoder-synthesizer.
SIDES = {"translation": ("encoder", "decoder"), "language_model": ("decoder",), "encoder": ("encoder",)}
# The number of sentences in the test set of the fixture `data`. fairseq makes batches whose sizes are multiples of 8.
# This number is not a multiple of 8, so that one batch has another size.
TEST_SENTENCES = 21
# The commands that start a worker process to load data. The function `run_cli` prevents this, because it takes 5
# seconds to end such a worker, except for the first one in a process.
READERS = (generate.cli_main, interactive.cli_main, validate.cli_main, eval_lm.cli_main)
# Values of --encoder-synthesizer with which tests are repeated. NAMES has every function. SPECS also has a mixture of
# each function with the next one, every mixture that has an architecture, and one mixture of three functions. A new
# function is covered as soon as it is registered.
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
    head_dim = embed_dim // num_heads
    synthesizer = build_synthesizer(groups, mixture, head_dim, max_length, rank, beyond_length)
    module = SyntheticAttention(embed_dim, num_heads, synthesizer, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def check_second_derivative_is_refused(out, parameter):
    """Checks that the gradient of a parameter is right if it is recorded, but cannot be differentiated again.

    Args:
        out: an output that depends on the parameter.
        parameter: the parameter.
    """
    loss = out.square().sum()
    (expected,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def run_attention(module, x, gradient, monkeypatch, *, padding=None, is_causal=False, attend=None):
    """Runs a self-attention forward and backward, and returns a dictionary with its results.

    The key "out" stands for the output, which is 0 for padding, and "x" stands for the gradient with respect to the
    input. The name of each trained parameter stands for the gradient with respect to this parameter.

    Args:
        module: a SyntheticAttention.
        x: the input (T, B, C).
        gradient: the gradient with respect to the output (T, B, C).
        monkeypatch: pytest's fixture.
        padding: a mask (B, T), which is True for padding; None: there is no padding.
        is_causal: whether each row sees no later columns.
        attend: a function that computes softmax(S) V in place of `computations.attend`, with the same arguments; None:
            `computations.attend`.
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
    max_length = flags.get("synth_max_length", 24)
    all_flags = {
        "encoder_embed_dim": 16,
        "encoder_ffn_embed_dim": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "dropout": 0.1,
        "synth_max_length": max_length,
    }
    if arch.startswith(("transformer_lm", "lightconv_lm")):
        all_flags["decoder_embed_dim"] = 16
        all_flags["decoder_ffn_embed_dim"] = 24
        all_flags["tokens_per_sample"] = max_length
    if arch.startswith("roberta"):
        all_flags["max_positions"] = max_length
    all_flags.update(flags)
    args = argparse.Namespace(arch=arch, **all_flags)
    set_defaults_of_arch = ARCH_CONFIG_REGISTRY[arch]
    set_defaults_of_arch(args)
    task = make_task(words, tokens_per_sample=args.synth_max_length)
    torch.manual_seed(seed)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
    return model.eval()


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
    synthesizer_arch, _stock_arch = KINDS[kind]
    all_flags = {f"{side}_synthesizer": spec for side in SIDES[kind]}
    all_flags.update(flags)
    model = make_model(synthesizer_arch, **all_flags)
    return perturb(model)


def compute_logits(model, source, target):
    """Runs a model of any kind, and returns a pair: its logits (B, T, words) and the tokens that they belong to (B, T).

    Args:
        model: a translation model, a language model or an encoder.
        source: the tokens that an encoder reads (B, S); not used for a language model.
        target: the tokens that a decoder reads (B, T); not used for an encoder.
    """
    base_classes = {base.__name__ for base in type(model).__mro__}
    if "FairseqEncoderDecoderModel" in base_classes:
        source_lengths = None  # the encoder does not need them
        logits, _extra = model(source, source_lengths, target)
        return logits, target
    is_language_model = "FairseqLanguageModel" in base_classes
    tokens = target if is_language_model else source
    logits, _extra = model(tokens)
    return logits, tokens


def perturb(model, seed=3, std=0.3):
    """Adds noise to the parameters of a model, except to the embeddings, and returns the same model.

    Without noise, initial values such as a bias of 0 or a mixture with equal weights could hide a mistake.

    Args:
        model: the model.
        seed: the seed of the noise.
        std: the standard deviation of the noise.
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
    for row_number, sentence in enumerate(sentences):
        start = width - len(sentence) if left else 0
        end = start + len(sentence)
        batch[row_number, start:end] = torch.tensor(sentence)
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
    """Runs a command of fairseq in this process, and returns a pair of strings: what it printed, and what it logged.

    Args:
        main: the function of the command, such as fairseq_cli.train.cli_main.
        argv: the arguments of the command; they are converted to strings.
        stdin: the text that the command reads from standard input; None: no text.
        form: the format of a line of the log, as for logging.Formatter; None: only the message.
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
    arguments = [str(argument) for argument in argv]
    standard_input = io.StringIO(stdin)  # empty for None
    try:
        with (
            mock.patch.object(sys, "argv", ["fairseq", *arguments]),
            mock.patch.object(sys, "stdin", standard_input),
            # fairseq's function would remove every second handler of the log, also handlers of tests.
            mock.patch.object(validate, "reset_logging"),
            contextlib.redirect_stdout(out),
        ):
            main()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
    return out.getvalue(), log.getvalue()


def get_error_line(main, *argv, stdin=None):
    """Runs a command that has to fail, and returns the line in which a user sees its error.

    The arguments are those of `run_cli`. The test fails if the error has no such line, or if it has several lines.
    """
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
        target: a function that returns the words of the German sentence for those of the English one. By default, the
            German sentence has the same words in reverse order.
    """
    rng = random.Random(str(prefix.name))
    with open(f"{prefix}.en", "w") as en, open(f"{prefix}.de", "w") as de:
        for _ in range(sentences):
            length = rng.randint(shortest, longest)
            words = [f"w{rng.randrange(20)}" for _ in range(length)]
            print(*words, file=en)
            print(*target(words), file=de)


def make_data(folder):
    """Fills the folder of the fixture `data` with text and binarised data, and returns the folder.

    The fixture describes the contents of the folder.
    """
    make_text(folder / "train", sentences=300)
    make_text(folder / "valid", sentences=13)
    make_text(folder / "test", sentences=TEST_SENTENCES)
    make_text(folder / "long", sentences=3, shortest=30, longest=30)
    argv = ["-s", "en", "-t", "de", "--joined-dictionary"]
    argv += ["--trainpref", folder / "train"]
    argv += ["--validpref", folder / "valid"]
    argv += ["--testpref", f"{folder}/test,{folder}/long"]
    argv += ["--destdir", folder / "bin"]
    run_cli(preprocess.cli_main, *argv)
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
        function: the function of the command, such as recipes.train.main. It takes a list of arguments. Tests of any
            other function pass a lambda that ignores this list: ``assert_refused(lambda _: f(x), part="...")``.
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
    """Waits until condition() returns a true value, and fails the test if that takes longer than `seconds`."""
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
        status = Path(f"/proc/{pid}/stat").read_text()  # "PID (NAME) STATE …", where NAME may have spaces and brackets
    except OSError:
        return False
    _pid_and_name, _bracket, state_and_other_fields = status.rpartition(")")
    state = state_and_other_fields.split()[0]
    return state != "Z"


@contextlib.contextmanager
def run_programs_in_process():
    """Lets recipes/ call programs such as fairseq-train and sacremoses in this process, within a with statement.

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
        # Like the original, this function appends to a log that is watched, and replaces any other log. A watched log
        # is that of a training, which may be continued: its log has all parts.
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

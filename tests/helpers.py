"""What the tests share: models and attention in small, a corpus in small, and the stock command lines."""

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
# For a process that ends after an update or two. fairseq's thread that loads ahead may then be at work still, and a
# thread inside PyTorch aborts the process when Python ends.
NO_THREAD = ["--data-buffer-size", "0"]
# a kind of model: the architecture that the tests build, and fairseq's own of the same size
KINDS = {
    "translation": ("transformer_synth_random_vanilla_multi30k", "transformer_multi30k"),
    "language_model": ("transformer_lm_synth_random_vanilla_ptb", "transformer_lm_ptb"),
    "encoder": ("roberta_synth_random_vanilla_agnews", "roberta_agnews"),
}
SIDES = {"translation": ("encoder", "decoder"), "language_model": ("decoder",), "encoder": ("encoder",)}
TEST_SENTENCES = 21  # no multiple of 8
# Each starts a worker process to load data. From the second call in one process on, ending it takes 5 seconds.
READERS = (generate.cli_main, interactive.cli_main, validate.cli_main, eval_lm.cli_main)
# every function alone and mixed with the next, every mixture with an architecture, and one triple: a new function is
# covered once it is registered
NAMES = list(SYNTHESIZERS)
SPECS = [*NAMES, *(f"{a}+{b}" for a, b in zip(NAMES, NAMES[1:])), "random+dense+vanilla"]
SPECS += [spec for spec in VARIANTS if spec not in SPECS]


class Distance(Synthesizer):
    """A function that the paper has not: without weights or a limit, the same for all heads."""

    has_max_length = False

    def forward(self, inputs):
        rows, columns = torch.arange(inputs.start, inputs.start + inputs.x.size(0)), torch.arange(inputs.src_len)
        return [Bias(-(rows[:, None] - columns).abs().float()[None, None])]


class Columns(Synthesizer):
    """A function whose rows are all alike: ``S_ij = c_j``."""

    def __init__(self, num_heads, head_dim, max_length, rank):
        super().__init__(num_heads, head_dim, max_length, rank)
        self.c = torch.nn.Parameter(torch.empty(num_heads, max_length))

    def reset_parameters(self):
        torch.nn.init.normal_(self.c)

    def forward(self, inputs):
        return [Bias(take_column_bias(self.c, inputs))]


def make_dictionary(words: int = 40) -> Dictionary:
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def future(length, dtype=torch.float32):
    """The host's mask of what is behind a row, which nobody but `plain` reads."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def padding_mask(lengths):
    """(B, S), true behind sentences of these lengths."""
    return torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]


def make_attention(
    spec, mixture="convex", embed_dim=6, num_heads=2, max_length=12, rank=3, seed=0, beyond_length="refuse", **kwargs
):
    """An attention with no parameter left at a value that hides a mistake (zeros, equal weights)."""
    torch.manual_seed(seed)
    groups = parse_heads(spec, num_heads)
    built = build_synthesizer(groups, mixture, embed_dim // num_heads, max_length, rank, beyond_length)
    module = SyntheticAttention(embed_dim, num_heads, built, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def make_task(words=40, tokens_per_sample=24):
    """What a model asks of a task."""
    dictionary = make_dictionary(words)
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary")
    cfg = SimpleNamespace(tokens_per_sample=tokens_per_sample)
    return SimpleNamespace(**dict.fromkeys(names, dictionary), max_positions=lambda: tokens_per_sample, cfg=cfg)


def make_model(arch="transformer_synth_random_vanilla_multi30k", seed=1, words=40, **flags):
    """A small model of an architecture, in eval mode."""
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


def in_use(state_dict):
    """Weights without those that fairseq 0.12.2 has beside: copies that nothing reads, a buffer that nothing sets."""
    dead = (*FAST_PATH_COPIES, "_float_tensor")
    return {name: weight for name, weight in state_dict.items() if name.split(".")[-1] not in dead}


def make_synth(spec, kind="translation", **flags):
    """A small model of a kind with the functions `spec` in every layer, its weights moved from where they start."""
    sides = {f"{side}_synthesizer": spec for side in SIDES[kind]}
    return perturb(make_model(KINDS[kind][0], **{**sides, **flags}))


def outputs(model, source, target):
    """Logits (B, T, words) of a model of any kind, and the tokens of its rows."""
    kind = type(model).__mro__
    names = {base.__name__ for base in kind}
    if "FairseqEncoderDecoderModel" in names:
        return model(source, None, target)[0], target
    tokens = target if "FairseqLanguageModel" in names else source
    return model(tokens)[0], tokens


def perturb(model, seed=3, std=0.3):
    """Moves every parameter, so that a bias of 0 or an even mixture hides nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "output_projection" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def pad_batch(sentences, left, pad=1):
    width = max(len(s) for s in sentences)
    batch = torch.full((len(sentences), width), pad)
    for row, s in zip(batch, sentences):
        row[width - len(s) if left else 0 :][: len(s)] = torch.tensor(s)
    return batch


def run_cli(main, *argv, stdin=None, form=None):
    """Runs a command line in this process; returns what it printed and logged, each line of it in a form."""
    if main in READERS:
        argv = (*argv, "--num-workers", "0")
    out, log = io.StringIO(), io.StringIO()
    handler, root = logging.StreamHandler(log), logging.getLogger()
    handler.setFormatter(logging.Formatter(form))
    root.addHandler(handler)
    old = sys.argv, sys.stdin, root.level
    root.setLevel("INFO")
    sys.argv, sys.stdin = ["fairseq", *map(str, argv)], io.StringIO(stdin or "")
    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        del checkpoint_utils.save_checkpoint.best  # the host's only state between runs
    try:
        # fairseq-validate removes the handlers of others, every second one
        with contextlib.redirect_stdout(out), mock.patch.object(validate, "reset_logging"):
            main()
    finally:
        sys.argv, sys.stdin, level = old
        root.setLevel(level)
        root.removeHandler(handler)
    return out.getvalue(), log.getvalue()


def complaint(main, *argv, stdin=None):
    """The one line that a user sees of a command line that fails, run in this process."""
    with pytest.raises(BaseException) as caught:
        run_cli(main, *argv, stdin=stdin)
    line = explain(caught.value)
    assert line and "\n" not in line, repr(caught.value)
    return line


def command(name, *argv, check=True, **kwargs):
    """Runs a command line in its own process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import sys; from fairseq_cli.{name} import cli_main; sys.exit(cli_main())"
    done = warm.run(["-c", code, *argv], env=environment, **kwargs)
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


def script(name, *argv, env=None, **kwargs):
    """Runs one of scripts/."""
    command = [ROOT / "scripts" / name, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, **kwargs)


def refused(function, *argv, part):
    """The function ends with one line in which a pattern is found, or each of several."""
    with pytest.raises(UserError) as error:
        function(list(map(str, argv)))
    said = str(error.value)
    assert "\n" not in said, said
    assert all(re.search(pattern, said) for pattern in ([part] if isinstance(part, str) else part)), said


def flag(line, name):
    """The last value of a flag in a command."""
    return re.findall(rf" {name} (\S+)", line)[-1]


def wait_for(condition, seconds=120):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "nothing happened"
        time.sleep(0.02)


def children(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid):
    """Whether a process has not ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

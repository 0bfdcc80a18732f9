"""The command ``python -m fairseq_synth.convert`` on tiny models.

The loss of a converted model is compared with a measurement: `fairseq_synth.inspect` replaces the logits of the same
heads in the old model, by hooks, and computes the loss.
"""

import argparse
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq_cli import generate, train, validate
from helpers import RECIPE, SMALL, USER_DIR, get_error_line, run_cli, used_weights

from fairseq_synth.convert import arguments, command
from fairseq_synth.convert.__main__ import main
from fairseq_synth.convert.conversion import choose_max_length, dot_product_heads
from fairseq_synth.inspect import checkpoints, hooks, measure, positional, words
from fairseq_synth.inspect.attentions import Head, HeadGroup, self_attentions
from fairseq_synth.inspect.passes import loss
from fairseq_synth.inspect.words import ReplacedHead
from fairseq_synth.names import POSITION_FUNCTIONS

# ---- checkpoints to convert


class Case(NamedTuple):
    """A kind of checkpoint.

    Attributes:
        has_one_stack: whether the model is a language model or an encoder, and not a translation model.
        architecture: the value of --arch.
        flags: further flags of its training.
    """

    has_one_stack: bool
    architecture: str
    flags: list[str]


class Checkpoint(NamedTuple):
    """A checkpoint to convert, and the folder with the binarised data of its training."""

    path: Path
    data: Path


# The sizes of a small translation model of fairseq, which has no flag --synth-max-length.
STOCK_SIZES = [word for word in SMALL if word not in ("--synth-max-length", "24")]
# The training of a model with one stack, for one update. `RECIPE` is the training of a translation model.
ONE_STACK_RECIPE = (
    "--optimizer adam --lr 0.01 --max-tokens 400 --num-workers 0 --no-progress-bar --seed 7 --max-update 1"
).split()
LANGUAGE_MODEL = (
    "--task language_modeling --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode none"
).split()
ENCODER = (
    "--task masked_lm --criterion masked_lm --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode eos --max-positions 40"
).split()
ADAPTIVE_INPUT_AND_SOFTMAX = (
    "--criterion adaptive_loss --ddp-backend legacy_ddp --add-bos-token --adaptive-input --adaptive-input-cutoff 8,16 "
    "--adaptive-softmax-cutoff 8,16"
).split()
HEADS_OF_TWO_KINDS = (
    "--encoder-attention-heads 4 --decoder-attention-heads 4 "
    "--encoder-synthesizer vanilla,factorized_random:1/random+vanilla:2/dense:1 "
    "--decoder-synthesizer factorized_dense+vanilla:2/vanilla:2"
).split()

CASES = {
    "post-norm": Case(has_one_stack=False, architecture="transformer_multi30k", flags=STOCK_SIZES),
    "pre-norm": Case(
        has_one_stack=False,
        architecture="transformer_iwslt_de_en",
        flags=["--encoder-normalize-before", "--decoder-normalize-before", *STOCK_SIZES],
    ),
    "of Hydra": Case(has_one_stack=False, architecture="transformer_multi30k", flags=STOCK_SIZES),
    "of older fairseq": Case(has_one_stack=False, architecture="transformer_multi30k", flags=STOCK_SIZES),
    "language model": Case(
        has_one_stack=True, architecture="transformer_lm", flags=[*LANGUAGE_MODEL, "--criterion", "cross_entropy"]
    ),
    "adaptive": Case(
        has_one_stack=True, architecture="transformer_lm", flags=[*LANGUAGE_MODEL, *ADAPTIVE_INPUT_AND_SOFTMAX]
    ),
    "encoder": Case(has_one_stack=True, architecture="roberta", flags=ENCODER),
    "heads of two kinds": Case(
        has_one_stack=False,
        architecture="transformer_synth_random_vanilla_multi30k",
        flags=[*SMALL, *HEADS_OF_TWO_KINDS],
    ),
    "mixed language model": Case(
        has_one_stack=True,
        architecture="transformer_lm_synth_random_vanilla_ptb",
        flags=[*LANGUAGE_MODEL, "--criterion", "cross_entropy"],
    ),
}


@pytest.fixture(scope="module")
def make_checkpoint(make_once, data, monolingual):
    """Provides a function ``make_checkpoint(name)``, which returns a `Checkpoint` of the case CASES[name].

    The first test that asks for a case trains its model. The model of "post-norm" is trained a little. Each other model
    is trained for one update, and noise is added to its attention, so that the attention weights are far from equal.
    """

    def make_checkpoint(name):
        """Returns the checkpoint, and trains its model if no test has done so before."""
        data_folder = monolingual if CASES[name].has_one_stack else data / "bin"

        def train_model(folder):
            """Fills the folder that `make_once` has made."""
            train_model_of_case(name, data_folder, folder)

        name_of_folder = f"trained-{name.replace(' ', '-')}"
        save_folder = make_once(name_of_folder, train_model)
        return Checkpoint(path=save_folder / "checkpoint_last.pt", data=data_folder)

    return make_checkpoint


def train_model_of_case(name, data_folder, save_folder):
    """Trains the model of a case, and writes checkpoint_last.pt.

    Args:
        name: a key of CASES.
        data_folder: the folder with binarised data.
        save_folder: the folder for the checkpoint.
    """
    case = CASES[name]
    is_trained_longer = name == "post-norm"
    if case.has_one_stack:
        recipe = ONE_STACK_RECIPE
    elif is_trained_longer:
        recipe = [*RECIPE, "--max-update", "160"]
    else:
        recipe = [*RECIPE, "--max-update", "1"]
    argv = [data_folder, *USER_DIR, *recipe, "--arch", case.architecture, *case.flags]
    argv += ["--no-epoch-checkpoints", "--disable-validation", "--save-dir", save_folder]
    run_cli(train.cli_main, *argv)

    path = save_folder / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    if not is_trained_longer:
        add_noise_to_self_attention(state["model"])
    if name == "of Hydra":
        # fairseq-hydra-train stores the options of the model as a dictionary.
        state["cfg"]["model"] = vars(state["cfg"]["model"])
    if name == "of older fairseq":
        # Older versions stored the command line instead of a config.
        state["args"] = state["cfg"]["model"]
        state["cfg"] = None
    torch.save(state, path)


def add_noise_to_self_attention(weights):
    """Adds noise to the parameters of self-attention in a state dict, always the same noise."""
    torch.manual_seed(0)  # The noise must not depend on the test that asks for the checkpoint first.
    for name, weight in weights.items():
        if "self_attn" in name and weight.is_floating_point():
            weight.add_(0.5 * torch.randn(weight.shape))


# ---- the command and the measurement


@pytest.fixture(autouse=True)
def average_over_few_sentences(monkeypatch):
    """Lets the command average attention over at most 60 sentences, unless it has the flag --sentences."""
    monkeypatch.setattr(arguments, "AVERAGED_SENTENCES", 60)


def make_argv(path, data, out, flags):
    """Returns the command line of a conversion, as strings."""
    argv = [path, "--data", data, "--out", out, *flags]
    return [str(word) for word in argv]


def convert(path, data, out, *flags):
    """Converts a checkpoint, and returns the five lines that the command prints.

    Args:
        path: the checkpoint.
        data: the folder with binarised data.
        out: the path of the new checkpoint.
        flags: further flags of the command.
    """
    printed, _log = run_cli(lambda: main(make_argv(path, data, out, flags)))
    return printed.splitlines()


def get_refusal(path, data, out, *flags):
    """Runs a conversion that has to fail, and returns the line with its error. The arguments are those of `convert`."""
    return get_error_line(lambda: main(make_argv(path, data, out, flags)))


def read_model_config(path):
    """Returns the options of the model in a converted checkpoint, as a dictionary."""
    return torch.load(path, weights_only=False)["cfg"]["model"]


def load_valid_batches(loaded):
    """Returns the split valid in batches, for a model that `checkpoints.load` has loaded."""
    sentences = checkpoints.readable(loaded, "valid")
    return checkpoints.batches(loaded, "valid", sentences)


def compute_loss(loaded):
    """Returns the loss of a loaded model on the split valid, in bits."""
    return loss(loaded, load_valid_batches(loaded))


def compute_loss_with_replaced_heads(loaded, batches, logits, heads):
    """Returns the loss of a loaded model in bits, measured while hooks replace the logits of some heads.

    Args:
        loaded: the model.
        batches: the data.
        logits: {self-attention: the logits by position of all its heads}.
        heads: the heads that get these logits.
    """
    with hooks.replaced_heads(loaded.model, logits, heads):
        return loss(loaded, batches)


def fit_logits(loaded, function, max_length, rank):
    """Returns {self-attention: the logits of a function that come nearest to its averaged attention}.

    Args:
        loaded: the model whose attention is averaged, over the split train.
        function: one of POSITION_FUNCTIONS.
        max_length: the number of positions, --synth-max-length.
        rank: the rank of factorized_random, --synth-rank.
    """
    averages = words.average(loaded, "train", arguments.AVERAGED_SENTENCES)
    logits = {}
    for name, constants in averages.constants.items():
        parameters = words.function_parameters(function, constants, max_length, rank)
        logits[name] = words.function_logits(function, parameters, max_length)
    return logits


def list_replaceable_heads(model):
    """Returns all heads of a model whose logits are dot products, alone or in a mixture."""
    heads = []
    for attention in self_attentions(model):
        heads += dot_product_heads(attention)
    return heads


def list_cases_with_functions():
    """Returns pairs of a case and a function: "post-norm" with every function, and each other case with one of them."""
    pairs = []
    for function in POSITION_FUNCTIONS:
        pairs.append(("post-norm", function))
    other_cases = [name for name in CASES if name != "post-norm"]
    for number, name in enumerate(other_cases, start=1):
        function = POSITION_FUNCTIONS[number % 3]  # the functions in turn
        pairs.append((name, function))
    return pairs


@pytest.mark.parametrize("case, function", list_cases_with_functions())
def test_the_loss_is_what_the_measurement_predicts(case, function, make_checkpoint, tmp_path):
    """A model whose heads are all converted has the loss of the old model with the logits of all heads replaced."""
    checkpoint = make_checkpoint(case)
    old = checkpoints.load(checkpoint.path, checkpoint.data)
    heads = list_replaceable_heads(old.model)
    flags = ["--rank", "3"]
    for stack in ("encoder", "decoder"):
        if any(head.attention.startswith(stack) for head in heads):
            flags += [f"--{stack}", function]

    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, *flags)

    config = read_model_config(out)
    old_loss = compute_loss(old)
    logits = fit_logits(old, function, config["synth_max_length"], config["synth_rank"])
    predicted_loss = compute_loss_with_replaced_heads(old, load_valid_batches(old), logits, heads)
    assert abs(predicted_loss - old_loss) > 1e-4  # Otherwise a conversion that changes nothing would pass, too.
    new_loss = compute_loss(checkpoints.load(out, checkpoint.data))
    assert new_loss == pytest.approx(predicted_loss, abs=1e-5)

    was_synthesizer = "_synth_" in CASES[case].architecture
    if was_synthesizer:
        assert config["synth_rank"] == old.cfg.model.synth_rank  # A Synthesizer keeps its own rank.
    else:
        assert config["synth_rank"] == 3
    assert len(lines) == 5
    assert lines[0].endswith(f"({checkpoint.path})")
    assert lines[1].startswith(f"loss, converted: {predicted_loss:.4f} bits")
    assert lines[1].endswith(f"({out})")


# ---- averages by position


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("depends_on_distance", [False, True])
def test_constant_logits_are_recovered_from_their_weights(is_causal, depends_on_distance):
    """If attention weights depend on positions alone, the fitted logits have the same weights.

    The sentences have several lengths. Logits by distance have the same weights only if the given logits depend on the
    distance alone.
    """
    if depends_on_distance:
        logits = positional.toeplitz(2 * torch.randn(2, 17), 9)
    else:
        logits = 2 * torch.randn(2, 9, 9)
    mean = positional.MeanByPosition()
    for length in (3, 9, 5, 7, 5, 2, 1, 8, 9):
        mean.add(measure.sentence_weights(logits[:, :length, :length], is_causal))
    constants = positional.fit_constants(mean, is_causal)

    expected_weights = measure.sentence_weights(logits, is_causal)
    weights_by_position = measure.sentence_weights(constants.by_position, is_causal)
    assert torch.allclose(weights_by_position, expected_weights, atol=1e-3)
    if is_causal:
        # Logits of columns that a row does not see are 0: the best approximation of a low rank depends on them, too.
        assert not constants.by_position.triu(1).any()
        assert not constants.by_distance[:, 9:].any()
    logits_by_distance = positional.toeplitz(constants.by_distance, 9)
    weights_by_distance = measure.sentence_weights(logits_by_distance, is_causal)
    is_close = torch.allclose(weights_by_distance, expected_weights, atol=1e-3)
    assert is_close == depends_on_distance


def test_a_weight_that_is_always_0_has_a_finite_logit():
    """A parameter of -inf could not be trained."""
    mean = positional.MeanByPosition()
    mean.add(torch.eye(4).expand(2, 4, 4))
    constants = positional.fit_constants(mean, causal=False)
    assert constants.by_position.isfinite().all()
    assert constants.by_distance.isfinite().all()
    weights = measure.sentence_weights(constants.matrix(4), causal=False)
    assert torch.allclose(weights, torch.eye(4), atol=1e-5)


def test_positions_beyond_the_longest_sentence_get_logits_by_distance():
    """This holds in the rows of the sentences, too. Distances beyond the largest one are treated like the largest."""
    logits = positional.toeplitz(2 * torch.randn(2, 13), 7)
    mean = positional.MeanByPosition()
    for length in (4, 4, 3):
        mean.add(measure.sentence_weights(logits[:, :length, :length], causal=False))
    constants = positional.fit_constants(mean, causal=False)
    weights = measure.sentence_weights(constants.matrix(7), causal=False)

    logits_of_small_distances = logits[:, 3, :7]  # row 3 has the distances from -3 to 3
    expected_logits = positional.toeplitz(logits_of_small_distances, 7)  # larger distances get the logits of -3 and 3
    assert torch.allclose(weights, measure.sentence_weights(expected_logits, causal=False), atol=1e-3)


def test_parameters_of_the_functions_give_the_constant_logits():
    """random and relative_random have exactly the logits by position and by distance, at any length.

    The logits of factorized_random are the best approximation of its rank.
    """
    constants = positional.Constants(by_position=torch.randn(2, 5, 5), by_distance=torch.randn(2, 9))
    for length in (3, 5, 8):
        logits = constants.matrix(length)

        r = words.function_parameters("relative_random", constants, length, rank=0)["r"]
        assert r.shape == (2, 2 * length + 1)
        distance = torch.arange(-length, length + 1)
        assert torch.equal(r, constants.by_distance[:, distance.clamp(-4, 4) + 4])

        R = words.function_parameters("random", constants, length, rank=0)["R"]
        assert torch.equal(R, logits)

        factors = words.function_parameters("factorized_random", constants, length, rank=2)
        assert factors["R1"].shape == (2, length, 2)
        assert factors["R2"].shape == (2, length, 2)
        product = words.function_logits("factorized_random", factors, length)
        error = (product - logits).norm(dim=(1, 2))
        # No matrix of rank 2 is nearer than the norm of all but the two largest singular values (Eckart and Young).
        smallest_error = torch.linalg.svdvals(logits)[:, 2:].norm(dim=1)
        assert torch.allclose(error, smallest_error, atol=1e-4)


# ---- some heads


def has_layer_with_one_of_two_heads(heads):
    """Returns whether some layer has exactly one of these heads. Each layer of the model has two heads."""
    heads_per_layer = Counter(head.attention for head in heads)
    return 1 in heads_per_layer.values()


def choose_number_of_heads(cheapest_heads_first, increases):
    """Returns a number of heads that a limit on the loss can ask for, and that leaves a layer half converted.

    One more head has to increase the loss more than any smaller number of heads does. A limit just below its increase
    then allows exactly the chosen number.

    Args:
        cheapest_heads_first: the 8 heads of a model whose layers have two heads each.
        increases: by how many bits the loss grows if the first 0, 1, … 8 heads are replaced.
    """
    for count in range(1, 8):
        is_next_head_worst = increases[count + 1] > max(increases[: count + 1])
        if is_next_head_worst and has_layer_with_one_of_two_heads(cheapest_heads_first[:count]):
            return count
    raise AssertionError(f"no number of heads fits: {cheapest_heads_first}, {increases}")


def count_parameters(model):
    """Returns the number of numbers in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def test_heads_within_converts_the_cheapest_heads_whose_loss_is_within_the_limit(make_checkpoint, tmp_path):
    """A layer of which only some heads are converted has heads of two kinds."""
    checkpoint = make_checkpoint("post-norm")
    old = checkpoints.load(checkpoint.path, checkpoint.data)
    logits = fit_logits(old, "random", max_length=13, rank=8)
    batches = load_valid_batches(old)

    def compute_loss_if_replaced(heads):
        """Returns the loss of the old model with the logits of these heads replaced."""
        return compute_loss_with_replaced_heads(old, batches, logits, heads)

    old_loss = compute_loss_if_replaced([])
    heads = list_replaceable_heads(old.model)
    cheapest_heads_first = sorted(heads, key=lambda head: compute_loss_if_replaced([head]))
    increases = [0.0]
    for count in range(1, len(heads) + 1):
        increases.append(compute_loss_if_replaced(cheapest_heads_first[:count]) - old_loss)
    chosen_count = choose_number_of_heads(cheapest_heads_first, increases)
    limit = (max(increases[: chosen_count + 1]) + increases[chosen_count + 1]) / 2

    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--heads-within", limit)

    assert lines[0].startswith(f"loss: {old_loss:.4f} bits")
    assert f"bits, {increases[chosen_count]:+.4f} (" in lines[1]
    new = checkpoints.load(out, checkpoint.data)
    assert compute_loss(new) - old_loss == pytest.approx(increases[chosen_count], abs=1e-5)

    groups_of_layers = [attention.head_groups() for attention in self_attentions(new.model)]
    converted_heads = 0
    for groups in groups_of_layers:
        for group in groups:
            if group.functions == ("random",):
                converted_heads += group.num_heads
    assert converted_heads == chosen_count
    assert [HeadGroup(("random",), 1), HeadGroup(("vanilla",), 1)] in groups_of_layers

    assert "are random" in lines[2]
    printed_counts = [int(number) for number in re.findall(r"(\d+) of the", lines[2])]
    assert sum(printed_counts) == chosen_count
    assert lines[3] == f"parameters: {count_parameters(old.model):,} before, {count_parameters(new.model):,} after"


@pytest.mark.parametrize(
    "case, heads, encoder_synthesizer, decoder_synthesizer",
    [
        ("post-norm", [Head("encoder.self.1", 1)], "vanilla,random:1/vanilla:1", "vanilla"),
        (
            "heads of two kinds",
            [Head("encoder.self.1", 1), Head("decoder.self.0", 3), Head("decoder.self.0", 0)],
            "vanilla,factorized_random:1/random:1/random+vanilla:1/dense:1",
            "random:1/factorized_dense+vanilla:1/vanilla:1/random:1,factorized_dense+vanilla:2/vanilla:2",
        ),
    ],
)
def test_the_other_heads_of_a_layer_stay_as_they_are(
    case, heads, encoder_synthesizer, decoder_synthesizer, make_checkpoint, tmp_path, monkeypatch
):
    """They keep their functions, their weights, queries and keys, and the slice of the input that they see."""

    def replace_heads_of_this_test(*arguments):
        """Stands in for the function that replaces the cheapest heads first. These heads cost nothing."""
        for head in heads:
            yield ReplacedHead(head, loss=0.0)

    monkeypatch.setattr(command, "replace_cheapest_heads_first", replace_heads_of_this_test)
    checkpoint = make_checkpoint(case)
    out = tmp_path / "new.pt"
    convert(checkpoint.path, checkpoint.data, out, "--heads-within", "1")

    config = read_model_config(out)
    assert config["encoder_synthesizer"] == encoder_synthesizer
    assert config["decoder_synthesizer"] == decoder_synthesizer
    old = checkpoints.load(checkpoint.path, checkpoint.data)
    logits = fit_logits(old, "random", config["synth_max_length"], config["synth_rank"])
    predicted_loss = compute_loss_with_replaced_heads(old, load_valid_batches(old), logits, heads)
    new_loss = compute_loss(checkpoints.load(out, checkpoint.data))
    assert new_loss == pytest.approx(predicted_loss, abs=1e-5)


def test_only_sentences_within_the_flags_are_read(make_checkpoint, tmp_path):
    """Attention is averaged over sentences of at most ``--max-length`` tokens, and over ``--sentences`` of them.

    The loss is that of the first ``--sentences`` sentences, without the longer ones.
    """
    checkpoint = make_checkpoint("post-norm")
    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--max-length", "9", "--sentences", "4")

    old = checkpoints.load(checkpoint.path, checkpoint.data)
    averages = words.average(old, "train", 4, longest=9)
    assert averages.length == 9  # The longest allowed sentence is one of the four.
    assert averages.sentences == 4
    assert not averages.constants["decoder.self.0"].by_position.triu(1).any()

    logits = {name: constants.matrix(9) for name, constants in averages.constants.items()}
    sentences = checkpoints.readable(old, "valid", 4, longest=9)
    batches = checkpoints.batches(old, "valid", sentences)
    heads = list_replaceable_heads(old.model)
    predicted_loss = compute_loss_with_replaced_heads(old, batches, logits, heads)
    assert len(sentences) == 3
    assert "on 3 sentences of valid" in lines[0]
    assert f"loss, converted: {predicted_loss:.4f}" in lines[1]


def test_only_the_chosen_layers_are_converted(make_checkpoint, tmp_path):
    """Each stack gets the function of its flag. All other weights stay the same, bit by bit."""
    checkpoint = make_checkpoint("pre-norm")
    out = tmp_path / "new.pt"
    flags = ["--layers", "encoder.self.1,decoder.self.0", "--encoder", "relative_random", "--decoder", "random"]
    convert(checkpoint.path, checkpoint.data, out, *flags, "--max-length", "13")

    new_state = torch.load(out, weights_only=False)
    config = new_state["cfg"]["model"]
    assert config["encoder_synthesizer"] == "vanilla,relative_random"
    assert config["decoder_synthesizer"] == "random,vanilla"
    assert config["synth_max_length"] == 13

    old_weights = used_weights(torch.load(checkpoint.path, weights_only=False)["model"])
    removed_names = {name for name in old_weights if name not in new_state["model"] and "version" not in name}
    assert removed_names == {
        "encoder.layers.1.self_attn.q_proj.weight",
        "encoder.layers.1.self_attn.q_proj.bias",
        "encoder.layers.1.self_attn.k_proj.weight",
        "encoder.layers.1.self_attn.k_proj.bias",
        "decoder.layers.0.self_attn.q_proj.weight",
        "decoder.layers.0.self_attn.q_proj.bias",
        "decoder.layers.0.self_attn.k_proj.weight",
        "decoder.layers.0.self_attn.k_proj.bias",
    }
    for name, weight in used_weights(new_state["model"]).items():
        if "synthesizer" not in name:
            assert torch.equal(old_weights[name], weight), name

    assert new_state["last_optimizer_state"] is None
    assert "best" not in new_state["extra_state"]
    assert "ema" not in new_state["extra_state"]
    new = checkpoints.load(out, checkpoint.data)
    assert new.build_initial_model() is None  # because it was not trained from scratch


@pytest.mark.parametrize(
    "task_options, model_options, max_length_flag, expected",
    [
        ({}, {}, None, 9),
        ({}, {}, 7, 7),
        ({"tokens_per_sample": 32}, {}, None, 32),
        ({"tokens_per_sample": 32}, {"add_bos_token": True}, 12, 33),
        ({}, {"max_positions": 40}, 40, 40),
    ],
)
def test_the_maximum_length_fits_the_data_and_the_rows_of_the_task(
    task_options, model_options, max_length_flag, expected
):
    """Without a flag, it is the length of the longest sentence, which has 9 tokens.

    It is never less than the length of a row that the task makes of the data.
    """
    cfg = argparse.Namespace(task=argparse.Namespace(**task_options), model=argparse.Namespace(**model_options))
    loaded = checkpoints.Loaded(path=None, cfg=cfg, task=None, model=None, updates=None, data=None)
    assert choose_max_length(loaded, longest_read=9, max_length_flag=max_length_flag) == expected


# ---- use of a converted model


def test_a_converted_model_is_used_as_any_other(make_checkpoint, data, tmp_path):
    """It validates to the loss printed, generates, is tuned by the command printed, and goes on training."""
    checkpoint = make_checkpoint("post-norm")
    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--decoder", "vanilla")
    assert lines[2] == "heads: 4 of the encoder's 4 are random, 0 of the decoder's 4 are converted"

    # It validates to the loss printed.
    reading_flags = [checkpoint.data, *USER_DIR, "--path", out, "--max-tokens", "500"]
    _, log = run_cli(validate.cli_main, *reading_flags, "--task", "translation", "--valid-subset", "valid")
    validated_loss = float(re.search("nll_loss ([0-9.]+)", log)[1])
    printed_loss = float(re.search("converted: ([0-9.]+)", lines[1])[1])
    assert validated_loss == pytest.approx(printed_loss, abs=6e-4)

    # It generates a hypothesis for each sentence.
    printed, _ = run_cli(generate.cli_main, *reading_flags, "--gen-subset", "valid", "--beam", "2")
    hypotheses = re.findall(r"^H-", printed, re.M)
    assert len(hypotheses) == 13

    # It is tuned by the command printed.
    printed_flags = lines[4].split("to tune it: fairseq-train ")[1]
    printed_flags = printed_flags.replace('"$(python -m fairseq_synth)"', USER_DIR[1])
    tuning_flags = [*shlex.split(printed_flags), "--max-update", "1", "--num-workers", "0", "--no-epoch-checkpoints"]
    run_cli(train.cli_main, *tuning_flags, "--save-dir", tmp_path / "tuned")
    tuned_state = torch.load(tmp_path / "tuned" / "checkpoint_last.pt", weights_only=False)
    converted_state = torch.load(out, weights_only=False)
    assert tuned_state["model"].keys() == converted_state["model"].keys()
    assert tuned_state["cfg"]["task"]["left_pad_source"]
    assert tuned_state["cfg"]["optimization"]["lr"] == [0.0033]

    # It goes on training, with --restore-file instead of --finetune-from-model and its value.
    position = tuning_flags.index("--finetune-from-model")
    resuming_flags = tuning_flags[:position] + tuning_flags[position + 2 :]
    run_cli(train.cli_main, *resuming_flags, "--restore-file", out, "--save-dir", tmp_path / "resumed")
    assert (tmp_path / "resumed" / "checkpoint_last.pt").exists()


def test_the_command_printed_has_the_flags_of_the_training(make_checkpoint, tmp_path):
    """The command that tunes the new model has the batch size, the optimizer etc. of the old model."""
    checkpoint = make_checkpoint("of Hydra")
    state = torch.load(checkpoint.path, weights_only=False)
    state["cfg"]["dataset"]["max_tokens"] = None
    state["cfg"]["dataset"]["batch_size"] = 7
    state["cfg"]["optimizer"]["adam_betas"] = [0.9, 0.98]
    state["cfg"]["optimization"]["update_freq"] = [4]
    state["cfg"]["optimization"]["clip_norm"] = 2.5
    torch.save(state, tmp_path / "old.pt")

    lines = convert(tmp_path / "old.pt", checkpoint.data, tmp_path / "new.pt")
    tuning_command = shlex.split(lines[4])
    expected_values = {
        "--batch-size": "7",
        "--update-freq": "4",
        "--clip-norm": "2.5",
        "--adam-betas": "(0.9, 0.98)",
        "--lr": "0.0033",
        "--encoder-synthesizer": "random",
        "--label-smoothing": "0.1",
        "--save-dir": "new-tuned",
    }
    for flag, expected_value in expected_values.items():
        position = tuning_command.index(flag)
        assert tuning_command[position + 1] == expected_value, flag
    assert "--max-tokens" not in tuning_command
    assert tuning_command.count("--lr") == 1


# ---- bad input


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--encoder dense", ["--encoder dense: no closed form", "random"]),
        ("--decoder lstm", ["unknown function", "relative_random"]),
        ("--layers decoder.cross.0", ["cross-attention cannot be replaced"]),
        ("--layers encoder.self.7", ["no such attention", "encoder.self.1"]),
        ("--encoder vanilla --decoder vanilla", ["no head to replace"]),
        ("--max-length 30", ["--max-length 30", "13 tokens", "relative_random"]),
        ("--heads-within 0", ["--heads-within 0.0: must be above 0"]),
        ("--sentences 0", ["--sentences 0"]),
        ("--max-length 0", ["--max-length 0: must be above 0"]),
        ("--rank 0", ["--rank 0"]),
        ("--subset none", ["has no split 'none'"]),
        ("--user-dir nowhere", ["--user-dir nowhere: no such folder"]),
        ("--data nowhere", ["--data nowhere: no such folder"]),
    ],
)
def test_refuses_flags(flags, parts, make_checkpoint, tmp_path):
    """The command names the flag that it cannot use, and writes nothing."""
    checkpoint = make_checkpoint("post-norm")
    line = get_refusal(checkpoint.path, checkpoint.data, tmp_path / "new.pt", *flags.split())
    for part in parts:
        assert part in line
    assert list(tmp_path.iterdir()) == []


def write_checkpoint_with_options(old_path, new_path, **options):
    """Writes a checkpoint again, with other options of its model, such as cross_self_attention=True."""
    state = torch.load(old_path, weights_only=False)
    old_options = vars(state["cfg"]["model"])
    state["cfg"]["model"] = argparse.Namespace(**{**old_options, **options})
    torch.save(state, new_path)


def test_refuses_checkpoints_and_places(make_checkpoint, monolingual, tmp_path):
    """The command refuses models that it cannot convert, other data, and places where it cannot write."""
    checkpoint = make_checkpoint("post-norm")
    out = tmp_path / "new.pt"

    script_path = tmp_path / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(script_path)
    assert "a TorchScript file" in get_refusal(script_path, checkpoint.data, out)

    align_path = tmp_path / "align.pt"
    write_checkpoint_with_options(checkpoint.path, align_path, _name="transformer_align")
    assert "TransformerAlignModel cannot be converted" in get_refusal(align_path, checkpoint.data, out)

    cross_path = tmp_path / "cross.pt"
    write_checkpoint_with_options(checkpoint.path, cross_path, _name="transformer_multi30k", cross_self_attention=True)
    assert "self-attention also reads the source" in get_refusal(cross_path, checkpoint.data, out)

    assert "no pair of languages" in get_refusal(checkpoint.path, monolingual, out)

    language_model = make_checkpoint("language model")
    line = get_refusal(language_model.path, language_model.data, out, "--encoder", "random")
    assert "the model has no encoder" in line

    synthesizer = make_checkpoint("heads of two kinds")
    line = get_refusal(synthesizer.path, synthesizer.data, out, "--max-length", "20")
    assert "already has --synth-max-length 24" in line

    path_without_folder = tmp_path / "none" / "new.pt"
    assert "its folder does not exist" in get_refusal(checkpoint.path, checkpoint.data, path_without_folder)
    assert not out.exists()

    out.write_text("mine")
    assert "exists already; use --force" in get_refusal(checkpoint.path, checkpoint.data, out)
    assert out.read_text() == "mine"
    convert(checkpoint.path, checkpoint.data, out, "--force", "--encoder", "vanilla")
    assert compute_loss(checkpoints.load(out, checkpoint.data)) > 0


def test_refuses_weights_that_are_not_numbers(make_checkpoint, tmp_path):
    """The command refuses a model with an infinite weight, and writes nothing."""
    checkpoint = make_checkpoint("post-norm")
    state = torch.load(checkpoint.path, weights_only=False)
    state["model"]["encoder.layers.0.fc1.bias"][0] = float("inf")
    diverged_path = tmp_path / "diverged.pt"
    torch.save(state, diverged_path)
    line = get_refusal(diverged_path, checkpoint.data, tmp_path / "new.pt")
    assert line.startswith(f"{diverged_path}: its weight encoder.layers.0.fc1.bias has values that are not")
    assert not (tmp_path / "new.pt").exists()


def test_refuses_bits_that_no_head_is_within(make_checkpoint, tmp_path, monkeypatch):
    """If every single head costs more than ``--heads-within`` allows, the error says what the cheapest one costs."""
    checkpoint = make_checkpoint("post-norm")
    old_loss = compute_loss(checkpoints.load(checkpoint.path, checkpoint.data))
    losses = {Head("encoder.self.0", 0): old_loss + 2, Head("encoder.self.0", 1): old_loss + 0.75}

    def replace_heads_of_this_test(*arguments):
        """Stands in for the function that measures the loss while more and more heads are replaced."""
        for head, loss_with_head in losses.items():
            yield ReplacedHead(head, loss=loss_with_head)

    monkeypatch.setattr(command, "losses_with_single_heads_replaced", lambda *arguments: losses)
    monkeypatch.setattr(command, "replace_cheapest_heads_first", replace_heads_of_this_test)
    line = get_refusal(checkpoint.path, checkpoint.data, tmp_path / "new.pt", "--heads-within", "0.5")
    assert "each head costs at least 0.75 bits" in line


def test_refuses_quantised_projections(make_checkpoint, tmp_path, monkeypatch):
    """A quantised projection is a module of another class than torch.nn.Linear, which has no weights for each head."""

    def load_quantised(*arguments):
        """Loads a model, and puts a module of another class in the place of a projection."""
        loaded = checkpoints.load(*arguments)
        loaded.model.encoder.layers[0].self_attn.v_proj = torch.nn.Identity()
        return loaded

    monkeypatch.setattr(command, "load", load_quantised)
    checkpoint = make_checkpoint("post-norm")
    assert "quantised" in get_refusal(checkpoint.path, checkpoint.data, tmp_path / "new.pt")

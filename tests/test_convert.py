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
        config_format: how the checkpoint has the options of the training: as fairseq-train writes them, or "hydra", as
            fairseq-hydra-train does, or "args", as older versions of fairseq did.
    """

    has_one_stack: bool
    architecture: str
    flags: list[str]
    config_format: str = "config"


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
    "of Hydra": Case(
        has_one_stack=False, architecture="transformer_multi30k", flags=STOCK_SIZES, config_format="hydra"
    ),
    "of older fairseq": Case(
        has_one_stack=False, architecture="transformer_multi30k", flags=STOCK_SIZES, config_format="args"
    ),
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

    The model of "post-norm" is trained for 160 updates. The other models are trained for one update, and noise is added
    to their self-attention: without it, their attention weights would be almost equal.

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
    if case.config_format == "hydra":
        # fairseq-hydra-train stores the options of the model as a dictionary.
        state["cfg"]["model"] = vars(state["cfg"]["model"])
    elif case.config_format == "args":
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
    names_of_attentions = {head.attention for head in heads}  # such as "encoder.self.0"
    flags = ["--rank", "3"]
    if any(name.startswith("encoder.") for name in names_of_attentions):
        flags += ["--encoder", function]
    if any(name.startswith("decoder.") for name in names_of_attentions):
        flags += ["--decoder", function]

    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, *flags)

    # the loss
    config = read_model_config(out)
    old_loss = compute_loss(old)
    logits = fit_logits(old, function, config["synth_max_length"], config["synth_rank"])
    predicted_loss = compute_loss_with_replaced_heads(old, load_valid_batches(old), logits, heads)
    assert abs(predicted_loss - old_loss) > 1e-4  # Otherwise a conversion that changes nothing would pass, too.
    new_loss = compute_loss(checkpoints.load(out, checkpoint.data))
    assert new_loss == pytest.approx(predicted_loss, abs=1e-5)

    # the rank
    was_synthesizer = "_synth_" in CASES[case].architecture  # such as "transformer_synth_random_vanilla_multi30k"
    if was_synthesizer:
        assert config["synth_rank"] == old.cfg.model.synth_rank  # A Synthesizer keeps its own rank.
    else:
        assert config["synth_rank"] == 3  # the value of --rank

    # what the command prints: the loss before, the loss after, and three more lines
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
    length_of_longest = 9
    number_of_distances = 2 * length_of_longest - 1  # from -8 to 8; the index 0 stands for -8, and the index 8 for 0
    if depends_on_distance:
        logits = positional.toeplitz(2 * torch.randn(2, number_of_distances), length_of_longest)
    else:
        logits = 2 * torch.randn(2, length_of_longest, length_of_longest)
    mean = positional.MeanByPosition()
    for length in (3, 9, 5, 7, 5, 2, 1, 8, 9):
        mean.add(measure.sentence_weights(logits[:, :length, :length], is_causal))
    constants = positional.fit_constants(mean, is_causal)

    expected_weights = measure.sentence_weights(logits, is_causal)
    weights_by_position = measure.sentence_weights(constants.by_position, is_causal)
    assert torch.allclose(weights_by_position, expected_weights, atol=1e-3)
    if is_causal:
        # A row does not see later columns, so that any logits there would fit. They are 0, because factorized_random
        # approximates the whole matrix: other numbers would make its approximation worse.
        assert not constants.by_position.triu(1).any()
        index_of_distance_1 = 9
        assert not constants.by_distance[:, index_of_distance_1:].any()
    logits_by_distance = positional.toeplitz(constants.by_distance, length_of_longest)
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
    """Logits by distance are fitted to sentences of up to 4 words, and used in a sentence of 7 words.

    The distances j - i of the 4 words are -3 to 3. All rows of the 7 words, also the first 4, have the logits of these
    distances. Larger distances have the logits of -3 and 3.
    """
    length = 7
    number_of_distances = 2 * length - 1  # from -6 to 6
    logits = positional.toeplitz(2 * torch.randn(2, number_of_distances), length)
    mean = positional.MeanByPosition()
    for length_of_sentence in (4, 4, 3):
        logits_of_sentence = logits[:, :length_of_sentence, :length_of_sentence]
        mean.add(measure.sentence_weights(logits_of_sentence, causal=False))
    constants = positional.fit_constants(mean, causal=False)
    weights = measure.sentence_weights(constants.matrix(length), causal=False)

    logits_of_small_distances = logits[:, 3, :]  # The 7 columns have the distances -3 to 3 from row 3.
    # `toeplitz` gives the distances beyond those of its argument the logits of -3 and 3.
    expected_logits = positional.toeplitz(logits_of_small_distances, length)
    assert torch.allclose(weights, measure.sentence_weights(expected_logits, causal=False), atol=1e-3)


def test_parameters_of_the_functions_give_the_constant_logits():
    """random and relative_random have exactly the logits by position and by distance, at any length.

    The logits of factorized_random are the best approximation of its rank.
    """
    # Attention was averaged over sentences of 5 words. So the distances j - i are known from -4 to 4.
    largest_known_distance = 4
    constants = positional.Constants(by_position=torch.randn(2, 5, 5), by_distance=torch.randn(2, 9))
    for length in (3, 5, 8):
        logits = constants.matrix(length)

        # relative_random has a parameter for each distance from -length to length. Those of larger distances than the
        # known ones are equal to the outermost known ones.
        r = words.function_parameters("relative_random", constants, length, rank=0)["r"]
        assert r.shape == (2, 2 * length + 1)
        distances = torch.arange(-length, length + 1)
        known_distances = distances.clamp(-largest_known_distance, largest_known_distance)
        indices = known_distances + largest_known_distance  # the distance -4 has the index 0
        assert torch.equal(r, constants.by_distance[:, indices])

        R = words.function_parameters("random", constants, length, rank=0)["R"]
        assert torch.equal(R, logits)

        factors = words.function_parameters("factorized_random", constants, length, rank=2)
        assert factors["R1"].shape == (2, length, 2)
        assert factors["R2"].shape == (2, length, 2)
        product = words.function_logits("factorized_random", factors, length)
        error = (product - logits).norm(dim=(1, 2))
        # The best matrix of rank 2 keeps the two largest singular values. Its error is the norm of all the others
        # (Eckart and Young).
        smallest_possible_error = torch.linalg.svdvals(logits)[:, 2:].norm(dim=1)
        assert torch.allclose(error, smallest_possible_error, atol=1e-4)


# ---- some heads


def has_layer_with_one_of_two_heads(heads):
    """Returns whether some layer has exactly one of these heads. Each layer of the model has two heads."""
    heads_per_layer = Counter(head.attention for head in heads)
    return 1 in heads_per_layer.values()


def choose_number_of_heads(cheapest_heads_first, increases):
    """Returns a number of heads to replace that meets two conditions.

    1. A limit on the loss can ask for exactly this number: with one head more, the loss increases more than with any
       smaller number. If the increases with 0, 1, 2 and 3 heads are 0, 3, 2 and 5, the number may be 2, as 5 > 3. It
       may not be 1, because a limit that allows the increase 3 of one head also allows the increase 2 of two heads.
    2. It leaves a layer half converted.

    Args:
        cheapest_heads_first: all heads of a model whose layers have two heads each.
        increases: by how many bits the loss grows if the first 0, 1, … heads are replaced.
    """
    for count in range(1, len(cheapest_heads_first)):
        largest_increase_so_far = max(increases[: count + 1])
        increase_with_one_more = increases[count + 1]
        is_next_head_worst = increase_with_one_more > largest_increase_so_far
        if is_next_head_worst and has_layer_with_one_of_two_heads(cheapest_heads_first[:count]):
            return count
    raise AssertionError(f"no number of heads fits: {cheapest_heads_first}, {increases}")


def count_parameters(model):
    """Returns the number of numbers in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def test_heads_within_converts_the_cheapest_heads_whose_loss_is_within_the_limit(make_checkpoint, tmp_path):
    """The heads are replaced one after another, those that cost least alone first, as long as the loss is allowed.

    A layer of which only some heads are converted has heads of two kinds.
    """
    checkpoint = make_checkpoint("post-norm")
    old = checkpoints.load(checkpoint.path, checkpoint.data)
    logits = fit_logits(old, "random", max_length=13, rank=8)
    batches = load_valid_batches(old)

    def compute_loss_if_replaced(heads):
        """Returns the loss of the old model with the logits of these heads replaced."""
        return compute_loss_with_replaced_heads(old, batches, logits, heads)

    # The test replaces more and more heads itself.
    old_loss = compute_loss_if_replaced([])
    heads = list_replaceable_heads(old.model)
    cheapest_heads_first = sorted(heads, key=lambda head: compute_loss_if_replaced([head]))
    increases = [0.0]  # increases[n]: by how much the loss grows if the n cheapest heads are replaced
    for count in range(1, len(heads) + 1):
        increases.append(compute_loss_if_replaced(cheapest_heads_first[:count]) - old_loss)

    # The limit is between the largest increase up to the chosen number of heads and the increase with one head more. So
    # it allows exactly the chosen number.
    chosen_count = choose_number_of_heads(cheapest_heads_first, increases)
    largest_allowed_increase = max(increases[: chosen_count + 1])
    first_refused_increase = increases[chosen_count + 1]
    limit = (largest_allowed_increase + first_refused_increase) / 2

    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--heads-within", limit)

    # The new model has the loss that was measured, and the command prints it.
    new = checkpoints.load(out, checkpoint.data)
    expected_increase = increases[chosen_count]
    assert compute_loss(new) - old_loss == pytest.approx(expected_increase, abs=1e-5)
    loss_line = lines[0]
    converted_loss_line = lines[1]
    assert loss_line.startswith(f"loss: {old_loss:.4f} bits")
    assert f"bits, {expected_increase:+.4f} (" in converted_loss_line

    # So many heads of the new model are random, and some layer has heads of two kinds.
    groups_of_layers = [attention.head_groups() for attention in self_attentions(new.model)]
    converted_heads = 0
    for groups in groups_of_layers:
        for group in groups:
            if group.functions == ("random",):
                converted_heads += group.num_heads
    assert converted_heads == chosen_count
    assert [HeadGroup(("random",), 1), HeadGroup(("vanilla",), 1)] in groups_of_layers

    # The next lines are such as "heads: 3 of the encoder's 4 are random, 2 of the decoder's 4 are random", and
    # "parameters: 9,000 before, 8,000 after".
    heads_line = lines[2]
    parameters_line = lines[3]
    assert "are random" in heads_line
    printed_counts = [int(number) for number in re.findall(r"(\d+) of the", heads_line)]
    assert sum(printed_counts) == chosen_count
    old_size = count_parameters(old.model)
    new_size = count_parameters(new.model)
    assert parameters_line == f"parameters: {old_size:,} before, {new_size:,} after"


@pytest.mark.parametrize(
    "case, heads, encoder_synthesizer, decoder_synthesizer",
    [
        # The encoder was "vanilla,vanilla", with two heads per layer. Head 1 of layer 1 is converted, and now is its
        # first head.
        ("post-norm", [Head("encoder.self.1", 1)], "vanilla,random:1/vanilla:1", "vanilla"),
        # The encoder was "vanilla,factorized_random:1/random+vanilla:2/dense:1". In layer 1, head 1, the first one of
        # random+vanilla, is converted to random.
        # The decoder was "factorized_dense+vanilla:2/vanilla:2" in both layers. In layer 0, the first and the last head
        # are converted to random.
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
    """They keep their functions, their weights, queries and keys, and the slice of the input that they see.

    The loss would tell if they did not: it is that of the old model with the logits of the chosen heads replaced.

    Args:
        case: the old model.
        heads: the heads that are converted.
        encoder_synthesizer, decoder_synthesizer: the functions of the heads of the new model.
    """

    def replace_heads_of_this_test(loaded, batches, logits, losses):
        """Stands in for the function that replaces the cheapest heads first: here these are `heads`, at no cost."""
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
    """The flags ``--max-length 9 --sentences 4`` mean two things.

    Attention is averaged over 4 sentences of the split train, all of which have at most 9 tokens.

    The loss is that of the first 4 sentences of the split valid, without the longer ones. One of them is longer, so it
    is the loss of 3 sentences.
    """
    checkpoint = make_checkpoint("post-norm")
    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--max-length", "9", "--sentences", "4")

    # The test averages attention over such sentences itself.
    old = checkpoints.load(checkpoint.path, checkpoint.data)
    averages = words.average(old, "train", 4, longest=9)
    assert averages.length == 9  # The longest allowed sentence is one of the four.
    assert averages.sentences == 4
    decoder_logits = averages.constants["decoder.self.0"].by_position
    assert not decoder_logits.triu(1).any()  # A decoder does not see later columns, which have the logit 0.

    # It computes the loss of the old model, with these logits in all heads, for such sentences.
    logits = {name: constants.matrix(9) for name, constants in averages.constants.items()}
    heads = list_replaceable_heads(old.model)
    sentences = checkpoints.readable(old, "valid", 4, longest=9)
    assert len(sentences) == 3  # One of the first four is longer.
    batches = checkpoints.batches(old, "valid", sentences)
    predicted_loss = compute_loss_with_replaced_heads(old, batches, logits, heads)

    # The command has computed the same loss.
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
        # The data of a translation model are sentences, so the flag decides.
        ({}, {}, None, 9),
        ({}, {}, 7, 7),
        # A language model reads rows of 32 tokens, or of 33 with the one at the beginning. A flag of 12 is too small.
        ({"tokens_per_sample": 32}, {}, None, 32),
        ({"tokens_per_sample": 32}, {"add_bos_token": True}, 12, 33),
        # An encoder may go on with rows of 40 tokens, although no sentence has more than 9. So the flag may be 40.
        ({}, {"max_positions": 40}, 40, 40),
    ],
)
def test_the_maximum_length_fits_the_data_and_the_rows_of_the_task(
    task_options, model_options, max_length_flag, expected
):
    """Without a flag, it is the length of the longest sentence, which has 9 tokens.

    It is never less than the length of a row that the task makes of the data, whatever the flag says.
    """
    cfg = argparse.Namespace(task=argparse.Namespace(**task_options), model=argparse.Namespace(**model_options))
    loaded = checkpoints.Loaded(path=None, cfg=cfg, task=None, model=None, updates=None, data=None)
    assert choose_max_length(loaded, longest_read=9, max_length_flag=max_length_flag) == expected


# ---- use of a converted model


def test_a_converted_model_is_used_as_any_other(make_checkpoint, data, tmp_path):
    """It validates to the loss printed, generates, is tuned by the command printed, and goes on training.

    The command prints five lines, of which this test reads three:

        loss, converted: 3.1234 bits, +0.1234 (…)
        heads: 4 of the encoder's 4 are random, …
        to tune it: fairseq-train …
    """
    checkpoint = make_checkpoint("post-norm")
    out = tmp_path / "new.pt"
    lines = convert(checkpoint.path, checkpoint.data, out, "--decoder", "vanilla")
    loss_line = lines[1]
    heads_line = lines[2]
    tuning_line = lines[4]
    assert heads_line == "heads: 4 of the encoder's 4 are random, 0 of the decoder's 4 are converted"

    # It validates to the loss printed.
    reading_flags = [checkpoint.data, *USER_DIR, "--path", out, "--max-tokens", "500"]
    _, log = run_cli(validate.cli_main, *reading_flags, "--task", "translation", "--valid-subset", "valid")
    validated_loss = float(re.search("nll_loss ([0-9.]+)", log)[1])
    printed_loss = float(re.search("converted: ([0-9.]+)", loss_line)[1])
    assert validated_loss == pytest.approx(printed_loss, abs=6e-4)

    # It generates a hypothesis for each sentence.
    number_of_sentences = 13  # in the split valid
    printed, _ = run_cli(generate.cli_main, *reading_flags, "--gen-subset", "valid", "--beam", "2")
    hypotheses = re.findall(r"^H-", printed, re.M)
    assert len(hypotheses) == number_of_sentences

    # It is tuned by the command printed.
    printed_flags = tuning_line.split("to tune it: fairseq-train ")[1]
    printed_flags = printed_flags.replace('"$(python -m fairseq_synth)"', USER_DIR[1])
    tuning_flags = [*shlex.split(printed_flags), "--max-update", "1", "--num-workers", "0", "--no-epoch-checkpoints"]
    run_cli(train.cli_main, *tuning_flags, "--save-dir", tmp_path / "tuned")
    tuned_state = torch.load(tmp_path / "tuned" / "checkpoint_last.pt", weights_only=False)
    converted_state = torch.load(out, weights_only=False)
    assert tuned_state["model"].keys() == converted_state["model"].keys()
    # The old model was trained with these options, and the printed command has their flags.
    assert tuned_state["cfg"]["task"]["left_pad_source"]
    assert tuned_state["cfg"]["optimization"]["lr"] == [0.0033]

    # It goes on training, with --restore-file instead of --finetune-from-model.
    position = tuning_flags.index("--finetune-from-model")
    flags_before = tuning_flags[:position]
    flags_after = tuning_flags[position + 2 :]  # without the flag and its value
    resuming_flags = [*flags_before, *flags_after, "--restore-file", out]
    run_cli(train.cli_main, *resuming_flags, "--save-dir", tmp_path / "resumed")
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
    # The dearer head comes first, so that the error is right only if the costs are compared.
    losses = {Head("encoder.self.0", 0): old_loss + 2, Head("encoder.self.0", 1): old_loss + 0.75}

    def get_losses_of_this_test(loaded, batches, logits, heads):
        """Stands in for the function that measures the loss while each head alone is replaced."""
        return losses

    def replace_heads_of_this_test(loaded, batches, logits, losses):
        """Stands in for the function that measures the loss while more and more heads are replaced."""
        for head, loss_with_head in losses.items():
            yield ReplacedHead(head, loss=loss_with_head)

    monkeypatch.setattr(command, "losses_with_single_heads_replaced", get_losses_of_this_test)
    monkeypatch.setattr(command, "replace_cheapest_heads_first", replace_heads_of_this_test)
    line = get_refusal(checkpoint.path, checkpoint.data, tmp_path / "new.pt", "--heads-within", "0.5")
    assert "every head increases the loss by at least 0.75 bits" in line


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

"""python -m fairseq_synth.inspect: its measures by hand, its hooks against plain computations, its command line."""

import argparse
import copy
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq_cli import generate, train, validate
from helpers import (
    RECIPE,
    SMALL,
    SPECS,
    USER_DIR,
    Distance,
    future_mask,
    get_error_line,
    make_attention,
    make_model,
    pad_batch,
    perturb,
    run_cli,
    train_model,
    used_weights,
)
from matplotlib.text import Text
from sacrebleu.metrics import BLEU

from fairseq_synth import computations
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.inspect import (
    analysis,
    arguments,
    attentions,
    checkpoints,
    drawing,
    hooks,
    measure,
    pictures,
    words,
)
from fairseq_synth.inspect.__main__ import main
from fairseq_synth.inspect.attentions import Head
from fairseq_synth.inspect.bleu import Bleu, compute_bleu
from fairseq_synth.inspect.inspection import Options
from fairseq_synth.inspect.parts import attention as attention_part
from fairseq_synth.inspect.parts import heads as heads_part
from fairseq_synth.inspect.parts.heads import head_importance
from fairseq_synth.inspect.passes import SentenceReading, build_criterion, count_targets, loss
from fairseq_synth.inspect.pictures.heads import HEAD_METRICS
from fairseq_synth.inspect.positional import MeanByPosition, fit_constants
from fairseq_synth.synthesizers import SYNTHESIZERS

STOCK = "transformer_multi30k"
MIXTURE = "transformer_synth_random_vanilla_multi30k"

ONE_UPDATE = ["--max-update", "1", "--no-epoch-checkpoints"]


# ---- the command and its checkpoints


def run_inspect(*argv):
    """Runs python -m fairseq_synth.inspect."""
    run_cli(lambda: main([str(argument) for argument in argv]))


def get_refusal(*argv):
    """Runs python -m fairseq_synth.inspect, which has to fail, and returns the line with its error."""
    return get_error_line(lambda: main([str(argument) for argument in argv]))


def read_figures(folder):
    """Returns what the command has written to figures.json: {name of a checkpoint: its figures}."""
    return json.loads((folder / "figures.json").read_text())


def read_batches(loaded, subset, sentences=None, **kwargs):
    """Returns the first sentences of a split, or all of them, in batches."""
    return checkpoints.batches(loaded, subset, checkpoints.readable(loaded, subset, sentences), **kwargs)


def get_size_flags(arch):
    """Returns the flags of a small model. fairseq's own architectures have no --synth-max-length."""
    if "synth" in arch:
        return SMALL
    return [flag for flag in SMALL if flag not in ("--synth-max-length", "24")]


@pytest.fixture(scope="module")
def trained(make_once, data):
    """Returns {architecture: a checkpoint} for a stock Transformer and for a mixture."""

    def make(folder):
        """Trains both models."""
        for arch, updates in ((STOCK, "9"), (MIXTURE, "80")):
            flags = ["--max-update", updates, "--no-epoch-checkpoints", "--validate-interval", "9"]
            train_model(data, folder / arch, *flags, arch=arch, small=get_size_flags(arch))

    folder = make_once("inspected", make)
    return {arch: folder / arch / "checkpoint_last.pt" for arch in (STOCK, MIXTURE)}


# ---- measures


def test_a_causal_row_sees_no_later_column():
    logits = torch.tensor([[[5.0, 9.0], [0.0, math.log(3)]]])
    weights = measure.sentence_weights(logits, causal=True)
    assert torch.allclose(weights, torch.tensor([[[1.0, 0.0], [0.25, 0.75]]]))


def test_weights_of_two_heads_are_described_as_computed_by_hand():
    """One head sees its own position and the next one, the other head sees all three positions alike."""
    neighbour_head = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]])
    uniform_head = torch.full((3, 3), 1 / 3)
    description = measure.describe_weights(torch.stack([neighbour_head, uniform_head]))
    expected = {
        "entropy": [2 * math.log(2) / 3, math.log(3)],
        "distance": [1 / 3, (1 + 2 / 3 + 1) / 3],
        "diagonal": [2 / 3, 1 / 3],
        "neighbours": [1 / 3, (1 / 3 + 2 / 3 + 1 / 3) / 3],
    }
    assert {name: pytest.approx(values.tolist()) for name, values in description.items()} == expected


def test_word_dependence_is_half_the_distance_to_the_average_weights():
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    average_weights = torch.tensor([[[0.0, 1.0], [0.25, 0.75]]])
    assert measure.word_dependence(weights, average_weights).tolist() == [(1 + 0.25) / 2]


def test_cumulative_singular_values_are_interpolated():
    """The largest value of diag(3, 1) holds 3/4; a matrix of equal rows has only one value."""
    diagonal = torch.diag(torch.tensor([3.0, 1.0]))
    equal_rows = torch.ones(2, 2)
    sums = measure.cumulative_singular_values(torch.stack([diagonal, equal_rows]), [0, 0.25, 0.5, 1])
    assert torch.allclose(sums, torch.tensor([[0, 0.375, 0.75, 1], [0, 0.5, 1, 1]]))


def test_distances_to_equal_rows_and_to_rank_one():
    """Rows (1, 0) and (0, 1) are sqrt(1/2) of the norm away from both; rows (1, 1) and (2, 2) are of rank one."""
    assert measure.rank_one_distances(torch.eye(2)) == pytest.approx([0.5**0.5, 0.5**0.5])
    assert measure.rank_one_distances(torch.tensor([[1.0, 1], [2, 2]])) == pytest.approx([0.1**0.5, 0], abs=1e-6)


@pytest.mark.parametrize("causal, mean_column", [(False, 31.5), (True, 21)])
def test_values_of_a_histogram_are_drawn_evenly_from_what_a_row_sees(causal, mean_column, monkeypatch):
    """Values are drawn whatever their weight is: no column or diagonal is preferred.

    So each visible pair of a row and a column is drawn with the same probability, and the logits, which are 4 times the
    number of the column, have the mean that they have over all visible pairs.

    `mean_column` is the mean number of the column over the visible pairs. If each row sees all columns, from 0 to 63,
    it is 63 / 2. If row i sees the columns 0 to i, column j is seen by 64 - j rows, and it is 63 / 3.
    """
    monkeypatch.setattr(attention_part, "HISTOGRAM_VALUES", 400)
    logits_of_row = 4 * torch.arange(64.0)
    logits = logits_of_row[None, None].expand(2, 64, 64)  # (H, T, S), the same in each row
    attention = SimpleNamespace(name="a")
    sampler = attention_part.ValueSampler()
    reading = SentenceReading(attention, batch_row=0, logits=logits, causal=causal)
    sampler.add_sentence(reading, measure.sentence_weights(logits, causal))
    samples = sampler.samples()
    sampled_logits = samples["logits"]["a"]
    sampled_weights = samples["weights"]["a"]
    assert len(sampled_logits) == len(sampled_weights) == 400
    # A logit has a standard deviation of up to 4 * 64 / sqrt(12) = 74. That of the mean of 400 is 74 / sqrt(400) = 3.7,
    # and the tolerance is about three times as large.
    assert sampled_logits.mean() == pytest.approx(4 * mean_column, abs=12)
    # More than a third of the weights are smaller than fp32 can tell from 0: those of columns that lie at least 26
    # before the last one that the row sees. If larger weights were preferred, hardly any of these would be drawn.
    assert (sampled_weights == 0).sum() > 100


def test_a_histogram_counts_values_below_its_range_in_the_first_bin():
    values = torch.tensor([-9.0, 0.1, 0.6, 0.7])
    assert measure.histogram(values, low=0, high=1, bins=2) == [0.5, 0.5]


def test_the_mean_by_position_counts_only_sentences_that_have_the_position():
    mean = MeanByPosition()
    mean.add(torch.tensor([[[2.0]]]))
    mean.add(torch.tensor([[[4.0, 6.0], [8.0, 1.0]]]))
    assert mean.mean_of_first(2, 2).tolist() == [[[3.0, 6.0], [8.0, 1.0]]]
    assert mean.mean_of_first(1, 9).tolist() == [[[3.0, 6.0]]]


def test_heads_are_removed_from_the_least_to_the_most_important():
    assert measure.removal_order({"a": [0.3, 0.1], "b": [0.2]}) == [("a", 1), ("b", 0), ("a", 0)]


def test_heads_are_removed_in_equal_steps_and_never_in_more_steps_than_heads():
    assert measure.removal_steps(num_heads=16, steps=4) == [0, 4, 8, 12, 16]
    assert measure.removal_steps(num_heads=2, steps=8) == [0, 1, 2]


# ---- hooks


def make_batch(rows=((5, 6, 7, 8, 9, 2), (10, 11, 12, 2))):
    """Returns a batch whose targets are its sources, padded on the right.

    `rows` are the sentences, as lists of token numbers that end with 2, the end of sentence.
    """
    sources = [list(row) for row in rows]
    shifted_targets = [[2, *row[:-1]] for row in rows]
    source = pad_batch(sources, left=False)
    shifted_target = pad_batch(shifted_targets, left=False)
    return {"src_tokens": source, "src_lengths": source.ne(1).sum(1), "prev_output_tokens": shifted_target}


def compute_head_weights(module, x):
    """Returns the weights (H, B, T, T) that a self-attention returns for x."""
    _output, weights = module(query=x, key=x, value=x, need_head_weights=True)
    return weights


@pytest.mark.parametrize("spec", [*SPECS, "random:1/dense+vanilla:1", "random/factorized_random"])
def test_the_softmax_of_the_logits_is_the_weights_of_the_attention(spec):
    module = make_attention(spec)
    x = torch.randn(5, 3, 6)
    weights = torch.softmax(attentions.compute_logits(module, x, x), dim=-1)
    expected = compute_head_weights(module, x).transpose(0, 1)
    assert torch.allclose(weights, expected, atol=1e-6)


def test_a_function_may_have_no_parameters(monkeypatch):
    monkeypatch.setitem(SYNTHESIZERS, "distance", Distance)
    attention = attentions.Attention("encoder", "self", 0, make_attention("distance"))
    assert attention.logit_parameters().numel() == 0


def mask_logits(reading, key_padding_mask):
    """Returns the logits (B, H, T, S) of a reading, with -inf where its attention masks them."""
    logits = reading.logits
    if reading.causal:
        logits = logits + future_mask(logits.size(-1))
    # In a causal Synthesizer, padding is behind all words, so that the causal mask hides it.
    padding_is_masked = not (reading.causal and attentions.is_synthetic(reading.attention.module))
    if key_padding_mask is not None and padding_is_masked:
        logits = logits.masked_fill(key_padding_mask[:, None, None].bool(), -math.inf)
    return logits


@pytest.mark.parametrize("arch", ["transformer_multi30k", "transformer_synth_random_vanilla_multi30k"])
def test_the_logits_that_a_hook_reads_give_the_weights_that_each_attention_returns(arch):
    """The softmax of the logits is what the attention returns if it is called again, with the same arguments.

    In this second call, it is asked for its weights. `readings` and `calls` have an entry for each attention, in the
    order in which the model calls them.
    """
    model = perturb(make_model(arch))
    readings = []
    calls = []

    def keep_call(module, args, kwargs, output):
        """Adds the call of an attention to `calls`. It is a hook of PyTorch."""
        calls.append((module, kwargs))

    handles = []
    with hooks.reading_logits(model, readings.append):
        for attention in hooks.attentions(model):
            handle = attention.module.register_forward_hook(keep_call, with_kwargs=True)
            handles.append(handle)
        model(**make_batch())
    for handle in handles:
        handle.remove()  # so that the second calls are not kept

    # two layers of the encoder, then self-attention and cross-attention of each of the decoder's two layers
    assert [reading.causal for reading in readings] == [False, False, True, False, True, False]
    for reading, (module, kwargs) in zip(readings, calls):
        assert reading.attention.module is module
        # Cross-attention gets this argument, which only matters for incremental decoding. Without it, fairseq's own
        # cross-attention takes its fast path, as self-attention does.
        kwargs.pop("static_kv", None)
        kwargs_with_weights = {**kwargs, "need_head_weights": True, "need_weights": True}
        _output, expected = module(**kwargs_with_weights)
        weights = torch.softmax(mask_logits(reading, kwargs.get("key_padding_mask")), dim=-1)  # (B, H, T, S)
        is_mean_of_heads = expected.dim() == 3  # (B, T, S), as in fairseq's fast path; otherwise (H, B, T, S)
        weights = weights.mean(dim=1) if is_mean_of_heads else weights.transpose(0, 1)
        assert torch.allclose(weights, expected, atol=1e-6)


@pytest.mark.parametrize("arch", ["transformer_multi30k", "transformer_synth_dense_multi30k"])
@pytest.mark.parametrize("name", ["encoder.self.1", "decoder.self.0", "decoder.cross.1"])
@torch.no_grad()
def test_a_removed_head_counts_as_if_the_output_projection_had_zeros_for_it(arch, name):
    model = perturb(make_model(arch))
    batch = make_batch()
    with hooks.removed_heads(model, [Head(name, 1)]):
        output_without_head, _ = model(**batch)
    output, _ = model(**batch)
    assert not torch.allclose(output_without_head, output, atol=1e-3)
    attention = next(attention for attention in hooks.attentions(model) if attention.name == name)
    attention.module.out_proj.weight[:, 8:16] = 0  # the features of head 1
    expected, _ = model(**batch)
    assert torch.allclose(output_without_head, expected, atol=1e-5)


@torch.no_grad()
def test_a_layer_is_run_with_and_without_skip_connections_and_feed_forward_layer():
    """The output of the second encoder layer is compared with a computation by hand."""
    model = perturb(make_model("transformer_synth_random_multi30k"))
    batch = make_batch(rows=((5, 6, 7, 2),))
    layer = model.encoder.layers[1]
    outputs = {}

    def keep(output):
        """Adds the output of a layer to `outputs`."""
        outputs[output.stack, output.layer] = output.x

    with hooks.layer_outputs(model, keep, keep_skip=False, keep_feed_forward=False):
        model(**batch)
    x = outputs["encoder", 0]
    attention_output, _ = layer.self_attn(x, x, x)
    attention_alone = layer.final_layer_norm(layer.self_attn_layer_norm(attention_output))
    assert torch.allclose(outputs["encoder", 1], attention_alone, atol=1e-6)

    with hooks.layer_outputs(model, keep, keep_skip=True, keep_feed_forward=True):
        model(**batch)
    whole_layer = layer(outputs["encoder", 0], None)
    assert torch.allclose(outputs["encoder", 1], whole_layer, atol=1e-6)


# ---- on checkpoints


def test_layers_and_numbers_are_in_the_picture_of_the_heads():
    """Only some layers may have been measured: without data those that never look at the input."""
    figures = {"group": "encoder.self", "heads": 2, "alpha": None, "entropy": [0.5, 0.25]}
    attentions = {f"encoder.self.{layer}": {**figures, "layer": layer} for layer in (1, 3)}
    (picture,) = pictures.pictures({"model": {"attentions": attentions}})
    (panel,) = picture.panels
    assert picture.name == "heads"
    assert ("set_yticks", [[0, 1], ["layer 1", "layer 3"]], {"fontsize": 7}) in panel.calls
    texts = []
    for method, arguments_of_call, options in panel.calls:
        if method == "text":
            texts.append((*arguments_of_call, options["color"]))
    # Dark cells have white numbers.
    assert texts == [
        (0, 0, "0.50", "white"),
        (1, 0, "0.25", "black"),
        (0, 1, "0.50", "white"),
        (1, 1, "0.25", "black"),
    ]


def get_weights(model):
    """Returns {name: parameter} of a model, without the entries that no model reads."""
    return used_weights(dict(model.named_parameters()))


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_the_initial_state_is_that_of_the_training(arch, data, tmp_path):
    """The weights after a training with a learning rate of 0 are those before it.

    The initial weights depend on the seed alone. So they are the same with and without the data. They are unknown if
    the training has started from another checkpoint.
    """
    train_model(data, tmp_path, *ONE_UPDATE, "--lr", "0", arch=arch, small=get_size_flags(arch))
    for folder in (data / "bin", None):
        loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", folder)
        initial_weights = get_weights(loaded.build_initial_model())
        weights = get_weights(loaded.model)
        assert initial_weights.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(initial_weights[name], weight), name

    # --reset-optimizer alone does not mean that there was another checkpoint, from which the weights came.
    loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", None)
    loaded.cfg.checkpoint.reset_optimizer = True
    assert loaded.build_initial_model() is not None
    # With --restore-file, there was one. Then no initial model is built.
    loaded.cfg.checkpoint.restore_file = "another.pt"
    assert loaded.build_initial_model() is None


def make_encoder_attention(spec):
    """Returns the description of an encoder's self-attention with three heads and the functions `spec`."""
    module = make_attention(spec, num_heads=3, embed_dim=6)
    return attentions.Attention("encoder", "self", 0, module)


@pytest.mark.parametrize(
    "spec, expected_zeros",
    [
        (
            "random+vanilla:1/dense+vanilla:2",
            {"random": [False, True, True], "dense": [True, False, False], "vanilla": [False, False, False]},
        ),
        (
            "random:1/dense+vanilla:2",
            {"random": [False, True, True], "dense": [True, False, False], "vanilla": [True, False, False]},
        ),
    ],
)
def test_alpha_sums_to_1_in_each_head_and_is_0_for_a_function_that_a_head_does_not_have(spec, expected_zeros):
    """Both specs have two groups of heads: ":1" and ":2" are their sizes. So head 0 is of the first group.

    `expected_zeros` says for each function in which of the heads 0, 1 and 2 its alpha is 0.
    """
    attention = make_encoder_attention(spec)
    alpha = attention.alpha()
    zeros = {}
    for function, values in alpha.items():
        zeros[function] = [value == 0 for value in values]
    assert zeros == expected_zeros
    sums = torch.tensor([*alpha.values()]).sum(dim=0)
    assert sums.tolist() == pytest.approx([1, 1, 1])

    # The second group, "dense+vanilla", has the heads 1 and 2. Its parameter has a row for each function.
    _first_group, second_group = attention.module.synthesizer.mixtures()
    alpha_of_group = torch.softmax(second_group.alpha, dim=0)  # (functions, heads)
    vanilla = alpha_of_group[1]  # (heads,)
    assert alpha["vanilla"][1:] == pytest.approx(vanilla.tolist())


def test_there_is_no_alpha_if_no_head_has_a_mixture():
    assert make_encoder_attention("random:1/vanilla:2").alpha() is None


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_the_gradient_of_a_head_is_the_derivative_of_the_loss(arch, trained, data):
    """A finite difference of the training's loss is computed on one sentence, for head 1 of an attention."""
    loaded = checkpoints.load(trained[arch], data / "bin")
    batches = read_batches(loaded, "valid", sentences=1)
    perturb(loaded.model.double(), std=0.1)  # changes the weights of this model, for all that follows
    importance = head_importance(loaded, batches)
    criterion = build_criterion(loaded)
    (batch,) = batches

    @torch.no_grad()
    def compute_loss(factor):
        """Returns the loss if the output of head 1 is multiplied by this factor, and head 0 is left as it is."""
        mask = torch.tensor([1, factor], dtype=torch.float64)  # one factor for each head
        with hooks.scaled_heads(loaded.model, {"decoder.self.1": mask}):
            loss_of_batch, _, _ = criterion(loaded.model, batch)
        return float(loss_of_batch)

    distance_of_factors = 1.01 - 0.99
    derivative = (compute_loss(1.01) - compute_loss(0.99)) / distance_of_factors
    expected = abs(derivative) / batch["ntokens"]
    head = 1
    assert importance["decoder.self.1"]["gradient"][head] == pytest.approx(expected, rel=0.02)


def test_the_loss_is_that_of_fairseq_validate(trained, data):
    path = trained[MIXTURE]
    loaded = checkpoints.load(path, data / "bin")
    batches = read_batches(loaded, "test", max_tokens=60)
    flags = ["--path", path, "--task", "translation", "--valid-subset", "test", "--max-tokens", "500"]
    _, log = run_cli(validate.cli_main, data / "bin", *USER_DIR, *flags, "--required-batch-size-multiple", "1")
    expected = float(re.search(r"nll_loss (\S+)", log)[1])
    assert loss(loaded, batches) == pytest.approx(expected, abs=6e-4)


def read_sentences(output, kind):
    """Returns the sentences that fairseq-generate has printed, in order.

    Args:
        output: the output of fairseq-generate.
        kind: "H" for the translations, "T" for the references.
    """
    lines = re.findall(rf"^{kind}-(\d+)\t(?:\S+\t)?(.*)$", output, re.M)
    return [sentence for _number, sentence in sorted(lines)]


def test_bleu_is_that_of_the_translations_of_fairseq_generate(trained, data):
    path = trained[MIXTURE]
    loaded = checkpoints.load(path, data / "bin")
    batches = read_batches(loaded, "test", max_tokens=60)
    flags = ["--path", path, "--gen-subset", "test", "--beam", "2", "--required-batch-size-multiple", "1"]
    output, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, *flags)
    translations = read_sentences(output, "H")
    references = read_sentences(output, "T")
    expected = BLEU(tokenize="none", force=True).corpus_score(translations, [references]).score
    bleu = compute_bleu(loaded, batches, beam=2, remove_bpe="subword_nmt")
    assert bleu.score == pytest.approx(expected)
    assert bleu.score > 0
    assert "tok:none" in bleu.signature


def count_target_tokens(path):
    """Returns the numbers of tokens of the sentences of a file that are within the model's limit, ends included."""
    lengths = [len(line.split()) + 1 for line in path.read_text().splitlines()]
    return [length for length in lengths if length <= 24]


def test_loss_and_bleu_by_length(trained, data, tmp_path):
    """The ranges of length share out the sentences, and their losses, weighted by tokens, are the loss of all.

    The subset test is made of two files, test and long, of which the second has sentences that are too long to be read.
    """
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--subset", "test", "--only", "lengths", "--no-pictures", "--out", out]
    run_inspect(trained[MIXTURE], *flags)
    (figures,) = read_figures(out).values()
    # --only lengths leaves out what the other parts measure
    assert "sentences" not in figures
    assert "layers" not in figures
    assert "removal" not in figures
    assert "gradient" not in figures["attentions"]["encoder.self.0"]
    assert "lengths" in list_pictures({"model": figures})

    lengths = count_target_tokens(data / "test.de") + count_target_tokens(data / "long.de")
    # The range 8 has sentences of up to 8 tokens, and the range 16 those of 9 to 16. No sentence has more than 13.
    lengths_by_range = {
        8: [length for length in lengths if length <= 8],
        16: [length for length in lengths if length > 8],
    }
    ranges = figures["lengths"]["ranges"]
    sentences_by_range = {part["longest"]: part["sentences"] for part in ranges}  # numbers of sentences
    assert sentences_by_range == {longest: len(lengths) for longest, lengths in lengths_by_range.items()}
    assert min(sentences_by_range.values()) > 0

    total_loss = 0
    for part in ranges:
        num_tokens = sum(lengths_by_range[part["longest"]])
        total_loss += part["loss"] * num_tokens
        assert part["bleu"] > 0
    assert total_loss / sum(lengths) == pytest.approx(figures["loss"], rel=1e-3)
    assert "tok:none" in figures["lengths"]["signature"]


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_the_loss_without_words_is_that_of_heads_with_average_attention(arch, trained, data):
    """This is checked for one head, and for all heads, which are the last point of the curve.

    The results `words` are this curve. ``heads`` lists the 8 heads of self-attention (2 layers of 2 heads, in the
    encoder and in the decoder) as pairs of the attention and the number of the head, in the order in which they are
    replaced. ``loss`` has the loss before any head is replaced, then after each one.
    """
    loaded = checkpoints.load(trained[arch], data / "bin")
    figures = analysis.analyse(loaded, Options(parts=("words",)))
    curve = figures["words"]
    assert curve["sentences"] == 300
    assert len(curve["heads"]) == 8
    assert len(curve["loss"]) == 9

    # the logits of average attention, from the 300 sentences of the training set
    batches = read_batches(loaded, "valid")
    averages = words.average(loaded, "train", 300)
    longest_length = 13  # a sentence of `data` has up to 12 words and a token for its end
    logits = {name: constants.matrix(longest_length) for name, constants in averages.constants.items()}

    # one head: head 1 of layer 1 of the decoder
    increase = figures["attentions"]["decoder.self.1"]["without_words"][1]
    with hooks.replaced_heads(loaded.model, logits, [Head("decoder.self.1", 1)]):
        assert loss(loaded, batches) == pytest.approx(figures["loss"] + increase, abs=1e-3)

    # all heads
    all_heads = [Head(attention, number) for attention, number in curve["heads"]]
    with hooks.replaced_heads(loaded.model, logits, all_heads):
        assert loss(loaded, batches) == pytest.approx(curve["loss"][-1], abs=1e-3)

    # The curve begins with the heads whose replacement alone increases the loss least. Only self-attention is replaced.
    increases = [figures["attentions"][head.attention]["without_words"][head.number] for head in all_heads]
    assert increases == sorted(increases)
    assert "without_words" not in figures["attentions"]["decoder.cross.0"]


def test_the_average_is_over_sentences_that_are_chosen_evenly_from_the_longest_down(trained, data, monkeypatch):
    """All 300 sentences of the training set are sorted by length. Three of them are every hundredth one.

    The longest sentence is always among them, so the average has a value for each position up to its length.
    """
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    chosen = []
    make_batches = checkpoints.batches

    def keep_choice(loaded, subset, sentence_indices):
        """Takes the place of `checkpoints.batches`: adds the numbers of the sentences to `chosen`."""
        chosen.append(sentence_indices)
        return make_batches(loaded, subset, sentence_indices)

    monkeypatch.setattr(checkpoints, "batches", keep_choice)
    average = words.average(loaded, "train", sentences=3)
    by_length = checkpoints.readable(loaded, "train")  # numbers of sentences, that of the shortest sentence first
    assert chosen == [[by_length[99], by_length[199], by_length[299]]]
    longest_sentence = by_length[-1]
    assert average.length == loaded.task.dataset("train").num_tokens(longest_sentence)
    assert average.sentences == 3


def test_words_are_worth_nothing_to_random(data, tmp_path):
    train_model(data, tmp_path, "--max-update", "9", "--no-epoch-checkpoints", arch="transformer_synth_random_multi30k")
    loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", data / "bin")
    figures = analysis.analyse(loaded, Options(parts=("words",)))
    increases = figures["attentions"]["encoder.self.0"]["without_words"]
    assert max(abs(increase) for increase in increases) < 1e-5
    assert figures["words"]["loss"][-1] == pytest.approx(figures["loss"], abs=1e-3)


def test_the_summary_keeps_what_the_documentation_shows(trained, data, tmp_path):
    """--summary leaves out some results, and makes two kinds of them smaller.

    - Of a matrix of mean attention weights (pattern), the first 16 rows and columns are kept.
    - A histogram has half as many intervals. Each is made of two neighbouring ones, whose shares are added, and the sum
      is rounded to 3 digits.
    """
    flags = ["--data", data / "bin", "--sentences", "2", "--steps", "1", "--no-pictures"]
    run_inspect(trained[STOCK], *flags, "--out", tmp_path / "whole")
    run_inspect(trained[STOCK], *flags, "--summary", "--out", tmp_path / "summary")
    (figures,) = read_figures(tmp_path / "whole").values()
    (summary,) = read_figures(tmp_path / "summary").values()
    assert set(summary) == {"data", "loss", "layers", "removal", "words", "lengths", "attentions", "updates"}
    assert summary["removal"] == figures["removal"]
    assert summary["words"] == figures["words"]
    assert "pattern" not in summary["attentions"]["decoder.cross.0"]

    attention = figures["attentions"]["decoder.self.1"]
    short_attention = summary["attentions"]["decoder.self.1"]
    short_pattern = []
    for matrix in attention["pattern"]:  # one for each head
        first_rows = matrix[:16]
        short_pattern.append([row[:16] for row in first_rows])
    assert short_attention["pattern"] == short_pattern
    assert set(short_attention["histograms"]) == {"logits", "weights"}
    shares = attention["histograms"]["logits"]["shares"]["trained"]
    sums_of_two = []
    for left_share, right_share in zip(shares[::2], shares[1::2]):
        three_digits = f"{left_share + right_share:.3g}"
        sums_of_two.append(float(three_digits))
    assert short_attention["histograms"]["logits"]["shares"]["trained"] == sums_of_two


def test_a_summary_without_data_is_refused(trained, tmp_path):
    assert get_refusal(trained[STOCK], "--summary", "--out", tmp_path / "out").startswith("--summary: ")


@pytest.mark.parametrize(
    "part, key_of_results, names",
    [
        ("attention", "sentences", {"patterns", "sentence2-cross-attention", "singular-values", "weights", "heads"}),
        ("layers", "layers", {"rank"}),
        ("heads", "removal", {"heads", "removal"}),
        ("words", "words", {"heads", "without-words"}),
    ],
)
def test_one_part_alone_has_its_figures_and_pictures_and_no_others(
    part, key_of_results, names, trained, data, tmp_path
):
    """--only PART measures only this part, and only the pictures of its results are drawn.

    The picture "heads" shows what is known about each head. Several parts measure that, so it belongs to all of them.

    Args:
        part: the value of --only.
        key_of_results: the entry of figures.json that the part adds, besides results of each attention.
        names: names of pictures that show the results of the part.
    """
    flags = ["--data", data / "bin", "--sentences", "2", "--steps", "1", "--only", part, "--no-pictures"]
    run_inspect(trained[MIXTURE], *flags, "--out", tmp_path / "out")
    (figures,) = read_figures(tmp_path / "out").values()
    keys_of_all_parts = {"sentences", "layers", "removal", "words", "lengths"}  # that of the part "lengths" comes last
    assert keys_of_all_parts & set(figures) == {key_of_results}
    assert figures["loss"] > 0
    names_of_pictures = list_pictures({"model": figures})
    assert names <= names_of_pictures
    # The picture of singular values stands for the pictures of other parts.
    assert ("singular-values" in names_of_pictures) == (part == "attention")


def make_up_figures(layers, heads):
    """Returns figures of a translation model with mixtures, of every part, with a sentence of long words."""
    words = [f"a_rather_long_word_{number}" for number in range(14)]
    square = [[500] * len(words)] * len(words)
    histogram = {"low": -1.0, "high": 1.0, "shares": {"trained": [0.5, 0.5], "initial": [0.25, 0.75]}}
    values_of_heads = [0.0123 * head - 0.01 for head in range(heads)]
    attentions = {}
    weights = {}
    for group in pictures.GROUPS:
        for layer in range(layers):
            attentions[f"{group}.{layer}"] = {
                "group": group,
                "layer": layer,
                "heads": heads,
                "alpha": {"factorized_random": [0.25] * heads, "vanilla": [0.75] * heads},
                "histograms": {"parameters": histogram, "logits": histogram, "weights": histogram},
                "pattern": [square] * heads,
                "singular_values": [[0.0, 0.75, 1.0]] * heads,
                **dict.fromkeys(HEAD_METRICS, values_of_heads),
            }
            weights[f"{group}.{layer}"] = [square] * heads
    distances = {name: {"equal_rows": [0.5] * layers} for name in ("as it is", "attention alone")}
    curve = {"share": [0, 1], "loss": [2.0, 3.0], "bleu": [30.0, 0.0]}
    return {
        "attentions": attentions,
        "data": {"subset": "valid", "sentences": 9},
        "sentences": [{"number": 0, "tokens": {"encoder": words, "decoder": words}, "weights": weights}],
        "layers": {"trained": {"encoder": distances, "decoder": distances}},
        "removal": {"groups": dict.fromkeys(pictures.GROUPS, curve)},
        "words": {"heads": [["encoder.self.0", 0], ["decoder.self.0", 0]], "loss": [2.0, 2.25, 2.5]},
        "lengths": {"ranges": [{"longest": 8, "sentences": 9, "loss": 2.0, "bleu": 30.0}]},
    }


@pytest.mark.parametrize("models, layers, heads", [(1, 4, 2), (2, 1, 4)])
def test_pictures_are_840_pixels_wide_and_cut_no_label(models, layers, heads):
    figures = {f"checkpoint_best_{number}": make_up_figures(layers, heads) for number in range(models)}
    names = set()
    for picture in pictures.titled_pictures(figures):
        figure = picture.draw()
        if picture.has_automatic_margins:
            figure.draw_without_rendering()  # finds the margins
        width, height = figure.get_size_inches()
        assert width * figure.dpi <= 840, picture.name
        drawn_box = figure.get_tightbbox()  # around everything that is drawn, in inches
        is_whole = drawn_box.x0 >= 0 and drawn_box.y0 >= 0 and drawn_box.x1 <= width and drawn_box.y1 <= height
        assert is_whole, f"{picture.name}: {drawn_box} is larger than {width} by {height}"
        sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
        assert min(sizes) >= 6, picture.name  # points, which are 10 pixels
        names.add(picture.name)
    assert {"sentence1-cross-attention.png", "heads.png", "alpha.png", "patterns.png", "without-words.png"} <= names


def test_a_sentence_is_drawn_if_all_models_have_read_it_at_any_place_of_their_lists():
    """The first model has read the sentences 0 and 7, the second 7 and 9. So only sentence 7 is drawn.

    Its picture is named sentence2, because it is the second sentence in the list of the first model. The largest weight
    in a matrix, from 100 to 400, tells of which model and sentence the matrix is.
    """

    def make_up_sentence(number, weight):
        """Returns the figures of a sentence of two tokens. In the matrix of its head, this weight is the largest."""
        tokens = {"encoder": ["a", "b"], "decoder": ["a", "b"]}
        matrix = [[weight, 0], [0, weight]]
        return {"number": number, "tokens": tokens, "weights": {"encoder.self.0": [matrix]}}

    figures = {"first": make_up_figures(layers=1, heads=1), "second": make_up_figures(layers=1, heads=1)}
    figures["first"]["sentences"] = [make_up_sentence(0, 100), make_up_sentence(7, 200)]
    figures["second"]["sentences"] = [make_up_sentence(7, 300), make_up_sentence(9, 400)]
    drawn_sentences = [picture for picture in pictures.pictures(figures) if picture.name.startswith("sentence")]
    assert [picture.name for picture in drawn_sentences] == ["sentence2-encoder-self-attention"]
    (picture,) = drawn_sentences
    matrices = [np.asarray(axes.images[0].get_array()) for axes in picture.draw().axes]
    assert [matrix.max() for matrix in matrices] == [200, 300]


def list_pictures(figures_by_model):
    """Returns the names of all pictures that there are figures for, and checks that each shows something.

    None is drawn, as matplotlib takes a second for each. `draw_pictures` shows that it can draw them all.
    """
    names = set()
    for picture in pictures.pictures(figures_by_model):
        assert any(panel.calls for panel in picture.panels if panel is not None)
        names.add(picture.name)
    return names


def draw_pictures(figures_by_model):
    """Draws all pictures that there are figures for, checks that each shows something, and returns their names."""
    names = set()
    for picture in pictures.pictures(figures_by_model):
        drawing = picture.draw()
        assert any(axes.has_data() for axes in drawing.axes)
        names.add(picture.name)
    return names


# ---- a stock Transformer and a mixture at once


@pytest.fixture(scope="module")
def figures_of_both(make_once, trained, data):
    """Returns the figures that one call of the command has written for both checkpoints. Tests must not change them."""

    def make(folder):
        """Calls the command."""
        flags = ["--data", data / "bin", "--sentences", "5", "--steps", "2", "--no-pictures"]
        run_inspect(*trained.values(), *flags, "--out", folder / "new" / "out")

    return read_figures(make_once("inspected-both", make) / "new" / "out")


def test_figures_are_named_after_the_folder_and_the_checkpoint(figures_of_both):
    assert list(figures_of_both) == [f"{STOCK}-checkpoint_last", f"{MIXTURE}-checkpoint_last"]


def test_every_picture_can_be_drawn_from_the_figures(figures_of_both):
    names = draw_pictures(figures_of_both)
    expected = (
        "parameters logits weights patterns heads sentence1-encoder-self-attention sentence3-cross-attention "
        "singular-values rank removal without-words lengths alpha"
    ).split()
    assert set(expected) <= names
    for label, figures in figures_of_both.items():
        names_of_model = {picture.name for picture in pictures.pictures({label: figures})}
        assert names_of_model == (names if MIXTURE in label else names - {"alpha"})


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_each_attention_has_figures_of_its_heads(arch, figures_of_both):
    figures = figures_of_both[f"{arch}-checkpoint_last"]
    assert figures["data"] == {"subset": "valid", "sentences": 5}
    assert len(figures["attentions"]) == 6
    for attention in figures["attentions"].values():
        assert set(attention["histograms"]) == {"parameters", "logits", "weights"}
        assert set(attention["histograms"]["logits"]["shares"]) == {"trained", "initial"}
        assert len(attention["gradient"]) == len(attention["left_out"]) == attention["heads"] == 2


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_weights_of_a_sentence_have_a_row_for_each_target_token(arch, figures_of_both):
    for sentence in figures_of_both[f"{arch}-checkpoint_last"]["sentences"]:
        source_tokens = sentence["tokens"]["encoder"]
        target_tokens = sentence["tokens"]["decoder"]
        assert source_tokens[-1] == target_tokens[0] == "</s>"
        cross_attention = np.array(sentence["weights"]["decoder.cross.0"])
        assert cross_attention.shape == (2, len(target_tokens), len(source_tokens))


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_the_removal_of_heads_starts_with_the_loss_of_all_heads(arch, figures_of_both):
    figures = figures_of_both[f"{arch}-checkpoint_last"]
    curve = figures["removal"]["groups"]["encoder.self"]
    assert curve["share"] == [0, 0.5, 1]
    assert curve["loss"][0] == pytest.approx(figures["loss"])
    assert None not in curve["bleu"]


def test_the_picture_of_the_removal_shows_the_losses_of_each_model(figures_of_both):
    label = f"{MIXTURE}-checkpoint_last"
    picture = next(picture for picture in pictures.pictures(figures_of_both) if picture.name == "removal")
    calls_of_first_panel = picture.panels[0].calls
    points_of_lines = []
    for _method, arguments_of_call, options in calls_of_first_panel:
        if options.get("label") == label:
            points_of_lines.append(arguments_of_call)
    curve = figures_of_both[label]["removal"]["groups"]["encoder.self"]
    assert points_of_lines[0] == [curve["share"], curve["loss"]]


def test_only_a_mixture_has_alpha_which_sums_to_1(figures_of_both):
    stock, mixture = figures_of_both.values()
    assert stock["attentions"]["encoder.self.0"]["alpha"] is None
    alpha = mixture["attentions"]["encoder.self.0"]["alpha"]
    assert set(alpha) == {"random", "vanilla"}
    assert alpha["random"][0] + alpha["vanilla"][0] == pytest.approx(1, abs=1e-3)


def test_models_with_different_heads_have_a_picture_of_the_heads_each(figures_of_both):
    figures = copy.deepcopy(figures_of_both)
    names = {picture.name for picture in pictures.titled_pictures(figures)}
    assert names >= {"heads.png", "alpha.png"}
    figures[f"{STOCK}-checkpoint_last"]["attentions"]["decoder.self.1"]["heads"] = 3
    names = {picture.name for picture in pictures.titled_pictures(figures)}
    assert names >= {f"{label}-heads.png" for label in figures}
    assert "heads.png" not in names


# ---- errors while the command measures


def end_in(part, error, monkeypatch):
    """Lets the measuring of a part end with an error, after it has added some figures.

    Args:
        part: the name of the part.
        error: the error to raise.
        monkeypatch: pytest's fixture.
    """

    def measure(inspection):
        """Takes the place of the function that measures the part."""
        inspection.results[part] = "half of it"
        raise error

    monkeypatch.setitem(analysis.PARTS, part, analysis.PARTS[part]._replace(measure=measure))


def test_finished_parts_stay_when_the_user_interrupts(trained, data, tmp_path, monkeypatch, capsys):
    end_in("words", KeyboardInterrupt(), monkeypatch)
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--sentences", "2", "--only", "layers,words,lengths", "--out", out]
    with pytest.raises(SystemExit) as ended:
        run_inspect(trained[STOCK], *flags)
    assert ended.value.code == 130
    last_line = capsys.readouterr().err.splitlines()[-1]
    expected = (
        f"{out} contains the finished parts layers; for the missing parts, use --only words,lengths and another --out"
    )
    assert last_line == f"interrupted in words; {expected}"
    (figures,) = read_figures(out).values()
    assert "layers" in figures
    assert "words" not in figures
    assert {path.name for path in out.iterdir()} == {"figures.json", "parameters.png", "rank.png"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_finished_parts_stay_when_a_part_fails(trained, data, tmp_path, monkeypatch, capsys):
    end_in("words", SynthesizerError("no such thing"), monkeypatch)
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--sentences", "2", "--only", "lengths,words", "--no-pictures", "--out", out]
    assert get_refusal(trained[STOCK], *flags) == "no such thing"
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"failed in words; {out} contains the finished parts lengths")
    (figures,) = read_figures(out).values()
    assert "lengths" in figures
    assert "words" not in figures


def test_a_file_that_cannot_be_written_whole_is_not_there(trained, data, tmp_path, monkeypatch):
    def write_half(picture, folder):
        """Takes the place of `Picture.save`: writes a part of the picture, and fails."""
        (folder / picture.name).write_text("half of a picture")
        raise OSError("disk full")

    monkeypatch.setattr(drawing.Picture, "save", write_half)
    with pytest.raises(OSError, match="disk full"):
        run_inspect(trained[STOCK], "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- costs


def test_sentences_limit_the_training_sentences_too(trained, data, monkeypatch):
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    figures = analysis.analyse(loaded, Options(parts=("words",), sentences=3))
    assert figures["data"]["sentences"] == figures["words"]["sentences"] == 3


def test_a_part_describes_its_cost_in_passes(trained, data):
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    inspection = analysis.begin(loaded, Options(sentences=4, steps=2))
    # 12 heads in three kinds of attention; loss and gradient, each head, all heads, and half and none of each kind
    assert analysis.PARTS["heads"].describe_cost(inspection) == "21 passes over 4 sentences, and 7 translations of them"
    assert analysis.PARTS["words"].describe_cost(inspection) == (
        "a pass over up to 4 sentences of train, then 16 passes over 4 sentences"
    )


def test_the_cost_of_a_part_is_printed_before_it_starts(trained, data, tmp_path, capsys):
    flags = ["--data", data / "bin", "--sentences", "4", "--only", "lengths", "--no-pictures"]
    run_inspect(trained[STOCK], *flags, "--out", tmp_path / "out")
    lines = capsys.readouterr().err.splitlines()
    line = next(line for line in lines if line.startswith("checkpoint_last: lengths: "))
    assert "lengths: 1 pass over 4 sentences, and 1 translation of them (one pass over 4 sentences took " in line


def test_the_heads_part_makes_as_many_passes_as_it_announces(trained, data, monkeypatch):
    """The numbers are those in the text of `heads.describe_cost`, which the command prints before it begins.

    All sentences are in one batch, so that each pass calls the first layer once.
    """
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    inspection = analysis.begin(loaded, Options(sentences=4, steps=2))
    passes = []
    translations = []

    def count_translation(*_):
        """Takes the place of `compute_bleu`: adds an entry to `translations`."""
        translations.append("a translation")
        return Bleu(0.0, "none")

    first_layer = loaded.model.encoder.layers[0]
    handle = first_layer.register_forward_hook(lambda *_: passes.append("a pass"))
    monkeypatch.setattr(heads_part, "compute_bleu", count_translation)
    analysis.PARTS["heads"].measure(inspection)
    handle.remove()
    assert len(inspection.batches) == 1

    num_heads = 12  # 2 heads in each of 2 layers of 3 kinds of attention
    passes_for_importance = 2 + num_heads  # for the gradient, for the loss with all heads, and without each head
    passes_for_removals = 1 + 3 * 2  # with all heads, and after each of 2 steps of removing heads of a kind
    assert passes_for_importance + passes_for_removals == 21
    assert len(passes) == 21
    assert len(translations) == 7  # one for each of the passes for removals


def test_help_says_what_each_part_costs(capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    help_text = capsys.readouterr().out
    assert analysis.PARTS.keys() == arguments.PARTS.keys()
    for name, part in arguments.PARTS.items():
        assert f"  {name}" in help_text
        assert part.cost in help_text


# ---- other models


def test_the_heads_of_an_encoder_that_nothing_attends_to_do_not_matter(data, tmp_path):
    train_model(data, tmp_path, *ONE_UPDATE, "--no-cross-attention")
    loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", data / "bin")
    importance = head_importance(loaded, read_batches(loaded, "valid", sentences=2))
    assert importance["encoder.self.0"]["gradient"] == [0, 0]
    assert min(importance["decoder.self.0"]["gradient"]) > 0


@pytest.fixture(scope="module")
def random_checkpoint(make_once, data):
    """Returns a checkpoint of a translation model with random attention in all layers."""

    def make(folder):
        """Trains the model for one update."""
        train_model(data, folder, *ONE_UPDATE, arch="transformer_synth_random_multi30k")

    return make_once("inspected-random", make) / "checkpoint_last.pt"


def test_without_data_the_pattern_is_the_softmax_of_R(random_checkpoint, tmp_path):
    """Mean attention weights (pattern) need no data if the logits are a parameter, such as the matrices R of random.

    Without data, neither the patterns of other attentions nor the results of other parts are there. This test also
    checks that the command imports the code of --user-dir, and that it draws pictures of two checkpoints.
    """
    user_code = tmp_path / "code_to_inspect_with"
    user_code.mkdir()
    (user_code / "__init__.py").touch()
    shutil.copy(random_checkpoint, tmp_path / "other.pt")
    flags = ["--user-dir", user_code, "--positions", "9", "--out", tmp_path / "out"]
    run_inspect(random_checkpoint, tmp_path / "other.pt", *flags)
    assert user_code.name in sys.modules
    figures = read_figures(tmp_path / "out")["checkpoint_last"]
    R = torch.load(random_checkpoint)["model"]["encoder.layers.1.self_attn.synthesizer.components.random.R"]
    # The weights are stored as thousandths, rounded to whole numbers. The tolerance is slightly more than half of one.
    pattern = torch.tensor(figures["attentions"]["encoder.self.1"]["pattern"]) / 1000
    assert torch.allclose(pattern, torch.softmax(R[:, :9, :9], dim=-1), atol=6e-4)
    assert "pattern" not in figures["attentions"]["decoder.cross.0"]
    assert "data" not in figures
    picture_names = sorted(path.stem for path in (tmp_path / "out").glob("*.png"))
    assert picture_names == ["heads", "parameters", "patterns", "singular-values"]


def test_a_missing_user_dir_is_refused(random_checkpoint, tmp_path):
    user_code = tmp_path / "no_code_to_inspect_with"
    line = get_refusal(random_checkpoint, "--user-dir", user_code, "--out", tmp_path / "out")
    assert line == f"--user-dir {user_code}: no such folder"


def test_without_data_only_layers_that_ignore_the_input_are_drawn(data, tmp_path):
    """The logits of dense depend on the input, and those of random do not.

    So the picture of singular values has layer 1 of the encoder (dense, random) and layer 0 of the decoder (random,
    dense), each in a panel of its own. This test also checks that --out may be a link to an empty folder.
    """
    specs = ["--encoder-synthesizer", "dense,random", "--decoder-synthesizer", "random,dense"]
    train_model(data, tmp_path / "run", *ONE_UPDATE, *specs, arch="transformer_synth_random_multi30k")
    empty_folder = tmp_path / "empty"
    empty_folder.mkdir()
    out = tmp_path / "out"
    out.symlink_to(empty_folder)
    run_inspect(tmp_path / "run" / "checkpoint_last.pt", "--out", out)
    assert out.is_symlink()
    assert (out / "singular-values.png").exists()

    figures = read_figures(empty_folder)
    picture = next(picture for picture in pictures.pictures(figures) if picture.name == "singular-values")
    first_labels = []
    for panel in picture.panels:
        # A panel has a list of the calls that draw it: (name of a method of matplotlib's axes, arguments, options).
        # The first plot is that of the first layer that is drawn.
        labels = [options["label"] for method, _arguments, options in panel.calls if method == "plot"]
        first_labels.append(labels[0])
    assert first_labels == ["layer 1", "layer 0"]  # encoder, decoder


DECODER_FLAGS = (
    "--task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16 "
    "--decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode none"
).split()
ENCODER_FLAGS = (
    "--task masked_lm --arch roberta --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode eos --criterion masked_lm"
).split()
ADAPTIVE_FLAGS = (
    "--criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-input --adaptive-input-cutoff 8,16 "
    "--adaptive-input-factor 2 --adaptive-softmax-cutoff 8,16"
).split()
FLAGS_BY_KIND = {
    "language model": [*DECODER_FLAGS, "--criterion", "cross_entropy"],
    "adaptive language model": [*DECODER_FLAGS, *ADAPTIVE_FLAGS],
    "characters": [*DECODER_FLAGS, "--character-embeddings", "--character-filters", "[(1,4)]"],
    "encoder": ENCODER_FLAGS,
}


def train_one_stack(kind, monolingual, save):
    """Trains a language model or an encoder for two updates, and returns its checkpoint."""
    recipe = "--optimizer adam --lr 0.01 --max-tokens 400 --num-workers 0 --no-progress-bar --seed 7".split()
    argv = [monolingual, *USER_DIR, *FLAGS_BY_KIND[kind], *recipe, "--max-update", "2", "--no-epoch-checkpoints"]
    run_cli(train.cli_main, *argv, "--save-dir", save)
    return save / "checkpoint_last.pt"


@pytest.mark.parametrize("kind", FLAGS_BY_KIND)
def test_a_model_with_one_stack_has_the_loss_without_heads_but_no_bleu(kind, monolingual, tmp_path):
    """A language model has a decoder alone, a masked language model an encoder alone.

    Neither of them translates, so BLEU is None for each point of the curve. One kind, "characters", can only be
    inspected with data. To save time, pictures are drawn for one language model and for the encoder only.
    """
    path = train_one_stack(kind, monolingual, tmp_path)
    has_pictures = kind in ("language model", "encoder")
    flags = ["--data", monolingual, "--sentences", "2", "--steps", "2"]
    if not has_pictures:
        flags.append("--no-pictures")
    run_inspect(path, *flags, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "heads.png").exists() == has_pictures
    figures = read_figures(tmp_path / "out")["checkpoint_last"]
    stack = "encoder" if kind == "encoder" else "decoder"
    assert set(figures["attentions"]) == {f"{stack}.self.0", f"{stack}.self.1"}
    assert set(figures["layers"]["trained"]) == {stack}
    curve = figures["removal"]["groups"][f"{stack}.self"]
    assert curve["bleu"] == [None] * 3  # before any head is removed, and after each of 2 steps
    assert curve["loss"][0] == pytest.approx(figures["loss"], rel=1e-3)

    flags_without_data = ["--no-pictures", "--out", tmp_path / "without-data"]
    if kind == "characters":
        line = get_refusal(path, *flags_without_data)
        assert "embeds the characters of words, and only the data contain these words" in line
    else:
        run_inspect(path, *flags_without_data)


# ---- bad input


def list_output(folder):
    """Returns the names of all files and folders in a folder that a run with --out FOLDER/out may have left there."""
    return [path.name for path in folder.iterdir() if "out" in path.name]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    assert "no such checkpoint" in get_refusal(tmp_path / "none.pt", "--out", tmp_path / "out")
    (tmp_path / "text.pt").write_text("hello")
    assert "text.pt" in get_refusal(tmp_path / "text.pt", "--out", tmp_path / "out")
    torch.save({"model": {}}, tmp_path / "bare.pt")
    assert "not a checkpoint of fairseq-train" in get_refusal(tmp_path / "bare.pt", "--out", tmp_path / "out")
    assert list_output(tmp_path) == []


def test_a_model_that_is_no_transformer_is_refused(tmp_path, data):
    flags = (
        "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-conv-dim 16 "
        "--decoder-conv-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 "
        "--decoder-attention-heads 2 --encoder-kernel-size-list [3] --decoder-kernel-size-list [3]"
    ).split()
    argv = [data / "bin", *RECIPE, "--arch", "lightconv", *flags, *ONE_UPDATE]
    run_cli(train.cli_main, *argv, "--save-dir", tmp_path / "conv")
    line = get_refusal(tmp_path / "conv" / "checkpoint_last.pt", "--out", tmp_path / "out")
    assert "lightconv" in line
    assert "neither a Transformer" in line
    assert list_output(tmp_path) == []


def test_an_unknown_architecture_is_refused(tmp_path, trained):
    state = torch.load(trained[STOCK])
    state["cfg"] = {**state["cfg"], "model": argparse.Namespace(arch="another", _name="another")}
    torch.save(state, tmp_path / "another.pt")
    assert "'another' is unknown" in get_refusal(tmp_path / "another.pt", "--out", tmp_path / "out")
    assert list_output(tmp_path) == []


@pytest.fixture
def get_refusal_of_data(trained, tmp_path):
    """Provides a function that calls the command with --data and other flags, and returns the line with its error."""

    def get_refusal_of_data(folder, *flags):
        """Returns the line with the error of the command for the data in `folder`."""
        line = get_refusal(trained[MIXTURE], "--data", folder, *flags, "--out", tmp_path / "out")
        assert list_output(tmp_path) == []
        return line

    return get_refusal_of_data


def test_data_with_other_dictionaries_are_refused(get_refusal_of_data, data, tmp_path):
    """The target dictionary has to fit the embedding of the decoder, and the source dictionary that of the encoder."""
    other_data = shutil.copytree(data / "bin", tmp_path / "other")
    words = (other_data / "dict.en.txt").read_text().splitlines()
    without_two_words = "\n".join(words[:-2]) + "\n"
    for language, embedding in (("de", "decoder.embed_tokens"), ("en", "encoder.embed_tokens")):
        (other_data / f"dict.{language}.txt").write_text(without_two_words)
        line = get_refusal_of_data(other_data)
        assert f"{len(words) + 2} entries" in line
        assert f"was trained with {len(words) + 4} ({embedding})" in line
    (other_data / "dict.de.txt").unlink()
    assert "dict.de.txt is missing" in get_refusal_of_data(other_data)


def test_data_of_another_kind_or_without_the_subset_are_refused(get_refusal_of_data, data, monolingual, tmp_path):
    assert "no pair of languages" in get_refusal_of_data(monolingual)
    assert "no such folder" in get_refusal_of_data(tmp_path / "none")
    assert "has no split 'nothing'" in get_refusal_of_data(data / "bin", "--subset", "nothing")


def test_flags_that_need_data_are_refused_without_data(trained, tmp_path):
    line = get_refusal(trained[MIXTURE], "--only", "heads,lengths", "--out", tmp_path / "out")
    assert line == "--only: works only with --data; add --data BIN, or remove the flag"
    line = get_refusal(trained[MIXTURE], "--beam", "2", "--sentences", "3", "--out", tmp_path / "out")
    assert line == "--sentences --beam: works only with --data; add --data BIN, or remove the flag"
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_in_use_or_cannot_be_written_is_refused(tmp_path, trained):
    file = tmp_path / "file"
    file.write_text("mine")
    assert "exists already" in get_refusal(trained[STOCK], "--out", file)
    assert "exists already" in get_refusal(trained[STOCK], "--out", tmp_path)
    assert "cannot be written" in get_refusal(trained[STOCK], "--out", file / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


def test_pictures_without_matplotlib_are_refused(tmp_path, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--no-pictures" in get_refusal(trained[STOCK], "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- MLP-Mixer


@pytest.mark.parametrize("num_heads", [1, 2])
@torch.no_grad()
def test_random_without_softmax_mixes_tokens_as_a_mixer(num_heads, monkeypatch):
    """Without the softmax, random is a linear layer over the tokens, one for each head's features (paper, section 2).

    It is computed here as a convolution with kernel 1 whose channels are the tokens and whose groups are the heads;
    with one head it is the token-mixing Linear of MLP-Mixer (Tolstikhin et al. 2021), shared by all features.
    """
    T = 7  # tokens
    C = 6  # features of all H heads; each head has C / H of them

    def return_scores(scores, *masks):
        """Takes the place of the softmax: returns the logits unchanged."""
        return scores

    # The plain computation is the one that calls `masked_softmax`, so it has to be the only one.
    monkeypatch.setattr(computations, "COMPUTATIONS", (computations.plain,))
    monkeypatch.setattr(computations.plain, "masked_softmax", return_scores)
    attention = make_attention("random", embed_dim=C, num_heads=num_heads, max_length=T)
    x = torch.randn(T, 3, C)  # (T, B, C)
    R = attention.synthesizer.components["random"].R  # (H, T, T)
    output, _ = attention(x)

    # The tokens of the first head come first, then those of the second head. They are the channels of the convolution,
    # whose groups are the heads. Channel i of a group is the sum of R_ij times channel j of this group.
    value = attention.v_proj(x).permute(1, 0, 2)  # (B, T, C)
    values_of_heads = value.split(C // num_heads, dim=2)  # H times (B, T, C / H)
    channels = torch.cat(values_of_heads, dim=1)  # (B, H T, C / H)
    kernel = R.reshape(num_heads * T, T, 1)  # (channels of the output, channels of the group, size of the kernel)
    mixed_channels = F.conv1d(channels, kernel, groups=num_heads)  # (B, H T, C / H)
    mixed_values_of_heads = mixed_channels.split(T, dim=1)  # H times (B, T, C / H)
    mixed = torch.cat(mixed_values_of_heads, dim=2)  # (B, T, C)
    expected_output = attention.out_proj(mixed).permute(1, 0, 2)  # (T, B, C)
    assert torch.allclose(output, expected_output, atol=1e-5)

    if num_heads == 1:
        token_mixing = torch.nn.Linear(T, T, bias=False)
        token_mixing.weight.copy_(R[0])
        mixed_features = token_mixing(value.transpose(1, 2))  # (B, C, T)
        mixed_by_linear = mixed_features.transpose(1, 2)  # (B, T, C)
        assert torch.allclose(mixed, mixed_by_linear, atol=1e-5)


def test_the_loss_of_a_masked_language_model_is_that_of_fairseq_validate(monolingual, tmp_path):
    """The masks of the words depend on the epoch. fairseq-validate reads those of epoch 1."""
    path = train_one_stack("encoder", monolingual, tmp_path)
    flags = ["--path", path, "--task", "masked_lm", "--max-tokens", "400"]
    _, log = run_cli(validate.cli_main, monolingual, *USER_DIR, *flags)
    expected = float(re.search(r"loss ([0-9.]+)", log)[1])
    loaded = checkpoints.load(path, monolingual)
    assert loss(loaded, read_batches(loaded, "valid")) == pytest.approx(expected, abs=6e-4)


def test_weights_that_are_not_numbers_are_refused(trained, data, tmp_path):
    state = torch.load(trained[STOCK], weights_only=False)
    state["model"]["decoder.layers.1.fc1.weight"][0, 0] = math.nan
    path = tmp_path / "nan.pt"
    torch.save(state, path)
    line = get_refusal(path, "--data", data / "bin", "--out", tmp_path / "out")
    assert line.startswith(f"{path}: its weight decoder.layers.1.fc1.weight has values that are not")
    assert not (tmp_path / "out").exists()


def test_losses_of_a_decoder_are_per_token_even_with_sentence_avg():
    """With ``--sentence-avg``, a criterion returns the number of sentences, but fairseq's log divides by tokens."""
    log_of_a_decoder = {"loss": 3.0, "nll_loss": 2.0, "ntokens": 30, "nsentences": 4}
    assert count_targets(4, log_of_a_decoder) == 30
    log_of_a_classifier = {"loss": 3.0, "ntokens": 30, "nsentences": 4}
    assert count_targets(4, log_of_a_classifier) == 4


def test_constant_logits_of_a_decoder_are_0_where_a_row_sees_nothing():
    weights = MeanByPosition()
    weights.add(torch.tensor([[[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]]]))
    constants = fit_constants(weights, causal=True)
    is_hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert constants.by_position[0][is_hidden].eq(0).all()
    attention = constants.by_position[0].masked_fill(is_hidden, float("-inf")).softmax(dim=1)
    torch.testing.assert_close(attention.float(), weights.total[0], atol=1e-4, rtol=0)

"""python -m fairseq_synth.inspect: its measures by hand, its hooks against plain computations, its command line."""

import argparse
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

# ---- measures


def test_weights_of_a_causal_row():
    weights = measure.sentence_weights(torch.tensor([[[5.0, 9.0], [0.0, math.log(3)]]]), causal=True)
    assert torch.allclose(weights, torch.tensor([[[1.0, 0.0], [0.25, 0.75]]]))


def test_describe_weights():
    """Two heads by hand: one looks at its own place and the next, the other at all three alike."""
    own = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]])
    found = measure.describe_weights(torch.stack([own, torch.full((3, 3), 1 / 3)]))
    expected = {
        "entropy": [2 * math.log(2) / 3, math.log(3)],
        "distance": [1 / 3, (1 + 2 / 3 + 1) / 3],
        "diagonal": [2 / 3, 1 / 3],
        "neighbours": [1 / 3, (1 / 3 + 2 / 3 + 1 / 3) / 3],
    }
    assert {name: pytest.approx(value.tolist()) for name, value in found.items()} == expected


def test_word_dependence():
    a = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    b = torch.tensor([[[0.0, 1.0], [0.25, 0.75]]])
    assert measure.word_dependence(a, b).tolist() == [(1 + 0.25) / 2]


def test_cumulative_singular_values():
    """Of diag(3, 1) the first value holds 3/4; half way to it is half of that. A matrix of equal rows has one."""
    found = measure.cumulative_singular_values(
        torch.stack([torch.diag(torch.tensor([3.0, 1.0])), torch.ones(2, 2)]), [0, 0.25, 0.5, 1]
    )
    assert torch.allclose(found, torch.tensor([[0, 0.375, 0.75, 1], [0, 0.5, 1, 1]]))


def test_rank_one_distances():
    """Rows (1, 0) and (0, 1) are sqrt(1/2) of the norm away from both; rows (1, 1) and (2, 2) are of rank one."""
    assert measure.rank_one_distances(torch.eye(2)) == pytest.approx([0.5**0.5, 0.5**0.5])
    assert measure.rank_one_distances(torch.tensor([[1.0, 1], [2, 2]])) == pytest.approx([0.1**0.5, 0], abs=1e-6)


@pytest.mark.parametrize("causal, mean", [(False, 4 * 31.5), (True, 4 * 21)])
def test_values_of_a_histogram_are_drawn_evenly_from_what_a_row_sees(causal, mean, monkeypatch):
    """Whatever their weight: no column or diagonal is preferred."""
    monkeypatch.setattr(attention_part, "HISTOGRAM_VALUES", 400)
    logits = 4 * torch.arange(64.0)[None, None].expand(2, 64, 64)  # column j has the logit 4 j
    sampler = attention_part.ValueSampler()
    reading = SentenceReading(SimpleNamespace(name="a"), 0, logits, causal)
    sampler.add(reading, measure.sentence_weights(logits, causal))
    samples = sampler.samples()
    assert len(samples["logits"]["a"]) == len(samples["weights"]["a"]) == 400
    assert samples["logits"]["a"].mean() == pytest.approx(mean, abs=12)
    assert (samples["weights"]["a"] == 0).sum() > 100  # smaller than fp32 can tell from 0


def test_histogram():
    assert measure.histogram(torch.tensor([-9.0, 0.1, 0.6, 0.7]), 0, 1, 2) == [0.5, 0.5]


def test_mean_by_position():
    mean = MeanByPosition()
    mean.add(torch.tensor([[[2.0]]]))
    mean.add(torch.tensor([[[4.0, 6.0], [8.0, 1.0]]]))
    assert mean.mean_of_first(2, 2).tolist() == [[[3.0, 6.0], [8.0, 1.0]]]
    assert mean.mean_of_first(1, 9).tolist() == [[[3.0, 6.0]]]


def test_removal():
    assert measure.removal_order({"a": [0.3, 0.1], "b": [0.2]}) == [("a", 1), ("b", 0), ("a", 0)]
    assert measure.removal_steps(16, 4) == [0, 4, 8, 12, 16] and measure.removal_steps(2, 8) == [0, 1, 2]


# ---- hooks


def batch_of(rows=((5, 6, 7, 8, 9, 2), (10, 11, 12, 2))):
    """Padded on the right; the targets are the sources."""
    source = pad_batch([list(row) for row in rows], left=False)
    target = pad_batch([[2, *row[:-1]] for row in rows], left=False)
    return {"src_tokens": source, "src_lengths": source.ne(1).sum(1), "prev_output_tokens": target}


def call_attention(module, x):
    return module(query=x, key=x, value=x, need_head_weights=True)


@pytest.mark.parametrize("spec", [*SPECS, "random:1/dense+vanilla:1", "random/factorized_random"])
def test_logits_are_those_of_the_attention(spec):
    module, x = make_attention(spec), torch.randn(5, 3, 6)
    weights = torch.softmax(attentions.compute_logits(module, x, x), dim=-1)
    assert torch.allclose(weights, call_attention(module, x)[1].transpose(0, 1), atol=1e-6)


def test_a_function_without_weights(monkeypatch):
    monkeypatch.setitem(SYNTHESIZERS, "distance", Distance)
    assert attentions.Attention("encoder", "self", 0, make_attention("distance")).logit_parameters().numel() == 0


@pytest.mark.parametrize("arch", ["transformer_multi30k", "transformer_synth_random_vanilla_multi30k"])
def test_reading(arch):
    """What is read in a forward pass are the weights that each attention returns for the same call."""
    model, found, calls = perturb(make_model(arch)), [], []
    with hooks.reading(model, found.append):
        for attention in hooks.attentions(model):
            attention.module.register_forward_hook(
                lambda module, args, kwargs, out: calls.append((module, kwargs)), with_kwargs=True
            )
        model(**batch_of())
    assert len(found) == 6 and [r.causal for r in found] == [False, False, True, False, True, False]
    for reading, (module, kwargs) in zip(found, calls):
        attention, logits, causal = reading
        assert attention.module is module
        kwargs.pop("static_kv", None)
        expected = module(**{**kwargs, "need_head_weights": True, "need_weights": True})[1]
        if causal:
            logits = logits + future_mask(logits.size(-1))
        padding = kwargs.get("key_padding_mask")
        if padding is not None and not (
            causal and attentions.is_synthetic(module)
        ):  # there padding is behind all words
            logits = logits.masked_fill(padding[:, None, None].bool(), -math.inf)
        if expected.dim() == 3:  # fairseq's fast path averages over the heads
            assert torch.allclose(torch.softmax(logits, -1).mean(1), expected, atol=1e-6)
        else:
            assert torch.allclose(torch.softmax(logits, -1).transpose(0, 1), expected, atol=1e-6)


@pytest.mark.parametrize("arch", ["transformer_multi30k", "transformer_synth_dense_multi30k"])
@pytest.mark.parametrize("name", ["encoder.self.1", "decoder.self.0", "decoder.cross.1"])
def test_a_head_is_switched_off(arch, name):
    """As if the columns of the output projection that read it were 0."""
    model = perturb(make_model(arch))
    batch = batch_of()
    with torch.no_grad(), hooks.removed_heads(model, [Head(name, 1)]):
        masked = model(**batch)[0]
    whole = model(**batch)[0]
    assert not torch.allclose(masked, whole, atol=1e-3)
    attention = next(a for a in hooks.attentions(model) if a.name == name)
    with torch.no_grad():
        attention.module.out_proj.weight[:, 8:16] = 0
        assert torch.allclose(masked, model(**batch)[0], atol=1e-5)


def test_branches_of_a_layer():
    """The second encoder layer by hand: its attention alone, without skip connections and feed-forward layer."""
    model = perturb(make_model("transformer_synth_random_multi30k"))
    batch, found = batch_of(rows=((5, 6, 7, 2),)), {}
    layer = model.encoder.layers[1]

    def keep(output):
        found[output.stack, output.layer] = output.x

    with torch.no_grad():
        with hooks.layer_outputs(model, keep, keep_skip=False, keep_feed_forward=False):
            model(**batch)
        x = found["encoder", 0]
        alone = layer.final_layer_norm(layer.self_attn_layer_norm(layer.self_attn(x, x, x)[0]))
        assert torch.allclose(found["encoder", 1], alone, atol=1e-6)
        with hooks.layer_outputs(model, keep, keep_skip=True, keep_feed_forward=True):
            model(**batch)
        assert torch.allclose(found["encoder", 1], layer(found["encoder", 0], None), atol=1e-6)


# ---- on checkpoints


def sizes_of(arch):
    return SMALL if "synth" in arch else [flag for flag in SMALL if flag not in ("--synth-max-length", "24")]


@pytest.fixture(scope="module")
def trained(make_once, data):
    """{name: a checkpoint}, of a stock Transformer and of a mixture."""

    def make(folder):
        for arch, updates in ((STOCK, "9"), (MIXTURE, "80")):
            flags = ["--max-update", updates, "--no-epoch-checkpoints", "--validate-interval", "9"]
            train_model(data, folder / arch, *flags, arch=arch, small=sizes_of(arch))

    return {arch: make_once("inspected", make) / arch / "checkpoint_last.pt" for arch in (STOCK, MIXTURE)}


STOCK, MIXTURE = "transformer_multi30k", "transformer_synth_random_vanilla_multi30k"


def test_layers_and_numbers_are_in_the_picture_of_the_heads():
    """Only some layers may have been measured: without data those that never look at the input."""
    figures = {"group": "encoder.self", "heads": 2, "alpha": None, "entropy": [0.5, 0.25]}
    attentions = {f"encoder.self.{layer}": {**figures, "layer": layer} for layer in (1, 3)}
    (picture,) = pictures.pictures({"model": {"attentions": attentions}})
    (panel,) = picture.panels
    assert picture.name == "heads"
    assert ("set_yticks", [[0, 1], ["layer 1", "layer 3"]], {"fontsize": 7}) in panel.calls
    texts = [(*arguments, options["color"]) for call, arguments, options in panel.calls if call == "text"]
    # dark cells have white numbers
    assert texts == [(0, 0, "0.50", "white"), (1, 0, "0.25", "black"), (0, 1, "0.50", "white"), (1, 1, "0.25", "black")]


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_the_initial_state_is_that_of_the_training(arch, data, tmp_path):
    """A training with a learning rate of 0 ends where it began; with the data or without, from the seed alone."""
    train_model(
        data, tmp_path, "--max-update", "1", "--lr", "0", "--no-epoch-checkpoints", arch=arch, small=sizes_of(arch)
    )
    for folder in (data / "bin", None):
        loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", folder)
        initial, kept = (used_weights(dict(model.named_parameters())) for model in (loaded.initial(), loaded.model))
        assert initial.keys() == kept.keys() and all(torch.equal(initial[key], kept[key]) for key in kept)
    loaded.cfg.checkpoint.reset_optimizer = True  # alone it only begins the training's own optimizer anew
    assert loaded.initial() is not None
    loaded.cfg.checkpoint.restore_file = "another.pt"
    assert loaded.initial() is None


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("random+vanilla:1/dense+vanilla:2", {"random": "a00", "dense": "0bb", "vanilla": "xyy"}),
        ("random:1/dense+vanilla:2", {"random": [1, 0, 0], "dense": "0bb", "vanilla": "0yy"}),
        ("random:1/vanilla:2", None),
    ],
)
def test_alpha_of_heads_of_different_kinds(spec, expected):
    """Every head's weights sum to 1; a function that a head has not weighs nothing there."""
    module = make_attention(spec, num_heads=3, embed_dim=6)
    found = attentions.Attention("encoder", "self", 0, module).alpha()
    if expected is None:
        assert found is None
        return
    assert set(found) == set(expected)
    assert [sum(heads) for heads in zip(*found.values())] == pytest.approx([1, 1, 1])
    for name, heads in expected.items():
        assert [value == 0 for value in found[name]] == [head in ("0", 0) for head in heads]
    first, second = module.synthesizer.mixtures()
    assert found["vanilla"][1:] == pytest.approx(torch.softmax(second.alpha, 0)[1].tolist())


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_importance_is_a_derivative(arch, trained, data):
    """Of one sentence, against a finite difference of the training's loss."""
    loaded = checkpoints.load(trained[arch], data / "bin")
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid", 1))
    perturb(loaded.model.double(), std=0.1)
    found, criterion = head_importance(loaded, sample), build_criterion(loaded)
    values = []
    for factor in (1.01, 0.99):
        with (
            torch.no_grad(),
            hooks.masked_heads(loaded.model, {"decoder.self.1": torch.tensor([1, factor], dtype=torch.float64)}),
        ):
            values.append(float(criterion(loaded.model, sample[0])[0]))
    expected = abs(values[0] - values[1]) / 0.02 / sample[0]["ntokens"]
    assert found["decoder.self.1"]["gradient"][1] == pytest.approx(expected, rel=0.02)


def test_loss_and_bleu_are_those_of_fairseq(trained, data):
    """With all heads: what fairseq-validate and sacreBLEU of fairseq-generate's translations say."""
    path = trained[MIXTURE]
    loaded = checkpoints.load(path, data / "bin")
    sample = checkpoints.batches(loaded, "test", checkpoints.readable(loaded, "test"), max_tokens=60)
    flags = [data / "bin", *USER_DIR, "--path", path, "--required-batch-size-multiple", "1"]
    _, log = run_cli(
        validate.cli_main, *flags, "--task", "translation", "--valid-subset", "test", "--max-tokens", "500"
    )
    assert loss(loaded, sample) == pytest.approx(float(re.search(r"nll_loss (\S+)", log)[1]), abs=6e-4)
    out, _ = run_cli(generate.cli_main, *flags, "--gen-subset", "test", "--beam", "2")
    lines = {kind: re.findall(rf"^{kind}-(\d+)\t(?:\S+\t)?(.*)$", out, re.M) for kind in "TH"}
    translations, references = ([text for _, text in sorted(lines[kind])] for kind in "HT")
    expected = BLEU(tokenize="none", force=True).corpus_score(translations, [references]).score
    bleu, signature = compute_bleu(loaded, sample, beam=2, remove_bpe="subword_nmt")
    assert bleu == pytest.approx(expected) and bleu > 0 and "tok:none" in signature


def test_loss_and_bleu_by_length(trained, data, tmp_path):
    """The ranges share out the sentences, and their losses, weighted by tokens, are the loss of all."""
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--subset", "test", "--only", "lengths", "--no-pictures", "--out", out]
    inspect(trained[MIXTURE], *flags)
    (found,) = json.loads((out / "figures.json").read_text()).values()
    assert not {"sentences", "layers", "removal"} & set(found)
    assert "gradient" not in found["attentions"]["encoder.self.0"] and "lengths" in drawn({"model": found})
    lines = [(data / f"{name}.de").read_text().splitlines() for name in ("test", "long")]
    lengths = [len(line.split()) + 1 for part in lines for line in part]  # with the end of the sentence
    lengths = [length for length in lengths if length <= 24]  # the model's limit
    counts, tokens = {}, {}
    for length in lengths:
        longest = 8 if length <= 8 else 16
        counts[longest], tokens[longest] = counts.get(longest, 0) + 1, tokens.get(longest, 0) + length
    ranges = found["lengths"]["ranges"]
    assert {part["longest"]: part["sentences"] for part in ranges} == counts and len(counts) == 2
    mean = sum(part["loss"] * tokens[part["longest"]] for part in ranges) / sum(tokens.values())
    assert mean == pytest.approx(found["loss"], rel=1e-3)
    assert all(part["bleu"] > 0 for part in ranges) and "tok:none" in found["lengths"]["signature"]


@pytest.mark.parametrize("arch", [STOCK, MIXTURE])
def test_without_words(arch, trained, data):
    """Each head's figure, and the curve, whose last point has all heads replaced."""
    loaded = checkpoints.load(trained[arch], data / "bin")
    options = Options(parts=("words",))
    found = analysis.analyse(loaded, options)
    curve, averages = found["words"], words.average(loaded, "train", 300)
    assert curve["sentences"] == 300 and len(curve["heads"]) == 8 and len(curve["loss"]) == 9
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid"))
    logits = {name: constants.matrix(13) for name, constants in averages.constants.items()}
    for heads, expected in (
        ([Head("decoder.self.1", 1)], found["loss"] + found["attentions"]["decoder.self.1"]["without_words"][1]),
        ([Head(*head) for head in curve["heads"]], curve["loss"][-1]),
    ):
        with hooks.replaced_heads(loaded.model, logits, heads):
            assert loss(loaded, sample) == pytest.approx(expected, abs=1e-3)
    alone = [found["attentions"][name]["without_words"][head] for name, head in curve["heads"]]
    assert alone == sorted(alone) and "without_words" not in found["attentions"]["decoder.cross.0"]


def test_what_is_averaged_over(trained, data, monkeypatch):
    """Of many sentences some are read, evenly from the longest down."""
    loaded, read = checkpoints.load(trained[STOCK], data / "bin"), []
    make_batches = checkpoints.batches
    monkeypatch.setattr(checkpoints, "batches", lambda *args: read.append(args[2]) or make_batches(*args))
    average, everything = words.average(loaded, "train", 3), checkpoints.readable(loaded, "train")
    assert read == [[everything[99], everything[199], everything[299]]]
    assert average.length == loaded.task.dataset("train").num_tokens(everything[-1]) and average.sentences == 3


def test_words_are_worth_nothing_to_random(data, tmp_path):
    train_model(data, tmp_path, "--max-update", "9", "--no-epoch-checkpoints", arch="transformer_synth_random_multi30k")
    loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", data / "bin")
    found = analysis.analyse(loaded, Options(parts=("words",)))
    assert max(abs(value) for value in found["attentions"]["encoder.self.0"]["without_words"]) < 1e-5
    assert found["words"]["loss"][-1] == pytest.approx(found["loss"], abs=1e-3)


def test_summary(trained, data, tmp_path):
    """What docs/analysis.md shows of the same figures."""
    flags = ["--data", data / "bin", "--sentences", "2", "--steps", "1", "--no-pictures"]
    for name, more in (("all", []), ("short", ["--summary"])):
        inspect(trained[STOCK], *flags, *more, "--out", tmp_path / name)
    found, short = (json.loads((tmp_path / name / "figures.json").read_text()) for name in ("all", "short"))
    (found,), (short,) = found.values(), short.values()
    assert set(short) == {"data", "loss", "layers", "removal", "words", "lengths", "attentions", "updates"}
    assert {key: short[key] for key in ("removal", "words")} == {key: found[key] for key in ("removal", "words")}
    whole, kept = (x["attentions"]["decoder.self.1"] for x in (found, short))
    assert set(kept["histograms"]) == {"logits", "weights"} and "pattern" not in short["attentions"]["decoder.cross.0"]
    shares = [x["histograms"]["logits"]["shares"]["trained"] for x in (whole, kept)]
    assert shares[1] == [float(f"{a + b:.3g}") for a, b in zip(shares[0][::2], shares[0][1::2])]
    assert kept["pattern"] == [[row[:16] for row in head[:16]] for head in whole["pattern"]]
    assert refused(trained[STOCK], "--summary", "--out", tmp_path / "out").startswith("--summary: ")


@pytest.mark.parametrize(
    "part, key, names",
    [
        ("attention", "sentences", {"patterns", "sentence2-cross-attention", "singular-values", "weights", "heads"}),
        ("layers", "layers", {"rank"}),
        ("heads", "removal", {"heads", "removal"}),
        ("words", "words", {"heads", "without-words"}),
    ],
)
def test_one_part_alone(part, key, names, trained, data, tmp_path):
    """Its figures and pictures are there, and those of the other parts are not."""
    flags = ["--data", data / "bin", "--sentences", "2", "--steps", "1", "--only", part, "--no-pictures"]
    inspect(trained[MIXTURE], *flags, "--out", tmp_path / "out")
    (found,) = json.loads((tmp_path / "out" / "figures.json").read_text()).values()
    assert key in found and len({"sentences", "layers", "removal", "words", "lengths"} & set(found)) == 1
    assert found["loss"] > 0
    pictured = drawn({"model": found})
    assert names <= pictured and ("singular-values" in pictured) == (part == "attention")


def made_up_figures(layers, heads):
    """Figures of a translation model with mixtures, of every part, with a sentence of long words."""
    words = [f"a_rather_long_word_{i}" for i in range(14)]
    square = [[500] * len(words)] * len(words)
    attentions, weights = {}, {}
    for group in pictures.GROUPS:
        for layer in range(layers):
            histogram = {"low": -1.0, "high": 1.0, "shares": {"trained": [0.5, 0.5], "initial": [0.25, 0.75]}}
            attentions[f"{group}.{layer}"] = {
                "group": group,
                "layer": layer,
                "heads": heads,
                "alpha": {"factorized_random": [0.25] * heads, "vanilla": [0.75] * heads},
                "histograms": {"parameters": histogram, "logits": histogram, "weights": histogram},
                "pattern": [square] * heads,
                "singular_values": [[0.0, 0.75, 1.0]] * heads,
                **{figure: [0.0123 * head - 0.01 for head in range(heads)] for figure in HEAD_METRICS},
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
    figures = {f"checkpoint_best_{number}": made_up_figures(layers, heads) for number in range(models)}
    names = set()
    for picture in pictures.titled_pictures(figures):
        figure = picture.draw()
        figure.draw_without_rendering()  # finds the places of all labels
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
    """The first model has read the sentences 0 and 7, the second 7 and 9. The darkest weight tells them apart."""

    def sentence(number, weight):
        tokens = {"encoder": ["a", "b"], "decoder": ["a", "b"]}
        return {"number": number, "tokens": tokens, "weights": {"encoder.self.0": [[[weight, 0], [0, weight]]]}}

    figures = {"first": made_up_figures(layers=1, heads=1), "second": made_up_figures(layers=1, heads=1)}
    figures["first"]["sentences"] = [sentence(0, 100), sentence(7, 200)]
    figures["second"]["sentences"] = [sentence(7, 300), sentence(9, 400)]
    drawn_sentences = [picture for picture in pictures.pictures(figures) if picture.name.startswith("sentence")]
    assert [picture.name for picture in drawn_sentences] == ["sentence2-encoder-self-attention"]
    (picture,) = drawn_sentences
    matrices = [np.asarray(axes.images[0].get_array()) for axes in picture.draw().axes]
    assert [matrix.max() for matrix in matrices] == [200, 300]


def drawn(found):
    """The names of the pictures of one or of several models that there are figures for, after drawing them."""
    names = set()
    for picture in pictures.pictures(found):
        figure = picture.draw()
        assert any(axes.has_data() for axes in figure.axes)
        names.add(picture.name)
    return names


def inspect(*argv):
    run_cli(lambda: main([str(arg) for arg in argv]))


def test_the_command_line(trained, data, tmp_path):
    """A stock Transformer and a mixture at once: every picture's figures are in the JSON."""
    out = tmp_path / "new" / "out"
    flags = ["--data", data / "bin", "--sentences", "5", "--steps", "2", "--no-pictures"]
    inspect(*trained.values(), *flags, "--out", out)
    found = json.loads((out / "figures.json").read_text())
    assert list(found) == [f"{arch}-checkpoint_last" for arch in trained]
    expected = (
        "parameters logits weights patterns heads sentence1-encoder-self-attention sentence3-cross-attention "
        "singular-values rank removal without-words lengths"
    ).split()
    names = drawn(found)
    assert set(expected) <= names and "alpha" in names
    for label, figures in found.items():
        alone = {picture.name for picture in pictures.pictures({label: figures})}
        assert alone == (names if MIXTURE in label else names - {"alpha"})
        assert figures["data"] == {"subset": "valid", "sentences": 5} and len(figures["attentions"]) == 6
        for attention in figures["attentions"].values():
            assert set(attention["histograms"]) == {"parameters", "logits", "weights"}
            assert set(attention["histograms"]["logits"]["shares"]) == {"trained", "initial"}
            assert len(attention["gradient"]) == len(attention["left_out"]) == attention["heads"] == 2
        for sentence in figures["sentences"]:
            rows, columns = len(sentence["tokens"]["decoder"]), len(sentence["tokens"]["encoder"])
            assert sentence["tokens"]["encoder"][-1] == sentence["tokens"]["decoder"][0] == "</s>"
            cross = sentence["weights"]["decoder.cross.0"]
            assert (len(cross), len(cross[0]), len(cross[0][0])) == (2, rows, columns)
        curve = figures["removal"]["groups"]["encoder.self"]
        assert curve["share"] == [0, 0.5, 1] and curve["loss"][0] == pytest.approx(figures["loss"])
        assert all(bleu is not None for bleu in curve["bleu"])
    removal = next(picture for picture in pictures.pictures(found) if picture.name == "removal")
    (losses, *_) = (call for call in removal.panels[0].calls if call[2].get("label") == list(found)[1])
    stock, mixture = found.values()
    assert losses[1] == [mixture["removal"]["groups"]["encoder.self"][key] for key in ("share", "loss")]
    (out / "pictures").mkdir()
    few = {label: {"attentions": {**figures["attentions"]}} for label, figures in found.items()}
    for figures in few.values():  # some of them, as each takes a second
        for name, own in figures["attentions"].items():
            figures["attentions"][name] = {k: v for k, v in own.items() if k not in ("histograms", "pattern")}
    pictures.save(few, out / "pictures")
    few[next(iter(found))]["attentions"]["decoder.self.1"]["heads"] = 3
    pictures.save(few, out / "pictures")  # of models with other heads: each has its own
    saved = {path.stem for path in (out / "pictures").glob("*.png")}
    assert saved >= {"heads", "alpha"} | {f"{label}-heads" for label in found}
    assert stock["attentions"]["encoder.self.0"]["alpha"] is None
    alpha = mixture["attentions"]["encoder.self.0"]["alpha"]
    assert set(alpha) == {"random", "vanilla"} and alpha["random"][0] + alpha["vanilla"][0] == pytest.approx(
        1, abs=1e-3
    )


def end_in(part, error, monkeypatch):
    """The measuring of a part ends with an error, after it has added some figures."""

    def measure(inspection):
        inspection.results[part] = "half of it"
        raise error

    monkeypatch.setitem(analysis.PARTS, part, analysis.PARTS[part]._replace(measure=measure))


def test_finished_parts_stay_when_the_user_interrupts(trained, data, tmp_path, monkeypatch, capsys):
    end_in("words", KeyboardInterrupt(), monkeypatch)
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--sentences", "2", "--only", "layers,words,lengths", "--out", out]
    with pytest.raises(SystemExit) as ended:
        inspect(trained[STOCK], *flags)
    assert ended.value.code == 130
    last_line = capsys.readouterr().err.splitlines()[-1]
    expected = f"{out} has the finished parts layers; for the rest give --only words,lengths and another --out"
    assert last_line == f"interrupted in words; {expected}"
    (figures,) = json.loads((out / "figures.json").read_text()).values()
    assert "layers" in figures and "words" not in figures
    assert {path.name for path in out.iterdir()} == {"figures.json", "parameters.png", "rank.png"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_finished_parts_stay_when_a_part_fails(trained, data, tmp_path, monkeypatch, capsys):
    end_in("words", SynthesizerError("no such thing"), monkeypatch)
    out = tmp_path / "out"
    flags = ["--data", data / "bin", "--sentences", "2", "--only", "lengths,words", "--no-pictures", "--out", out]
    assert refused(trained[STOCK], *flags) == "no such thing"
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"failed in words; {out} has the finished parts lengths")
    (figures,) = json.loads((out / "figures.json").read_text()).values()
    assert "lengths" in figures and "words" not in figures


def test_a_file_that_cannot_be_written_whole_is_not_there(trained, data, tmp_path, monkeypatch):
    def write_half(picture, folder):
        (folder / picture.name).write_text("half of a picture")
        raise OSError("disk full")

    monkeypatch.setattr(drawing.Picture, "save", write_half)
    with pytest.raises(OSError, match="disk full"):
        inspect(trained[STOCK], "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_sentences_limit_the_training_sentences_too(trained, data, monkeypatch):
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    figures = analysis.analyse(loaded, Options(parts=("words",), sentences=3))
    assert figures["data"]["sentences"] == figures["words"]["sentences"] == 3


def test_what_a_part_costs_is_said_before_it_starts(trained, data, tmp_path, capsys):
    """The passes that are announced are those that are made."""
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    inspection = analysis.begin(loaded, Options(sentences=4, steps=2))
    # 12 heads in three kinds of attention; loss and gradient, each head, all heads, and half and none of each kind
    assert analysis.PARTS["heads"].describe_cost(inspection) == "21 passes over 4 sentences, and 7 translations of them"
    assert analysis.PARTS["words"].describe_cost(inspection) == (
        "a pass over up to 4 sentences of train, then 16 passes over 4 sentences"
    )
    flags = ["--data", data / "bin", "--sentences", "4", "--only", "lengths", "--no-pictures"]
    inspect(trained[STOCK], *flags, "--out", tmp_path / "out")
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("checkpoint_last: lengths: "))
    assert "lengths: 1 pass over 4 sentences, and 1 translation of them (one pass over 4 sentences took " in line


def test_passes_of_the_heads_part(trained, data, monkeypatch):
    """As many as `describe_cost` announces."""
    loaded = checkpoints.load(trained[STOCK], data / "bin")
    inspection = analysis.begin(loaded, Options(sentences=4, steps=2))
    calls = []
    handle = loaded.model.encoder.layers[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    translations = []
    monkeypatch.setattr(heads_part, "compute_bleu", lambda *_: translations.append(1) or Bleu(0.0, "none"))
    analysis.PARTS["heads"].measure(inspection)
    handle.remove()
    assert len(inspection.batches) == 1 and (len(calls), len(translations)) == (21, 7)


def test_help_says_what_each_part_costs(capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    text = capsys.readouterr().out
    assert analysis.PARTS.keys() == arguments.PARTS.keys()
    for name, part in arguments.PARTS.items():
        assert f"  {name}" in text and part.cost in text


def test_an_encoder_that_nothing_attends_to(data, tmp_path):
    """Its heads matter to no loss."""
    train_model(data, tmp_path, "--max-update", "1", "--no-epoch-checkpoints", "--no-cross-attention")
    loaded = checkpoints.load(tmp_path / "checkpoint_last.pt", data / "bin")
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid", 2))
    found = {name: own["gradient"] for name, own in head_importance(loaded, sample).items()}
    assert found["encoder.self.0"] == [0, 0] and min(found["decoder.self.0"]) > 0


def test_without_data(data, tmp_path):
    """softmax(R) as it is, of a checkpoint alone; one's own code is imported first."""
    train_model(data, tmp_path, "--max-update", "1", "--no-epoch-checkpoints", arch="transformer_synth_random_multi30k")
    path = tmp_path / "checkpoint_last.pt"
    own = tmp_path / "code_to_inspect_with"
    line = refused(path, "--user-dir", own, "--out", tmp_path / "out")
    assert line == f"--user-dir {own}: no such folder"
    own.mkdir()
    (own / "__init__.py").touch()
    shutil.copy(path, tmp_path / "other.pt")
    inspect(path, tmp_path / "other.pt", "--user-dir", own, "--positions", "9", "--out", tmp_path / "out")
    assert own.name in sys.modules
    found = json.loads((tmp_path / "out" / "figures.json").read_text())["checkpoint_last"]
    R = torch.load(path)["model"]["encoder.layers.1.self_attn.synthesizer.components.random.R"]
    pattern = torch.tensor(found["attentions"]["encoder.self.1"]["pattern"]) / 1000
    assert torch.allclose(pattern, torch.softmax(R[:, :9, :9], -1), atol=6e-4)
    assert "pattern" not in found["attentions"]["decoder.cross.0"] and "data" not in found
    pictured = sorted(path.stem for path in (tmp_path / "out").glob("*.png"))
    assert pictured == ["heads", "parameters", "patterns", "singular-values"]


def test_functions_that_differ_by_layer(data, tmp_path):
    """Without data some layers have a pattern and some have none; --out may be a link to an empty folder."""
    specs = ["--encoder-synthesizer", "dense,random", "--decoder-synthesizer", "random,dense"]
    arch = "transformer_synth_random_multi30k"
    train_model(data, tmp_path / "run", "--max-update", "1", "--no-epoch-checkpoints", *specs, arch=arch)
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "empty")
    inspect(tmp_path / "run" / "checkpoint_last.pt", "--out", tmp_path / "out")
    found = json.loads((tmp_path / "empty" / "figures.json").read_text())["checkpoint_last"]
    picture = next(p for p in pictures.pictures({"model": found}) if p.name == "singular-values")
    styles = [[options for method, _, options in panel.calls if method == "plot"] for panel in picture.panels]
    assert [own[0]["label"] for own in styles] == ["layer 1", "layer 0"] and len(picture.panels) == 2
    assert (tmp_path / "out").is_symlink() and (tmp_path / "out" / "singular-values.png").exists()


@pytest.mark.parametrize("kind", ["language model", "adaptive language model", "characters", "encoder"])
def test_one_stack(kind, monolingual, tmp_path):
    """A language model has a decoder alone, a masked one an encoder alone: loss, not BLEU, without heads."""
    decoder = (
        "--task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16 "
        "--decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode none "
    )
    adaptive = "--criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-input "
    adaptive += "--adaptive-input-cutoff 8,16 --adaptive-input-factor 2 --adaptive-softmax-cutoff 8,16"
    flags = {
        "language model": f"{decoder} --criterion cross_entropy",
        "adaptive language model": decoder + adaptive,
        "characters": f"{decoder} --character-embeddings --character-filters [(1,4)]",
        "encoder": "--task masked_lm --arch roberta --encoder-layers 2 --encoder-embed-dim 16 "
        "--encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode eos "
        "--criterion masked_lm",
    }[kind].split()
    recipe = "--optimizer adam --lr 0.01 --max-tokens 400 --num-workers 0 --no-progress-bar --seed 7".split()
    argv = [monolingual, *USER_DIR, *flags, *recipe, "--max-update", "2", "--no-epoch-checkpoints"]
    run_cli(train.cli_main, *argv, "--save-dir", tmp_path)
    path = tmp_path / "checkpoint_last.pt"
    few = ["--sentences", "2", "--steps", "2"] + ["--no-pictures"] * (kind not in ("language model", "encoder"))
    inspect(path, "--data", monolingual, *few, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "heads.png").exists() == (kind in ("language model", "encoder"))
    if kind == "characters":
        assert "embeds the characters of its words" in refused(path, "--no-pictures", "--out", tmp_path / "alone")
    else:
        inspect(path, "--no-pictures", "--out", tmp_path / "alone")
    found = json.loads((tmp_path / "out" / "figures.json").read_text())["checkpoint_last"]
    stack = "encoder" if kind == "encoder" else "decoder"
    assert set(found["attentions"]) == {f"{stack}.self.0", f"{stack}.self.1"} and set(found["layers"]["trained"]) == {
        stack
    }
    curve = found["removal"]["groups"][f"{stack}.self"]
    assert curve["bleu"] == [None] * 3 and curve["loss"][0] == pytest.approx(found["loss"], rel=1e-3)


# ---- bad input


def refused(*argv):
    return get_error_line(lambda: main([str(arg) for arg in argv]))


def test_refuses_checkpoints(tmp_path, data, trained):
    out = ["--out", tmp_path / "out"]
    assert "no such checkpoint" in refused(tmp_path / "none.pt", *out)
    (tmp_path / "text.pt").write_text("hello")
    assert "text.pt" in refused(tmp_path / "text.pt", *out)
    torch.save({"model": {}}, tmp_path / "bare.pt")
    assert "not a checkpoint of fairseq-train" in refused(tmp_path / "bare.pt", *out)
    flags = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-conv-dim 16"
    flags += " --decoder-conv-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2"
    flags += " --decoder-attention-heads 2 --encoder-kernel-size-list [3] --decoder-kernel-size-list [3]"
    argv = [data / "bin", *RECIPE, "--arch", "lightconv", *flags.split(), "--max-update", "1"]
    run_cli(train.cli_main, *argv, "--no-epoch-checkpoints", "--save-dir", tmp_path / "conv")
    line = refused(tmp_path / "conv" / "checkpoint_last.pt", *out)
    assert "lightconv" in line and "neither a Transformer" in line
    state = torch.load(trained[STOCK])
    state["cfg"] = {**state["cfg"], "model": argparse.Namespace(arch="another", _name="another")}
    torch.save(state, tmp_path / "another.pt")
    assert "'another' is unknown" in refused(tmp_path / "another.pt", *out)
    assert not any("out" in path.name for path in tmp_path.iterdir())


def test_refuses_data(tmp_path, data, trained, monolingual):
    def line(folder, *flags):
        return refused(trained[MIXTURE], "--data", folder, *flags, "--out", tmp_path / "out")

    other = shutil.copytree(data / "bin", tmp_path / "other")
    words = (other / "dict.en.txt").read_text().splitlines()
    for language in ("en", "de"):
        (other / f"dict.{language}.txt").write_text("\n".join(words[:-2]) + "\n")
    found = line(other)
    assert f"{len(words) + 2} entries" in found and f"was trained with {len(words) + 4}" in found
    assert "no pair of languages" in line(monolingual) and "no such folder" in line(tmp_path / "none")
    (other / "dict.de.txt").unlink()
    assert "dict.de.txt is missing" in line(other)
    assert "has no split 'nothing'" in line(data / "bin", "--subset", "nothing")
    alone = refused(trained[MIXTURE], "--only", "heads,lengths", "--out", tmp_path / "out")
    assert alone == "--only: works only with --data; add --data BIN, or remove the flag"
    more = refused(trained[MIXTURE], "--beam", "2", "--sentences", "3", "--out", tmp_path / "out")
    assert more == "--sentences --beam: works only with --data; add --data BIN, or remove the flag"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_refuses_the_place(tmp_path, trained, monkeypatch):
    def line(out):
        return refused(trained[STOCK], "--out", out)

    (tmp_path / "file").write_text("mine")
    assert "exists already" in line(tmp_path / "file") and "exists already" in line(tmp_path)
    assert "cannot be written" in line(tmp_path / "file" / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--no-pictures" in line(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


# ---- MLP-Mixer


def test_random_without_softmax_mixes_tokens_as_a_mixer(monkeypatch):
    """Section 2 of the paper: what is left is a linear layer over the tokens, one for each head's features.

    It is computed here as a convolution with kernel 1 whose channels are the tokens and whose groups are the heads;
    with one head it is the token-mixing Linear of MLP-Mixer (Tolstikhin et al. 2021), shared by all features.
    """
    monkeypatch.setattr(computations, "COMPUTATIONS", (computations.plain,))
    monkeypatch.setattr(computations.plain, "masked_softmax", lambda scores, *masks: scores)
    for heads in (1, 2):
        attention = make_attention("random", embed_dim=6, num_heads=heads, max_length=7)
        x = torch.randn(7, 3, 6)  # T, B, C
        R = attention.synthesizer.components["random"].R
        with torch.no_grad():
            found = attention(x)[0]
            value = attention.v_proj(x).permute(1, 0, 2)  # B, T, C
            by_head = torch.cat(value.split(6 // heads, dim=2), dim=1)  # B, H T, C / H
            mixed = F.conv1d(by_head, R.reshape(heads * 7, 7, 1), groups=heads)
            mixed = torch.cat(mixed.split(7, dim=1), dim=2)
            assert torch.allclose(found, attention.out_proj(mixed).permute(1, 0, 2), atol=1e-5)
            if heads == 1:
                linear = torch.nn.Linear(7, 7, bias=False)
                linear.weight.copy_(R[0])
                assert torch.allclose(mixed, linear(value.transpose(1, 2)).transpose(1, 2), atol=1e-5)


ROBERTA = (
    "--task masked_lm --arch roberta --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --tokens-per-sample 32 --sample-break-mode eos --criterion masked_lm "
    "--optimizer adam --lr 0.01 --max-tokens 400 --num-workers 0 --no-progress-bar --seed 7 --max-update 2 "
    "--no-epoch-checkpoints"
).split()


def test_the_loss_of_a_masked_language_model_is_that_of_fairseq_validate(monolingual, tmp_path):
    """Its masks depend on the epoch; fairseq-validate reads those of epoch 1."""
    run_cli(train.cli_main, monolingual, *USER_DIR, *ROBERTA, "--save-dir", tmp_path)
    path = tmp_path / "checkpoint_last.pt"
    _, log = run_cli(
        validate.cli_main, monolingual, *USER_DIR, "--path", path, "--task", "masked_lm", "--max-tokens", "400"
    )
    validated = float(re.search(r"loss ([0-9.]+)", log)[1])
    loaded = checkpoints.load(path, monolingual)
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid"))
    assert loss(loaded, sample) == pytest.approx(validated, abs=6e-4)


def test_refuses_weights_that_are_not_numbers(trained, data, tmp_path):
    state = torch.load(trained[STOCK], weights_only=False)
    state["model"]["decoder.layers.1.fc1.weight"][0, 0] = math.nan
    torch.save(state, tmp_path / "nan.pt")
    line = refused(tmp_path / "nan.pt", "--data", data / "bin", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path / 'nan.pt'}: its weight decoder.layers.1.fc1.weight has values that are not")
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

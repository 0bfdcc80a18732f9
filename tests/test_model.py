"""The whole model: padding, causality, search, the host's flags, stock checkpoints, sizes, refusals."""

import argparse
import contextlib
import copy
import functools
import re
import sys
import textwrap
from unittest import mock

import fairseq.models.roberta.model
import helpers
import pytest
import reference
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.sequence_generator import SequenceGenerator
from helpers import (
    KINDS,
    ROOT,
    SIDES,
    SPECS,
    Distance,
    compute_logits,
    make_dictionary,
    make_model,
    make_synth,
    make_task,
    pad_batch,
    perturb,
    used_weights,
)

from fairseq_synth import cache, lengths, synthesizers
from fairseq_synth.architectures import MODELS, STOCK, VARIANTS, architecture_name
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.host.layers import HostLayer, has_fast_path
from fairseq_synth.layers import SynthesizerDecoder
from fairseq_synth.logits import Logits, Product
from fairseq_synth.masks import aligned_columns
from fairseq_synth.positions import Inputs

SOURCES = [[5, 6, 7, 8, 9, 10, 2], [11, 12, 2], [13, 14, 15, 16, 2]]
TARGETS = [[2, 5, 6], [2, 7, 8, 9, 10, 11], [2, 12, 13, 14]]


@pytest.mark.parametrize("left_source", [True, False])
@pytest.mark.parametrize("left_target", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_alone_equals_batched(spec, left_source, left_target):
    """A sentence's output does not depend on what it is batched with, or on which side it is padded."""
    model = make_synth(spec)
    source, target = pad_batch(SOURCES, left_source), pad_batch(TARGETS, left_target)
    out, extra = model(source, None, target)
    encoded = model.encoder(source, return_all_hiddens=True)
    assert torch.equal(encoded["encoder_padding_mask"][0], source.eq(1))
    for b, (source_tokens, target_tokens) in enumerate(zip(SOURCES, TARGETS)):
        source_alone = torch.tensor([source_tokens])
        target_alone = torch.tensor([target_tokens])
        alone, alone_extra = model(source_alone, None, target_alone)
        real_source, real_target = source[b].ne(1), target[b].ne(1)
        torch.testing.assert_close(out[b][real_target], alone[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(
            extra["attn"][0][b][real_target][:, real_source], alone_extra["attn"][0][0], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            extra["inner_states"][-1][:, b][real_target], alone_extra["inner_states"][-1][:, 0], atol=2e-5, rtol=0
        )
        encoded_alone = model.encoder(source_alone, return_all_hiddens=True)
        # everything the encoder hands out is in the caller's columns
        for got, want in [
            (encoded["encoder_out"][0][:, b], encoded_alone["encoder_out"][0][:, 0]),
            (encoded["encoder_states"][1][:, b], encoded_alone["encoder_states"][1][:, 0]),
            (encoded["encoder_embedding"][0][b], encoded_alone["encoder_embedding"][0][0]),
        ]:
            torch.testing.assert_close(got[real_source], want, atol=2e-5, rtol=0)


def test_feed_forward_outputs_are_in_the_callers_columns():
    """What the encoder's layers hand out with return_fc, of left-padded sentences."""
    encoder = make_synth("random").encoder
    for layer in encoder.layers:
        layer.return_fc = True
    batch = pad_batch(SOURCES, left=True)
    found = encoder(batch, return_all_hiddens=True)["fc_results"]
    for b, sentence in enumerate(SOURCES):
        alone = encoder(torch.tensor([sentence]), return_all_hiddens=True)["fc_results"]
        for got, want in zip(found, alone):
            torch.testing.assert_close(got[batch[b].ne(1), b], want[:, 0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(
    "kind, spec", [(k, s) for k in ("language_model", "encoder") for s in SPECS] + [("linformer", "")]
)
def test_alone_equals_batched_in_one_stack(kind, spec, left):
    """Language models and encoders, with every layer's output."""
    model = perturb(make_model("roberta_linformer_agnews")) if kind == "linformer" else make_synth(spec, kind)
    batch = pad_batch(SOURCES, left)
    out, extra = model(batch, return_all_hiddens=True)
    for b, tokens in enumerate(SOURCES):
        alone, alone_extra = model(torch.tensor([tokens]), return_all_hiddens=True)
        real = batch[b].ne(1)
        torch.testing.assert_close(out[b][real], alone[0], atol=2e-5, rtol=0)
        states = zip(extra["inner_states"], alone_extra["inner_states"])
        for state, state_alone in states:
            torch.testing.assert_close(state[:, b][real], state_alone[:, 0], atol=2e-5, rtol=0)


@contextlib.contextmanager
def values_read(monkeypatch):
    """Lists what the host asks of a meta tensor's values, and answers no; anything else that is read fails."""
    asked, of_tensor = [], torch.Tensor.any

    def answer_no(self, *args, **kwargs):
        if self.device.type != "meta" or args or kwargs:
            return of_tensor(self, *args, **kwargs)
        asked.append(sys._getframe(1).f_globals["__name__"])
        return torch.tensor(False)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "any", answer_no)
        yield asked


@pytest.mark.parametrize("spec", ["stock", *SPECS])
def test_no_value_is_read(spec, monkeypatch):
    """A training step runs without values, which on a GPU would each be a wait: only fairseq asks, for padding."""
    arch = "transformer_multi30k" if spec == "stock" else "transformer_synth_random_multi30k"
    functions = {} if spec == "stock" else dict(encoder_synthesizer=spec, decoder_synthesizer=spec)
    with torch.device("meta"):
        model = make_model(arch, **functions).train()
        source, target = torch.empty(2, 3, 7, dtype=torch.long)
        lengths = torch.empty(3)
    with values_read(monkeypatch) as asked:
        model.to("meta")(source, lengths, target)[0].float().sum().backward()
    assert set(asked) == {
        "fairseq.models.transformer.transformer_encoder",
        "fairseq.models.transformer.transformer_decoder",
    }
    assert len(asked) == 2


@pytest.mark.ci
def test_compiled():
    """torch.compile gives the eager output and gradients of two mixtures, in the encoder and in the decoder."""
    layers = "random+vanilla,dense+factorized_dense"
    model = perturb(make_model(dropout=0.0, encoder_synthesizer=layers, decoder_synthesizer=layers)).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    source, target = pad_batch(SOURCES, left=True), pad_batch(TARGETS, left=False)
    real, outputs, gradients = target.ne(1), [], []
    for m in (model, compiled):
        model.zero_grad()
        outputs.append(m(source, None, target)[0][real])
        outputs[-1].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-3, rtol=1e-4)


def test_precomputed_embeddings_are_aligned_too():
    model = make_synth("random")
    source = pad_batch(SOURCES, left=True)
    embeddings = model.encoder.embed_tokens(source)
    torch.testing.assert_close(
        model.encoder(source, token_embeddings=embeddings)["encoder_out"][0], model.encoder(source)["encoder_out"][0]
    )


def test_aligned_columns():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[2, 3, 0, 1], [0, 2, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    assert torch.equal(aligned_columns(mask), expected)
    within = torch.tensor([[0, 1, 0, 1]], dtype=torch.bool)  # of a text that has the word <pad>
    assert torch.equal(aligned_columns(within), torch.tensor([[0, 2, 1, 3]]))
    assert aligned_columns(mask[2:]) is None and aligned_columns(mask[:, :0]) is None


DECODERS = [(kind, spec) for kind in ("translation", "language_model") for spec in SPECS]


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_decoder_is_causal(kind, spec):
    """What comes later in the target changes nothing before it."""
    model = make_synth(spec, kind)
    source, target = pad_batch(SOURCES, left=True), torch.randint(4, 40, (3, 8))
    other = target.clone()
    other[:, 5:] = torch.randint(4, 40, (3, 3))
    assert torch.equal(compute_logits(model, source, target)[0][:, :5], compute_logits(model, source, other)[0][:, :5])


@pytest.mark.parametrize("spec", ["vanilla", "random", "dense+vanilla"])
def test_a_decoder_with_another_mask(spec, monkeypatch):
    """As masks.py says: with a window of three tokens each of two layers hands a change two tokens on."""

    def window(self, x):
        distances = torch.arange(x.size(0))[:, None] - torch.arange(x.size(0))
        return torch.zeros(distances.shape).masked_fill((distances < 0) | (distances > 2), float("-inf"))

    monkeypatch.setattr(SynthesizerDecoder, "buffered_future_mask", window)
    model, target = make_synth(spec), torch.randint(4, 40, (3, 8))
    other = target.clone()
    other[:, 0] = 2
    source = pad_batch(SOURCES, left=True)
    changed = (model(source, None, target)[0] != model(source, None, other)[0]).any(-1)
    assert torch.equal(changed, (torch.arange(8) < 5).expand(3, 8))


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_padding_within_a_sentence(kind, spec):
    """The word <pad> in a text changes nothing for the others, as in stock fairseq."""
    model = make_synth(spec, kind)
    source, target = torch.tensor([[7, 8, 1, 9, 2]]), torch.tensor([[2, 5, 1, 6]])
    found = compute_logits(model, source, target)[0][:, [0, 1, 3]]
    torch.testing.assert_close(found, compute_logits(model, source[:, [0, 1, 3, 4]], target[:, [0, 1, 3]])[0])


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_incremental_equals_full(kind, spec):
    """Token by token with reordering between steps, as a beam search does, against one full pass."""
    model = make_synth(spec, kind)
    # a beam: hypotheses of one sentence, between which alone the host's search reorders
    encoded = model.encoder(torch.tensor([SOURCES[0]] * 3)) if kind == "translation" else None
    full = torch.randint(4, 40, (3, 8))
    state = {}
    for t in range(8):
        if t in (3, 6):
            order = torch.tensor([1, 1, 0])
            model.decoder.reorder_incremental_state_scripting(state, order)
            full = torch.cat([full[order, :t], torch.randint(4, 40, (3, 8 - t))], 1)
        step, _ = model.decoder(full[:, : t + 1], encoder_out=encoded, incremental_state=state)
        whole, _ = model.decoder(full[:, : t + 1], encoder_out=encoded)
        torch.testing.assert_close(step[:, 0], whole[:, -1], atol=2e-5, rtol=0)


class FullDecoding(torch.nn.Module):
    """A model whose decoder ignores the cache, so that the search runs on full passes."""

    def __init__(self, model):
        super().__init__()
        self.decoder = model.decoder
        if hasattr(model, "encoder"):
            self.encoder = model.encoder
        self.decoder.forward = lambda tokens, encoder_out=None, incremental_state=None: type(model.decoder).forward(
            self.decoder, tokens, encoder_out=encoder_out
        )
        self.max_decoder_positions = model.max_decoder_positions
        self.get_normalized_probs = model.get_normalized_probs


@pytest.mark.parametrize("prefix", [None, [[7, 8], [9, 1], [10, 11]]])
@pytest.mark.parametrize("spec", ["vanilla", "random", "dense", "factorized_dense", "random+vanilla"])
@pytest.mark.parametrize("kind", ["translation", "language_model"])
def test_beam_search_with_the_cache(kind, spec, prefix):
    """Hypotheses and scores of fairseq's search with and without the cache, also after prefix tokens."""
    model = make_synth(spec, kind, share_all_embeddings=True)
    sample = {"net_input": {"src_tokens": pad_batch(SOURCES, True), "src_lengths": torch.tensor([7, 3, 5])}}
    prefix = None if prefix is None else torch.tensor(prefix)
    results = []
    for m in (model, FullDecoding(copy.deepcopy(model))):
        search = SequenceGenerator([m], make_dictionary(), beam_size=4, max_len_b=10, min_len=2)
        results.append(search.generate([m], sample, prefix_tokens=prefix))
    for cached, full in zip(*results):
        assert [h["tokens"].tolist() for h in cached] == [h["tokens"].tolist() for h in full]
        for a, b in zip(cached, full):
            torch.testing.assert_close(a["positional_scores"], b["positional_scores"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("part", ["layer", "attention"])
def test_torchscript_of_a_part_is_refused(part):
    """torch.jit.script of a layer or an attention ends with one line, as that of a model does."""
    layer = make_synth("random+vanilla").decoder.layers[0]
    scripted = {"layer": layer, "attention": layer.self_attn}[part]
    with pytest.raises(SynthesizerError, match="TorchScript is not supported"):
        torch.jit.script(scripted)


@pytest.mark.parametrize("kind", KINDS)
def test_vanilla_is_the_stock_model(kind):
    """State dict key by key and, from one seed, bit by bit; and the same output."""
    ours, stock = (make_model(arch) for arch in (KINDS[kind][0].replace("random_vanilla", "vanilla"), KINDS[kind][1]))
    own, theirs = used_weights(ours.state_dict()), used_weights(stock.state_dict())
    assert set(own) == set(theirs)
    # the attention of fairseq 0.12.2 is built last, here; RoBERTa draws the weights of its own attention twice
    if kind == "language_model" or (kind == "translation" and not has_fast_path(HostLayer)):
        assert all(torch.equal(theirs[name], weight) for name, weight in own.items())
    compare_with_stock(ours, stock)


def test_an_encoder_starts_as_a_roberta():
    """Matrices and embeddings from N(0, 0.02), as in BERT; the synthesizers as they start everywhere."""
    model = make_model(
        KINDS["encoder"][0], encoder_embed_dim=64, encoder_ffn_embed_dim=64, encoder_synthesizer="random"
    )
    layer = model.encoder.sentence_encoder.layers[0]
    for weight in (layer.self_attn.v_proj.weight, layer.fc1.weight, model.encoder.sentence_encoder.embed_tokens.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    R = layer.self_attn.synthesizer.components["random"].R
    assert R.std().item() == pytest.approx((2 / (24 + 24)) ** 0.5, rel=0.15)  # Glorot


def compare_with_stock(model, stock):
    """Loads the stock model's weights and compares the outputs in training mode, without dropout."""
    model.load_state_dict(stock.state_dict())
    for m in (stock.train(), model.train()):
        for module in m.modules():
            if hasattr(module, "p"):
                module.p = 0.0
    source, target = pad_batch(SOURCES, left=True), pad_batch(TARGETS, left=False)
    out, tokens = compute_logits(model, source, target)
    real = tokens.ne(1)
    torch.testing.assert_close(out[real], compute_logits(stock, source, target)[0][real], atol=1e-5, rtol=0)
    return out


WARM = [s for s in SPECS if s.endswith("+vanilla") and "fixed" not in s]


@pytest.mark.parametrize("kind, spec", [(kind, spec) for kind in KINDS for spec in WARM])
def test_warm_start(kind, spec):
    """A stock checkpoint in a sum with vanilla gives the stock model's output, and everything learns from there."""
    stock = perturb(make_model(KINDS[kind][1], attention_dropout=0.0))
    model = make_synth(spec, kind, synth_mixture="sum", dropout=0.0, attention_dropout=0.0)
    out = compare_with_stock(model, stock)
    if spec == "random+vanilla":
        assert all(torch.count_nonzero(p) == 0 for n, p in model.named_parameters() if ".R." in n)
    out.square().sum().backward()
    assert any(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if ".synthesizer." in n)


def joined_projections(state):
    """A state dict as older fairseq wrote it: the rows of queries, keys and values in one matrix, and one bias."""
    state = dict(state)
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        state[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_start_from_an_older_checkpoint(kind, spec):
    stock = perturb(make_model(KINDS[kind][1])).state_dict()
    older = joined_projections(stock)
    assert any(name.endswith("self_attn.in_proj_weight") for name in older) and len(older) < len(stock)
    model, expected = (make_synth(spec, kind, synth_mixture="sum") for _ in range(2))
    model.load_state_dict(older)
    expected.load_state_dict(stock)
    theirs = expected.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in used_weights(model.state_dict()).items())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_other_positions_of_a_roberta(side):
    """fairseq's published models call the encoder "decoder"."""
    state = make_model(KINDS["encoder"][1], max_positions=20).state_dict()
    state = {re.sub("^encoder", side, name): weight for name, weight in state.items()}
    with pytest.raises(SynthesizerError, match="--max-positions 24: the checkpoint was trained with 20"):
        make_synth("vanilla", "encoder").load_state_dict(state)


@pytest.mark.parametrize("mixture", ["convex", "sum"])
def test_a_warm_start_that_changes_the_output(mixture, caplog):
    """A mixture with weights begins with smaller logits, and says so."""
    model = make_synth("random+vanilla", "translation", synth_mixture=mixture)
    model.load_state_dict(make_model(KINDS["translation"][1]).state_dict())
    assert ("convex scales the logits of the checkpoint down" in caplog.text) == (mixture == "convex")


@pytest.mark.parametrize("kind", KINDS)
def test_stock_checkpoint_needs_vanilla(kind):
    stock = make_model(KINDS[kind][1]).state_dict()
    flag = "give the --encoder-synthesizer" if kind != "language_model" else "give the --decoder-synthesizer"
    with pytest.raises(SynthesizerError, match=f"; {flag} of the training .only vanilla and mixtures with it can"):
        make_synth("random", kind).load_state_dict(stock)


MODELS_OF = {"a translation model": "translation", "a language model": "language_model", "an encoder": "encoder"}


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("loaded, trained", [(a, b) for a in MODELS_OF for b in MODELS_OF if a != b])
def test_a_checkpoint_of_another_kind(loaded, trained, stock):
    state = make_model(KINDS[MODELS_OF[trained]][stock]).state_dict()
    model = make_model(KINDS[MODELS_OF[loaded]][0])
    with pytest.raises(SynthesizerError, match=f"the checkpoint is of {trained}, this model is {loaded}; give"):
        model.load_state_dict(state)


def test_what_cannot_be_silenced_is_said(caplog):
    """fixed_random has no weights to zero: the output is not that of the stock checkpoint."""
    stock = make_model("transformer_multi30k").state_dict()
    make_synth("random+vanilla", synth_mixture="sum").load_state_dict(stock)
    assert "its logits stay" not in caplog.text
    make_synth("fixed_random+vanilla", synth_mixture="sum").load_state_dict(stock)
    assert "fixed_random is not trained, so its logits stay" in caplog.text


@pytest.mark.parametrize(
    "trained, loaded, message",
    [
        (dict(spec="random"), dict(spec="random", synth_max_length=30), "--synth-max-length"),
        (dict(spec="factorized_random"), dict(spec="factorized_random", synth_rank=3), "--synth-rank"),
        # 8 * 12 and 10 * 10: of both there are 20 rows
        (
            dict(spec="factorized_dense", synth_max_length=96),
            dict(spec="factorized_dense", synth_max_length=100),
            "factors is .8, 12, 0. in the checkpoint and .10, 10, 0. in this model; give the --synth-max-length",
        ),
        (dict(spec="random"), dict(spec="dense"), "weights of random, and no query .*this model has dense"),
        (dict(spec="random+vanilla"), dict(spec="random"), "weights of random, and query and key"),
        (dict(spec="random+vanilla"), dict(spec="random+vanilla", synth_mixture="sum"), "--synth-mixture convex"),
        (dict(spec="random"), dict(spec="vanilla"), "weights of random, and no query"),
    ],
)
def test_another_models_checkpoint(trained, loaded, message):
    state = make_synth(**trained).state_dict()
    with pytest.raises(SynthesizerError, match=message):
        make_synth(**loaded).load_state_dict(state)


@pytest.mark.parametrize("kind, spec", [(kind, spec) for kind in KINDS for spec in SPECS])
def test_own_checkpoint(kind, spec):
    model, other = make_synth(spec, kind), make_synth(spec, kind, seed=9)
    other.load_state_dict(model.state_dict())
    source, target = pad_batch(SOURCES, left=True), pad_batch(TARGETS, left=False)
    assert torch.equal(compute_logits(model, source, target)[0], compute_logits(other, source, target)[0])


# layers, width, heads, feed-forward width, l
SIZES = {
    "wmt_en_de": (6, 512, 8, 2048, 256),
    "wmt_en_fr": (6, 512, 8, 2048, 256),
    "wmt_en_de_big": (6, 1024, 16, 4096, 256),
    "iwslt_de_en": (6, 512, 4, 1024, 256),
    "multi30k": (4, 128, 4, 256, 100),
    "t5_base": (12, 768, 12, 3072, 512),
    "t5_tiny": (2, 128, 4, 512, 128),
    "lm1b": (6, 512, 8, 2048, 256),
    "wiki103": (16, 1024, 8, 4096, 512),
    "ptb": (2, 128, 4, 512, 128),
    "base": (12, 768, 12, 3072, 512),
    "small": (4, 256, 4, 1024, 512),
    "agnews": (2, 128, 4, 512, 128),
    "imdb": (2, 128, 4, 512, 512),
}


def has_max_length(spec):
    return any(synthesizers.SYNTHESIZERS[name].has_max_length for name in spec.split("+"))


def build(arch, dictionary_size=4, **flags):
    """An architecture as the command line builds it, without memory for its weights."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    args = parser.parse_args([], argparse.Namespace(arch=arch, **flags))
    ARCH_CONFIG_REGISTRY[arch](args)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        # it asks for values
        patch.setattr(fairseq.models.roberta.model, "init_bert_params", lambda module: None)
        return ARCH_MODEL_REGISTRY[arch].build_model(args, make_task(dictionary_size))


def stacks(model):
    """The encoder or decoder, or both, of a model of any kind."""
    found = [getattr(model, side) for side in ("encoder", "decoder") if hasattr(model, side)]
    return [getattr(stack, "sentence_encoder", stack) for stack in found]


@pytest.mark.parametrize(
    "model, spec, preset",
    [(model, spec, preset) for model, (_, presets) in MODELS.items() for spec in VARIANTS for preset in presets],
)
def test_every_architecture(model, spec, preset):
    """Every name builds, with its functions in every layer and the stock architecture's sizes."""
    layers, width, heads, ffn, length = SIZES[preset]
    words = 60010 if preset == "wiki103" else 4  # adaptive softmax has clusters of 20,000 and 40,000
    built = build(architecture_name(model, spec, preset), words)
    for side in stacks(built):
        assert len(side.layers) == layers and side.layers[0].fc1.weight.shape == (ffn, width)
        for layer in side.layers:
            assert set(layer.self_attn.synthesizer.components) == set(spec.split("+"))
            assert layer.self_attn.num_heads == heads
        host = length if model == "roberta_synth" else 1024
        assert side.max_positions() == (length if has_max_length(spec) else host)


@pytest.mark.parametrize("model, preset", [(model, preset) for model, presets in STOCK.items() for preset in presets])
def test_every_baseline(model, preset):
    """Every name to compare with builds, at the size of the preset."""
    layers, width, heads, ffn, length = SIZES[preset]
    built = build(f"{model}_{preset}", tokens_per_sample=64)
    for side in stacks(built):
        assert len(side.layers) == layers
        attention = getattr(side.layers[0], "self_attn", None)  # none in lightconv_lm
        assert attention is None or (side.layers[0].fc1.weight.shape, attention.num_heads) == ((ffn, width), heads)
    assert "linformer" not in model or built.max_positions() == length
    if model == "lightconv_lm":
        assert type(side.layers[0].conv).__name__.startswith("Lightweight")
        assert (
            side.embed_out is side.embed_tokens.weight if hasattr(side, "embed_out") else side.share_input_output_embed
        )


# millions of weights over fairseq's transformer_wmt_en_de; the paper's column is rounded to the million
COUNTS = {
    "vanilla": (0.0, 0),
    "random": (-0.01, 0),
    "fixed_random": (-6.30, -6),
    "factorized_random": (-5.91, -6),
    "dense": (-4.31, -5),
    "factorized_dense": (-5.70, -6),
    "random+dense": (1.98, 0),
    "dense+vanilla": (2.00, 7),
    "random+vanilla": (6.29, 6),
}
IRRECONCILABLE = ("random+dense", "dense+vanilla")


@pytest.mark.parametrize("spec", ["random", "dense+vanilla", "random,vanilla", "random:1/vanilla:1,random"])
@pytest.mark.parametrize("layerdrop", [0, 0.99])
def test_a_decoder_has_one_block_table(spec, layerdrop):
    """All layers read and write by the first one's, whatever their functions are; it is extended once a step."""
    model = make_synth("random", decoder_synthesizer=spec, decoder_layerdrop=layerdrop).eval()
    source, target = torch.randint(4, 30, (2, 3, 5)).unbind()
    encoded, state = model.encoder(source), {}
    with torch.no_grad(), mock.patch.object(cache, "extend_table", wraps=cache.extend_table) as extend:
        for t in range(5):
            model.decoder(target[:, : t + 1], encoder_out=encoded, incremental_state=state)
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor([2, 0, 1]))
    assert [key for key in state if key.endswith(".table")] == [model.decoder.layers[0].self_attn.own_table]
    assert extend.call_count == 5


@pytest.mark.parametrize("spec", COUNTS)
def test_parameter_counts_of_table_2(spec):
    """Within a million of the paper's |theta|, or in the ledger of deviations with these numbers."""

    def size(arch):
        model = build(arch, share_all_embeddings=True)
        return sum(p.numel() for p in used_weights(dict(model.named_parameters())).values())

    measured, paper = COUNTS[spec]
    difference = (size(f"transformer_synth_{spec.replace('+', '_')}_wmt_en_de") - size("transformer_wmt_en_de")) / 1e6
    assert difference == pytest.approx(measured, abs=0.01)
    assert (abs(difference - paper) < 1.0) != (spec in IRRECONCILABLE)


def test_layer_by_layer():
    model = make_model(
        encoder_synthesizer="random,dense+vanilla",
        decoder_synthesizer="vanilla, factorized_random",
        synth_mixture="sum",
    )
    functions = [list(layer.self_attn.synthesizer.components) for layer in model.encoder.layers]
    assert functions == [["random"], ["dense", "vanilla"]]
    functions = [list(layer.self_attn.synthesizer.components) for layer in model.decoder.layers]
    assert functions == [["vanilla"], ["factorized_random"]]


def test_pruned_layers_keep_their_functions():
    """--encoder-layers-to-keep names layers of the trained model; a pruned one loads its checkpoint."""
    flags = dict(encoder_layers=3, encoder_synthesizer="random,dense,vanilla", decoder_synthesizer="random")
    whole = perturb(make_model(**flags))
    pruned = make_model(**flags, encoder_layers_to_keep="0,2", decoder_layers_to_keep="0,1")
    functions = [list(layer.self_attn.synthesizer.components) for layer in pruned.encoder.layers]
    assert functions == [["random"], ["vanilla"]]
    pruned.load_state_dict(
        whole.state_dict(),
        model_cfg=argparse.Namespace(arch="x", encoder_layers_to_keep="0,2", decoder_layers_to_keep="0,1"),
    )
    for a, b in ((0, 0), (2, 1)):
        assert torch.equal(whole.encoder.layers[a].fc1.weight, pruned.encoder.layers[b].fc1.weight)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if has_max_length(spec)])
def test_longer_than_l(side, spec):
    """Refused at the door with the flag's name, full and incremental; l itself works, and the rest has no limit."""
    other = "decoder" if side == "encoder" else "encoder"
    model = make_model(**{f"{side}_synthesizer": spec, f"{other}_synthesizer": "vanilla", "synth_max_length": 6})
    lengths = {"encoder": 12, "decoder": 12}
    for length in (6, 7):
        lengths[side] = length
        source, target = torch.full((1, lengths["encoder"]), 5), torch.full((1, lengths["decoder"]), 5)
        if length == 6:
            model(source, None, target)
            continue
        with pytest.raises(ValueError, match="7 tokens is longer than --synth-max-length 6"):
            model(source, None, target)
        if side == "decoder":
            with pytest.raises(ValueError, match="--synth-max-length 6"):
                model.decoder(target, encoder_out=model.encoder(source), incremental_state={})
    assert model.max_positions() == ((6, 1024) if side == "encoder" else (1024, 6))


@pytest.mark.parametrize("kind", ["language_model", "encoder"])
@pytest.mark.parametrize("spec", ["random", "random+vanilla", "dense"])
def test_longer_than_l_in_one_stack(kind, spec):
    model = make_synth(spec, kind, synth_max_length=6)
    model(torch.full((1, 6), 5))
    with pytest.raises(ValueError, match="7 tokens is longer than --synth-max-length 6"):
        model(torch.full((1, 7), 5))
    assert model.max_positions() == 6


def test_linformer_says_what_is_too_long():
    with pytest.raises(ValueError, match="25 tokens is longer than --max-positions 24"):
        make_model("roberta_linformer_agnews")(torch.full((1, 25), 5))


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(cross_self_attention=True), "--cross-self-attention"),
        (dict(base_layers=1), "--base-layers 1: such layers have no attention"),
        (dict(decoder_xformers_att_config="{}"), "--decoder-xformers-att-config: is for fairseq's attention"),
        (dict(encoder_xformers_att_config="{}"), "--encoder-xformers-att-config: is for fairseq's attention"),
        (dict(encoder_attention_heads=0), "--encoder-attention-heads 0 does not divide"),
        (dict(encoder_layers_to_keep="0,5", decoder_layers_to_keep="0"), "--encoder-layers-to-keep '0,5': .*0 to 1"),
        (dict(encoder_layers_to_keep="0,-1", decoder_layers_to_keep="0"), "'0,-1': .*0 to 1"),
        (dict(encoder_layers_to_keep="0", decoder_layers_to_keep="1,1"), "'1,1': .*0 to 1, .* each once"),
        (
            dict(tie_adaptive_weights=True, adaptive_softmax_cutoff="9"),
            "--tie-adaptive-weights .* only language models",
        ),
        (dict(encoder_attention_heads=3), "--encoder-attention-heads 3 does not divide --encoder-embed-dim 16"),
        (dict(decoder_attention_heads=5), "--decoder-attention-heads 5 does not divide --decoder-embed-dim 16"),
        (dict(encoder_synthesizer="randm"), "--encoder-synthesizer 'randm': unknown function 'randm'; choose from"),
        (dict(decoder_synthesizer="random,dense,random"), "names 3 layers, --decoder-layers is 2"),
        (dict(encoder_synthesizer="factorized_dense", synth_max_length=23), "--synth-max-length 23: .*product"),
        (dict(synth_max_length=0), "--synth-max-length 0: must be at least 2"),
        (dict(synth_rank=-1), "--synth-rank -1: must be at least 1"),
        (dict(synth_mixture="product"), "--synth-mixture 'product': choose from convex, sum"),
        (dict(synth_beyond_length="tiled"), "--synth-beyond-length 'tiled': choose from refuse, tile"),
    ],
)
def test_refused_flags(flags, message):
    with pytest.raises(SynthesizerError, match=message) as caught:
        make_model(**flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind, flags, message",
    [
        (
            "language_model",
            dict(tokens_per_sample=25),
            "--tokens-per-sample 25 is above --synth-max-length 24: lower it to 24",
        ),
        ("language_model", dict(decoder_attention_heads=3), "--decoder-attention-heads 3 does not divide"),
        ("language_model", dict(base_layers=1), "--base-layers 1: such layers have no attention"),
        ("language_model", dict(decoder_synthesizer="randm"), "--decoder-synthesizer 'randm': unknown"),
        (
            "language_model",
            dict(share_decoder_input_output_embed=True, adaptive_input=True),
            "--share-decoder-input-output-embed: --adaptive-input has no one matrix",
        ),
        ("language_model", dict(tie_adaptive_weights=True), "--tie-adaptive-weights .*--adaptive-input"),
        (
            "language_model",
            dict(
                tie_adaptive_weights=True, adaptive_input=True, adaptive_input_cutoff="10", adaptive_softmax_cutoff="9"
            ),
            "--adaptive-input-cutoff 10 and --adaptive-softmax-cutoff 9 have to be equal",
        ),
        ("encoder", dict(max_positions=25), "--max-positions 25 is above --synth-max-length 24"),
        ("encoder", dict(encoder_attention_heads=3), "--encoder-attention-heads 3 does not divide"),
        ("encoder", dict(encoder_synthesizer="random,random,random"), "names 3 layers, --encoder-layers is 2"),
    ],
)
def test_refused_flags_in_one_stack(kind, flags, message):
    with pytest.raises(SynthesizerError, match=message) as caught:
        make_model(KINDS[kind][0], **flags)
    assert "\n" not in str(caught.value)


def test_an_encoder_with_the_length_of_its_task(monkeypatch):
    """Without --max-positions the task says it, and then it may not be above --synth-max-length either."""
    task = make_task()
    task.cfg.tokens_per_sample = None
    monkeypatch.setattr(helpers, "make_task", lambda *_: task)
    assert make_model(KINDS["encoder"][0], max_positions=None).args.max_positions == 24
    task.max_positions = lambda: 25
    with pytest.raises(SynthesizerError, match="--max-positions 25 is above --synth-max-length 24"):
        make_model(KINDS["encoder"][0], max_positions=None)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(linformer_k=0), "--linformer-k 0"),
        (dict(encoder_attention_heads=3), "--encoder-attention-heads 3"),
        (dict(encoder_layers_to_keep="0,2"), "--encoder-layers-to-keep '0,2': .*0 to 1"),
    ],
)
def test_refused_flags_of_linformer(flags, message):
    with pytest.raises(SynthesizerError, match=message):
        make_model("roberta_linformer_agnews", **flags)


@pytest.mark.parametrize(
    "kind, flags",
    [
        ("language_model", dict(adaptive_input=True, adaptive_input_cutoff="20,30")),
        ("language_model", dict(adaptive_softmax_cutoff="20,30")),
        ("language_model", dict(character_embeddings=True, character_filters="[(1, 4), (2, 4)]")),
        ("language_model", dict(share_decoder_input_output_embed=False, decoder_output_dim=12)),
        ("language_model", dict(decoder_learned_pos=True, decoder_layerdrop=0.2)),
        ("language_model", dict(checkpoint_activations=True)),
        ("language_model", dict(quant_noise_pq=0.1, quant_noise_pq_block_size=4)),
        ("encoder", dict(encoder_normalize_before=True, layernorm_embedding=False)),
        ("encoder", dict(checkpoint_activations=True)),
        ("encoder", dict(untie_weights_roberta=True, encoder_layerdrop=0.2)),
        ("encoder", dict(quant_noise_pq=0.1, quant_noise_pq_block_size=4, attention_dropout=0.2)),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_the_hosts_flags_in_one_stack(kind, flags):
    """Each trains: a backward pass that moves the attention."""
    model = make_model(KINDS[kind][0], **flags).train()
    torch.manual_seed(2)
    features, _ = model(pad_batch(SOURCES, False), features_only=True)
    features.square().sum().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "self_attn" in n]
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", ["checkpoint_activations", "offload_activations"])
def test_activations_are_computed_again(kind, flag):
    """A layer runs once forward and once more backward; --offload-activations sets --checkpoint-activations."""
    model = make_model(KINDS[kind][0], **{flag: True}).train()
    runs = []
    for layer in model.modules():
        if isinstance(layer, SyntheticAttention):
            layer.register_forward_pre_hook(lambda *_: runs.append(1))
    compute_logits(model, pad_batch(SOURCES, False), pad_batch(TARGETS, False))[0].sum().backward()
    layers = sum(isinstance(layer, SyntheticAttention) for layer in model.modules())
    assert len(runs) == 2 * layers


@pytest.mark.parametrize(
    "flags",
    [
        dict(encoder_normalize_before=True, decoder_normalize_before=True),
        dict(checkpoint_activations=True),
        dict(attention_dropout=0.2, activation_dropout=0.1),
        dict(encoder_layerdrop=0.3, decoder_layerdrop=0.3),
        dict(quant_noise_pq=0.1, quant_noise_pq_block_size=4),
        dict(share_all_embeddings=True),
        dict(encoder_learned_pos=True, decoder_learned_pos=True),
        dict(no_token_positional_embeddings=True),
        dict(layernorm_embedding=True, no_cross_attention=False),
        dict(decoder_embed_dim=24, decoder_output_dim=16, decoder_input_dim=16),
        dict(adaptive_softmax_cutoff=[20, 30]),
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_the_hosts_flags(flags):
    """Each trains: a backward pass that moves the attention."""
    model = make_model(encoder_synthesizer="random+vanilla", decoder_synthesizer="dense", **flags).train()
    torch.manual_seed(2)
    features, _ = model(pad_batch(SOURCES, True), None, pad_batch(TARGETS, False))
    features.square().sum().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "self_attn" in n]
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)


def test_attention_dropout_reaches_the_attention():
    model = make_model(attention_dropout=0.25, quant_noise_pq=0.1, quant_noise_pq_block_size=4)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        assert layer.self_attn.dropout_module.p == 0.25
        assert layer.self_attn.v_proj._forward_pre_hooks  # quantization noise


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_has_the_hosts_names(kind):
    """--retain-dropout-modules names fairseq's classes; every dropout is found by the name that it has there."""

    def names(model):
        return {name: m.module_name for name, m in model.named_modules() if isinstance(m, FairseqDropout)}

    synth, stock = KINDS[kind]
    expected = names(make_model(stock))
    assert "MultiheadAttention" in expected.values() and names(make_model(synth)) == expected
    if kind == "encoder":
        assert names(make_model("roberta_linformer_agnews")) == expected


@pytest.mark.parametrize(
    "limits, flag",
    [
        ((24, 24), "--synth-max-length 24"),
        ((20, 24), "--max-target-positions 20"),
        ((24, None), "--max-target-positions 24"),
    ],
)
def test_the_flag_that_limits_min_len(limits, flag):
    """The lower one of the model's two limits."""
    with pytest.raises(SynthesizerError, match=f"--min-len 24: .*{flag}"):
        positions, most = limits
        decoder = argparse.Namespace(max_positions=lambda: positions, max_length=most)
        lengths.check_min_len(argparse.Namespace(min_len=24), decoder)


def test_fusion_with_a_language_model():
    """--lm-path with a Synthesizer that cannot read as much as the search may write is refused before the search."""
    generation = argparse.Namespace(lm_path="lm.pt", max_len_a=0, max_len_b=23, min_len=1, match_source_len=False)
    cfg = argparse.Namespace(generation=generation, task=None, common=argparse.Namespace(fp16=False))
    make_model(KINDS["language_model"][0]).prepare_for_inference_(cfg)
    for flags in (dict(max_len_b=24), dict(max_len_a=0.1), dict(match_source_len=True)):
        cfg.generation = argparse.Namespace(**{**vars(generation), **flags})
        with pytest.raises(SynthesizerError, match="--lm-path: .* up to 24 tokens .*--max-len-a 0 .*--max-len-b 23, w"):
            make_model(KINDS["language_model"][0]).prepare_for_inference_(cfg)
    cfg.generation = generation
    generation.lm_path = None
    make_model(KINDS["language_model"][0]).prepare_for_inference_(cfg)


def test_sources_whose_length_is_matched():
    """--match-source-len: the decoder reads the end of sentence and as many tokens as the longest source has."""
    common = argparse.Namespace(fp16=False)
    for decoder, most in (("random", 23), ("vanilla", 24)):
        model = make_model(encoder_synthesizer="random", decoder_synthesizer=decoder)
        generation = argparse.Namespace(match_source_len=True, min_len=1)
        model.prepare_for_inference_(argparse.Namespace(generation=generation, common=common))
        assert model.max_positions()[0] == most
    model = make_model()
    search = SequenceGenerator([model], make_dictionary(), beam_size=2, match_source_len=True)
    source = torch.randint(4, 8, (2, 23))
    search.generate([model], {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([23, 23])}})


@pytest.mark.parametrize("holder", ["cfg", "args"])
def test_flags_of_the_task(holder):
    """Those of fairseq's older kind of task are in its ``args``."""
    flags = argparse.Namespace(required_seq_len_multiple=7, truncate_source=True, max_source_positions=1024)
    task = argparse.Namespace(**{"cfg": None, holder: flags})
    with pytest.raises(SynthesizerError, match="--required-seq-len-multiple 7"):
        lengths.announce_limit(task, lengths.Limit(24, "--synth-max-length"))
    lengths.cut_sources(task, 24)
    assert flags.max_source_positions == 24


# what an encoder has no use for: pruning of heads, and fairseq's layernorm_embedding is always on
NOT_OFFERED = {"mha_reg_scale_factor", "ffn_reg_scale_factor", "mha_heads_to_keep", "ffn_blocks_to_remove"}
NOT_OFFERED |= {"layernorm_embedding"}


@pytest.mark.parametrize("kind, stock", [(k, s) for k, s in zip(KINDS, ("transformer", "transformer_lm", "roberta"))])
def test_every_flag_of_the_host(kind, stock):
    """Each has the flags of fairseq's own model, and those of its own stacks alone."""

    def flags_of(arch):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        ARCH_MODEL_REGISTRY[arch].add_args(parser)
        return {action.dest for action in parser._actions if action.dest != "help"}

    ours = flags_of(KINDS[kind][0])
    assert flags_of(stock) - ours <= (NOT_OFFERED if kind == "encoder" else set())
    for side in ("encoder", "decoder"):
        assert any(flag.startswith(side) for flag in ours) == (side in SIDES[kind])
        assert (f"{side}_synthesizer" in ours) == (side in SIDES[kind])


def test_flags_reach_the_hosts_config():
    flags = dict(encoder_ffn_embed_dim=77, decoder_layers=3, quant_noise_scalar=0.5, max_target_positions=99)
    cfg = make_model(**flags).cfg
    assert isinstance(cfg, TransformerConfig)
    assert (cfg.encoder.ffn_embed_dim, cfg.decoder.layers, cfg.quant_noise.scalar) == (77, 3, 0.5)
    assert cfg.max_target_positions == 99 and cfg.decoder.output_dim == cfg.decoder.embed_dim


def documented_function(name):
    """Registers the example of docs/add-a-function.md with this name."""
    page = (ROOT / "docs" / "add-a-function.md").read_text()
    code = re.search(rf'```python\n(@register_synthesizer\("{name}"\).*?)```', page, re.S)[1]
    exec(code, dict(vars(synthesizers)))


def documented_equation(name):
    """Returns the equation of an example of docs/add-a-function.md as a function like `reference.score`."""
    page = (ROOT / "docs" / "add-a-function.md").read_text()
    code = textwrap.dedent(re.search(r"```python\n( +if name == .*?)```", page, re.S)[1])
    namespace = dict(vars(reference))
    exec(f"def equation(name, p, h, i, j, x):\n{textwrap.indent(code, '    ')}", namespace)
    return functools.partial(namespace["equation"], name)


@pytest.mark.parametrize("name", ["locality", "pointer"])
def test_the_documented_function(restore_registry, name):
    """The examples of docs/add-a-function.md are whole classes: they mix, equal their equations, and can be scaled."""
    documented_function(name)
    mixture = synthesizers.Mixture((name, "dense"), "convex", num_heads=2, head_dim=3, max_length=12, rank=2)
    mixture.reset_parameters()
    function = mixture.components[name]
    for parameter in function.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 1, 6)
    inputs = Inputs(x, None, None, start=3, src_len=9)
    scores = Logits(function(inputs)).total(9).expand(1, 2, 4, 9)
    equation = documented_equation(name)
    for head in range(2):
        words = {3 + i: x[i, 0, 3 * head : 3 * head + 3] for i in range(4)}
        for i in range(4):
            for j in range(9):
                expected = equation(function.state_dict() | dict(function.named_buffers()), head, 3 + i, j, words)
                assert scores[0, head, i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    (logits,) = mixture(inputs)
    assert len(logits.terms()) == len(function(inputs)) + 2
    function.zero_logits_()
    assert torch.count_nonzero(Logits(function(inputs)).total(9)) == 0


def test_the_attention_without_fairseqs_models():
    """The page's example of an attention alone runs, and gives what its comments say."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "setup.md").read_text(), re.S)
    (code,) = [example for example in examples if "SyntheticAttention" in example]
    namespace = {}
    exec(code, namespace)
    assert namespace["y"].shape == (20, 4, 512) and namespace["weights"].shape == (4, 20, 20)
    assert torch.count_nonzero(namespace["weights"].triu(1)) == 0  # the causal mask


@pytest.mark.parametrize("spec", ["to_come", "to_come+random", "distance+random", "distance+vanilla"])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
def test_checkpoints_of_functions_to_come(restore_registry, spec, mixture):
    """One without weights, and one that reads q and k and has weights of its own, load what they saved."""
    synthesizers.register_synthesizer("distance")(Distance)

    @synthesizers.register_synthesizer("to_come")
    class Cosine(synthesizers.Synthesizer):
        reads_query_key = True
        has_max_length = False

        def __init__(self, num_heads, head_dim, max_length, rank):
            super().__init__(num_heads, head_dim, max_length, rank)
            self.scale = torch.nn.Parameter(torch.empty(num_heads, 1, 1))

        def reset_parameters(self):
            torch.nn.init.ones_(self.scale)

        def scale_(self, weight):
            self.scale.mul_(weight)

        def forward(self, inputs):
            query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (inputs.q, inputs.k))
            return [Product(query * self.scale, key)]

    model, other = make_synth(spec, synth_mixture=mixture), make_synth(spec, synth_mixture=mixture, seed=9)
    other.load_state_dict(model.state_dict())
    source, target = pad_batch(SOURCES, left=True), pad_batch(TARGETS, left=False)
    assert torch.equal(model(source, None, target)[0], other(source, None, target)[0])


# ---- models of the paper's denoising


def parameters(arch):
    args = argparse.Namespace(arch=arch, dropout=0.1, weight_softmax=True)
    for _ in range(3):  # fairseq does, as it parses, builds and loads
        ARCH_CONFIG_REGISTRY[arch](args)
    args.max_source_positions = args.max_target_positions = 1024
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, make_task(40, 24))
    return sum(p.numel() for p in used_weights(dict(model.named_parameters())).values())


def test_the_wide_transformer():
    """It has the parameters of R+V, which are more than its own without the width."""
    wanted = parameters("transformer_synth_random_vanilla_t5_tiny")
    assert abs(parameters("transformer_plus_t5_tiny") / wanted - 1) < 0.001
    assert parameters("transformer_t5_tiny") < 0.8 * wanted


def test_the_papers_sizes():
    """12+12 layers, 768, 3072, 12 heads, l = 512, R of each head and layer: l^2."""
    for arch in ("transformer_synth_random_t5_base", "dynamicconv_t5_base", "lightconv_t5_base", "transformer_t5_base"):
        args = argparse.Namespace(arch=arch)
        ARCH_CONFIG_REGISTRY[arch](args)
        sizes = args.encoder_layers, args.decoder_layers, args.encoder_embed_dim, args.encoder_ffn_embed_dim
        assert sizes == (12, 12, 768, 3072) and args.encoder_attention_heads == 12 and args.synth_max_length == 512
        assert args.share_all_embeddings and args.decoder_normalize_before
    assert args.arch == arch and not hasattr(args, "encoder_conv_type")

"""The whole model: padding, causality, search, the flags and checkpoints of fairseq, sizes, refusals."""

import argparse
import contextlib
import copy
import functools
import itertools
import re
import sys
import textwrap
from typing import NamedTuple
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

PAD = 1  # the index of the word <pad>
SOURCES = [[5, 6, 7, 8, 9, 10, 2], [11, 12, 2], [13, 14, 15, 16, 2]]
TARGETS = [[2, 5, 6], [2, 7, 8, 9, 10, 11], [2, 12, 13, 14]]
# For each kind of model: the architecture of a Synthesizer, and fairseq's own architecture of the same size.
ARCHS = {kind: arch for kind, (arch, _) in KINDS.items()}
FAIRSEQS_ARCHS = {kind: fairseqs_arch for kind, (_, fairseqs_arch) in KINDS.items()}


def assert_close(actual, expected):
    """Checks that two outputs of a model differ by rounding alone."""
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("left_source", [True, False])
@pytest.mark.parametrize("left_target", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_a_sentence_alone_has_the_output_that_it_has_in_a_batch(spec, left_source, left_target):
    """The batch may be padded on either side. The decoder's output, weights and hidden states are compared."""
    model = make_synth(spec)
    source = pad_batch(SOURCES, left_source)
    target = pad_batch(TARGETS, left_target)
    # For B sentences, T tokens of the target and S tokens of the source:
    out, extra = model(source, None, target)  # out is (B, T, words)
    weights = extra["attn"][0]  # (B, T, S)
    states = extra["inner_states"][-1]  # (T, B, C)
    for sentence in range(len(SOURCES)):
        source_alone = torch.tensor([SOURCES[sentence]])
        target_alone = torch.tensor([TARGETS[sentence]])
        out_alone, extra_alone = model(source_alone, None, target_alone)
        weights_alone = extra_alone["attn"][0]
        states_alone = extra_alone["inner_states"][-1]

        # The parts of the batch that are those of the sentence, without padding.
        is_source_token = source[sentence].ne(PAD)
        is_target_token = target[sentence].ne(PAD)
        out_in_batch = out[sentence, is_target_token]
        states_in_batch = states[is_target_token, sentence]
        weights_of_tokens = weights[sentence, is_target_token]  # (tokens of the target, S)
        weights_in_batch = weights_of_tokens[:, is_source_token]

        assert_close(out_in_batch, out_alone[0])
        assert_close(states_in_batch, states_alone[:, 0])
        torch.testing.assert_close(weights_in_batch, weights_alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_the_encoder_returns_its_tensors_in_the_columns_of_its_input(spec, left):
    """They are what the encoder returns for each sentence alone, and the padding mask is that of the input.

    The output, the states behind each layer and the embeddings are compared. `left` is the side of the padding.
    """
    encoder = make_synth(spec).encoder
    source = pad_batch(SOURCES, left)
    batch = encoder(source, return_all_hiddens=True)
    out = batch["encoder_out"][0]  # (T, B, C)
    states = batch["encoder_states"][1]  # (T, B, C)
    embedding = batch["encoder_embedding"][0]  # (B, T, C)
    assert torch.equal(batch["encoder_padding_mask"][0], source.eq(PAD))
    for sentence in range(len(SOURCES)):
        alone = encoder(torch.tensor([SOURCES[sentence]]), return_all_hiddens=True)
        out_alone = alone["encoder_out"][0]
        states_alone = alone["encoder_states"][1]
        embedding_alone = alone["encoder_embedding"][0]
        is_token = source[sentence].ne(PAD)
        assert_close(out[is_token, sentence], out_alone[:, 0])
        assert_close(states[is_token, sentence], states_alone[:, 0])
        assert_close(embedding[sentence, is_token], embedding_alone[0])


def test_the_encoder_returns_feed_forward_outputs_in_the_columns_of_its_input():
    """The layers return them if their attribute return_fc is set. The input is padded on the left."""
    encoder = make_synth("random").encoder
    for layer in encoder.layers:
        layer.return_fc = True
    source = pad_batch(SOURCES, left=True)
    outputs = encoder(source, return_all_hiddens=True)["fc_results"]
    for sentence in range(len(SOURCES)):
        real = source[sentence].ne(PAD)
        outputs_alone = encoder(torch.tensor([SOURCES[sentence]]), return_all_hiddens=True)["fc_results"]
        for output, output_alone in zip(outputs, outputs_alone):
            assert_close(output[real, sentence], output_alone[:, 0])


def check_sentences_alone(model, left):
    """Checks that each sentence has the same output and states of all layers alone and in a padded batch."""
    batch = pad_batch(SOURCES, left)
    out, extra = model(batch, return_all_hiddens=True)
    for sentence in range(len(SOURCES)):
        real = batch[sentence].ne(PAD)
        out_alone, extra_alone = model(torch.tensor([SOURCES[sentence]]), return_all_hiddens=True)
        assert_close(out[sentence][real], out_alone[0])
        for states, states_alone in zip(extra["inner_states"], extra_alone["inner_states"]):
            assert_close(states[:, sentence][real], states_alone[:, 0])


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["language_model", "encoder"])
def test_a_sentence_alone_has_the_output_that_it_has_in_a_batch_of_one_stack(kind, spec, left):
    check_sentences_alone(make_synth(spec, kind), left)


@pytest.mark.parametrize("left", [True, False])
def test_a_sentence_alone_has_the_output_that_it_has_in_a_batch_of_linformer(left):
    check_sentences_alone(perturb(make_model("roberta_linformer_agnews")), left)


@contextlib.contextmanager
def record_reads(monkeypatch):
    """Yields a list of the modules that call ``mask.any()`` for a tensor on the device "meta", in order of the calls.

    Such a tensor has no values, so torch would raise an error when the result is read, as it does for other reads. Here
    the answer is always no.
    """
    asking_modules = []
    original_any = torch.Tensor.any

    def answer_no(self, *args, **kwargs):
        """Replaces `torch.Tensor.any`."""
        if self.device.type != "meta" or args or kwargs:
            return original_any(self, *args, **kwargs)
        caller = sys._getframe(1)
        asking_modules.append(caller.f_globals["__name__"])
        return torch.tensor(False)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "any", answer_no)
        yield asking_modules


@pytest.mark.parametrize("spec", ["fairseq's own", *SPECS])
def test_a_training_step_reads_no_more_values_than_fairseq(spec, monkeypatch):
    """On a GPU each read, such as ``if mask.any():``, would be a wait for the values of a tensor.

    fairseq reads two: whether there is padding in the source and in the target. The tensors of this test are on the
    device "meta". They have no values, so any other read than ``mask.any()`` raises an error.

    `spec` names the functions of a Synthesizer. "fairseq's own" stands for fairseq's Transformer, to which it is
    compared.
    """
    if spec == "fairseq's own":
        arch = "transformer_multi30k"
        functions = {}
    else:
        arch = "transformer_synth_random_multi30k"
        functions = {"encoder_synthesizer": spec, "decoder_synthesizer": spec}
    with torch.device("meta"):
        model = make_model(arch, **functions).train()
        source = torch.empty(3, 7, dtype=torch.long)
        target = torch.empty(3, 7, dtype=torch.long)
        source_lengths = torch.empty(3)
    model.to("meta")  # A few buffers of fairseq are made on the CPU in spite of the context.
    with record_reads(monkeypatch) as asking_modules:
        out, _ = model(source, source_lengths, target)
        out.float().sum().backward()
    assert sorted(asking_modules) == [
        "fairseq.models.transformer.transformer_decoder",
        "fairseq.models.transformer.transformer_encoder",
    ]


@pytest.mark.ci
def test_a_compiled_model_has_the_same_output_and_gradients():
    """torch.compile compiles a layer in the encoder and another one in the decoder. More layers would take long."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1}
    functions = {"encoder_synthesizer": "random+vanilla", "decoder_synthesizer": "dense+factorized_dense"}
    model = perturb(make_model(dropout=0.0, **sizes, **functions)).train()
    source = pad_batch(SOURCES, left=True)
    target = pad_batch(TARGETS, left=False)

    def compute_output_and_gradients(callable_model):
        """Returns the output for the real words of the target, and the gradients of all parameters that have one."""
        model.zero_grad()
        out, _ = callable_model(source, None, target)
        out_for_words = out[target.ne(PAD)]
        out_for_words.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return out_for_words, gradients

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    expected_out, expected_gradients = compute_output_and_gradients(model)
    out, gradients = compute_output_and_gradients(compiled)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-3, rtol=1e-4)


def test_precomputed_embeddings_are_aligned_like_tokens():
    encoder = make_synth("random").encoder
    source = pad_batch(SOURCES, left=True)
    embeddings = encoder.embed_tokens(source)
    out = encoder(source, token_embeddings=embeddings)["encoder_out"][0]
    torch.testing.assert_close(out, encoder(source)["encoder_out"][0])


def test_alignment_moves_padding_behind_the_sentences():
    """A row of the result lists the columns of a sentence in their new order: words first, then padding."""
    padding = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[2, 3, 0, 1], [0, 2, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    assert torch.equal(aligned_columns(padding), expected)


def test_alignment_moves_the_word_pad_of_a_text_behind_it():
    padding = torch.tensor([[0, 1, 0, 1]], dtype=torch.bool)
    assert torch.equal(aligned_columns(padding), torch.tensor([[0, 2, 1, 3]]))


@pytest.mark.parametrize("padding", [[[0, 0, 0, 0], [1, 1, 1, 1]], [[], []]])
def test_a_batch_that_is_aligned_already_stays_as_it_is(padding):
    assert aligned_columns(torch.tensor(padding, dtype=torch.bool)) is None


# The kind and the functions of every model that has a decoder.
DECODERS = list(itertools.product(("translation", "language_model"), SPECS))


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_later_tokens_of_the_target_change_nothing_before_them(kind, spec):
    model = make_synth(spec, kind)
    source = pad_batch(SOURCES, left=True)
    target = torch.randint(4, 40, (3, 8))
    other_target = target.clone()
    other_target[:, 5:] = torch.randint(4, 40, (3, 3))
    out, _ = compute_logits(model, source, target)
    other_out, _ = compute_logits(model, source, other_target)
    assert torch.equal(out[:, :5], other_out[:, :5])


@pytest.mark.parametrize("spec", ["vanilla", "random", "dense+vanilla"])
def test_a_decoder_may_have_another_mask(spec, monkeypatch):
    """With a window of three tokens, each of two layers hands a change two tokens on, so it reaches five tokens."""

    def make_window_mask(self, x):
        """Returns a mask (T, T) with which each token sees itself and the two tokens before."""
        positions = torch.arange(x.size(0))
        distances = positions[:, None] - positions
        is_outside = (distances < 0) | (distances > 2)
        return torch.zeros(distances.shape).masked_fill(is_outside, float("-inf"))

    monkeypatch.setattr(SynthesizerDecoder, "buffered_future_mask", make_window_mask)
    model = make_synth(spec)
    source = pad_batch(SOURCES, left=True)
    target = torch.randint(4, 40, (3, 8))
    other_target = target.clone()
    other_target[:, 0] = 2
    out, _ = model(source, None, target)
    other_out, _ = model(source, None, other_target)
    has_changed = (out != other_out).any(-1)
    assert torch.equal(has_changed, (torch.arange(8) < 5).expand(3, 8))


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_the_word_pad_in_a_text_changes_nothing_for_other_words(kind, spec):
    """The output is that of the text without the word, as in fairseq."""
    model = make_synth(spec, kind)
    source = torch.tensor([[7, 8, PAD, 9, 2]])
    target = torch.tensor([[2, 5, PAD, 6]])
    out, _ = compute_logits(model, source, target)
    source_without_pad = torch.tensor([[7, 8, 9, 2]])
    target_without_pad = torch.tensor([[2, 5, 6]])
    expected, _ = compute_logits(model, source_without_pad, target_without_pad)
    torch.testing.assert_close(out[:, [0, 1, 3]], expected)


@pytest.mark.parametrize("kind, spec", DECODERS)
def test_decoding_with_a_cache_equals_decoding_without(kind, spec):
    """Tokens are read one by one, and three hypotheses of one sentence are reordered twice, as in a beam search."""
    model = make_synth(spec, kind)
    encoder_out = model.encoder(torch.tensor([SOURCES[0]] * 3)) if kind == "translation" else None
    tokens = torch.randint(4, 40, (3, 8))  # 8 tokens of each hypothesis
    incremental_state = {}
    for step in range(8):
        if step in (3, 6):
            order = torch.tensor([1, 1, 0])
            model.decoder.reorder_incremental_state_scripting(incremental_state, order)
            # The tokens so far follow the order, as the cache does. Later tokens are drawn anew: with them, the two
            # hypotheses that go on from hypothesis 1 become different.
            tokens_so_far = tokens[order, :step]
            later_tokens = torch.randint(4, 40, (3, 8 - step))
            tokens = torch.cat([tokens_so_far, later_tokens], dim=1)
        prefix = tokens[:, : step + 1]
        out, _ = model.decoder(prefix, encoder_out=encoder_out, incremental_state=incremental_state)
        expected, _ = model.decoder(prefix, encoder_out=encoder_out)
        # With a cache, the decoder returns the newest token alone; without one, all tokens.
        assert_close(out[:, 0], expected[:, -1])


@pytest.mark.parametrize("spec", ["random", "dense+vanilla", "random,vanilla", "random:1/vanilla:1,random"])
@pytest.mark.parametrize("layerdrop", [0, 0.99])
def test_all_layers_of_a_decoder_share_the_table_of_the_first_layer(spec, layerdrop):
    """The table says where the cached tokens of each hypothesis are. It is extended once in each of five steps.

    If each layer had a table of its own, there would be several entries of this kind, and each would be extended.

    With layerdrop, a loop over the layers leaves some out at random in training mode, in which a model is built. All
    layers have to share the table nevertheless.
    """
    model = make_synth("random", decoder_synthesizer=spec, decoder_layerdrop=layerdrop).eval()
    source = torch.randint(4, 30, (3, 5))
    target = torch.randint(4, 30, (3, 5))
    encoder_out = model.encoder(source)
    incremental_state = {}
    # The mock calls the function, and counts the calls.
    with torch.no_grad(), mock.patch.object(cache, "extend_table", wraps=cache.extend_table) as extend_table:
        for step in range(5):
            model.decoder(target[:, : step + 1], encoder_out=encoder_out, incremental_state=incremental_state)
            model.decoder.reorder_incremental_state_scripting(incremental_state, torch.tensor([2, 0, 1]))
    keys_of_tables = [key for key in incremental_state if key.endswith(".table")]
    first_layer = model.decoder.layers[0]
    assert keys_of_tables == [first_layer.self_attn.table_key]
    assert extend_table.call_count == 5


class DecodingWithoutCache(torch.nn.Module):
    """A model whose decoder ignores the cache, so that a search computes all tokens at each step."""

    def __init__(self, model):
        super().__init__()
        self.decoder = model.decoder
        if hasattr(model, "encoder"):
            self.encoder = model.encoder
        original_forward = model.decoder.forward

        def forward(tokens, encoder_out=None, incremental_state=None):
            """Computes all tokens, without the cache `incremental_state`."""
            return original_forward(tokens, encoder_out=encoder_out)

        self.decoder.forward = forward
        self.max_decoder_positions = model.max_decoder_positions
        self.get_normalized_probs = model.get_normalized_probs


@pytest.mark.parametrize("prefix", [None, [[7, 8], [9, 1], [10, 11]]])
@pytest.mark.parametrize("spec", ["vanilla", "random", "dense", "factorized_dense", "random+vanilla"])
@pytest.mark.parametrize("kind", ["translation", "language_model"])
def test_beam_search_finds_the_same_with_and_without_a_cache(kind, spec, prefix):
    """Both searches find the same hypotheses with the same scores, even if these have to begin with a prefix."""
    model = make_synth(spec, kind, share_all_embeddings=True)
    source_lengths = torch.tensor([len(source) for source in SOURCES])
    sample = {"net_input": {"src_tokens": pad_batch(SOURCES, left=True), "src_lengths": source_lengths}}
    prefix_tokens = None if prefix is None else torch.tensor(prefix)

    def search(searched_model):
        """Returns for each sentence the hypotheses of a beam search."""
        generator = SequenceGenerator([searched_model], make_dictionary(), beam_size=4, max_len_b=10, min_len=2)
        return generator.generate([searched_model], sample, prefix_tokens=prefix_tokens)

    with_cache = search(model)
    without_cache = search(DecodingWithoutCache(copy.deepcopy(model)))
    for hypotheses, expected_hypotheses in zip(with_cache, without_cache):
        assert len(hypotheses) == len(expected_hypotheses)
        for hypothesis, expected in zip(hypotheses, expected_hypotheses):
            assert hypothesis["tokens"].tolist() == expected["tokens"].tolist()
            torch.testing.assert_close(
                hypothesis["positional_scores"], expected["positional_scores"], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("part", ["layer", "attention"])
def test_torchscript_of_a_part_is_refused(part):
    """torch.jit.script of a layer or an attention ends with one line, as that of a model does."""
    layer = make_synth("random+vanilla").decoder.layers[0]
    scripted = {"layer": layer, "attention": layer.self_attn}[part]
    with pytest.raises(SynthesizerError, match="TorchScript is not supported"):
        torch.jit.script(scripted)


@pytest.mark.parametrize("kind", KINDS)
def test_vanilla_has_the_weights_and_the_output_of_fairseqs_model(kind):
    """The weights have the same names. From one seed the initial weights are the same bits, with two exceptions.

    1. This project's translation model builds the attention of an encoder layer last if fairseq is the version 0.12.2,
       so that random numbers are drawn in another order. `has_fast_path` recognises this version.
    2. fairseq's RoBERTa, the kind "encoder", draws the weights of its attention twice.
    """
    vanilla_arch = ARCHS[kind].replace("random_vanilla", "vanilla")  # the same sizes, with vanilla alone
    model = make_model(vanilla_arch)
    fairseqs_model = make_model(FAIRSEQS_ARCHS[kind])
    weights = used_weights(model.state_dict())
    fairseqs_weights = used_weights(fairseqs_model.state_dict())
    assert set(weights) == set(fairseqs_weights)

    builds_attention_last = kind == "translation" and has_fast_path(HostLayer)
    draws_attention_twice = kind == "encoder"
    if not builds_attention_last and not draws_attention_twice:
        for name, weight in weights.items():
            assert torch.equal(fairseqs_weights[name], weight), name
    compare_with_fairseqs_model(model, fairseqs_model)


def test_an_encoder_starts_as_a_roberta():
    """Matrices and embeddings start from N(0, 0.02), as in BERT, and the synthesizers as they start everywhere."""
    model = make_model(ARCHS["encoder"], encoder_embed_dim=64, encoder_ffn_embed_dim=64, encoder_synthesizer="random")
    layer = model.encoder.sentence_encoder.layers[0]
    for weight in (layer.self_attn.v_proj.weight, layer.fc1.weight, model.encoder.sentence_encoder.embed_tokens.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    R = layer.self_attn.synthesizer.components["random"].R
    assert R.std().item() == pytest.approx((2 / (24 + 24)) ** 0.5, rel=0.15)  # Glorot


def compare_with_fairseqs_model(model, fairseqs_model):
    """Loads the weights of fairseq's model into another, checks that the outputs are equal, and returns the output.

    Both are in training mode, but without dropout.
    """
    model.load_state_dict(fairseqs_model.state_dict())
    for some_model in (fairseqs_model, model):
        some_model.train()
        for module in some_model.modules():
            if hasattr(module, "p"):
                module.p = 0.0
    source = pad_batch(SOURCES, left=True)
    target = pad_batch(TARGETS, left=False)
    out, tokens = compute_logits(model, source, target)
    expected, _ = compute_logits(fairseqs_model, source, target)
    real = tokens.ne(PAD)
    torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=0)
    return out


SPECS_FOR_WARM_START = [spec for spec in SPECS if spec.endswith("+vanilla") and "fixed" not in spec]


@pytest.mark.parametrize("spec", SPECS_FOR_WARM_START)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_with_vanilla_starts_from_a_checkpoint_of_fairseq(kind, spec):
    """It begins with the output of fairseq's model, and its functions learn from there."""
    fairseqs_model = perturb(make_model(FAIRSEQS_ARCHS[kind], attention_dropout=0.0))
    model = make_synth(spec, kind, synth_mixture="sum", dropout=0.0, attention_dropout=0.0)
    out = compare_with_fairseqs_model(model, fairseqs_model)
    if spec == "random+vanilla":
        matrices = [parameter for name, parameter in model.named_parameters() if name.endswith(".random.R")]
        assert matrices
        for R in matrices:
            assert torch.count_nonzero(R) == 0
    out.square().sum().backward()
    function_parameters = [parameter for name, parameter in model.named_parameters() if ".synthesizer." in name]
    assert any(parameter.grad.abs().sum() > 0 for parameter in function_parameters)


def join_projections(state):
    """Returns a state dict as older versions of fairseq wrote it.

    In it, the rows of queries, keys and values are in one matrix, and their biases in one vector.
    """
    joined = dict(state)
    for name in state:
        if ".q_proj." in name:
            parts = [joined.pop(name.replace("q_proj", projection)) for projection in ("q_proj", "k_proj", "v_proj")]
            joined[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return joined


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_a_checkpoint_of_an_older_fairseq_gives_the_same_weights(kind, spec):
    state = perturb(make_model(FAIRSEQS_ARCHS[kind])).state_dict()
    older_state = join_projections(state)
    assert any(name.endswith("self_attn.in_proj_weight") for name in older_state)
    assert len(older_state) < len(state)
    model = make_synth(spec, kind, synth_mixture="sum")
    model.load_state_dict(older_state)
    expected_model = make_synth(spec, kind, synth_mixture="sum")
    expected_model.load_state_dict(state)
    expected_weights = expected_model.state_dict()
    for name, weight in used_weights(model.state_dict()).items():
        assert torch.equal(weight, expected_weights[name]), name


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_roberta_with_another_number_of_positions_is_refused(side):
    """fairseq's published models call the encoder "decoder"."""
    roberta = make_model(FAIRSEQS_ARCHS["encoder"], max_positions=20)
    state = {re.sub("^encoder", side, name): weight for name, weight in roberta.state_dict().items()}
    with pytest.raises(SynthesizerError, match="--max-positions 24: the checkpoint was trained with 20"):
        make_synth("vanilla", "encoder").load_state_dict(state)


@pytest.mark.parametrize("mixture, is_warned", [("convex", True), ("sum", False)])
def test_a_warm_start_that_changes_the_output_is_warned_of(mixture, is_warned, caplog):
    """A convex mixture begins with smaller logits than those of the checkpoint."""
    model = make_synth("random+vanilla", "translation", synth_mixture=mixture)
    model.load_state_dict(make_model(FAIRSEQS_ARCHS["translation"]).state_dict())
    assert ("convex scales down the logits of the checkpoint" in caplog.text) == is_warned


@pytest.mark.parametrize(
    "kind, flag",
    [
        ("translation", "--encoder-synthesizer"),
        ("language_model", "--decoder-synthesizer"),
        ("encoder", "--encoder-synthesizer"),
    ],
)
def test_only_vanilla_and_mixtures_with_it_take_a_checkpoint_of_fairseq(kind, flag):
    state = make_model(FAIRSEQS_ARCHS[kind]).state_dict()
    message = f"; use the {flag} that the model was trained with .only vanilla and mixtures with it can"
    with pytest.raises(SynthesizerError, match=message):
        make_synth("random", kind).load_state_dict(state)


KIND_BY_NAME = {"a translation model": "translation", "a language model": "language_model", "an encoder": "encoder"}


@pytest.mark.parametrize("is_fairseqs", [True, False])
@pytest.mark.parametrize("checkpoint_name, model_name", list(itertools.permutations(KIND_BY_NAME, 2)))
def test_a_checkpoint_of_another_kind_of_model_is_refused(checkpoint_name, model_name, is_fairseqs):
    kind_of_checkpoint = KIND_BY_NAME[checkpoint_name]
    if is_fairseqs:
        arch_of_checkpoint = FAIRSEQS_ARCHS[kind_of_checkpoint]
    else:
        arch_of_checkpoint = ARCHS[kind_of_checkpoint]
    state = make_model(arch_of_checkpoint).state_dict()
    model = make_model(ARCHS[KIND_BY_NAME[model_name]])
    message = f"the checkpoint contains {checkpoint_name}, but this model is {model_name}; use"
    with pytest.raises(SynthesizerError, match=message):
        model.load_state_dict(state)


@pytest.mark.parametrize("spec, is_warned", [("random+vanilla", False), ("fixed_random+vanilla", True)])
def test_a_function_whose_logits_cannot_start_at_zero_is_warned_of(spec, is_warned, caplog):
    """fixed_random has no trained weights that could be 0, so the output is not that of the checkpoint."""
    checkpoint = make_model("transformer_multi30k").state_dict()
    make_synth(spec, synth_mixture="sum").load_state_dict(checkpoint)
    assert ("fixed_random has fixed logits, so the model starts with a different output" in caplog.text) == is_warned
    assert ("so the model starts with a different output" in caplog.text) == is_warned


@pytest.mark.parametrize(
    "checkpoint_flags, model_flags, message",
    [
        # Sizes. The message names the first weight of another size.
        (dict(spec="random"), dict(spec="random", synth_max_length=30), "--synth-max-length"),
        (dict(spec="factorized_random"), dict(spec="factorized_random", synth_rank=3), "--synth-rank"),
        (
            # l is the product of two factors a and b, and the weight W2 has a + b rows: 8 + 12 and 10 + 10, so 20 in
            # both. An empty buffer (a, b, 0) tells them apart.
            dict(spec="factorized_dense", synth_max_length=96),
            dict(spec="factorized_dense", synth_max_length=100),
            "factors is (8, 12, 0) in the checkpoint and (10, 10, 0) in this model; use the --synth-max-length",
        ),
        # Functions.
        (
            dict(spec="random"),
            dict(spec="dense"),
            "has weights of random, and no query and key projections, but this model has dense",
        ),
        (
            dict(spec="random+vanilla"),
            dict(spec="random"),
            "has weights of random, and query and key projections, but this model has random",
        ),
        (
            dict(spec="random"),
            dict(spec="vanilla"),
            "has weights of random, and no query and key projections, but this model has vanilla",
        ),
        # The mixture.
        (dict(spec="random+vanilla"), dict(spec="random+vanilla", synth_mixture="sum"), "--synth-mixture convex"),
    ],
    ids=["max-length", "rank", "factors", "other function", "no vanilla", "vanilla alone", "mixture"],
)
def test_a_checkpoint_of_a_model_with_other_flags_is_refused(checkpoint_flags, model_flags, message):
    """The error has a message that names the flag, or says which functions the checkpoint and the model have."""
    checkpoint = make_synth(**checkpoint_flags).state_dict()
    with pytest.raises(SynthesizerError, match=re.escape(message)):
        make_synth(**model_flags).load_state_dict(checkpoint)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_loads_a_checkpoint_has_its_output(kind, spec):
    model = make_synth(spec, kind)
    loaded = make_synth(spec, kind, seed=9)
    loaded.load_state_dict(model.state_dict())
    assert_same_output(loaded, model)


def assert_same_output(model, expected_model):
    """Checks that two models have the same output, bit for bit."""
    source = pad_batch(SOURCES, left=True)
    target = pad_batch(TARGETS, left=False)
    expected, _ = compute_logits(expected_model, source, target)
    out, _ = compute_logits(model, source, target)
    assert torch.equal(out, expected)


class Sizes(NamedTuple):
    """The sizes of a preset."""

    layers: int
    width: int
    heads: int
    feed_forward_width: int
    max_length: int


SIZES = {
    "wmt_en_de": Sizes(6, 512, 8, 2048, 256),
    "wmt_en_fr": Sizes(6, 512, 8, 2048, 256),
    "wmt_en_de_big": Sizes(6, 1024, 16, 4096, 256),
    "iwslt_de_en": Sizes(6, 512, 4, 1024, 256),
    "multi30k": Sizes(4, 128, 4, 256, 100),
    "t5_base": Sizes(12, 768, 12, 3072, 512),
    "t5_tiny": Sizes(2, 128, 4, 512, 128),
    "lm1b": Sizes(6, 512, 8, 2048, 256),
    "wiki103": Sizes(16, 1024, 8, 4096, 512),
    "ptb": Sizes(2, 128, 4, 512, 128),
    "base": Sizes(12, 768, 12, 3072, 512),
    "small": Sizes(4, 256, 4, 1024, 512),
    "agnews": Sizes(2, 128, 4, 512, 128),
    "imdb": Sizes(2, 128, 4, 512, 512),
}


def has_max_length(spec):
    """Returns whether a function of a spec has a longest sentence."""
    return any(synthesizers.SYNTHESIZERS[name].has_max_length for name in spec.split("+"))


@functools.cache
def make_parser(model):
    """Returns a parser of the flags of a class of models."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    model.add_args(parser)
    return parser


def read_flags(arch, **flags):
    """Returns the flags of a model with the defaults of the command line, after its preset has filled them in."""
    parser = make_parser(ARCH_MODEL_REGISTRY[arch])
    args = parser.parse_args([], argparse.Namespace(arch=arch, **flags))
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def build(arch, dictionary_size=4, **flags):
    """Returns a model with the defaults of the command line, whose weights take no memory and have no values."""
    args = read_flags(arch, **flags)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        # the initialization of RoBERTa reads values
        patch.setattr(fairseq.models.roberta.model, "init_bert_params", lambda module: None)
        return ARCH_MODEL_REGISTRY[arch].build_model(args, make_task(dictionary_size))


def list_stacks(model):
    """Returns the encoder, the decoder or both, as a model of any kind has them."""
    stacks = []
    for side in ("encoder", "decoder"):
        if hasattr(model, side):
            stack = getattr(model, side)
            stacks.append(getattr(stack, "sentence_encoder", stack))
    return stacks


class Architecture(NamedTuple):
    """What the name of an architecture with a Synthesizer consists of."""

    model: str
    spec: str
    preset: str

    def name(self):
        """Returns the name, as --arch takes it."""
        return architecture_name(self.model, self.spec, self.preset)


def list_architectures():
    """Returns every `Architecture` of this project."""
    architectures = []
    for model, (_, presets) in MODELS.items():
        for spec, preset in itertools.product(VARIANTS, presets):
            architectures.append(Architecture(model, spec, preset))
    return architectures


def list_architectures_to_build():
    """Returns a quarter of the architectures, so that the test that builds them takes less time.

    In a table with a row for each variant and a column for each preset of a model, these are the architectures on every
    fourth diagonal. So the chosen ones of a preset have variants 0, 4, 8, …, or 1, 5, 9, … and so on. A quarter is
    enough, because a variant and a preset set flags that have nothing to do with each other.
    """
    chosen = []
    for architecture in list_architectures():
        presets = list(MODELS[architecture.model].presets)
        row = VARIANTS.index(architecture.spec)
        column = presets.index(architecture.preset)
        diagonal = row + column
        if diagonal % 4 == 0:
            chosen.append(architecture)
    return chosen


@pytest.mark.parametrize("architecture", list_architectures(), ids=Architecture.name)
def test_every_architecture_has_the_flags_of_its_functions_and_of_its_preset(architecture):
    sizes = SIZES[architecture.preset]
    flags = vars(read_flags(architecture.name()))
    for stack in MODELS[architecture.model].model.stacks:
        assert flags[f"{stack}_synthesizer"] == architecture.spec
        assert flags[f"{stack}_layers"] == sizes.layers
        assert flags[f"{stack}_embed_dim"] == sizes.width
        assert flags[f"{stack}_ffn_embed_dim"] == sizes.feed_forward_width
        assert flags[f"{stack}_attention_heads"] == sizes.heads
    default_max_length = 256
    assert flags.get("synth_max_length", default_max_length) == sizes.max_length


@pytest.mark.parametrize("architecture", list_architectures_to_build(), ids=Architecture.name)
def test_an_architecture_has_its_functions_and_the_sizes_of_its_preset(architecture):
    sizes = SIZES[architecture.preset]
    if architecture.preset == "wiki103":
        dictionary_size = 60010  # because its adaptive softmax has clusters of 20,000 and 40,000 words
    else:
        dictionary_size = 4
    if has_max_length(architecture.spec) or architecture.model == "roberta_synth":
        max_positions = sizes.max_length
    else:
        max_positions = 1024  # fairseq's default
    for stack in list_stacks(build(architecture.name(), dictionary_size)):
        assert len(stack.layers) == sizes.layers
        assert stack.layers[0].fc1.weight.shape == (sizes.feed_forward_width, sizes.width)
        assert stack.max_positions() == max_positions
        for layer in stack.layers:
            assert set(layer.self_attn.synthesizer.components) == set(architecture.spec.split("+"))
            assert layer.self_attn.num_heads == sizes.heads


def list_baselines():
    """Returns the name of the model and the preset of every architecture of this project without a Synthesizer."""
    baselines = []
    for model, presets in STOCK.items():
        for preset in presets:
            baselines.append((model, preset))
    return baselines


@pytest.mark.parametrize("model, preset", list_baselines())
def test_every_baseline_has_the_sizes_of_its_preset(model, preset):
    sizes = SIZES[preset]
    baseline = build(f"{model}_{preset}", tokens_per_sample=64)
    for stack in list_stacks(baseline):
        assert len(stack.layers) == sizes.layers
        first_layer = stack.layers[0]
        if hasattr(first_layer, "self_attn"):  # not in lightconv_lm
            assert first_layer.fc1.weight.shape == (sizes.feed_forward_width, sizes.width)
            assert first_layer.self_attn.num_heads == sizes.heads
    if "linformer" in model:
        assert baseline.max_positions() == sizes.max_length
    if model == "lightconv_lm":
        (decoder,) = list_stacks(baseline)
        assert type(decoder.layers[0].conv).__name__.startswith("Lightweight")
        if hasattr(decoder, "embed_out"):
            assert decoder.embed_out is decoder.embed_tokens.weight
        else:
            assert decoder.share_input_output_embed


class ParameterCount(NamedTuple):
    """How many million parameters an architecture has more than fairseq's transformer_wmt_en_de."""

    measured: float
    paper: int  # by the column of the paper's table 2, which is rounded to a million


PARAMETER_COUNTS = {
    "vanilla": ParameterCount(measured=0.0, paper=0),
    "random": ParameterCount(measured=-0.01, paper=0),
    "fixed_random": ParameterCount(measured=-6.30, paper=-6),
    "factorized_random": ParameterCount(measured=-5.91, paper=-6),
    "dense": ParameterCount(measured=-4.31, paper=-5),
    "factorized_dense": ParameterCount(measured=-5.70, paper=-6),
    "random+dense": ParameterCount(measured=1.98, paper=0),
    "dense+vanilla": ParameterCount(measured=2.00, paper=7),
    "random+vanilla": ParameterCount(measured=6.29, paper=6),
}
IRRECONCILABLE = ("random+dense", "dense+vanilla")  # with the numbers of the paper


def count_parameters(model):
    """Returns the number of a model's parameters, without those that fairseq 0.12.2 does not use."""
    parameters = used_weights(dict(model.named_parameters()))
    return sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.parametrize("spec", PARAMETER_COUNTS)
def test_parameter_counts_are_those_of_table_2(spec):
    """They agree within a million, except for two functions, which are on the page of deviations."""
    variant = spec.replace("+", "_")
    synthesizer = build(f"transformer_synth_{variant}_wmt_en_de", share_all_embeddings=True)
    transformer = build("transformer_wmt_en_de", share_all_embeddings=True)
    difference = (count_parameters(synthesizer) - count_parameters(transformer)) / 1e6
    assert difference == pytest.approx(PARAMETER_COUNTS[spec].measured, abs=0.01)
    is_near_the_paper = abs(difference - PARAMETER_COUNTS[spec].paper) < 1.0
    assert is_near_the_paper == (spec not in IRRECONCILABLE)


def list_functions(stack):
    """Returns for each layer of an encoder or decoder the names of its functions."""
    return [list(layer.self_attn.synthesizer.components) for layer in stack.layers]


def test_each_layer_may_have_functions_of_its_own():
    model = make_model(
        encoder_synthesizer="random,dense+vanilla",
        decoder_synthesizer="vanilla, factorized_random",
        synth_mixture="sum",
    )
    assert list_functions(model.encoder) == [["random"], ["dense", "vanilla"]]
    assert list_functions(model.decoder) == [["vanilla"], ["factorized_random"]]


def test_a_pruned_model_keeps_the_functions_and_weights_of_its_layers():
    """--encoder-layers-to-keep names layers of the trained model."""
    flags = dict(encoder_layers=3, encoder_synthesizer="random,dense,vanilla", decoder_synthesizer="random")
    layers_to_keep = dict(encoder_layers_to_keep="0,2", decoder_layers_to_keep="0,1")
    trained = perturb(make_model(**flags))
    pruned = make_model(**flags, **layers_to_keep)
    assert list_functions(pruned.encoder) == [["random"], ["vanilla"]]
    pruned.load_state_dict(trained.state_dict(), model_cfg=argparse.Namespace(arch="x", **layers_to_keep))
    trained_layers = trained.encoder.layers
    pruned_layers = pruned.encoder.layers
    assert torch.equal(pruned_layers[0].fc1.weight, trained_layers[0].fc1.weight)
    assert torch.equal(pruned_layers[1].fc1.weight, trained_layers[2].fc1.weight)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if has_max_length(spec)])
def test_a_source_that_is_longer_than_l_is_refused(spec):
    """The error names the flag. The decoder, with vanilla alone, has no such limit."""
    model = make_model(encoder_synthesizer=spec, decoder_synthesizer="vanilla", synth_max_length=6)
    target = torch.full((1, 12), 5)
    model(torch.full((1, 6), 5), None, target)
    with pytest.raises(ValueError, match="7 tokens is longer than --synth-max-length 6"):
        model(torch.full((1, 7), 5), None, target)
    assert model.max_positions() == (6, 1024)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if has_max_length(spec)])
def test_a_target_that_is_longer_than_l_is_refused(spec):
    """It is refused in decoding, too. The encoder, with vanilla alone, has no such limit."""
    model = make_model(encoder_synthesizer="vanilla", decoder_synthesizer=spec, synth_max_length=6)
    source = torch.full((1, 12), 5)
    target = torch.full((1, 7), 5)
    model(source, None, target[:, :6])
    with pytest.raises(ValueError, match="7 tokens is longer than --synth-max-length 6"):
        model(source, None, target)
    with pytest.raises(ValueError, match="--synth-max-length 6"):
        model.decoder(target, encoder_out=model.encoder(source), incremental_state={})
    assert model.max_positions() == (1024, 6)


@pytest.mark.parametrize("kind", ["language_model", "encoder"])
@pytest.mark.parametrize("spec", ["random", "random+vanilla", "dense"])
def test_a_sentence_that_is_longer_than_l_is_refused_by_one_stack(kind, spec):
    model = make_synth(spec, kind, synth_max_length=6)
    model(torch.full((1, 6), 5))
    with pytest.raises(ValueError, match="7 tokens is longer than --synth-max-length 6"):
        model(torch.full((1, 7), 5))
    assert model.max_positions() == 6


def test_a_sentence_that_is_longer_than_its_positions_is_refused_by_linformer():
    model = make_model("roberta_linformer_agnews")
    with pytest.raises(ValueError, match="25 tokens is longer than --max-positions 24"):
        model(torch.full((1, 25), 5))


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(cross_self_attention=True), "--cross-self-attention"),
        (dict(base_layers=1), "--base-layers 1: base layers are not supported"),
        (dict(decoder_xformers_att_config="{}"), "--decoder-xformers-att-config: is only for fairseq's attention"),
        (dict(encoder_xformers_att_config="{}"), "--encoder-xformers-att-config: is only for fairseq's attention"),
        (dict(encoder_attention_heads=0), "--encoder-attention-heads 0 does not divide"),
        (dict(encoder_layers_to_keep="0,5", decoder_layers_to_keep="0"), "--encoder-layers-to-keep '0,5': .*0 to 1"),
        (dict(encoder_layers_to_keep="0,-1", decoder_layers_to_keep="0"), "'0,-1': .*0 to 1"),
        (dict(encoder_layers_to_keep="0", decoder_layers_to_keep="1,1"), "'1,1': .*0 to 1, .* each layer once"),
        (
            dict(tie_adaptive_weights=True, adaptive_softmax_cutoff="9"),
            "--tie-adaptive-weights: .* only language models",
        ),
        (dict(encoder_attention_heads=3), "--encoder-attention-heads 3 does not divide --encoder-embed-dim 16"),
        (dict(decoder_attention_heads=5), "--decoder-attention-heads 5 does not divide --decoder-embed-dim 16"),
        (dict(encoder_synthesizer="randm"), "--encoder-synthesizer 'randm': unknown function 'randm'; choose from"),
        (dict(decoder_synthesizer="random,dense,random"), "names 3 layers, but --decoder-layers is 2"),
        (dict(encoder_synthesizer="factorized_dense", synth_max_length=23), "--synth-max-length 23: .*product"),
        (dict(synth_max_length=0), "--synth-max-length 0: must be at least 2"),
        (dict(synth_rank=-1), "--synth-rank -1: must be at least 1"),
        (dict(synth_mixture="product"), "--synth-mixture 'product': choose from convex, sum"),
        (dict(synth_beyond_length="tiled"), "--synth-beyond-length 'tiled': choose from refuse, tile"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(flags, message):
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
        ("language_model", dict(base_layers=1), "--base-layers 1: base layers are not supported"),
        ("language_model", dict(decoder_synthesizer="randm"), "--decoder-synthesizer 'randm': unknown"),
        (
            "language_model",
            dict(share_decoder_input_output_embed=True, adaptive_input=True),
            "--share-decoder-input-output-embed: --adaptive-input has no single matrix",
        ),
        ("language_model", dict(tie_adaptive_weights=True), "--tie-adaptive-weights: .*--adaptive-input"),
        (
            "language_model",
            dict(
                tie_adaptive_weights=True, adaptive_input=True, adaptive_input_cutoff="10", adaptive_softmax_cutoff="9"
            ),
            "--adaptive-input-cutoff 10 and --adaptive-softmax-cutoff 9 must be equal",
        ),
        ("encoder", dict(max_positions=25), "--max-positions 25 is above --synth-max-length 24"),
        ("encoder", dict(encoder_attention_heads=3), "--encoder-attention-heads 3 does not divide"),
        ("encoder", dict(encoder_synthesizer="random,random,random"), "names 3 layers, but --encoder-layers is 2"),
    ],
)
def test_flags_that_do_not_fit_one_stack_are_refused_in_one_line(kind, flags, message):
    with pytest.raises(SynthesizerError, match=message) as caught:
        make_model(ARCHS[kind], **flags)
    assert "\n" not in str(caught.value)


def test_an_encoder_takes_the_number_of_positions_from_its_task(monkeypatch):
    """It does so if --max-positions is not given. This number must not be above --synth-max-length either."""
    task = make_task()
    task.cfg.tokens_per_sample = None

    def get_this_task(*_, **__):
        """Takes the place of `helpers.make_task`, which `make_model` calls."""
        return task

    monkeypatch.setattr(helpers, "make_task", get_this_task)
    task.max_positions = lambda: 24
    assert make_model(ARCHS["encoder"], max_positions=None).args.max_positions == 24
    task.max_positions = lambda: 25
    with pytest.raises(SynthesizerError, match="--max-positions 25 is above --synth-max-length 24"):
        make_model(ARCHS["encoder"], max_positions=None)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(linformer_k=0), "--linformer-k 0"),
        (dict(encoder_attention_heads=3), "--encoder-attention-heads 3"),
        (dict(encoder_layers_to_keep="0,2"), "--encoder-layers-to-keep '0,2': .*0 to 1"),
    ],
)
def test_flags_that_do_not_fit_linformer_are_refused(flags, message):
    with pytest.raises(SynthesizerError, match=message):
        make_model("roberta_linformer_agnews", **flags)


def get_id(value):
    """Returns the part of a test's name that stands for a kind of model, or for flags: the first of their names."""
    if isinstance(value, str):
        return value
    first_flag, *_ = value
    return first_flag


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
    ids=get_id,
)
def test_a_model_of_one_stack_with_flags_of_fairseq_is_trained(kind, flags):
    model = make_model(ARCHS[kind], **flags).train()
    torch.manual_seed(2)
    features, _ = model(pad_batch(SOURCES, left=False), features_only=True)
    features.square().sum().backward()
    assert attention_has_gradient(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", ["checkpoint_activations", "offload_activations"])
def test_each_attention_runs_again_in_the_backward_pass_to_save_memory(kind, flag):
    """--offload-activations sets --checkpoint-activations."""
    model = make_model(ARCHS[kind], **{flag: True}).train()
    attentions = [module for module in model.modules() if isinstance(module, SyntheticAttention)]
    hook = mock.Mock(return_value=None)
    for attention in attentions:
        attention.register_forward_pre_hook(hook)
    source = pad_batch(SOURCES, left=False)
    target = pad_batch(TARGETS, left=False)
    out, _ = compute_logits(model, source, target)
    out.sum().backward()
    assert hook.call_count == 2 * len(attentions)


def attention_has_gradient(model):
    """Returns whether a gradient other than 0 has reached a parameter of the self-attention."""
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "self_attn" in name]
    return any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


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
    ids=get_id,
)
def test_a_translation_model_with_flags_of_fairseq_is_trained(flags):
    model = make_model(encoder_synthesizer="random+vanilla", decoder_synthesizer="dense", **flags).train()
    torch.manual_seed(2)
    features, _ = model(pad_batch(SOURCES, left=True), None, pad_batch(TARGETS, left=False))
    features.square().sum().backward()
    assert attention_has_gradient(model)


def test_attention_dropout_and_quantization_noise_reach_the_attention():
    model = make_model(attention_dropout=0.25, quant_noise_pq=0.1, quant_noise_pq_block_size=4)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        assert layer.self_attn.dropout_module.p == 0.25
        quantization_noise = layer.self_attn.v_proj._forward_pre_hooks
        assert quantization_noise


def name_dropouts(model):
    """Returns {name of a dropout module: the class that --retain-dropout-modules knows it by}."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, FairseqDropout):
            names[name] = module.module_name
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_dropouts_have_the_names_that_they_have_in_fairseq(kind):
    """--retain-dropout-modules names classes of fairseq."""
    expected = name_dropouts(make_model(FAIRSEQS_ARCHS[kind]))
    assert "MultiheadAttention" in expected.values()
    assert name_dropouts(make_model(ARCHS[kind])) == expected
    if kind == "encoder":
        assert name_dropouts(make_model("roberta_linformer_agnews")) == expected


@pytest.mark.parametrize(
    "max_positions, max_length, flag",
    [
        (24, 24, "--synth-max-length 24"),
        (20, 24, "--max-target-positions 20"),
        (24, None, "--max-target-positions 24"),
    ],
)
def test_min_len_above_the_lower_one_of_two_limits_is_refused(max_positions, max_length, flag):
    """The error names the flag of the lower limit."""
    decoder = argparse.Namespace(max_positions=lambda: max_positions, max_length=max_length)
    with pytest.raises(SynthesizerError, match=f"--min-len 24: .*{flag}"):
        lengths.check_min_len(argparse.Namespace(min_len=24), decoder)


def prepare_for_fusion(**flags):
    """Prepares a language model with l = 24 for a search with these flags of fairseq-generate."""
    defaults = dict(lm_path="lm.pt", max_len_a=0, max_len_b=23, min_len=1, match_source_len=False)
    generation = argparse.Namespace(**{**defaults, **flags})
    cfg = argparse.Namespace(generation=generation, task=None, common=argparse.Namespace(fp16=False))
    make_model(ARCHS["language_model"]).prepare_for_inference_(cfg)


@pytest.mark.parametrize("flags", [dict(max_len_b=24), dict(max_len_a=0.1), dict(match_source_len=True)])
def test_fusion_with_a_language_model_that_is_too_short_is_refused_before_the_search(flags):
    """The model of --lm-path has to read as many tokens as the search may write."""
    message = "--lm-path: .* up to 24 tokens .*--max-len-a 0 .*--max-len-b 23, w"
    with pytest.raises(SynthesizerError, match=message):
        prepare_for_fusion(**flags)


@pytest.mark.parametrize("lm_path", ["lm.pt", None])
def test_fusion_with_a_language_model_that_is_long_enough_is_prepared(lm_path):
    prepare_for_fusion(lm_path=lm_path)


@pytest.mark.parametrize("decoder_synthesizer, longest_source", [("random", 23), ("vanilla", 24)])
def test_match_source_len_leaves_the_decoder_room_for_the_end_of_sentence(decoder_synthesizer, longest_source):
    """With --match-source-len the decoder reads it and as many tokens as the longest source has. l is 24."""
    model = make_model(encoder_synthesizer="random", decoder_synthesizer=decoder_synthesizer)
    generation = argparse.Namespace(match_source_len=True, min_len=1)
    model.prepare_for_inference_(argparse.Namespace(generation=generation, common=argparse.Namespace(fp16=False)))
    assert model.max_positions()[0] == longest_source


def test_the_longest_source_can_be_searched_with_match_source_len():
    model = make_model()
    generator = SequenceGenerator([model], make_dictionary(), beam_size=2, match_source_len=True)
    source = torch.randint(4, 8, (2, 23))
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([23, 23])}}
    generator.generate([model], sample)


@pytest.mark.parametrize("holder", ["cfg", "args"])
def test_flags_of_a_task_of_either_kind_are_checked_and_limited(holder):
    """The flags of fairseq's older kind of task are in its ``args``."""
    flags = argparse.Namespace(required_seq_len_multiple=7, truncate_source=True, max_source_positions=1024)
    task = argparse.Namespace(cfg=None)
    setattr(task, holder, flags)
    with pytest.raises(SynthesizerError, match="--required-seq-len-multiple 7"):
        lengths.check_and_announce_limit(task, lengths.Limit(24, "--synth-max-length"))
    lengths.make_task_cut_sources(task, 24)
    assert flags.max_source_positions == 24


# RoBERTa does not offer flags that prune heads. Its --layernorm-embedding is always on.
NOT_OFFERED_BY_ENCODERS = {
    "mha_reg_scale_factor",
    "ffn_reg_scale_factor",
    "mha_heads_to_keep",
    "ffn_blocks_to_remove",
    "layernorm_embedding",
}


def list_flags(arch):
    """Returns the names of the flags of a model."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    return {action.dest for action in parser._actions if action.dest != "help"}


@pytest.mark.parametrize(
    "kind, fairseqs_model, not_offered",
    [
        ("translation", "transformer", set()),
        ("language_model", "transformer_lm", set()),
        ("encoder", "roberta", NOT_OFFERED_BY_ENCODERS),
    ],
)
def test_a_model_has_the_flags_of_fairseqs_model(kind, fairseqs_model, not_offered):
    missing = list_flags(fairseqs_model) - list_flags(ARCHS[kind])
    assert missing <= not_offered


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_flags_of_its_own_stacks_alone(kind, side):
    flags = list_flags(ARCHS[kind])
    has_stack = side in SIDES[kind]
    assert any(flag.startswith(side) for flag in flags) == has_stack
    assert (f"{side}_synthesizer" in flags) == has_stack


def test_flags_reach_fairseqs_config():
    flags = dict(encoder_ffn_embed_dim=77, decoder_layers=3, quant_noise_scalar=0.5, max_target_positions=99)
    cfg = make_model(**flags).cfg
    assert isinstance(cfg, TransformerConfig)
    assert cfg.encoder.ffn_embed_dim == 77
    assert cfg.decoder.layers == 3
    assert cfg.quant_noise.scalar == 0.5
    assert cfg.max_target_positions == 99
    assert cfg.decoder.output_dim == cfg.decoder.embed_dim


def register_documented_function(name):
    """Registers the function with this name that docs/add-a-function.md has as an example."""
    page = (ROOT / "docs" / "add-a-function.md").read_text()
    code = re.search(rf'```python\n(@register_synthesizer\("{name}"\).*?)```', page, re.S)[1]
    exec(code, dict(vars(synthesizers)))


def read_documented_equation():
    """Returns the equations of the examples of docs/add-a-function.md as a function like `reference.score`."""
    page = (ROOT / "docs" / "add-a-function.md").read_text()
    body = textwrap.dedent(re.search(r"```python\n( +if name == .*?)```", page, re.S)[1])
    namespace = dict(vars(reference))
    exec(f"def equation(name, p, h, i, j, x):\n{textwrap.indent(body, '    ')}", namespace)
    return namespace["equation"]


def make_documented_function(name):
    """Returns an example of docs/add-a-function.md, and a mixture of it and dense, for two heads of width 3."""
    register_documented_function(name)
    mixture = synthesizers.Mixture((name, "dense"), "convex", num_heads=2, head_dim=3, max_length=12, rank=2)
    mixture.reset_parameters()
    function = mixture.components[name]
    for parameter in function.parameters():
        torch.nn.init.normal_(parameter)
    return function, mixture


@pytest.mark.parametrize("name", ["locality", "pointer"])
def test_an_example_of_a_function_equals_its_equation(restore_registry, name):
    """The logits are those of four words that follow on three others, in a sentence of nine.

    So they have the rows 3 to 6 and the columns 0 to 8.
    """
    words = 4
    start = 3
    length = 9
    heads = 2
    head_dim = 3
    function, _ = make_documented_function(name)
    x = torch.randn(words, 1, heads * head_dim)
    terms = function(Inputs(x, q=None, k=None, start=start, src_len=length))
    # Logits that are the same for all rows or heads have the size 1 in this dimension.
    logits = Logits(terms).total(length).expand(1, heads, words, length)
    equation = read_documented_equation()
    parameters = {**function.state_dict(), **dict(function.named_buffers())}
    for head in range(heads):
        columns_of_head = slice(head_dim * head, head_dim * (head + 1))
        # {row: the features of its word}. For row i and any column j, the equations read only the features of row i.
        features = {start + word: x[word, 0, columns_of_head] for word in range(words)}
        for word in range(words):
            for column in range(length):
                expected = equation(name=name, p=parameters, h=head, i=start + word, j=column, x=features)
                assert logits[0, head, word, column].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["locality", "pointer"])
def test_an_example_of_a_function_can_be_mixed_and_scaled(restore_registry, name):
    function, mixture = make_documented_function(name)
    inputs = Inputs(torch.randn(4, 1, 6), q=None, k=None, start=3, src_len=9)
    (logits,) = mixture(inputs)
    number_of_terms_of_dense = 2
    assert len(logits.terms()) == len(function(inputs)) + number_of_terms_of_dense
    function.zero_logits_()
    assert torch.count_nonzero(Logits(function(inputs)).total(9)) == 0


def test_the_example_of_an_attention_without_fairseqs_models_does_what_it_says():
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "setup.md").read_text(), re.S)
    (code,) = [example for example in examples if "SyntheticAttention" in example]
    variables = {}
    exec(code, variables)
    assert variables["y"].shape == (20, 4, 512)
    weights = variables["weights"]
    assert weights.shape == (4, 20, 20)
    assert torch.count_nonzero(weights.triu(1)) == 0  # the causal mask


class Cosine(synthesizers.Synthesizer):
    """A function that the paper does not have. It reads queries and keys, and has weights of its own."""

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
        query = torch.nn.functional.normalize(inputs.q, dim=-1)
        key = torch.nn.functional.normalize(inputs.k, dim=-1)
        return [Product(query * self.scale, key)]


@pytest.mark.parametrize("spec", ["cosine", "cosine+random", "distance+random", "distance+vanilla"])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
def test_a_model_with_a_new_function_loads_its_checkpoint(restore_registry, spec, mixture):
    """One of the new functions has no weights, and the other one reads queries and keys."""
    synthesizers.register_synthesizer("distance")(Distance)
    synthesizers.register_synthesizer("cosine")(Cosine)
    model = make_synth(spec, synth_mixture=mixture)
    loaded = make_synth(spec, synth_mixture=mixture, seed=9)
    loaded.load_state_dict(model.state_dict())
    assert_same_output(loaded, model)


# ---- models of the paper's denoising


def count_parameters_of_denoiser(arch):
    """Returns the number of parameters of an architecture for denoising."""
    args = argparse.Namespace(arch=arch, dropout=0.1, weight_softmax=True)
    for _ in range(3):  # as fairseq does when it parses, builds and loads
        ARCH_CONFIG_REGISTRY[arch](args)
    args.max_source_positions = 1024
    args.max_target_positions = 1024
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, make_task(words=40, tokens_per_sample=24))
    return count_parameters(model)


def test_the_wide_transformer_has_as_many_parameters_as_random_and_vanilla():
    """Fairseq's Transformer without the additional width has fewer."""
    random_vanilla = count_parameters_of_denoiser("transformer_synth_random_vanilla_t5_tiny")
    wide_transformer = count_parameters_of_denoiser("transformer_plus_t5_tiny")
    transformer = count_parameters_of_denoiser("transformer_t5_tiny")
    assert abs(wide_transformer / random_vanilla - 1) < 0.001
    assert transformer < 0.8 * random_vanilla


@pytest.mark.parametrize(
    "arch", ["transformer_synth_random_t5_base", "dynamicconv_t5_base", "lightconv_t5_base", "transformer_t5_base"]
)
def test_models_for_denoising_have_the_papers_sizes(arch):
    args = argparse.Namespace(arch=arch)
    ARCH_CONFIG_REGISTRY[arch](args)
    assert args.encoder_layers == 12
    assert args.decoder_layers == 12
    assert args.encoder_embed_dim == 768
    assert args.encoder_ffn_embed_dim == 3072
    assert args.encoder_attention_heads == 12
    assert args.synth_max_length == 512
    assert args.share_all_embeddings
    assert args.decoder_normalize_before


def test_fairseqs_transformer_for_denoising_has_no_kind_of_convolution():
    args = argparse.Namespace(arch="transformer_t5_base")
    ARCH_CONFIG_REGISTRY["transformer_t5_base"](args)
    assert args.arch == "transformer_t5_base"
    assert not hasattr(args, "encoder_conv_type")

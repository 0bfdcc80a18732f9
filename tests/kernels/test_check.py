"""The kernels compare themselves with the definition, and are switched off if they are wrong.

Triton's interpreter runs the kernels. A wrong compiler is simulated by a change of what a launch has written.
"""

import logging

import pytest
import torch
from helpers import make_attention, padding_mask

from fairseq_synth.computations import kernels
from fairseq_synth.masks import causal_mask

pytestmark = [
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]


interpreted = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def switch_on_kernels(monkeypatch, skip_unless_chosen):
    """Switches the kernels on, which the interpreter runs; no call has been compared yet."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "SWITCH", "1")
    monkeypatch.setattr(kernels, "CHECKED", set())
    kernels.find_plan.cache_clear()
    kernels.device_fits.cache_clear()


@pytest.fixture
def comparisons(monkeypatch):
    """Returns the list of the results of all comparisons, which grows during the test."""
    results = []
    original_compare = kernels.compare

    def compare_and_record(call, compute):
        comparison = original_compare(call, compute)
        results.append(comparison)
        return comparison

    monkeypatch.setattr(kernels, "compare", compare_and_record)
    return results


def plant_error(monkeypatch, kernel_name, change):
    """Makes a kernel wrong: `change` is called with the `PassTensors` of the kernel after each of its launches."""
    original_run = kernels.run

    def run_wrongly(launch, tensors):
        original_run(launch, tensors)
        if launch.kernel.__name__ == kernel_name:
            change(tensors)

    monkeypatch.setattr(kernels, "run", run_wrongly)


def change_output(tensors):
    """Makes the output larger by a tenth."""
    tensors.out.mul_(1.1)


def change_values_gradient(tensors):
    """Overwrites the gradient of the last feature of each value."""
    tensors.gradients.packed[..., -1] = 0.5


def change_matrix_gradient(tensors):
    """Halves the gradient of the matrix R."""
    tensors.gradients.matrix.mul_(0.5)


def change_weights_gradient(tensors):
    """Changes the sign of the gradient of the weights of the mixture."""
    tensors.gradients.weights.neg_()


def write_no_number(tensors):
    """Overwrites a part of the output with NaN."""
    tensors.out[0, 0] = float("nan")


def compute_results(spec="random+vanilla", dtype=torch.float32, dropout=0.0, is_causal=False, length=6):
    """Returns the output of an attention in training, and the gradients of its input and parameters, as a list.

    Args:
        spec: the functions.
        dtype: the type of all tensors.
        dropout: the probability with which weights are dropped.
        is_causal: whether the mask is the causal one; otherwise two tokens of the second sentence are padding.
        length: the number of tokens of each of two sentences.
    """
    module = make_attention(spec, dropout=dropout).to(dtype).train()
    x = torch.linspace(-1, 1, length * 2 * 6).sin().view(length, 2, 6).to(dtype).requires_grad_()
    if is_causal:
        out, _ = module(x, key_padding_mask=None, attn_mask=causal_mask(x))
    else:
        padding = padding_mask([length, length - 2])
        out, _ = module(x, key_padding_mask=padding, attn_mask=None)
        out = out.masked_fill(padding.t().unsqueeze(-1), 0.0)  # at padding any output is right
    out.square().sum().backward()
    gradients_of_parameters = [parameter.grad for parameter in module.parameters()]
    return [out.detach(), x.grad, *gradients_of_parameters]


def list_warnings(caplog):
    """Returns the messages of all warnings that were logged."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def check_that_the_definition_is_used(results, monkeypatch, **call):
    """Checks that the kernels are switched off, and that results of `compute_results` are those without kernels.

    The comparison has switched them off: it has assigned "0" to `kernels.SWITCH`. The fixture `switch_on_kernels` has
    set it to "1" before by `monkeypatch`, which restores the value from before the fixture when the test ends.

    Args:
        results: what `compute_results` has returned.
        monkeypatch: pytest's fixture.
        call: the arguments with which `compute_results` was called.
    """
    assert kernels.SWITCH == "0"
    # This says that the next call is without kernels. The value is the same as before.
    monkeypatch.setattr(kernels, "SWITCH", "0")
    expected_results = compute_results(**call)
    for result, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(result, expected)


@interpreted
@pytest.mark.parametrize(
    "kernel_name, change, message",
    [
        ("forward_short", change_output, "the error of the output is 0.1, but at most "),
        ("forward_short", write_no_number, "the error of the output is nan, but at most "),
        ("backward_short", change_values_gradient, "the error of the gradient of tensor 0 (value, query, key) is "),
        ("add", change_matrix_gradient, "(bias) is "),
        ("add", change_weights_gradient, "(weight) is "),
    ],
    ids=["output", "no_number", "values", "matrix", "weight"],
)
def test_wrong_kernels_are_switched_off(kernel_name, change, message, monkeypatch, caplog):
    """One line says what is wrong; the result, then and later, is the definition's."""
    plant_error(monkeypatch, kernel_name, change)
    results = compute_results()
    (line,) = list_warnings(caplog)
    start = "FAIRSEQ_SYNTH_KERNELS: the kernels are switched off, because they are wrong on this machine: "
    assert line.startswith(start + "Product + Bias in float32, 2 sentences of 6 tokens, 2 heads of width 3: the ")
    assert message in line
    check_that_the_definition_is_used(results, monkeypatch)


@interpreted
def test_a_wrong_kernel_for_long_sentences_is_switched_off(monkeypatch, caplog):
    """The warning names the wrong gradient, and the result is the definition's."""
    monkeypatch.setattr("fairseq_synth.computations.kernels.launches.Layout.is_short", lambda _: False)
    plant_error(monkeypatch, "backward_columns", change_values_gradient)
    results = compute_results(is_causal=True)
    (line,) = list_warnings(caplog)
    assert "the error of the gradient of tensor 0 (value, query, key) is " in line
    check_that_the_definition_is_used(results, monkeypatch, is_causal=True)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spec", ["random", "dense+vanilla", "factorized_dense+vanilla", "relative_random"])
def test_right_kernels_stay_on(spec, dtype, comparisons, caplog):
    """They stay on in half precision, too, whose rounding is no error."""
    compute_results(spec, dtype, is_causal=False)
    compute_results(spec, dtype, is_causal=True)
    assert len(comparisons) == 2
    for comparison in comparisons:
        assert comparison.is_finite
        assert comparison.difference == ""
    assert kernels.SWITCH == "1"
    assert list_warnings(caplog) == []


@interpreted
def test_a_kind_of_call_is_compared_once(comparisons):
    """Other sizes of a batch are of the same kind; causal calls, dropout and evaluation are not."""
    compute_results()
    compute_results(length=7)
    assert len(comparisons) == 1
    compute_results(is_causal=True)
    compute_results(dropout=0.5)
    with torch.no_grad():
        module = make_attention("random+vanilla").eval()
        module(torch.randn(6, 2, 6))
    assert len(comparisons) == 4
    compute_results(spec="random")
    assert len(comparisons) == 5
    # all of these kinds have been compared
    compute_results()
    compute_results(is_causal=True)
    compute_results(dropout=0.5)
    compute_results(spec="random")
    assert len(comparisons) == 5


@interpreted
def test_an_error_with_dropout_is_seen(monkeypatch, caplog):
    """With dropout, the comparison runs the kernels that are compiled for dropout, with a probability of 0.

    A compiler that is wrong only for these kernels is simulated, and a warning says that they are wrong.
    """
    changed_outputs = []

    def change_output_with_dropout(tensors):
        assert tensors.seed is not None  # only the kernel with dropout reads a seed
        change_output(tensors)
        changed_outputs.append(tensors.out)

    plant_error(monkeypatch, "forward_short", change_output_with_dropout)
    compute_results(dropout=0.4)
    assert changed_outputs
    assert len(list_warnings(caplog)) == 1


@interpreted
def test_random_numbers_are_the_same_after_a_comparison(comparisons):
    """The first call is compared and the second is not; both drop the same weights, and draw as many numbers."""
    torch.manual_seed(3)
    results_with_comparison = compute_results(dropout=0.4)
    state_after_comparison = torch.get_rng_state()
    torch.manual_seed(3)
    results_without_comparison = compute_results(dropout=0.4)
    assert len(comparisons) == 1
    assert torch.equal(state_after_comparison, torch.get_rng_state())
    for with_comparison, without_comparison in zip(results_with_comparison, results_without_comparison):
        assert torch.equal(with_comparison, without_comparison)


@interpreted
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_first_call_may_be_checkpointed(use_reentrant, is_wrong, comparisons, monkeypatch):
    """The output and the gradients are those of the definition without checkpoints, even if the kernels are wrong.

    Activation checkpointing counts the tensors that are saved, or computes again in the backward pass. The comparison
    in the first call must not disturb it.
    """
    if is_wrong:
        plant_error(monkeypatch, "forward_short", change_output)

    def compute_output_and_gradients(has_checkpoints):
        module = make_attention("random+vanilla").train()

        def compute_output(x):
            out, _ = module(x)
            return out

        x = torch.linspace(-1, 1, 36).view(3, 2, 6).requires_grad_()
        if has_checkpoints:
            out = torch.utils.checkpoint.checkpoint(compute_output, x, use_reentrant=use_reentrant)
        else:
            out = compute_output(x)
        out.square().sum().backward()
        gradients_of_parameters = [parameter.grad for parameter in module.parameters()]
        return [out.detach(), x.grad, *gradients_of_parameters]

    results = compute_output_and_gradients(has_checkpoints=True)
    monkeypatch.setattr(kernels, "SWITCH", "0")  # from here on, the definition computes
    expected_results = compute_output_and_gradients(has_checkpoints=False)
    for result, expected in zip(results, expected_results):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    # Wrong kernels are switched off by the first comparison, so that no later pass is compared.
    expected_number_of_comparisons = 1
    if use_reentrant and not is_wrong:
        # The first pass records no gradients, and is another kind of call than the pass that is computed again.
        expected_number_of_comparisons = 2
    assert len(comparisons) == expected_number_of_comparisons


@interpreted
def test_a_comparison_with_infinite_results_is_repeated_in_the_next_call(comparisons, caplog):
    """A loss that overflows says nothing about the kernels. They stay on, and the next call of the kind is compared."""
    module = make_attention("random+vanilla").train()
    x = torch.randn(6, 2, 6)
    x_with_infinity = x.clone()
    x_with_infinity[0, 0, 0] = float("inf")

    # The first call is compared, but the results of the definition are not finite.
    module(x_with_infinity)
    assert [comparison.is_finite for comparison in comparisons] == [False]
    assert not kernels.CHECKED  # no kind of call counts as compared
    assert kernels.SWITCH == "1"  # the kernels are still on
    assert list_warnings(caplog) == []

    # The second call is compared, too, and has finite results. The third one is not compared again.
    module(x)
    module(x)
    assert [comparison.is_finite for comparison in comparisons] == [False, True]


@interpreted
def test_a_part_of_a_large_batch_is_compared(monkeypatch, caplog):
    """If a batch has too many weights, only some sentences are compared, evenly from the first one to the last one.

    The kernels compute all sentences. Here the limit is the number of weights of three sentences. So the first one, one
    in the middle and the last one are compared, and an error in the last one is seen.
    """
    length = 6
    sentences = 8
    heads = 2
    features = 6
    weights_of_a_sentence = heads * length * length
    monkeypatch.setattr("fairseq_synth.computations.kernels.check.MAX_WEIGHTS", 3 * weights_of_a_sentence)

    def change_last_sentence(tensors):
        output = tensors.out.view(length, sentences, features)  # a view, by which the output itself is changed
        output[:, -1] = 0.0

    plant_error(monkeypatch, "forward_short", change_last_sentence)
    module = make_attention("random+vanilla")
    module(torch.randn(length, sentences, features))
    assert len(list_warnings(caplog)) == 1


def test_refusals_are_logged_once(caplog):
    """A user who has switched the kernels on wants to know what they do not take."""
    kernels.log_refusal.cache_clear()
    caplog.set_level(logging.INFO)
    module = make_attention("vanilla")
    x = torch.randn(6, 2, 6)
    module(x)
    module(x)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    start = "FAIRSEQ_SYNTH_KERNELS: some attention is computed without the kernels: "
    assert messages == [start + "there is only an inner product, which torch's fused attention computes"]

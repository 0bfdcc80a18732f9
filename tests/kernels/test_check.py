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
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]


interpreted = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def unchecked(monkeypatch, chosen):
    """Switches the kernels on, which the interpreter runs; no call has been compared yet."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "SWITCH", "1")
    monkeypatch.setattr(kernels, "CHECKED", set())
    kernels.find_plan.cache_clear()
    kernels.device_fits.cache_clear()


@pytest.fixture
def compared(monkeypatch):
    """The results of all comparisons so far."""
    comparisons = []
    compare = kernels.compare

    def note(call, compute):
        comparisons.append(compare(call, compute))
        return comparisons[-1]

    monkeypatch.setattr(kernels, "compare", note)
    return comparisons


def plant_error(monkeypatch, kernel, change):
    """Makes a kernel wrong: `change` is called with its tensors after each launch."""
    run = kernels.run

    def run_wrongly(launch, tensors):
        run(launch, tensors)
        if launch.kernel.__name__ == kernel:
            change(tensors)

    monkeypatch.setattr(kernels, "run", run_wrongly)


def attend(spec="random+vanilla", dtype=torch.float32, dropout=0.0, padded=True, length=6):
    """Returns the output of an attention in training, and the gradients of its input and parameters."""
    module = make_attention(spec, dropout=dropout).to(dtype).train()
    x = torch.linspace(-1, 1, length * 2 * 6).sin().view(length, 2, 6).to(dtype).requires_grad_()
    mask = padding_mask([length, length - 2]) if padded else None
    attn_mask = None if padded else causal_mask(x)
    out, _ = module(x, key_padding_mask=mask, attn_mask=attn_mask)
    if padded:
        out = out.masked_fill(mask.t().unsqueeze(-1), 0.0)  # at padding any output is right
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def check_that_the_definition_is_used(results, monkeypatch, **call):
    assert kernels.SWITCH == "0"
    monkeypatch.setattr(kernels, "SWITCH", "0")
    for found, expected in zip(results, attend(**call)):
        torch.testing.assert_close(found, expected)


def change_output(tensors):
    tensors.out.mul_(1.1)


def change_values_gradient(tensors):
    tensors.gradients.value[..., -1] = 0.5  # a feature of a value


def change_matrix_gradient(tensors):
    tensors.totals.matrix.mul_(0.5)


def change_weights_gradient(tensors):
    tensors.totals.weights.neg_()


def write_no_number(tensors):
    tensors.out[0, 0] = float("nan")


@interpreted
@pytest.mark.parametrize(
    "kernel, change, wrong",
    [
        ("forward_short", change_output, "the output errs by 0.1, where "),
        ("forward_short", write_no_number, "the output errs by nan, where "),
        ("backward_short", change_values_gradient, "the gradient of tensor 0 (value, query, key) errs by "),
        ("add", change_matrix_gradient, "(bias) errs by "),
        ("add", change_weights_gradient, "(weight) errs by "),
    ],
    ids=["output", "no_number", "values", "matrix", "weight"],
)
def test_wrong_kernels_are_switched_off(kernel, change, wrong, monkeypatch, caplog):
    """One line says what is wrong; the result, then and later, is the definition's."""
    plant_error(monkeypatch, kernel, change)
    results = attend()
    (line,) = warnings(caplog)
    start = "FAIRSEQ_SYNTH_KERNELS: the kernels are switched off, because they are wrong on this machine: "
    assert line.startswith(start + "Product + Bias in float32, 2 sentences of 6 tokens, 2 heads of width 3: the ")
    assert wrong in line
    check_that_the_definition_is_used(results, monkeypatch)


@interpreted
def test_a_wrong_kernel_for_long_sentences_is_switched_off(monkeypatch, caplog):
    monkeypatch.setattr("fairseq_synth.computations.kernels.launches.Layout.is_short", lambda _: False)
    plant_error(monkeypatch, "backward_columns", change_values_gradient)
    results = attend(padded=False)
    (line,) = warnings(caplog)
    assert "the gradient of tensor 0 (value, query, key) errs by " in line
    check_that_the_definition_is_used(results, monkeypatch, padded=False)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spec", ["random", "dense+vanilla", "factorized_dense+vanilla", "relative_random"])
def test_right_kernels_stay_on(spec, dtype, compared, caplog):
    """Also in half precision, whose rounding is no error."""
    for padded in (True, False):
        attend(spec, dtype, padded=padded)
    assert len(compared) == 2 and all(found.is_finite and found.difference == "" for found in compared)
    assert kernels.SWITCH == "1" and warnings(caplog) == []


@interpreted
def test_a_kind_of_call_is_compared_once(compared):
    """Other sizes of a batch are of the same kind; causal calls, dropout and evaluation are not."""
    attend()
    attend(length=7)
    assert len(compared) == 1
    attend(padded=False)
    attend(dropout=0.5)
    with torch.no_grad():
        make_attention("random+vanilla").eval()(torch.randn(6, 2, 6))
    assert len(compared) == 4
    attend("random")
    assert len(compared) == 5
    for call in (dict(), dict(padded=False), dict(dropout=0.5), dict(spec="random")):
        attend(**call)
    assert len(compared) == 5


@interpreted
def test_an_error_with_dropout_is_seen(monkeypatch, caplog):
    """The compiled kernels are compared as they are, but for a probability of 0."""
    probabilities = []

    def change(tensors):
        assert tensors.tensors.seed is not None
        probabilities.append(True)
        change_output(tensors)

    plant_error(monkeypatch, "forward_short", change)
    attend(dropout=0.4)
    assert probabilities and len(warnings(caplog)) == 1


@interpreted
def test_random_numbers_are_the_same_after_a_comparison(compared):
    torch.manual_seed(3)
    first = attend(dropout=0.4)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    second = attend(dropout=0.4)
    assert len(compared) == 1 and torch.equal(state, torch.get_rng_state())
    for found, expected in zip(first, second):
        assert torch.equal(found, expected)


@interpreted
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_first_call_may_be_checkpointed(use_reentrant, is_wrong, compared, monkeypatch):
    """Activation checkpointing counts the tensors that are saved, or computes again in the backward pass."""
    if is_wrong:
        plant_error(monkeypatch, "forward_short", change_output)
    results = []
    for is_checkpointed in (True, False):
        module = make_attention("random+vanilla").train()
        x = torch.linspace(-1, 1, 36).view(3, 2, 6).requires_grad_()
        if is_checkpointed:
            out = torch.utils.checkpoint.checkpoint(lambda x, m=module: m(x)[0], x, use_reentrant=use_reentrant)
        else:
            monkeypatch.setattr(kernels, "SWITCH", "0")
            out, _ = module(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert len(compared) == (2 if use_reentrant and not is_wrong else 1)


@interpreted
def test_the_next_call_is_compared_where_the_definition_has_no_numbers(compared, caplog):
    """A loss that overflows says nothing about the kernels."""
    module, x = make_attention("random+vanilla").train(), torch.randn(6, 2, 6)
    broken = x.clone()
    broken[0, 0, 0] = float("inf")
    module(broken)
    assert [found.is_finite for found in compared] == [False]
    assert not kernels.CHECKED and kernels.SWITCH == "1" and warnings(caplog) == []
    module(x)
    module(x)
    assert [found.is_finite for found in compared] == [False, True]


@interpreted
def test_a_part_of_a_large_batch_is_compared(monkeypatch, caplog):
    """From the first sentence to the last; the kernels compute all of them."""
    check = "fairseq_synth.computations.kernels.check.MAX_WEIGHTS"
    monkeypatch.setattr(check, 3 * 2 * 6 * 6)  # of three sentences

    def change_last_sentence(tensors):
        tensors.out.view(6, 8, 6)[:, -1] = 0.0

    plant_error(monkeypatch, "forward_short", change_last_sentence)
    make_attention("random+vanilla")(torch.randn(6, 8, 6))
    assert len(warnings(caplog)) == 1


def test_refusals_are_logged_once(caplog):
    """As a user who has switched the kernels on wants to know what they do not take."""
    kernels.log_refusal.cache_clear()
    caplog.set_level(logging.INFO)
    module, x = make_attention("vanilla"), torch.randn(6, 2, 6)
    for _ in range(2):
        module(x)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    start = "FAIRSEQ_SYNTH_KERNELS: some attention is computed without the kernels: "
    assert said == [start + "an inner product alone, which torch's fused attention is for"]

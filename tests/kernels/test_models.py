"""Whole models give the same results with the kernels as without them, whatever a model is used for.

Triton's interpreter runs the kernels. By default a few cases run; ``--all`` runs every variant and every case, and
``--kernels`` every variant in every case.
"""

import copy

import pytest
import torch
from helpers import VARIANTS, compute_logits, make_synth, pad_batch

from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels.check import Comparison

pytestmark = [
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
GROUPS = "random:1/dense+vanilla:1"  # one head has random, and the other one has dense+vanilla
SPECS = [spec for spec in VARIANTS if spec != "vanilla"] + [GROUPS]
WITHOUT_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, encoder_layers=1, decoder_layers=1)
NOISE = dict(quant_noise_pq=0.5, quant_noise_pq_block_size=4)
SENTENCES = [[5, 6, 7, 8, 9, 2], [10, 11, 2]]


@pytest.fixture(autouse=True)
def use_interpreter(monkeypatch):
    """Runs the kernels on the CPU, without the plans of earlier tests."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "CHECKED", set())
    kernels.find_plan.cache_clear()
    kernels.device_fits.cache_clear()


def skip_comparison(monkeypatch):
    """Leaves out the comparison of each first call with the definition, which takes the interpreter as long again."""
    monkeypatch.setattr(kernels, "compare", lambda *_: Comparison(is_finite=True, difference=""))


def add_hooks(model):
    """Registers a hook on every projection of queries, keys and values, which then are computed one by one."""
    for module in model.modules():
        if isinstance(module, SyntheticAttention):
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                if projection is not None:
                    projection.register_forward_hook(lambda *_: None)


def compute_results(model, switch, with_gradients, monkeypatch):
    """Returns the logits of a copy of a model, and the gradients of its parameters by their names.

    Args:
        model: the model.
        switch: "1" to compute with the kernels, and "0" to compute without them.
        with_gradients: whether the model is differentiated; otherwise there are only logits.
        monkeypatch: pytest's fixture.
    """
    monkeypatch.setattr(kernels, "SWITCH", switch)
    torch.manual_seed(1)
    model = copy.deepcopy(model)  # quantisation noise changes the weights in each pass
    source = pad_batch(SENTENCES, left=True)
    target = pad_batch(SENTENCES, left=False)
    with torch.set_grad_enabled(with_gradients):
        logits, tokens = compute_logits(model, source, target)
    is_padding = (tokens == 1).unsqueeze(-1)
    logits = logits.masked_fill(is_padding, 0.0)  # the values at padding do not matter
    results = {"logits": logits.detach()}
    if with_gradients:
        logits.square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                results[name] = parameter.grad
    return results


def check_model(model, monkeypatch, with_gradients=True):
    """Checks that a model has the same results with and without the kernels, and that the kernels ran."""
    launches = []
    original_run = kernels.run

    def run_and_record(launch, tensors):
        launches.append(launch)
        original_run(launch, tensors)

    monkeypatch.setattr(kernels, "run", run_and_record)
    results = compute_results(model, "1", with_gradients, monkeypatch)
    assert launches
    launches.clear()
    expected = compute_results(model, "0", with_gradients, monkeypatch)
    assert not launches
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-4)  # its message has the name of the tensor


# What a model may be used for, or how it may be trained.
CASES = ["training", "evaluation", "quantisation_noise", "hooks", "generation", "checkpointing"]
# The interpreter takes long. These two read the projections in both ways, in training and in evaluation.
BY_DEFAULT = {("random+vanilla", "evaluation"), (GROUPS, "quantisation_noise")}
# With --all, these run in all cases. They have the kinds of terms that a case may change: projections and parameters.
IN_ALL_CASES = ("random+vanilla", GROUPS)


def make_model(case, spec, kind):
    """Returns a small model without dropout for a case.

    Args:
        case: one of CASES.
        spec: the functions of the heads of every layer.
        kind: the kind of the model, as for `helpers.make_synth`.
    """
    flags = dict(WITHOUT_DROPOUT)
    if case == "quantisation_noise":
        flags.update(NOISE)
    if case == "checkpointing":
        flags.update(checkpoint_activations=True)
    model = make_synth(spec, kind, **flags)
    is_trained = case not in ("evaluation", "generation")
    model.train(is_trained)
    if case == "hooks":
        add_hooks(model)
    if case == "generation":
        model.make_generation_fast_()
    return model


def is_chosen(spec, case):
    """Returns whether --all runs a variant in a case: training, and of the others another one than the spec before."""
    if spec in IN_ALL_CASES or case == "training":
        return True
    _training, *other_cases = CASES
    return case == other_cases[SPECS.index(spec) % len(other_cases)]


def translation_runs(spec, case, config):
    """Returns whether the test of translation runs for a variant in a case.

    - With --kernels it runs for every variant in every case.
    - With --all it runs where `is_chosen` says so.
    - Always, also without a flag, it runs for the pairs in `BY_DEFAULT`.

    Args:
        spec: the variant.
        case: one of `CASES`.
        config: pytest's configuration, with its flags.
    """
    if config.getoption("--kernels"):
        return True
    if config.getoption("--all") and is_chosen(spec, case):
        return True
    return (spec, case) in BY_DEFAULT


def other_model_runs(spec, kind, case, config):
    """Returns whether the test of other models than those of translation runs for a variant and a kind in a case.

    - With --kernels it runs for every variant and kind in every case.
    - With --all it runs for `GROUPS`, in each case with one of the two kinds, as their attention is the same.
    - By default it does not run.

    Args:
        spec: the variant.
        kind: language_model or encoder.
        case: one of `CASES`.
        config: pytest's configuration, with its flags.
    """
    if config.getoption("--kernels"):
        return True
    cases_of_language_models = ("training", "quantisation_noise", "generation")
    has_language_model = case in cases_of_language_models
    is_language_model = kind == "language_model"
    return config.getoption("--all") and spec == GROUPS and has_language_model == is_language_model


def check_case(model, case, monkeypatch):
    """Checks that a model for a case has the same results with and without the kernels.

    In evaluation a model may be differentiated, too. So it is checked with gradients and without. In generation it
    cannot be differentiated.
    """
    if case == "generation":
        check_model(model, monkeypatch, with_gradients=False)
        return
    check_model(model, monkeypatch, with_gradients=True)
    if case == "evaluation":
        check_model(model, monkeypatch, with_gradients=False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", SPECS)
def test_translation_is_the_same_with_the_kernels(spec, case, request, monkeypatch):
    """The logits and the gradients are the same, in training and in evaluation."""
    if not translation_runs(spec, case, request.config):
        pytest.skip("takes long without a GPU: --kernels")
    # Training shows that the comparison with the definition in each first call changes no result. In the other cases,
    # and for most variants with --all, it is left out.
    is_compared = False
    if case == "training":
        is_compared = request.config.getoption("--kernels") or spec in IN_ALL_CASES
    if not is_compared:
        skip_comparison(monkeypatch)
    model = make_model(case, spec, "translation")
    check_case(model, case, monkeypatch)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["language_model", "encoder"])
@pytest.mark.parametrize("spec", ["random+vanilla", "factorized_dense", GROUPS])
def test_other_models_are_the_same_with_the_kernels(spec, kind, case, request, monkeypatch):
    """The logits and the gradients of language models and encoders are the same, in training and in evaluation."""
    if not other_model_runs(spec, kind, case, request.config):
        pytest.skip("takes long without a GPU: --kernels")
    skip_comparison(monkeypatch)
    model = make_model(case, spec, kind)
    check_case(model, case, monkeypatch)

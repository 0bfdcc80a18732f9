"""python -m fairseq_synth.convert: converted models against what the measurement predicts, on tiny models."""

import argparse
import re
import shlex
from collections import Counter

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

STOCK_SIZES = [flag for flag in SMALL if flag not in ("--synth-max-length", "24")]
ONE_STACK = "--optimizer adam --lr 0.01 --max-tokens 400 --num-workers 0 --no-progress-bar --seed 7 --max-update 1"


def sized(side):
    return (
        f"--{side}-layers 2 --{side}-embed-dim 16 --{side}-ffn-embed-dim 16 --{side}-attention-heads 2 "
        "--tokens-per-sample 32"
    ).split()


LM = ["--task", "language_modeling", *sized("decoder"), "--sample-break-mode", "none", "--criterion", "cross_entropy"]
MLM = ["--task", "masked_lm", *sized("encoder"), "--sample-break-mode", "eos", "--criterion", "masked_lm"]
PRE_NORM = ["--encoder-normalize-before", "--decoder-normalize-before"]
CASES = {  # a checkpoint: whether of one stack, and the flags of its training
    "post-norm": (False, ["--arch", "transformer_multi30k", *STOCK_SIZES]),
    "pre-norm": (False, ["--arch", "transformer_iwslt_de_en", *PRE_NORM, *STOCK_SIZES]),
    "of Hydra": (False, ["--arch", "transformer_multi30k", *STOCK_SIZES]),
    "of older fairseq": (False, ["--arch", "transformer_multi30k", *STOCK_SIZES]),
    "language model": (True, ["--arch", "transformer_lm", *LM]),
    "adaptive": (
        True,
        ["--arch", "transformer_lm", *LM[:-1], "adaptive_loss", "--ddp-backend", "legacy_ddp", "--add-bos-token"]
        + "--adaptive-input --adaptive-input-cutoff 8,16 --adaptive-softmax-cutoff 8,16".split(),
    ),
    "encoder": (True, ["--arch", "roberta", *MLM, "--max-positions", "40"]),
    "heads of two kinds": (
        False,
        ["--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, "--encoder-attention-heads", "4"]
        + ["--decoder-attention-heads", "4", "--encoder-synthesizer"]
        + ["vanilla,factorized_random:1/random+vanilla:2/dense:1"]
        + ["--decoder-synthesizer", "factorized_dense+vanilla:2/vanilla:2"],
    ),
    "mixed language model": (True, ["--arch", "transformer_lm_synth_random_vanilla_ptb", *LM]),
}


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch):
    """That attention is averaged over by default."""
    monkeypatch.setattr(arguments, "AVERAGED_SENTENCES", 60)


@pytest.fixture(scope="module")
def trained(make_once, data, monolingual):
    """Makes a checkpoint of a case, and returns it with its data: trained a little, or with weights far from even."""

    def make(case, folder, save):
        one, flags = CASES[case]
        updates = "160" if case == "post-norm" else "1"
        recipe = ONE_STACK.split() if one else [*RECIPE, "--max-update", updates]
        argv = [folder, *USER_DIR, *recipe, *flags, "--no-epoch-checkpoints", "--disable-validation"]
        run_cli(train.cli_main, *argv, "--save-dir", save)
        path = save / "checkpoint_last.pt"
        state = torch.load(path, weights_only=False)
        torch.manual_seed(0)  # of whatever test asks for it first
        for key, weight in state["model"].items():
            if "self_attn" in key and weight.is_floating_point() and updates == "1":
                weight.add_(0.5 * torch.randn(weight.shape))
        if case == "of Hydra":
            state["cfg"]["model"] = vars(state["cfg"]["model"])
        if case == "of older fairseq":
            state.update(args=state["cfg"]["model"], cfg=None)
        torch.save(state, path)

    def made(case):
        folder = monolingual if CASES[case][0] else data / "bin"
        save = make_once(f"trained-{case.replace(' ', '-')}", lambda save: make(case, folder, save))
        return save / "checkpoint_last.pt", folder

    return made


def run(path, folder, out, *flags):
    """Converts; returns the five lines."""
    printed, _ = run_cli(lambda: main([str(x) for x in (path, "--data", folder, "--out", out, *flags)]))
    return printed.splitlines()


def loss_of(path, folder):
    loaded = checkpoints.load(path, folder)
    return loss(loaded, checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid")))


def predictor(path, folder, function, cfg):
    """What gives the loss with some heads' logits replaced, by the hooks of the measurement; l and k are a config's."""
    loaded = checkpoints.load(path, folder)
    average, length = words.average(loaded, "train", arguments.AVERAGED_SENTENCES), cfg["synth_max_length"]
    logits = {}
    for name, constants in average.constants.items():
        parameters = words.function_parameters(function, constants, length, cfg["synth_rank"])
        logits[name] = words.function_logits(function, parameters, length)
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid"))

    def predicted(heads):
        with hooks.replaced_heads(loaded.model, logits, heads):
            return loss(loaded, sample)

    return predicted


def replaceable(path, folder):
    heads = []
    for attention in self_attentions(checkpoints.load(path, folder).model):
        heads += dot_product_heads(attention)
    return heads


@pytest.mark.parametrize(
    "case, function",
    [("post-norm", function) for function in POSITION_FUNCTIONS]
    + [(case, POSITION_FUNCTIONS[i % 3]) for i, case in enumerate(CASES) if i],
)
def test_the_loss_is_what_the_measurement_predicts(case, function, trained, tmp_path):
    path, folder = trained(case)
    out, heads = tmp_path / "new.pt", replaceable(path, folder)
    stacks = {name.split(".")[0] for name, _ in heads}
    flags = [part for stack in stacks for part in (f"--{stack}", function)]
    lines = run(path, folder, out, *flags, "--rank", "3")
    cfg = torch.load(out, weights_only=False)["cfg"]["model"]
    expected = predictor(path, folder, function, cfg)(heads)
    assert loss_of(out, folder) == pytest.approx(expected, abs=1e-5)
    assert abs(expected - loss_of(path, folder)) > 1e-4  # or nothing would be seen
    assert cfg["synth_rank"] == 3 or "_synth_" in CASES[case][1][1]  # a Synthesizer keeps its own
    assert len(lines) == 5 and lines[0].endswith(f"({path})")
    assert lines[1].startswith(f"loss, converted: {expected:.4f} bits") and lines[1].endswith(f"({out})")


# ---- averages by position


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_constants_are_found_again(causal, tied):
    """Weights that depend on positions alone, of sentences of several lengths: nothing is lost."""
    S = positional.toeplitz(2 * torch.randn(2, 17), 9) if tied else 2 * torch.randn(2, 9, 9)
    seen = positional.MeanByPosition()
    for length in (3, 9, 5, 7, 5, 2, 1, 8, 9):
        seen.add(measure.sentence_weights(S[:, :length, :length], causal))
    constants = positional.fit_constants(seen, causal)
    expected = measure.sentence_weights(S, causal)
    assert torch.allclose(measure.sentence_weights(constants.by_position, causal), expected, atol=1e-3)
    if causal:  # what lies behind is 0, for the matrix of a rank that comes nearest
        assert not constants.by_position.triu(1).any() and not constants.by_distance[:, 9:].any()
    by_distance = measure.sentence_weights(positional.toeplitz(constants.by_distance, 9), causal)
    assert torch.allclose(by_distance, expected, atol=1e-3) == tied


def test_a_weight_that_is_always_0():
    """Its logit is finite: a parameter of -inf could not be trained."""
    seen = positional.MeanByPosition()
    seen.add(torch.eye(4).expand(2, 4, 4))
    constants = positional.fit_constants(seen, False)
    assert all(values.isfinite().all() for values in constants)
    assert torch.allclose(measure.sentence_weights(constants.matrix(4), False), torch.eye(4), atol=1e-5)


def test_positions_that_no_sentence_had():
    """Beyond the longest sentence seen the values are by distance, in rows that were seen too."""
    S = positional.toeplitz(2 * torch.randn(2, 13), 7)
    seen = positional.MeanByPosition()
    for length in (4, 4, 3):
        seen.add(measure.sentence_weights(S[:, :length, :length], False))
    weights = measure.sentence_weights(positional.fit_constants(seen, False).matrix(7), False)
    S = positional.toeplitz(S[:, 3, :7], 7)  # distances of more than 3 are as those of 3
    assert torch.allclose(weights, measure.sentence_weights(S, False), atol=1e-3)


def test_parameters_give_the_constants():
    """By distance and by position as they are, at lengths seen and beyond; of a rank, the best approximation."""
    constants = positional.Constants(torch.randn(2, 5, 5), torch.randn(2, 9))
    for length in (3, 5, 8):
        R = constants.matrix(length)
        r = words.function_parameters("relative_random", constants, length, 0)["r"]
        assert r.shape == (2, 2 * length + 1)
        distance = torch.arange(-length, length + 1)
        assert torch.equal(r, constants.by_distance[:, distance.clamp(-4, 4) + 4])
        assert torch.equal(words.function_parameters("random", constants, length, 0)["R"], R)
        factors = words.function_parameters("factorized_random", constants, length, 2)
        assert factors["R1"].shape == factors["R2"].shape == (2, length, 2)
        error = (words.function_logits("factorized_random", factors, length) - R).norm(dim=(1, 2))
        assert torch.allclose(error, torch.linalg.svdvals(R)[:, 2:].norm(dim=1), atol=1e-4)  # Eckart and Young


# ---- some heads


def test_heads_within(trained, tmp_path):
    """The cheapest heads whose loss stays within the bits; layers with some of them have heads of two kinds."""
    path, folder = trained("post-norm")
    predicted = predictor(path, folder, "random", {"synth_max_length": 13, "synth_rank": 8})
    whole = predicted([])
    order = sorted(replaceable(path, folder), key=lambda head: predicted([head]))
    losses = [predicted(order[:n]) - whole for n in range(1, len(order) + 1)]
    halves = [1 in Counter(layer for layer, _ in order[:n]).values() for n in range(8)]
    count = next(n for n in range(1, 8) if losses[n] > max(*losses[:n], 0) and halves[n])
    bits = (max(*losses[:count], 0) + losses[count]) / 2
    lines = run(path, folder, tmp_path / "new.pt", "--heads-within", bits)
    new = checkpoints.load(tmp_path / "new.pt", folder)
    assert lines[0].startswith(f"loss: {whole:.4f} bits") and f"bits, {losses[count - 1]:+.4f} (" in lines[1]
    assert loss_of(tmp_path / "new.pt", folder) - whole == pytest.approx(losses[count - 1], abs=1e-5)
    specs = [attention.head_groups() for attention in self_attentions(new.model)]
    assert sum(group.num_heads for groups in specs for group in groups if group.functions == ("random",)) == count
    assert [HeadGroup(("random",), 1), HeadGroup(("vanilla",), 1)] in specs and "are random" in lines[2]
    assert sum(map(int, re.findall(r"(\d+) of the", lines[2]))) == count
    sizes = [sum(p.numel() for p in model.parameters()) for model in (checkpoints.load(path, folder).model, new.model)]
    assert lines[3] == f"parameters: {sizes[0]:,} before, {sizes[1]:,} after"


@pytest.mark.parametrize(
    "case, heads, encoder, decoder",
    [
        ("post-norm", [("encoder.self.1", 1)], "vanilla,random:1/vanilla:1", "vanilla"),
        (
            "heads of two kinds",
            [("encoder.self.1", 1), ("decoder.self.0", 3), ("decoder.self.0", 0)],
            "vanilla,factorized_random:1/random:1/random+vanilla:1/dense:1",
            "random:1/factorized_dense+vanilla:1/vanilla:1/random:1,factorized_dense+vanilla:2/vanilla:2",
        ),
    ],
)
def test_some_heads_of_a_layer(case, heads, encoder, decoder, trained, tmp_path, monkeypatch):
    """The others keep their functions, their weights, queries and keys, and the slice of the input that they see."""
    path, folder = trained(case)
    heads = [Head(*head) for head in heads]
    monkeypatch.setattr(
        command, "replace_cheapest_heads_first", lambda *_: iter([ReplacedHead(head, 0.0) for head in heads])
    )
    run(path, folder, tmp_path / "new.pt", "--heads-within", "1")
    cfg = torch.load(tmp_path / "new.pt", weights_only=False)["cfg"]["model"]
    assert (cfg["encoder_synthesizer"], cfg["decoder_synthesizer"]) == (encoder, decoder)
    expected = predictor(path, folder, "random", cfg)(heads)
    assert loss_of(tmp_path / "new.pt", folder) == pytest.approx(expected, abs=1e-5)


def test_the_sentences_that_are_read(trained, tmp_path):
    """Attention is averaged over sentences of ``--max-length`` alone, and the loss is of ``--sentences`` of those."""
    path, folder = trained("post-norm")
    lines = run(path, folder, tmp_path / "new.pt", "--max-length", "9", "--sentences", "4")
    loaded = checkpoints.load(path, folder)
    average = words.average(loaded, "train", 4, longest=9)
    assert (average.length, average.sentences) == (9, 4)  # the longest is one of them
    assert not average.constants["decoder.self.0"].by_position.triu(1).any()
    logits = {name: constants.matrix(9) for name, constants in average.constants.items()}
    order = checkpoints.readable(loaded, "valid", 4, longest=9)
    with hooks.replaced_heads(loaded.model, logits, replaceable(path, folder)):
        expected = loss(loaded, checkpoints.batches(loaded, "valid", order))
    assert len(order) == 3 and "on 3 sentences of valid" in lines[0] and f"loss, converted: {expected:.4f}" in lines[1]


def test_layers_and_functions(trained, tmp_path):
    """Only the layers asked for, each stack with its function; the others keep their weights bit by bit."""
    path, folder = trained("pre-norm")
    names = "encoder.self.1,decoder.self.0"
    flags = ["--layers", names, "--encoder", "relative_random", "--decoder", "random", "--max-length", "13"]
    run(path, folder, tmp_path / "new.pt", *flags)
    state = torch.load(tmp_path / "new.pt", weights_only=False)
    model = state["cfg"]["model"]
    assert model["encoder_synthesizer"] == "vanilla,relative_random"
    assert model["decoder_synthesizer"] == "random,vanilla" and model["synth_max_length"] == 13
    old = used_weights(torch.load(path, weights_only=False)["model"])
    changed = ("encoder.layers.1.self_attn.q", "encoder.layers.1.self_attn.k")
    changed += tuple(name.replace("encoder.layers.1", "decoder.layers.0") for name in changed)
    assert {key for key in old if key not in state["model"] and "version" not in key} == {
        f"{key}_proj.{part}" for key in changed for part in ("weight", "bias")
    }
    new = used_weights(state["model"])
    assert all(torch.equal(old[key], value) for key, value in new.items() if "synthesizer" not in key)
    assert state["last_optimizer_state"] is None and not {"best", "ema"} & set(state["extra_state"])
    assert (
        checkpoints.load(tmp_path / "new.pt", folder).build_initial_model() is None
    )  # it was not trained from scratch


@pytest.mark.parametrize(
    "task, model, asked, length",
    [
        ({}, {}, None, 9),
        ({}, {}, 7, 7),
        ({"tokens_per_sample": 32}, {}, None, 32),
        ({"tokens_per_sample": 32}, {"add_bos_token": True}, 12, 33),
        ({}, {"max_positions": 40}, 40, 40),
    ],
)
def test_length(task, model, asked, length):
    """As long as the data, if no other is asked for, and as the rows that the task makes of it."""
    cfg = argparse.Namespace(task=argparse.Namespace(**task), model=argparse.Namespace(**model))
    loaded = checkpoints.Loaded(None, cfg, None, None, None, None)
    assert choose_max_length(loaded, 9, asked) == length


def test_a_converted_model_is_used_as_any_other(trained, data, tmp_path):
    """It validates to the loss printed, generates, goes on training, and is tuned by the command printed."""
    path, folder = trained("post-norm")
    out = tmp_path / "new.pt"
    lines = run(path, folder, out, "--decoder", "vanilla")
    assert lines[2] == "heads: 4 of the encoder's 4 are random, 0 of the decoder's 4 are converted"
    reading = [folder, *USER_DIR, "--path", out, "--max-tokens", "500"]
    _, log = run_cli(validate.cli_main, *reading, "--task", "translation", "--valid-subset", "valid")
    validated, converted = re.search("nll_loss ([0-9.]+)", log)[1], re.search("converted: ([0-9.]+)", lines[1])[1]
    assert float(validated) == pytest.approx(float(converted), abs=6e-4)
    printed, _ = run_cli(generate.cli_main, *reading, "--gen-subset", "valid", "--beam", "2")
    assert len(re.findall(r"^H-", printed, re.M)) == 13
    tune = lines[4].split("to tune it: fairseq-train ")[1].replace('"$(python -m fairseq_synth)"', USER_DIR[1])
    tune = [*shlex.split(tune), "--max-update", "1", "--num-workers", "0", "--no-epoch-checkpoints"]
    run_cli(train.cli_main, *tune, "--save-dir", tmp_path / "tuned")
    started = torch.load(tmp_path / "tuned" / "checkpoint_last.pt", weights_only=False)
    assert started["model"].keys() == torch.load(out, weights_only=False)["model"].keys()
    assert started["cfg"]["task"]["left_pad_source"] and started["cfg"]["optimization"]["lr"] == [0.0033]
    at = tune.index("--finetune-from-model")
    resume = [*tune[:at], *tune[at + 2 :], "--restore-file", out, "--save-dir", tmp_path / "resumed"]
    run_cli(train.cli_main, *resume)
    assert (tmp_path / "resumed" / "checkpoint_last.pt").exists()


def test_the_command_printed_has_the_flags_of_the_training(trained, tmp_path):
    path, folder = trained("of Hydra")
    state = torch.load(path, weights_only=False)
    state["cfg"]["dataset"].update(max_tokens=None, batch_size=7)
    state["cfg"]["optimizer"]["adam_betas"] = [0.9, 0.98]
    state["cfg"]["optimization"].update(update_freq=[4], clip_norm=2.5)
    torch.save(state, tmp_path / "old.pt")
    tune = shlex.split(run(tmp_path / "old.pt", folder, tmp_path / "new.pt")[4])
    expected = {"--batch-size": "7", "--update-freq": "4", "--clip-norm": "2.5", "--adam-betas": "(0.9, 0.98)"}
    expected.update({"--lr": "0.0033", "--encoder-synthesizer": "random", "--label-smoothing": "0.1"})
    expected["--save-dir"] = "new-tuned"
    assert {flag: tune[tune.index(flag) + 1] for flag in expected} == expected
    assert "--max-tokens" not in tune and tune.count("--lr") == 1


# ---- bad input


def refused(path, folder, out, *flags):
    return get_error_line(lambda: main([str(x) for x in (path, "--data", folder, "--out", out, *flags)]))


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
def test_refuses_flags(flags, parts, trained, tmp_path):
    line = refused(*trained("post-norm"), tmp_path / "new.pt", *flags.split())
    assert all(part in line for part in parts), line
    assert not list(tmp_path.iterdir())


def test_refuses_checkpoints_and_places(trained, data, monolingual, tmp_path):
    path, folder = trained("post-norm")
    out = tmp_path / "new.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    assert "a TorchScript file" in refused(tmp_path / "script.pt", folder, out)
    state = torch.load(path, weights_only=False)
    state["cfg"]["model"] = argparse.Namespace(**{**vars(state["cfg"]["model"]), "_name": "transformer_align"})
    torch.save(state, tmp_path / "align.pt")
    assert "TransformerAlignModel cannot be converted" in refused(tmp_path / "align.pt", folder, out)
    state["cfg"]["model"].__dict__.update(_name="transformer_multi30k", cross_self_attention=True)
    torch.save(state, tmp_path / "cross.pt")
    assert "self-attention also reads the source" in refused(tmp_path / "cross.pt", folder, out)
    assert "no pair of languages" in refused(path, monolingual, out)
    assert "the model has no encoder" in refused(*trained("language model"), out, "--encoder", "random")
    assert "already has --synth-max-length 24" in refused(*trained("heads of two kinds"), out, "--max-length", "20")
    assert "its folder does not exist" in refused(path, folder, tmp_path / "none" / "new.pt")
    assert not out.exists()
    out.write_text("mine")
    assert "exists already; use --force" in refused(path, folder, out) and out.read_text() == "mine"
    run(path, folder, out, "--force", "--encoder", "vanilla")
    assert loss_of(out, folder) > 0


def test_refuses_weights_that_are_not_numbers(trained, tmp_path):
    path, folder = trained("post-norm")
    state = torch.load(path, weights_only=False)
    state["model"]["encoder.layers.0.fc1.bias"][0] = float("inf")
    torch.save(state, tmp_path / "diverged.pt")
    line = refused(tmp_path / "diverged.pt", folder, tmp_path / "new.pt")
    assert line.startswith(f"{tmp_path / 'diverged.pt'}: its weight encoder.layers.0.fc1.bias has values that are not")
    assert not (tmp_path / "new.pt").exists()


def test_refuses_bits_that_no_head_is_within(trained, tmp_path, monkeypatch):
    before = loss_of(*trained("post-norm"))
    losses = {Head("encoder.self.0", 0): before + 2, Head("encoder.self.0", 1): before + 0.75}
    monkeypatch.setattr(command, "losses_with_single_heads_replaced", lambda *_: losses)
    monkeypatch.setattr(
        command, "replace_cheapest_heads_first", lambda *_: iter([ReplacedHead(*cost) for cost in losses.items()])
    )
    line = refused(*trained("post-norm"), tmp_path / "new.pt", "--heads-within", "0.5")
    assert "each head costs at least 0.75 bits" in line


def test_refuses_quantised_projections(trained, tmp_path, monkeypatch):
    path, folder = trained("post-norm")

    def quantised(*args):
        loaded = checkpoints.load(*args)
        loaded.model.encoder.layers[0].self_attn.v_proj = torch.nn.Identity()
        return loaded

    monkeypatch.setattr(command, "load", quantised)
    assert "quantised" in refused(path, folder, tmp_path / "new.pt")

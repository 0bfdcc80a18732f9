"""The stock command lines with language models and encoders, on corpora of a few hundred short lines."""

import math
import random
import re
import sys

import omegaconf
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq_cli import eval_lm, generate, hydra_train, interactive, preprocess, train, validate
from helpers import RECIPE, ROOT, SMALL, USER_DIR, get_error_line, perturb, read_losses, run_cli
from omegaconf.errors import ConfigKeyError

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.errors import look_up
from fairseq_synth.inspect import checkpoints, hooks
from fairseq_synth.inspect.parts.heads import head_importance
from fairseq_synth.inspect.passes import loss

LENGTH = 16
LM_SIZE = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2".split()
ENCODER_SIZE = [flag.replace("decoder", "encoder") for flag in LM_SIZE]
COMMON = (
    "--optimizer adam --lr 0.01 --num-workers 0 --no-progress-bar --log-format json --log-interval 1 --seed 7".split()
)
SYNTH = ["--synth-max-length", str(LENGTH)]
LM = [
    "--task",
    "language_modeling",
    *LM_SIZE,
    "--tokens-per-sample",
    str(LENGTH),
    "--dropout",
    "0",
    "--batch-size",
    "16",
]
ENCODER = [*ENCODER_SIZE, "--batch-size", "32", "--dropout", "0", "--attention-dropout", "0", "--pooler-dropout", "0"]
MASKED = ["--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", str(LENGTH), *ENCODER]
LABELS = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--max-positions", str(LENGTH)]
LABELS += ["--init-token", "0", "--separator-token", "2", "--classification-head-name", "head", *ENCODER]
WORDS = 12
INTERPOLATION = "str interpolation" if omegaconf.__version__ < "2.1" else "Interpolation"  # its words for a reference


def lines(count, seed):
    """Lines of 1 to 9 words: each word tells the next one, counting on by 1, 2 or 3."""
    rng = random.Random(seed)
    for _ in range(count):
        first, step = rng.randrange(WORDS), rng.randint(1, 3)
        yield [f"w{(first + step * i) % WORDS}" for i in range(rng.randint(1, 9))], step


@pytest.fixture(scope="session")
def corpus(make_once):
    """lm: a text; labels: the step that a line counts in, as a class; numbers: the same as a number."""
    return make_once("tasks", make_corpus)


def make_corpus(folder):
    splits = {"train": 240, "valid": 40, "test": 20}
    for seed, (split, count) in enumerate(splits.items()):
        rows = [(line, step) for line, step in lines(count, seed) if split != "train" or len(line) > 0]
        (folder / f"{split}.text").write_text("".join(" ".join(line) + "\n" for line, _ in rows))
        (folder / f"{split}.class").write_text("".join(f"c{step}\n" for _, step in rows))
        (folder / "numbers" / "label").mkdir(parents=True, exist_ok=True)
        (folder / "numbers" / "label" / f"{split}.label").write_text("".join(f"{step / 2}\n" for _, step in rows))
    for name, target, dictionary in [
        ("text", "lm", None),
        ("text", "labels/input0", "lm/dict.txt"),
        ("class", "labels/label", None),
        ("text", "numbers/input0", "lm/dict.txt"),
    ]:
        argv = ["--only-source", "--destdir", folder / target]
        argv += [f"--{split}pref={folder}/{split}.{name}" for split in splits]
        run_cli(preprocess.cli_main, *argv, *(["--srcdict", folder / dictionary] if dictionary else []))


def fit(data, save, arch, *flags):
    size = SYNTH if "synth" in arch else []
    return run_cli(train.cli_main, data, *USER_DIR, "--arch", arch, "--save-dir", save, *COMMON, *size, *flags)[1]


@pytest.fixture(scope="session")
def language_model(corpus, make_once):
    flags = [*LM, "--max-epoch", "12", "--no-epoch-checkpoints", "--validate-interval", "6"]
    arch = "transformer_lm_synth_random_vanilla_ptb"
    return make_once("language_model", lambda save: fit(corpus / "lm", save, arch, *flags)) / "checkpoint_best.pt"


@pytest.fixture(scope="session")
def encoder(corpus, make_once):
    """Pre-trained as a masked language model."""

    def make(save):
        flags = [*MASKED, "--sample-break-mode", "eos", "--max-epoch", "4", "--no-epoch-checkpoints"]
        curve = read_losses(fit(corpus / "lm", save, "roberta_synth_random_vanilla_agnews", *flags))
        assert float(curve[max(curve)]) < float(curve[1]) - 0.5

    return make_once("encoder", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def classifier(corpus, encoder, make_once):
    """The encoder, fine-tuned to tell the class."""

    def make(save):
        flags = [*LABELS, "--num-classes", "3", "--max-epoch", "12", "--no-epoch-checkpoints"]
        flags += ["--restore-file", encoder, "--reset-optimizer", "--reset-dataloader", "--reset-meters"]
        flags += ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]
        log = fit(corpus / "labels", save, "roberta_synth_random_vanilla_agnews", *flags)
        assert max(float(a) for a in re.findall(r'"valid_accuracy": "([\d.]+)"', log)) > 55  # a third by chance

    return make_once("classifier", make) / "checkpoint_best.pt"


def perplexity(log):
    return float(re.search(r"Perplexity: ([\d.]+)", log)[1])


def evaluate(corpus, path, *flags):
    argv = [corpus / "lm", *USER_DIR, "--path", path, "--gen-subset", "test", "--tokens-per-sample", LENGTH]
    argv += ["--num-workers", "0", *flags]
    return perplexity(run_cli(eval_lm.cli_main, *argv)[1])


def test_language_model_learns(corpus, language_model):
    assert evaluate(corpus, language_model) < 0.5 * WORDS


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_variant_of_a_language_model_trains(corpus, tmp_path, spec):
    arch = f"transformer_lm_synth_{spec.replace('+', '_')}_ptb"
    curve = read_losses(
        fit(corpus / "lm", tmp_path, arch, *LM, "--max-update", "12", "--no-save", "--disable-validation")
    )
    assert float(curve[12]) < float(curve[1]) - 0.3


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_break_modes(corpus, tmp_path, mode):
    """Training and evaluation; resumed, the losses go on as in one run."""
    flags = [*LM, "--sample-break-mode", mode, "--batch-size", "32"]
    arch = "transformer_lm_synth_random_dense_ptb"
    whole = read_losses(
        fit(corpus / "lm", tmp_path / "whole", arch, *flags, "--max-epoch", "2", "--no-epoch-checkpoints")
    )
    fit(corpus / "lm", tmp_path / "parts", arch, *flags, "--max-epoch", "1", "--no-epoch-checkpoints")
    rest = read_losses(
        fit(corpus / "lm", tmp_path / "parts", arch, *flags, "--max-epoch", "2", "--no-epoch-checkpoints")
    )
    assert rest and rest == {update: loss for update, loss in whole.items() if update in rest}
    score = evaluate(corpus, tmp_path / "whole" / "checkpoint_last.pt", "--sample-break-mode", mode)
    assert 1 < score < 2 * WORDS


@pytest.mark.parametrize("mode, window", [("none", 6), ("eos", 12)])
def test_context_window(corpus, language_model, mode, window):
    """With --context-window a row begins with the end of the row before it, and only its own tokens are scored.

    Rows of several lengths have as much of it as l allows, and are not padded beyond l.
    """
    path, lengths = str(language_model), {"tokens_per_sample": LENGTH - window, "sample_break_mode": mode}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [path], arg_overrides={"data": str(corpus / "lm"), **lengths}
    )
    task.load_dataset("test")
    dataset = task.dataset("test")
    model.eval()
    total, count, before = 0.0, 0, torch.tensor([], dtype=torch.long)
    with torch.no_grad():
        for i in range(len(dataset)):
            surplus = max(0, len(before) + len(dataset[i]["source"]) - LENGTH)
            before = before[surplus:]
            row = torch.cat([before, dataset[i]["source"]])
            log_probs = model.get_normalized_probs(model(row[None]), log_probs=True)[0]
            own = log_probs[len(before) :].gather(1, dataset[i]["target"][:, None])
            total, count = total - own.sum().item(), count + len(own)
            before = row[-window:]
    score = evaluate(corpus, path, "--context-window", window, "--sample-break-mode", mode)
    assert score == pytest.approx(math.exp(total / count), abs=0.011) and score != evaluate(corpus, path)


def test_beginning_of_sentence(corpus, tmp_path):
    """--add-bos-token makes a row one token longer than fairseq counts; sentences of l tokens are skipped."""
    flags = [*LM, "--add-bos-token", "--tokens-per-sample", "9", "--synth-max-length", "10", "--max-update", "3"]
    flags += ["--max-target-positions", "10", "--disable-validation"]
    log = fit(corpus / "lm", tmp_path, "transformer_lm_synth_random_ptb", *flags, "--sample-break-mode", "eos")
    assert "samples have invalid sizes" in log  # 9 words, the end and the beginning of the sentence
    argv = ["--sample-break-mode", "none", "--tokens-per-sample", "9", "--add-bos-token"]
    assert evaluate(corpus, tmp_path / "checkpoint_last.pt", *argv) < 4 * WORDS


def test_rows_longer_than_l_are_not_left_out(corpus, language_model):
    """fairseq-eval-lm would skip them, and print the perplexity of what is left."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--gen-subset", "test", "--num-workers", "0"]
    line = get_error_line(eval_lm.cli_main, *argv)
    assert "--tokens-per-sample" in line and f"{LENGTH} is this model's --synth-max-length" in line


def test_language_model_generates(corpus, language_model):
    """fairseq-generate goes on from a prefix of each line, fairseq-interactive from what is typed."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--task", "language_modeling", "--beam", "2"]
    argv += ["--max-len-b", "10", "--max-len-a", "0", "--num-workers", "0"]
    rows = [
        "--gen-subset",
        "test",
        "--sample-break-mode",
        "eos",
        "--tokens-per-sample",
        str(LENGTH),
        "--batch-size",
        "8",
    ]
    out, _ = run_cli(generate.cli_main, *argv, *rows, "--prefix-size", "2")
    begun = {int(m[1]): m[2].split()[:2] for m in re.finditer(r"^T-(\d+)\t(.*)$", out, flags=re.M)}
    written = {int(m[1]): m[2].split() for m in re.finditer(r"^H-(\d+)\t\S+\t(.*)$", out, flags=re.M)}
    assert len(written) == 20
    assert all(written[i][: len(prefix)] == prefix for i, prefix in begun.items())
    out, _ = run_cli(interactive.cli_main, *argv, stdin="w1 w2 w3 w4\nw5\n")
    first, second = (m[1].split() for m in re.finditer(r"^H-\d+\t\S+\t(.*)$", out, flags=re.M))
    assert first[:4] == ["w1", "w2", "w3", "w4"] and second[0] == "w5"


def test_language_model_from_pretrained(corpus, language_model):
    from fairseq_synth.language_model import SynthesizerLanguageModel

    hub = SynthesizerLanguageModel.from_pretrained(
        str(language_model.parent), language_model.name, str(corpus / "lm"), user_dir=str(ROOT / "fairseq_synth")
    )
    assert hub.sample(["w1 w2 w3", "w4"], beam=2, max_len_a=0, max_len_b=8)[0].startswith("w1 w2 w3")
    long, short = hub.score(["w1 w2 w3 w4 w5 w6", "w4 w1"])
    assert long["score"] > short["score"]  # it counts on
    tokens = hub.encode("w4 w1")[:-1]
    row = torch.cat([torch.tensor([2]), tokens])
    with torch.no_grad():
        log_probs = hub.models[0].get_normalized_probs(hub.models[0](row[None]), log_probs=True)[0]
    expected = log_probs[: len(tokens)].gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(short["positional_scores"][: len(tokens)], expected, atol=1e-5, rtol=0)


def test_from_a_stock_language_model(corpus, tmp_path):
    """--finetune-from-model: a sum with vanilla starts with the stock model's loss."""
    flags = [*LM, "--no-epoch-checkpoints"]
    fit(corpus / "lm", tmp_path / "stock", "transformer_lm_ptb", *flags, "--max-epoch", "1")
    stock = evaluate(corpus, tmp_path / "stock" / "checkpoint_last.pt")
    begin = ["--finetune-from-model", tmp_path / "stock" / "checkpoint_last.pt", "--lr", "1e-20", "--max-update", "1"]
    for arch in ("transformer_lm_synth_vanilla_ptb", "transformer_lm_synth_random_vanilla_ptb"):
        fit(corpus / "lm", tmp_path / arch, arch, *flags, "--synth-mixture", "sum", *begin)
        assert evaluate(corpus, tmp_path / arch / "checkpoint_last.pt") == stock


def test_classifier(corpus, classifier):
    """fairseq-validate, and the same predictions from Python, for a sentence alone."""
    from fairseq_synth.roberta import SynthesizerRoberta

    argv = [corpus / "labels", *USER_DIR, "--path", classifier, "--task", "sentence_prediction", "--log-format", "json"]
    argv += ["--num-classes", "3", "--valid-subset", "test", "--batch-size", "7", "--criterion", "sentence_prediction"]
    argv += ["--classification-head-name", "head", "--max-positions", LENGTH, "--num-workers", "0"]
    log = run_cli(validate.cli_main, *argv)[1]
    accuracy = float(re.findall(r'"accuracy": "?([\d.]+)', log.replace("test_", ""))[-1])
    hub = SynthesizerRoberta.from_pretrained(
        str(classifier.parent), classifier.name, str(corpus / "labels"), bpe=None, user_dir=str(ROOT / "fairseq_synth")
    )
    right, total = 0, 0
    names = hub.task.label_dictionary
    for text, label in zip(*((corpus / f"test.{name}").read_text().splitlines() for name in ("text", "class"))):
        tokens = hub.task.source_dictionary.encode_line(f"<s> {text}", add_if_not_exist=False).long()
        answer = hub.predict("head", tokens).argmax().item()
        right, total = right + (names[answer + names.nspecial] == label), total + 1
    assert accuracy == pytest.approx(100 * right / total, abs=0.1)


@pytest.mark.parametrize("arch", ["roberta_synth_factorized_random_vanilla_agnews", "roberta_linformer_agnews"])
def test_classes_and_numbers_from_scratch(corpus, tmp_path, arch):
    more = ["--linformer-k", "4"] if "linformer" in arch else []
    log = fit(corpus / "labels", tmp_path, arch, *LABELS, *more, "--num-classes", "3", "--max-epoch", "3", "--no-save")
    assert len(re.findall('"valid_accuracy"', log)) == 3
    number = ["--num-classes", "1", "--regression-target", "--max-epoch", "3", "--no-save"]
    number += ["--best-checkpoint-metric", "loss"]
    curve = read_losses(fit(corpus / "numbers", tmp_path, arch, *LABELS, *more, *number))
    assert float(curve[max(curve)]) < float(curve[1])


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_variant_of_an_encoder_trains(corpus, tmp_path, spec):
    arch = f"roberta_synth_{spec.replace('+', '_')}_agnews"
    curve = read_losses(
        fit(corpus / "lm", tmp_path, arch, *MASKED, "--max-update", "12", "--no-save", "--disable-validation")
    )
    assert float(curve[12]) < float(curve[1])


HYDRA = """
defaults: [_self_]
common: {{cpu: true, user_dir: {user_dir}}}
dataset: {{num_workers: 0, batch_size: 16}}
task: {{_name: {task}, data: {data}, tokens_per_sample: {length}}}
criterion: {criterion}
optimizer: {{_name: adam}}
lr_scheduler: fixed
optimization: {{max_update: 3, lr: [0.01]}}
model: {{_name: {model}, {stack}_synthesizer: random, synth_max_length: {length}, {stack}_layers: 1,
         {stack}_embed_dim: 16, {stack}_ffn_embed_dim: 32, {stack}_attention_heads: 2}}
"""


@pytest.mark.parametrize(
    "stack, model, task, criterion",
    [
        ("decoder", "transformer_lm_synth", "language_modeling", "cross_entropy"),
        ("encoder", "roberta_synth", "masked_lm", "masked_lm"),
    ],
)
def test_hydra(corpus, tmp_path, monkeypatch, stack, model, task, criterion):
    """fairseq-hydra-train with a YAML file; the checkpoint holds the flags that were given, and is evaluated."""
    config = HYDRA.format(
        user_dir=ROOT / "fairseq_synth",
        data=corpus / "lm",
        length=LENGTH,
        stack=stack,
        model=model,
        task=task,
        criterion=criterion,
    )
    (tmp_path / "small.yaml").write_text(config)
    argv = ["--config-dir", tmp_path, "--config-name", "small", f"hydra.run.dir={tmp_path}"]
    monkeypatch.chdir(tmp_path)
    run_cli(hydra_train.cli_main, *argv, f"checkpoint.save_dir={tmp_path}/save", "+model.dropout=0.25")
    last = tmp_path / "save" / "checkpoint_last.pt"
    state = checkpoint_utils.load_checkpoint_to_cpu(str(last))
    prefix = "decoder" if stack == "decoder" else "encoder.sentence_encoder"
    assert f"{prefix}.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert state["model"][f"{prefix}.embed_tokens.weight"].size(1) == 16 and state["cfg"].model.dropout == 0.25
    if stack == "decoder":
        assert evaluate(corpus, last) < 4 * WORDS
    else:
        assert f"{prefix}.layernorm_embedding.weight" in state["model"]
        argv = [corpus / "lm", *USER_DIR, "--path", last, "--task", "masked_lm", "--valid-subset", "test"]
        assert "test" in run_cli(validate.cli_main, *argv, "--batch-size", "4")[1]


REFUSED = {
    "rows longer than l": (
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", *LM, "--tokens-per-sample", "17"],
        f"--tokens-per-sample 17 is above --synth-max-length {LENGTH}",
    ),
    "rows of l and the beginning of sentence": (
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", *LM, "--add-bos-token"],
        f"--tokens-per-sample {LENGTH} with --add-bos-token is above --synth-max-length {LENGTH}: lower it to 15, or",
    ),
    "rows of an encoder longer than l": (
        "lm",
        ["--arch", "roberta_synth_random_agnews", *MASKED, "--tokens-per-sample", "17"],
        f"--tokens-per-sample 17 is above --synth-max-length {LENGTH}",
    ),
    "a classifier's rows longer than l": (
        "labels",
        ["--arch", "roberta_synth_random_agnews", *LABELS, "--num-classes", "3", "--max-positions", "17"],
        f"--max-positions 17 is above --synth-max-length {LENGTH}",
    ),
    "a language model for classes": (
        "labels",
        ["--arch", "transformer_lm_synth_random_ptb", *LABELS[: -len(ENCODER)], "--num-classes", "3", *LM_SIZE],
        f"--task: this task does not fit a language model ({INTERPOLATION} key 'task.tokens_per_sample' not found); "
        "take --task language_modeling",
    ),
    "an encoder for language modelling": (
        "lm",
        ["--arch", "roberta_synth_random_agnews", "--task", "language_modeling", *ENCODER_SIZE],
        "this task needs a language model, but the model of --arch or of the checkpoint is an encoder; use --task "
        "masked_lm or sentence_prediction",
    ),
    "a language model for denoising": (
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", "--task", "denoising", *LM_SIZE],
        "this task needs a translation model, but the model of --arch or of the checkpoint is a language model",
    ),
    "an encoder for denoising": (
        "lm",
        ["--arch", "roberta_synth_random_agnews", "--task", "denoising", *ENCODER_SIZE],
        "this task needs a translation model, but the model of --arch or of the checkpoint is an encoder",
    ),
}


@pytest.mark.parametrize("folder, flags, message", REFUSED.values(), ids=REFUSED)
def test_refused(corpus, tmp_path, folder, flags, message):
    argv = [corpus / folder, *USER_DIR, *flags, *SYNTH, *COMMON, "--save-dir", tmp_path / "save", "--batch-size", "4"]
    assert message in get_error_line(train.cli_main, *argv)
    assert not (tmp_path / "save").exists() or not list((tmp_path / "save").iterdir())


def test_an_older_omegaconf():
    """Where its message names no class, the key that is missing tells the kind of model."""
    line = look_up(ConfigKeyError("str interpolation key 'task.tokens_per_sample' not found"))
    assert "does not fit a language model" in line and line.endswith("take --task language_modeling, or another --arch")
    assert look_up(ConfigKeyError("str interpolation key 'task.beams' not found")) is None


def test_a_checkpoint_of_another_kind(corpus, data, language_model, classifier, tmp_path):
    """A language model given to translation, an encoder to eval-lm, either to go on from: one line each."""
    line = get_error_line(generate.cli_main, data / "bin", *USER_DIR, "--path", language_model)
    assert "this task needs a translation model" in line and "is a language model" in line
    line = get_error_line(eval_lm.cli_main, corpus / "lm", *USER_DIR, "--path", classifier, "--gen-subset", "test")
    assert "this task needs a language model" in line and "is an encoder" in line
    for flag in ("--restore-file", "--finetune-from-model"):
        argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE]
        line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path / "save", flag, language_model)
        assert "the checkpoint contains a language model, but this model is a translation model" in line
        assert not list((tmp_path / "save").iterdir())


@pytest.mark.parametrize(
    "arch, tile, flags",
    [
        ("random_dense", True, []),
        ("relative_random", False, []),
        ("relative_random", False, ["--no-token-positional-embeddings"]),
    ],
)
def test_rows_longer_than_those_of_the_training(corpus, tmp_path, arch, tile, flags):
    """--synth-beyond-length tile alone, or a function without a limit, makes a trained model take them."""
    flags = [*LM, *flags, "--max-update", "3", "--disable-validation"]
    fit(corpus / "lm", tmp_path, f"transformer_lm_synth_{arch}_ptb", *flags)
    argv = [corpus / "lm", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "test"]
    argv += ["--num-workers", "0", "--tokens-per-sample", 3 * LENGTH]
    if tile:
        advice = re.search(
            rf"{LENGTH} is this model's --synth-max.* (--model.*) \"(.*)\"", get_error_line(eval_lm.cli_main, *argv)
        )
        argv += [advice[1], advice[2]]
    log = run_cli(eval_lm.cli_main, *argv)[1]
    tokens = sum(len(line.split()) + 1 for line in (corpus / "test.text").read_text().splitlines())
    assert f"Evaluated {tokens:,} tokens" in log or f"Evaluated {tokens} tokens" in log
    assert perplexity(log) < 4 * WORDS
    with_limit = ["--model-overrides", "{'synth_beyond_length': 'tile', 'max_target_positions': 20}"]
    assert "longer than the 20 tokens" in get_error_line(eval_lm.cli_main, *argv, *with_limit)


def test_the_beginning_of_sentence_in_evaluation_alone(corpus, language_model):
    """Rows of l have no place for it: the flag that is named is the one to lower."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--gen-subset", "test", "--num-workers", "0"]
    line = get_error_line(eval_lm.cli_main, *argv, "--tokens-per-sample", LENGTH, "--add-bos-token")
    assert line.startswith("--tokens-per-sample: ") and f"the {LENGTH - 1} tokens" in line and "--add-bos-token" in line
    assert f"give at most {LENGTH - 1}" in line and "--required-seq-len-multiple" not in line
    assert evaluate(corpus, language_model, "--tokens-per-sample", LENGTH - 1, "--add-bos-token") < 4 * WORDS


def test_the_heads_of_a_checkpoint_with_other_classes(corpus, classifier, tmp_path):
    argv = [corpus / "labels", *USER_DIR, "--arch", "roberta_synth_random_vanilla_agnews", *LABELS, *SYNTH, *COMMON]
    argv += ["--num-classes", "4", "--load-checkpoint-heads", "--finetune-from-model", classifier]
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path / "save")
    assert "--num-classes 4: the head 'head' of the checkpoint has 3 classes; use that" in line
    assert not list((tmp_path / "save").iterdir())


@pytest.mark.parametrize("kind", ["encoder", "classifier"])
def test_importance_of_an_encoders_heads(corpus, request, kind):
    """In the unit of the loss: a masked token, an example. Against a finite difference."""
    folder = corpus / ("lm" if kind == "encoder" else "labels")
    loaded = checkpoints.load(request.getfixturevalue(kind), folder)
    sample = checkpoints.batches(loaded, "valid", checkpoints.readable(loaded, "valid", 40)[-1:])
    perturb(loaded.model, std=0.1)
    found, name = head_importance(loaded, sample), "encoder.self.1"
    values = []
    for factor in (1.01, 0.99):
        with torch.no_grad(), hooks.masked_heads(loaded.model, {name: torch.tensor([1, factor])}):
            values.append(loss(loaded, sample) * math.log(2))
    assert found[name]["gradient"][1] == pytest.approx(abs(values[0] - values[1]) / 0.02, rel=0.03, abs=1e-6)


def classify(data, path, output, *flags):
    sys.path.insert(0, str(ROOT / "scripts"))
    import classify

    run_cli(classify.main, data, "--path", path, "--output", output, *flags)
    return output.read_text().splitlines()


def test_classify(corpus, classifier, tmp_path):
    """A class for each line."""
    found = classify(corpus / "labels", classifier, tmp_path / "found")
    expected = (corpus / "test.class").read_text().splitlines()
    assert len(found) == len(expected) and set(found) <= {"c1", "c2", "c3"}
    assert sum(a == b for a, b in zip(found, expected)) > len(expected) / 2


def test_classify_with_numbers(corpus, tmp_path):
    """Of a model with --regression-target: the numbers whose mean squared error fairseq-validate says."""
    arch = "roberta_synth_factorized_random_vanilla_agnews"
    flags = [*LABELS, "--num-classes", "1", "--regression-target", "--max-update", "5"]
    fit(corpus / "numbers", tmp_path, arch, *flags, "--best-checkpoint-metric", "loss", "--no-epoch-checkpoints")
    path = tmp_path / "checkpoint_last.pt"
    found = [float(line) for line in classify(corpus / "numbers", path, tmp_path / "found")]
    expected = [float(x) for x in (corpus / "numbers" / "label" / "test.label").read_text().splitlines()]
    error = sum((a - b) ** 2 for a, b in zip(found, expected)) / len(expected)
    argv = [corpus / "numbers", *USER_DIR, "--path", path, *LABELS[:2], "--regression-target", "--num-classes", "1"]
    argv += ["--valid-subset", "test", "--batch-size", "7", "--criterion", "sentence_prediction", "--num-workers", "0"]
    argv += ["--classification-head-name", "head", "--max-positions", LENGTH, "--log-format", "json"]
    log = run_cli(validate.cli_main, *argv)[1].replace("test_", "")
    assert float(re.findall(r'"loss": "?([\d.]+)', log)[-1]) == pytest.approx(error / math.log(2), rel=0.01)

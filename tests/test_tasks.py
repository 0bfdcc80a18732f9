"""The stock command lines work with language models and encoders, here on corpora of a few hundred short lines."""

import math
import random
import re
import sys
from typing import NamedTuple

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

NUM_WORDS = 12  # in the vocabulary of the corpora
LENGTH = 16  # the longest row that the models take, l in the names of tests
# flags of fairseq-train: the sizes of small models, and their tasks
SYNTH = ["--synth-max-length", str(LENGTH)]
LM_SIZE = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2".split()
ENCODER_SIZE = (
    "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2".split()
)
COMMON = (
    "--optimizer adam --lr 0.01 --num-workers 0 --no-progress-bar --log-format json --log-interval 1 --seed 7".split()
)
LM_TASK = f"--task language_modeling --tokens-per-sample {LENGTH} --dropout 0 --batch-size 16".split()
LM = [*LM_TASK, *LM_SIZE]
ENCODER = [*ENCODER_SIZE, *"--batch-size 32 --dropout 0 --attention-dropout 0 --pooler-dropout 0".split()]
MASKED_LM_TASK = f"--task masked_lm --criterion masked_lm --tokens-per-sample {LENGTH}".split()
MASKED_LM = [*MASKED_LM_TASK, *ENCODER]
CLASSIFIER_TASK = (
    f"--task sentence_prediction --criterion sentence_prediction --max-positions {LENGTH} --init-token 0 "
    "--separator-token 2 --classification-head-name head"
).split()
CLASSIFIER = [*CLASSIFIER_TASK, *ENCODER]
CLASSIFIER_ARCH = "roberta_synth_random_vanilla_agnews"
# flags of fairseq-validate for a classifier
EVALUATED_CLASSIFIER = (
    f"--task sentence_prediction --criterion sentence_prediction --max-positions {LENGTH} "
    "--classification-head-name head --valid-subset test --batch-size 7 --num-workers 0 --log-format json"
).split()
# what omegaconf calls a reference from one value of a configuration to another
INTERPOLATION = "str interpolation" if omegaconf.__version__ < "2.1" else "Interpolation"


# ---- corpora


class Line(NamedTuple):
    """A line of a corpus, in which each word tells the next one."""

    words: list[str]
    step: int  # 1, 2 or 3: how much is added to the number of a word to get the next one


def make_lines(count, seed):
    """Returns lines of 1 to 9 words, always the same ones for the same seed."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        first = rng.randrange(NUM_WORDS)
        step = rng.randint(1, 3)
        num_words = rng.randint(1, 9)
        lines.append(Line([f"w{(first + step * i) % NUM_WORDS}" for i in range(num_words)], step))
    return lines


def write_lines(path, lines):
    """Writes a file with one line for each item."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def binarize(folder, extension, subfolder, dictionary=None):
    """Binarizes the files train, valid and test with an extension, with a dictionary of its own or a given one."""
    argv = ["--only-source", "--destdir", folder / subfolder]
    argv += [f"--{split}pref={folder}/{split}.{extension}" for split in ("train", "valid", "test")]
    if dictionary:
        argv += ["--srcdict", dictionary]
    run_cli(preprocess.cli_main, *argv)


def make_corpus(folder):
    """Fills the folder of the fixture `corpus`."""
    splits = {"train": 240, "valid": 40, "test": 20}
    for seed, (split, count) in enumerate(splits.items()):
        lines = make_lines(count, seed)
        write_lines(folder / f"{split}.text", [" ".join(line.words) for line in lines])
        write_lines(folder / f"{split}.class", [f"c{line.step}" for line in lines])
        write_lines(folder / "numbers" / "label" / f"{split}.label", [line.step / 2 for line in lines])
    dictionary = folder / "lm" / "dict.txt"
    binarize(folder, "text", "lm")
    binarize(folder, "text", "labels/input0", dictionary)
    binarize(folder, "class", "labels/label")
    binarize(folder, "text", "numbers/input0", dictionary)


@pytest.fixture(scope="session")
def corpus(make_once):
    """Returns a folder with data in three subfolders.

    lm has a text; labels has the same text with a class for each line, its step; numbers has half the step as a number.
    """
    return make_once("tasks", make_corpus)


# ---- models


def fit(data, save, arch, *flags):
    """Trains a model with fairseq-train, and returns the log.

    Args:
        data: the folder of the binarized data.
        save: the folder for the checkpoints.
        arch: the architecture; a Synthesizer takes rows of up to LENGTH tokens.
        flags: other flags of fairseq-train.
    """
    length = SYNTH if "synth" in arch else []
    argv = [data, *USER_DIR, "--arch", arch, "--save-dir", save, *COMMON, *length, *flags]
    _, log = run_cli(train.cli_main, *argv)
    return log


@pytest.fixture(scope="session")
def language_model(corpus, make_once):
    """Returns the checkpoint of a trained language model."""

    def make(save):
        """Trains the language model in the folder `save`."""
        flags = [*LM, "--max-epoch", "12", "--no-epoch-checkpoints", "--validate-interval", "6"]
        fit(corpus / "lm", save, "transformer_lm_synth_random_vanilla_ptb", *flags)

    return make_once("language_model", make) / "checkpoint_best.pt"


@pytest.fixture(scope="session")
def encoder(corpus, make_once):
    """Returns the checkpoint of an encoder that has been pre-trained as a masked language model."""

    def make(save):
        """Trains the encoder in the folder `save`, and checks that it learns."""
        flags = [*MASKED_LM, "--sample-break-mode", "eos", "--max-epoch", "4", "--no-epoch-checkpoints"]
        log = fit(corpus / "lm", save, CLASSIFIER_ARCH, *flags)
        losses = read_losses(log)
        assert float(losses[max(losses)]) < float(losses[1]) - 0.5

    return make_once("encoder", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def classifier(corpus, encoder, make_once):
    """Returns the checkpoint of the encoder after it has been fine-tuned to predict the class."""

    def make(save):
        """Fine-tunes the encoder in the folder `save`, and checks that it predicts classes better than by chance."""
        flags = [*CLASSIFIER, "--num-classes", "3", "--max-epoch", "12", "--no-epoch-checkpoints"]
        flags += ["--restore-file", encoder, "--reset-optimizer", "--reset-dataloader", "--reset-meters"]
        flags += ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]
        log = fit(corpus / "labels", save, CLASSIFIER_ARCH, *flags)
        accuracies = [float(accuracy) for accuracy in re.findall(r'"valid_accuracy": "([\d.]+)"', log)]
        assert max(accuracies) > 55  # percent; by chance it would be a third

    return make_once("classifier", make) / "checkpoint_best.pt"


def read_perplexity(log):
    """Returns the perplexity that fairseq-eval-lm has logged."""
    return float(re.search(r"Perplexity: ([\d.]+)", log)[1])


def measure_perplexity(corpus, path, *flags):
    """Returns the perplexity of a language model on the test set, as fairseq-eval-lm measures it."""
    argv = [corpus / "lm", *USER_DIR, "--path", path, "--gen-subset", "test", "--tokens-per-sample", LENGTH]
    _, log = run_cli(eval_lm.cli_main, *argv, "--num-workers", "0", *flags)
    return read_perplexity(log)


# ---- language models


def test_a_language_model_learns(corpus, language_model):
    assert measure_perplexity(corpus, language_model) < 0.5 * NUM_WORDS


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_variant_of_a_language_model_trains(corpus, tmp_path, spec):
    arch = f"transformer_lm_synth_{spec.replace('+', '_')}_ptb"
    log = fit(corpus / "lm", tmp_path, arch, *LM, "--max-update", "12", "--no-save", "--disable-validation")
    losses = read_losses(log)
    assert float(losses[12]) < float(losses[1]) - 0.3


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_a_language_model_is_trained_resumed_and_evaluated_in_every_break_mode(corpus, tmp_path, mode):
    """After the training has been resumed, the losses are those of a training in one run."""
    arch = "transformer_lm_synth_random_dense_ptb"
    flags = [*LM, "--sample-break-mode", mode, "--batch-size", "32", "--no-epoch-checkpoints"]
    log_in_one_run = fit(corpus / "lm", tmp_path / "whole", arch, *flags, "--max-epoch", "2")
    fit(corpus / "lm", tmp_path / "resumed", arch, *flags, "--max-epoch", "1")
    log_after_resuming = fit(corpus / "lm", tmp_path / "resumed", arch, *flags, "--max-epoch", "2")
    losses = read_losses(log_in_one_run)
    losses_after_resuming = read_losses(log_after_resuming)
    assert losses_after_resuming
    assert losses_after_resuming.items() <= losses.items()
    checkpoint = tmp_path / "whole" / "checkpoint_last.pt"
    assert 1 < measure_perplexity(corpus, checkpoint, "--sample-break-mode", mode) < 2 * NUM_WORDS


def compute_log_probs(model, row):
    """Returns the log-probabilities (T, words) of the next words after each word of a row (T,)."""
    return model.get_normalized_probs(model(row[None]), log_probs=True)[0]


@pytest.mark.parametrize("mode, window", [("none", 6), ("eos", 12)])
@torch.no_grad()
def test_only_the_tokens_behind_the_context_window_are_scored(corpus, language_model, mode, window):
    """With --context-window a row begins with the end of the row before it, as far as l allows.

    Rows of several lengths are not padded beyond l.
    """
    overrides = {
        "data": str(corpus / "lm"),
        "tokens_per_sample": LENGTH - window,
        "sample_break_mode": mode,
    }
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(language_model)], arg_overrides=overrides)
    task.load_dataset("test")
    dataset = task.dataset("test")
    model.eval()
    total_loss = 0.0
    num_tokens = 0
    context = torch.tensor([], dtype=torch.long)
    for index in range(len(dataset)):
        sample = dataset[index]
        source = sample["source"]
        surplus = max(0, len(context) + len(source) - LENGTH)
        context = context[surplus:]
        row = torch.cat([context, source])
        log_probs_behind_context = compute_log_probs(model, row)[len(context) :]
        total_loss -= log_probs_behind_context.gather(1, sample["target"][:, None]).sum().item()
        num_tokens += len(source)
        context = row[-window:]

    flags = ["--context-window", window, "--sample-break-mode", mode]
    perplexity = measure_perplexity(corpus, language_model, *flags)
    assert perplexity == pytest.approx(math.exp(total_loss / num_tokens), abs=0.011)
    assert perplexity != measure_perplexity(corpus, language_model)


def test_sentences_of_l_tokens_are_skipped_if_the_beginning_of_sentence_is_added(corpus, tmp_path):
    """--add-bos-token makes a row one token longer than fairseq counts."""
    flags = [*LM, "--add-bos-token", "--tokens-per-sample", "9", "--synth-max-length", "10", "--max-update", "3"]
    flags += ["--max-target-positions", "10", "--disable-validation", "--sample-break-mode", "eos"]
    log = fit(corpus / "lm", tmp_path, "transformer_lm_synth_random_ptb", *flags)
    assert "samples have invalid sizes" in log  # 9 words, the end and the beginning of the sentence
    flags = ["--sample-break-mode", "none", "--tokens-per-sample", "9", "--add-bos-token"]
    assert measure_perplexity(corpus, tmp_path / "checkpoint_last.pt", *flags) < 4 * NUM_WORDS


def test_rows_longer_than_l_are_refused_in_evaluation(corpus, language_model):
    """fairseq-eval-lm would skip them, and print the perplexity of what is left."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--gen-subset", "test", "--num-workers", "0"]
    line = get_error_line(eval_lm.cli_main, *argv)
    assert "--tokens-per-sample" in line
    assert f"{LENGTH} is this model's --synth-max-length" in line


def get_generation_flags(corpus, language_model):
    """Returns the arguments with which fairseq-generate and fairseq-interactive read a language model."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--task", "language_modeling", "--beam", "2"]
    return [*argv, "--max-len-b", "10", "--max-len-a", "0", "--num-workers", "0"]


def test_fairseq_generate_continues_a_prefix_of_each_line(corpus, language_model):
    argv = get_generation_flags(corpus, language_model)
    argv += ["--gen-subset", "test", "--prefix-size", "2", "--batch-size", "8"]
    argv += ["--sample-break-mode", "eos", "--tokens-per-sample", LENGTH]
    output, _ = run_cli(generate.cli_main, *argv)
    references = dict(re.findall(r"^T-(\d+)\t(.*)$", output, flags=re.M))
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, flags=re.M))
    assert len(hypotheses) == 20
    for number, reference in references.items():
        prefix = reference.split()[:2]
        assert hypotheses[number].split()[: len(prefix)] == prefix


def test_fairseq_interactive_continues_what_is_typed(corpus, language_model):
    argv = get_generation_flags(corpus, language_model)
    output, _ = run_cli(interactive.cli_main, *argv, stdin="w1 w2 w3 w4\nw5\n")
    first, second = re.findall(r"^H-\d+\t\S+\t(.*)$", output, flags=re.M)
    assert first.split()[:4] == ["w1", "w2", "w3", "w4"]
    assert second.split()[0] == "w5"


def test_a_language_model_from_pretrained_samples_and_scores(corpus, language_model):
    from fairseq_synth.language_model import SynthesizerLanguageModel

    hub = SynthesizerLanguageModel.from_pretrained(
        str(language_model.parent), language_model.name, str(corpus / "lm"), user_dir=str(ROOT / "fairseq_synth")
    )
    first_sample, _ = hub.sample(["w1 w2 w3", "w4"], beam=2, max_len_a=0, max_len_b=8)
    assert first_sample.startswith("w1 w2 w3")

    counting, not_counting = hub.score(["w1 w2 w3 w4 w5 w6", "w4 w1"])
    assert counting["score"] > not_counting["score"]

    tokens = hub.encode("w4 w1")[:-1]
    row = torch.cat([torch.tensor([2]), tokens])
    with torch.no_grad():
        log_probs = compute_log_probs(hub.models[0], row)
    expected = log_probs[: len(tokens)].gather(1, tokens[:, None]).squeeze(1)
    scores = not_counting["positional_scores"][: len(tokens)]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_synthesizer_that_is_fine_tuned_from_a_stock_language_model_starts_with_its_loss(corpus, tmp_path):
    """With --finetune-from-model this holds for vanilla alone and for a sum with vanilla."""
    flags = [*LM, "--no-epoch-checkpoints"]
    fit(corpus / "lm", tmp_path / "stock", "transformer_lm_ptb", *flags, "--max-epoch", "1")
    stock_checkpoint = tmp_path / "stock" / "checkpoint_last.pt"
    stock_perplexity = measure_perplexity(corpus, stock_checkpoint)
    flags += ["--synth-mixture", "sum", "--finetune-from-model", stock_checkpoint, "--lr", "1e-20", "--max-update", "1"]
    for arch in ("transformer_lm_synth_vanilla_ptb", "transformer_lm_synth_random_vanilla_ptb"):
        fit(corpus / "lm", tmp_path / arch, arch, *flags)
        assert measure_perplexity(corpus, tmp_path / arch / "checkpoint_last.pt") == stock_perplexity


# ---- encoders


def read_last_number(log, name):
    """Returns the last value of a name in the log of fairseq-validate."""
    return float(re.findall(rf'"{name}": "?([\d.]+)', log.replace("test_", ""))[-1])


def test_predictions_from_python_have_the_accuracy_of_fairseq_validate(corpus, classifier):
    """In Python each sentence is alone in its batch."""
    from fairseq_synth.roberta import SynthesizerRoberta

    flags = ["--path", classifier, *EVALUATED_CLASSIFIER, "--num-classes", "3"]
    _, log = run_cli(validate.cli_main, corpus / "labels", *USER_DIR, *flags)
    hub = SynthesizerRoberta.from_pretrained(
        str(classifier.parent), classifier.name, str(corpus / "labels"), bpe=None, user_dir=str(ROOT / "fairseq_synth")
    )
    texts = (corpus / "test.text").read_text().splitlines()
    labels = (corpus / "test.class").read_text().splitlines()
    label_dictionary = hub.task.label_dictionary
    num_right = 0
    for text, label in zip(texts, labels):
        tokens = hub.task.source_dictionary.encode_line(f"<s> {text}", add_if_not_exist=False).long()
        predicted_class = hub.predict("head", tokens).argmax().item()
        if label_dictionary[predicted_class + label_dictionary.nspecial] == label:
            num_right += 1
    assert read_last_number(log, "accuracy") == pytest.approx(100 * num_right / len(labels), abs=0.1)


# For each architecture of an encoder that is trained from scratch: its additional flags.
ENCODERS_FROM_SCRATCH = {
    "roberta_synth_factorized_random_vanilla_agnews": [],
    "roberta_linformer_agnews": ["--linformer-k", "4"],
}


@pytest.mark.parametrize("arch, flags", ENCODERS_FROM_SCRATCH.items())
def test_an_encoder_is_trained_from_scratch_to_predict_classes(corpus, tmp_path, arch, flags):
    flags = [*CLASSIFIER, *flags, "--num-classes", "3", "--max-epoch", "3", "--no-save"]
    log = fit(corpus / "labels", tmp_path, arch, *flags)
    assert len(re.findall('"valid_accuracy"', log)) == 3


@pytest.mark.parametrize("arch, flags", ENCODERS_FROM_SCRATCH.items())
def test_an_encoder_is_trained_from_scratch_to_predict_numbers(corpus, tmp_path, arch, flags):
    flags = [*CLASSIFIER, *flags, "--num-classes", "1", "--regression-target", "--max-epoch", "3", "--no-save"]
    log = fit(corpus / "numbers", tmp_path, arch, *flags, "--best-checkpoint-metric", "loss")
    losses = read_losses(log)
    assert float(losses[max(losses)]) < float(losses[1])


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_variant_of_an_encoder_trains(corpus, tmp_path, spec):
    arch = f"roberta_synth_{spec.replace('+', '_')}_agnews"
    log = fit(corpus / "lm", tmp_path, arch, *MASKED_LM, "--max-update", "12", "--no-save", "--disable-validation")
    losses = read_losses(log)
    assert float(losses[12]) < float(losses[1])


# ---- fairseq-hydra-train


# A file for fairseq-hydra-train. The names in braces are filled in by `train_with_hydra`.
HYDRA_CONFIG = """
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


def train_with_hydra(corpus, folder, **settings):
    """Trains a model with fairseq-hydra-train and a YAML file in a folder, and returns the checkpoint.

    Args:
        corpus: the fixture.
        folder: the folder of the YAML file and of the training.
        settings: the other names in HYDRA_CONFIG: task, criterion, model, and stack, which is encoder or decoder.
    """
    config = HYDRA_CONFIG.format(user_dir=ROOT / "fairseq_synth", data=corpus / "lm", length=LENGTH, **settings)
    (folder / "small.yaml").write_text(config)
    argv = ["--config-dir", folder, "--config-name", "small", f"hydra.run.dir={folder}"]
    run_cli(hydra_train.cli_main, *argv, f"checkpoint.save_dir={folder}/save", "+model.dropout=0.25")
    return folder / "save" / "checkpoint_last.pt"


def test_hydra_trains_a_language_model_whose_checkpoint_has_the_flags(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = train_with_hydra(
        corpus,
        tmp_path,
        stack="decoder",
        model="transformer_lm_synth",
        task="language_modeling",
        criterion="cross_entropy",
    )
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "decoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert state["model"]["decoder.embed_tokens.weight"].size(1) == 16
    assert state["cfg"].model.dropout == 0.25
    assert measure_perplexity(corpus, path) < 4 * NUM_WORDS


def test_hydra_trains_an_encoder_whose_checkpoint_has_the_flags(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = train_with_hydra(
        corpus, tmp_path, stack="encoder", model="roberta_synth", task="masked_lm", criterion="masked_lm"
    )
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "encoder.sentence_encoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert "encoder.sentence_encoder.layernorm_embedding.weight" in state["model"]
    assert state["model"]["encoder.sentence_encoder.embed_tokens.weight"].size(1) == 16
    assert state["cfg"].model.dropout == 0.25
    argv = [corpus / "lm", *USER_DIR, "--path", path, "--task", "masked_lm", "--valid-subset", "test"]
    _, log = run_cli(validate.cli_main, *argv, "--batch-size", "4")
    assert re.search(r"valid on 'test' subset \| loss \d", log)  # the line with the result


# ---- mistakes


class Mistake(NamedTuple):
    """Flags of fairseq-train that are refused."""

    data: str  # a subfolder of the corpus
    flags: list[str]
    message: str  # a part of the error


MISTAKES = {
    "rows longer than l": Mistake(
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", *LM, "--tokens-per-sample", "17"],
        f"--tokens-per-sample 17 is above --synth-max-length {LENGTH}",
    ),
    "rows of l and the beginning of sentence": Mistake(
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", *LM, "--add-bos-token"],
        f"--tokens-per-sample {LENGTH} with --add-bos-token is above --synth-max-length {LENGTH}: lower it to 15, or",
    ),
    "rows of an encoder longer than l": Mistake(
        "lm",
        ["--arch", "roberta_synth_random_agnews", *MASKED_LM, "--tokens-per-sample", "17"],
        f"--tokens-per-sample 17 is above --synth-max-length {LENGTH}",
    ),
    "a classifier's rows longer than l": Mistake(
        "labels",
        ["--arch", "roberta_synth_random_agnews", *CLASSIFIER, "--num-classes", "3", "--max-positions", "17"],
        f"--max-positions 17 is above --synth-max-length {LENGTH}",
    ),
    "a language model for classes": Mistake(
        "labels",
        ["--arch", "transformer_lm_synth_random_ptb", *CLASSIFIER_TASK, "--num-classes", "3", *LM_SIZE],
        f"--task: this task does not fit a language model ({INTERPOLATION} key 'task.tokens_per_sample' not found); "
        "take --task language_modeling",
    ),
    "an encoder for language modelling": Mistake(
        "lm",
        ["--arch", "roberta_synth_random_agnews", "--task", "language_modeling", *ENCODER_SIZE],
        "this task needs a language model, but the model of --arch or of the checkpoint is an encoder; use --task "
        "masked_lm or sentence_prediction",
    ),
    "a language model for denoising": Mistake(
        "lm",
        ["--arch", "transformer_lm_synth_random_ptb", "--task", "denoising", *LM_SIZE],
        "this task needs a translation model, but the model of --arch or of the checkpoint is a language model",
    ),
    "an encoder for denoising": Mistake(
        "lm",
        ["--arch", "roberta_synth_random_agnews", "--task", "denoising", *ENCODER_SIZE],
        "this task needs a translation model, but the model of --arch or of the checkpoint is an encoder",
    ),
}


def assert_nothing_is_saved(folder):
    """Checks that a training has left no checkpoint."""
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_in_one_line_before_the_training(corpus, tmp_path, mistake):
    argv = [corpus / mistake.data, *USER_DIR, *mistake.flags, *SYNTH, *COMMON, "--batch-size", "4"]
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path / "save")
    assert mistake.message in line
    assert_nothing_is_saved(tmp_path / "save")


def test_the_kind_of_model_is_recognised_without_the_class_in_the_message_of_an_older_omegaconf():
    line = look_up(ConfigKeyError("str interpolation key 'task.tokens_per_sample' not found"))
    assert "does not fit a language model" in line
    assert line.endswith("take --task language_modeling, or another --arch")
    assert look_up(ConfigKeyError("str interpolation key 'task.beams' not found")) is None


def test_a_language_model_is_refused_by_fairseq_generate_for_translation(data, language_model):
    line = get_error_line(generate.cli_main, data / "bin", *USER_DIR, "--path", language_model)
    assert "this task needs a translation model" in line
    assert "is a language model" in line


def test_an_encoder_is_refused_by_fairseq_eval_lm(corpus, classifier):
    argv = [corpus / "lm", *USER_DIR, "--path", classifier, "--gen-subset", "test"]
    line = get_error_line(eval_lm.cli_main, *argv)
    assert "this task needs a language model" in line
    assert "is an encoder" in line


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
def test_a_translation_model_does_not_start_from_a_language_model(data, language_model, tmp_path, flag):
    save = tmp_path / "save"
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE]
    line = get_error_line(train.cli_main, *argv, "--save-dir", save, flag, language_model)
    assert "the checkpoint contains a language model, but this model is a translation model" in line
    assert list(save.iterdir()) == []


@pytest.mark.parametrize(
    "arch, needs_tile, flags",
    [
        ("random_dense", True, []),
        ("relative_random", False, []),
        ("relative_random", False, ["--no-token-positional-embeddings"]),
    ],
)
def test_a_trained_model_takes_longer_rows_with_tile_or_a_function_without_a_limit(
    corpus, tmp_path, arch, needs_tile, flags
):
    flags = [*LM, *flags, "--max-update", "3", "--disable-validation"]
    fit(corpus / "lm", tmp_path, f"transformer_lm_synth_{arch}_ptb", *flags)
    argv = [corpus / "lm", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "test"]
    argv += ["--num-workers", "0", "--tokens-per-sample", 3 * LENGTH]
    if needs_tile:
        line = get_error_line(eval_lm.cli_main, *argv)
        flag, overrides = re.search(rf"{LENGTH} is this model's --synth-max.* (--model.*) \"(.*)\"", line).groups()
        argv += [flag, overrides]
    _, log = run_cli(eval_lm.cli_main, *argv)
    num_tokens = sum(len(line.split()) + 1 for line in (corpus / "test.text").read_text().splitlines())
    assert f"Evaluated {num_tokens:,} tokens" in log or f"Evaluated {num_tokens} tokens" in log
    assert read_perplexity(log) < 4 * NUM_WORDS

    with_limit = ["--model-overrides", "{'synth_beyond_length': 'tile', 'max_target_positions': 20}"]
    assert "longer than the 20 tokens" in get_error_line(eval_lm.cli_main, *argv, *with_limit)


def test_rows_of_l_with_the_beginning_of_sentence_are_refused_in_evaluation(corpus, language_model):
    """The error names the flag that has to be lowered."""
    argv = [corpus / "lm", *USER_DIR, "--path", language_model, "--gen-subset", "test", "--num-workers", "0"]
    line = get_error_line(eval_lm.cli_main, *argv, "--tokens-per-sample", LENGTH, "--add-bos-token")
    assert line.startswith("--tokens-per-sample: ")
    assert f"the {LENGTH - 1} tokens" in line
    assert "--add-bos-token" in line
    assert f"use at most {LENGTH - 1}" in line
    assert "--required-seq-len-multiple" not in line
    flags = ["--tokens-per-sample", LENGTH - 1, "--add-bos-token"]
    assert measure_perplexity(corpus, language_model, *flags) < 4 * NUM_WORDS


def test_the_heads_of_a_checkpoint_with_another_number_of_classes_are_refused(corpus, classifier, tmp_path):
    save = tmp_path / "save"
    argv = [corpus / "labels", *USER_DIR, "--arch", CLASSIFIER_ARCH, *CLASSIFIER, *SYNTH, *COMMON]
    argv += ["--num-classes", "4", "--load-checkpoint-heads", "--finetune-from-model", classifier]
    line = get_error_line(train.cli_main, *argv, "--save-dir", save)
    assert "--num-classes 4: the head 'head' of the checkpoint has 3 classes; use that" in line
    assert list(save.iterdir()) == []


# ---- inspect, and classify.py


@pytest.mark.parametrize("kind, folder", [("encoder", "lm"), ("classifier", "labels")])
def test_the_gradient_of_an_encoders_head_is_the_derivative_of_the_loss(corpus, request, kind, folder):
    """The loss is that of a masked token or of an example. The derivative is computed as a finite difference."""
    loaded = checkpoints.load(request.getfixturevalue(kind), corpus / folder)
    longest_sentence = checkpoints.readable(loaded, "valid", 40)[-1]
    batches = checkpoints.batches(loaded, "valid", [longest_sentence])
    perturb(loaded.model, std=0.1)
    importance = head_importance(loaded, batches)

    @torch.no_grad()
    def compute_loss_in_nats(factor):
        """Returns the loss if the output of the second head in layer 1 is multiplied by `factor`."""
        with hooks.scaled_heads(loaded.model, {"encoder.self.1": torch.tensor([1, factor])}):
            return loss(loaded, batches) * math.log(2)

    derivative = (compute_loss_in_nats(1.01) - compute_loss_in_nats(0.99)) / 0.02
    assert importance["encoder.self.1"]["gradient"][1] == pytest.approx(abs(derivative), rel=0.03, abs=1e-6)


def classify(data, path, output):
    """Runs scripts/classify.py on the test set, and returns the lines that it writes."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import classify

    run_cli(classify.main, data, "--path", path, "--output", output)
    return output.read_text().splitlines()


def test_classify_writes_a_class_for_each_line(corpus, classifier, tmp_path):
    predictions = classify(corpus / "labels", classifier, tmp_path / "predictions")
    labels = (corpus / "test.class").read_text().splitlines()
    assert len(predictions) == len(labels)
    assert set(predictions) <= {"c1", "c2", "c3"}
    num_right = sum(prediction == label for prediction, label in zip(predictions, labels))
    assert num_right > len(labels) / 2


def test_classify_writes_the_numbers_whose_mean_squared_error_fairseq_validate_logs(corpus, tmp_path):
    """The model has been trained with --regression-target."""
    numbers = ["--num-classes", "1", "--regression-target"]
    flags = [*CLASSIFIER, *numbers, "--max-update", "5", "--best-checkpoint-metric", "loss", "--no-epoch-checkpoints"]
    fit(corpus / "numbers", tmp_path, "roberta_synth_factorized_random_vanilla_agnews", *flags)
    path = tmp_path / "checkpoint_last.pt"
    predictions = [float(line) for line in classify(corpus / "numbers", path, tmp_path / "predictions")]
    labels = [float(line) for line in (corpus / "numbers" / "label" / "test.label").read_text().splitlines()]
    squared_errors = [(prediction - label) ** 2 for prediction, label in zip(predictions, labels)]
    mean_squared_error = sum(squared_errors) / len(labels)
    argv = [corpus / "numbers", *USER_DIR, "--path", path, *EVALUATED_CLASSIFIER, *numbers]
    _, log = run_cli(validate.cli_main, *argv)
    assert read_last_number(log, "loss") == pytest.approx(mean_squared_error / math.log(2), rel=0.01)

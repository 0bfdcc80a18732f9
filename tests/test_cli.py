"""The stock command lines, run as a user runs them, on a corpus of a few hundred sentences."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import warm
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq_cli import generate, hydra_train, interactive, preprocess, train, validate
from helpers import (
    NO_THREAD,
    RECIPE,
    ROOT,
    SMALL,
    TEST_SENTENCES,
    USER_DIR,
    get_error_line,
    make_text,
    read_losses,
    remove_flags,
    run_cli,
    run_program,
    train_model,
    used_weights,
)

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.transformer import SynthesizerTransformer
from scripts import average_checkpoints

SPLITS = ("train", "valid", "test")
ALL_TEST_SENTENCES = list(range(TEST_SENTENCES))  # the numbers of the sentences of a test set
RANDOM = "transformer_synth_random_multi30k"
RANDOM_VANILLA = "transformer_synth_random_vanilla_multi30k"


# ---- helpers


def get_translations(printed):
    """Returns {number of a sentence: its translation} from what fairseq-generate or fairseq-interactive prints."""
    return {int(number): text for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, flags=re.M)}


def get_references(printed):
    """Returns {number of a sentence: its reference translation} from what fairseq-generate prints."""
    return {int(number): text for number, text in re.findall(r"^T-(\d+)\t(.*)$", printed, flags=re.M)}


def load_checkpoint(path):
    """Returns what is in a checkpoint: a dictionary with the entries "model", "cfg", "extra_state" and others."""
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


def write_lines(path, lines):
    """Writes lines of text to a file."""
    path.write_text("".join(f"{line}\n" for line in lines))


def get_id_of_flag(value):
    """Returns the part of a test's name that stands for a list of words: the first word if it is a flag, or nothing."""
    first_word = value[0]
    if first_word.startswith("--"):
        return first_word
    return ""


def assert_has_parts(line, parts):
    """Checks that a line, which is an error message, has each of several parts."""
    for part in parts:
        assert part in line, line


def assert_failed_with_one_line(process, part):
    """Checks that a program has failed, and that it has printed one line that says what to mend, and no traceback.

    Args:
        process: a subprocess.CompletedProcess.
        part: what the line has to contain.
    """
    assert process.returncode != 0
    assert "Traceback" not in process.stderr, process.stderr
    last_line = process.stderr.strip().splitlines()[-1]
    assert part in last_line, process.stderr


# ---- a trained model: translation, validation, averages, from Python


@pytest.fixture(scope="session")
def trained(data, make_once):
    """Provides the folder of a model that has learned to turn short sentences around.

    It has been trained with --eval-bleu, and the checkpoints of the last three epochs are there.
    """

    def make(save):
        flags = ["--max-tokens", "400", "--max-epoch", "12", "--validate-interval", "6", "--keep-last-epochs", "3"]
        flags += ["--eval-bleu", "--eval-bleu-args", '{"beam": 2}']
        flags += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
        log = train_model(data, save, *flags)
        assert log.count('"valid_bleu"') == 2

    return make_once("trained", make)


def test_a_model_learns_to_translate(trained):
    """Its best BLEU on the validation set is above 1."""
    state = load_checkpoint(trained / "checkpoint_last.pt")
    best_bleu = state["extra_state"]["best"]
    assert best_bleu > 1


@pytest.mark.parametrize("left_pad", [[], ["--left-pad-source"]], ids=["left", "right"])
def test_generate_translates_every_sentence(data, trained, left_pad):
    """It translates all of them by default, and the same in batches padded on either side as alone."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    argv += ["--beam", "3", "--max-len-a", "0", "--max-len-b", "14"]
    printed, logged = run_cli(generate.cli_main, *argv, *left_pad)
    printed_alone, _ = run_cli(generate.cli_main, *argv, "--batch-size", "1")
    assert sorted(get_translations(printed)) == ALL_TEST_SENTENCES
    assert get_translations(printed) == get_translations(printed_alone)
    assert "BLEU" in printed or "BLEU" in logged


def test_generate_with_prefix_and_alignment(data, trained):
    """With --prefix-size 2, a translation begins as its reference. With --print-alignment, each has an alignment."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    printed, _ = run_cli(generate.cli_main, *argv, "--prefix-size", "2", "--print-alignment")
    references = get_references(printed)
    for number, translation in get_translations(printed).items():
        assert translation.split()[:2] == references[number].split()[:2]
    assert len(re.findall(r"^A-\d+", printed, flags=re.M)) == TEST_SENTENCES


def test_interactive_translates_every_line(data, trained):
    """fairseq-interactive translates four lines, of which it reads up to three at a time."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    argv += ["--buffer-size", "3", "--max-tokens", "100"]
    printed, _ = run_cli(interactive.cli_main, *argv, stdin="w1 w2\nw3\nw4 w5 w6\nw7 w7\n")
    assert sorted(get_translations(printed)) == [0, 1, 2, 3]


def test_validate_counts_every_sentence(data, trained):
    """fairseq-validate reads all 13 sentences of the validation set."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    argv += ["--task", "translation", "--valid-subset", "valid", "--max-tokens", "1000", "--log-format", "json"]
    _, logged = run_cli(validate.cli_main, *argv)
    assert '"valid_bsz": "13"' in logged


def test_average(data, trained, tmp_path):
    """The average has the mean weights of the last checkpoints, and it translates. Wrong --inputs are refused."""
    average = tmp_path / "avg.pt"
    inputs = ["--inputs", trained]
    run_cli(average_checkpoints.main, *inputs, "--num-epoch-checkpoints", "3", "--output", average)
    averaged = load_checkpoint(average)["model"]
    epochs = [load_checkpoint(trained / f"checkpoint{epoch}.pt")["model"] for epoch in (10, 11, 12)]
    for name, weight in averaged.items():
        mean = torch.stack([weights[name].double() for weights in epochs]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-7)
    last_epoch = epochs[2]
    assert not torch.equal(averaged["encoder.layers.0.fc1.weight"], last_epoch["encoder.layers.0.fc1.weight"])

    printed, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, "--path", average)
    assert len(get_translations(printed)) == TEST_SENTENCES

    unwritten = tmp_path / "x.pt"
    output = ["--output", unwritten]
    nine_epochs = ["--num-epoch-checkpoints", "9"]
    with pytest.raises(SynthesizerError, match="found 3 of 9 epoch checkpoints; train on"):
        run_cli(average_checkpoints.main, *inputs, *nine_epochs, *output)
    with pytest.raises(SynthesizerError, match="is a folder; say how many .*--num-epoch-checkpoints"):
        run_cli(average_checkpoints.main, *inputs, *output)
    with pytest.raises(SynthesizerError, match="--inputs nowhere: "):
        run_cli(average_checkpoints.main, "--inputs", "nowhere", *nine_epochs, *output)
    assert not unwritten.exists()


def assert_not_loaded(folder, words, message):
    """Checks that from_pretrained raises a SynthesizerError.

    Args:
        folder: the folder of the model.
        words: the folder of the dictionaries.
        message: a regular expression that has to match in the error message.
    """
    with pytest.raises(SynthesizerError, match=message):
        SynthesizerTransformer.from_pretrained(str(folder), "checkpoint_last.pt", str(words))


def test_from_pretrained(data, trained, unsuitable):
    """Errors are one line in Python, too, and name the argument that Python has."""
    assert_not_loaded("nowhere", data / "bin", "nowhere: no such folder")
    assert_not_loaded(trained, "nowhere", "nowhere: no such folder")
    assert_not_loaded(trained, unsuitable / "words", "the data have another dictionary")

    hub = SynthesizerTransformer.from_pretrained(
        str(trained), "checkpoint_last.pt", str(data / "bin"), user_dir=str(ROOT / "fairseq_synth")
    )
    assert len(hub.translate(["w1 w2 w3", "w4"], beam=2)) == 2
    with pytest.raises(SynthesizerError, match="skip_invalid_size_inputs=True; .*synth_beyond_length='tile'"):
        hub.translate("w1 " * 30)
    with pytest.raises(SynthesizerError, match="--constraints"):
        hub.translate("w1", constraints="ordered")


def test_from_pretrained_registers_the_plugin(data, trained):
    """A program needs nothing else to translate."""
    code = """
import sys
from fairseq_synth.transformer import SynthesizerTransformer
model = SynthesizerTransformer.from_pretrained(sys.argv[1], "checkpoint_last.pt", sys.argv[2])
print(model.translate("w1 w2"))
"""
    process = warm.run(["-c", code, trained, data / "bin"], cwd=ROOT)
    assert process.returncode == 0, process.stderr


# ---- training


@pytest.mark.parametrize(
    "flags",
    [
        ["--checkpoint-activations"],
        ["--amp"],
        ["--bf16"],
        pytest.param(["--fp16"], marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
        ["--memory-efficient-bf16"],
        ["--attention-dropout", "0.1", "--quant-noise-pq", "0.1", "--encoder-normalize-before"],
        ["--encoder-layerdrop", "0.2", "--decoder-layerdrop", "0.2"],
        ["--encoder-synthesizer", "random,dense+vanilla", "--synth-mixture", "sum", "--synth-rank", "4"],
        # --left-pad-target is a switch for True, and fairseq's --left-pad-source is a switch for False
        ["--left-pad-source", "--left-pad-target"],
        ["--num-batch-buckets", "3"],
        ["--required-seq-len-multiple", "8"],
        ["--store-ema", "--ema-decay", "0.5"],
    ],
    ids=get_id_of_flag,
)
def test_a_training_with_other_flags_learns_and_can_be_resumed(data, tmp_path, flags):
    """The loss falls in ten updates, and the next training begins with the eleventh."""
    flags = ["--max-tokens", "400", "--disable-validation", *flags, "--no-epoch-checkpoints"]  # 8 updates an epoch
    losses = read_losses(train_model(data, tmp_path, "--max-update", "10", *flags))
    values = [float(loss) for loss in losses.values()]
    assert values[-1] < values[0] - 0.3
    assert max(losses) == 10
    resumed_losses = read_losses(train_model(data, tmp_path, "--max-update", "12", *flags))
    assert min(resumed_losses) == 11


def test_interrupted_equals_uninterrupted(data, tmp_path):
    """A training that is stopped within the first and second epoch and resumed is, bit for bit, one run.

    An epoch has 8 updates, and both trainings have 16. One is stopped after update 3, within epoch 1, and after update
    10, within epoch 2. The model has every kind of stored weight.
    """
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    flags = ["--disable-validation", "--max-tokens", "400"]  # 8 updates an epoch
    flags += ["--encoder-synthesizer", "random,fixed_random"]
    flags += ["--decoder-synthesizer", "factorized_dense,random+vanilla"]
    whole_losses = read_losses(train_model(data, whole, "--max-update", "16", *flags))

    # The third run ends with epoch 2, so after update 16. The fourth run finds nothing left to do.
    flags_of_parts = [*flags, "--save-interval-updates", "3"]
    first_losses = read_losses(train_model(data, parts, "--max-update", "3", *flags_of_parts))
    second_losses = read_losses(train_model(data, parts, "--max-update", "10", *flags_of_parts))
    last_losses = read_losses(train_model(data, parts, "--max-epoch", "2", *flags_of_parts))
    last_losses.update(read_losses(train_model(data, parts, "--max-update", "16", *flags_of_parts)))
    assert max(first_losses) == 3
    assert min(second_losses) == 4
    assert max(second_losses) == 10
    assert min(last_losses) == 11
    assert max(last_losses) == 16
    assert {**first_losses, **second_losses, **last_losses} == whole_losses

    # Both have a checkpoint after each epoch, and the same weights in the end.
    for save in (whole, parts):
        assert (save / "checkpoint1.pt").exists()
        assert (save / "checkpoint2.pt").exists()
    weights = used_weights(load_checkpoint(whole / "checkpoint_last.pt")["model"])
    resumed_weights = used_weights(load_checkpoint(parts / "checkpoint_last.pt")["model"])
    for name, weight in weights.items():
        assert torch.equal(weight, resumed_weights[name]), name

    # fixed_random is not trained, but it is stored: it is the same after update 3, in epoch 1, and in the end. It is
    # drawn from a normal distribution with a standard deviation of 1. Other weights have been trained.
    early_weights = load_checkpoint(parts / "checkpoint_1_3.pt")["model"]
    fixed_names = [name for name in weights if "fixed_random" in name]
    assert len(fixed_names) == 1
    fixed_name = fixed_names[0]
    assert torch.equal(weights[fixed_name], early_weights[fixed_name])
    assert weights[fixed_name].std() > 0.5
    assert not torch.equal(weights["encoder.layers.0.fc1.weight"], early_weights["encoder.layers.0.fc1.weight"])


def test_checkpoints_at_the_end_of_an_epoch_are_numbered(data, tmp_path):
    """They are numbered as any other, so that an average has them, and older ones are removed.

    A training that is resumed from one begins with the next epoch.
    """
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    flags = ["--max-tokens", "400", "--no-epoch-checkpoints"]  # 8 updates an epoch
    flags += ["--save-interval-updates", "8", "--keep-interval-updates", "2"]
    whole_losses = read_losses(train_model(data, whole, "--max-update", "24", *flags))
    first_losses = read_losses(train_model(data, parts, "--max-update", "8", *flags))
    last_losses = read_losses(train_model(data, parts, "--max-update", "24", *flags))
    # The losses have the number of updates as keys, so this also means that no update is done twice or left out.
    assert {**first_losses, **last_losses} == whole_losses

    # The epochs 1, 2 and 3 end after 8, 16 and 24 updates, each with a checkpoint. The last two checkpoints are kept.
    for save in (whole, parts):
        names = {path.name for path in save.glob("checkpoint*.pt")}
        assert names == {"checkpoint_2_16.pt", "checkpoint_3_24.pt", "checkpoint_best.pt", "checkpoint_last.pt"}

    # A training that is resumed from checkpoint_3_24.pt begins with epoch 4, as from checkpoint_last.pt. The numbered
    # checkpoint also has the best loss on the validation set so far.
    numbered = load_checkpoint(whole / "checkpoint_3_24.pt")["extra_state"]
    last = load_checkpoint(whole / "checkpoint_last.pt")["extra_state"]
    assert numbered["train_iterator"] == last["train_iterator"]
    assert numbered["train_iterator"]["epoch"] == 4
    assert numbered["best"] > 0


def test_batches_do_not_depend_on_the_epoch_of_a_resume(data):
    """A process that starts in epoch 3 has the batches of one that started in epoch 1, and is in epoch 3."""

    def make_iterator(epoch):
        """Returns fairseq's iterator of the training set in a process that starts in this epoch."""
        cfg = TranslationConfig(data=str(data / "bin"), source_lang="en", target_lang="de", dataset_impl="mmap")
        task = TranslationTask.setup_task(cfg)
        task.load_dataset("train")
        return task.get_batch_iterator(task.dataset("train"), max_tokens=200, epoch=epoch)

    first = make_iterator(1)
    third = make_iterator(3)
    assert first.epoch == 1
    assert third.epoch == 3
    batches_of_first = [batch.tolist() for batch in first.frozen_batches]
    batches_of_third = [batch.tolist() for batch in third.frozen_batches]
    assert batches_of_first == batches_of_third


def test_start_from_a_stock_checkpoint(data, tmp_path):
    """--finetune-from-model with --synth-mixture sum goes on from a stock Transformer's loss.

    --restore-file would restore the optimizer, too, and is refused.
    """
    # A stock Transformer is trained, and a Synthesizer goes on from its weights.
    stock_sizes = remove_flags(SMALL, "--synth-max-length")
    log = train_model(data, tmp_path / "stock", "--max-epoch", "4", arch="transformer_multi30k", small=stock_sizes)
    stock_losses = read_losses(log)
    stock_checkpoint = tmp_path / "stock" / "checkpoint_last.pt"
    flags = ["--max-update", "3", "--lr", "1e-4", "--synth-mixture", "sum"]
    flags += ["--finetune-from-model", stock_checkpoint]
    losses = read_losses(train_model(data, tmp_path / "warm", *flags))
    first_loss = float(losses[1])  # the loss of update 1, which is a string in the log
    # The loss differs from batch to batch, so the end of the stock training is the mean of its last five losses. The
    # first loss of the Synthesizer is near this end, and not near the first loss of the stock training.
    last_five_stock_losses = [float(loss) for loss in list(stock_losses.values())[-5:]]
    last_stock_loss = sum(last_five_stock_losses) / 5
    assert abs(first_loss - last_stock_loss) < 0.25
    assert float(stock_losses[1]) - first_loss > 0.5

    # averages of the weights (--store-ema) begin with those of the checkpoint, and do not change the training
    averaged = tmp_path / "averaged"
    assert read_losses(train_model(data, averaged, *flags, "--store-ema", "--ema-decay", "0.99")) == losses
    state = load_checkpoint(averaged / "checkpoint_last.pt")
    averages = state["extra_state"]["ema"]
    for name, weight in used_weights(state["model"]).items():
        assert torch.allclose(averages[name], weight, atol=1e-3), name

    # --restore-file is refused, with a hint at --reset-optimizer
    argv = [data / "bin", *USER_DIR, "--arch", RANDOM_VANILLA, *SMALL, *RECIPE, "--save-dir", tmp_path / "restored"]
    argv += ["--restore-file", stock_checkpoint, "--synth-mixture", "sum"]
    line = get_error_line(train.cli_main, *argv)
    assert "--restore-file: " in line
    assert "--reset-optimizer" in line

    # If the sizes are not those of the checkpoint, the error is about the sizes, which come before the optimizer.
    line = get_error_line(train.cli_main, *argv, "--encoder-ffn-embed-dim", "24")
    fault = r"encoder.layers.0.fc1.weight is \[\d+, 16\] in the .* and \[24, 16\] in"
    assert re.search(f"checkpoint_last.pt: the checkpoint does not fit the model: {fault}", line)
    assert re.search(r"\(and \d+ more\); use the --arch and the sizes that it was trained with", line)


def test_hydra(data, tmp_path, monkeypatch, capsys):
    """fairseq-hydra-train takes the YAML of configs/; its checkpoint translates and resumes.

    Wrong names of flags and of functions are refused.

    Two of the commands run in processes of their own, as a user starts them. The others run in this process, which
    saves the time of a start, but needs two changes of the process (monkeypatch).
    """
    # what the test is about: the YAML, and functions of the heads that are not those of the YAML
    argv = ["--config-dir", ROOT / "configs", "--config-name", "multi30k", f"task.data={data}/bin"]
    argv += [f"common.user_dir={ROOT}/fairseq_synth", "model.encoder_synthesizer=random"]
    argv += [f"checkpoint.save_dir={tmp_path}/save", f"hydra.run.dir={tmp_path}"]
    # sizes of a small model and a short training on a CPU
    argv += ["model.encoder_layers=1", "model.decoder_layers=1"]
    argv += ["model.encoder_embed_dim=16", "model.decoder_embed_dim=16", "model.synth_max_length=24"]
    argv += ["optimization.lr=[0.01]", "lr_scheduler.warmup_updates=10", "dataset.max_tokens=200"]
    argv += ["common.bf16=false", "dataset.num_workers=0"]
    monkeypatch.chdir(tmp_path)
    # Hydra closes all handlers there are, and absl's (of rouge-score) closes the file that pytest has put in its place
    monkeypatch.setattr("logging.shutdown", lambda *_: None)

    # training, in a process of its own
    run_program("hydra_train", *argv, "optimization.max_update=20")
    last_checkpoint = tmp_path / "save" / "checkpoint_last.pt"
    state = load_checkpoint(last_checkpoint)
    assert "encoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert "decoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert not any(name.endswith("alpha") for name in state["model"])
    assert state["cfg"].model.encoder_synthesizer == "random"
    assert state["cfg"].model.decoder_synthesizer == "random"

    # translation
    printed, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, "--path", last_checkpoint)
    assert len(get_translations(printed)) == TEST_SENTENCES

    # the training goes on
    run_cli(hydra_train.cli_main, *argv, "optimization.max_update=25")
    history = load_checkpoint(last_checkpoint)["optimizer_history"]
    assert history[-1]["num_updates"] == 25

    # a wrong name of a flag, for which Hydra prints an error and ends the process
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # under coverage, hydra sees a debugger and raises
    with pytest.raises(SystemExit) as error:
        run_cli(hydra_train.cli_main, *argv, "model.encoder_synthesiser=random")
    assert error.value.code != 0
    assert "encoder_synthesiser" in capsys.readouterr().err

    # a wrong name of a function, in a process of its own: only at the end of a process, an error is printed in one line
    process = run_program("hydra_train", *argv, "model.encoder_synthesizer=randm", check=False)
    assert_failed_with_one_line(process, "--encoder-synthesizer")


def test_from_any_folder_and_when_installed_too(data, trained, tmp_path):
    """--user-dir may be relative, or what ``python -m fairseq_synth`` prints, with a copy installed beside it."""
    site = tmp_path / "site"
    installed = site / "fairseq_synth"
    shutil.copytree(ROOT / "fairseq_synth", installed)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    printed = warm.run(["-m", "fairseq_synth"], cwd=tmp_path, env=environment, fresh=True).stdout
    assert printed == f"{installed}\n"
    relative = os.path.relpath(ROOT / "fairseq_synth", tmp_path) + "/"
    code = "from fairseq_cli.generate import cli_main; cli_main()"
    for user_dir in (printed.strip(), relative):
        argv = [data / "bin", "--user-dir", user_dir, "--path", trained / "checkpoint_last.pt"]
        process = warm.run(["-c", code, *argv], cwd=tmp_path, env=environment)
        assert len(get_translations(process.stdout)) == TEST_SENTENCES, process.stderr


# ---- flags that are refused in training


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--encoder-synthesizer", "randm"], ["--encoder-synthesizer", "'randm'", "choose from", "factorized_dense"]),
        (["--encoder-attention-heads", "3"], ["--encoder-attention-heads 3"]),
        (["--cross-self-attention"], ["--cross-self-attention"]),
        (["--decoder-synthesizer", "factorized_dense", "--synth-max-length", "23"], ["--synth-max-length 23", "a*b"]),
        (["--decoder-synthesizer", "random:2/vanilla:1"], ["--decoder-synthesizer", "2 + 1 heads", "the 2 attention"]),
    ],
    ids=get_id_of_flag,
)
def test_flags_that_do_not_fit_are_refused(data, tmp_path, flags, parts):
    """The error is one line, and no checkpoint is written."""
    save = tmp_path / "save"
    argv = [data / "bin", *USER_DIR, "--arch", RANDOM, *SMALL, *RECIPE, *flags]
    line = get_error_line(train.cli_main, *argv, "--save-dir", save, "--max-update", "1")
    assert_has_parts(line, parts)
    assert not (save / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "flag, choices", [("--synth-mixture mean", ["convex", "sum"]), ("--synth-beyond-length wrap", ["refuse", "tile"])]
)
def test_a_wrong_choice_is_refused_by_the_parser_with_the_choices(data, flag, choices, capsys):
    """The parser itself prints the error, and names the flag, too."""
    name, value = flag.split()
    with pytest.raises(SystemExit):
        run_cli(train.cli_main, data / "bin", *USER_DIR, "--arch", RANDOM, *RECIPE, name, value)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert_has_parts(last_line, [name, *choices])


# ---- sources of 20 words, for a model that takes 12 tokens

TWELVE = ["--synth-max-length", "12"]


@pytest.fixture(scope="module")
def uneven(make_once):
    """Provides the folder of a corpus whose sources have up to 20 words and whose targets have three of them.

    Corpora for summarization are like this.
    """

    def make(folder):
        sizes = {"train": 40, "valid": 7, "test": TEST_SENTENCES}
        argv = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", folder / "bin"]
        for split, sentences in sizes.items():
            make_text(folder / split, sentences, shortest=5, longest=20, target=lambda words: words[:3])
            argv += [f"--{split}pref", folder / split]
        run_cli(preprocess.cli_main, *argv)

    return make_once("uneven", make)


class Summarizer(NamedTuple):
    """A model that has been trained on the corpus `uneven`: its checkpoint, and the log of the training."""

    checkpoint: Path
    log: str


@pytest.fixture(scope="module")
def summarizer(uneven, make_once):
    """Provides a `Summarizer` with l = 12 after an epoch."""

    def make(save):
        log = train_model(uneven, save, "--max-epoch", "1", "--truncate-source", *TWELVE)
        (save / "log").write_text(log)

    save = make_once("summarizer", make)
    return Summarizer(checkpoint=save / "checkpoint_last.pt", log=(save / "log").read_text())


def test_truncated_sources_are_all_used(uneven, summarizer):
    """--truncate-source cuts at l: no sentence is skipped in training, refused in validation or left untranslated."""
    assert "will be skipped" not in summarizer.log
    assert '"valid_loss"' in summarizer.log
    argv = [uneven / "bin", *USER_DIR, "--path", summarizer.checkpoint, "--truncate-source"]
    printed, _ = run_cli(generate.cli_main, *argv)
    assert sorted(get_translations(printed)) == ALL_TEST_SENTENCES


def test_references_of_any_length_can_be_compared_with(uneven, summarizer):
    """A reference over l is only compared with; to score it, the model would have to read it."""
    argv = [uneven / "bin", *USER_DIR, "--path", summarizer.checkpoint, "-s", "de", "-t", "en", "--max-len-b", "9"]
    printed, logged = run_cli(generate.cli_main, *argv)
    assert sorted(get_translations(printed)) == ALL_TEST_SENTENCES
    assert "will be skipped" not in logged
    references_over_l = re.findall(r"^T-\d+\t(\w+ ){15}", printed, flags=re.M)
    assert len(references_over_l) > 3
    line = get_error_line(generate.cli_main, *argv, "--score-reference")
    assert "12 is this model's --synth-max-length" in line


def test_long_validation_sentences_are_found_before_training(uneven, tmp_path):
    """The error names the data set, their number and the first of them. It only occurs if they are validated.

    The model takes sentences of up to 12 tokens (the flags TWELVE). Sources have up to 20 words, targets three.
    """
    argv = [uneven / "bin", *USER_DIR, "--arch", RANDOM, *SMALL, *RECIPE, *TWELVE]
    argv += ["--save-dir", tmp_path, "--max-update", "1"]
    line = get_error_line(train.cli_main, *argv)
    sentences = (uneven / "valid.en").read_text().splitlines()
    lengths = [len(sentence.split()) + 1 for sentence in sentences]  # with the end of the sentence
    long_sentences = [number for number, length in enumerate(lengths) if length > 12]
    first = long_sentences[0]
    fault = f"--valid-subset valid: {len(long_sentences)} sentences are too long, the first is number {first + 1}"
    assert fault in line
    assert line.startswith("--synth-max-length: train with a larger one; --valid-subset")
    assert f"{lengths[first]}, 4" in line  # the lengths of the source and of the target: three words and the end
    assert "12 is this model's --synth-max-length" in line

    # No error occurs if long sentences are skipped, or if nothing is validated. The second training goes on from the
    # first one, which has made one update.
    run_cli(train.cli_main, *argv, "--skip-invalid-size-inputs-valid-test")
    run_cli(train.cli_main, *argv, "--disable-validation", "--max-update", "2")


# ---- what is refused before the first batch


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--required-seq-len-multiple", "7"], ["--required-seq-len-multiple 7", "more than 21 ", "21 or 28"]),
        (["--synth-max-length", "1"], ["--synth-max-length 1", "at least 2"]),
        (
            ["--synth-max-length", "2", "--train-subset", "test1"],
            ["dataset is empty", "longer than --synth-max-length 2"],
        ),
        (["--finetune-from-model", "nowhere.pt"], ["--finetune-from-model nowhere.pt does not exist"]),
        (["--train-subset", "nothing"], ["Dataset not found: nothing", "bin"]),
        (["--task", "multilingual_translation", "--lang-pairs", "en-de"], ["--task: ", "translation or denoising"]),
        (["--task", "translation_lev", "--criterion", "nat_loss"], ["--task: ", "use --task translation"]),
        (["--task", "semisupervised_translation", "--lang-pairs", "en-de"], ["--task: ", "translation or denoising"]),
        pytest.param(
            ["--fp16"], ["--fp16 ", "--bf16"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
        ),
    ],
    ids=get_id_of_flag,
)
def test_flags_that_do_not_fit_the_data_are_refused_before_the_first_batch(data, tmp_path, flags, parts):
    """The error is one line, and nothing is written."""
    argv = [data / "bin", *USER_DIR, "--arch", RANDOM, *SMALL, *RECIPE, "--cpu"]
    argv += ["--save-dir", tmp_path, "--disable-validation", "--max-update", "1"]
    line = get_error_line(train.cli_main, *argv, *flags)
    assert_has_parts(line, parts)
    assert not os.listdir(tmp_path)


def test_the_error_about_a_longer_row_names_the_flag_with_which_its_task_adds_tokens(data, tmp_path):
    """fairseq checks lengths before the denoising task inserts noise.

    Rows of 20 words fit the model, which takes up to 24 tokens. With --insert 0.3, the task adds about 30% more tokens,
    and they do not fit any more.
    """
    rows = tmp_path / "rows"
    lines = []
    for line in (data / "train.en").read_text().splitlines():
        repeated_words = line.split() * 20  # a line has one word or more, so these are at least 20
        lines.append(" ".join(repeated_words[:20]))
    write_lines(rows, lines)
    argv = ["--only-source", "--srcdict", data / "bin" / "dict.en.txt", "--trainpref", rows]
    argv += ["--validpref", rows]  # fairseq 0.12.2 wants it even with --disable-validation
    run_cli(preprocess.cli_main, *argv, "--destdir", tmp_path / "bin")

    argv = [tmp_path / "bin", *USER_DIR, "--arch", RANDOM, *SMALL, *RECIPE, "--cpu", *NO_THREAD]
    argv += ["--task", "denoising", "--mask", "0.3", "--replace-length", "1", "--share-all-embeddings"]
    argv += ["--sample-break-mode", "eos", "--disable-validation", "--max-update", "1"]
    run_cli(train.cli_main, *argv, "--save-dir", tmp_path / "save")  # raises no error without --insert
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path / "other", "--insert", "0.3")
    assert "longer than --synth-max-length 24" in line, line
    assert "as with --insert" in line, line


# ---- flags of the search


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--min-len", "24"], ["--min-len 24", "at most 23 ", "--synth-max-length 24"]),
        (["--min-len", "9", "--max-len-a", "0", "--max-len-b", "8"], ["--min-len: --max-len-a and --max-len-b"]),
        (["--required-seq-len-multiple", "7"], ["--required-seq-len-multiple 7", "remove the flag"]),
    ],
    ids=get_id_of_flag,
)
def test_flags_of_the_search_that_do_not_fit_are_refused(data, trained, flags, parts):
    """The error of fairseq-generate is one line."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", *flags]
    line = get_error_line(generate.cli_main, *argv)
    assert_has_parts(line, parts)


def count_repeated_ngrams(words, size):
    """Returns how many sequences of `size` words in a list of words have occurred earlier in the list."""
    ngrams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(ngrams) - len(set(ngrams))


@pytest.mark.parametrize("size, length", [(2, "20"), (1, "5")])
def test_no_ngram_occurs_twice_with_no_repeat_ngram_size(data, trained, size, length):
    """Without --no-repeat-ngram-size, the same search repeats some."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--min-len", length, "--beam", "2"]

    def count_repetitions(*flags):
        """Returns the number of repeated n-grams in all translations of a search with these flags."""
        printed, _ = run_cli(generate.cli_main, *argv, *flags)
        return sum(count_repeated_ngrams(line.split(), size) for line in get_translations(printed).values())

    assert count_repetitions() > 0
    assert count_repetitions("--no-repeat-ngram-size", size) == 0


def test_the_longest_possible_min_len_is_reached_by_every_translation(data, trained):
    """With l = 24, a translation can have 23 words."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--min-len", "23", "--beam", "1"]
    printed, _ = run_cli(generate.cli_main, *argv)
    for translation in get_translations(printed).values():
        assert len(translation.split()) == 23


def test_a_stock_model_is_not_said_to_be_a_synthesizer(data, tmp_path):
    """The error about fairseq's own limit is one line too, without the plugin's flag."""
    sizes = [*remove_flags(SMALL, "--synth-max-length"), "--max-target-positions", "20"]
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_multi30k", *sizes, *RECIPE, "--save-dir", tmp_path]
    line = get_error_line(train.cli_main, *argv, "--valid-subset", "test1", "--ignore-unused-valid-subsets")
    assert "--valid-subset test1: 3 sentences are too long" in line
    assert "synth" not in line


def test_a_finished_run_stays_as_it_is(data, tmp_path):
    """It stays however it is called: here as ``python -m fairseq_cli.train``. Another model needs another folder."""
    flags = ["--max-update", "2", "--disable-validation"]
    train_model(data, tmp_path, *flags)
    checkpoint = tmp_path / "checkpoint_last.pt"
    argv_of_another_model = [data / "bin", *USER_DIR, "--arch", "transformer_synth_dense_multi30k", *SMALL, *RECIPE]
    line = get_error_line(train.cli_main, *argv_of_another_model, "--save-dir", tmp_path)
    assert f"{checkpoint}: " in line
    assert "needs a --save-dir of its own" in line

    def run_module():
        """Runs the module as ``python -m fairseq_cli.train`` does."""
        runpy.run_module("fairseq_cli.train", run_name="__main__")

    bytes_before = checkpoint.read_bytes()
    log = train_model(data, tmp_path, *flags, main=run_module)
    assert "nothing to do: the model has 2 updates, and --max-update is 2" in log
    assert "done training" in log
    assert checkpoint.read_bytes() == bytes_before
    assert not read_losses(log)


# ---- mistakes of users


@pytest.fixture(scope="module")
def unsuitable(data, make_once):
    """Provides a folder with data that a user may give by mistake, which `make_unsuitable` describes."""

    def make(folder):
        make_unsuitable(folder, data)

    return make_once("unsuitable", make)


def make_unsuitable(folder, data):
    """Makes data in three subfolders of a folder.

    - ``words``: `data` with more words, so that it has another dictionary
    - ``cached``: `data` in fairseq's format "cached"
    - ``labels``: the English sentences of ``words``, and for each of them one of four labels
    """
    # the text for "words" and "labels", in the folder itself: all words that begin with w1 (w1, w10, w11, ...) begin
    # with one of x0, ..., x8 instead, which changes from line to line
    for split in SPLITS:
        for language in ("en", "de"):
            lines = (data / f"{split}.{language}").read_text().splitlines()
            changed_lines = [line.replace("w1", f"x{number % 9}") for number, line in enumerate(lines)]
            write_lines(folder / f"{split}.{language}", changed_lines)
        number_of_sentences = len((data / f"{split}.en").read_text().splitlines())
        labels = ["abcd"[number % 4] for number in range(number_of_sentences)]
        write_lines(folder / f"{split}.label", labels)

    # "words": the changed text with a dictionary of its own
    pair = ["-s", "en", "-t", "de", "--joined-dictionary"]
    run_cli(preprocess.cli_main, *pair, *list_texts(folder), "--destdir", folder / "words")

    # "cached": the text and the dictionary of `data` in another format
    cached_flags = ["--srcdict", data / "bin" / "dict.en.txt", "--dataset-impl", "cached"]
    run_cli(preprocess.cli_main, *pair, *list_texts(data), *cached_flags, "--destdir", folder / "cached")

    # "labels": fairseq's task sentence_prediction reads sentences from the subfolder input0, and labels from label
    alone = ["--only-source"]
    run_cli(preprocess.cli_main, *alone, *list_texts(folder, ".en"), "--destdir", folder / "labels" / "input0")
    run_cli(preprocess.cli_main, *alone, *list_texts(folder, ".label"), "--destdir", folder / "labels" / "label")


def list_texts(folder, suffix=""):
    """Returns the flags with which fairseq-preprocess reads the texts of all splits in a folder."""
    flags = []
    for split in SPLITS:
        flags += [f"--{split}pref", f"{folder}/{split}{suffix}"]
    return flags


# Words of commands. In them, {data} stands for the corpus of the model, {checkpoint} for the model, and {unsuitable}
# for the folder of the fixture `unsuitable`.
TRAIN = "{data} --arch transformer_synth_random_vanilla_multi30k"
CLASSIFY = (
    "{unsuitable}/labels --task sentence_prediction --arch roberta_synth_random_agnews --max-positions 24 "
    "--optimizer adam --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 "
    "--batch-size 8 --synth-max-length 24 --criterion sentence_prediction"
)
RESUME = f"{TRAIN} --restore-file {{checkpoint}}"
READ = "{data} --path {checkpoint} --cpu"
COMMANDS = {
    "train": train.cli_main,
    "generate": generate.cli_main,
    "interactive": interactive.cli_main,
    "validate": validate.cli_main,
}


@pytest.mark.parametrize(
    "command, flags, parts",
    [
        ("train", f"{TRAIN} --best-checkpoint-metric bleu", ["metric bleu: ", "loss, nll_loss, ppl", "--eval-bleu"]),
        ("train", f"{TRAIN} --eval-bleu --best-checkpoint-metric blue", ["metric blue: ", "bleu"]),
        ("train", f"{TRAIN} --eval-bleu --eval-bleu-args {{'beam':2}}", ["--eval-bleu-args {'beam':2}: ", "JSON"]),
        ("train", f"{TRAIN} --eval-bleu --eval-bleu-args [2]", ["--eval-bleu-args [2]: ", '{"beam": 4']),
        ("train", f'{TRAIN} --eval-bleu --eval-bleu-args {{"beem":2}}', ["--eval-bleu-args: beem"]),
        ("train", f'{TRAIN} --eval-bleu --eval-bleu-args {{"constraints":1}}', ["--eval-bleu-args: constraints"]),
        ("train", f"{TRAIN} --eval-bleu --eval-bleu-detok-args {{", ["--eval-bleu-detok-args {: ", "JSON"]),
        ("train", f"{TRAIN} --eval-bleu --eval-bleu-detok mosis", ["--eval-bleu-detok mosis", "moses"]),
        ("train", f"{TRAIN} --adam-betas 0.9", ["--adam-betas 0.9: ", "(0.9, 0.98)"]),
        (
            "train",
            f"{TRAIN} --optimizer-overrides {{lr:3}}",
            ["--optimizer-overrides {lr:3}: ", """\"{'lr': [0.0001]}\""""],
        ),
        ("generate", f"{READ} --model-overrides {{dropout:0}}", ["--model-overrides {dropout:0}: ", "Python"]),
        ("train", TRAIN.replace("vanilla", "vanila"), ["--arch transformer_synth_random_vanila_multi30k", "vanilla_"]),
        (
            "train",
            f"{RESUME} --lr-scheduler inverse_sqrt",
            ["{checkpoint}: ", "--lr-scheduler", "--reset-lr-scheduler"],
        ),
        ("train", f"{RESUME} --lr-scheduler reduce_lr_on_plateau", ["{checkpoint}: ", "--reset-lr-scheduler"]),
        ("train", f"{RESUME} --optimizer sgd", ["{checkpoint}: ", "--reset-optimizer"]),
        ("train", f"{TRAIN} --restore-file nowhere.pt", ["--restore-file nowhere.pt: no such file"]),
        ("train", f"{TRAIN} --continue-once nowhere.pt", ["--continue-once nowhere.pt: no such file"]),
        (
            "train",
            RESUME.replace("{data}", "{unsuitable}/words"),
            ["{checkpoint}: ", "another dictionary (", " words, 24 in the"],
        ),
        (
            "train",
            TRAIN.replace("{data}", "{unsuitable}/words") + " --finetune-from-model {checkpoint}",
            ["{checkpoint}: ", "another dictionary (", " words, 24 in the", "--srcdict"],
        ),
        ("generate", READ.replace("{data}", "{unsuitable}/words"), ["another dictionary (", " words, 24 in the"]),
        (
            "validate",
            READ.replace("{data}", "{unsuitable}/words") + " --task translation --max-tokens 99",
            ["another dictionary (", " words, 24 in the"],
        ),
        ("train", f"{TRAIN} --max-tokens 8", ["--max-tokens 8: ", "--valid-subset valid: "]),
        ("train", f"{TRAIN} --max-tokens-valid 8", ["--max-tokens-valid", "--valid-subset valid: "]),
        ("generate", f"{READ} --max-tokens 8", ["--max-tokens 8: a sentence", "--skip-invalid"]),
        ("generate", f"{READ} --constraints", ["--constraints: ", "fairseq-interactive"]),
        ("interactive", f"{READ} --constraints --sampling --nbest 5", ["--constraints: ", "--sampling"]),
        ("interactive", f"{READ} --constraints --diverse-beam-groups 5", ["--constraints: ", "--diverse-beam-groups"]),
        ("interactive", f"{READ} --constraints --max-len-b 1", ["--constraints: ", "--max-len-b"]),
        ("interactive", f"{READ} --constraints --buffer-size 2", ["--constraints: ", "dictionary"]),
        ("interactive", f"{READ} --replace-unk", ["--replace-unk: "]),
        ("train", f"{CLASSIFY} --num-classes 3", ["--num-classes 3: ", "4 labels", "--num-classes 4"]),
        ("train", TRAIN.replace("{data}", "{unsuitable}"), ["contains no data for a pair of languages"]),
    ],
)
def test_a_mistake_is_refused_in_one_line(data, trained, unsuitable, tmp_path, command, flags, parts):
    """The line names the flag or file, and what to mend. It comes before the first update.

    Mistakes in Python's and JSON's syntax are among them.
    """
    folders = {"{data}": data / "bin", "{checkpoint}": trained / "checkpoint_last.pt", "{unsuitable}": unsuitable}

    def fill_in(text):
        """Returns a text with the paths that its words in braces stand for."""
        for placeholder, path in folders.items():
            text = text.replace(placeholder, str(path))
        return text

    argv = [*USER_DIR, *(fill_in(word) for word in flags.split())]
    if command == "train":
        if "multi30k" in flags:
            defaults = [*SMALL, *RECIPE]
        else:
            defaults = remove_flags(RECIPE, "--criterion", "--label-smoothing")  # a classifier has another criterion
        argv = [*defaults, "--cpu", "--max-update", "1", *argv, "--save-dir", tmp_path]
    if "--buffer-size" in flags:
        lines = "w1 w2\tunknown\nw3\n"
    else:
        lines = "w1 w2\tw7 w8\n"
    line = get_error_line(COMMANDS[command], *argv, stdin=lines)
    assert_has_parts(line, [fill_in(part) for part in parts])
    assert not list(tmp_path.glob("*.pt"))


# The next four tests use flags that are similar to mistakes. The checks of mistakes must not refuse what fairseq's help
# allows. None of the commands gives the languages (-s and -t): fairseq finds them in the names of the data's files.


def test_cached_data_and_two_spellings_of_a_flag_are_accepted(data, unsuitable, tmp_path):
    """Data in the format "cached" give the same losses as `data`, whose format is "mmap".

    The betas of Adam may be written as a tuple or as a list. Sentences of more than 8 tokens are skipped.
    """
    flags = ["--skip-invalid-size-inputs-valid-test", "--max-tokens", "8", "--max-update", "2"]
    mmap_log = train_model(data, tmp_path / "mmap", *flags, "--adam-betas", "(0.9, 0.98)")

    argv = [unsuitable / "cached", *USER_DIR, "--arch", RANDOM_VANILLA, *SMALL, *RECIPE, "--cpu"]
    argv += ["--save-dir", tmp_path / "cached", *flags, "--adam-betas", "[0.9, 0.98]"]
    _, cached_log = run_cli(train.cli_main, *argv)
    assert read_losses(cached_log) == read_losses(mmap_log)


def test_longer_sentences_can_be_skipped_when_translating(data, trained):
    """Some sentences of the test set have more than 8 tokens, and are skipped. The others are translated."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--cpu"]
    argv += ["--skip-invalid-size-inputs-valid-test", "--max-tokens", "8"]
    printed, _ = run_cli(generate.cli_main, *argv)
    assert 0 < len(get_translations(printed)) < TEST_SENTENCES


def test_constraints_are_accepted(data, trained):
    """fairseq-interactive takes sentences with and without a constraint: a word that has to be in the translation."""
    lines = "w1 w2\tw7\nw3\n"  # in the first line, the constraint follows after a tab
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--cpu"]
    argv += ["--constraints", "--tokenizer", "moses"]
    printed, _ = run_cli(interactive.cli_main, *argv, stdin=lines)
    translations = get_translations(printed)
    assert "w7" in translations[0].split()
    assert sorted(translations) == [0, 1]


def test_a_training_can_be_resumed_with_another_scheduler(data, trained, tmp_path):
    """--reset-lr-scheduler allows it. The model has been trained for 12 epochs with the same --max-tokens.

    So one more epoch is left, after which it is validated.
    """
    flags = ["--restore-file", trained / "checkpoint_last.pt", "--max-tokens", "400", "--max-epoch", "13"]
    flags += ["--lr-scheduler", "inverse_sqrt", "--reset-lr-scheduler"]
    log = train_model(data, tmp_path / "resumed", *flags)
    assert '"valid_loss"' in log


def test_a_missing_data_folder_is_named(tmp_path):
    """The error is one line."""
    nowhere = tmp_path / "nowhere"
    argv = [nowhere, *USER_DIR, "--arch", RANDOM, *RECIPE, "--save-dir", tmp_path / "save"]
    line = get_error_line(train.cli_main, *argv)
    assert str(nowhere) in line
    assert "no such" in line


# ---- sentences that are longer than l


def test_sentences_longer_than_l_are_used_with_synth_beyond_length_tile(uneven, tmp_path):
    """With l = 6 sentences of 21 tokens are trained on, validated and translated; no limit is left in the log."""
    flags = ["--max-epoch", "1", "--synth-max-length", "6", "--synth-beyond-length", "tile"]
    log = train_model(uneven, tmp_path, *flags, "--decoder-synthesizer", "random:1/dense+vanilla:1")
    assert "will be skipped" not in log
    assert '"valid_loss"' in log
    assert "--synth-max-length" not in log
    argv = [uneven / "bin", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--max-len-b", "20"]
    printed, _ = run_cli(generate.cli_main, *argv)
    assert sorted(get_translations(printed)) == ALL_TEST_SENTENCES


def test_a_sentence_longer_than_l_is_skipped_in_training_and_refused_elsewhere(data, trained, tmp_path):
    """In training it is skipped with a warning that names the flag.

    In validation, generation and interactive use it is refused.
    """
    log = train_model(data, tmp_path, "--max-update", "1", "--synth-max-length", "8", "--disable-validation")
    assert "samples have invalid sizes and will be skipped" in log
    assert "--synth-max-length 8" in log

    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    line = get_error_line(generate.cli_main, *argv, "--gen-subset", "test1")
    assert "--synth-max-length" in line
    flags = ["--task", "translation", "--valid-subset", "test1", "--batch-size", "4"]
    line = get_error_line(validate.cli_main, *argv, *flags)
    assert "--synth-max-length" in line
    thirty_words = " ".join(["w1"] * 30)
    line = get_error_line(interactive.cli_main, *argv, stdin=thirty_words)
    assert "--synth-max-length" in line


# ---- checkpoints that cannot be used or written


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--synth-max-length", "30"], ["--synth-max-length"]),
        (["--encoder-synthesizer", "dense"], ["checkpoint_last.pt: ", "weights of random, and query", "dense"]),
    ],
    ids=["length", "function"],
)
def test_a_checkpoint_of_another_model_cannot_be_resumed(data, trained, tmp_path, flags, parts):
    """The error is one line, which says what differs."""
    argv = [data / "bin", *USER_DIR, "--arch", RANDOM_VANILLA, *SMALL, *RECIPE, *flags]
    argv += ["--restore-file", trained / "checkpoint_last.pt", "--save-dir", tmp_path]
    line = get_error_line(train.cli_main, *argv)
    assert_has_parts(line, parts)


def test_broken_checkpoints_are_refused(data, trained, tmp_path):
    """A truncated, a missing and a hostile one are refused by name; nothing in the hostile one runs."""
    argv = [data / "bin", *USER_DIR]
    whole = (trained / "checkpoint_last.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(whole[: len(whole) // 2])
    line = get_error_line(generate.cli_main, *argv, "--path", tmp_path / "short.pt")
    assert "short.pt" in line

    line = get_error_line(generate.cli_main, *argv, "--path", tmp_path / "no.pt")
    assert "no.pt" in line
    assert "not found" in line

    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("torch before 2.6 loads what it is given")
    created_by_hostile = tmp_path / "ran"

    class Hostile:
        """An object that runs a command when it is unpickled."""

        def __reduce__(self):
            return os.system, (f"touch {created_by_hostile}",)

    torch.save({"args": None, "cfg": Hostile(), "model": {}}, tmp_path / "hostile.pt")
    line = get_error_line(generate.cli_main, *argv, "--path", tmp_path / "hostile.pt")
    assert "hostile.pt" in line
    assert not created_by_hostile.exists()


def test_a_full_disk_ends_a_training_in_one_line(data, tmp_path):
    """A checkpoint that cannot be written ends the run in one line; the one before resumes."""
    flags = ["--disable-validation", "--no-epoch-checkpoints"]
    train_model(data, tmp_path, "--max-update", "3", *flags)
    size = (tmp_path / "checkpoint_last.pt").stat().st_size
    argv = [data / "bin", *USER_DIR, "--arch", RANDOM_VANILLA, *SMALL, *RECIPE, "--save-dir", tmp_path]
    process = run_program("train", *argv, "--max-update", "6", *flags, check=False, file_size_limit=size // 2)
    assert_failed_with_one_line(process, "could not be written")
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]
    losses = read_losses(train_model(data, tmp_path, "--max-update", "6", "--disable-validation"))
    assert min(losses) == 4

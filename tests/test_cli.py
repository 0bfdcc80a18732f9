"""The stock command lines, run as a user runs them, on a corpus of a few hundred sentences."""

import os
import re
import runpy
import subprocess
import sys

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
    run_cli,
    run_program,
    train_model,
    used_weights,
)

from fairseq_synth.errors import SynthesizerError


@pytest.fixture(scope="session")
def trained(data, make_once):
    """A model that has learned to turn short sentences around, with --eval-bleu and three epochs' checkpoints."""

    def make(save):
        bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--best-checkpoint-metric", "bleu"]
        bleu += ["--maximize-best-checkpoint-metric", "--validate-interval", "6", "--keep-last-epochs", "3"]
        log = train_model(data, save, "--max-tokens", "400", "--max-epoch", "12", *bleu)
        assert log.count('"valid_bleu"') == 2

    return make_once("trained", make)


def translations(out):
    return {int(m[1]): m[2] for m in re.finditer(r"^H-(\d+)\t\S+\t(.*)$", out, flags=re.M)}


def test_learns(trained):
    state = checkpoint_utils.load_checkpoint_to_cpu(str(trained / "checkpoint_last.pt"))
    assert state["extra_state"]["best"] > 1  # BLEU on the validation set


@pytest.mark.parametrize("left_pad", [[], ["--left-pad-source"]], ids=["left", "right"])
def test_generate_translates_every_sentence(data, trained, left_pad):
    """All of them by default, the same in batches padded on either side as alone."""
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--beam", "3", "--max-len-a", "0"]
    out, _ = run_cli(generate.cli_main, *argv, "--max-len-b", "14", *left_pad)
    alone, _ = run_cli(generate.cli_main, *argv, "--max-len-b", "14", "--batch-size", "1")
    assert sorted(translations(out)) == list(range(TEST_SENTENCES))
    assert translations(out) == translations(alone)
    assert "BLEU" in out or "BLEU" in _


def test_generate_with_prefix_and_alignment(data, trained):
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    out, _ = run_cli(generate.cli_main, *argv, "--prefix-size", "2", "--print-alignment")
    references = {int(m[1]): m[2] for m in re.finditer(r"^T-(\d+)\t(.*)$", out, flags=re.M)}
    for i, hypothesis in translations(out).items():
        assert hypothesis.split()[:2] == references[i].split()[:2]
    assert len(re.findall(r"^A-\d+", out, flags=re.M)) == TEST_SENTENCES


def test_interactive(data, trained):
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--buffer-size", "3"]
    out, _ = run_cli(interactive.cli_main, *argv, "--max-tokens", "100", stdin="w1 w2\nw3\nw4 w5 w6\nw7 w7\n")
    assert sorted(translations(out)) == [0, 1, 2, 3]


def test_validate_counts_every_sentence(data, trained):
    argv = [data / "bin", *USER_DIR, "--task", "translation", "--valid-subset", "valid"]
    _, log = run_cli(
        validate.cli_main,
        *argv,
        "--path",
        trained / "checkpoint_last.pt",
        "--max-tokens",
        "1000",
        "--log-format",
        "json",
    )
    assert '"valid_bsz": "13"' in log


def test_average(data, trained, tmp_path):
    """The mean of the last checkpoints, which generates."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import average_checkpoints

    argv = ["--inputs", trained, "--num-epoch-checkpoints", "3", "--output", tmp_path / "avg.pt"]
    run_cli(average_checkpoints.main, *argv)
    load = checkpoint_utils.load_checkpoint_to_cpu
    averaged = load(str(tmp_path / "avg.pt"))["model"]
    parts = [load(str(trained / f"checkpoint{n}.pt"))["model"] for n in (10, 11, 12)]
    for key, value in averaged.items():
        mean = torch.stack([p[key].double() for p in parts]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(averaged["encoder.layers.0.fc1.weight"], parts[2]["encoder.layers.0.fc1.weight"])
    out, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, "--path", tmp_path / "avg.pt")
    assert len(translations(out)) == TEST_SENTENCES
    argv = ["--inputs", trained, "--num-epoch-checkpoints", "9", "--output", tmp_path / "x.pt"]
    with pytest.raises(average_checkpoints.SynthesizerError, match="found 3 of 9 epoch checkpoints; train on"):
        run_cli(average_checkpoints.main, *argv)
    with pytest.raises(
        average_checkpoints.SynthesizerError, match="is a folder; say how many .*--num-epoch-checkpoints"
    ):
        run_cli(average_checkpoints.main, *argv[:2], *argv[4:])
    with pytest.raises(average_checkpoints.SynthesizerError, match="--inputs nowhere: "):
        run_cli(average_checkpoints.main, "--inputs", "nowhere", *argv[2:])
    assert not (tmp_path / "x.pt").exists()


def test_from_pretrained(data, trained, others):
    """What does not fit is one line in Python too, and names the argument that Python has."""
    from fairseq_synth.transformer import SynthesizerTransformer

    for model, words, part in (
        ("nowhere", data / "bin", "nowhere: no such folder"),
        (trained, "nowhere", "nowhere: no such folder"),
        (trained, others["others"] / "words", "the data have another dictionary"),
    ):
        with pytest.raises(SynthesizerError, match=part):
            SynthesizerTransformer.from_pretrained(str(model), "checkpoint_last.pt", str(words))

    hub = SynthesizerTransformer.from_pretrained(
        str(trained), "checkpoint_last.pt", str(data / "bin"), user_dir=str(ROOT / "fairseq_synth")
    )
    assert len(hub.translate(["w1 w2 w3", "w4"], beam=2)) == 2
    with pytest.raises(SynthesizerError, match="skip_invalid_size_inputs=True; .*synth_beyond_length='tile'"):
        hub.translate("w1 " * 30)
    with pytest.raises(SynthesizerError, match="--constraints"):
        hub.translate("w1", constraints="ordered")


def test_from_pretrained_registers_the_plugin(data, trained):
    """A program needs nothing else."""
    code = "from fairseq_synth.transformer import SynthesizerTransformer as model; import sys; "
    code += "print(model.from_pretrained(sys.argv[1], 'checkpoint_last.pt', sys.argv[2]).translate('w1 w2'))"
    run = warm.run(["-c", code, trained, data / "bin"], cwd=ROOT)
    assert run.returncode == 0, run.stderr


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
        ["--left-pad-source", "--left-pad-target"],
        ["--num-batch-buckets", "3"],
        ["--required-seq-len-multiple", "8"],
        ["--store-ema", "--ema-decay", "0.5"],
    ],
    ids=lambda flags: flags[0],
)
def test_train_with(data, tmp_path, flags):
    """The loss falls; what was trained can be resumed."""
    flags = ["--max-tokens", "400", "--disable-validation", *flags]
    # --left-pad-target is a switch for True, the host's --left-pad-source one for False
    flags += ["--no-epoch-checkpoints"]
    by_update = read_losses(train_model(data, tmp_path, "--max-update", "10", *flags))  # 8 updates an epoch
    values = list(map(float, by_update.values()))
    assert values[-1] < values[0] - 0.3
    assert min(read_losses(train_model(data, tmp_path, "--max-update", "12", *flags))) == max(by_update) + 1 == 11


def test_interrupted_equals_uninterrupted(data, tmp_path):
    """Stopped within the first and second epoch and resumed, a training is one run: every kind of stored weight."""
    arch = "transformer_synth_random_vanilla_multi30k"
    flags = ["--disable-validation", "--max-tokens", "400"]  # 8 updates an epoch
    flags += [
        "--encoder-synthesizer",
        "random,fixed_random",
        "--decoder-synthesizer",
        "factorized_dense,random+vanilla",
    ]
    whole = read_losses(train_model(data, tmp_path / "whole", "--max-update", "16", *flags, arch=arch))
    flags += ["--save-interval-updates", "3"]
    first = read_losses(train_model(data, tmp_path / "parts", "--max-update", "3", *flags, arch=arch))
    second = read_losses(train_model(data, tmp_path / "parts", "--max-update", "10", *flags, arch=arch))
    last = read_losses(train_model(data, tmp_path / "parts", "--max-epoch", "2", *flags, arch=arch))
    last.update(read_losses(train_model(data, tmp_path / "parts", "--max-update", "16", *flags, arch=arch)))
    assert (max(first), min(second), max(second), min(last), max(last)) == (3, 4, 10, 11, 16)
    assert {**first, **second, **last} == whole
    assert all((tmp_path / run / f"checkpoint{epoch}.pt").exists() for run in ("whole", "parts") for epoch in (1, 2))
    load = checkpoint_utils.load_checkpoint_to_cpu
    a, b = (used_weights(load(str(tmp_path / d / "checkpoint_last.pt"))["model"]) for d in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    fixed = [key for key in a if "fixed_random" in key]
    assert len(fixed) == 1
    early = load(str(tmp_path / "parts" / "checkpoint_1_3.pt"))["model"]
    for key in fixed:
        assert torch.equal(a[key], early[key]) and a[key].std() > 0.5
    assert not torch.equal(a["encoder.layers.0.fc1.weight"], early["encoder.layers.0.fc1.weight"])


def test_checkpoints_at_the_end_of_an_epoch_are_numbered(data, tmp_path):
    """As any other, so that an average has them; older ones are removed. A resume from one begins the next epoch."""
    flags = ["--max-tokens", "400", "--no-epoch-checkpoints", "--save-interval-updates", "8"]  # 8 updates an epoch
    flags += ["--keep-interval-updates", "2"]
    whole = read_losses(train_model(data, tmp_path / "whole", "--max-update", "24", *flags))
    first = read_losses(train_model(data, tmp_path / "parts", "--max-update", "8", *flags))
    assert {**first, **read_losses(train_model(data, tmp_path / "parts", "--max-update", "24", *flags))} == whole
    for run in ("whole", "parts"):
        names = {path.name for path in (tmp_path / run).glob("checkpoint*.pt")}
        assert names == {"checkpoint_2_16.pt", "checkpoint_3_24.pt", "checkpoint_best.pt", "checkpoint_last.pt"}
    load = checkpoint_utils.load_checkpoint_to_cpu
    numbered, last = (load(str(tmp_path / "whole" / f"checkpoint_{name}.pt")) for name in ("3_24", "last"))
    assert numbered["extra_state"]["train_iterator"] == last["extra_state"]["train_iterator"]
    assert numbered["extra_state"]["train_iterator"]["epoch"] == 4 and numbered["extra_state"]["best"] > 0


def test_batches_do_not_depend_on_the_epoch_of_a_resume(data):
    """A process that starts in epoch 3 has the batches of one that started in epoch 1, and is in epoch 3."""

    def iterator(epoch):
        cfg = TranslationConfig(data=str(data / "bin"), source_lang="en", target_lang="de", dataset_impl="mmap")
        task = TranslationTask.setup_task(cfg)
        task.load_dataset("train")
        return task.get_batch_iterator(task.dataset("train"), max_tokens=200, epoch=epoch)

    first, third = iterator(1), iterator(3)
    assert (first.epoch, third.epoch) == (1, 3)
    assert [b.tolist() for b in first.frozen_batches] == [b.tolist() for b in third.frozen_batches]


def test_start_from_a_stock_checkpoint(data, tmp_path):
    """--finetune-from-model with --synth-mixture sum goes on from a stock Transformer's loss."""
    stock_size = [f for f in SMALL if f not in ("--synth-max-length", "24")]
    stock = read_losses(
        train_model(data, tmp_path / "stock", "--max-epoch", "4", arch="transformer_multi30k", small=stock_size)
    )
    warm = ["--finetune-from-model", tmp_path / "stock" / "checkpoint_last.pt", "--synth-mixture", "sum"]
    warm_losses = read_losses(train_model(data, tmp_path / "warm", "--max-update", "3", "--lr", "1e-4", *warm))
    first, last = float(warm_losses[1]), sum(map(float, list(stock.values())[-5:])) / 5
    assert abs(first - last) < 0.25 and float(stock[1]) - first > 0.5
    # averages of the weights begin with those of the checkpoint
    flags = ["--max-update", "3", "--lr", "1e-4", "--store-ema", "--ema-decay", "0.99"]
    assert read_losses(train_model(data, tmp_path / "averaged", *flags, *warm)) == warm_losses
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "averaged" / "checkpoint_last.pt"))
    averages = state["extra_state"]["ema"]
    assert all(
        torch.allclose(averages[name], weight, atol=1e-3) for name, weight in used_weights(state["model"]).items()
    )
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, *RECIPE]
    argv += ["--save-dir", tmp_path / "restored", "--restore-file", warm[1], *warm[2:]]
    assert "--restore-file: " in (line := get_error_line(train.cli_main, *argv)) and "--reset-optimizer" in line
    line = get_error_line(train.cli_main, *argv, "--encoder-ffn-embed-dim", "24")
    fault = r"the checkpoint does not fit: encoder.layers.0.fc1.weight is \[\d+, 16\] in the .* and \[24, 16\] in"
    assert re.search(f"checkpoint_last.pt: {fault}", line)
    assert re.search(r"\(and \d+ more\); give the --arch and the sizes of its training", line)


def test_hydra(data, tmp_path, monkeypatch, capsys):
    """fairseq-hydra-train with the YAML of configs/; the checkpoint generates and resumes."""
    model = "encoder_layers=1 decoder_layers=1 encoder_embed_dim=16 decoder_embed_dim=16 synth_max_length=24"
    argv = ["--config-dir", ROOT / "configs", "--config-name", "multi30k", f"task.data={data}/bin"]
    argv += [f"common.user_dir={ROOT}/fairseq_synth", f"checkpoint.save_dir={tmp_path}/save", "optimization.lr=[0.01]"]
    argv += [f"model.{m}" for m in f"{model} encoder_synthesizer=random".split()]
    argv += ["common.bf16=false", "dataset.num_workers=0"]
    argv += [f"hydra.run.dir={tmp_path}", "dataset.max_tokens=200", "lr_scheduler.warmup_updates=10"]
    monkeypatch.chdir(tmp_path)
    # Hydra closes all handlers there are, and absl's (of rouge-score) closes the file that pytest has put in its place
    monkeypatch.setattr("logging.shutdown", lambda *_: None)
    run_program("hydra_train", *argv, "optimization.max_update=20")
    last = tmp_path / "save" / "checkpoint_last.pt"
    state = checkpoint_utils.load_checkpoint_to_cpu(str(last))
    assert "encoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert "decoder.layers.0.self_attn.synthesizer.components.random.R" in state["model"]
    assert not any(key.endswith("alpha") for key in state["model"])
    assert state["cfg"].model.encoder_synthesizer == state["cfg"].model.decoder_synthesizer == "random"
    out, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, "--path", last)
    assert len(translations(out)) == TEST_SENTENCES
    run_cli(hydra_train.cli_main, *argv, "optimization.max_update=25")
    history = checkpoint_utils.load_checkpoint_to_cpu(str(last))["optimizer_history"]
    assert history[-1]["num_updates"] == 25
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # under coverage, hydra sees a debugger and raises
    with pytest.raises(SystemExit) as typo:
        run_cli(hydra_train.cli_main, *argv, "model.encoder_synthesiser=random")
    assert typo.value.code != 0 and "encoder_synthesiser" in capsys.readouterr().err
    assert_refused(
        run_program("hydra_train", *argv, "model.encoder_synthesizer=randm", check=False), "--encoder-synthesizer"
    )


def test_from_any_folder_and_when_installed_too(data, trained, tmp_path):
    """--user-dir by path, relative or as ``python -m fairseq_synth`` prints it, with a copy installed beside it."""
    installed = tmp_path / "site"
    installed.mkdir(exist_ok=True)
    subprocess.run(["cp", "-r", ROOT / "fairseq_synth", installed], check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    printed = warm.run(["-m", "fairseq_synth"], cwd=tmp_path, env=environment, fresh=True).stdout
    assert printed == f"{installed}/fairseq_synth\n"
    relative = os.path.relpath(ROOT / "fairseq_synth", tmp_path) + "/"
    code = "from fairseq_cli.generate import cli_main; cli_main()"
    for folder in (printed.strip(), relative):
        argv = [data / "bin", "--user-dir", folder, "--path", trained / "checkpoint_last.pt"]
        done = warm.run(["-c", code, *argv], cwd=tmp_path, env=environment)
        assert len(translations(done.stdout)) == TEST_SENTENCES, done.stderr


def assert_refused(done, *parts):
    """Non-zero exit and one line that says what to mend, in place of a traceback."""
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr and all(part in last for part in parts), done.stderr
    return last


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--encoder-synthesizer", "randm"], ["--encoder-synthesizer", "'randm'", "choose from", "factorized_dense"]),
        (["--encoder-attention-heads", "3"], ["--encoder-attention-heads 3"]),
        (["--cross-self-attention"], ["--cross-self-attention"]),
        (["--decoder-synthesizer", "factorized_dense", "--synth-max-length", "23"], ["--synth-max-length 23", "a*b"]),
        (["--decoder-synthesizer", "random:2/vanilla:1"], ["--decoder-synthesizer", "2 + 1 heads", "the 2 attention"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_refused_flags(data, tmp_path, flags, parts):
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE, *flags]
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path / "save", "--max-update", "1")
    assert all(part in line for part in parts), line
    assert not (tmp_path / "save" / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "argv, choices", [("--synth-mixture mean", ["convex", "sum"]), ("--synth-beyond-length wrap", ["refuse", "tile"])]
)
def test_choices_of_flags(data, argv, choices, capsys):
    """The parser's own errors."""
    arch = ["--arch", "transformer_synth_random_multi30k"]
    with pytest.raises(SystemExit):
        run_cli(train.cli_main, data / "bin", *USER_DIR, *arch, *RECIPE, *argv.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(part in last for part in [argv.split()[0], *choices]), last


@pytest.fixture(scope="module")
def uneven(make_once):
    """A corpus whose sources have up to 20 words and whose targets have three of them, as in summarization."""

    def make(folder):
        for split, n in [("train", 40), ("valid", 7), ("test", TEST_SENTENCES)]:
            make_text(folder / split, n, shortest=5, longest=20, target=lambda words: words[:3])
        argv = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", folder / "bin"]
        for split in ("train", "valid", "test"):
            argv += [f"--{split}pref", folder / split]
        run_cli(preprocess.cli_main, *argv)

    return make_once("uneven", make)


@pytest.fixture(scope="module")
def summarizer(uneven, make_once):
    """A model with l = 12, trained for an epoch of `uneven`: the checkpoint and the log."""

    def make(save):
        (save / "log").write_text(train_model(uneven, save, "--max-epoch", "1", "--truncate-source", *TWELVE))

    save = make_once("summarizer", make)
    return save / "checkpoint_last.pt", (save / "log").read_text()


TWELVE = ["--synth-max-length", "12"]


def test_truncated_sources_are_all_used(uneven, summarizer):
    """--truncate-source cuts at l: no sentence is skipped in training, refused in validation or left untranslated."""
    checkpoint, log = summarizer
    assert "will be skipped" not in log and '"valid_loss"' in log
    out, _ = run_cli(generate.cli_main, uneven / "bin", *USER_DIR, "--path", checkpoint, "--truncate-source")
    assert sorted(translations(out)) == list(range(TEST_SENTENCES))


def test_references_of_any_length(uneven, summarizer):
    """A reference over l is only compared with; to score it, the model would have to read it."""
    argv = [uneven / "bin", *USER_DIR, "--path", summarizer[0], "-s", "de", "-t", "en", "--max-len-b", "9"]
    out, log = run_cli(generate.cli_main, *argv)
    assert sorted(translations(out)) == list(range(TEST_SENTENCES)) and "will be skipped" not in log
    assert len(re.findall(r"^T-\d+\t(\w+ ){15}", out, flags=re.M)) > 3  # references over l
    assert "12 is this model's --synth-max-length" in get_error_line(generate.cli_main, *argv, "--score-reference")


def test_long_validation_sentences_are_found_before_training(uneven, tmp_path):
    """With the data set, their number and the first of them, or not at all if nothing is validated."""
    argv = [uneven / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE, *TWELVE]
    argv += ["--save-dir", tmp_path, "--max-update", "1"]
    line = get_error_line(train.cli_main, *argv)
    lengths = [len(line.split()) + 1 for line in open(uneven / "valid.en")]
    long = [i for i, length in enumerate(lengths) if length > 12]
    assert f"--valid-subset valid: {len(long)} sentences are too long, the first is number {long[0] + 1}" in line
    assert line.startswith("--synth-max-length: train with a larger one; --valid-subset")
    assert f"{lengths[long[0]]}, 4" in line and "12 is this model's --synth-max-length" in line
    run_cli(train.cli_main, *argv, "--skip-invalid-size-inputs-valid-test")
    run_cli(train.cli_main, *argv, "--disable-validation", "--max-update", "2")


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
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_refused_before_the_first_batch(data, tmp_path, flags, parts):
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE, "--cpu"]
    argv += ["--save-dir", tmp_path, "--disable-validation", "--max-update", "1"]
    line = get_error_line(train.cli_main, *argv, *flags)
    assert all(part in line for part in parts), line
    assert not os.listdir(tmp_path)


def test_tokens_that_a_task_adds_are_named(data, tmp_path):
    """fairseq checks lengths before the denoising task inserts noise."""
    lines = (data / "train.en").read_text().splitlines()
    (tmp_path / "rows").write_text("".join(f"{' '.join((line.split() * 20)[:20])}\n" for line in lines))
    words = ["--only-source", "--srcdict", data / "bin" / "dict.en.txt"]
    valid = ["--validpref", tmp_path / "rows"]  # 0.12.2 wants it even with --disable-validation
    run_cli(preprocess.cli_main, *words, "--trainpref", tmp_path / "rows", "--destdir", tmp_path / "bin", *valid)
    argv = [tmp_path / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE]
    argv += ["--task", "denoising", "--mask", "0.3", "--replace-length", "1", "--share-all-embeddings", "--cpu"]
    argv += ["--sample-break-mode", "eos", "--disable-validation", "--max-update", "1", "--save-dir", tmp_path / "save"]
    argv += NO_THREAD
    run_cli(train.cli_main, *argv)
    line = get_error_line(train.cli_main, *argv, "--insert", "0.3", "--save-dir", tmp_path / "other")
    assert "longer than --synth-max-length 24" in line and "as with --insert" in line, line


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--min-len", "24"], ["--min-len 24", "at most 23 ", "--synth-max-length 24"]),
        (["--min-len", "9", "--max-len-a", "0", "--max-len-b", "8"], ["--min-len: --max-len-a and --max-len-b"]),
        (["--required-seq-len-multiple", "7"], ["--required-seq-len-multiple 7", "remove the flag"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_refused_in_generation(data, trained, flags, parts):
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", *flags]
    line = get_error_line(generate.cli_main, *argv)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("size, length", [(2, "20"), (1, "5")])
def test_no_ngram_twice(data, trained, size, length):
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--min-len", length, "--beam", "2"]

    def repeats(*flags):
        written = [line.split() for line in translations(run_cli(generate.cli_main, *argv, *flags)[0]).values()]
        ngrams = [[*zip(*(words[i:] for i in range(size)))] for words in written]
        return sum(len(ngrams_of_line) - len(set(ngrams_of_line)) for ngrams_of_line in ngrams)

    assert repeats() > 0 and repeats("--no-repeat-ngram-size", size) == 0


def test_longest_possible_min_len(data, trained):
    argv = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt", "--min-len", "23", "--beam", "1"]
    out, _ = run_cli(generate.cli_main, *argv)
    assert all(len(hypothesis.split()) == 23 for hypothesis in translations(out).values())


def test_a_stock_model_is_not_said_to_be_a_synthesizer(data, tmp_path):
    """fairseq's own limit gets one line too, without the plugin's flag."""
    size = [f for f in SMALL if f not in ("--synth-max-length", "24")] + ["--max-target-positions", "20"]
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_multi30k", *size, *RECIPE, "--save-dir", tmp_path]
    line = get_error_line(train.cli_main, *argv, "--valid-subset", "test1", "--ignore-unused-valid-subsets")
    assert "--valid-subset test1: 3 sentences are too long" in line and "synth" not in line


def test_a_finished_run_stays_as_it_is(data, tmp_path):
    """However it is called: here as ``python -m fairseq_cli.train``. Another model needs another folder."""
    flags = ["--max-update", "2", "--disable-validation"]
    train_model(data, tmp_path, *flags)
    other = [data / "bin", *USER_DIR, "--arch", "transformer_synth_dense_multi30k", *SMALL, *RECIPE]
    line = get_error_line(train.cli_main, *other, "--save-dir", tmp_path)
    assert f"{tmp_path}/checkpoint_last.pt: " in line and "needs a --save-dir of its own" in line
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    log = train_model(data, tmp_path, *flags, main=lambda: runpy.run_module("fairseq_cli.train", run_name="__main__"))
    assert "nothing to do: the model has 2 updates, and --max-update is 2" in log and "done training" in log
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before and not read_losses(log)


@pytest.fixture(scope="module")
def others(data, trained, make_once):
    """What a slip may name: `data` with other words and as ``cached`` files, labels, a checkpoint, a language model."""
    folder = make_once("others", lambda folder: make_others(data, folder))
    return {"data": data / "bin", "best": trained / "checkpoint_last.pt", "others": folder}


def make_others(data, folder):
    for split in ("train", "valid", "test"):
        for lang in ("en", "de"):
            lines = (data / f"{split}.{lang}").read_text().splitlines()
            text = "".join(f"{line.replace('w1', f'x{i % 9}')}\n" for i, line in enumerate(lines))
            (folder / f"{split}.{lang}").write_text(text)
        (folder / f"{split}.label").write_text("".join(f"{'abcd'[i % 4]}\n" for i in range(len(lines))))
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", folder / split)]
    pair, alone = ["-s", "en", "-t", "de", "--joined-dictionary", *prefixes], ["--only-source", *prefixes]
    run_cli(preprocess.cli_main, *pair, "--destdir", folder / "words")
    cached_argv = [data / word.name if isinstance(word, type(data)) else word for word in pair]
    cached_argv += ["--srcdict", data / "bin" / "dict.en.txt"]
    run_cli(preprocess.cli_main, *cached_argv, "--dataset-impl", "cached", "--destdir", folder / "cached")
    for lang, name in (("en", "input0"), ("label", "label")):
        argv = [f"{word}.{lang}" if isinstance(word, type(data)) else word for word in alone]
        run_cli(preprocess.cli_main, *argv, "--destdir", folder / "labels" / name)


TRAIN = "{data} --arch transformer_synth_random_vanilla_multi30k"
CLASSIFY = (
    "{others}/labels --task sentence_prediction --arch roberta_synth_random_agnews --max-positions 24 --optimizer adam "
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --batch-size 8 "
    "--synth-max-length 24 --criterion sentence_prediction"
)
RESUME = f"{TRAIN} --restore-file {{best}}"
READ = "{data} --path {best} --cpu"
COMMANDS = {"train": train, "generate": generate, "interactive": interactive, "validate": validate}


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
        ("train", f"{RESUME} --lr-scheduler inverse_sqrt", ["{best}: ", "--lr-scheduler", "--reset-lr-scheduler"]),
        ("train", f"{RESUME} --lr-scheduler reduce_lr_on_plateau", ["{best}: ", "--reset-lr-scheduler"]),
        ("train", f"{RESUME} --optimizer sgd", ["{best}: ", "--reset-optimizer"]),
        ("train", f"{TRAIN} --restore-file nowhere.pt", ["--restore-file nowhere.pt: no such file"]),
        ("train", f"{TRAIN} --continue-once nowhere.pt", ["--continue-once nowhere.pt: no such file"]),
        (
            "train",
            RESUME.replace("{data}", "{others}/words"),
            ["{best}: ", "another dictionary (", " words, 24 in the"],
        ),
        (
            "train",
            TRAIN.replace("{data}", "{others}/words") + " --finetune-from-model {best}",
            ["{best}: ", "another dictionary (", " words, 24 in the", "--srcdict"],
        ),
        ("generate", READ.replace("{data}", "{others}/words"), ["another dictionary (", " words, 24 in the"]),
        (
            "validate",
            READ.replace("{data}", "{others}/words") + " --task translation --max-tokens 99",
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
        ("train", TRAIN.replace("{data}", "{others}"), ["no data of a pair of languages"]),
    ],
)
def test_a_slip_gets_one_line(others, tmp_path, command, flags, parts):
    """It names the flag or file and the mend, before the first update; in Python's and JSON's text too."""
    argv = [*USER_DIR, *(word.replace("{data}", str(others["data"])) for word in flags.split())]
    argv = [word.replace("{best}", str(others["best"])).replace("{others}", str(others["others"])) for word in argv]
    if command == "train":
        recipe = [*SMALL, *RECIPE] if "multi30k" in flags else [*RECIPE[:4], *RECIPE[8:]]  # without its criterion
        argv = [*recipe, "--cpu", "--max-update", "1", *argv, "--save-dir", tmp_path]
    lines = "w1 w2\tunknown\nw3\n" if "--buffer-size" in flags else "w1 w2\tw7 w8\n"
    line = get_error_line(COMMANDS[command].cli_main, *argv, stdin=lines)
    assert all(part.replace("{best}", str(others["best"])) in line for part in parts), line
    assert not list(tmp_path.glob("*.pt"))


def test_what_a_slip_hinders_elsewhere(others, tmp_path):
    """What fairseq's help allows: cached data, longer sentences skipped, languages found, constraints, scheduler."""
    data, best, folder = (others[name] for name in ("data", "best", "others"))
    skip = ["--skip-invalid-size-inputs-valid-test", "--max-tokens", "8", "--max-update", "2"]
    cached = others["others"] / "cached"
    argv = [cached, *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, *RECIPE, "--cpu"]
    usual = read_losses(train_model(data.parent, tmp_path / "mmap", *skip, "--adam-betas", "(0.9, 0.98)"))
    assert (
        read_losses(
            run_cli(train.cli_main, *argv, "--save-dir", tmp_path / "cached", *skip, "--adam-betas", "[0.9, 0.98]")[1]
        )
        == usual
    )
    read = [data, *USER_DIR, "--path", best, "--cpu"]
    out, _ = run_cli(generate.cli_main, *read, *skip[:3])
    assert 0 < len(translations(out)) < TEST_SENTENCES
    out, _ = run_cli(interactive.cli_main, *read, "--constraints", "--tokenizer", "moses", stdin="w1 w2\tw7\nw3\n")
    assert "w7" in translations(out)[0].split() and sorted(translations(out)) == [0, 1]
    flags = ["--restore-file", best, "--lr-scheduler", "inverse_sqrt", "--reset-lr-scheduler", "--max-epoch", "13"]
    assert '"valid_loss"' in train_model(data.parent, tmp_path / "resumed", "--max-tokens", "400", *flags)


def test_missing_data_folder(tmp_path):
    argv = [tmp_path / "nowhere", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *RECIPE]
    argv += ["--save-dir", tmp_path / "save"]
    line = get_error_line(train.cli_main, *argv)
    assert str(tmp_path / "nowhere") in line and "no such" in line


def test_tiled_beyond_length(uneven, tmp_path):
    """With l = 6 sentences of 21 tokens are trained on, validated and translated; no limit is left in the log."""
    flags = ["--max-epoch", "1", "--synth-max-length", "6", "--synth-beyond-length", "tile"]
    log = train_model(uneven, tmp_path, *flags, "--decoder-synthesizer", "random:1/dense+vanilla:1")
    assert "will be skipped" not in log and '"valid_loss"' in log and "--synth-max-length" not in log
    argv = [uneven / "bin", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--max-len-b", "20"]
    out, _ = run_cli(generate.cli_main, *argv)
    assert sorted(translations(out)) == list(range(TEST_SENTENCES))


def test_a_sentence_longer_than_l(data, trained, tmp_path):
    """Skipped with a warning that names the flag in training; refused in validation, generation, interactive use."""
    log = train_model(data, tmp_path, "--max-update", "1", "--synth-max-length", "8", "--disable-validation")
    assert "samples have invalid sizes and will be skipped" in log and "--synth-max-length 8" in log
    model = [data / "bin", *USER_DIR, "--path", trained / "checkpoint_last.pt"]
    flag = "--synth-max-length"
    assert flag in get_error_line(generate.cli_main, *model, "--gen-subset", "test1")
    flags = ["--task", "translation", "--valid-subset", "test1", "--batch-size", "4"]
    assert flag in get_error_line(validate.cli_main, *model, *flags)
    assert flag in get_error_line(interactive.cli_main, *model, stdin=" ".join(["w1"] * 30))


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--synth-max-length", "30"], ["--synth-max-length"]),
        (["--encoder-synthesizer", "dense"], ["checkpoint_last.pt: ", "weights of random, and query", "dense"]),
    ],
    ids=["length", "function"],
)
def test_resume_with_another_model(data, trained, tmp_path, flags, parts):
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, *RECIPE, *flags]
    argv += ["--restore-file", trained / "checkpoint_last.pt", "--save-dir", tmp_path]
    line = get_error_line(train.cli_main, *argv)
    assert all(part in line for part in parts), line


def test_broken_checkpoints(data, trained, tmp_path):
    """A truncated and a hostile one are refused by name; nothing in the hostile one runs."""
    whole = (trained / "checkpoint_last.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(whole[: len(whole) // 2])
    assert "short.pt" in get_error_line(generate.cli_main, data / "bin", *USER_DIR, "--path", tmp_path / "short.pt")
    line = get_error_line(generate.cli_main, data / "bin", *USER_DIR, "--path", tmp_path / "no.pt")
    assert "no.pt" in line and "not found" in line
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("torch before 2.6 loads what it is given")

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    torch.save({"args": None, "cfg": Hostile(), "model": {}}, tmp_path / "hostile.pt")
    assert "hostile.pt" in get_error_line(generate.cli_main, data / "bin", *USER_DIR, "--path", tmp_path / "hostile.pt")
    assert not (tmp_path / "ran").exists()


def test_full_disk(data, tmp_path):
    """A checkpoint that cannot be written ends the run in one line; the one before resumes."""
    train_model(data, tmp_path, "--max-update", "3", "--disable-validation", "--no-epoch-checkpoints")
    size = (tmp_path / "checkpoint_last.pt").stat().st_size
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, *RECIPE]
    argv += ["--save-dir", tmp_path, "--max-update", "6", "--disable-validation", "--no-epoch-checkpoints"]
    assert_refused(run_program("train", *argv, check=False, file_size_limit=size // 2), "could not be written")
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]
    assert min(read_losses(train_model(data, tmp_path, "--max-update", "6", "--disable-validation"))) == 4

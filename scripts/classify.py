#!/usr/bin/env python
"""Predicts the labels of a data set of fairseq's task sentence_prediction, and writes one label per line.

A model that was trained with --regression-target writes numbers instead of labels.

    python scripts/classify.py DATA_BIN --path checkpoint_best.pt --output FILE [--gen-subset valid]

(fairseq-validate prints only the accuracy.) The output file is written completely or not at all.
"""

import argparse
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.errors import SynthesizerError, run_command  # noqa: E402


def main() -> None:
    """Labels the examples that the command line names, and writes the labels to --output."""
    args = parse_arguments()
    if not args.path.is_file():
        raise SynthesizerError(f"--path {args.path}: no such file")
    register()
    import torch  # imported late, so that wrong options are refused at once

    with torch.no_grad():
        answers = classify(args)
    unfinished = args.output.with_name(args.output.name + ".part")
    unfinished.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    unfinished.replace(args.output)


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="folder that contains input0/ and label/")
    parser.add_argument("--path", type=Path, required=True, help="a checkpoint of the task sentence_prediction")
    parser.add_argument("--output", type=Path, required=True, help="the file for the labels")
    parser.add_argument("--gen-subset", default="test", help="split of the data: train, valid or test (default: test)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens per batch (default: 4096)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args()


def classify(args: argparse.Namespace) -> list[str]:
    """Returns the answer of the model of --path for each example: a label or, for a regression, a number.

    Raises SynthesizerError if it is no classifier, if its weights are NaN, or if examples are left out.
    """
    from fairseq import checkpoint_utils

    models, _config, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.path)], arg_overrides={"data": str(args.data)}
    )
    if not getattr(task.cfg, "classification_head_name", None):
        raise SynthesizerError(f"--path {args.path}: not a model of the task sentence_prediction")
    task.load_dataset(args.gen_subset)
    dataset = task.dataset(args.gen_subset)
    batches = task.get_batch_iterator(dataset, max_tokens=args.max_tokens).next_epoch_itr(shuffle=False)
    answer_by_example = answer_batches(models[0], task, batches, args)
    if len(answer_by_example) != len(dataset):
        labelled = f"{len(answer_by_example)} of {len(dataset)} examples were labelled"
        raise SynthesizerError(f"{args.data}: {labelled}; see --max-tokens")
    return [answer_by_example[example] for example in range(len(dataset))]


def answer_batches(model: Any, task: Any, batches: Iterable[Any], args: argparse.Namespace) -> dict[int, str]:
    """Returns the answer of a model for each example, by the number of the example in the data set.

    The batches are sorted by length, so the examples are not in the order of the data set.

    Raises SynthesizerError if the weights of the model are NaN.
    """
    import torch
    from fairseq import utils

    use_gpu = torch.cuda.is_available() and not args.cpu
    model.eval()
    if use_gpu:
        model.cuda()
    head = task.cfg.classification_head_name
    answer_by_example: dict[int, str] = {}
    for batch in batches:
        batch_on_device = utils.move_to_cuda(batch) if use_gpu else batch
        logits, _extra = model(**batch_on_device["net_input"], features_only=True, classification_head_name=head)
        if logits.isnan().any():
            raise SynthesizerError(
                f"--path {args.path}: has weights that are not numbers (NaN); give another checkpoint, or train again "
                "with a lower learning rate"
            )
        examples = batch["id"].tolist()
        for example, answer in zip(examples, read_answers(logits, task)):
            answer_by_example[example] = answer
    return answer_by_example


def read_answers(logits: Any, task: Any) -> list[str]:
    """Returns the label with the highest logit for each example or, for a regression, the number.

    Args:
        logits: (examples, classes); (examples, 1) for a regression.
        task: fairseq's task sentence_prediction, with the dictionary of the labels.
    """
    if getattr(task.cfg, "regression_target", False):
        return [f"{number:.6g}" for number in logits.squeeze(-1).tolist()]
    dictionary = task.label_dictionary  # begins with symbols such as <pad>, which are no labels
    return [dictionary[label + dictionary.nspecial] for label in logits.argmax(-1)]


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    run_command(main)

#!/usr/bin/env python
"""Labels a data set of fairseq's task sentence_prediction with a trained model: one label per line, in its order.

A model trained with --regression-target writes numbers instead of labels.

    python scripts/classify.py DATA_BIN --path checkpoint_best.pt --output FILE [--gen-subset valid]

(fairseq-validate only prints the accuracy, with one decimal.) The output gets its name when it is complete.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.errors import SynthesizerError, run_command  # noqa: E402


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="with input0/ and label/ of fairseq-preprocess")
    parser.add_argument("--path", type=Path, required=True, help="a checkpoint of --task sentence_prediction")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--gen-subset", default="test", help="train, valid or test (default: test)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a batch (default: 4096)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is a GPU")
    args = parser.parse_args()
    if not args.path.is_file():
        raise SynthesizerError(f"--path {args.path}: no such file")
    register()
    import torch  # imported late, so that wrong options are refused at once

    with torch.no_grad():
        answers = classify(args)
    part = args.output.with_name(args.output.name + ".part")
    part.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    part.replace(args.output)


def classify(args: argparse.Namespace) -> list[str]:
    """Returns the labels that the model of --path gives to the examples, or its numbers.

    Raises SynthesizerError if it is no classifier, if its weights are NaN, or if examples are left out.
    """
    import torch
    from fairseq import checkpoint_utils, utils

    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.path)], arg_overrides={"data": str(args.data)}
    )
    head = getattr(task.cfg, "classification_head_name", None)
    if not head:
        raise SynthesizerError(f"--path {args.path}: not a model of the task sentence_prediction")
    task.load_dataset(args.gen_subset)
    dataset = task.dataset(args.gen_subset)
    batches = task.get_batch_iterator(dataset, max_tokens=args.max_tokens).next_epoch_itr(shuffle=False)
    use_gpu = torch.cuda.is_available() and not args.cpu
    model = models[0].eval()
    if use_gpu:
        model = model.cuda()
    answer_by_example: dict[int, str] = {}
    for batch in batches:
        sample = utils.move_to_cuda(batch) if use_gpu else batch
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
        if logits.isnan().any():
            raise SynthesizerError(
                f"--path {args.path}: has weights that are not numbers (NaN); give another checkpoint, or train again "
                "with a lower learning rate"
            )
        answers = read_answers(logits, task)
        answer_by_example.update(zip(sample["id"].tolist(), answers))
    if len(answer_by_example) != len(dataset):
        labelled = f"{len(answer_by_example)} of {len(dataset)} examples were labelled"
        raise SynthesizerError(f"{args.data}: {labelled}; see --max-tokens")
    return [answer_by_example[example] for example in range(len(dataset))]


def read_answers(logits: Any, task: Any) -> list[str]:
    """Returns the label with the highest logit of each row or, for a regression, the number."""
    if getattr(task.cfg, "regression_target", False):
        return [f"{number:.6g}" for number in logits.squeeze(-1).tolist()]
    labels = task.label_dictionary
    return [labels[number] for number in logits.argmax(-1) + labels.nspecial]


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    run_command(main)

#!/usr/bin/env python
"""Labels a set of fairseq's sentence_prediction task with a trained model, one label a line in the order of the set.

A model trained with --regression-target gives a number a line in place of a label.

    python scripts/classify.py DATA_BIN --path checkpoint_best.pt --output FILE [--gen-subset valid]

fairseq-validate gives the accuracy alone, with one decimal. The output gets its name once it is whole.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.errors import SynthesizerError, run_command  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="with input0/ and label/ of fairseq-preprocess")
    parser.add_argument("--path", type=Path, required=True, help="a checkpoint of --task sentence_prediction")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--gen-subset", default="test", help="train, valid or test (default: test)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a batch (default: 4096)")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    args = parser.parse_args()
    if not args.path.is_file():
        raise SynthesizerError(f"--path {args.path}: no such file")
    register()
    import torch  # not before what takes no time is checked
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
    cuda = torch.cuda.is_available() and not args.cpu
    model = models[0].eval().cuda() if cuda else models[0].eval()
    labels = None if getattr(task.cfg, "regression_target", False) else task.label_dictionary
    found: dict[int, str] = {}
    with torch.no_grad():
        for batch in batches:
            sample = utils.move_to_cuda(batch) if cuda else batch
            logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
            if labels is None:
                answers = [f"{number:.6g}" for number in logits.squeeze(-1).tolist()]
            else:
                answers = [labels[c] for c in logits.argmax(-1) + labels.nspecial]
            found.update(zip(sample["id"].tolist(), answers))
    if len(found) != len(dataset):
        raise SynthesizerError(f"{args.data}: {len(found)} of {len(dataset)} examples were labelled; see --max-tokens")
    part = args.output.with_name(args.output.name + ".part")
    part.write_text("".join(f"{found[i]}\n" for i in range(len(found))), encoding="utf-8")
    part.replace(args.output)


if __name__ == "__main__":
    run_command(main)

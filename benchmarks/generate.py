"""Beam search: tokens a second of each variant over stock fairseq's.

    python benchmarks/generate.py --words 32768 --tokens 64
    python benchmarks/generate.py --checkpoints transformer/avg.pt random/avg.pt --data data-bin

Without --checkpoints the base model with random weights writes sentences of exactly --tokens tokens: the time
does not depend on the weights. With them the first is the baseline, and each translates the test set of --data as
fairseq-generate does; tokens are its count, and may differ between models.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DTYPES, STOCK, base_model, parser, ratios, report, setup, words_dictionary
from fairseq import checkpoint_utils, utils
from fairseq.sequence_generator import SequenceGenerator

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.inspect.command import given, labels


def searches(args: Any) -> dict[str, Callable[[], Any]]:
    """A search over a batch for each model, all of one length."""
    functions = {}
    torch.manual_seed(0)
    source = torch.randint(4, args.words, (args.sentences, args.source_tokens), device=args.device)
    lengths = torch.full((args.sentences,), args.source_tokens, device=args.device)
    for name in [STOCK, *args.variants]:
        model = base_model(name, words_dictionary(args.words), 256).to(args.device, DTYPES[args.dtype]).eval()
        model.make_generation_fast_()
        generator = SequenceGenerator(
            [model],
            model.decoder.dictionary,
            beam_size=args.beam,
            max_len_a=0,
            max_len_b=args.tokens,
            min_len=args.tokens,
        )
        sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}

        def run(generator: SequenceGenerator = generator, sample: Any = sample) -> None:
            with torch.no_grad():
                generator.forward(sample)

        functions[name] = run
    return functions


def translations(args: Any, tokens: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """The test set, translated by each checkpoint; what is timed is the search alone. Counts its `tokens`."""
    functions: dict[str, Callable[[], Any]] = {}
    names = [STOCK, *labels(args.checkpoints)[1:]]
    if STOCK in names[1:]:
        sys.exit(f"error: --checkpoints: one after the first is called {STOCK}, as the baseline is; rename it")
    for name, path in zip(names, args.checkpoints):
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": str(args.data)}
        )
        task.load_dataset("test")
        model = models[0].to(args.device, DTYPES[args.dtype]).eval()
        model.prepare_for_inference_(cfg)
        generator = task.build_generator([model], cfg.generation)
        generator.beam_size = args.beam
        batches: list[Any] = list(
            task.get_batch_iterator(task.dataset("test"), max_tokens=4096).next_epoch_itr(shuffle=False)
        )
        if args.device == "cuda":
            batches = [utils.move_to_cuda(batch) for batch in batches]

        def run(
            name: str = name, task: Any = task, generator: Any = generator, model: Any = model, batches: Any = batches
        ) -> None:
            tokens[name] = sum(
                len(hypotheses[0]["tokens"])
                for batch in batches
                for hypotheses in task.inference_step(generator, [model], batch)
            )

        functions[name] = run
    return functions


def main() -> None:
    p = parser(__doc__, list(VARIANTS), rounds=3)
    p.add_argument("--words", type=int, default=32768, help="size of the vocabulary")
    p.add_argument("--tokens", type=int, default=64, help="length of every translation")
    p.add_argument("--source-tokens", type=int, default=32)
    p.add_argument("--sentences", type=int, default=32, help="in a batch")
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--checkpoints", nargs="+", type=Path, help="trained models, the baseline first")
    p.add_argument("--data", type=Path, help="their data-bin folder")
    args = p.parse_args()
    setup(args)
    if bool(args.checkpoints) != bool(args.data):
        sys.exit("error: --checkpoints and --data go together")
    ignored = given(p, args, "variants", "words", "tokens", "source_tokens", "sentences")
    if args.checkpoints and ignored:
        sys.exit(f"error: {' '.join(ignored)}: not for --checkpoints, which translate a test set; leave them out")
    tokens: dict[str, int] = {}
    functions = translations(args, tokens) if args.checkpoints else searches(args)
    rows = {}
    for name, figures in ratios(functions, args.device, args.rounds).items():
        rows[name] = {key: figures[key] for key in ("ratio", "lowest", "highest")}
        if args.checkpoints:  # tokens a second, not seconds
            share = tokens[name] / tokens[STOCK]
            rows[name] = {key: value * share for key, value in rows[name].items()}
    what = "trained models" if args.checkpoints else f"{args.tokens} tokens, {args.words} words"
    report(f"beam search, beam {args.beam}, {what}", "tokens a second / stock's", rows, args)


if __name__ == "__main__":
    main()

"""Every figure of one checkpoint, as plain values that JSON takes: `analyse`."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from fairseq.dataclass.configs import GenerationConfig
from fairseq.utils import strip_pad
from torch import Tensor

from . import measure, words
from .checkpoints import Batch, Loaded, batches, readable
from .hooks import Attention, attentions, layer_outputs, masked_heads, stacks, tokens_of, zeroed
from .passes import Sentences, criterion_of, denominator, loss, pad_of, progress

logger = logging.getLogger(__name__)

Figures = dict[str, Any]
BINS = 60
HISTOGRAM_VALUES = 2000  # of each attention and sentence
CORNER = 16  # rows and columns of a pattern in a summary
SHOWN_SENTENCES = 3
LONGEST_SHOWN = 16  # tokens of such a sentence
TOKENS = ("src_tokens", "prev_output_tokens")  # of a batch
RANK_SENTENCES = 64  # at least, of which rank collapse is measured
BRANCHES = {  # name: skip connections, feed-forward layers
    "as it is": (True, True),
    "without feed-forward": (True, False),
    "without skip": (False, True),
    "attention alone": (False, False),
}


PARTS = {  # what is measured on data
    "attention": "logits, attention weights and their singular values",
    "layers": "rank of the layers",
    "heads": "importance of heads, loss and BLEU without them",
    "words": "loss with heads that look by position alone",
    "lengths": "loss and BLEU by sentence length",
}


class Options(NamedTuple):
    """What the command line may change."""

    parts: Sequence[str] = tuple(PARTS)
    subset: str = "valid"
    sentences: int | None = None  # None: all
    positions: int = 32  # rows and columns of the patterns shown
    steps: int = 8  # of removing heads
    beam: int = 1
    remove_bpe: str | None = "subword_nmt"


def analyse(loaded: Loaded, options: Options) -> Figures:
    """All figures of a checkpoint.

    Returns:
        ``checkpoint`` (its settings), ``attentions`` {name: heads, functions, and what is measured of each},
        and with data ``data``, ``loss`` and, as the options say, ``sentences``, ``layers``, ``removal`` and
        ``lengths``. docs/analysis.md says what they mean.
    """
    initial = loaded.initial()
    found: Figures = {"checkpoint": describe(loaded), "attentions": {}}
    for attention in attentions(loaded.model):
        found["attentions"][attention.name] = {
            "group": attention.group,
            "layer": attention.layer,
            "heads": attention.heads,
            "functions": attention.functions,
            "alpha": rounded(attention.alpha()),
        }
    add_histograms(found, "parameters", parameter_values(loaded.model), parameter_values(initial))
    fixed = fixed_weights(loaded.model, options)
    if loaded.data is None:
        for name, weights in fixed.items():
            figures = found["attentions"][name]
            figures.update(rounded(measure.where_it_looks(weights)))
            figures["singular_values"] = rounded(measure.cumulative_singular_values(weights))
            figures["pattern"] = in_thousandths(weights)
        return found
    order = readable(loaded, options.subset, options.sentences)
    sample = batches(loaded, options.subset, order)
    found["data"] = {"subset": options.subset, "sentences": len(order)}
    whole = loss(loaded, sample)
    found["loss"] = rounded(whole)
    logger.info(f"{loaded.path}: {len(order)} sentences of {options.subset}")
    pad = pad_of(loaded)
    if "attention" in options.parts:
        values = {"trained": read_attention(loaded.model, sample, pad, "trained attention", found, options)}
        if initial is not None:
            values["initial"] = read_attention(initial, sample, pad, "initial attention")
        for name, weights in fixed.items():  # as it is, not as the data's lengths cut it
            found["attentions"][name]["pattern"] = in_thousandths(weights)
        for kind in ("logits", "weights"):
            own = ({n: v[kind] for n, v in values.get(state, {}).items()} for state in ("trained", "initial"))
            add_histograms(found, kind, *own)
        found["sentences"] = sentences(loaded, sample, pad)
    if "layers" in options.parts:
        found["layers"] = {
            state: rank_collapse(model, sample, pad, f"rank of layers, {state}")
            for state, model in (("trained", loaded.model), ("initial", initial))
            if model is not None
        }
    if "heads" in options.parts:
        importance = head_importance(loaded, sample)
        for name, figures in found["attentions"].items():
            figures.update(rounded(importance[name]))
        found["removal"] = removal(loaded, sample, found["attentions"], options)
    if "words" in options.parts:
        found["words"] = without_words(loaded, sample, found["attentions"], whole)
    if "lengths" in options.parts:
        found["lengths"] = rounded(by_length(loaded, order, options))
    return found


def summary(found: Figures) -> Figures:
    """The figures that docs/analysis.md shows, of `analyse` with data: histograms of half the intervals, the corner of
    the patterns of self-attention, and neither parameters nor sentences."""
    attentions = {name: dict(attention) for name, attention in found["attentions"].items()}
    for attention in attentions.values():
        histograms = {kind: attention.get("histograms", {}).get(kind) for kind in ("logits", "weights")}
        for kind, histogram in histograms.items():
            shares = histogram["shares"] if histogram else {}
            pairs = {state: zip(values[::2], values[1::2]) for state, values in shares.items()}
            halved = {state: [left + right for left, right in values] for state, values in pairs.items()}
            histograms[kind] = histogram and {**histogram, "shares": rounded(halved, digits=3)}
        corner = [[row[:CORNER] for row in head[:CORNER]] for head in attention.pop("pattern", [])]
        attention["histograms"] = {kind: histogram for kind, histogram in histograms.items() if histogram}
        attention.update({} if attention["group"] == "decoder.cross" else {"pattern": corner})
    kept = {name: own for name, own in found.items() if name not in ("checkpoint", "sentences")}
    return {**kept, "attentions": attentions, "updates": found["checkpoint"]["updates"]}


def describe(loaded: Loaded) -> Figures:
    """Settings of a checkpoint's training."""
    model = loaded.cfg.model
    return {
        "model": getattr(model, "arch", None) or model._name,
        "seed": loaded.cfg.common.seed,
        "updates": loaded.updates,
        "parameters": sum(value.numel() for value in loaded.model.parameters()),
        "max_length": getattr(model, "synth_max_length", None),
    }


def rounded(value: Any, digits: int = 4) -> Any:
    """So many significant digits of every number in lists and dictionaries."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value


def in_thousandths(weights: Tensor) -> list[Any]:
    """Attention weights in thousandths, as short to write as they can be seen in a picture."""
    found: list[Any] = (weights * 1000).round().int().tolist()
    return found


# ---- without data


def parameter_values(model: nn.Module | None) -> dict[str, Tensor]:
    """{attention: the values that its logits are computed from}."""
    return {} if model is None else {a.name: a.parameters() for a in attentions(model)}


def add_histograms(found: Figures, kind: str, trained: dict[str, Tensor], initial: dict[str, Tensor]) -> None:
    """Histograms of each attention's values, initial and trained, over the same intervals."""
    for name, figures in found["attentions"].items():
        states = {"trained": trained.get(name), "initial": initial.get(name)}
        values = {state: value for state, value in states.items() if value is not None and value.numel()}
        if not values:
            continue
        low, high = 0.0, 1.0
        if kind != "weights":
            ends = [quantile(value, q) for value in values.values() for q in (0.001, 0.999)]
            low, high = min(ends), max(ends)
            if low == high:
                low, high = low - 1, high + 1
        shares = {state: measure.histogram(value, low, high, BINS) for state, value in values.items()}
        deviation = {state: float(value.std(unbiased=False)) for state, value in values.items()}
        figures.setdefault("histograms", {})[kind] = rounded(
            {"low": low, "high": high, "shares": shares, "deviation": deviation}
        )


def quantile(values: Tensor, share: float) -> float:
    """A quantile of at most a million of the values: torch takes no more than 16 million."""
    return float(torch.quantile(values[:: values.numel() // 1_000_000 + 1].float(), share))


def fixed_weights(model: nn.Module, options: Options) -> dict[str, Tensor]:
    """{attention: softmax(S), (H, T, T)}, for functions that never look at the input, on one sentence of T tokens."""
    found = {}
    for attention in attentions(model):
        longest = getattr(stacks(model)[attention.stack], "max_length", None) or options.positions
        logits = attention.logits_without_input(min(options.positions, int(longest)))
        if logits is not None:
            found[attention.name] = measure.weights_of(logits, causal=attention.stack == "decoder")
    return found


# ---- with data


def read_attention(
    model: nn.Module,
    sample: list[Batch],
    pad: int,
    title: str,
    found: Figures | None = None,
    options: Options | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Reads the attentions of a model on the data.

    Args:
        found: gets ``pattern``, ``singular_values``, ``word_dependence`` and the figures of
            `measure.where_it_looks` for each attention; None for the histograms' values alone.

    Returns:
        {attention: values of its ``logits`` and ``weights`` for histograms}.
    """
    values: dict[str, dict[str, list[Tensor]]] = {}
    patterns: dict[str, measure.MeanByPosition] = {}
    logits_by_position: dict[str, measure.MeanByPosition] = {}
    sums: dict[str, dict[str, Tensor]] = {}
    count, chance = sum(len(batch["id"]) for batch in sample), torch.Generator().manual_seed(0)

    def read(attention: Attention, i: int, logits: Tensor, causal: bool) -> None:
        weights = measure.weights_of(logits, causal)
        visible = torch.ones_like(weights, dtype=torch.bool)
        visible = visible.tril() if causal else visible
        some = torch.randperm(int(visible.sum()), generator=chance)[:HISTOGRAM_VALUES]
        for kind, value in (("logits", logits), ("weights", weights)):
            values.setdefault(attention.name, {}).setdefault(kind, []).append(value[visible][some])
        if found is not None:
            patterns.setdefault(attention.name, measure.MeanByPosition()).add(weights)
            logits_by_position.setdefault(attention.name, measure.MeanByPosition()).add(logits)
            figures = measure.where_it_looks(weights)
            figures["singular_values"] = measure.cumulative_singular_values(weights)
            add(sums, attention.name, figures)

    def read_again(attention: Attention, i: int, logits: Tensor, causal: bool) -> None:
        mean = logits_by_position[attention.name].mean(*logits.shape[1:])
        pair = [measure.weights_of(x, causal) for x in (logits, mean)]
        add(sums, attention.name, {"word_dependence": measure.word_dependence(*pair)})

    run = Sentences(model, pad)
    for batch in progress(sample, title):
        run(batch, read)
    if found is not None and options is not None:
        for batch in progress(sample, "words or positions"):
            run(batch, read_again)
        for name, figures in sums.items():
            found["attentions"][name].update(rounded({key: total / count for key, total in figures.items()}))
            found["attentions"][name]["pattern"] = in_thousandths(
                patterns[name].mean(options.positions, options.positions)
            )
    return {name: {kind: torch.cat(parts) for kind, parts in kinds.items()} for name, kinds in values.items()}


def add(sums: dict[str, dict[str, Tensor]], name: str, figures: dict[str, Tensor]) -> None:
    """Adds figures to their sums over the sentences."""
    own = sums.setdefault(name, {})
    for key, value in figures.items():
        own[key] = own[key] + value if key in own else value


def sentences(loaded: Loaded, sample: list[Batch], pad: int) -> list[Figures]:
    """The weights of every attention for a few single sentences: the first of the data that fit a picture."""
    chosen = []
    for batch in sample:
        for place, number in enumerate(batch["id"].tolist()):
            chosen.append((int(length_of(batch, place, pad) > LONGEST_SHOWN), number, batch, place))
    found = []
    for _, number, batch, place in sorted(chosen, key=lambda item: item[:2])[:SHOWN_SENTENCES]:
        weights: dict[str, Any] = {}

        def read(attention: Attention, i: int, logits: Tensor, causal: bool) -> None:
            if i == place:  # noqa: B023  (called within this turn of the loop alone)
                weights[attention.name] = in_thousandths(measure.weights_of(logits, causal))  # noqa: B023

        tokens = Sentences(loaded.model, pad)(batch, read)
        words = {stack: words_of(loaded, stack, rows[place], pad) for stack, rows in tokens.items()}
        found.append({"number": number, "tokens": words, "weights": weights})
    return found


def length_of(batch: Batch, place: int, pad: int) -> int:
    """The tokens of the longer side of a sentence."""
    sides = [batch["net_input"][key] for key in TOKENS if key in batch["net_input"]]
    return max(int(side[place].ne(pad).sum()) for side in sides)


def words_of(loaded: Loaded, stack: str, tokens: Tensor, pad: int) -> list[str]:
    """The words of a sentence."""
    task = loaded.task
    dictionary = task.source_dictionary if stack == "encoder" else task.target_dictionary or task.source_dictionary
    return [dictionary[token] for token in tokens.tolist() if token != pad]


@torch.no_grad()
def rank_collapse(model: nn.Module, sample: list[Batch], pad: int, title: str) -> Figures:
    """How alike the tokens are after each layer, with and without skip connections and feed-forward layers.

    Returns:
        {stack: {branches: {``equal_rows``, ``rank_one``: a mean over the first sentences for each layer}}}, as in
        `measure.rank_one_distances`.
    """
    found: Figures = {}
    few, count = [], 0
    for batch in sample[len(sample) // 2 :] + sample[: len(sample) // 2]:  # sentences of middle length first
        if count < RANK_SENTENCES:
            few.append(batch)
            count += len(batch["id"])
    for name, (skip, feed_forward) in progress(BRANCHES.items(), title):
        sums: dict[str, dict[int, list[tuple[float, float]]]] = {}
        for batch in few:
            outputs: list[tuple[str, int, Tensor]] = []

            def read(stack: str, layer: int, x: Tensor) -> None:
                outputs.append((stack, layer, x))  # noqa: B023  (called within this turn of the loop alone)

            with tokens_of(model) as tokens, layer_outputs(model, read, skip, feed_forward):
                model(**batch["net_input"])
            for stack, layer, x in outputs:
                for i, length in enumerate(tokens[stack].ne(pad).sum(dim=1).tolist()):
                    if length > 1:
                        pairs = sums.setdefault(stack, {}).setdefault(layer, [])
                        pairs.append(measure.rank_one_distances(x[:length, i]))
        for stack, layers in sums.items():
            means = [[math.fsum(column) / len(column) for column in zip(*layers[layer])] for layer in sorted(layers)]
            equal_rows, rank_one = zip(*means)
            found.setdefault(stack, {})[name] = rounded({"equal_rows": equal_rows, "rank_one": rank_one})
    return found


# ---- heads


def head_importance(loaded: Loaded, sample: list[Batch]) -> dict[str, dict[str, Any]]:
    """How much each head matters to the loss.

    Returns:
        {attention: ``gradient``, the mean over the sentences of the absolute derivative of the training's loss to a
        factor of 1 on the head (Michel et al. 2019, arXiv 1905.10650, eq. 2), in nats; ``left_out``, by how much the
        loss grows without the head, in bits}. Both are by token, for an encoder by masked token or example.
    """
    model, criterion = loaded.model, criterion_of(loaded)
    found: dict[str, dict[str, Any]] = {a.name: {"gradient": torch.zeros(a.heads)} for a in attentions(model)}
    size = 0
    for batch in progress(sample, "importance by gradient"):
        masks = {a.name: torch.ones(len(batch["id"]), a.heads, requires_grad=True) for a in attentions(model)}
        with masked_heads(model, masks):
            value, number, log = criterion(model, batch)
        # None for an encoder that the decoder does not attend to
        grads = torch.autograd.grad(value, list(masks.values()), allow_unused=True)
        size += denominator(number, log)
        for name, grad in zip(masks, grads):
            if grad is not None:
                found[name]["gradient"] += grad.abs().sum(dim=0)
    for figures in found.values():
        figures["gradient"] = (figures["gradient"] / size).tolist()
        figures["left_out"] = []
    whole = loss(loaded, sample)
    heads = [(a.name, head) for a in attentions(model) for head in range(a.heads)]
    for name, head in progress(heads, "importance by leaving out"):
        with masked_heads(model, zeroed(model, [(name, head)])):
            found[name]["left_out"].append(loss(loaded, sample) - whole)
    return found


def removal(loaded: Loaded, sample: list[Batch], figures: dict[str, Figures], options: Options) -> Figures:
    """Loss, and for a translation BLEU, as more and more heads are removed, the least important by gradient first.

    Returns:
        {group: ``share`` of its heads removed, ``loss`` in bits a token, ``bleu`` or None}, and ``signature``.
    """
    translates = is_translation(loaded)
    groups: dict[str, dict[str, list[float]]] = {}
    for name, figure in figures.items():
        groups.setdefault(figure["group"], {})[name] = figure["gradient"]
    plan = [
        (group, removed, order[:removed])
        for group, order in ((group, measure.removal_order(found)) for group, found in groups.items())
        for removed in measure.removal_steps(len(order), options.steps)
    ]

    def without(heads: Sequence[tuple[str, int]]) -> tuple[float, float | None, str | None]:
        """The loss without these heads, BLEU and its signature."""
        bleu, signature = None, None
        with masked_heads(loaded.model, zeroed(loaded.model, heads)):
            if translates:
                bleu, signature = bleu_of(loaded, sample, options)
            return loss(loaded, sample), bleu, signature

    curves: Figures = {}
    whole = without([])
    for group, removed, heads in progress(plan, "removing heads"):
        value, bleu, _ = without(heads) if removed else whole
        curve = curves.setdefault(group, {"share": [], "loss": [], "bleu": []})
        curve["share"].append(removed / sum(len(found) for found in groups[group].values()))
        curve["loss"].append(value)
        curve["bleu"].append(bleu)
    return {"groups": rounded(curves), "signature": whole[2], "beam": options.beam if translates else None}


def without_words(loaded: Loaded, sample: list[Batch], figures: dict[str, Figures], whole: float) -> Figures:
    """The loss when heads of self-attention look by position alone, by their average over the training's data.

    Args:
        figures: of each self-attention, which get ``without_words``: for each head the loss with its attention
            replaced, less the loss `whole`, in bits.

    Returns:
        ``heads``, as [attention, head], the cheapest first, ``loss`` in bits when so many of them are replaced, from
        none to all, and the ``sentences`` of the average.
    """
    average = words.average(loaded, "train", words.SENTENCES)
    length = max(
        int(batch["net_input"][key].size(1)) for batch in sample for key in TOKENS if key in batch["net_input"]
    )
    logits = {name: constants.matrix(length) for name, constants in average.constants.items()}
    heads = [(name, head) for name in logits for head in range(figures[name]["heads"])]
    found = words.without_words(loaded, sample, logits, heads)
    for name in logits:
        figures[name]["without_words"] = rounded([found[name, head] - whole for head in range(figures[name]["heads"])])
    curve = list(words.cheapest_first(loaded, sample, logits, found))
    return rounded(
        {
            "heads": [head for head, _ in curve],
            "loss": [whole, *(value for _, value in curve)],
            "sentences": average.sentences,
        }
    )  # type: ignore[no-any-return]


def is_translation(loaded: Loaded) -> bool:
    """Whether the model translates, so that BLEU can be measured."""
    return set(stacks(loaded.model)) == {"encoder", "decoder"} and hasattr(loaded.task, "inference_step")


def by_length(loaded: Loaded, order: Sequence[int], options: Options) -> Figures:
    """Loss, and for a translation BLEU, of short and of long sentences.

    Args:
        order: the sentences, shortest first.

    Returns:
        ``ranges``: for up to 8, 16, 32, ... tokens of a sentence's longer side, its end among them, where there are
        such: ``longest``, ``sentences``, ``loss`` in bits a token, ``bleu`` or None. And BLEU's ``signature`` and
        ``beam``.
    """
    dataset = loaded.task.dataset(options.subset)
    ranges: dict[int, list[int]] = {}
    for i in order:
        ranges.setdefault(max(8, 2 ** math.ceil(math.log2(dataset.num_tokens(i)))), []).append(i)
    found, signature, translates = [], None, is_translation(loaded)
    for longest, own in progress(ranges.items(), "loss by sentence length"):
        sample, bleu = batches(loaded, options.subset, own), None
        if translates:
            bleu, signature = bleu_of(loaded, sample, options)
        found.append({"longest": longest, "sentences": len(own), "loss": loss(loaded, sample), "bleu": bleu})
    return {"ranges": found, "signature": signature, "beam": options.beam if translates else None}


@torch.no_grad()
def bleu_of(loaded: Loaded, sample: list[Batch], options: Options) -> tuple[float, str]:
    """sacreBLEU of the model's translations, on the data's own tokens without its subwords, and the signature."""
    from sacrebleu.metrics import BLEU

    task = loaded.task
    generator = task.build_generator([loaded.model], GenerationConfig(beam=options.beam))
    dictionary, ignored = task.target_dictionary, getattr(generator, "symbols_to_strip_from_output", {generator.eos})
    translations, references = [], []
    for batch in sample:
        for hypotheses, target in zip(task.inference_step(generator, [loaded.model], batch), batch["target"]):
            best = hypotheses[0]["tokens"].int()
            reference = strip_pad(target, dictionary.pad())
            translations.append(
                dictionary.string(best, options.remove_bpe, extra_symbols_to_ignore=ignored) if len(best) else ""
            )
            references.append(
                dictionary.string(reference, options.remove_bpe, escape_unk=True, extra_symbols_to_ignore=ignored)
            )
    metric = BLEU(tokenize="none", force=True)
    score = metric.corpus_score(translations, [references]).score
    return float(score), f"BLEU|{metric.get_signature()}"

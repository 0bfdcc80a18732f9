"""Turns a trained Transformer into a Synthesizer: heads of its self-attention no longer look at the words.

The logits of a head become constants, those that come nearest to its attention averaged by position over the data.
Nothing is trained; the last line printed is a command that does. Takes fairseq's transformer, transformer_lm and
roberta, and the models of this plugin as far as their heads have vanilla. NEW.pt needs this plugin's --user-dir.
"""
# ruff: noqa: E402

import argparse
import itertools
import logging
import shlex
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import register
from .errors import SynthesizerError, run_command

if __name__ == "__main__":  # first: fairseq says on import that it misses packages, and register if it does not fit
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    run_command(register)

import torch
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, gen_parser_from_dataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from .inspect import words
from .inspect.checkpoints import Loaded, batches, import_user_dir, load, readable
from .inspect.hooks import Attention, attentions, is_synthetic, stacks
from .inspect.passes import loss
from .inspect.words import Head
from .synthesizers import SYNTHESIZERS

STOCK: dict[type, str] = {  # fairseq's models, and what they become
    TransformerModel: "transformer_synth",
    TransformerLanguageModel: "transformer_lm_synth",
    RobertaModel: "roberta_synth",
}
CHOICES = (*words.FUNCTIONS, "vanilla")


class Plan(NamedTuple):
    """What is to become of a model."""

    name: str  # registered, of the new model
    functions: dict[str, str]  # {self-attention: the function that replaces its dot products}
    heads: list[Head]  # that may be replaced
    length: int | None  # of the model's own functions by position, which stay; None: there are none
    rank: int


def main(argv: Sequence[str] | None = None) -> None:
    """The command line.

    Raises:
        SynthesizerError: a flag, the checkpoint or the data cannot be used; nothing is written.
    """
    args = parse(argv)
    register()
    loaded = load_plain(args)
    plan = plan_of(loaded, args)
    average = words.average(loaded, args.subset, args.sentences, args.max_length or plan.length)
    length = plan.length or length_of(loaded, average.length, args.max_length)
    order = readable(loaded, "valid", args.sentences, length)
    sample = batches(loaded, "valid", order)
    parameters = {
        name: words.parameters_of(function, average.constants[name], length, plan.rank)
        for name, function in plan.functions.items()
    }
    before = loss(loaded, sample)
    heads = plan.heads
    if args.heads_within is not None:
        logits = {name: words.logits_of(plan.functions[name], own, length) for name, own in parameters.items()}
        found = words.without_words(loaded, sample, logits, heads)
        heads = []
        for head, value in words.cheapest_first(loaded, sample, logits, found):
            if value > before + args.heads_within:
                break
            heads.append(head)
        if not heads:
            costs = f"the cheapest head costs {min(found.values()) - before:.2g} bits"
            raise SynthesizerError(f"--heads-within {args.heads_within}: {costs}; give more, or leave it out")
    cfg, model = converted(loaded, plan, parameters, heads, length)
    after = loss(loaded._replace(model=model), sample)
    cfg = save(args, cfg, model)
    sizes = [sum(p.numel() for p in x.parameters()) for x in (loaded.model, model)]
    print(f"loss: {before:.4f} bits on {len(order):,} sentences of valid ({args.checkpoint})")
    print(f"loss, converted: {after:.4f} bits, {after - before:+.4f} ({args.out})")
    print(f"heads: {described(loaded, plan, heads)}")
    print(f"parameters: {sizes[0]:,} before, {sizes[1]:,} after")
    print(f"to tune it: {tuning_command(args, cfg)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values.

    Raises:
        SynthesizerError: the output exists, or cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m fairseq_synth.convert", description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a .pt file of fairseq-train")
    add("--data", type=Path, required=True, metavar="DATA_BIN", help="binarised data of the model's dictionaries")
    add("--out", type=Path, required=True, metavar="NEW.pt", help="the file to write")
    for stack in ("encoder", "decoder"):
        add(f"--{stack}", metavar="FUNCTION", help=f"one of {', '.join(CHOICES)}, for the {stack} (default: random)")
    add("--layers", metavar="NAMES", help="only these, joined by commas: encoder.self.0,decoder.self.3 (default: all)")
    add("--heads-within", type=float, metavar="BITS", help="the cheapest heads until the loss has grown so much")
    add("--sentences", type=int, default=words.SENTENCES, metavar="N", help="of each split at most (default: 2000)")
    add("--subset", default="train", help="split to average attention over (default: train); losses are of valid")
    add("--max-length", type=int, metavar="N", help="--synth-max-length of the result (default: the longest seen)")
    add("--rank", type=int, default=8, metavar="K", help="of factorized_random (default: 8)")
    add("--user-dir", type=Path, metavar="DIR", help="the --user-dir given to fairseq-train, if it is another")
    add("--force", action="store_true", help="overwrite NEW.pt")
    args = parser.parse_args(argv)
    for flag in ("sentences", "rank", "max_length", "heads_within"):
        value = getattr(args, flag)
        if value is not None and value <= 0:
            raise SynthesizerError(f"--{flag.replace('_', '-')} {value}: must be above 0")
    for stack in ("encoder", "decoder"):
        function = getattr(args, stack)
        if function is not None and function not in CHOICES:
            reason = "no closed form makes it of attention" if function in SYNTHESIZERS else "unknown function"
            raise SynthesizerError(f"--{stack} {function}: {reason}; choose from {', '.join(CHOICES)}")
    if args.out.exists() and not args.force:
        raise SynthesizerError(f"--out {args.out}: exists already; give --force to overwrite it, or another name")
    if not args.out.absolute().parent.is_dir():
        raise SynthesizerError(f"--out {args.out}: its folder does not exist; make it, or choose another")
    return args


def load_plain(args: argparse.Namespace) -> Loaded:
    """The checkpoint, whose heads can be told apart.

    Raises:
        SynthesizerError: it is no Transformer's, a TorchScript file or quantised.
    """
    import_user_dir(args)
    path = args.checkpoint
    scripted = f"{path}: its heads cannot be told apart, as it is {{}}; give the checkpoint of fairseq-train"
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("constants.pkl") for name in archive.namelist()):
                raise SynthesizerError(scripted.format("a TorchScript file"))
    loaded = load(path, args.data)
    projections = [getattr(a.module, f"{name}_proj") for a in attentions(loaded.model) for name in ("v", "out")]
    if not all(type(module) is nn.Linear for module in projections):
        raise SynthesizerError(scripted.format("quantised"))
    return loaded


def plan_of(loaded: Loaded, args: argparse.Namespace) -> Plan:
    """What is to become of the model.

    Raises:
        SynthesizerError: it is of another architecture, or a flag names what it has not.
    """
    cls = type(loaded.model)
    own = next((name for name, other in MODEL_REGISTRY.items() if other is cls and name in STOCK.values()), None)
    name = STOCK.get(cls) or own
    if name is None:
        raise SynthesizerError(
            f"{loaded.path}: its model, {cls.__name__}, cannot be converted; fairseq's transformer, transformer_lm and "
            "roberta and this plugin's models can"
        )
    found = {a.name: a for a in attentions(loaded.model)}
    chosen = args.layers.split(",") if args.layers else [n for n, a in found.items() if a.kind == "self"]
    for attention in chosen:
        if attention not in found:
            raise SynthesizerError(f"--layers {attention}: no such attention; the model has {', '.join(found)}")
        if found[attention].kind == "cross":
            raise SynthesizerError(
                f"--layers {attention}: cross-attention is never replaced, as positions alone do not say which words "
                "of two sentences belong together; leave it out"
            )
    for stack in ("encoder", "decoder"):
        if getattr(args, stack) is not None and stack not in stacks(loaded.model):
            raise SynthesizerError(f"--{stack} {getattr(args, stack)}: the model has no {stack}; leave it out")
    functions = {name: getattr(args, found[name].stack) or "random" for name in chosen}
    functions = {name: function for name, function in functions.items() if function != "vanilla"}
    heads = [(name, head) for name in functions for head in dot_product_heads(found[name])]
    if not heads:
        raise SynthesizerError(f"{loaded.path}: no head to replace: none of those asked for has dot-product attention")
    kept = any(names != ["vanilla"] for a in found.values() if a.kind == "self" for names, _ in groups_of(a))
    cfg = loaded.cfg.model
    if kept and args.max_length:
        raise SynthesizerError(f"--max-length: the model has functions that keep its {cfg.synth_max_length}")
    return Plan(
        name,
        {name: functions[name] for name, _ in heads},
        heads,
        cfg.synth_max_length if kept else None,
        cfg.synth_rank if kept else args.rank,
    )


def groups_of(attention: Attention) -> list[tuple[list[str], int]]:
    """The functions of each group of neighbouring heads, and how many heads it has."""
    if not is_synthetic(attention.module):
        return [(["vanilla"], attention.heads)]
    return [(list(mixture.components), mixture.num_heads) for mixture in attention.module.synthesizer.mixtures()]


def dot_product_heads(attention: Attention) -> list[int]:
    """The heads that have ``vanilla``, alone or in a mixture."""
    by_head = [names for names, heads in groups_of(attention) for _ in range(heads)]
    return [head for head, names in enumerate(by_head) if "vanilla" in names]


def length_of(loaded: Loaded, seen: int, asked: int | None) -> int:
    """``--synth-max-length`` of the new model: as asked for, or as long as the data and the model's own rows.

    Raises:
        SynthesizerError: more is asked for than was seen.
    """
    cfg = loaded.cfg
    rows = getattr(cfg.task, "tokens_per_sample", None) or 0
    rows = max(rows + bool(getattr(cfg.model, "add_bos_token", False)), getattr(cfg.model, "max_positions", None) or 0)
    if asked is not None and asked > max(seen, rows):
        raise SynthesizerError(
            f"--max-length {asked}: no sentence of {loaded.data} that was read has more than {seen} tokens, so nothing "
            f"is known of positions beyond; give at most {max(seen, rows)}, or relative_random, which takes any length"
        )
    return max(asked or seen, rows)


def converted(
    loaded: Loaded, plan: Plan, parameters: dict[str, dict[str, Tensor]], heads: Sequence[Head], length: int
) -> tuple[dict[str, Any], nn.Module]:
    """The new model in eval mode, and the config to save with it.

    Args:
        parameters: of the function of each attention, for all heads.
        heads: those to replace.
        length: ``--synth-max-length``.
    """
    state = dict(loaded.model.state_dict())
    specs: dict[str, list[str]] = {}
    prefixes = {id(module): f"{name}." for name, module in loaded.model.named_modules()}
    for attention in attentions(loaded.model):
        if attention.kind == "self":
            chosen = [head for name, head in heads if name == attention.name]
            name = attention.name
            function, values = plan.functions.get(name, ""), parameters.get(name, {})
            spec = replace_heads(state, prefixes[id(attention.module)], attention, chosen, function, values)
            specs.setdefault(attention.stack, []).append(spec)
    cfg = loaded.cfg.model
    plain: Any = vars(cfg) if isinstance(cfg, argparse.Namespace) else OmegaConf.to_container(cfg, resolve=True)
    old = dict(plain)
    for stack, own in specs.items():
        old[f"{stack}_synthesizer"] = own[0] if len(set(own)) == 1 else ",".join(own)
    old.update(synth_max_length=length, synth_rank=plan.rank)
    cls: Any = MODEL_REGISTRY[plan.name]
    filled = vars(cls.read_config(argparse.Namespace(**old), loaded.task))
    fields = MODEL_DATACLASS_REGISTRY[plan.name].__dataclass_fields__
    model_cfg = {**{key: filled[key] for key in fields if key in filled}, "_name": plan.name}
    model = loaded.task.build_model(OmegaConf.create(model_cfg)).float().eval()
    model.load_state_dict(state, strict=True)
    return model_cfg, model


def replace_heads(
    state: dict[str, Tensor],
    prefix: str,
    attention: Attention,
    chosen: list[int],
    function: str,
    values: dict[str, Tensor],
) -> str:
    """Makes the heads `chosen` of an attention heads of `function`.

    In an attention of fairseq's they are put first, so that there are two groups of heads; elsewhere heads keep their
    places, as functions may see a slice of the input.

    Args:
        state: the model's state dict, changed in place.
        prefix: the attention's in it.
        values: the parameters of the function, for all heads.

    Returns:
        what ``--encoder-synthesizer`` says of such a layer.
    """
    groups, own, kinds = groups_of(attention), f"{prefix}synthesizer.", []
    place = [(number, head) for number, (_, heads) in enumerate(groups) for head in range(heads)]
    order = list(range(len(place)))
    if not is_synthetic(attention.module):
        order.sort(key=lambda head: head not in chosen)
    reading = [
        h for h, (number, _) in enumerate(place) if any(SYNTHESIZERS[n].reads_query_key for n in groups[number][0])
    ]
    queries = [reading.index(h) for h in order if h in reading and h not in chosen]
    old = {key: state.pop(key) for key in list(state) if key.startswith(own)}
    tensors: list[dict[str, Tensor]] = []
    for number, run in itertools.groupby(order, key=lambda h: -1 if h in chosen else place[h][0]):
        heads = list(run)
        if number == -1:
            kinds.append(f"{function}:{len(heads)}")
            tensors.append({f"components.{function}.{name}": value[heads] for name, value in values.items()})
            continue
        kinds.append(f"{'+'.join(groups[number][0])}:{len(heads)}")
        kept = [place[h][1] for h in heads]
        of_group = own + (f"groups.{number}." if len(groups) > 1 else "")
        found = {key[len(of_group) :]: value for key, value in old.items() if key.startswith(of_group)}
        # of each head, but the weights of a mixture have their functions first, and an empty tensor says a size
        tensors.append({k: x if not x.numel() else x[:, kept] if k == "alpha" else x[kept] for k, x in found.items()})
    for number, found in enumerate(tensors):
        new = own + (f"groups.{number}." if len(tensors) > 1 else "")
        state.update({new + key: value for key, value in found.items()})
    for name, rows in (("q_proj", queries), ("k_proj", queries), ("v_proj", order), ("out_proj", order)):
        for key in (f"{prefix}{name}.weight", f"{prefix}{name}.bias"):
            if key in state and not rows:
                del state[key]
            elif key in state and not (name == "out_proj" and key.endswith("bias")):
                axis = int(name == "out_proj")
                by_head = state[key].unflatten(axis, (-1, attention.module.head_dim))
                state[key] = by_head.index_select(axis, torch.tensor(rows)).flatten(axis, axis + 1)
    return "/".join(kinds) if len(kinds) > 1 else kinds[0].split(":")[0]


def save(args: argparse.Namespace, model_cfg: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Writes the checkpoint: the old one with another model, without the optimizer's state, which would not fit.

    Returns:
        its config.
    """
    state = checkpoint_utils.load_checkpoint_to_cpu(str(args.checkpoint))
    old = state["cfg"] if state.get("args") is None else convert_namespace_to_omegaconf(state["args"])
    cfg: Any = OmegaConf.to_container(old, resolve=True, enum_to_str=True)
    cfg["model"] = model_cfg
    cfg["checkpoint"]["finetune_from_model"] = str(args.checkpoint)  # so that nobody takes it for trained from scratch
    extra = {key: value for key, value in (state.get("extra_state") or {}).items() if key not in ("best", "ema")}
    state.update(args=None, cfg=cfg, model=model.state_dict(), last_optimizer_state=None, extra_state=extra)
    checkpoint_utils.torch_persistent_save(state, str(args.out))
    return dict(cfg)


def described(loaded: Loaded, plan: Plan, heads: Sequence[Head]) -> str:
    """What became of how many heads, in words."""
    parts = []
    for stack in stacks(loaded.model):
        own = [a for a in attentions(loaded.model) if a.group == f"{stack}.self"]
        functions = {plan.functions[a.name] for a in own if a.name in plan.functions}
        gone = sum(name == a.name for a in own for name, _ in heads)
        parts.append(f"{gone} of the {stack}'s {sum(a.heads for a in own)} are {' or '.join(functions) or 'converted'}")
    return ", ".join(parts)


def tuning_command(args: argparse.Namespace, cfg: dict[str, Any]) -> str:
    """A command that trains the new model on: the flags of its training, a third of the learning rate, 500 updates."""
    model, data, old = cfg["model"]["_name"], cfg["dataset"], cfg["optimization"]
    size = f"--max-tokens {data['max_tokens']}" if data["max_tokens"] else f"--batch-size {data['batch_size']}"
    size += f" --update-freq {old['update_freq'][0]}" if old["update_freq"] != [1] else ""
    flags = [str(args.data), "--finetune-from-model", str(args.out), "--save-dir", f"{args.out.stem}-tuned"]
    flags += f"{size} --clip-norm {old['clip_norm']} --lr {old['lr'][0] / 3:.2g} --lr-scheduler inverse_sqrt".split()
    flags += f"--warmup-updates 50 --max-update 500 --arch {model}".split()
    parser = argparse.ArgumentParser(add_help=False)
    MODEL_REGISTRY[model].add_args(parser)
    flags += given(parser, MODEL_DATACLASS_REGISTRY[model](), cfg["model"])
    for kind, registry in (
        ("task", TASK_DATACLASS_REGISTRY),
        ("criterion", CRITERION_DATACLASS_REGISTRY),
        ("optimizer", OPTIMIZER_DATACLASS_REGISTRY),
    ):
        name = cfg[kind]["_name"]
        flags += [f"--{kind}", name]
        if name in registry:
            parser = argparse.ArgumentParser(add_help=False)
            gen_parser_from_dataclass(parser, registry[name]())
            flags += given(parser, registry[name](), {**cfg[kind], "data": None})
    return f'fairseq-train --user-dir "$(python -m fairseq_synth)" {shlex.join(flags)}'


def given(parser: argparse.ArgumentParser, defaults: Any, values: Mapping[str, Any]) -> list[str]:
    """The flags of a parser that have other values than their defaults."""
    flags = []
    for action in parser._actions:
        value = tuple(x) if isinstance(x := values.get(action.dest), list) else x  # (0.9, 0.98), as fairseq reads it
        if value is not None and value != getattr(defaults, action.dest, None):
            flags += [action.option_strings[0]] + ([] if action.nargs == 0 else [str(value)])
    return flags


if __name__ == "__main__":
    run_command(main)

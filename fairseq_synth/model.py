"""What the kinds of model have in common: flags, checks while a model is built, and how checkpoints are loaded."""

import argparse
import ast
import dataclasses
import os
import re
import tarfile
from collections.abc import Sequence
from typing import Any

import omegaconf.errors
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import import_models
from fairseq.registry import REGISTRIES
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from omegaconf import II
from torch import Tensor

from .attention import SyntheticAttention
from .config import to_namespace
from .errors import MESSAGES, Message, SynthesizerError, explain, first_line
from .host.misfit import explain_misfit

# omegaconf's errors for a key that a config does not have; version 2.0 has only the first two
CONFIG_ERRORS = tuple(
    getattr(omegaconf.errors, name)
    for name in ("ConfigAttributeError", "ConfigKeyError", "InterpolationKeyError")
    if hasattr(omegaconf.errors, name)
)


class SynthesizerModel:
    """The first base class of each kind of model; the second is fairseq's model of that kind.

    ``build_model(cfg, task)`` of a kind takes the flat config (Hydra's DictConfig, a dataclass or a Namespace) and
    fairseq's task, for its dictionaries and, in encoders without ``--max-positions``, for its longest row. It raises a
    SynthesizerError that names the flag if a flag is invalid or cannot apply.

    Attributes:
        kind: a noun for messages, such as "language model".
        stacks: which of "encoder" and "decoder" have synthesizers.
        tasks: fairseq's tasks that need this kind of model.
        task_names: what ``--task`` takes for them, for messages.
        config: the dataclass of all flags.
        hidden: the flags that are not on the command line.
    """

    kind: str
    stacks: tuple[str, ...]
    tasks: tuple[type, ...]
    task_names: str
    config: type[FairseqDataclass]
    hidden: tuple[str, ...] = ()

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags to a parser, without defaults: the architecture sets those."""
        hidden = (*cls.hidden, "_name")
        shown = [(f.name, f.type, f) for f in dataclasses.fields(cls.config) if f.name not in hidden]
        flags: Any = dataclasses.make_dataclass("Flags", shown, bases=(FairseqDataclass,))
        gen_parser_from_dataclass(parser, flags(), delete_default=True)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | os.PathLike[str],
        checkpoint_file: str | Sequence[str] = "model.pt",
        data_name_or_path: str | os.PathLike[str] = ".",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Loads a trained model, as fairseq's own method does; ``user_dir`` may be left out.

        Args:
            model_name_or_path: the folder of the checkpoint, or an archive of such a folder.
            checkpoint_file: the file in that folder; several, in a list or joined by ":", are an ensemble.
            data_name_or_path: the folder of the dictionaries; within the model's folder if it starts with ".".
            args: further arguments of fairseq's method.
            kwargs: settings to use in place of those in the checkpoint, such as ``bpe="subword_nmt"``. They may also be
                given together, as ``model_overrides``.

        Raises:
            SynthesizerError: a file is not there, or checkpoint, data and arguments do not fit.
        """
        model = os.fspath(model_name_or_path)
        data = os.fspath(data_name_or_path)
        checkpoints = checkpoint_file if isinstance(checkpoint_file, str) else os.pathsep.join(checkpoint_file)
        kwargs = {**read_overrides(kwargs.pop("model_overrides", {})), **kwargs}
        check_paths(model, checkpoints, data)
        check_choices(kwargs)
        # fairseq registers a --user-dir only if its package has not been imported before, so this does it in any case
        folder = os.path.dirname(os.path.abspath(__file__))
        import_models(os.path.join(folder, "models"), f"{__package__}.models")
        kwargs.setdefault("user_dir", folder)
        try:
            return super().from_pretrained(model, checkpoints, data, *args, **kwargs)  # type: ignore[misc]
        except SynthesizerError:
            raise
        except omegaconf.errors.MissingMandatoryValue as error:
            lacking = str(error).rpartition(" ")[2]
            raise SynthesizerError(f"from_pretrained: {lacking} is missing; give {lacking}=...") from error
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            raise SynthesizerError(f"from_pretrained: {line}") from error

    @classmethod
    def read_config(cls, cfg: Any, task: Any) -> argparse.Namespace:
        """Returns the flat config as a namespace, see `to_namespace`.

        Raises SynthesizerError if the task needs another kind of model.
        """
        needed = cls.needed_kind(task)
        if needed != cls.kind:
            raise SynthesizerError(
                f"--task: this task needs {with_article(needed)}, and the model, of --arch or of the checkpoint, is "
                f"{with_article(cls.kind)}; take --task {cls.task_names}, or another model"
            )
        return to_namespace(cfg, cls.config)

    @classmethod
    def needed_kind(cls, task: Any) -> str:
        """Returns the kind of model that a task needs; of a task that no kind names, it is assumed to be this one."""
        if isinstance(task, TranslationLevenshteinTask):  # is a translation task too, but no Synthesizer fits it
            return "non-autoregressive model"
        if isinstance(task, cls.tasks):
            return cls.kind
        for model in model_classes():
            if isinstance(task, model.tasks):
                return model.kind
        return cls.kind

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Loads weights, as fairseq's own method does.

        Raises SynthesizerError for weights of another kind of model, of other sizes or of another dictionary, and if
        some layers lack the weights of their functions.
        """
        kind = kind_of_weights(state_dict)
        if kind not in (None, self.kind):
            raise SynthesizerError(
                f"the checkpoint is of {with_article(str(kind))}, this model is {with_article(self.kind)}; give a "
                f"checkpoint of {with_article(self.kind)}, or the --arch of the checkpoint"
            )
        # A layer without weights of its functions is one of a stock Transformer only if all layers are.
        is_stock = not any(".synthesizer." in key for key in state_dict)
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, SyntheticAttention):
                module.may_start_from_stock = is_stock
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            raise SynthesizerError(explain_misfit(str(error))) from error

    def __prepare_scriptable__(self) -> Any:
        """Is called by `torch.jit.script`. Raises SynthesizerError: these models cannot be compiled to TorchScript."""
        raise SynthesizerError(
            f"{type(self).__name__}: TorchScript is not supported; run the model in Python, or compile it with "
            "torch.compile"
        )


def read_overrides(overrides: str | dict[str, Any]) -> dict[str, Any]:
    """Returns the settings in the argument ``model_overrides``, a dict or, as for the flag, the text of one."""
    if isinstance(overrides, dict):
        return overrides
    try:
        settings = ast.literal_eval(overrides)
    except (ValueError, SyntaxError):
        settings = None
    if not isinstance(settings, dict):
        raise SynthesizerError(f"from_pretrained: model_overrides={overrides!r}: give a dict")
    return settings


def check_paths(model: str, checkpoints: str, data: str) -> None:
    """Checks that the files of `SynthesizerModel.from_pretrained` exist; raises SynthesizerError otherwise.

    Args:
        model: a folder, an archive or a URL.
        checkpoints: files in the folder, joined by ":".
        data: a folder, an archive or a URL; within the folder `model` if it starts with ".".
    """
    if "://" not in model:
        if not os.path.exists(model):
            raise SynthesizerError(f"from_pretrained: {model}: no such folder")
        if os.path.isdir(model):
            for name in checkpoints.split(os.pathsep):
                path = os.path.join(model, name)
                if not os.path.exists(path):
                    raise SynthesizerError(f"from_pretrained: {path}: no such checkpoint; give checkpoint_file=...")
        elif not tarfile.is_tarfile(model):
            raise SynthesizerError(
                f"from_pretrained: {model}: is no folder; give its folder, and checkpoint_file="
                f"{os.path.basename(model)!r}"
            )
    is_in_model = data.startswith(".")
    if is_in_model and not os.path.isdir(model):
        return  # in an archive that fairseq has yet to unpack
    folder = os.path.join(model, data) if is_in_model else data
    if "://" not in folder and not os.path.exists(folder):
        raise SynthesizerError(f"from_pretrained: {folder}: no such folder")


def check_choices(settings: dict[str, Any]) -> None:
    """Checks that fairseq has the tokenizer and the subwords that are asked for; raises SynthesizerError otherwise."""
    for name in ("tokenizer", "bpe"):
        choices = REGISTRIES[name]["registry"]
        value = settings.get(name)
        if isinstance(value, str) and value not in choices:
            raise SynthesizerError(f"from_pretrained: {name}={value!r}: choose from {', '.join(choices)}")


def model_classes() -> list[type[SynthesizerModel]]:
    """Returns the classes of the kinds of model that are imported."""
    return SynthesizerModel.__subclasses__()


def kind_of_weights(state_dict: dict[str, Tensor]) -> str | None:
    """Returns the `SynthesizerModel.kind` of the model whose weights these are, or None if it is unknown."""
    paths = [key.split(".") for key in state_dict]
    stacks = {path[0] for path in paths}
    is_encoder = any(path[1:2] == ["sentence_encoder"] for path in paths)
    if is_encoder:
        is_linformer = any(path[-2:] == ["self_attn", "E"] for path in paths)
        return "Linformer" if is_linformer else "encoder"
    if "decoder" not in stacks:
        return None
    return "translation model" if "encoder" in stacks else "language model"


def explain_task_of_several_models(match: re.Match[str], error: BaseException) -> str:
    """Names the tasks to take instead of one that builds its own model."""
    return advise_task(model_classes(), "has a model of its own", error)


def explain_task_of_other_flags(match: re.Match[str], error: BaseException) -> str | None:
    """Names the tasks to take instead of one that asks a Synthesizer's config for a flag that it does not have.

    Returns None if the error is about the config of another model.
    """
    models = [model for model in model_classes() if is_about_config(model.config, str(error))]
    if not models:
        return None
    return advise_task(models, f"does not fit {with_article(models[0].kind)}", error)


def advise_task(models: list[type[SynthesizerModel]], problem: str, error: BaseException) -> str:
    """Returns the line about a task that does not fit, with the tasks that fit some kinds of model."""
    task_names = " or ".join(model.task_names for model in models)
    return f"--task: this task {problem} ({first_line(error)}); take --task {task_names}, or another --arch"


def is_about_config(config: type, text: str) -> bool:
    """Returns whether omegaconf's message names a config's class, or a missing key that one of its defaults refers to.

    The second is for the omegaconf of fairseq 0.12.2, which does not name the class then.
    """
    missing = [II(key) for key in re.findall("nterpolation key '(.*)' not found", text)]
    defaults = [field.default for field in dataclasses.fields(config)]
    refers_to_missing = any(isinstance(default, str) and default in missing for default in defaults)
    return config.__name__ in text or refers_to_missing


MESSAGES += [
    Message(Exception, "requires a FairseqMultiModel", explain_task_of_several_models),
    *(Message(error, "", explain_task_of_other_flags) for error in CONFIG_ERRORS),
]


def with_article(noun: str) -> str:
    """Returns the noun with its indefinite article."""
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun}"

"""The base class of all models with synthesized attention: their flags, checks, and the loading of checkpoints."""

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

# what a message of `from_pretrained` advises if the path of the dictionaries is a file
ADVICE_ABOUT_DATA = "give the folder of the dictionaries"


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
        """Adds the flags of the model to the parser of a command, except those that are hidden (`hidden`).

        The parser gets no defaults, because the architecture sets every flag that is not given.
        """
        shown_config = without_fields(cls.config, cls.hidden)
        gen_parser_from_dataclass(parser, shown_config(), delete_default=True)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | os.PathLike[str],
        checkpoint_file: str | os.PathLike[str] | Sequence[str] = "model.pt",
        data_name_or_path: str | os.PathLike[str] = ".",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns a trained model, loaded as fairseq's own method does, but without the need for ``user_dir``.

        Args:
            model_name_or_path: the folder of the checkpoint, or an archive of such a folder.
            checkpoint_file: the name of the checkpoint in that folder. Several names, in a list or joined by ":", make
                an ensemble.
            data_name_or_path: the folder of the dictionaries; within the model's folder if it starts with ".".
            args: further arguments of fairseq's method.
            kwargs: settings to use in place of those in the checkpoint, such as ``bpe="subword_nmt"``. They may also be
                given together, in a dict ``model_overrides``.

        Raises:
            SynthesizerError: a file does not exist, or checkpoint, data and settings do not fit together.
        """
        model = os.fspath(model_name_or_path)
        data = os.fspath(data_name_or_path)
        if isinstance(checkpoint_file, (str, os.PathLike)):
            checkpoints = os.fspath(checkpoint_file)
        else:
            checkpoints = os.pathsep.join(checkpoint_file)
        overrides = read_overrides(kwargs.pop("model_overrides", {}))
        kwargs = {**overrides, **kwargs}
        check_model(model, checkpoints)
        data = find_data(model, data)
        check_choices(kwargs)
        # This registers the models. fairseq does so only if the package has not been imported before.
        folder = os.path.dirname(os.path.abspath(__file__))
        import_models(os.path.join(folder, "models"), f"{__package__}.models")
        kwargs.setdefault("user_dir", folder)
        try:
            return super().from_pretrained(model, checkpoints, data, *args, **kwargs)  # type: ignore[misc]
        except SynthesizerError:
            raise
        except Exception as error:
            line = explain_loading(error)
            if line is None:
                raise
            raise SynthesizerError(f"from_pretrained: {line}") from error

    @classmethod
    def read_config(cls, cfg: Any, task: Any) -> argparse.Namespace:
        """Returns the settings of a model as a namespace with plain values, after checking the task.

        Args:
            cfg: the flat config, as a DictConfig, a dataclass or a Namespace.
            task: fairseq's task.

        Raises:
            SynthesizerError: the task needs another kind of model.
        """
        needed = cls.needed_kind(task)
        if needed != cls.kind:
            raise SynthesizerError(
                f"--task: this task needs {with_article(needed)}, but the model of --arch or of the checkpoint is "
                f"{with_article(cls.kind)}; use --task {cls.task_names}, or another model"
            )
        return to_namespace(cfg, cls.config)

    @classmethod
    def needed_kind(cls, task: Any) -> str:
        """Returns the kind of model that a task needs, such as "language model".

        A task that no kind of model lists in its `tasks`, such as a user's own task, is assumed to need this class's
        kind.
        """
        # This task is checked first. Its class is derived from TranslationTask, so that it would look like a task of
        # translation models below, but no Synthesizer is a model for it.
        if isinstance(task, TranslationLevenshteinTask):
            return "non-autoregressive model"
        # This class goes before all others, because two kinds of model may have the same tasks: encoders and Linformer.
        if isinstance(task, cls.tasks):
            return cls.kind
        for model in model_classes():
            if isinstance(task, model.tasks):
                return model.kind
        return cls.kind  # No kind of model lists the task.

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Loads the weights of a checkpoint, as fairseq's own method does.

        Args:
            state_dict: the weights.
            args, kwargs: further arguments of fairseq's method.

        Raises:
            SynthesizerError: the weights are of another kind of model, of other sizes or for another dictionary; or
                some layers lack the weights of their functions.
        """
        kind = kind_of_weights(state_dict)
        if kind is not None and kind != self.kind:
            raise SynthesizerError(
                f"the checkpoint contains {with_article(kind)}, but this model is {with_article(self.kind)}; use a "
                f"checkpoint of {with_article(self.kind)}, or the --arch of the checkpoint"
            )
        self.set_loads_stock_checkpoint(state_dict)  # Each layer reads this when it loads its weights below.
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            is_about_misfit = str(error).startswith("Error(s) in loading state_dict")  # torch's message begins so.
            if not is_about_misfit:
                raise
            raise SynthesizerError(explain_misfit(str(error))) from error

    def set_loads_stock_checkpoint(self, state_dict: dict[str, Tensor]) -> None:
        """Sets ``loads_stock_checkpoint`` in all layers: whether their next checkpoint is a stock Transformer's.

        A layer that finds no weights of its synthesizing functions, such as ``random``, has to know why:

        * The checkpoint is of a stock Transformer, that is, fairseq's own, which has no such functions. The layer may
          start from it.
        * The checkpoint is of a Synthesizer, in which other layers have such functions. This layer's functions are
          missing, which is an error.

        The layer sees only its own weights, which are the same in both cases. So this method tells it.

        Args:
            state_dict: the weights of the whole checkpoint.
        """
        # Synthesizing functions have keys such as "encoder.layers.0.self_attn.synthesizer.components.random.R".
        is_stock_checkpoint = not any(".synthesizer." in key for key in state_dict)
        for module in self.modules():  # type: ignore[attr-defined] # the method of `nn.Module`, of the other base class
            if isinstance(module, SyntheticAttention):
                module.loads_stock_checkpoint = is_stock_checkpoint

    def __prepare_scriptable__(self) -> Any:
        """Raises SynthesizerError, because these models cannot be compiled to TorchScript.

        `torch.jit.script` calls this.
        """
        raise SynthesizerError(
            f"{type(self).__name__}: TorchScript is not supported; use the model in Python, or compile it with "
            "torch.compile"
        )


def without_fields(config: type[FairseqDataclass], names: Sequence[str]) -> Any:
    """Returns a new dataclass that has the fields of `config` except those with the given names.

    Args:
        config: a dataclass. Each of its fields has a name, a type, a plain default and metadata, and nothing else.
        names: the names of the fields to leave out.
    """
    kept_fields = []  # as `make_dataclass` takes them: (name, type, field object)
    for config_field in dataclasses.fields(config):
        if config_field.name not in names:
            # A field object belongs to one dataclass, so the new one gets a copy.
            copied_field = dataclasses.field(default=config_field.default, metadata=config_field.metadata)
            kept_fields.append((config_field.name, config_field.type, copied_field))
    return dataclasses.make_dataclass("Flags", kept_fields, bases=(FairseqDataclass,))


def read_overrides(overrides: str | dict[str, Any]) -> dict[str, Any]:
    """Returns the dict in the argument ``model_overrides``, which may also be the text of a dict.

    Raises SynthesizerError if it is neither.
    """
    if isinstance(overrides, dict):
        return overrides
    try:
        settings = ast.literal_eval(overrides)
    except (ValueError, SyntaxError):
        settings = None
    if not isinstance(settings, dict):
        raise SynthesizerError(f"from_pretrained: model_overrides={overrides!r}: must be a dict")
    return settings


def explain_loading(error: Exception) -> str | None:
    """Returns one line about an error of fairseq's ``from_pretrained``, or None if the error needs its traceback."""
    if isinstance(error, omegaconf.errors.MissingMandatoryValue):
        key = re.search(r"(?:mandatory value|full_key): (\S+)", str(error))
        if key is not None:
            return f"{key[1]} is missing; give {key[1]}=..."
    line = explain(error)
    if line is None and isinstance(error, OSError):
        line = first_line(error)
    return line


def check_model(model: str, checkpoints: str) -> None:
    """Checks that a model and its checkpoints exist before it is loaded.

    The checkpoints are checked only in a folder. An archive has yet to be unpacked, and a URL to be downloaded, so that
    fairseq itself complains if they lack a checkpoint.

    Args:
        model: the folder of the model, an archive of the folder, or a URL.
        checkpoints: the names of the checkpoints in the folder, joined by `os.pathsep`, which is ":" on Linux.

    Raises:
        SynthesizerError: there is no such folder or archive, or the folder lacks a checkpoint.
    """
    is_url = "://" in model
    if is_url:
        return
    # A file that is no archive is probably a checkpoint, whose folder the user should have given.
    advice_about_checkpoint = f"give its folder, and checkpoint_file={os.path.basename(model)!r}"
    check_folder_or_archive(model, advice_about_file=advice_about_checkpoint)
    is_archive = not os.path.isdir(model)
    if is_archive:
        return
    for name in checkpoints.split(os.pathsep):
        path = os.path.join(model, name)
        if not os.path.exists(path):
            raise SynthesizerError(f"from_pretrained: {path}: no such checkpoint; set checkpoint_file=...")


def find_data(model: str, data: str) -> str:
    """Returns the path to give to fairseq for the folder of the dictionaries.

    A URL is returned as it is, and so is a path, unless it starts with "." (`find_dotted_path`).

    Args:
        model: the folder of the model, an archive of the folder, or a URL.
        data: the folder of the dictionaries as the user has given it, or a URL.

    Raises:
        SynthesizerError: there is no such folder.
    """
    is_url = "://" in data
    if is_url:
        return data
    if data.startswith("."):
        return find_dotted_path(model, data)
    check_folder_or_archive(data, ADVICE_ABOUT_DATA)
    return data


def find_dotted_path(model: str, data: str) -> str:
    """Returns the path to give to fairseq for a folder of dictionaries whose path starts with ".".

    fairseq looks for such a path in the model's folder, and only there. But a user may mean the current folder. So the
    result is:

    * the path as it is, if it exists in the model's folder, or if this folder is in an archive or behind a URL.
    * the absolute path, if it exists in the current folder alone.

    Args:
        model: the folder of the model, an archive of the folder, or a URL.
        data: the path, such as "." or "./data".

    Raises:
        SynthesizerError: there is no such folder.
    """
    model_is_folder = os.path.isdir(model)
    if not model_is_folder:
        return data  # The model is in an archive or behind a URL, so only fairseq can look into it.
    path_in_model = os.path.join(model, data)
    if os.path.exists(path_in_model):
        check_folder_or_archive(path_in_model, ADVICE_ABOUT_DATA)
        return data
    if os.path.exists(data):
        return os.path.abspath(data)
    raise SynthesizerError(f"from_pretrained: {path_in_model}: no such folder")


def check_folder_or_archive(path: str, advice_about_file: str) -> None:
    """Checks that a path is a folder or an archive.

    Args:
        path: the path.
        advice_about_file: what the message advises if the path is a file of another kind.

    Raises:
        SynthesizerError: the path does not exist, or is a file of another kind.
    """
    if not os.path.exists(path):
        raise SynthesizerError(f"from_pretrained: {path}: no such folder")
    if not os.path.isdir(path) and not tarfile.is_tarfile(path):
        raise SynthesizerError(f"from_pretrained: {path}: is not a folder; {advice_about_file}")


def check_choices(settings: dict[str, Any]) -> None:
    """Checks that fairseq knows the settings ``tokenizer`` and ``bpe``; raises SynthesizerError otherwise."""
    for name in ("tokenizer", "bpe"):
        choices = REGISTRIES[name]["registry"]
        value = settings.get(name)
        if isinstance(value, str) and value not in choices:
            raise SynthesizerError(f"from_pretrained: {name}={value!r}: choose from {', '.join(choices)}")


def model_classes() -> list[type[SynthesizerModel]]:
    """Returns the classes of the kinds of model that are imported."""
    return SynthesizerModel.__subclasses__()


def kind_of_weights(state_dict: dict[str, Tensor]) -> str | None:
    """Returns the kind of the model that has these weights (`SynthesizerModel.kind`), or None if it is unknown."""
    stacks = {key.split(".")[0] for key in state_dict}
    # An encoder has keys such as "encoder.sentence_encoder.layers.0.self_attn.E".
    if any(re.match(r"\w+\.sentence_encoder\.", key) for key in state_dict):
        is_linformer = any(key.endswith(".self_attn.E") for key in state_dict)
        return "Linformer" if is_linformer else "encoder"
    if "decoder" not in stacks:
        return None
    return "translation model" if "encoder" in stacks else "language model"


def explain_task_of_several_models(_: re.Match[str], error: BaseException) -> str:
    """Returns the error line about a task that needs a model of its own, with the tasks that fit a Synthesizer.

    Args:
        error: fairseq's error.
    """
    return advise_task(model_classes(), "has a model of its own", error)


def explain_unfit_task(_: re.Match[str], error: BaseException) -> str | None:
    """Returns the error line about a task that does not fit a Synthesizer.

    Either the task reads a flag that the model lacks, or the model reads a flag that the task lacks. Both cases are the
    same here: omegaconf raises an error, whose message tells which model it is about (`is_about_config`).

    Args:
        _: the match of the pattern in `MESSAGES`, which is not needed here.
        error: omegaconf's error about the missing flag.

    Returns:
        the line, with the tasks that fit the model; or None if the error is about the config of another model.
    """
    for model in model_classes():
        if is_about_config(model.config, str(error)):
            return advise_task([model], f"does not fit {with_article(model.kind)}", error)
    return None


def advise_task(models: list[type[SynthesizerModel]], problem: str, error: BaseException) -> str:
    """Returns the error line about a task that does not fit, with the tasks to take in its place.

    Args:
        models: the kinds of model whose tasks are named.
        problem: what is wrong with the task, as the rest of a sentence that begins with "this task".
        error: the error of fairseq or omegaconf.
    """
    task_names = " or ".join(model.task_names for model in models)
    return f"--task: this task {problem} ({first_line(error)}); take --task {task_names}, or another --arch"


def is_about_config(config: type, text: str) -> bool:
    """Returns whether a message of omegaconf about a missing key concerns a model's config.

    Newer versions of omegaconf name the class of the config in the message. The version that fairseq 0.12.2 needs names
    only the missing key, as in "Interpolation key 'task.tokens_per_sample' not found". This concerns a config that has
    a flag with the default "${task.tokens_per_sample}", which is a reference to the key.

    Args:
        config: the dataclass of the model's flags.
        text: the message.
    """
    if config.__name__ in text:
        return True
    missing_keys = re.findall("[Ii]nterpolation key '(.*)' not found", text)
    references = ["${" + key + "}" for key in missing_keys]
    defaults = [flag.default for flag in dataclasses.fields(config)]
    return any(reference in defaults for reference in references)


MESSAGES += [
    Message(Exception, "requires a FairseqMultiModel", explain_task_of_several_models),
    *(Message(error, "", explain_unfit_task) for error in CONFIG_ERRORS),
]


def with_article(noun: str) -> str:
    """Returns the noun with its indefinite article."""
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun}"

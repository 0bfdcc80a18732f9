"""Repairs of ``--lm-path``: translation with the help of a language model (shallow fusion)."""

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from fairseq.utils import split_paths

from ...errors import SynthesizerError, explain, has_fairseq_command
from ..repairs import repair


class KeptDictionary:
    """Keeps a dictionary from the call that loads a translation model to the call that loads its language model."""

    target_dictionary: Dictionary | None = None  # the target dictionary of the translation model that was loaded last


@repair(
    "load_model_ensemble",
    fairseq.checkpoint_utils,
    symptom="`fairseq-generate --lm-path` searches the translation data for the language model's dict.txt",
    versions="all versions",
)
def load_language_model_with_target_words(
    original: Callable[..., Any],
    filenames: list[str],
    arg_overrides: dict[str, Any] | None = None,
    task: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_model_ensemble`` (``original``): loads the model of ``--lm-path``.

    With ``--lm-path``, fairseq-generate calls this function twice: first with a task, for the translation model, and
    then without a task, for the language model. In the second call, fairseq looks for the file dict.txt of the language
    model in the folder of the translation data, and does not find it. But the file is not needed, because both models
    must have the same target dictionary. The replacement keeps this dictionary in the first call, and uses it in the
    second.

    Args:
        original: fairseq's function.
        filenames: the checkpoints.
        arg_overrides: settings that replace those in the checkpoints.
        task: the translation task, or None.
        args, kwargs: the other arguments of fairseq's function.
    """
    if task is not None:  # the first call
        KeptDictionary.target_dictionary = get_target_dictionary(task)
        return original(filenames, arg_overrides, task, *args, **kwargs)
    dictionary = KeptDictionary.target_dictionary
    # A command of fairseq calls this function without a task only for the language model.
    is_second_call = dictionary is not None and is_called_by_fairseq_command()
    if not is_second_call:  # A user's program loads some model.
        return original(filenames, arg_overrides, task, *args, **kwargs)
    (path,) = filenames
    return load_language_model(path, dictionary=dictionary, overrides=arg_overrides or {})


def is_called_by_fairseq_command() -> bool:
    """Returns whether one of fairseq's commands, and not a user's program, is among the callers of this function."""
    return has_fairseq_command(traceback.walk_stack(None))


@repair(
    "build_generator",
    FairseqTask,
    symptom="`fairseq-interactive` ignores `--lm-path` and `--lm-weight`",
    versions="all versions",
)
def fuse_in_interactive(
    original: Callable[..., Any],
    self: FairseqTask,
    models: Any,
    args: Any,
    seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Replaces ``FairseqTask.build_generator`` (``original``): uses ``--lm-path`` in ``fairseq-interactive`` too.

    The commands that translate call this method to build the beam search. With ``--lm-path``, the search should add the
    scores of a language model. fairseq-generate loads this model, and passes it in `extra_gen_cls_kwargs`.
    fairseq-interactive does not load it, so the replacement does.

    Args:
        original: fairseq's method.
        self: the translation task.
        models: the translation models.
        args: the flags of the search.
        seq_gen_cls: the class of the search.
        extra_gen_cls_kwargs: further arguments for this class, such as the language model ("lm_model") and its weight
            ("lm_weight"); None if the command passes nothing.
        kwargs: the other arguments of fairseq's method.
    """
    lm_path = getattr(args, "lm_path", None)
    has_loaded_nothing = extra_gen_cls_kwargs is None
    if lm_path is not None and has_loaded_nothing:
        language_model = load_prepared_language_model(
            lm_path, dictionary=self.target_dictionary, translation_model=models[0], search_flags=args
        )
        extra_gen_cls_kwargs = {"lm_model": language_model, "lm_weight": args.lm_weight}
    return original(self, models, args, seq_gen_cls=seq_gen_cls, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **kwargs)


def load_prepared_language_model(path: str, dictionary: Dictionary, translation_model: Any, search_flags: Any) -> Any:
    """Returns a language model that is ready to be used in a search together with a translation model.

    Args:
        path: the checkpoint of the language model.
        dictionary: the target dictionary of the translation model.
        translation_model: the language model gets the same device and floating-point type.
        search_flags: the flags of the search.
    """
    language_models, _config = load_language_model(path, dictionary=dictionary, overrides={})
    (language_model,) = language_models
    any_weight = next(translation_model.parameters())
    language_model.to(device=any_weight.device, dtype=any_weight.dtype)
    # The next method reads only two parts of fairseq's config: the flags of the search and those of the task.
    config = SimpleNamespace(generation=search_flags, task=None)
    language_model.prepare_for_inference_(config)
    return language_model


def get_target_dictionary(task: Any) -> Dictionary | None:
    """Returns the dictionary of the words that a task's models write, or None if they write no words."""
    try:
        return task.target_dictionary
    except NotImplementedError:
        return None


def load_language_model(path: str, dictionary: Dictionary, overrides: dict[str, Any]) -> Any:
    """Loads the language model of ``--lm-path`` with the dictionary of a translation model.

    Args:
        path: the checkpoint of the language model.
        dictionary: the target dictionary of the translation model.
        overrides: settings that replace those in the checkpoint. The data folder is not replaced.

    Returns:
        What fairseq's ``load_model_ensemble`` returns: a list with the model, and its configuration.

    Raises:
        SynthesizerError: the file does not exist, is no language model, or has another dictionary.
    """
    if not PathManager.exists(path):
        raise SynthesizerError(f"--lm-path {path}: no such file; use the checkpoint of a language model")
    # fairseq-generate overrides "data" by the folder of the translation data. The dictionary is to be compared with
    # that in the folder of the language model, so this folder must not be replaced.
    overrides_without_data = {name: value for name, value in overrides.items() if name != "data"}
    with errors_name_lm_path(path):
        checkpoint = fairseq.checkpoint_utils.load_checkpoint_to_cpu(path, overrides_without_data)
        check_dictionary(path, data_folder=get_data_folder(checkpoint), dictionary=dictionary)
        return build_language_model(path, checkpoint=checkpoint, dictionary=dictionary)


def build_language_model(path: str, checkpoint: dict[str, Any], dictionary: Dictionary) -> Any:
    """Builds the language model of a loaded checkpoint with the dictionary of a translation model.

    fairseq reads the dictionary of a language model from the file dict.txt in its data folder. So the dictionary is
    written to a temporary folder, which takes the place of the data folder.

    Args:
        path: the file of the checkpoint, which is not read again.
        checkpoint: what was loaded from the file; its data folder is changed in place.
        dictionary: the target dictionary of the translation model.

    Returns:
        What fairseq's ``load_model_ensemble`` returns: a list with the model, and its configuration.
    """
    with tempfile.TemporaryDirectory() as folder:
        dictionary.save(os.path.join(folder, "dict.txt"))
        set_data_folder(checkpoint, folder)
        # fairseq builds the task in this call, and so reads dict.txt. It does not read `path`, as it gets the contents.
        models, config, _task = fairseq.checkpoint_utils.load_model_ensemble_and_task([path], state=checkpoint)
    return models, config


@contextlib.contextmanager
def errors_name_lm_path(path: str) -> Iterator[None]:
    """Adds the flag ``--lm-path`` to an error that is raised in the body of the with statement.

    Only an error that `explain` knows is changed, because the user sees its line instead of a traceback. It becomes a
    SynthesizerError. An error whose line has the flag already is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        line = explain(error)
        if line is None or "--lm-path" in line:
            raise
        raise SynthesizerError(f"--lm-path {path}: {line}") from error


def get_data_folder(checkpoint: dict[str, Any]) -> str:
    """Returns the data folder with which the model of a checkpoint was trained, or "" if it is not recorded."""
    if checkpoint.get("args") is not None:  # older versions of fairseq have written such checkpoints
        return getattr(checkpoint["args"], "data", "")
    return checkpoint["cfg"].task.get("data", "")


def set_data_folder(checkpoint: dict[str, Any], folder: str) -> None:
    """Replaces the data folder in the settings of a checkpoint, which is changed in place."""
    if checkpoint.get("args") is not None:  # older versions of fairseq have written such checkpoints
        checkpoint["args"].data = folder
    else:
        overwrite_args_by_name(checkpoint["cfg"], {"data": folder})


def check_dictionary(path: str, data_folder: str, dictionary: Dictionary) -> None:
    """Checks that a language model has the same words, in the same order, as the targets of a translation model.

    Otherwise the language model would take the number of one word for that of another, and score nonsense.

    Args:
        path: the checkpoint of the language model.
        data_folder: the data folder with which it was trained, or "". If the folder does not exist any more, nothing
            can be checked.
        dictionary: the target dictionary of the translation model.

    Raises:
        SynthesizerError: the words are not the same.
    """
    if not data_folder:
        return
    first_folder = split_paths(data_folder)[0]  # the training may have had several folders, joined by colons
    dictionary_file = os.path.join(first_folder, "dict.txt")
    if not os.path.isfile(dictionary_file):
        return
    if Dictionary.load(dictionary_file).symbols != dictionary.symbols:
        raise SynthesizerError(
            f"--lm-path {path}: {dictionary_file} has other words, or another order, than the target dictionary of the "
            "translation model; train the language model on data that are preprocessed with it (--srcdict)"
        )

"""Repairs of ``--lm-path``: translation with the help of a language model (shallow fusion)."""

import os
import tempfile
import traceback
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


class Translation:
    """Remembers the target dictionary of the translation models that this process has loaded last.

    fairseq-generate loads the language model by a call that has no translation task, and so no target dictionary.
    """

    target_dictionary: Dictionary | None = None


@repair(
    "load_model_ensemble",
    fairseq.checkpoint_utils,
    symptom="`fairseq-generate --lm-path` looks for the language model's dict.txt in the translation data",
    versions="all versions",
)
def load_language_model_with_target_words(
    original_load_model_ensemble: Any,
    filenames: list[str],
    arg_overrides: dict[str, Any] | None = None,
    task: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces ``load_model_ensemble``: the language model of ``--lm-path`` gets the translation's target dictionary.

    The original looks for a dict.txt in the translation data, where fairseq-preprocess writes none. The language model
    has to share the target dictionary anyway. If the data of the language model are still where it was trained, the two
    dictionaries are compared: with other words, or another order, it would score nonsense.
    """
    if task is not None:
        Translation.target_dictionary = get_target_dictionary(task)
        return original_load_model_ensemble(filenames, arg_overrides, task, *args, **kwargs)
    dictionary = Translation.target_dictionary
    # Of fairseq's commands only fairseq-generate calls this without a task; programs may do so for any model.
    is_program = not has_fairseq_command(traceback.walk_stack(None))
    if is_program or dictionary is None:
        return original_load_model_ensemble(filenames, arg_overrides, task, *args, **kwargs)
    return load_language_model(original_load_model_ensemble, filenames[0], dictionary, arg_overrides or {})


@repair(
    "build_generator",
    FairseqTask,
    symptom="`fairseq-interactive` ignores `--lm-path` and `--lm-weight`",
    versions="all versions",
)
def fuse_in_interactive(
    original_build_generator: Any,
    self: FairseqTask,
    models: Any,
    args: Any,
    seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Replaces ``build_generator`` with one that loads the model of ``--lm-path`` in ``fairseq-interactive``."""
    lm_path = getattr(args, "lm_path", None)
    # fairseq-generate loads the language model itself, and passes it in these arguments
    if lm_path is not None and extra_gen_cls_kwargs is None:
        repaired = fairseq.checkpoint_utils.load_model_ensemble
        original = getattr(repaired, "__wrapped__", repaired)
        (language_model,), _ = load_language_model(original, lm_path, self.target_dictionary, {})
        weight = next(models[0].parameters())
        language_model.to(device=weight.device, dtype=weight.dtype)
        language_model.prepare_for_inference_(SimpleNamespace(generation=args, task=None))
        extra_gen_cls_kwargs = {"lm_model": language_model, "lm_weight": args.lm_weight}
    return original_build_generator(
        self, models, args, seq_gen_cls=seq_gen_cls, extra_gen_cls_kwargs=extra_gen_cls_kwargs, **kwargs
    )


def get_target_dictionary(task: Any) -> Dictionary | None:
    """Returns the dictionary of what a task's models write, or None if they write no words."""
    try:
        return task.target_dictionary
    except NotImplementedError:
        return None


def load_language_model(load_model_ensemble: Any, path: str, dictionary: Dictionary, overrides: dict[str, Any]) -> Any:
    """Loads the language model of ``--lm-path`` with a given dictionary.

    Args:
        load_model_ensemble: fairseq's function.
        path: the checkpoint.
        dictionary: the words of the translation model's output.
        overrides: settings to use in place of those in the checkpoint.

    Returns:
        What fairseq's function returns: a list with the model, and its config.

    Raises:
        SynthesizerError: the file is not there, holds no language model, or has another dictionary.
    """
    if not PathManager.exists(path):
        raise SynthesizerError(f"--lm-path {path}: no such file; give the checkpoint of a language model")
    settings = {name: value for name, value in overrides.items() if name != "data"}
    try:
        state = fairseq.checkpoint_utils.load_checkpoint_to_cpu(path, settings)
        check_dictionary(path, recorded_data(state), dictionary)
        with tempfile.TemporaryDirectory() as folder:
            dictionary.save(os.path.join(folder, "dict.txt"))
            set_data(state, folder)
            return load_model_ensemble([path], {**settings, "data": folder}, None, state=state)
    except Exception as error:
        line = explain(error)
        if line is None or "--lm-path" in line:
            raise
        raise SynthesizerError(f"--lm-path {path}: {line}") from error


def recorded_data(state: dict[str, Any]) -> str:
    """Returns the folder of data that a checkpoint was trained on, or ""."""
    if state.get("args") is not None:
        return getattr(state["args"], "data", "")
    return state["cfg"].task.get("data", "")


def set_data(state: dict[str, Any], folder: str) -> None:
    """Sets the folder of data in the settings of a checkpoint, in place."""
    if state.get("args") is not None:
        state["args"].data = folder
    else:
        overwrite_args_by_name(state["cfg"], {"data": folder})


def check_dictionary(path: str, data: str, dictionary: Dictionary) -> None:
    """Checks that a language model and a translation model have the same words in the same order.

    Args:
        path: the checkpoint of the language model.
        data: the data that it was trained on; if they are not there any more, nothing can be checked.
        dictionary: the words of the translation model.

    Raises:
        SynthesizerError: they have not.
    """
    if not data:
        return
    file = os.path.join(split_paths(data)[0], "dict.txt")
    if os.path.isfile(file) and Dictionary.load(file).symbols != dictionary.symbols:
        raise SynthesizerError(
            f"--lm-path {path}: {file} has other words, or another order, than the target dictionary of the "
            "translation; train the language model on data made with that (--srcdict of fairseq-preprocess)"
        )

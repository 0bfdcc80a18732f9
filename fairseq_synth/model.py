"""What the kinds of model share: their flags on the command line, and what is checked as a model is built."""

import argparse
import dataclasses
import os
import re
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import import_models
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from omegaconf import II
from torch import Tensor

from .config import to_namespace
from .errors import SynthesizerError, explanations, first_line
from .host.messages import misfit


class SynthesizerModel:
    """The first base of each kind of model; the second is fairseq's class of that kind.

    ``build_model(cfg, task)`` takes the flat config, as Hydra's DictConfig, a dataclass or a Namespace, and fairseq's
    task, for its dictionaries and, for encoders without ``--max-positions``, its longest row. It raises a
    SynthesizerError that names the flag if one is invalid or cannot apply.
    """

    kind: str  # a noun for messages
    stacks: tuple[str, ...]  # which of them have synthesizers
    tasks: tuple[type, ...]  # fairseq's tasks that need this kind
    task_names: str
    config: type[FairseqDataclass]  # of every flag. Not Any, which TorchScript takes for Final before Python 3.11
    hidden: tuple[str, ...] = ()  # flags that are not on the command line

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags, without defaults: those are the architecture's."""
        shown = [(f.name, f.type, f) for f in dataclasses.fields(cls.config) if f.name not in (*cls.hidden, "_name")]
        flags: Any = dataclasses.make_dataclass("Flags", shown, bases=(FairseqDataclass,))
        gen_parser_from_dataclass(parser, flags(), delete_default=True)

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """As fairseq's own; ``user_dir`` may be left out. Raises SynthesizerError if a folder is not there."""
        own = os.path.dirname(os.path.abspath(__file__))
        # registers the plugin: fairseq does so for a --user-dir, but not for one that is imported already
        import_models(os.path.join(own, "models"), f"{__package__}.models")
        kwargs.setdefault("user_dir", own)
        beside = data_name_or_path.startswith(".")  # for fairseq that is within the model's folder
        data = os.path.join(model_name_or_path, data_name_or_path) if beside else data_name_or_path
        for folder in (model_name_or_path, data):
            if "://" not in folder and not os.path.exists(folder):
                raise SynthesizerError(f"from_pretrained: {folder}: no such folder")
        return super().from_pretrained(  # type: ignore[misc]
            model_name_or_path, checkpoint_file, data_name_or_path, **kwargs
        )

    @classmethod
    def read_config(cls, cfg: Any, task: Any) -> argparse.Namespace:
        """The flat config, as `to_namespace` returns it; SynthesizerError if the task needs another kind of model."""
        needed = next((model.kind for model in kinds() if isinstance(task, model.tasks)), cls.kind)
        is_own = isinstance(task, cls.tasks)
        if isinstance(task, TranslationLevenshteinTask):  # a translation task too; no Synthesizer is of its kind
            needed, is_own = "non-autoregressive model", False
        if needed != cls.kind and not is_own:  # a task that no kind names is left to find out itself
            raise SynthesizerError(
                f"--task: this task needs {article(needed)}, and the model, of --arch or of the checkpoint, is "
                f"{article(cls.kind)}; take --task {cls.task_names}, or another model"
            )
        return to_namespace(cfg, cls.config)

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As fairseq's own. Raises SynthesizerError for weights of another kind, other sizes or another dictionary."""
        kind = kind_of(state_dict)
        if kind not in (None, self.kind):
            raise SynthesizerError(
                f"the checkpoint is of {article(str(kind))}, this model is {article(self.kind)}; give a checkpoint of "
                f"{article(self.kind)}, or the --arch of the checkpoint"
            )
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            line = misfit(error)
            if line is None:
                raise
            raise SynthesizerError(line) from error


def kinds() -> list[type[SynthesizerModel]]:
    """The kinds of model that are imported."""
    return SynthesizerModel.__subclasses__()


def kind_of(state_dict: dict[str, Tensor]) -> str | None:
    """The `SynthesizerModel.kind` whose weights these are; None if unknown."""
    parts = {key.split(".")[0] for key in state_dict}
    if any(key.split(".")[1:2] == ["sentence_encoder"] for key in state_dict):
        return "Linformer" if any(key.endswith(".self_attn.E") for key in state_dict) else "encoder"
    if "decoder" not in parts:
        return None
    return "translation model" if "encoder" in parts else "language model"


def explain_task(error: BaseException) -> str | None:
    """The one line for an error of a task that needs a model of another kind than the Synthesizers, else None."""
    text = str(error)
    is_of_config = type(error).__name__ in ("ConfigAttributeError", "ConfigKeyError", "InterpolationKeyError")
    is_of_several = "requires a FairseqMultiModel" in text
    models = [m for m in kinds() if is_of_several or (is_of_config and is_about(m.config, text))]
    if not models:
        return None
    told = f"does not fit {article(models[0].kind)}" if is_of_config else "has a model of its own"
    names = " or ".join(m.task_names for m in models)
    return f"--task: this task {told} ({first_line(error)}); take --task {names}, or another --arch"


explanations.append(explain_task)


def is_about(config: type, text: str) -> bool:
    """Whether omegaconf's message names a config's class, or a missing key that one of its defaults refers to."""
    lacking = re.findall("nterpolation key '(.*)' not found", text)  # fairseq 0.12.2's omegaconf names no class then
    return config.__name__ in text or any(f.default in map(II, lacking) for f in dataclasses.fields(config))


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"

"""What the kinds of model share: their flags on the command line, and what is checked as a model is built."""

import argparse
import logging
from typing import Any, Dict, Optional, Tuple, Type

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks.denoising import DenoisingTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from torch import Tensor

from . import register
from .config import to_namespace
from .errors import SynthesizerError, built_lengths
from .lengths import check_min_len, check_padding

logger = logging.getLogger(__name__)
Tasks = Tuple[Tuple[type, ...], str]

# the tasks that are known to need one kind of model, and their names; any other task is left to find out itself
ENCODER_TASKS: Tasks = ((MaskedLMTask, SentencePredictionTask), "masked_lm or sentence_prediction")
TASKS: Dict[str, Tasks] = {
    # before that of translation, which it is built on; no Synthesizer is of this kind
    "non-autoregressive model": ((TranslationLevenshteinTask,), "translation_lev"),
    "translation model": ((TranslationTask, DenoisingTask), "translation or denoising"),
    "language model": ((LanguageModelingTask,), "language_modeling"),
    "encoder": ENCODER_TASKS,
    "Linformer": ENCODER_TASKS,
}


class SynthesizerModel:
    """The first base of each kind of model; the second is fairseq's class of that kind."""

    kind: str  # a key of TASKS
    config: Type[FairseqDataclass]  # every flag of the model
    flags: Optional[Type[FairseqDataclass]] = None  # those on the command line, where they are fewer

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags, without defaults: those are the architecture's."""
        gen_parser_from_dataclass(parser, (cls.flags or cls.config)(), delete_default=True)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As fairseq's own; ``user_dir`` may be left out."""
        register()
        return super().from_pretrained(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def read_config(cls, cfg: Any, task: Any) -> argparse.Namespace:
        """The flat config, as `to_namespace` returns it, of a model that fits the task.

        Raises:
            SynthesizerError: the task needs another kind of model.
        """
        needed = next((kind for kind, (tasks, _) in TASKS.items() if isinstance(task, tasks)), cls.kind)
        if TASKS[needed] != TASKS[cls.kind]:
            raise SynthesizerError(
                f"--task: this task needs {article(needed)}, and the model, of --arch or of the checkpoint, is "
                f"{article(cls.kind)}; take --task {TASKS[cls.kind][1]}, or another model"
            )
        return to_namespace(cfg, cls.config)

    @staticmethod
    def limit_lengths(task: Any, length: Optional[int]) -> None:
        """Makes ``--synth-max-length`` known, and refuses flags of the task that go beyond it.

        Args:
            task: fairseq's.
            length: the limit in tokens, if the model has one.

        Raises:
            SynthesizerError: ``--required-seq-len-multiple`` pads beyond it.
        """
        if length is not None:
            check_padding(task, length)
            built_lengths.add(length)
            logger.info(f"--synth-max-length {length}: longer sentences are skipped in training, refused elsewhere")

    def check_output_length(self, cfg: Any) -> None:
        """Raises SynthesizerError if ``--min-len`` is more than the decoder can write."""
        decoder: Any = self.decoder  # type: ignore[attr-defined]
        check_min_len(getattr(cfg, "generation", None), decoder.max_positions(), decoder.max_length)

    def load_state_dict(self, state_dict: Dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As fairseq's own.

        Raises:
            SynthesizerError: the weights are of another kind of model.
        """
        kind = kind_of(state_dict)
        if kind not in (None, self.kind):
            raise SynthesizerError(
                f"the checkpoint is of {article(str(kind))}, this model is {article(self.kind)}; give a checkpoint of "
                f"{article(self.kind)}, or the --arch of the checkpoint"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]


def kind_of(state_dict: Dict[str, Tensor]) -> Optional[str]:
    """The kind of model, a key of `TASKS`, whose weights these are; None if unknown."""
    parts = {key.split(".")[0] for key in state_dict}
    if any(key.split(".")[1:2] == ["sentence_encoder"] for key in state_dict):
        return "Linformer" if any(key.endswith(".self_attn.E") for key in state_dict) else "encoder"
    if "decoder" not in parts:
        return None
    return "translation model" if "encoder" in parts else "language model"


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"

"""Repairs of what ``from_pretrained`` returns: it can be copied, pickled and sent to other processes."""

import copyreg
from typing import Any

from fairseq.dataclass.constants import ChoiceEnum, StrEnumMeta
from fairseq.models import BaseFairseqModel
from fairseq.tasks.fairseq_task import StatefulContainer

from ..repairs import custom_repair, repair


@repair("__getattr__", StatefulContainer)
def copy_task_state(getattr_: Any, self: StatefulContainer, name: str) -> Any:
    """``copy.deepcopy`` and ``pickle`` of what ``from_pretrained`` returns end in a RecursionError (all versions).

    The state of a task looks for each attribute in its attribute ``_state``, which a copy does not have yet.
    """
    if "_state" not in vars(self) or "_factories" not in vars(self):
        raise AttributeError(name)
    return getattr_(self, name)


@repair("make_generation_fast_", BaseFairseqModel)
def pickle_models_for_generation(make_generation_fast_: Any, self: BaseFairseqModel, **kwargs: Any) -> None:
    """``pickle`` of a model that is prepared for generation ends in "Can't pickle local object" (all versions).

    fairseq replaces the method ``train`` of the model by a function that has no name outside of another one.
    """
    make_generation_fast_(self, **kwargs)
    if "train" in vars(self):
        self.train = refuse_training


def refuse_training(mode: bool = True) -> None:
    """Takes the place of ``train`` in a model that is prepared for generation."""
    if mode:
        raise RuntimeError("cannot train after make_generation_fast")


@custom_repair
def pickle_choices() -> bool:
    """``pickle`` of a config ends in "Can't pickle <enum 'Choices'>" (all versions).

    The type of a flag with choices is made by a function, so that pickle cannot find it by its name.
    """
    if StrEnumMeta in copyreg.dispatch_table:
        return False
    copyreg.pickle(StrEnumMeta, reduce_choices)  # type: ignore[arg-type]
    return True


def reduce_choices(choices: Any) -> Any:
    """Tells pickle how to make a type with choices again, or the name under which it can be found."""
    if choices.__name__ == "Choices":
        return ChoiceEnum, ([choice.value for choice in choices],)
    return choices.__qualname__

"""Repairs of what ``from_pretrained`` returns: it can be copied, pickled and sent to other processes."""

import copyreg
from collections.abc import Callable
from typing import Any

from fairseq.dataclass.constants import ChoiceEnum, StrEnumMeta
from fairseq.models import BaseFairseqModel
from fairseq.tasks.fairseq_task import StatefulContainer

from ..repairs import custom_repair, repair


@repair(
    "__getattr__",
    StatefulContainer,
    symptom="`copy.deepcopy` or `pickle` of a model from `from_pretrained` fails with a RecursionError",
    versions="all versions",
)
def copy_task_state(original: Callable[..., Any], self: StatefulContainer, name: str) -> Any:
    """Replaces ``StatefulContainer.__getattr__`` (``original``): a container can be copied and pickled.

    fairseq's method looks up every attribute in ``self._state``. While a container is copied or unpickled, the new
    object has no ``_state`` yet. Looking that up calls the method again, without an end. The replacement raises
    AttributeError, as for any object without attributes.
    """
    is_complete = "_state" in vars(self) and "_factories" in vars(self)
    if not is_complete:
        raise AttributeError(name)
    return original(self, name)


@repair(
    "make_generation_fast_",
    BaseFairseqModel,
    symptom='`pickle` of a model that is prepared for generation fails with "Can\'t pickle local object"',
    versions="all versions",
)
def pickle_models_for_generation(original: Callable[..., Any], self: BaseFairseqModel, **kwargs: Any) -> None:
    """Replaces ``BaseFairseqModel.make_generation_fast_`` (``original``): the model can be pickled afterwards.

    fairseq prepares a model for generation and replaces its method ``train`` by a local function that raises an error.
    pickle stores a function by its name, and a local function cannot be found by its name. The replacement uses
    `refuse_training` instead, which does the same.
    """
    original(self, **kwargs)
    if "train" in vars(self):
        self.train = refuse_training


def refuse_training(mode: bool = True) -> None:
    """Raises RuntimeError if `mode` is true. It is the method ``train`` of a model that is prepared for generation."""
    if mode:
        raise RuntimeError("cannot train after make_generation_fast")


@custom_repair(
    symptom="`pickle` of a configuration fails with \"Can't pickle <enum 'Choices'>\"",
    versions="all versions",
)
def pickle_choices() -> bool:
    """Tells pickle how to store the enumerations that fairseq makes for flags with a few choices.

    The configuration of a model contains such enumerations. For example, ``ChoiceEnum(["gelu", "relu"])`` returns a new
    class called "Choices". pickle stores a class by its module and name, but no module has this class. With this
    repair, pickle stores it as the call ``ChoiceEnum(["gelu", "relu"])``, which makes it again.

    Returns:
        True if pickle has been told now, False if it was told before.
    """
    # pickle looks up the type of an object in this table. The objects here are classes, and the type of a class is its
    # metaclass. Only the enumerations of fairseq have the metaclass StrEnumMeta.
    was_told_before = StrEnumMeta in copyreg.dispatch_table
    if was_told_before:
        return False
    copyreg.pickle(StrEnumMeta, reduce_choices)  # pickle then stores what `reduce_choices` returns for an enumeration.
    return True


def reduce_choices(enumeration: Any) -> Any:
    """Returns what pickle stores for an enumeration of fairseq, in the form that a method ``__reduce__`` returns.

    For an enumeration that was made by ``ChoiceEnum(["gelu", "relu"])``, it is this call: the function, and a tuple of
    its arguments. For any other enumeration, it is the name.
    """
    is_made_by_choice_enum = enumeration.__name__ == "Choices"
    if not is_made_by_choice_enum:
        return enumeration.__qualname__
    values = [choice.value for choice in enumeration]
    return ChoiceEnum, (values,)

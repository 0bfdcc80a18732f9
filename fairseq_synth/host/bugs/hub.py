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
    # pickle chooses how to store an object by its type. Here, the object is a class, such as "Choices", and the type of
    # a class is its metaclass. All enumerations of fairseq, and no other classes, have this one:
    type_of_enumerations = StrEnumMeta
    was_told_before = type_of_enumerations in copyreg.dispatch_table
    if was_told_before:
        return False
    # From now on, pickle calls `reduce_choices` with an enumeration, and stores the function call that it returns.
    copyreg.pickle(type_of_enumerations, reduce_choices)
    return True


def reduce_choices(enumeration: Any) -> Any:
    """Returns how pickle stores an enumeration of fairseq, in the form that ``__reduce__`` returns.

    If the enumeration was made by ``ChoiceEnum(values)``, this is a pair of that function and its arguments. Any other
    enumeration is stored by its name.
    """
    is_made_by_choice_enum = enumeration.__name__ == "Choices"
    if not is_made_by_choice_enum:
        return enumeration.__qualname__
    values = [choice.value for choice in enumeration]
    return ChoiceEnum, (values,)

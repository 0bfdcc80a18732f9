"""Repairs of what ``from_pretrained`` returns: it can be copied, pickled and sent to other processes."""

import copyreg
from typing import Any

from fairseq.dataclass.constants import ChoiceEnum, StrEnumMeta
from fairseq.models import BaseFairseqModel
from fairseq.tasks.fairseq_task import StatefulContainer

from ..repairs import custom_repair, repair


@repair(
    "__getattr__",
    StatefulContainer,
    symptom="`copy.deepcopy` and `pickle` of what `from_pretrained` returns end in a RecursionError",
    versions="all versions",
)
def copy_task_state(original_getattr: Any, self: StatefulContainer, name: str) -> Any:
    """Replaces ``StatefulContainer.__getattr__`` with one that knows no attributes until the container is complete.

    The original looks for each attribute in the attribute ``_state``. A copy does not have that yet, so the search for
    it never ends.
    """
    if "_state" not in vars(self) or "_factories" not in vars(self):
        raise AttributeError(name)
    return original_getattr(self, name)


@repair(
    "make_generation_fast_",
    BaseFairseqModel,
    symptom='`pickle` of a model that is prepared for generation ends in "Can\'t pickle local object"',
    versions="all versions",
)
def pickle_models_for_generation(original_make_generation_fast_: Any, self: BaseFairseqModel, **kwargs: Any) -> None:
    """Replaces ``make_generation_fast_`` with one after which the model can be pickled.

    The original replaces the model's method ``train`` by a function inside another one, which pickle cannot find by its
    name. The new method is `refuse_training`.
    """
    original_make_generation_fast_(self, **kwargs)
    if "train" in vars(self):
        self.train = refuse_training


def refuse_training(mode: bool = True) -> None:
    """Takes the place of ``train`` in a model that is prepared for generation."""
    if mode:
        raise RuntimeError("cannot train after make_generation_fast")


@custom_repair(
    symptom="`pickle` of a config ends in \"Can't pickle <enum 'Choices'>\"",
    versions="all versions",
)
def pickle_choices() -> bool:
    """Tells pickle how to store the types of flags with choices, so that a config can be pickled.

    Such a type is made by a function, so pickle cannot find it by its name.
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

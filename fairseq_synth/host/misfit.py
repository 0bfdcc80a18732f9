"""Explains in one line which weights of a checkpoint do not fit the model."""

import re
from typing import NamedTuple


class WrongSize(NamedTuple):
    """A weight that has another size in the checkpoint than in the model.

    Attributes:
        name: the name of the weight in the state dict.
        in_checkpoint: its size in the checkpoint, as torch writes it, such as ``[16, 8]``.
        in_model: its size in the model.
    """

    name: str
    in_checkpoint: str
    in_model: str


def explain_misfit(text: str) -> str:
    """Returns one line that says why a checkpoint does not fit the model, and what the user should do.

    If the size of a weight shows which flag or data were wrong, the line names these. Otherwise it names the first
    weight that has another size, is missing or is unexpected.

    Args:
        text: the message of the error that torch's ``load_state_dict`` has raised, which lists all such weights.
    """
    for wrong_size in read_wrong_sizes(text):
        line = explain_wrong_size(wrong_size)
        if line is not None:
            return line
    problems = list_problems(text)
    if not problems:
        return text.splitlines()[0]
    first_problem, *further_problems = problems
    count = f" (and {len(further_problems)} more)" if further_problems else ""
    return (
        f"the checkpoint does not fit the model: {first_problem}{count}; use the --arch and the sizes that it was "
        "trained with"
    )


def list_problems(text: str) -> list[str]:
    """Returns a line for each weight that torch's message lists: first wrong sizes, then missing, then unexpected."""
    problems = []
    for wrong_size in read_wrong_sizes(text):
        sizes = f"{wrong_size.in_checkpoint} in the checkpoint and {wrong_size.in_model} in this model"
        problems.append(f"{wrong_size.name} is {sizes}")
    for name in read_names(text, "Missing"):
        problems.append(f"the checkpoint lacks {name}")
    for name in read_names(text, "Unexpected"):
        problems.append(f"this model has no {name}")
    return problems


def read_wrong_sizes(text: str) -> list[WrongSize]:
    """Returns the weights that torch's message lists because their sizes differ."""
    # torch writes: size mismatch for NAME: copying a param with shape torch.Size([16, 8]) from checkpoint, the shape in
    # current model is torch.Size([24, 8]).
    rows = re.findall(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", text)
    return [WrongSize(name, in_checkpoint, in_model) for name, in_checkpoint, in_model in rows]


def read_names(text: str, kind: str) -> list[str]:
    """Returns the names of weights that torch's message lists as ``kind``, which is "Missing" or "Unexpected"."""
    # torch writes: Missing key(s) in state_dict: "NAME", "NAME".
    lines = re.findall(f"{kind} key.*", text)
    return re.findall('"([^"]+)"', "".join(lines))


def explain_wrong_size(wrong_size: WrongSize) -> str | None:
    """Returns a line that says which data or flag was wrong; None if the size of this weight does not show that."""
    name = wrong_size.name
    rows_in_checkpoint = first_number(wrong_size.in_checkpoint)
    rows_in_model = first_number(wrong_size.in_model)
    if name.endswith("embed_tokens.weight") and rows_in_model != rows_in_checkpoint:
        return (
            f"the data have another dictionary ({rows_in_model} words, {rows_in_checkpoint} in the training); give the "
            "data of the training, or data made with its dictionary (--srcdict and --tgtdict of fairseq-preprocess)"
        )
    if name.endswith("sentence_encoder.embed_positions.weight"):
        # fairseq counts positions from 2 on, so the matrix has two rows more than there are positions
        return (
            f"--max-positions {rows_in_model - 2}: the checkpoint was trained with {rows_in_checkpoint - 2}; give "
            "that, or another checkpoint"
        )
    if name.endswith((".E", ".F")):  # the projections of Linformer
        return (
            f"{name} is {wrong_size.in_checkpoint} in the checkpoint and {wrong_size.in_model} in this model; use the "
            "--linformer-k, --linformer-sharing and --max-positions that the model was trained with"
        )
    return None


def first_number(size: str) -> int:
    """Returns the first dimension of a size that torch has written, such as 16 for ``[16, 8]``; 0 for ``[]``."""
    numbers = re.findall(r"\d+", size)
    return int(numbers[0]) if numbers else 0

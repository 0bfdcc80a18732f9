"""Explains in one line which weights of a checkpoint do not fit the model."""

import re
from typing import NamedTuple


class WrongSize(NamedTuple):
    """A weight whose size in the checkpoint is not the model's; sizes are as torch writes them, ``[16, 8]``."""

    name: str
    in_checkpoint: str
    in_model: str


def explain_misfit(text: str) -> str:
    """Returns what does not fit, and what to do, from the message of a failed ``load_state_dict`` of torch."""
    wrong_sizes = read_wrong_sizes(text)
    for wrong in wrong_sizes:
        line = explain_wrong_size(wrong)
        if line is not None:
            return line
    problems = [
        f"{wrong.name} is {wrong.in_checkpoint} in the checkpoint and {wrong.in_model} in this model"
        for wrong in wrong_sizes
    ]
    problems += [f"the checkpoint lacks {name}" for name in read_names(text, "Missing")]
    problems += [f"this model has no {name}" for name in read_names(text, "Unexpected")]
    if not problems:
        return text.splitlines()[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"the checkpoint does not fit: {problems[0]}{more}; give the --arch and the sizes of its training"


def read_wrong_sizes(text: str) -> list[WrongSize]:
    """Returns the weights of other sizes that torch's message lists."""
    rows = re.findall(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", text)
    return [WrongSize(*row) for row in rows]


def read_names(text: str, kind: str) -> list[str]:
    """Returns the names that torch's message lists as "Missing" or "Unexpected"."""
    lists = re.findall(f"{kind} key.*", text)
    return re.findall('"([^"]+)"', "".join(lists))


def explain_wrong_size(wrong: WrongSize) -> str | None:
    """Returns which data or flag explains a weight of another size, or None if the architecture must be another."""
    rows_in_checkpoint = first_number(wrong.in_checkpoint)
    rows_in_model = first_number(wrong.in_model)
    if wrong.name.endswith("embed_tokens.weight") and rows_in_model != rows_in_checkpoint:
        return (
            f"the data have another dictionary ({rows_in_model} words, {rows_in_checkpoint} in the training); give the "
            "data of the training, or data made with its dictionary (--srcdict and --tgtdict of fairseq-preprocess)"
        )
    if wrong.name.endswith("sentence_encoder.embed_positions.weight"):
        # fairseq counts positions from 2 on, so the matrix has two rows more
        return (
            f"--max-positions {rows_in_model - 2}: the checkpoint was trained with {rows_in_checkpoint - 2}; give "
            "that, or another checkpoint"
        )
    if wrong.name.endswith((".E", ".F")):
        return (
            f"{wrong.name} is {wrong.in_checkpoint} in the checkpoint and {wrong.in_model} in this model; give the "
            "--linformer-k, --linformer-sharing and --max-positions of the training"
        )
    return None


def first_number(size: str) -> int:
    """Returns the first dimension of a size that torch has written, such as ``[16, 8]``."""
    numbers = re.findall(r"\d+", size)
    return int(numbers[0]) if numbers else 0

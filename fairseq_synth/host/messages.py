"""A user's mistake, in one line."""

import sys
import traceback
from types import TracebackType
from typing import Any, Optional, Type

from ..errors import explain, of_fairseq_command
from .repairs import repair, replace


@repair
def print_one_line_errors() -> bool:
    """A user's mistake, such as a missing file, ends in a traceback (all versions).

    Where `explain` has a line that names the flag or file, that line is printed in its place. This is for errors that
    end one of fairseq's commands; a program that registers the plugin by itself keeps its excepthook.
    """
    if not of_fairseq_command(traceback.walk_stack(None)):
        return False

    def with_explanation(excepthook: Any) -> Any:
        def print_error(cls: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
            line = explain(error) if of_fairseq_command(traceback.walk_tb(trace)) else None
            if line is None:
                excepthook(cls, error, trace)
            else:
                print(f"fairseq_synth: error: {line}", file=sys.stderr)

        return print_error

    return replace(sys, "excepthook", with_explanation)

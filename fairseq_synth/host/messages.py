"""A user's mistake, in one line."""

import sys
from types import TracebackType
from typing import Any, Optional, Type

from ..errors import explain
from .repairs import repair, replace


@repair
def print_one_line_errors() -> bool:
    """A user's mistake, such as a missing file, ends in a traceback (all versions).

    Where `explain` has a line that names the flag or file, that line is printed in its place.
    """

    def with_explanation(excepthook: Any) -> Any:
        def print_error(cls: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
            line = explain(error)
            if line is None:
                excepthook(cls, error, trace)
            else:
                print(f"fairseq_synth: error: {line}", file=sys.stderr)

        return print_error

    return replace(sys, "excepthook", with_explanation)

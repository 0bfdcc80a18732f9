"""What ``--encoder-synthesizer`` and ``--decoder-synthesizer`` mean: the functions of a layer's heads."""

from typing import Tuple

from .errors import SynthesizerError
from .synthesizers import SYNTHESIZERS

HeadGroup = Tuple[int, Tuple[str, ...]]  # a number of heads, and the functions that each of them mixes


def parse_heads(spec: str, num_heads: int, flag: str = "--encoder-synthesizer") -> Tuple[HeadGroup, ...]:
    """The functions of a layer's heads: ``"random:6/dense+vanilla:2"`` for 8 heads.

    Without ``/`` all heads are alike; without numbers the groups are equally large.

    Returns:
        ((6, ("random",)), (2, ("dense", "vanilla"))).

    Raises:
        SynthesizerError: as in `parse_spec`, or the numbers do not add up to `num_heads`.
    """
    groups = [part.partition(":") for part in spec.split("/")]
    names = [parse_spec(name, flag) for name, _, _ in groups]
    numbers = [number.strip() for _, _, number in groups]
    if not any(colon for _, colon, _ in groups):
        if num_heads % len(groups):
            raise SynthesizerError(
                f"{flag} {spec!r}: {num_heads} heads cannot be shared out equally among {len(groups)} groups; give "
                "their numbers, as in random:6/vanilla:2"
            )
        numbers = [str(num_heads // len(groups))] * len(groups)
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise SynthesizerError(f"{flag} {spec!r}: give every group its number of heads, as in random:6/vanilla:2")
    if sum(map(int, numbers)) != num_heads:
        raise SynthesizerError(
            f"{flag} {spec!r}: {' + '.join(numbers)} heads are not the {num_heads} attention heads of the layer"
        )
    return tuple(zip(map(int, numbers), names))


def parse_spec(spec: str, flag: str = "--encoder-synthesizer") -> Tuple[str, ...]:
    """``"vanilla+random"`` -> ``("random", "vanilla")``: the functions joined by ``+``, in registry order.

    Raises:
        SynthesizerError: an unknown, missing or repeated name; the message lists the valid ones.
    """
    names = [name.strip() for name in spec.split("+")]
    for name in names:
        if name not in SYNTHESIZERS:
            raise SynthesizerError(
                f"{flag} {spec!r}: unknown function {name!r}; choose from {', '.join(SYNTHESIZERS)}, "
                "or several of them joined by '+', as in random+vanilla"
            )
        if names.count(name) > 1:
            raise SynthesizerError(f"{flag} {spec!r}: {name!r} appears twice; name each function once")
    return tuple(name for name in SYNTHESIZERS if name in names)

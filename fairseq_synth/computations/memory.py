"""Where the tensors of the Triton kernels lie, and their gradients.

Tensors are read where they lie, and a gradient lies as its tensor does: those of q, k and v are written side by side,
as the projection's is to be, that of R as large as the parameter, so that autograd has nothing to join or to pad.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

NAMES = ("v", "q", "k", "x", "w", "c", "left", "right", "r", "weights")  # of the tensors, as in `triton_common`
BY_SENTENCE = ("v", "q", "k", "x", "left", "right")
SHARED = ("w", "c", "r")
VIEWS = "Alias Expand Permute Select Slice Split SplitWithSizes Squeeze Transpose Unbind Unsqueeze View"
NODES = tuple(f"{view}Backward" for view in VIEWS.split())  # in autograd's graph
Tensors = Dict[str, Any]  # by name; None where there is no such summand


def with_token_stride(x: Any, bsz: int, heads: int, dtype: torch.dtype) -> Any:
    """x (B or 1, H or 1, T, r) for all sentences and heads, such that token t of sentence b is t B + b strides away.

    Projections leave it so; otherwise it is a copy.
    """
    if x is None:
        return None
    x = x.to(dtype).expand(bsz, heads, -1, -1)
    fits = (x.stride(3) == 1 or x.size(3) == 1) and (x.size(2) == 1 or bsz == 1 or x.stride(2) == bsz * x.stride(0))
    return x if fits else x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def of_all_heads(x: Optional[Tensor], heads: int, is_whole: bool) -> Optional[Tensor]:
    """x, (1, H or 1, rows, n), for all heads, with neighbours in a row, or in a whole head, side by side in memory."""
    if x is None:
        return None
    x = x.expand(-1, heads, -1, -1)
    if is_whole:
        return x if x[0, 0].is_contiguous() and (x.size(3) > 1 or x.is_contiguous()) else x.contiguous()
    return x if x.stride(3) == 1 or x.size(3) == 1 else x.contiguous()


def together(weights: Dict[str, Optional[Tensor]], heads: int) -> Tuple[Optional[Tensor], Dict[str, int]]:
    """All weights, each (1, H or 1, 1, 1), as one tensor of rows of H numbers, and each one's row."""
    given = {name: x.expand(1, heads, 1, 1) for name, x in weights.items() if x is not None}
    if not given:
        return None, {}
    wholes = [whole_of(x) for x in given.values()]
    starts = [x.storage_offset() - whole.storage_offset() for x, whole in zip(given.values(), wholes)]
    is_side_by_side = all(heads == 1 or x.stride(1) == 1 for x in given.values())
    whole = wholes[0]
    if all(x is whole for x in wholes) and whole.is_contiguous() and is_side_by_side:
        if not any(n % heads for n in [*starts, whole.numel()]):
            return whole, {name: start // heads for name, start in zip(given, starts)}
    return torch.cat([x.flatten() for x in given.values()]), {name: row for row, name in enumerate(given)}


def whole_of(x: Tensor) -> Tensor:
    """The tensor that x is a view of, if autograd has only views between them; otherwise x.

    Then x's gradient, at the place of x, is the gradient of that tensor, as far as it comes from x.
    """
    whole = x._base
    if whole is None or not x.requires_grad or not whole.requires_grad:
        return x
    node, end = x.grad_fn, whole.grad_fn
    while node is not None and node is not end:
        if hasattr(node, "variable"):  # of a leaf
            return whole if node.variable is whole else x
        if not node.name().startswith(NODES):
            return x
        node = node.next_functions[0][0]
    return x if node is None else whole


class Place(NamedTuple):
    """Where a tensor lies: as a view of whole number `whole`."""

    whole: int
    size: Tuple[int, ...]
    stride: Tuple[int, ...]
    start: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.start)


def wholes_of(t: Tensors) -> Tuple[List[Tensor], Dict[str, Place]]:
    """The tensors that autograd is to see, and where those of the kernels lie in them.

    Tensors of `BY_SENTENCE` whose gradients could not lie side by side in that of their whole are copied.
    """
    owners = {name: x if name == "weights" else whole_of(x) for name, x in t.items() if x is not None}
    for name in BY_SENTENCE:
        if name in owners and owners[name].requires_grad:
            siblings = [t[other] for other in BY_SENTENCE if owners.get(other) is owners[name]]
            if not are_apart(siblings, owners[name]):
                t[name] = t[name].permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format).permute(1, 2, 0, 3)
                owners[name] = whole_of(t[name])
    wholes: List[Tensor] = []
    places: Dict[str, Place] = {}
    for name, owner in owners.items():
        if name in SHARED and own_size(t[name], owner) is None:
            owner = t[name]
        numbers = [places[other].whole for other in BY_SENTENCE if other in places and owners[other] is owner]
        if name not in BY_SENTENCE or not numbers:
            numbers = [len(wholes)]
            wholes.append(owner)
        start = t[name].storage_offset() - owner.storage_offset()
        places[name] = Place(numbers[0], tuple(t[name].size()), t[name].stride(), start)
    return wholes, places


def are_apart(tensors: List[Tensor], whole: Tensor) -> bool:
    """Whether tensors (B, H, T, r) of a whole have no element in common: each has its features of a row of `whole`."""
    end, token = 0, token_stride(tensors[0])
    if not whole.is_contiguous() or token == 0:
        return False
    for x in sorted(tensors, key=lambda x: (x.storage_offset() - whole.storage_offset()) % token):
        bsz, heads, length, width = x.size()
        start = int(x.storage_offset() - whole.storage_offset()) % token
        is_side_by_side = heads == 1 or x.stride(1) == width
        is_by_head = x.stride(1) % token == 0 and x.stride(1) >= length * bsz * token
        if token_stride(x) != token or start < end or not (is_side_by_side or is_by_head):
            return False
        end = start + (heads * width if is_side_by_side else width)
    return end <= token


def own_size(x: Tensor, whole: Tensor) -> Optional[Tuple[int, int]]:
    """Rows and columns of each head in `whole`, if x (1, H, rows, columns) is the upper left of each; else None."""
    _, heads, rows, columns = x.size()
    head = x.stride(1) if heads > 1 else whole.numel()
    width = x.stride(2) if rows > 1 else head
    begins = whole.is_contiguous() and x.storage_offset() == whole.storage_offset() and heads * head == whole.numel()
    if not begins or width < columns or head % width or (columns > 1 and x.stride(3) != 1):
        return None
    return head // width, width


def tensors_of(wholes: Sequence[Tensor], places: Dict[str, Place]) -> Tensors:
    """The kernels' tensors by name."""
    return {name: places[name].of(wholes[places[name].whole]) if name in places else None for name in NAMES}


def is_filled(number: int, whole: Tensor, places: Dict[str, Place]) -> bool:
    """Whether the kernels write all of the gradient of a whole."""
    sizes = [place.size for name, place in places.items() if place.whole == number and name in BY_SENTENCE]
    return not sizes or sum(map(math.prod, sizes)) == whole.numel()


def new_gradients(wholes: Sequence[Tensor], filled: Sequence[bool], wanted: Sequence[bool]) -> List[Optional[Tensor]]:
    """Memory for the gradients: 0 where no kernel writes."""
    grads: List[Optional[Tensor]] = []
    for whole, is_full, is_wanted in zip(wholes, filled, wanted):
        new = whole.new_empty if is_full else whole.new_zeros
        grads.append(new(whole.size()) if is_wanted else None)
    return grads


def gradients_of(grads: Sequence[Optional[Tensor]], places: Dict[str, Place]) -> Tensors:
    """The gradients that the kernels write, by ``to_`` and the name; those of `BY_SENTENCE` as views."""
    found: Tensors = {}
    for name, place in places.items():
        grad = grads[place.whole]
        if grad is not None:
            found[f"to_{name}"] = place.of(grad) if name in BY_SENTENCE else grad
    return found


def like_tokens(x: Any) -> Tensor:
    """A new tensor like x, (B, H, T, r), in memory (T, B, H, r)."""
    bsz, heads, length, width = x.size()
    out: Tensor = x.new_empty(length, bsz, heads, width).permute(1, 2, 0, 3)
    return out


def lying_in(stride: Tuple[int, ...], x: Any) -> Any:
    """x with these strides: a hook on saved tensors, such as torch's `save_on_cpu`, may bring it back with others."""
    if x is None or x.stride() == stride:
        return x
    own = x[tuple(slice(None) if n else slice(1) for n in stride)]  # without what is expanded
    return x.new_empty_strided(own.size(), stride).copy_(own).expand(x.size())


def is_aligned(x: Tensor) -> bool:
    """Whether x begins at a multiple of 16 bytes, which is a property that kernels are compiled for."""
    return x.data_ptr() % 16 == 0


def token_stride(x: Tensor) -> int:
    """Between token t B + b and the next in x, (B, H, T, r), as `with_token_stride` leaves it."""
    return x.stride(0) if x.size(0) > 1 else x.stride(2)

"""The comparison of the kernels' results with the definition's, for one call.

The kernels are tested under Triton's interpreter and compiled for some GPUs. On another GPU, with another compiler or
driver, they may still be wrong, and a wrong result looks like a bad model. So the first call of each kind is also
computed by the definition: its output, and the gradients of all tensors that need one.

**How much may the two differ?** In half precision, the kernels compute in fp32 and round few numbers to their type: the
attention weights P, the gradient dS of the logits, and their results. Each rounding has a relative error of at most u,
the unit roundoff (2^-8 in bf16, 2^-11 in fp16). The errors are nearly independent, so that the norm of the error of a
result is a small multiple of u times the norm of the result (Higham and Mary 2019). The definition is computed in
fp32, with errors that do not count beside these. The tolerance for the norm is therefore

    u (ROUNDINGS + max|S|).

The second summand is for factors of the logits that are rounded when they are copied: this changes a logit by up to
u |S|, and a weight by as much, relatively. Under the interpreter, in fp16, the errors are 0.3 to 1.2 u.

**Relative to what?** Some sums cancel, and their error is that of their terms. dS is ``P dP`` minus a mean of it, so
that the error of a gradient is relative to what ``P dP`` alone would give, if that is larger. The gradient of a weight
of a mixture is a single sum of ``dS S_m`` over all logits of a head. It is relative to the norm of ``P dP S_m``.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...logits import Logits, Term
from .. import plain
from .tensors import Call

MAX_WEIGHTS = 2**22  # attention weights that the definition computes, 16 MiB: a part of the sentences of a large batch
ROUNDINGS = 8
LEAST_ROUNDOFF = 2.0**-20  # the error of sums in fp32, which is the definition's own

Compute = Callable[[Logits, Tensor, Tensor | None, Tensor | None, float], Tensor]


class Comparison(NamedTuple):
    """What a comparison has shown."""

    is_finite: bool  # whether the definition's results are finite; if not, nothing is known about the kernels'
    difference: str  # what differs, or an empty string


class Results(NamedTuple):
    """The output of some sentences, (T, sentences, C), and gradients by the names of their tensors.

    The results are 0 at padding, where kernels and definition need not agree.
    """

    output: Tensor
    gradients: dict[str, Tensor]


class Leaf(NamedTuple):
    """A copy of a tensor of a call, which is a leaf of an autograd graph."""

    original: Tensor
    copy: Tensor
    roles: list[str]  # the roles in the call of the tensor or of its views, such as ``query`` and ``key``


class Copies:
    """Copies of the tensors of a call, which are leaves of an autograd graph, or views of such leaves.

    Tensors of the call that are views of one tensor are views of one leaf, and lie in it in the same way, so that the
    kernels read the copies as they read the tensors of the call.

    Args:
        dtype: The type of the copies; None for the types of the tensors.
        all_need_gradients: Whether all leaves need a gradient, or those whose tensors need one.
    """

    def __init__(self, dtype: torch.dtype | None = None, all_need_gradients: bool = False) -> None:
        self.dtype = dtype
        self.all_need_gradients = all_need_gradients
        # {``id(original)``: leaf}. A leaf keeps its original alive, so that no later tensor can have the same id.
        self.leaves: dict[int, Leaf] = {}

    def copy(self, role: str, x: Tensor) -> Tensor:
        """Returns a copy of x, which is a leaf, or the same view of a leaf as x is of its base.

        Args:
            role: The role of x in the call, for example ``query``. It is noted for the name of the leaf.
            x: A tensor of the call.
        """
        base = x._base  # the tensor that x is a view of, or None
        if base is None:
            return self.find_or_make_leaf(role, x).copy
        # A copy may lie in memory in another way than a tensor that is not contiguous, and then views do, too.
        # After ``detach()`` a view does not share the gradient of its base, so that it has a leaf of its own.
        if not base.is_contiguous() or base.requires_grad != x.requires_grad:
            return self.find_or_make_leaf(role, x).copy
        copy_of_base = self.find_or_make_leaf(role, base).copy  # begins at 0 in its memory
        offset_in_base = x.storage_offset() - base.storage_offset()
        return copy_of_base.as_strided(x.size(), x.stride(), offset_in_base)

    def find_or_make_leaf(self, role: str, original: Tensor) -> Leaf:
        """Returns the leaf of a tensor, which is made the first time, and adds a role to the leaf's roles."""
        key = id(original)
        if key not in self.leaves:
            self.leaves[key] = Leaf(original, self.make_copy(original), roles=[])
        leaf = self.leaves[key]
        if role not in leaf.roles:
            leaf.roles.append(role)
        return leaf

    def make_copy(self, original: Tensor) -> Tensor:
        """Returns a copy that is a leaf, and that needs a gradient as the arguments of `Copies` say."""
        copy = original.detach().to(self.dtype or original.dtype, copy=True)
        if torch.is_grad_enabled():
            copy.requires_grad_(self.all_need_gradients or original.requires_grad)
        return copy

    def copy_logits(self, logits: Logits) -> Logits:
        """Returns logits with copies of all tensors."""
        return Logits([change_tensors(term, self.copy) for term in logits.terms()])

    def name_leaves(self) -> dict[str, Tensor]:
        """Returns all leaves by names that say what is in them. They are the same for all copies of a call."""
        names = {}
        for number, leaf in enumerate(self.leaves.values()):
            roles = ", ".join(leaf.roles)
            names[f"tensor {number} ({roles})"] = leaf.copy
        return names

    def leaves_with_gradients(self) -> dict[str, Tensor]:
        """Returns the leaves that need gradients, by their names."""
        return {name: leaf for name, leaf in self.name_leaves().items() if leaf.requires_grad}

    def name_of_base(self, copy: Tensor) -> str:
        """Returns the name of the leaf that a copy is, or is a view of."""
        base = copy if copy._base is None else copy._base
        (name,) = [name for name, leaf in self.name_leaves().items() if leaf is base]
        return name


def compare(call: Call, compute: Compute) -> Comparison:
    """Compares the kernels' results for a call with the definition's.

    Both sides compute with copies of the tensors (`Copies`), so that the call does not change. Neither does the state
    of the random numbers, because nothing is dropped, and `choose_output_gradient` has a generator of its own.

    Args:
        call: The call.
        compute: Computes a call by the kernels, (T B, C), without dropout.
    """
    # Hooks of the training on saved tensors, such as those of activation checkpointing, may count or move tensors. They
    # must not see the comparison, and are replaced by hooks that do nothing.
    with torch.autograd.graph.saved_tensors_hooks(return_as_it_is, return_as_it_is):
        sentences = choose_sentences(call)
        output_gradient = choose_output_gradient(call, sentences)
        results = compute_by_kernels(call, compute, sentences, output_gradient)
        # The definition is computed in fp32, which autocast would change.
        with torch.autocast(call.value.device.type, enabled=False):
            return compare_with_definition(call, results, sentences, output_gradient.float())


def compare_with_definition(call: Call, results: Results, sentences: Tensor, output_gradient: Tensor) -> Comparison:
    """Compares results with the definition's.

    Args:
        call: The call.
        results: The kernels' results.
        sentences: The numbers of the sentences that the results are of.
        output_gradient: The gradient of the output, in fp32.
    """
    definition = Definition(call, sentences)
    expected = definition.compute(output_gradient)
    if not are_finite(expected):
        return Comparison(is_finite=False, difference="")
    scales = definition.scales(expected, output_gradient)
    differences = describe_differences(results, expected, scales, definition.tolerance(call.value.dtype))
    if not differences:
        return Comparison(is_finite=True, difference="")
    joined_differences = "; ".join(differences)
    return Comparison(is_finite=True, difference=f"{describe(call)}: {joined_differences}")


def are_finite(results: Results) -> bool:
    """Returns whether the output and all gradients are finite."""
    tensors = [results.output, *results.gradients.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def describe_differences(results: Results, expected: Results, scales: dict[str, float], tolerance: float) -> list[str]:
    """Returns a description of each result whose relative error is above the tolerance.

    Args:
        results: The kernels' results.
        expected: The definition's results.
        scales: {``output`` or ``gradient of`` a leaf: the number that the norm of its error is divided by}.
        tolerance: The largest relative error that is allowed.
    """
    pairs = {"output": (results.output, expected.output)}
    for name, gradient in results.gradients.items():
        pairs[f"gradient of {name}"] = (gradient, expected.gradients[name])
    descriptions = []
    for name, (tensor, expected_tensor) in pairs.items():
        error = float((tensor.float() - expected_tensor).norm()) / max(scales[name], 1e-30)
        if error > tolerance or math.isnan(error):
            descriptions.append(f"the {name} errs by {error:.2g}, where {tolerance:.2g} is allowed")
    return descriptions


def change_tensors(term: Term, change: Callable[[str, Tensor], Tensor]) -> Term:
    """Returns a term with ``change(name, tensor)`` in the place of each of its tensors."""
    fields: dict[str, Any] = {}
    for name, value in term._asdict().items():
        fields[name] = change(name, value) if isinstance(value, Tensor) else value
    return type(term)(**fields)


def return_as_it_is(x: Tensor) -> Tensor:
    """Returns x. It is a hook on saved tensors that does nothing."""
    return x


def describe(call: Call) -> str:
    """Returns the terms and sizes of a call in words."""
    layout = call.layout
    terms = " + ".join(type(term).__name__ for term in call.logits.terms())
    dtype = str(call.value.dtype).removeprefix("torch.")
    sentences = f"{layout.bsz} sentences of {layout.length} tokens"
    heads = f"{layout.num_heads} heads of width {layout.value_width}"
    return f"{terms} in {dtype}, {sentences}, {heads}"


def choose_sentences(call: Call) -> Tensor:
    """Returns the numbers of the sentences to compare, from the first to the last, and as many as fit into memory."""
    layout = call.layout
    most = MAX_WEIGHTS // (layout.num_heads * layout.length * layout.length)
    count = max(1, min(layout.bsz, most))
    return torch.linspace(0, layout.bsz - 1, count, device=call.value.device).long()


def choose_output_gradient(call: Call, sentences: Tensor) -> Tensor:
    """Returns random numbers as the gradient of the output, (T, sentences, C), which is 0 at padding."""
    layout = call.layout
    generator = torch.Generator(call.value.device).manual_seed(0)
    size = (layout.length, len(sentences), layout.num_heads * layout.value_width)
    gradient = torch.randn(size, generator=generator, device=call.value.device).to(call.value.dtype)
    return hide_padding(gradient, call, sentences)


def hide_padding(x: Tensor, call: Call, sentences: Tensor) -> Tensor:
    """Returns x (T, sentences, C) with 0 at padding."""
    if call.key_padding_mask is None:
        return x
    padding = call.key_padding_mask.index_select(0, sentences).to(torch.bool)
    return x.masked_fill(padding.t().unsqueeze(-1), 0.0)


def compute_by_kernels(call: Call, compute: Compute, sentences: Tensor, output_gradient: Tensor) -> Results:
    """Returns the results of the kernels, which compute all sentences of the call."""
    copies = Copies()
    value = copies.copy("value", call.value)
    logits = copies.copy_logits(call.logits)
    layout = call.layout
    out = compute(logits, value, call.key_padding_mask, call.attn_mask, layout.dropout)
    output = out.view(layout.length, layout.bsz, -1).index_select(1, sentences)
    gradients = differentiate(output, copies.leaves_with_gradients(), output_gradient)
    return Results(hide_padding(output.detach(), call, sentences), gradients)


def differentiate(output: Tensor, leaves: dict[str, Tensor], output_gradient: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of leaves by their names; 0 for a leaf that the output does not depend on."""
    if not leaves:
        return {}
    gradients = torch.autograd.grad(
        output, list(leaves.values()), output_gradient, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients))


class Definition:
    """The definition's results for some sentences of a call, in fp32, and the norms that errors are relative to."""

    def __init__(self, call: Call, sentences: Tensor) -> None:
        """Copies the tensors of a call in fp32, takes some of the sentences, and computes their logits.

        Args:
            call: The call.
            sentences: The numbers of the sentences, (n,).
        """
        self.call = call
        self.sentences = sentences
        self.copies = Copies(torch.float32, all_need_gradients=True)
        # The name of a leaf has its number. So the tensors are copied in the order of `compute_by_kernels`.
        copied_value = self.copies.copy("value", call.value)
        copied_terms = self.copies.copy_logits(call.logits).terms()
        # For each term, the name of the leaf that has its weight, or None. It is found in the copies of all sentences,
        # because a part of them is no view of a leaf.
        self.weight_names = [self.name_of_weight(term) for term in copied_terms]
        self.value = self.take_sentences(copied_value)
        self.logits = Logits([self.take_sentences_of_term(term) for term in copied_terms])
        self.key_padding_mask = None
        if call.key_padding_mask is not None:
            self.key_padding_mask = call.key_padding_mask.index_select(0, sentences)
        self.scores = self.logits.total(call.layout.length)  # S of these sentences

    def take_sentences(self, x: Tensor) -> Tensor:
        """Returns the sentences to compare of a tensor; the whole tensor if the batch shares it."""
        if x.size(0) == 1:
            return x
        return x.index_select(0, self.sentences)

    def take_sentences_of_term(self, term: Term) -> Term:
        """Returns a term of the sentences to compare."""
        return change_tensors(term, lambda _name, tensor: self.take_sentences(tensor))

    def name_of_weight(self, term: Term) -> str | None:
        """Returns the name of the leaf that a copied term has its weight in, or None if it has no weight."""
        return None if term.weight is None else self.copies.name_of_base(term.weight)

    def compute(self, output_gradient: Tensor) -> Results:
        """Returns the results for a gradient (T, sentences, C) of the output."""
        out = plain.compute(self.logits, self.value, self.key_padding_mask, self.call.attn_mask)
        output = out.view(output_gradient.size())
        gradients = differentiate(output, self.copies.leaves_with_gradients(), output_gradient)
        return Results(hide_padding(output.detach(), self.call, self.sentences), gradients)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns how large a relative error in a type may be; see the head of this module."""
        roundoff = max(torch.finfo(dtype).eps / 2, LEAST_ROUNDOFF)
        return roundoff * (ROUNDINGS + float(self.scores.detach().abs().max()))

    def scales(self, results: Results, output_gradient: Tensor) -> dict[str, float]:
        """Returns {name of a result: the number that its error is divided by}, for the output and all gradients.

        An error is relative to the norm of its result. But a gradient may be small because it is a difference or sum of
        large numbers that cancel. Then its error is as large as that of these numbers. So a gradient has three norms,
        and the largest one is its scale: its own, the one without the difference (`norms_without_difference`), and for
        weights that of the summands (`norms_of_summands`).

        Args:
            results: The definition's results.
            output_gradient: The gradient of the output, (T, sentences, C).
        """
        scales = {"output": float(results.output.norm())}
        if not results.gradients:
            return scales
        p_dp = self.compute_p_dp(output_gradient)
        norms_without_difference = self.norms_without_difference(p_dp)
        norms_of_summands = self.norms_of_summands(p_dp)
        for name, gradient in results.gradients.items():
            norm = float(gradient.norm())
            norm_of_summands = norms_of_summands.get(name, 0.0)  # only weights have this one
            scales[f"gradient of {name}"] = max(norm, norms_without_difference[name], norm_of_summands)
        return scales

    def compute_p_dp(self, output_gradient: Tensor) -> Tensor:
        """Returns ``P * dP``, elementwise, (B, H, T, T): the gradient of the logits S without the difference in it.

        P are the attention weights and dP is their gradient. The gradient of S is the difference
        ``dS = P * dP - P * rowsum(P * dP)``.

        Args:
            output_gradient: The gradient of the output, (T, sentences, C).
        """
        layout = self.call.layout
        weights = plain.attention_weights(
            self.logits,
            layout.num_heads,
            tgt_len=layout.length,
            src_len=layout.length,
            key_padding_mask=self.key_padding_mask,
            attn_mask=self.call.attn_mask,
        )
        by_token_and_head = output_gradient.view(layout.length, -1, layout.num_heads, layout.value_width)
        gradient_by_head = by_token_and_head.permute(1, 2, 0, 3)  # (B, H, T, d_h)
        gradient_of_weights = torch.matmul(gradient_by_head, self.value.transpose(2, 3))
        return (weights * gradient_of_weights).detach()

    def norms_without_difference(self, p_dp: Tensor) -> dict[str, float]:
        """Returns {name of a leaf: the norm of the gradient that it would have if ``P * dP`` were the gradient of S}.

        Args:
            p_dp: What `compute_p_dp` returns.
        """
        leaves = self.copies.leaves_with_gradients()
        gradients = differentiate(self.scores, leaves, p_dp.sum_to_size(self.scores.size()))
        return {name: float(gradient.norm()) for name, gradient in gradients.items()}

    def norms_of_summands(self, p_dp: Tensor) -> dict[str, float]:
        """Returns {name of a leaf with weights of terms: the norm of the numbers that are added up to its gradient}.

        The gradient of a weight is a sum over all logits S_m of its term: of ``dS * S_m``. The sum may be small because
        its summands cancel, and then its error is relative to the norm of the summands. In place of dS, which is itself
        such a difference, ``P * dP`` is taken. A weight has a gradient for each head, but one norm of all heads is
        enough, because errors are compared for whole leaves. If several terms have their weights in one leaf, the
        largest norm counts.

        Args:
            p_dp: What `compute_p_dp` returns.
        """
        norms: dict[str, float] = {}
        # `weight_names` has the order of the terms.
        for term, weight_name in zip(self.logits.terms(), self.weight_names):
            if weight_name is None:
                continue
            term_without_weight = term._replace(weight=None)
            logits_of_term = Logits([term_without_weight]).total(self.call.layout.length).detach()
            norm = float((p_dp * logits_of_term).norm())
            largest_norm_so_far = norms.get(weight_name, 0.0)
            norms[weight_name] = max(norm, largest_norm_so_far)
        return norms

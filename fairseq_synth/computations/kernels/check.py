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

**Relative to what?** Some sums cancel, and their error is that of their terms. The gradient of the logits is a
difference, ``dS = G - P rowsum(G)`` with ``G = P dP``, elementwise. So the error of a gradient is relative to what G
alone would give in the place of dS, if that is larger. The gradient of a weight of a mixture is a single sum of
``dS S_m`` over all logits of a head. It is relative to the norm of ``G S_m``.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...logits import Logits, Term
from .. import plain
from .tensors import Call

MAX_WEIGHTS = 2**22  # attention weights that the definition computes, 16 MiB: a part of the sentences of a large batch
ROUNDINGS = 8
LEAST_ROUNDOFF = 2.0**-20  # the error of sums in fp32, which is the definition's own
SMALLEST_SCALE = 1e-30  # so that no error is divided by 0

Compute = Callable[[Logits, Tensor, Tensor | None, Tensor | None, float], Tensor]


class Comparison(NamedTuple):
    """What a comparison has shown."""

    is_finite: bool  # whether the definition's results are finite; if not, nothing is known about the kernels'
    difference: str = ""  # what differs, or an empty string


class Results(NamedTuple):
    """The output of some sentences, (T, sentences, C), and gradients by the names of their tensors.

    The results are 0 at padding, where kernels and definition need not agree.
    """

    output: Tensor
    gradients: dict[str, Tensor]


class Leaf(NamedTuple):
    """A copy of a tensor, for which autograd computes a gradient: a leaf of its graph."""

    original: Tensor
    tensor: Tensor  # the copy
    roles: list[str]  # what the tensor, or views of it, are in the call, such as ``query`` and ``key``


class Copies:
    """Copies the tensors of a call, so that gradients can be computed without a change of the call's own tensors.

    For example, the queries and keys of a call are the first and the second half of one tensor. This tensor is copied
    once, and becomes a leaf of autograd's graph. The copies of the queries and keys are the two halves of the leaf. So
    the kernels read the copies in the same way as the tensors of the call.

    Args:
        dtype: The type of the copies; None for the types of the tensors.
        all_need_gradients: Whether all leaves need a gradient, or only the copies of tensors that need one.
    """

    def __init__(self, dtype: torch.dtype | None = None, all_need_gradients: bool = False) -> None:
        self.dtype = dtype
        self.all_need_gradients = all_need_gradients
        # {``id(original)``: leaf}. The id stays unique, because a leaf keeps its original alive.
        self.leaves: dict[int, Leaf] = {}

    def copy(self, role: str, x: Tensor) -> Tensor:
        """Returns a copy of x. If x is a view, it is the same view of a copy of the whole tensor.

        For example, x is ``projection[:3]``. Then the whole projection is copied, or its copy is found if another view
        of it was copied before. The result is ``copy[:3]``.

        Args:
            role: What x is in the call, for example ``query``. It is added to the name of the leaf.
            x: A tensor of the call.
        """
        base = x._base  # torch's name for the tensor that x is a view of; None if x is no view
        if base is None or not can_copy_base(x, base):
            return self.find_or_make_leaf(role, x)
        copy_of_base = self.find_or_make_leaf(role, base)
        return take_same_view(x, base, copy_of_base)

    def find_or_make_leaf(self, role: str, original: Tensor) -> Tensor:
        """Returns the copy of a tensor, which is made when it is asked for the first time.

        Args:
            role: What the tensor, or the view for which it is copied, is in the call.
            original: The tensor.
        """
        key = id(original)
        if key not in self.leaves:
            copy = self.make_copy(original)
            self.leaves[key] = Leaf(original, copy, roles=[])
        leaf = self.leaves[key]
        if role not in leaf.roles:
            leaf.roles.append(role)
        return leaf.tensor

    def make_copy(self, original: Tensor) -> Tensor:
        """Returns a copy of a tensor that is a leaf, as the arguments of `Copies` describe it."""
        dtype = self.dtype or original.dtype
        copy = original.detach().to(dtype, copy=True)
        if torch.is_grad_enabled():
            copy.requires_grad_(self.all_need_gradients or original.requires_grad)
        return copy

    def name_leaves(self) -> dict[str, Tensor]:
        """Returns {name: leaf} for all leaves. A name has a number and all roles, such as ``tensor 0 (query, key)``."""
        leaf_of_name = {}
        for number, leaf in enumerate(self.leaves.values()):
            roles = ", ".join(leaf.roles)
            leaf_of_name[f"tensor {number} ({roles})"] = leaf.tensor
        return leaf_of_name


def can_copy_base(x: Tensor, base: Tensor) -> bool:
    """Returns whether a copy of a view x of `base` can be a view of a copy of `base`."""
    if not base.is_contiguous():
        return False  # the copy may have other strides, so that x would lie elsewhere in it
    # The base needs no gradient, but x does; or x is a view of ``base.detach()``, which gives no gradient to the base.
    has_other_gradient = x.requires_grad != base.requires_grad
    return not has_other_gradient


def take_same_view(x: Tensor, base: Tensor, copy: Tensor) -> Tensor:
    """Returns the same view of `copy` as x is of `base`: for example ``copy[:, 3:]`` if x is ``base[:, 3:]``.

    torch does not keep the indices of a view, but its place in memory. If `base` has 2 rows of 6 numbers, the view
    ``base[:, 3:]`` has the size (2, 3), the strides (6, 1), and begins 3 numbers behind the beginning of `base`. As the
    copy lies in memory in the same way, its view at this place is ``copy[:, 3:]``.

    Args:
        x: A view of `base`.
        base: A contiguous tensor.
        copy: A contiguous tensor of the same size, which begins at the beginning of its memory.
    """
    begin = x.storage_offset() - base.storage_offset()  # 3 in the example
    return copy.as_strided(x.size(), x.stride(), begin)


class CopiedCall(NamedTuple):
    """Copies of the tensors of a call, which are leaves, or views of leaves."""

    value: Tensor
    terms: list[Term]  # the terms of the logits
    leaves: dict[str, Tensor]  # by names that say what is in them

    def leaves_with_gradients(self) -> dict[str, Tensor]:
        """Returns {name: leaf} for the leaves that need gradients."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def name_of_leaf(self, copy: Tensor) -> str:
        """Returns the name of the leaf that one of the copies is, or that it is a view of."""
        base = copy._base  # torch's name for the tensor that it is a view of; None if it is no view
        leaf_of_copy = copy if base is None else base
        (name,) = [name for name, leaf in self.leaves.items() if leaf is leaf_of_copy]
        return name


def copy_call(call: Call, dtype: torch.dtype | None = None, all_need_gradients: bool = False) -> CopiedCall:
    """Returns copies of the values and logits of a call. If a call is copied twice, the leaves have the same names.

    Args:
        call: The call.
        dtype, all_need_gradients: As in `Copies`.
    """
    copies = Copies(dtype, all_need_gradients)
    value = copies.copy("value", call.value)
    terms = [change_tensors(term, copies.copy) for term in call.logits.terms()]
    leaves = copies.name_leaves()  # comes last, because each copy above may have added a leaf or a role
    return CopiedCall(value, terms, leaves)


def compare(call: Call, compute: Compute) -> Comparison:
    """Computes the output and the gradients of a call by the kernels and by the definition, and compares them.

    Both compute with copies, so that the call and its gradients do not change. Neither does torch's random generator,
    because nothing is dropped, and `choose_output_gradient` has a generator of its own.

    Args:
        call: The call.
        compute: Computes a call by the kernels, (T B, C), without dropout.
    """
    # The definition stores a weight for each pair of tokens. For a large batch, only some sentences fit into memory.
    sentences = choose_sentences(call)
    output_gradient = choose_output_gradient(call, sentences)
    with without_hooks_on_saved_tensors():
        results = compute_by_kernels(call, compute, sentences, output_gradient)
        # The definition is computed in fp32, even if a training has switched on autocast, which uses half precision.
        with torch.autocast(call.value.device.type, enabled=False):
            return compare_with_definition(call, results, sentences, output_gradient.float())


def without_hooks_on_saved_tensors() -> AbstractContextManager[None]:
    """Returns a context in which hooks on saved tensors are not called.

    A training may have such hooks. Activation checkpointing, for example, counts the saved tensors, and would fail if
    it counted those of a comparison. Here hooks that do nothing take their place.
    """
    return torch.autograd.graph.saved_tensors_hooks(return_as_it_is, return_as_it_is)


def compare_with_definition(call: Call, results: Results, sentences: Tensor, output_gradient: Tensor) -> Comparison:
    """Computes some sentences of a call by the definition, and compares the results of the kernels with its results.

    Args:
        call: The call.
        results: The kernels' results.
        sentences: The numbers of the sentences.
        output_gradient: The gradient of the output, (T, sentences, C), in fp32.
    """
    definition = Definition(call, sentences)
    expected = definition.compute(output_gradient)
    if not are_finite(expected):
        return Comparison(is_finite=False)  # a loss that overflows says nothing about the kernels
    # The error of each result, in the norm, may be up to ``tolerance * scale``, with a scale for each result.
    tolerance = definition.tolerance(call.value.dtype)
    scales = definition.scales(expected, output_gradient)
    differences = describe_differences(results, expected, scales, tolerance)
    if not differences:
        return Comparison(is_finite=True)
    joined_differences = "; ".join(differences)
    return Comparison(is_finite=True, difference=f"{describe(call)}: {joined_differences}")


def are_finite(results: Results) -> bool:
    """Returns whether the output and all gradients are finite."""
    tensors = [results.output, *results.gradients.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def describe_differences(results: Results, expected: Results, scales: dict[str, float], tolerance: float) -> list[str]:
    """Returns a sentence for each result whose relative error is above the tolerance.

    The relative error of a result is ``norm(result - expected result) / scale``.

    Args:
        results: The kernels' results.
        expected: The definition's results.
        scales: {name of a result: its scale}, from `Definition.scales`.
        tolerance: The largest relative error that is allowed.
    """
    expected_tensors = name_results(expected)
    descriptions = []
    for name, tensor in name_results(results).items():
        scale = max(scales[name], SMALLEST_SCALE)
        difference = tensor.float() - expected_tensors[name]
        error = float(difference.norm()) / scale
        if error > tolerance or math.isnan(error):
            descriptions.append(f"the error of the {name} is {error:.2g}, but at most {tolerance:.2g} is allowed")
    return descriptions


def name_results(results: Results) -> dict[str, Tensor]:
    """Returns {name: tensor} for the output and the gradients: ``output``, ``gradient of tensor 0 (value)``, ..."""
    tensor_of_name = {"output": results.output}
    for leaf_name, gradient in results.gradients.items():
        tensor_of_name[name_of_gradient(leaf_name)] = gradient
    return tensor_of_name


def name_of_gradient(leaf_name: str) -> str:
    """Returns the name of the gradient of a leaf, in messages and in `Definition.scales`."""
    return f"gradient of {leaf_name}"


def change_tensors(term: Term, change: Callable[[str, Tensor], Tensor]) -> Term:
    """Returns a copy of a term in which each tensor is replaced by ``change(name, tensor)``, with its field's name."""
    fields: dict[str, Any] = {}
    for name, value in term._asdict().items():
        if isinstance(value, Tensor):
            fields[name] = change(name, value)
        else:
            fields[name] = value
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
    """Returns the numbers of the sentences to compare: as many as fit into memory, spread evenly over the batch.

    For example, if 3 of 9 sentences fit, they are 0, 4 and 8.
    """
    layout = call.layout
    weights_per_sentence = layout.num_heads * layout.length * layout.length
    max_sentences = MAX_WEIGHTS // weights_per_sentence
    count = max(1, min(layout.bsz, max_sentences))
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
    """Returns the results of the kernels. They compute the whole call, of which some sentences are compared."""
    copies = copy_call(call)
    layout = call.layout
    out = compute(Logits(copies.terms), copies.value, call.key_padding_mask, call.attn_mask, layout.dropout)
    output = out.view(layout.length, layout.bsz, -1).index_select(1, sentences)
    gradients = differentiate(output, copies.leaves_with_gradients(), output_gradient)
    return Results(hide_padding(output.detach(), call, sentences), gradients)


def differentiate(output: Tensor, leaves: dict[str, Tensor], output_gradient: Tensor) -> dict[str, Tensor]:
    """Returns {name: gradient} for leaves {name: leaf}. It is 0 for a leaf that the output does not depend on.

    The graph is kept, because some graphs are differentiated twice.
    """
    if not leaves:
        return {}
    gradients = torch.autograd.grad(
        output, list(leaves.values()), output_gradient, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients))


class Definition:
    """The definition's results for some sentences of a call, in fp32, and the norms that errors are relative to.

    Attributes:
        copies: Copies of the tensors of the call, with all its sentences.
        leaves: {name: leaf}, the leaves of autograd's graph that these copies are, or are views of.
        value, key_padding_mask: The values and the padding mask of the sentences to compare.
        logits: The logits S of the sentences to compare, as the list of their terms.
        total_logits: The sum of these terms, one tensor (sentences or 1, H or 1, T or 1, T).
    """

    def __init__(self, call: Call, sentences: Tensor) -> None:
        """Copies the tensors of a call in fp32, takes some of the sentences, and computes their logits.

        Args:
            call: The call.
            sentences: The numbers of the sentences, (n,).
        """
        self.call = call
        self.sentences = sentences
        # The kernels compute the gradients of whole tensors. To compare them, whole tensors are copied here, too. All
        # leaves need gradients, because autograd refuses to differentiate logits that need none.
        self.copies = copy_call(call, torch.float32, all_need_gradients=True)
        self.leaves = self.copies.leaves_with_gradients()
        # All that follows has only the sentences to compare. In all other sentences, autograd makes the gradients 0.
        self.value = self.take_sentences(self.copies.value)
        self.logits = Logits(self.take_sentences_of_term(term) for term in self.copies.terms)
        self.total_logits = self.logits.total(call.layout.length)
        self.key_padding_mask = None
        if call.key_padding_mask is not None:
            self.key_padding_mask = self.take_sentences(call.key_padding_mask)

    def take_sentences(self, x: Tensor) -> Tensor:
        """Returns the part of x (B or 1, ...) with the sentences to compare; x itself if all sentences share it."""
        if x.shape[0] == 1:
            return x
        return x.index_select(0, self.sentences)

    def take_sentences_of_term(self, term: Term) -> Term:
        """Returns a term of the logits with only the sentences to compare in its tensors."""
        return change_tensors(term, lambda _name, tensor: self.take_sentences(tensor))

    def compute(self, output_gradient: Tensor) -> Results:
        """Returns the results for a gradient (T, sentences, C) of the output."""
        out = plain.compute(self.logits, self.value, self.key_padding_mask, self.call.attn_mask)
        output = out.view(output_gradient.size())
        gradients = differentiate(output, self.leaves, output_gradient)
        return Results(hide_padding(output.detach(), self.call, self.sentences), gradients)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns the largest relative error of a result in a type that rounding may cause: u (ROUNDINGS + max|S|).

        The head of this module derives the formula.
        """
        roundoff = max(torch.finfo(dtype).eps / 2, LEAST_ROUNDOFF)  # u
        largest_logit = float(self.total_logits.detach().abs().max())  # max|S|
        return roundoff * (ROUNDINGS + largest_logit)

    def scales(self, results: Results, output_gradient: Tensor) -> dict[str, float]:
        """Returns {name of a result: the norm that its error is divided by}, for the output and all gradients.

        Usually it is the norm of the result. But if a result is a small difference of large numbers, it has the
        rounding errors of the large numbers. For example, fp16 rounds 1.01 to 1.0098, so that ``1.01 - 1.00`` becomes
        0.0098: the error is small for a number like 1.01, but large for 0.01. The gradient of the logits is a
        difference, ``dS = G - P rowsum(G)``. So a gradient has two or three norms, of which the largest is taken:

        - its own norm,
        - the norm that it would have if dS were G,
        - for weights of a mixture, whose gradients are sums that may cancel out, the norm of the numbers in a sum.

        Args:
            results: The definition's results.
            output_gradient: The gradient of the output, (T, sentences, C).
        """
        weighted_gradient = self.compute_weighted_gradient(output_gradient)  # G
        norms_without_subtraction = self.measure_without_subtraction(weighted_gradient)
        norms_of_addends = self.measure_addends(weighted_gradient)
        scales = {"output": float(results.output.norm())}
        for leaf_name, gradient in results.gradients.items():
            norms = [float(gradient.norm()), norms_without_subtraction[leaf_name]]
            if leaf_name in norms_of_addends:  # the leaf has weights of a mixture
                norms.append(norms_of_addends[leaf_name])
            scales[name_of_gradient(leaf_name)] = max(norms)
        return scales

    @torch.no_grad()
    def compute_weighted_gradient(self, output_gradient: Tensor) -> Tensor:
        """Returns ``G = P * dP``, elementwise, for the attention weights P and their gradient dP, (B, H, T, T) each.

        By the derivative of softmax, the gradient of the logits is ``G - P * rowsum(G)``. B is the number of sentences
        to compare.

        Args:
            output_gradient: The gradient dY of the output, (T, B, C).
        """
        layout = self.call.layout
        bsz = self.value.shape[0]
        weights = plain.attention_weights(
            self.logits,
            layout.num_heads,
            tgt_len=layout.length,
            src_len=layout.length,
            key_padding_mask=self.key_padding_mask,
            attn_mask=self.call.attn_mask,
            bsz=bsz,
        )  # P, (B, H, T, T)
        # The output of a head is ``Y = P V``, so that ``dP = dY V^T``.
        gradient_of_heads = output_gradient.view(layout.length, bsz, layout.num_heads, -1)  # dY, (T, B, H, d_h)
        gradient_of_weights = torch.einsum("tbhd,bhsd->bhts", gradient_of_heads, self.value)  # dP, (B, H, T, T)
        return weights * gradient_of_weights

    def measure_without_subtraction(self, weighted_gradient: Tensor) -> dict[str, float]:
        """Returns how large each gradient would be without a subtraction, as {leaf name: norm}.

        The gradient of the logits is a difference, ``dS = G - P rowsum(G)``. dS may be much smaller than G, but it has
        the rounding errors of G, and so has each gradient that is computed from dS. So the error of a gradient is
        compared with the norm that the gradient would have if dS were G.

        Args:
            weighted_gradient: G, from `compute_weighted_gradient`.

        Returns:
            {leaf name: norm} for all leaves. The norm is 0 if the logits do not depend on a leaf, as on the values.
        """
        # If sentences, heads or rows share a logit, its gradient is the sum of their gradients.
        gradient_of_logits = weighted_gradient.sum_to_size(self.total_logits.size())
        gradients = differentiate(self.total_logits, self.leaves, gradient_of_logits)
        return {leaf_name: float(gradient.norm()) for leaf_name, gradient in gradients.items()}

    def measure_addends(self, weighted_gradient: Tensor) -> dict[str, float]:
        """Returns how large the numbers are whose sum is the gradient of a mixture's weight, as {leaf name: norm}.

        If the logits are ``S = w_1 S_1 + w_2 S_2``, the gradient of the weight w_1 is the sum of ``dS * S_1`` over all
        logits of a head. Positive and negative numbers may cancel out. Then the sum is small, but it has the rounding
        errors of all of these numbers. So the error of the sum is compared with their norm. For the reason that
        `measure_without_subtraction` gives, dS is replaced by G: the norm is that of ``G * S_1``.

        Args:
            weighted_gradient: G, from `compute_weighted_gradient`.

        Returns:
            {leaf name: norm} for the leaves with weights. A leaf with weights of several terms has the largest norm.
        """
        largest_norms: dict[str, float] = {}
        for term in self.logits.terms():
            if term.weight is None:
                continue
            addends = weighted_gradient * self.compute_unweighted_logits(term)  # G * S_1
            norm = float(addends.norm())
            leaf_name = self.copies.name_of_leaf(term.weight)
            largest_norms[leaf_name] = max(norm, largest_norms.get(leaf_name, 0.0))
        return largest_norms

    def compute_unweighted_logits(self, term: Term) -> Tensor:
        """Returns the logits of one term without its weight, (B or 1, H or 1, T or 1, T)."""
        term_without_weight = term.with_weight(None)
        return Logits([term_without_weight]).total(self.call.layout.length).detach()

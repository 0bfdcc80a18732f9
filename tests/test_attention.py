"""What SyntheticAttention does around the logits: masks, dropout, weights, cache, precision."""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.modules import MultiheadAttention
from helpers import SPECS, Columns, Distance, future_mask, make_attention, padding_mask

from fairseq_synth import attention, logits, synthesizers
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import Bias, Product
from fairseq_synth.masks import causal_mask, masked_softmax
from fairseq_synth.synthesizers import SYNTHESIZERS

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_sees_nothing(spec, dtype):
    """Output out_proj(0), a finite gradient, and the other rows as if it were not there.

    Where the weights are not asked for, a sentence of padding alone has any finite output.
    """
    module = make_attention(spec).to(dtype)
    x = torch.randn(4, 2, 6).to(dtype).requires_grad_()
    padding = torch.tensor([[False] * 4, [True] * 4])
    out, weights = module(x, x, x, key_padding_mask=padding, need_weights=True)
    assert torch.equal(out[:, 1], module.out_proj.bias.expand(4, 6)) and torch.count_nonzero(weights[1]) == 0
    alone, _ = module(x[:, :1], x[:, :1], x[:, :1])
    without_weights, _ = module(x, x, x, key_padding_mask=padding)
    assert torch.isfinite(without_weights).all()
    for found in (out, without_weights):
        torch.testing.assert_close(found[:, :1], alone, atol=8 * torch.finfo(dtype).eps, rtol=0)
    (out + without_weights).float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla", "random:1/vanilla:1"])
def test_one_product_in_training(spec, monkeypatch):
    """In training queries, keys and values are one product, else three; output and gradients are equal."""
    module = make_attention(spec).double()
    x = torch.randn(5, 3, 6).double().requires_grad_()
    calls = []
    monkeypatch.setattr(
        attention.F, "linear", lambda x, weight, bias, of=F.linear: calls.append(len(weight)) or of(x, weight, bias)
    )

    def of_all(projected):
        projected = projected[:3]
        assert [tuple(part.shape) for part in projected] == [(3, heads, 5, 3), (3, heads, 5, 3), (3, 2, 5, 3)]
        inputs = [x] + [p for proj in (module.q_proj, module.k_proj, module.v_proj) for p in proj.parameters()]
        return [*projected, *torch.autograd.grad(sum((part**2).sum() for part in projected), inputs)]

    heads = module.num_query_heads
    together = of_all(module.project(x))
    proj = module.k_proj
    for register in (proj.register_forward_hook, proj.register_forward_pre_hook, proj.register_full_backward_hook):
        hook = register(lambda *_: None)
        torch.testing.assert_close(of_all(module.project(x)), together)
        hook.remove()
    monkeypatch.setattr(proj, "forward", proj.forward)
    module.project(x)
    monkeypatch.delattr(proj, "forward")
    alone = module.eval().project(x)
    assert calls == [6 * heads + 6, *[3 * heads, 3 * heads, 6] * 5]
    torch.testing.assert_close(list(alone[:3]), together[:3])

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for other in (torch.nn.Linear(6, 3 * heads, bias=False), Doubled(6, 3 * heads)):
        module.train().k_proj = other.double()
        assert torch.equal(module.project(x)[1], module.split_heads(module.k_proj(x)))


@pytest.mark.parametrize("name", ["synthesizer", "synthesizer.components.random", "out_proj"])
def test_hooks(name):
    """A call that does without the module's own finds them all the same."""
    module, x, calls = make_attention("random+vanilla"), torch.randn(5, 3, 6, requires_grad=True), []
    inner = module.get_submodule(name)
    for register in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        if "backward" in register and name != "out_proj":
            continue  # their outputs are no tensors
        hook = getattr(inner, f"register_{register}")(lambda *_, register=register: calls.append(register))
        out, _ = module(x)
        assert out.shape == x.shape
        out.sum().backward()
        hook.remove()
        assert calls.pop() == register and not calls


@pytest.mark.parametrize("spec", ["dense", "factorized_dense", "random+vanilla"])
def test_second_derivatives(spec):
    """The plain computation has them: docs/limits.md. Here of the gradients' squares, against finite differences."""
    module = make_attention(spec).double().train()
    x = torch.randn(4, 2, 6).double().requires_grad_()
    inputs = [x, *module.parameters()]

    def squares():
        out, _ = module(x, need_weights=True)
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    for tensor, grad in zip(inputs, torch.autograd.grad(squares(), inputs)):
        direction, values = torch.randn_like(tensor), []
        for step in (1e-5, -2e-5, 1e-5):  # forth, back, and to where it was
            tensor.data.add_(step * direction)
            values.append(squares().detach())
        torch.testing.assert_close((grad * direction).sum(), (values[0] - values[1]) / 2e-5, rtol=1e-4, atol=1e-4)


def test_causal_and_padded_first_column():
    """Left padding under a causal mask leaves first rows without a key; they are 0, not NaN."""
    scores = torch.randn(1, 1, 3, 3, requires_grad=True)
    future = torch.triu(torch.full((3, 3), float("-inf")), 1)
    weights = masked_softmax(scores, torch.tensor([[True, False, False]]), future)
    assert torch.equal(weights[0, 0, 0], torch.zeros(3)) and weights[0, 0, 1, 1] == 1
    weights.square().sum().backward()
    assert torch.isfinite(scores.grad).all() and torch.count_nonzero(scores.grad[0, 0, 0]) == 0
    for hidden in (torch.ones(3, 3, dtype=torch.bool), torch.full((3, 3), float("-inf"))):
        assert torch.count_nonzero(masked_softmax(scores, None, hidden)) == 0


def test_masks_of_any_kind():
    """A boolean mask, -inf and fairseq's encoder's -1e8 hide the same keys; a finite bias is added."""
    scores = torch.randn(2, 2, 4, 4)
    hidden = torch.rand(4, 4) < 0.4
    hidden.fill_diagonal_(False)
    expected = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    for value in (float("-inf"), -1e8):
        mask = torch.zeros(4, 4).masked_fill(hidden, value)
        torch.testing.assert_close(masked_softmax(scores, None, mask), expected)
    torch.testing.assert_close(masked_softmax(scores, None, hidden), expected)
    half = masked_softmax(scores.half(), None, hidden)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, atol=1e-3, rtol=1e-3)
    bias = torch.randn(4, 4)
    torch.testing.assert_close(masked_softmax(scores, None, bias), torch.softmax(scores + bias, -1))


@pytest.mark.parametrize("std", [1, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_random_matrices(std, dtype):
    """No NaN and the right weights where R spreads over hundreds of nats."""
    module = make_attention("random")
    module.synthesizer.components["random"].R.data = std * torch.randn(2, 12, 12)
    x = torch.randn(12, 2, 6)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 5:] = True
    module.to(dtype)
    out, weights = module(*[x.to(dtype)] * 3, key_padding_mask=padding, need_weights=True)
    assert torch.isfinite(out).all()
    expected, expected_weights = module.double()(
        *[x.to(dtype).double()] * 3, key_padding_mask=padding, need_weights=True
    )
    torch.testing.assert_close(out.double(), expected, atol=30 * torch.finfo(dtype).eps, rtol=0)
    torch.testing.assert_close(weights.double(), expected_weights, atol=2 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_weights(spec):
    """need_weights and need_head_weights have the host's shapes, and rows that sum to 1."""
    module = make_attention(spec)
    x = torch.randn(4, 3, 6)
    out, none = module(x, x, x)
    assert none is None
    same, mean = module(x, x, x, need_weights=True)
    _, heads = module(x, x, x, need_head_weights=True)
    assert mean.shape == (3, 4, 4) and heads.shape == (2, 3, 4, 4)
    torch.testing.assert_close(out, same)
    torch.testing.assert_close(heads.mean(0), mean)
    torch.testing.assert_close(heads.sum(-1), torch.ones(2, 3, 4))


def test_a_mask_of_numbers_is_added_in_single_precision():
    """bf16 has no 256.5."""
    scores, mask = torch.full((1, 1, 1, 2), 256.0).bfloat16(), torch.tensor([[0.0, 0.5]]).bfloat16()
    expected = torch.softmax(torch.tensor([0.0, 0.5]), -1)
    torch.testing.assert_close(masked_softmax(scores, None, mask).flatten(), expected)


@pytest.mark.parametrize("spec", ["random", "factorized_random", "dense", "random+vanilla", "vanilla"])
def test_attention_dropout(spec):
    """Each sentence drops its own weights, and the mean over many draws is the output without dropout."""
    module = make_attention(spec, dropout=0.4)
    x = torch.randn(4, 1, 6).expand(4, 20_000, 6)
    module.eval()
    expected, _ = module(x, x, x)
    module.train()
    torch.manual_seed(0)
    out, _ = module(x, x, x)
    assert not torch.allclose(out[:, 0], out[:, 1], atol=1e-3)
    module.eval()
    module.dropout_module.make_generation_fast_("x", retain_dropout=True)  # --retain-dropout
    retained, _ = module(x, x, x)
    assert not torch.allclose(retained[:, 0], retained[:, 1], atol=1e-3)
    standard_error = out.std(1) / out.size(1) ** 0.5
    assert ((out.mean(1) - expected.mean(1)).abs() < 5 * standard_error + 1e-6).all()


def test_dropout_under_any_mask():
    """A mask of numbers does not switch --attention-dropout off."""
    module = make_attention("random+vanilla", dropout=0.4).train()
    x = torch.randn(4, 1, 6).expand(4, 2, 6)
    torch.manual_seed(0)
    out, _ = module(x, attn_mask=future_mask(4))
    assert not torch.allclose(out[3, 0], out[3, 1], atol=1e-3)


def test_the_causal_mask_is_of_a_whole_sentence():
    module = make_attention("random")
    with pytest.raises(ValueError, match="attn_mask: causal_mask is of a whole sentence"):
        module(torch.randn(1, 2, 6), incremental_state={}, attn_mask=causal_mask(torch.zeros(1)))


@pytest.mark.parametrize("grad", [False, True])
def test_one_bias_for_all_heads(grad, restore_registry):
    """A function may have logits (1, 1, T, S)."""
    synthesizers.register_synthesizer("distance")(Distance)
    module, x, state = make_attention("distance").eval(), torch.randn(5, 3, 6), {}
    with torch.set_grad_enabled(grad):
        out = torch.cat([module(x[t : t + 1], incremental_state=state)[0] for t in range(5)])
    torch.testing.assert_close(out, module(x, attn_mask=future_mask(5))[0])
    distances = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    expected = torch.softmax(-distances.float(), dim=1).expand(2, 3, 5, 5)
    torch.testing.assert_close(module(x, need_head_weights=True)[1], expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("grad", [False, True])
def test_decoding_step_by_step(spec, grad):
    """With a cache, one token at a time, reordered as by a beam, equals the whole sentence at once."""
    with torch.set_grad_enabled(grad):
        decode_step_by_step(spec)


def decode_step_by_step(spec):
    module = make_attention(spec).eval()
    T, B = 9, 3
    x = torch.randn(T, B, 6)
    orders = {4: [[2, 0, 0]], 5: [[0, 1, 2], [2, 0, 0]], 7: [[2, 1]]}  # once, twice, and a sentence that is finished
    state = {}
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 2] = True  # a hypothesis that ended; the host's search goes on with it
    for t in range(T):
        for order in orders.get(t, []):
            module.reorder_incremental_state(state, torch.tensor(order))
            x, padding = x[:, order], padding[order]
            x = torch.cat([x[:t], torch.randn(T - t, len(order), 6)])
        step = x[t : t + 1]
        mask = padding[:, t : t + 1] if padding[:, t].any() else None
        out, _ = module(step, step, step, key_padding_mask=mask, incremental_state=state)
        expected, _ = module(x, x, x, attn_mask=future_mask(T), key_padding_mask=padding)
        torch.testing.assert_close(out[0], expected[t])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_decoding_in_pieces(spec, training):
    """Several tokens at once behind a cache, as a forced prefix may come; also of a model in training mode."""
    module = make_attention(spec).train(training)
    x = torch.randn(9, 3, 6)
    expected, _ = module(x, attn_mask=future_mask(9))
    state = {}
    with torch.no_grad():
        outs = [
            module(x[a:b], incremental_state=state, attn_mask=future_mask(9)[a:b, :b])[0]
            for a, b in [(0, 1), (1, 3), (3, 9)]
        ]
    torch.testing.assert_close(torch.cat(outs), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_gradient_through_the_cache(spec):
    """Steps with a gradient have that of the whole sentence."""
    module = make_attention(spec).eval()
    x = torch.randn(5, 2, 6)
    grad = torch.randn(5, 2, 6)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    state = {}
    for t in range(5):
        module(a[t : t + 1], incremental_state=state)[0].backward(grad[t : t + 1], retain_graph=True)
    module(b, attn_mask=future_mask(5))[0].backward(grad)
    torch.testing.assert_close(a.grad, b.grad)


def test_second_derivative_through_the_cache():
    """As the plain computation has one; embedding_bag has none."""
    module = make_attention("random+vanilla").double()
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
        state = {} if cached else None
        if cached:
            out = torch.cat([module(x[t : t + 1], incremental_state=state)[0] for t in range(3)])
        else:
            out, _ = module(x, attn_mask=causal_mask(x), need_weights=True)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("spec", ["random", "vanilla"])
@pytest.mark.parametrize(
    "modes", list(itertools.permutations([torch.no_grad, torch.inference_mode, torch.enable_grad]))
)
def test_modes_in_turn(spec, modes):
    """A cache of one grad mode goes on in another, reordered in between."""
    module = make_attention(spec).eval()
    x = torch.randn(9, 2, 6)
    state = {}
    outs = []
    for i, mode in enumerate(modes):
        with mode():
            for t in range(3 * i, 3 * i + 3):
                outs.append(module(x[t : t + 1], incremental_state=state)[0].detach())
                module.reorder_incremental_state(state, torch.tensor([0, 1]))
    expected, _ = module(x, attn_mask=future_mask(9))
    torch.testing.assert_close(torch.cat(outs), expected)


@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_autocast_for_some_steps(spec, half_first):
    module = make_attention(spec).eval()
    x = torch.randn(4, 2, 6)
    state = {}
    outs = []
    with torch.no_grad():
        for t in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=(t < 2) == half_first):
                outs.append(module(x[t : t + 1], incremental_state=state)[0].float())
        expected, _ = module(x, attn_mask=future_mask(4))
    torch.testing.assert_close(torch.cat(outs), expected, atol=0.1, rtol=0)


def test_weights_have_the_type_of_the_layer():
    """Of a whole sentence and of a step alike."""
    module = make_attention("random+vanilla").to(torch.bfloat16)
    x = torch.randn(1, 2, 6, dtype=torch.bfloat16)
    for state in (None, {}):
        out, weights = module(x, incremental_state=state, need_weights=True)
        assert out.dtype == weights.dtype == torch.bfloat16


@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_padding_under_a_causal_mask(spec, monkeypatch):
    """It is behind the sentences, which a CPU checks; whether the weights are asked for makes no difference."""
    module, x, right = make_attention(spec).eval(), torch.randn(5, 2, 6), padding_mask([5, 3])
    with pytest.raises(ValueError, match="key_padding_mask: causal_mask is for sentences with all padding behind them"):
        module(x, key_padding_mask=right.flip(1), attn_mask=causal_mask(x))
    monkeypatch.setattr("fairseq_synth.masks.on_cpu", lambda _: False)
    for mask in (right, right.flip(1)):
        calls = [module(x, key_padding_mask=mask, attn_mask=causal_mask(x), need_weights=need)[0] for need in (0, 1)]
        torch.testing.assert_close(*calls)


@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_padding_and_saved_values_are_reordered(spec):
    """A beam's new order applies to the padding mask, and to values that fairseq's layer put into the cache."""
    module = make_attention(spec)
    x = torch.randn(3, 2, 6)
    padding = torch.tensor([[True, False, False], [False, False, False]])
    order = torch.tensor([1, 0])
    with torch.no_grad():
        expected = module(x[:, order], key_padding_mask=padding[order], attn_mask=future_mask(3), need_weights=True)[0]
        state = {}
        module(x[:2], key_padding_mask=padding[:, :2], incremental_state=state, attn_mask=future_mask(2))
        module.reorder_incremental_state(state, order)
        out, _ = module(x[2:, order], key_padding_mask=padding[order, 2:], incremental_state=state)
        torch.testing.assert_close(out, expected[2:])
        keys, values = torch.randn(2, 2, 2, 2, 3)
        outputs = []
        for first, last in ((order, None), (torch.tensor([0, 1]), order)):
            module._set_input_buffer(state, {"prev_key": keys[first], "prev_value": values[first]})
            if last is not None:
                module.reorder_incremental_state(state, last)
            outputs.append(module(x[2:], incremental_state=state)[0])
    torch.testing.assert_close(*outputs)


def test_the_hosts_saved_state():
    """The layer of fairseq puts keys and values into the cache where it is called with ``prev_self_attn_state``."""
    module = make_attention("random+vanilla").eval()
    x = torch.randn(4, 2, 6)
    state = {}
    keys, values = (module.split_heads(project(x[:3])) for project in (module.k_proj, module.v_proj))
    module._set_input_buffer(state, {"prev_key": keys, "prev_value": values})
    out, _ = module(x[3:], incremental_state=state)
    torch.testing.assert_close(out, module(x, attn_mask=future_mask(4))[0][3:])


@pytest.mark.parametrize("spec", ["factorized_random+vanilla", "dense+vanilla", "factorized_random+dense"])
def test_a_step_copies_no_keys_of_a_mixture(spec, monkeypatch):
    """The logits of one row are a sum; of more rows they are one product of all keys beside each other."""
    module = make_attention(spec).eval()
    joined = mock.Mock(side_effect=logits.join_features)
    monkeypatch.setattr(logits, "join_features", joined)
    state = {}
    for rows, factors in ((2, 2), (1, 1), (1, 1)):
        module(torch.randn(rows, 2, 6), incremental_state=state)
        assert all(len(call.args[0]) == factors for call in joined.call_args_list)
        joined.reset_mock()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_are_not_moved(mode):
    """A table of values grows by doubling, and leaves what no hypothesis refers to behind."""
    module = make_attention("random", max_length=64).eval()
    moves, last = 0, None
    state = {}
    with mode():
        for t in range(48):
            module(torch.randn(1, 6 if t < 32 else 2, 6), incremental_state=state)
            values = state[module.state_key("vectors")].values
            moves += values.data_ptr() != last
            last = values.data_ptr()
            assert values.size(0) <= 4 * state[module.own_table].rows.numel()
            order = torch.tensor([4, 4, 4, 0, 1, 2] if t < 31 else [1, 0])
            module.reorder_incremental_state(state, order)
            assert state[module.state_key("vectors")].values.data_ptr() == last
    assert moves <= 8


@pytest.mark.parametrize("spec", ["random", "vanilla"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_copies_of_the_cache(spec, context):
    """Copies of a reordered state go on apart, in any grad mode."""
    module = make_attention(spec).eval()
    x = torch.randn(4, 2, 6)
    state = {}
    with torch.no_grad():
        for t in range(2):
            module(x[t : t + 1], None, None, incremental_state=state)
    with context():
        module.reorder_incremental_state(state, torch.tensor([1, 0]))
    a, b = (dict(state) for _ in range(2))
    with torch.no_grad():
        other = torch.randn(1, 2, 6)
        first, _ = module(x[2:3], None, None, incremental_state=a)
        module(other, None, None, incremental_state=b)
        second, _ = module(x[3:], None, None, incremental_state=a)
        whole, _ = module(torch.cat([x[:2, [1, 0]], x[2:]]), attn_mask=future_mask(4))
    torch.testing.assert_close(torch.cat([first, second]), whole[2:])


@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_integer_masks(spec):
    """0 and 1 hide as false and true do."""
    module = make_attention(spec)
    x = torch.randn(4, 3, 6)
    future, padding = torch.ones(4, 4).triu(1).bool(), torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).bool()
    for need_weights in (False, True):
        for mask in (future, None):
            expected, _ = module(x, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
            for dtype in (torch.uint8, torch.long):
                integers = None if mask is None else mask.to(dtype)
                found, _ = module(x, key_padding_mask=padding.to(dtype), attn_mask=integers, need_weights=need_weights)
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_empty_batch(spec):
    assert make_attention(spec)(torch.zeros(5, 0, 6))[0].shape == (5, 0, 6)


@pytest.mark.parametrize("spec", SPECS)
def test_cache_holds_what_is_read(spec):
    """Keys are projected and cached only for vanilla; a sentence without padding caches no mask."""
    module = make_attention(spec)
    state = {}
    x = torch.randn(1, 2, 6)
    for _ in range(2):
        module(x, x, x, incremental_state=state)
    keys = any(SYNTHESIZERS[name].reads_query_key for name in spec.split("+"))
    assert (state[module.state_key("vectors")].keys is not None) == keys
    assert state[module.own_table].key_padding_mask is None
    assert (module.q_proj is not None) == (module.k_proj is not None) == keys


@pytest.mark.parametrize(
    "embed_dim, num_heads, of_synthesizer, message",
    [
        (8, 2, (2, 2), "the synthesizer has 2 heads of width 2, and the attention has 2 of width 4"),
        (8, 2, (1, 4), "the synthesizer has 1 heads of width 4, and the attention has 2 of width 4"),
        (9, 2, (2, 4), "embed_dim 9 is not a multiple of num_heads 2"),
    ],
)
def test_a_synthesizer_of_other_heads(embed_dim, num_heads, of_synthesizer, message):
    """It would compute something else, without an error where sizes fit by chance."""
    heads, width = of_synthesizer
    mixture = synthesizers.Mixture(("random", "vanilla"), "convex", heads, width, max_length=5, rank=2)
    with pytest.raises(ValueError, match=message):
        attention.SyntheticAttention(embed_dim, num_heads, mixture)


def test_another_key_or_value_is_refused():
    """Self-attention has one input; its views are the same input."""
    module = make_attention("random+vanilla")
    x = torch.randn(3, 2, 6)
    module(x, x[:], x.view_as(x))
    for other in (torch.randn(3, 2, 6), x.clone(), x[:2], x.transpose(0, 1)):
        with pytest.raises(ValueError, match="key: must be the same tensor as query"):
            module(x, other, x)
        with pytest.raises(ValueError, match="value: must be the same tensor as query"):
            module(x, x, other)


@pytest.mark.parametrize("spec", SPECS)
def test_trace(spec, monkeypatch):
    """torch.jit.trace records a computation that holds for another batch of the same size."""
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)

    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = make_attention(spec)

        def forward(self, x, padding):
            return self.attention(x, key_padding_mask=padding)[0]

    module = Output().eval()
    x, y = torch.randn(2, 5, 3, 6)
    # torch's own check compares rows of padding too, which may hold anything
    traced = torch.jit.trace(module, (x, padding_mask([5, 5, 3])), check_trace=False)
    other = padding_mask([5, 4, 4])
    torch.testing.assert_close(traced(y, other)[:4], module(y, other)[:4])


def test_vanilla_is_the_hosts_attention():
    """Same names, and from one seed the same bits; a loaded state dict gives the same output."""
    torch.manual_seed(0)
    stock = MultiheadAttention(12, 3, self_attention=True)
    torch.manual_seed(0)
    ours = make_attention("vanilla", embed_dim=12, num_heads=3)
    torch.manual_seed(0)
    fresh = attention.SyntheticAttention(12, 3, synthesizers.Mixture(("vanilla",), "convex", 3, 4, 12, 3))
    assert list(fresh.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), stock.state_dict().values()))
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(5, 2, 12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    torch.testing.assert_close(ours(x, x, x, padding)[0], stock(x, x, x, padding)[0])


@pytest.mark.parametrize("spec", SPECS)
def test_autocast(spec):
    """--amp: the forward and backward pass under autocast stay close to fp32."""
    module = make_attention(spec)
    x = torch.randn(6, 2, 6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, x, x, padding)
    out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), module(x, x, x, padding)[0], atol=0.1, rtol=0)
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_is_close(spec):
    """bf16 and fp16 output within a few roundings of the same weights in fp64."""
    for dtype in (torch.bfloat16, torch.float16):
        module = make_attention(spec).to(dtype)
        x = torch.randn(6, 2, 6).to(dtype)
        out, _ = module(x, x, x)
        expected, _ = module.double()(x.double())
        torch.testing.assert_close(out.double(), expected, atol=20 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", [*SPECS, "random+vanilla:1/dense+random:1"])
def test_weights_go_into_parameters(spec, mixture):
    """Before generation, once: the same output, without weights of a mixture or a scale of the dot product."""
    module = make_attention(spec, mixture).double().eval()
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    expected = module(x, attn_mask=causal_mask(x))[0]
    for _ in range(2):
        module.make_generation_fast_(name="decoder.layers.0.self_attn", need_attn=False)
        torch.testing.assert_close(module(x, attn_mask=causal_mask(x))[0], expected)
    assert not any(name.endswith("alpha") for name in module.state_dict())
    for part in module.synthesizer.mixtures():
        assert part.alpha is None and getattr(part.components, "vanilla", mock.Mock(scaling=1.0)).scaling == 1.0


@pytest.mark.parametrize("spec, mixture", [("vanilla", "convex"), ("fixed_random+vanilla", "sum")])
def test_weights_that_go_into_parameters_elsewhere(spec, mixture):
    """On the device of the projections, also where the functions have no parameters."""
    module = make_attention(spec, mixture).to("meta").half()
    (part,) = module.synthesizer.mixtures()
    queries = part.fold_weights_(module.out_proj.weight)
    assert queries.device.type == "meta" and queries.dtype == torch.float16


@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla", "random+dense", "random:1/vanilla:1"])
def test_the_state_dict_of_a_model_prepared_for_generation(spec):
    """Its numbers are others than the trained ones: no other model takes them, and it takes no trained ones."""
    prepared, other = make_attention(spec), make_attention(spec, seed=1)
    trained = prepared.state_dict()
    prepared.make_generation_fast_()
    with pytest.raises(SynthesizerError, match="^: these are weights of a model prepared for generation"):
        other.load_state_dict(prepared.state_dict())
    with pytest.raises(SynthesizerError, match="^: this model is prepared for generation and takes no weights"):
        prepared.load_state_dict(trained)
    other.make_generation_fast_()
    other.load_state_dict(prepared.state_dict())
    x = torch.randn(5, 3, 6)
    torch.testing.assert_close(other(x), prepared(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        MultiheadAttention(6, 2, self_attention=True).load_state_dict(prepared.state_dict())


def test_nothing_goes_into_the_parameters_of_a_single_function():
    module, other = make_attention("random"), make_attention("random", seed=1)
    module.make_generation_fast_()
    other.load_state_dict(module.state_dict())


@pytest.mark.parametrize("spec", ["random+dense", "random+vanilla"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
def test_a_quantized_model_is_left_as_it_is(spec):
    module = make_attention(spec).eval()
    quantized = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})
    x = torch.randn(5, 3, 6)
    expected = quantized(x)[0]
    torch.testing.assert_close(expected, module(x)[0], rtol=0.1, atol=0.1)
    quantized.make_generation_fast_()
    assert torch.equal(quantized(x)[0], expected)


@pytest.mark.parametrize("spec", ["columns", "columns:1/random:1", "columns+vanilla", "columns+dense:1/columns:1"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rows_that_are_all_alike(restore_registry, spec, dropout):
    """One row of logits stands for all T, in every way to attend; dropout differs from row to row."""
    synthesizers.register_synthesizer("columns")(Columns)

    @synthesizers.register_synthesizer("rows")
    class Rows(Columns):
        def forward(self, inputs):
            return [Bias(self.c[None, :, None, : inputs.src_len].expand(-1, -1, inputs.x.size(0), -1))]

    module, every_row = (
        make_attention(name, dropout=dropout).double().train(dropout > 0)
        for name in (spec, spec.replace("columns", "rows"))
    )
    x, padding = torch.randn(5, 3, 6).double(), padding_mask([5, 4, 2])
    calls = [{"key_padding_mask": mask, "need_weights": need} for mask in (None, padding) for need in (False, True)]
    calls += [{"attn_mask": causal_mask(x)}, {"attn_mask": future_mask(5), "need_head_weights": True}]
    for call in calls:
        found = []
        for attend in (module, every_row):
            torch.manual_seed(0)
            found.append(attend(x, **call))
        assert found[0][0].shape == x.shape
        torch.testing.assert_close(found[0], found[1])
    if not dropout:
        state = {}
        steps = [module(x[t : t + 1], incremental_state=state)[0] for t in range(5)]
        torch.testing.assert_close(torch.cat(steps), module(x, attn_mask=causal_mask(x))[0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_a_row_that_sees_no_key(spec, need_weights):
    """Its output is that of values of 0, whether the weights are asked for or not."""
    module, x = make_attention(spec).eval(), torch.randn(5, 3, 6)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[2] = True
    out, _ = module(x, attn_mask=hidden, need_weights=need_weights)
    torch.testing.assert_close(out[2], module.out_proj(torch.zeros(3, 6)))
    assert not torch.allclose(out[1], out[2])


def test_weights_that_stay(restore_registry):
    """A function that cannot take its weight in, another that reads the queries, or queries with hooks."""
    synthesizers.register_synthesizer("distance")(Distance)

    @synthesizers.register_synthesizer("keys_alone")
    class KeysAlone(synthesizers.Vanilla):
        def forward(self, inputs):
            return [Product(inputs.q.abs(), inputs.k)]

    x = torch.randn(5, 3, 6)
    modules = [make_attention(spec).eval() for spec in ("distance+vanilla", "keys_alone+vanilla", "random+vanilla")]
    modules[2].q_proj.register_forward_hook(lambda *_: None)
    for module in modules:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        expected = module(x)[0]
        module.make_generation_fast_()
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(module(x)[0], expected)


def test_weights_that_are_no_parameters():
    """As in sharded layers: views of one flat parameter."""
    module, x = make_attention("random+vanilla").train(), torch.randn(5, 3, 6)
    expected = module(x)[0]
    for proj in (module.q_proj, module.k_proj, module.v_proj):
        for name in ("weight", "bias"):
            view = getattr(proj, name).view_as(getattr(proj, name))
            delattr(proj, name)
            setattr(proj, name, view)
    torch.testing.assert_close(module(x)[0], expected)


def test_moving_average():
    """fairseq's --store-ema scales every tensor of the state dict."""
    module = make_attention("random")
    average = EMA(module, EMAConfig(store_ema=True, ema_decay=0.5))
    before = module.state_dict()
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    average.step(module)
    name = "synthesizer.components.random.R"
    torch.testing.assert_close(average.get_model().state_dict()[name], before[name] / 2)

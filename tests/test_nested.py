"""R in nested blocks is R: the same values, gradients and updates, in fewer steps of the optimizer."""

import copy

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.optim.adam import Adam
from helpers import make_attention

from fairseq_synth import nested
from fairseq_synth.masks import causal_mask
from fairseq_synth.nested import NestedMatrix, assemble, band_edges, part_of_band, without_future


@pytest.mark.parametrize("first, length", [(4, 3), (4, 4), (4, 8), (4, 13), (256, 13)])
def test_every_part(first, length, monkeypatch):
    monkeypatch.setattr(nested, "CORE", first)
    R = torch.randn(2, length, length, requires_grad=True)
    matrix = NestedMatrix(2, length)
    matrix.assign(R)
    assert set(matrix.state_dict()) <= {"matrix", "reached"} and torch.equal(matrix.state_dict()["matrix"], R)
    assert torch.equal(matrix.whole(), R) and sum(p.numel() for p in matrix.parameters()) == R.numel()
    loaded = NestedMatrix(2, length)
    loaded.load_state_dict(matrix.state_dict())
    for start in range(length):
        for rows in range(1, length - start + 1):
            for columns in range(1, length + 1):
                assert torch.equal(assemble(loaded(start, rows, columns))[0], R[:, start : start + rows, :columns])
    # a gradient is that of the matrix
    g = torch.randn(2, length - 1, length - 1)
    assemble(matrix(0, length - 1, length - 1))[0].backward(g)
    R[:, : length - 1, : length - 1].backward(g)
    whole = copy.deepcopy(matrix)
    for p, q in zip(whole.parameters(), matrix.parameters()):
        p.data = torch.zeros_like(q) if q.grad is None else q.grad
    assert torch.equal(whole.whole(), R.grad)


def test_parts_of_a_band(monkeypatch):
    """What a tile reads: views of some rows of one band, of any columns."""
    matrix = NestedMatrix(2, 16)
    R = torch.randn(2, 16, 16)
    matrix.assign(R)
    blocks = matrix(1, 12, 11)
    assert band_edges(blocks) == [3, 7, 12]
    for first, last in [(0, 3), (1, 2), (3, 7), (4, 6), (7, 12)]:
        for left, right in [(0, 11), (0, 3), (2, 9), (5, 6)]:
            part = part_of_band(blocks, slice(first, last), slice(left, right))
            assert torch.equal(assemble(part)[0], R[:, 1 + first : 1 + last, left:right])
            assert all(block.untyped_storage().data_ptr() in storages(matrix) for band in part for block in band)


def test_blocks_of_causal_rows():
    matrix = NestedMatrix(2, 16)
    blocks = matrix(0, 10, 10)
    assert [[b.size(-1) for b in band] for band in blocks] == [[4, 4, 2], [8, 2], [10]]
    assert [[b.size(-1) for b in band] for band in without_future(blocks)] == [[4], [8], [10]]


def storages(matrix):
    return {block.untyped_storage().data_ptr() for block in matrix.blocks}


def test_unreached_blocks_have_no_gradient():
    """None before the first long sentence, zeros after it, also in a copy that was saved and loaded."""
    matrix = NestedMatrix(1, 16)

    def gradients(length, module):
        module.zero_grad(set_to_none=True)
        assemble(module(0, length, length)).sum().backward()
        return [None if p.grad is None else int(p.grad.sum()) for p in module.blocks]

    assert gradients(3, matrix) == [9, None, None, None, None, None]
    assert gradients(4, matrix) == [16, None, None, None, None, None]
    assert gradients(6, matrix) == [16, 8, None, 12, None, None]
    assert gradients(3, matrix) == [9, 0, None, 0, None, None]
    resumed = NestedMatrix(1, 16)
    resumed.load_state_dict(matrix.state_dict())
    assert gradients(3, resumed) == [9, 0, None, 0, None, None]
    assert gradients(8, resumed) == [16, 16, None, 32, None, None]
    assert assemble(resumed.eval()(0, 16, 16)).shape == (1, 1, 16, 16)
    assert resumed.reached == [True, True, False, True, False, False]


def test_gradients_that_tiles_give(monkeypatch):
    """The same; and blocks right of the diagonal have none in a decoder."""
    monkeypatch.setattr("fairseq_synth.computations.SMALL", 0)

    def given(module, length, causal):
        module.zero_grad(set_to_none=True)
        x = torch.randn(length, 2, 6)
        module(x, attn_mask=causal_mask(x) if causal else None)[0].sum().backward()
        R = module.synthesizer.components["random"].R
        return [None if p.grad is None else bool(p.grad.any()) for p in R.blocks]

    encoder, decoder = (make_attention("random", max_length=16) for _ in range(2))
    assert given(encoder, 3, False) == given(decoder, 3, True) == [True, None, None, None, None, None]
    assert given(encoder, 6, False) == [True, True, None, True, None, None]
    assert given(decoder, 6, True) == [True, None, None, True, None, None]
    assert given(encoder, 3, False) == [True, False, None, False, None, None]
    assert given(decoder, 3, True) == [True, None, None, False, None, None]


def test_training_equals_one_block(monkeypatch):
    """The same weights after Adam, whatever the order of lengths once the longest has come."""

    state = make_attention("random+vanilla", max_length=16).state_dict()

    def train(first):
        monkeypatch.setattr(nested, "CORE", first)
        module = make_attention("random+vanilla", max_length=16)
        module.load_state_dict(state)
        optimizer = Adam(module.parameters(), lr=0.01, betas=(0.9, 0.98))
        torch.manual_seed(5)
        for length in (16, 3, 5, 16, 2, 9):
            x = torch.randn(length, 2, 6)
            optimizer.zero_grad()
            module(x, x, x)[0].square().sum().backward()
            optimizer.step()
        return module.state_dict()

    a, b = train(4), train(16)
    for name in set(a) - {"synthesizer.components.random.R.reached"}:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=0, msg=name)


def test_moving_average():
    """fairseq's --store-ema scales every tensor of the state dict."""
    module = make_attention("random", max_length=16)
    average = EMA(module, EMAConfig(store_ema=True, ema_decay=0.5))
    before = module.state_dict()
    for parameter in module.parameters():
        parameter.data.zero_()
    average.step(module)
    name = "synthesizer.components.random.R.matrix"
    torch.testing.assert_close(average.get_model().state_dict()[name], before[name] / 2)


def test_blocks_of_another_size(monkeypatch):
    """A checkpoint whose matrix was stored in other blocks loads, and every block then counts as reached."""
    monkeypatch.setattr(nested, "CORE", 8)
    state = NestedMatrix(1, 16).state_dict()
    monkeypatch.setattr(nested, "CORE", 4)
    matrix = NestedMatrix(1, 16)
    matrix.load_state_dict(state)
    assemble(matrix(0, 3, 3)).sum().backward()
    assert all(block.grad is not None for block in matrix.blocks)


@pytest.mark.parametrize(
    "key, shape, message", [("matrix", (2, 8, 8), "size mismatch"), ("other", (2, 9, 9), "issing")]
)
def test_wrong_state(key, shape, message):
    with pytest.raises(RuntimeError, match=message):
        NestedMatrix(2, 9).load_state_dict({key: torch.zeros(shape)})

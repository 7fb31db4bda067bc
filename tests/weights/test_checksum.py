"""Checksums: equal for equal values whatever the layout, different for everything else."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.weights import checksum, checksums, untie
from trivet.weights.checksum import (
    _BLOCK,
    _block_sums,
    _block_sums_cpu,
    _multipliers,
    _place_multipliers,
    _words,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def test_golden_small() -> None:
    """Two words worked by hand: h = g_0 (3 w_0 - 2 w_1) mod 2^64."""
    w = [int(v) for v in _place_multipliers("cpu")[:2]]
    g = int(_multipliers(0xD1B54A32D192ED03, 0, 1)[0])
    want = g * (3 * w[0] - 2 * w[1]) % 2**64
    assert checksum(torch.tensor([3, -2], dtype=torch.int32)) == f"int32[2]:{want:016x}"


def test_stored_values() -> None:
    """A checksum stored by one version of trivet must be readable by the next."""
    x = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    assert checksum(x) == "float32[100,1000]:b1f9a7d39db5c900"
    assert checksum(x.to(torch.bfloat16)) == "bfloat16[100,1000]:c54d2fd1958d38d8"


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    base = torch.randint(0, 100, (37, 29)).to(dtype)
    strided = torch.empty(29, 37, dtype=dtype).t()
    strided.copy_(base)
    fused = torch.zeros(100, 29, dtype=dtype)
    fused[11:48] = base  # a slice of a fused projection
    assert not strided.is_contiguous()
    assert checksum(base) == checksum(strided) == checksum(fused[11:48])


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_bytes(offset: int) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    assert checksum(raw[offset : offset + 20]) == checksum(raw[offset : offset + 20].clone())


def test_dtype_and_shape_matter() -> None:
    x = torch.zeros(4, 6)
    sums = {checksum(x), checksum(x.half()), checksum(x.bfloat16()), checksum(x.reshape(6, 4))}
    assert len(sums) == 4


def test_empty_and_scalar() -> None:
    assert checksum(torch.empty(0, 5)) == "float32[0,5]:0000000000000000"
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(2, 3 * _BLOCK + 5), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_exchanges_change_it(seed: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator).to(dtype)
    i, j = torch.randint(0, n, (2,), generator=generator).tolist()
    swapped = x.clone()
    swapped[i], swapped[j] = x[j], x[i]
    assert (checksum(swapped) == checksum(x)) == bool(torch.equal(swapped, x))
    one = x.clone()
    one[i] = one[i] + 1
    assert checksum(one) != checksum(x) or torch.equal(one, x)


def test_two_flipped_signs_do_not_cancel() -> None:
    x = torch.randn(1001)
    for i, j in [(1, 3), (0, 2), (7, 900)]:
        y = x.clone()
        y[[i, j]] *= -1
        assert checksum(y) != checksum(x)


def test_rows_and_blocks_swapped() -> None:
    x = torch.randn(8, _BLOCK)
    assert checksum(x[[1, 0, 2, 3, 4, 5, 6, 7]]) != checksum(x)
    assert checksum(x.roll(1, 0)) != checksum(x)
    assert checksum(x[:, torch.randperm(_BLOCK)]) != checksum(x)


@pytest.mark.parametrize("n", [1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 5 * _BLOCK + 17])
def test_other_devices_sum_the_same(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["trivet.weights.checksum"], "_PASS", 2)
    words = _words(torch.randn(n))
    place, blocks = _place_multipliers("cpu"), -(-n // _BLOCK)
    assert torch.equal(_block_sums_cpu(words, place, blocks), _block_sums(words, place, blocks))


def test_tied_tensors_once() -> None:
    embed = torch.randn(10, 4)
    named = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(4), "lm_head.weight": embed}
    once, tied = untie(named)
    assert list(once) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    sums = checksums(named)
    assert sums["lm_head.weight"] == sums["model.embed_tokens.weight"]
    assert len(sums) == 3


def test_equal_but_separate_tensors_are_not_tied() -> None:
    named = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.empty(0), "d": torch.empty(0)}
    assert untie(named)[1] == {}


def test_parameters_and_their_data_agree() -> None:
    layer = torch.nn.Linear(5, 3)
    assert checksums(dict(layer.named_parameters())) == checksums(layer.state_dict())

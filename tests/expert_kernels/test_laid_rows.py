"""bfloat16 experts on instructions of their own: a row alone has the bits it has among others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.expert_kernels.test_native import (
    ALL_FORMS,
    ISAS,
    LAID_ISAS,
    bits,
    exact,
    make_native,
    relative_error,
)
from tests.expert_kernels.test_reference import block_of, form_of, input_of

if TYPE_CHECKING:
    from expert_kernels.native import MaxIsa

pytestmark = [
    pytest.mark.skipif(not set(LAID_ISAS) & set(ISAS), reason="neither AVX512_BF16 nor AMX here"),
    pytest.mark.parametrize("isa", [isa for isa in LAID_ISAS if isa in ISAS]),
]

FORMS = {name: form for name, form in ALL_FORMS.items() if not form.is_transposed} | {
    # Outputs: whole pairs of tiles, one tile more, a part of one; inputs: whole steps, or not.
    "whole tiles": form_of(hidden_size=128, intermediate_size=64),
    "a tile more": form_of(hidden_size=112, intermediate_size=48),
    "parts of tiles": form_of(hidden_size=83, intermediate_size=99, has_bias=True),
    "odd and interleaved": form_of(
        "alpha_swiglu", hidden_size=257, intermediate_size=301, is_interleaved=True, has_bias=True
    ),
}
MOST_ROWS = 131


@pytest.mark.parametrize("name", FORMS)
def test_a_row_alone_has_the_bits_it_has_among_any_number(name: str, isa: MaxIsa) -> None:
    function = make_native(FORMS[name], "bfloat16", isa, num_threads=3)
    tensors = function.tensors_of(block_of(function))
    x = input_of(function, MOST_ROWS)
    together = function(tensors, x)
    assert relative_error(together, exact(function, tensors, x)) < 3e-2
    alone = torch.cat([function(tensors, row) for row in x.split(1)])
    assert torch.equal(bits(alone), bits(together))
    for num_rows in (*range(2, 36), 48, 64, 65, 128):
        some = function(tensors, x[-num_rows:])
        assert torch.equal(bits(some), bits(together[-num_rows:])), num_rows


def test_rows_of_several_experts_in_any_order(isa: MaxIsa) -> None:
    """As a step brings them: each expert takes rows of its own, none of them side by side."""
    function = make_native(form_of(hidden_size=96, intermediate_size=80), "bfloat16", isa, 2)
    blocks = [function.tensors_of(block_of(function, seed)) for seed in range(4)]
    x = input_of(function, 40)
    expected = [function(tensors, x) for tensors in blocks]
    order = random.Random(1)
    pair_begin, row_ids, wanted = [0], [], []
    for expert, num_rows in enumerate((17, 1, 0, 33)):
        rows = order.sample(range(40), num_rows)
        row_ids += rows
        pair_begin.append(len(row_ids))
        wanted += [expected[expert][row] for row in rows]
    places = order.sample(range(len(row_ids)), len(row_ids))
    found = torch.full((len(row_ids), function.hidden_size), float("nan"))
    addresses = [function._address(tensors) for tensors in blocks]
    function._run(addresses, pair_begin, row_ids, places, x, found)
    assert torch.equal(bits(found[places]), bits(torch.stack(wanted)))


@pytest.mark.parametrize("intermediate_size", [1, 23, 33, 63])
def test_what_lies_beyond_a_row_of_the_weights_counts_for_nothing(
    intermediate_size: int, isa: MaxIsa
) -> None:
    """The end of a row is read together with what follows it, which may be no number."""
    form = form_of("act", hidden_size=51, intermediate_size=intermediate_size, activation="linear")
    function = make_native(form, "bfloat16", isa)
    tensors = function.tensors_of(block_of(function))
    x = input_of(function, 18)
    expected = function(tensors, x)
    tensors["down"][5] = float("nan")
    found = function(tensors, x)
    assert found[:, 5].isnan().all()
    others = [i for i in range(51) if i != 5]
    assert torch.equal(bits(found[:, others]), bits(expected[:, others]))


def test_memory_behind_the_last_weight_is_not_counted(isa: MaxIsa) -> None:
    form = form_of("act", hidden_size=21, intermediate_size=5, activation="linear")
    function = make_native(form, "bfloat16", isa)
    block = block_of(function)
    expected = function(function.tensors_of(block), input_of(function, 3))
    room = torch.full((block.numel() + 4096,), 0xFF, dtype=torch.uint8)  # 0xffff: not a number
    room[: block.numel()] = block
    taken = torch.zeros(block.numel(), dtype=torch.bool)
    for tensor in function.layout.tensors:
        taken[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes] = True
    room[: block.numel()][~taken] = 0xFF
    found = function(function.tensors_of(room[: block.numel()]), input_of(function, 3))
    assert torch.equal(bits(found), bits(expected))

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What may not change a bit of attention, for every kernel: ``reference.attention_rules``; tests/gpu has more."""

from __future__ import annotations

from typing import Any

import pytest
from reference import attention_rules as rules
from reference.case import Case, on

pytestmark = pytest.mark.whole

KERNELS = ["host", "simt", "mma", "decode"]


def kernel_of(kernel: str, **case: Any) -> Any:
    """Where a kernel runs, and a case with its schedule."""
    return on(kernel, [1], [1], **case)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_is_nan_is_not_taken_for_one_without_keys(kernel):
    rules.nan_queries(*kernel_of(kernel))


@pytest.mark.parametrize(
    ("kernel", "keys", "dtype"),
    [(kernel, keys, "bf16") for kernel in KERNELS for keys in (512, 301)] + [("mma", 301, "f8e4m3")],
)
def test_where_pages_lie_does_not_change_a_bit(kernel, keys, dtype):
    rules.pages_elsewhere(*kernel_of(kernel, dtype=dtype), keys)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [*((k, d) for k in ("host", "mma", "decode") for d in ("bf16", "f8e4m3")), ("simt", "bf16")]
)
def test_slots_past_the_last_token_may_hold_anything(kernel, dtype):
    rules.poisoned_tails(*kernel_of(kernel, dtype=dtype), [1, 1, 1] if kernel == "decode" else [1, 5, 2])


@pytest.mark.parametrize(
    ("kernel", "dtype", "group", "width"),
    [
        *(("host", dtype, group, width) for dtype in ("bf16", "f8e4m3") for group in (8, 16) for width in (2, 5)),
        ("mma", "bf16", 16, 5), ("mma", "f8e4m3", 8, 3), ("decode", "bf16", 8, 2), ("decode", "f8e4m3", 8, 2),
    ],
)  # fmt: skip
def test_garbage_in_speculative_rows_does_not_reach_the_first(kernel, dtype, group, width):
    rules.garbage_queries(*kernel_of(kernel, dtype=dtype, group=group), width)


@pytest.mark.parametrize(("kernel", "new"), [("host", 12), ("simt", 12), ("mma", 40), ("decode", 2)])
def test_keys_and_finite_values_that_a_row_does_not_see_do_not_show(kernel, new):
    rules.masked_keys(*kernel_of(kernel), 50, new)


@pytest.mark.parametrize(("kernel", "new", "spread"), [("host", 12, 4), ("simt", 12, 1), ("mma", 40, 16)])
def test_a_value_that_is_not_finite_reaches_rows_of_its_tile_at_most(kernel, new, spread):
    rules.seen_infinities(*kernel_of(kernel), 50, new, spread)


@pytest.mark.parametrize("new", [[1, 1, 1], [3, 9, 20]])
def test_layers_of_other_heads_pages_and_windows_take_turns(new):
    place, case = kernel_of("host")
    rules.layers_by_turns(place, case, case, new)


@pytest.mark.parametrize(("kernel", "group"), [("host", 4), ("latent", 8)])
def test_latent_rows_hold_to_the_rules(kernel, group):
    place, case = kernel_of(kernel, head_size=160, value_size=128, group=group)
    rules.poisoned_tails(place, case, [1, 1, 1])
    rules.pages_elsewhere(place, case, 77)
    rules.garbage_queries(place, case, 5)
    assert isinstance(case, Case)

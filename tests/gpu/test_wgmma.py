# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a warpgroup on a GPU."""

import pytest
from reference.wgmma_kernels import PRODUCTS, check_product, check_started

import kvarn as kv
from kvarn.runtime import device

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def launched(kernel, *arrays):
    tensors = [torch.from_numpy(a).cuda() for a in arrays]
    kernel[(1, 1, 1), (128, 1, 1)](*tensors)
    return tensors[-1].cpu().numpy()


@pytest.mark.parametrize("dtype", [kv.bf16, kv.f16], ids=lambda d: d.name)
@pytest.mark.parametrize(("rows", "columns", "trans", "registers"), PRODUCTS)
def test_a_product_is_that_of_its_matrices(dtype, rows, columns, trans, registers):
    if device.device(0).capability[0] != 9:
        pytest.skip("wgmma is of sm_90a alone")
    check_product(launched, dtype, rows, columns, trans, registers)


@pytest.mark.parametrize("dtype", [kv.bf16, kv.f16], ids=lambda d: d.name)
@pytest.mark.parametrize("columns", [8, 32])
def test_products_under_way_are_waited_for_one_by_one(dtype, columns):
    if device.device(0).capability[0] != 9:
        pytest.skip("wgmma is of sm_90a alone")
    check_started(launched, dtype, columns)

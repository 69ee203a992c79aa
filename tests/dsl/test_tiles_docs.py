# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The code of docs/tiles.md runs, as one file; its kernels give on a GPU what they give on the host."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn.emulator import run as emulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiles.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> dict[str, Any]:
    """The names that the page's code leaves."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("tiles") / "page.py"
    file.write_text("\n".join(blocks))
    return runpy.run_path(str(file))


def test_code_of_the_page_runs(page):
    assert ".entry attention(" in page["ptx"]["attention"]


@pytest.mark.parametrize(
    ("name", "grid", "operands", "shape"),
    [
        ("largest_keys", (2, 2), ("keys",), (2, 2, 64)),
        ("scores", (2, 2), ("x", "keys"), (2, 128, 64)),
        ("attention", (1, 2), ("query", "keys", "values"), (40, 2, 64)),
    ],
)
def test_kernels_of_the_page_give_on_a_gpu_what_they_give_on_the_host(page, name, grid, operands, shape):
    kernel, given = page[name], [page[x] for x in operands]
    dtype = np.float32 if name == "largest_keys" else page["query"].dtype
    on_host, on_gpu = np.zeros(shape, dtype), np.zeros(shape, dtype)
    kernel[grid, 128](*given, on_host)
    buffer = {2: kv.bf16, 4: kv.f32}
    specs = [kv.Buffer[buffer[a.itemsize], a.ndim] if isinstance(a, np.ndarray) else a for a in (*given, on_gpu)]
    emulated.launch(kv.compile(kernel, *specs, target="sm_90a"), grid, 128, (*given, on_gpu))
    np.testing.assert_allclose(on_gpu.astype(np.float32), on_host.astype(np.float32), rtol=1e-2, atol=1e-2)
    assert on_host.any()


def test_names_of_the_page_exist():
    for name in re.findall(r"`kv\.(\w+)\(", PAGE.read_text()):
        assert hasattr(kv, name), name

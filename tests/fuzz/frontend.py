# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The worker of the front end's fuzzer: traces mutated kernels, and compiles some of them."""

from __future__ import annotations

import linecache
import sys
import types
import warnings
from collections.abc import Generator

from . import kernels
from .loop import serve


def outcomes() -> Generator[str, str, None]:
    """Send a seed, get what came of its kernel: ``ok``, ``refused``, or ``raised ...`` for what is a defect."""
    import kvarn as kv
    from kvarn.errors import KernelError

    cache = kv.CacheSpec("paged", kv.bf16, 4, 64, 16)
    specs = [
        kv.Buffer[kv.f32, 1], kv.Buffer[kv.i32, 1], kv.Buffer[kv.u32, 1], kv.Buffer[kv.bf16, 2], cache,
        kv.CollectionSpec(cache), kv.Buffer[kv.bf16, 2], 3,
    ]  # fmt: skip
    warnings.simplefilter("ignore")  # Python warns of odd syntax, such as a call of a constant
    sys.set_int_max_str_digits(0)
    outcome = "ready"
    while True:
        seed = int((yield outcome))
        text, file = kernels.program(seed), f"<fuzz {seed}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        module = types.ModuleType(f"fuzz{seed}")
        exec(compile(text, file, "exec"), vars(module))
        kernel = kv.kernel(vars(module)["f"])
        try:
            if seed % 4:
                kernel.trace(specs)
            else:
                kv.compile(kernel, *specs, target=("host", "sm_90a")[seed // 4 % 2])
            outcome = "ok"
        except KernelError as error:
            str(error)
            outcome = "refused"
        except Exception as error:
            outcome = f"raised {type(error).__name__}: {error}"
        linecache.cache.pop(file, None)


if __name__ == "__main__":
    serve(outcomes())

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Detection, in an assembler's log, of wgmma that it serialized and of setmaxnreg that it ignored.

A kernel with wgmma depends on asynchronous products and on registers that warpgroups reallocate. If an assembler drops
either, the code stays correct but becomes several times slower, and only a line of the log says so. Such a line is
treated as an error here.
"""

from __future__ import annotations

import re
import warnings

from kvarn.env import env

# C7504 and C7508: setmaxnreg ignored; C7509 to C7515: wgmma serialized; C7517 and C7519: waits and fences injected.
_LOSS = re.compile(r"\bwgmma\b.*\bserialized\b|\bsetmaxnreg\b.*\bignored\b|\bwarpgroup\.\w+ is injected\b")
_ASSERTION, _AT_A_CALL = "__assertfail", "function boundary at a function call"
_USES = re.compile(r"\b(?:wgmma\.\w|setmaxnreg\.)")
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")


class AssemblyError(RuntimeError):
    """PTX that does not assemble, or not as intended; the message quotes the assembler."""


def needs_whole_program(ptx: str) -> bool:
    """Whether PTX has instructions that an assembler degrades in relocatable code, as nvJitLink makes it."""
    return _USES.search(ptx) is not None


def losses(log: str) -> list[str]:
    """The distinct lines of a log that report serialized products or ignored register counts."""
    return list(dict.fromkeys(line.strip() for line in log.splitlines() if _LOSS.search(line)))


def refuse_losses(log: str, ptx: str, tool: str) -> None:
    """Raise if a log reports losses, or warn if ``KVARN_ALLOW_SERIALIZED`` is set.

    Losses in kernels with assertions are accepted: assertions are calls, across which no product stays asynchronous.

    Raises
    ------
    AssemblyError
        Names the kernels, and quotes the log.
    """
    found = [line for line in losses(log) if not (_ASSERTION in ptx and _AT_A_CALL in line)]
    if not found:
        return
    named = [n for line in found for n in re.findall(r"function '([^']+)'", line)] or _entries_that_use(ptx)
    text = (
        f"wgmma and setmaxnreg of kernel {', '.join(dict.fromkeys(named))} must be kept, but {tool} drops them:\n"
        + "\n".join(f"  {line}" for line in found)
        + "\nDo not use an accumulator between its product and the wait for it, fence writes before a product, and fix "
        "the register count (min_blocks=); KVARN_ALLOW_SERIALIZED=1 makes this a warning"
    )
    if not env.allow_serialized:
        raise AssemblyError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _entries_that_use(ptx: str) -> list[str]:
    starts = [(m.start(), m[1]) for m in _ENTRY.finditer(ptx)]
    ends = [at for at, _ in starts[1:]] + [len(ptx)]
    return [name for (at, name), end in zip(starts, ends, strict=True) if _USES.search(ptx, at, end)]

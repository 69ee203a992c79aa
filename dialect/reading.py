# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parses text and bytecode into modules: the one entry point for IR from users.

The text is first checked for input that MLIR's parser does not survive, and operations with named operands are
translated to the generic form, which is all that the parser accepts.
"""

from __future__ import annotations

from mlir import ir

from . import named_operands, text

_BYTECODE = b"ML\xefR"


class TextError(ValueError):
    """Text that is refused before MLIR's parser sees it; ``problem`` has the place and the message."""

    def __init__(self, problem: text.Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def parse(data: bytes, context: ir.Context, path: str | None = None) -> ir.Module:
    """The module of text or bytecode.

    Parameters
    ----------
    data : bytes
    context : mlir.ir.Context
    path : str, optional
        The file with these bytes. Locations use its name, unless named operands had to be translated first.

    Raises
    ------
    TextError
        When the text must not reach the parser, or names operands that do not exist.
    mlir.ir.MLIRError
        When MLIR refuses it; its diagnostics have line numbers of the original text.
    """
    if not data.startswith(_BYTECODE):
        found = text.problem(data)
        if found is not None:
            raise TextError(found)
        plain = data.decode("latin-1")  # one character per byte, so that columns count bytes
        try:
            generic = named_operands.positional(plain)
        except named_operands.Mistake as mistake:
            raise TextError(text.Problem.at(data, mistake.offset, mistake.message)) from None
        if generic is not plain:
            return ir.Module.parse(generic.encode("latin-1"), context)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if path is not None:
        return ir.Module.parseFile(path, context)
    return ir.Module.parse(data, context)  # pyright: ignore[reportCallIssue, reportArgumentType]

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How text and bytecode become modules: whoever is given IR reads it here.

Text is looked over first, for what MLIR's parser does not survive, and operations whose operands have names are put
into the generic form, which is the one that the parser knows.
"""

from __future__ import annotations

from mlir import ir

from . import named_operands, text

_BYTECODE = b"ML\xefR"


class TextError(ValueError):
    """Text that does not get as far as MLIR's parser; ``problem`` says where, and what is wrong."""

    def __init__(self, problem: text.Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def parse(data: bytes, context: ir.Context, path: str | None = None) -> ir.Module:
    """The module of some text or bytecode.

    Parameters
    ----------
    data : bytes
    context : mlir.ir.Context
    path : str, optional
        The file that holds just these bytes, by whose name locations go where operations are written as MLIR reads
        them.

    Raises
    ------
    TextError
        When it must not reach the parser, or names operands that there are not.
    mlir.ir.MLIRError
        When MLIR refuses it; diagnostics have the lines of the text.
    """
    if not data.startswith(_BYTECODE):
        found = text.problem(data)
        if found is not None:
            raise TextError(found)
        plain = data.decode("latin-1")  # a character a byte, in which columns count
        try:
            generic = named_operands.positional(plain)
        except named_operands.Mistake as mistake:
            raise TextError(text.Problem.at(data, mistake.offset, mistake.message)) from None
        if generic is not plain:
            return ir.Module.parse(generic.encode("latin-1"), context)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if path is not None:
        return ir.Module.parseFile(path, context)
    return ir.Module.parse(data, context)  # pyright: ignore[reportCallIssue, reportArgumentType]

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rewriting of ops by rules: one function per op class, dispatched by op name; a missing rule is an error.

Rules run with the insertion point before the op and with its location, so that the ops that they make have the user's
line. A rule returns the values that replace the op's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mlir import ir

from kvarn import settings
from kvarn.dialect import native, page_orders
from kvarn.dialect.base import Kv

from . import rewrite_counts
from .pass_base import PassFailure, blame, fail, is_interrupt

Rule = Callable[..., Sequence[ir.Value] | ir.Value | None]
Kv.listeners.append(settings.declared)
page_orders.listeners.append(lambda order: settings.declared(order.element))
_MOST_ITERATIONS = 16  # of rules of other packages that make ops with such rules


def walk(root: Any, match: Callable[[str], bool] | None = None) -> list[ir.Operation]:
    """All ops under (and with) ``root``, or those with a matching name, outer before inner, in program order.

    ``match`` has to depend on the name alone: the native walk asks once per name. Without the native library every op
    costs a call into Python.
    """
    native_walk = native.walker()
    if native_walk is not None:
        return native_walk(root.operation._CAPIPtr, ir.Operation._CAPICreate, match)
    found: list[ir.Operation] = []
    advance = ir.WalkResult.ADVANCE

    def visit(op: ir.Operation) -> ir.WalkResult:
        if match is None or match(op.name):
            found.append(op)
        return advance

    called_for_each(root, visit)
    return found


def called_for_each(root: Any, visit: Callable[[ir.Operation], ir.WalkResult]) -> None:
    """Call ``visit`` with every op under (and with) ``root``, outer before inner. Ctrl-C in it stays Ctrl-C."""
    try:
        root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    except RuntimeError as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from None
        raise


def ops_named(root: Any, *names: str) -> list[ir.Operation]:
    """All ops of the given names, in program order."""
    return walk(root, set(names).__contains__)


def kv_ops(root: Any) -> list[ir.Operation]:
    """All ops of the kv dialect, in program order."""
    return walk(root, lambda name: name.startswith("kv."))


_MODULES = ("gpu.module", "builtin.module")


def in_modules(root: Any, *names: str) -> list[ir.Operation]:
    """Ops with these names that are directly in a module, or in a module in it; other regions are not searched."""
    found: list[ir.Operation] = []
    for region in root.operation.regions:
        for block in region.blocks:
            for op in block.operations:
                operation = op.operation
                if operation.name in names:
                    found.append(operation)
                if operation.name in _MODULES:
                    found += in_modules(operation, *names)
    return found


def functions(root: Any) -> list[ir.Operation]:
    """Every ``gpu.func`` and ``func.func`` of a module."""
    return in_modules(root, "gpu.func", "func.func")


def kernels(module: ir.Module) -> Iterator[ir.Operation]:
    """Every ``gpu.func`` with the attribute ``gpu.kernel``, and host functions made from one."""
    yield from filter(is_kernel, functions(module))


def is_kernel(function: ir.Operation) -> bool:
    """Whether a function is a kernel, or a host function made from one."""
    return "gpu.kernel" in function.attributes or "kv.host_kernel" in function.attributes


def is_flat(function: ir.Operation) -> bool:
    """Whether a kernel has no handles or buffers, since the pipeline was entered after ``flatten-kv-types``."""
    return "kv.params" in function.attributes


class Rules:
    """A table of rules by op name; ``@rules.lowers(OpClass, ...)`` fills it."""

    def __init__(self) -> None:
        self.table: dict[str, Rule] = {}

    def lowers(self, *op_classes: Any) -> Callable[[Rule], Rule]:
        """Declare the rule of op classes (or op names)."""

        def declare(rule: Rule) -> Rule:
            settings.declared(rule)
            for c in op_classes:
                self.table[c if isinstance(c, str) else c.OPERATION_NAME] = rule
            return rule

        return declare

    @property
    def outside(self) -> dict[str, Rule]:
        """The rules of other packages."""
        return {name: rule for name, rule in self.table.items() if not rule.__module__.startswith("kvarn.")}

    def apply_outside(self, root: Any, *args: Any) -> None:
        """Apply the rules of other packages until no op with such a rule is left.

        The resulting ops may be kv ops, to which kvarn's rules then apply as to those of the kernel.
        """
        rules = self.outside
        if not rules:  # a walk takes a call into Python per op
            return
        for _ in range(_MOST_ITERATIONS):
            found = walk(root, rules.__contains__)
            if not found:
                return
            for op in found:
                self._lower(op, rules[op.name], args)
        for op in walk(root, rules.__contains__):
            fail(op, f"is still there after {_MOST_ITERATIONS} iterations: its rule, or another, makes it again")

    def _lower(self, op: ir.Operation, rule: Rule, args: Sequence[Any]) -> None:
        name, location = op.name, op.location
        rewrite_counts.done(name)
        with ir.InsertionPoint(op), location:
            try:
                values = rule(op.opview, *args)
            except (PassFailure, ir.MLIRError):  # pyright: ignore[reportAttributeAccessIssue]
                raise
            except Exception as error:
                blame(error, f"rule '{getattr(rule, '__name__', rule)}' of '{name}'", location)
                raise
            replace(op, values)

    def knows(self, name: str) -> bool:
        """Whether `apply` visits ops with this name: those with a rule, and all kv ops."""
        return name in self.table or name.startswith("kv.")

    def apply(
        self,
        root: Any,
        *args: Any,
        leave: Callable[[str], bool] | None = None,
        found: Sequence[ir.Operation] | None = None,
    ) -> int:
        """Apply the rules to all ops that have one, and fail on other kv ops unless ``leave`` accepts their name.

        ``found`` are the ops to rewrite, in program order, from a caller that has called :meth:`apply_outside`. Returns
        the number of rewritten ops.
        """
        count = 0
        if found is None:
            self.apply_outside(root, *args)
        for op in walk(root, self.knows) if found is None else found:
            rule = self.table.get(op.name)
            if rule is None:
                if leave is not None and leave(op.name):
                    continue
                fail(op, "has no lowering rule here")
            self._lower(op, rule, args)
            count += 1
        return count


def erase_unused(ops: Iterable[ir.Operation]) -> None:
    """Erase ops of one result each, given in order, if they are unused, and then the ops that only they used."""
    for op in reversed(list(ops)):
        if not any(True for _ in op.results[0].uses):
            op.erase()


def replace(op: ir.Operation, values: Sequence[ir.Value] | ir.Value | None) -> None:
    """Replace an op's results by values, one each, and erase it."""
    new = [] if values is None else [values] if isinstance(values, ir.Value) else list(values)
    if len(new) != len(op.results):
        fail(op, f"was given {len(new)} replacements for its {len(op.results)} results")
    for old, value in zip(op.results, new, strict=True):
        old.replace_all_uses_with(value)
    op.erase()


def enclosing(op: ir.Operation, *names: str) -> ir.Operation | None:
    """The innermost op around ``op`` with one of the names."""
    parent = op.parent
    while parent is not None:
        operation = parent.operation
        if operation.name in names:
            return operation
        parent = operation.parent
    return None


def is_inside(op: ir.Operation, outer: ir.Operation) -> bool:
    """Whether an op is ``outer`` or within one of its regions."""
    at: ir.Operation | None = op
    while at is not None and at != outer:
        at = at.parent.operation if at.parent is not None else None
    return at is not None


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op that makes a value; None for a block argument."""
    owner = value.owner
    return owner.operation if not isinstance(owner, ir.Block) else None

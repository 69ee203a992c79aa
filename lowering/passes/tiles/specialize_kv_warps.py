# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Warp specialization: a producer warpgroup copies ahead of the consumers, as far as stages are free.

Copies are taken out of the kernel with everything that they need (loops without their carried values, branches,
scalars), and put into a branch that only the first warpgroups take. The other warpgroups keep the rest, including tiles
before the loop and everything after it. The roles share only the mbarriers of the circular buffers. Registers move from
the producer, which needs few, to the consumers (``setmaxnreg``), unless the schedule's ``registers`` is false.
Schedules without a producer, and copies whose addresses depend on loop-carried values, are not changed.

If the kernel starts with a wait for earlier kernels (``griddepcontrol``), a warp that copies only ``constant`` tiles
does not wait: its stages are full when the others continue.

Before:  scf.for ... { kv.producer_acquire ; kv.copy_start ; %k = kv.consumer_wait ; ... }
After:   scf.if (kv.is_role "producer") { kv.set_registers 40 ; scf.for ... { kv.producer_acquire ; kv.copy_start } }
         else { kv.set_registers 232 ; scf.for ... { %k = kv.consumer_wait ; ... } }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import scf

from kvarn.dialect import types
from kvarn.dialect.ops import staging
from kvarn.dialect.ops.common import i64_attr
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, is_inside, ops_named, walk
from kvarn.lowering.schedules.limits import role_registers
from kvarn.lowering.tiles.ir import backward, cloned, is_position, is_tile, producers_of, schedule_of, tiled

ROLES = "kv.roles"  # on the branch that separates the producer from the consumers
BEFORE_WAITING = (
    "arith.", "gpu.", "memref.dim", "tensor.splat", "kv.make_stages", "kv.buffer_operand", "kv.tile_index",
    "kv.tile_broadcast",
)  # fmt: skip
PRODUCERS = ("kv.producer_acquire", "kv.copy_start", "kv.copy_rows_start")


def reads_scalars(op: ir.Operation) -> bool:
    """Whether an op is a branch that only reads and computes scalars, which every role may do itself."""
    if op.name != "scf.if" or not len(op.results) or not all(isinstance(v.type, ir.IntegerType) for v in op.results):
        return False
    return all(x.name.startswith("arith.") or x.name in ("memref.load", "scf.yield") for x in walk(op)[1:])


class Slice:
    """Copies of some ops and of everything that they need, in their loops and branches."""

    def __init__(self, roots: list[ir.Operation], top: ir.Operation):
        self.needed: set[ir.Operation] = set()
        self.kept: dict[ir.Value, list[int]] = {}  # by induction variable: the values that the copied loop carries
        self.carried = False  # whether a needed value exists only in consumers
        stack = list(roots)
        while stack:
            op = stack.pop()
            if op in self.needed:
                continue
            self.needed.add(op)
            parent = op.parent.operation
            if op != top and parent not in self.needed:
                stack.append(parent)
            # Loops need their bounds, branches their condition, other ops with regions everything in them.
            values = list(op.operands)[:3] if op.name == "scf.for" else list(op.operands)
            if op.regions and (op.name not in ("scf.for", "scf.if") or reads_scalars(op)):
                values += [v for x in walk(op)[1:] for v in x.operands]
            for value in values:
                maker = defining_op(value)
                if maker is None:
                    argument = ir.BlockArgument(value)
                    owner = argument.owner.owner.operation
                    if owner.name != "scf.for" or argument.arg_number == 0 or not is_inside(owner, top):
                        continue
                    self.carried |= not isinstance(value.type, ir.IntegerType)
                    kept = self.kept.setdefault(argument.owner.arguments[0], [])
                    if argument.arg_number - 1 not in kept:
                        kept.append(argument.arg_number - 1)
                        ends = argument.owner.operations[len(argument.owner.operations) - 1].operation.operands
                        for x in (ends[argument.arg_number - 1], owner.operands[2 + argument.arg_number]):
                            made = defining_op(x)
                            if made is not None and is_inside(made, top):
                                stack.append(made)
                elif is_inside(maker, top):
                    control = maker.name in ("scf.for", "scf.if") and not reads_scalars(maker)
                    self.carried |= control
                    stack.append(maker)

    def operands(self, op: ir.Operation) -> list[ir.Value]:
        """The operands of a copied op; for a loop, its bounds and the values that it still carries."""
        if op.name != "scf.for":
            return list(op.operands)
        kept = self.kept.get(op.regions[0].blocks[0].arguments[0], [])
        return [*list(op.operands)[:3], *(op.operands[3 + i] for i in kept)]

    def emit(self, op: ir.Operation, values: dict[ir.Value, ir.Value]) -> None:
        """Copy one op to the insertion point."""
        with op.location:
            if op.name == "scf.for":
                inner = op.regions[0].blocks[0]
                kept = self.kept.get(inner.arguments[0], [])
                low, high, step, *inits = [values.get(v, v) for v in self.operands(op)]
                loop = scf.ForOp(low, high, step, inits)
                values[inner.arguments[0]] = loop.induction_variable
                values.update(zip((inner.arguments[1 + i] for i in kept), loop.inner_iter_args, strict=True))
                with ir.InsertionPoint(loop.body):
                    self.emit_block(inner, values)
                    ends = inner.operations[len(inner.operations) - 1].operation.operands
                    scf.yield_([values.get(ends[i], ends[i]) for i in kept])
            elif op.name == "scf.if" and not reads_scalars(op):
                branch = scf.IfOp(values.get(op.operands[0], op.operands[0]), has_else=len(op.regions[1].blocks) > 0)
                for region, made in zip(op.regions, (branch.then_block, branch.else_block), strict=False):
                    if region.blocks:
                        with ir.InsertionPoint(made):
                            self.emit_block(region.blocks[0], values)
                            scf.yield_([])
            else:
                cloned(op, values)

    def emit_block(self, block: ir.Block, values: dict[ir.Value, ir.Value]) -> None:
        for op in block.operations:
            if op.operation in self.needed:
                self.emit(op.operation, values)


def copied_by(op: ir.Operation) -> str:
    """How the op's circular buffer is filled."""
    buffer = op if op.name == "kv.make_stages" else defining_op(op.operands[0])
    return ir.StringAttr(buffer.attributes["copy"]).value if buffer is not None else ""


def divided(roots: list[ir.Operation]) -> dict[str, list[ir.Operation]] | None:
    """The acquires and copies of each role among the producer's warps; None if there are too few warps."""
    by_tma: dict[ir.Value, list[ir.Operation]] = {}
    rest = []
    for op in roots:
        if copied_by(op) == "tma":
            by_tma.setdefault(op.operands[0], []).append(op)
        else:
            rest.append(op)
    if len(by_tma) + bool(rest) > len(staging.PRODUCER_WARPS):
        return None
    found = dict(zip(staging.PRODUCER_WARPS, by_tma.values(), strict=False))
    first = {warp: role for role, warp in staging.PRODUCER_REST.items()}
    return {**found, first[len(found)]: rest} if rest else found


def by_buffers(roots: list[ir.Operation]) -> dict[str, list[ir.Operation]]:
    """The acquires and copies of two producer warpgroups, each with its own buffer that it fills by converting.

    So one warpgroup can wait for boxes while the other converts. Without boxes there is more to do than waiting. All
    other copies go to the second warpgroup, whose tiles are needed later.
    """
    copies = [op.opview for op in roots if op.name == "kv.copy_start"]
    staged = list(dict.fromkeys(op.operands[0] for op in roots if copied_by(op) == "staged"))
    if len(staged) != len(staging.PRODUCER_GROUPS) or any(copy.descriptor is None for copy in copies):
        return {"producer": roots}
    first = [op for op in roots if op.operands[0] == staged[0]]
    return dict(zip(staging.PRODUCER_GROUPS, (first, [op for op in roots if op not in first]), strict=True))


def _addresses(copy: ir.Operation) -> bool:
    """Whether threads compute addresses for a copy to staging memory: of rows, or of scales."""
    op = copy.opview
    return op.descriptor is None or types.spec_of(op.cache.type).quantized


def top_level(function: ir.Operation, op: ir.Operation) -> ir.Operation:
    """The op of the function's first block that is, or contains, an op."""
    body = function.regions[0].blocks[0]
    while op.block != body:
        op = op.parent.operation
    return op


def of_consumers(top: ir.Operation, asked: set[ir.Value]) -> list[ir.Operation]:
    """The ops of the function's first block that only consumers run: tiles before ``top``, it, and all after it.

    Positions, and scalars broadcast to tiles, stay in place if copies use them, as the rows to copy.
    """
    shared = backward([op for op in map(defining_op, asked) if op is not None and is_position(op)], is_position)
    body = [op.operation for op in top.block.operations]
    at = body.index(top)
    found: list[ir.Operation] = []
    made: set[ir.Value] = set()
    for op in body[:at]:
        values = {v for x in walk(op) for v in (*x.operands, *x.results)}
        if op not in shared and op.name != "arith.constant" and (values & made or any(map(is_tile, values))):
            found.append(op)
            made.update(op.results)
    return [*found, *body[at:-1]]


def set_registers(count: int, action: str) -> None:
    staging.SetRegistersOp(i64_attr(count), ir.StringAttr.get(action))


def is_role(role: str) -> ir.Value:
    return staging.IsRoleOp(ir.StringAttr.get(role)).operation.results[0]


def waits_before(top: ir.Operation) -> list[ir.Operation]:
    """The griddepcontrol ops before ``top`` in the function's first block, if no op after the first reads memory."""
    found: list[ir.Operation] = []
    for op in (x.operation for x in top.block.operations):
        if op == top:
            return found
        if op.name == "nvvm.griddepcontrol":
            found.append(op)
        elif found and not op.name.startswith(BEFORE_WAITING):
            return []
    return found


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        schedule = schedule_of(function)
        roots = ops_named(function, *PRODUCERS)
        if not schedule.get("producer") or not roots:
            continue
        kinds = {copied_by(op) for op in ops_named(function, "kv.copy_start")}
        how = "tma" if kinds <= {"tma"} else next((x for x in ("staged", "transposed") if x in kinds), "rows")
        tops = {top_level(function, op) for op in roots}
        if len(tops) > 1:
            remark(function, "missed", f"no producer: {len(tops)} separate loops load tiles")
            continue
        top = tops.pop()
        # By TMA one warp per buffer copies, so that none waits for another's stage; the other warps copy rows. If two
        # warpgroups convert, each has a buffer.
        groups = kinds == {"staged"} and producers_of(schedule) == len(staging.PRODUCER_GROUPS)
        shares = divided(roots) if "tma" in kinds else by_buffers(roots) if groups else {"producer": roots}
        if shares is None:
            remark(function, "missed", "no producer: more circular buffers than copying warps")
            continue
        copies = {role: Slice(share, top) for role, share in shares.items()}
        if any(x.carried for x in copies.values()):
            remark(function, "missed", "no producer: the tiles' addresses depend on consumers' results")
            continue
        moved = of_consumers(top, {v for x in copies.values() for op in x.needed for v in x.operands(op)})
        made = {v for op in moved[: moved.index(top)] for v in op.results}
        if any(v in made for x in copies.values() for op in x.needed for v in x.operands(op)):
            remark(function, "missed", "no producer: the tiles' addresses depend on tiles before the loop")
            continue
        addressed = how == "staged" and any(map(_addresses, ops_named(function, "kv.copy_start")))
        shared_by = schedule.get("consumers", 2), producers_of(schedule), schedule.get("occupancy", 1)
        registers = role_registers(*shared_by, how, addressed) if schedule.get("registers", True) else None
        starts = {role: [op for op in share if op.name == "kv.copy_start"] for role, share in shares.items()}
        ahead = {role for role, ops in starts.items() if ops and all("constant" in op.attributes for op in ops)}
        waits = waits_before(top) if ahead and "producer" not in shares else []
        with ir.InsertionPoint(top), top.location:
            branch = scf.IfOp(is_role("producer"), has_else=True)
            branch.operation.attributes[ROLES] = ir.UnitAttr.get()
            with ir.InsertionPoint(branch.then_block):
                if registers:
                    set_registers(registers[0], "decrease")
                for role, share in copies.items():
                    if role == "producer":
                        share.emit(top, {})
                        continue
                    warp = scf.IfOp(is_role(role))
                    with ir.InsertionPoint(warp.then_block):
                        for op in waits if role not in ahead else ():
                            cloned(op, {})
                        share.emit(top, {})
                        scf.yield_([])
                scf.yield_([])
            with ir.InsertionPoint(branch.else_block):
                if registers:
                    set_registers(registers[1], "increase")
                for op in waits:
                    cloned(op, {})
                end = scf.YieldOp([])
        for op in moved:
            op.move_before(end.operation)
        for op in (*roots, *waits):
            op.erase()

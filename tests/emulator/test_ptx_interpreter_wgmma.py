# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products under way in the PTX interpreter: what they compute, and what must not be touched before a wait covers them.

The kernels are PTX: an image of shared memory is copied there, a product is started, and every thread's accumulators
are written out.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvarn.emulator import grid as ptx

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry product(.param .u64 image, .param .u64 out, .param .u32 words, .param .u64 of_a, .param .u64 of_b)
.reqntid 128, 1, 1
.minnctapersm 1
{
  mov.u32 %tid, %tid.x;
  ld.param.u64 %image, [image];
  ld.param.u64 %out, [out];
  ld.param.u32 %words, [words];
  ld.param.u64 %da, [of_a];
  ld.param.u64 %db, [of_b];
  mov.u32 %i, %tid;
copy:
  setp.ge.u32 %done, %i, %words;
  @%done bra copied;
  mul.wide.u32 %at, %i, 4;
  add.s64 %at, %at, %image;
  ld.global.b32 %w, [%at];
  shl.b32 %to, %i, 2;
  st.shared.b32 [%to], %w;
  add.s32 %i, %i, 128;
  bra copy;
copied:
  FENCE
  bar.sync 0;
"""
A_PLACE, B_PLACE = 0, 8192  # in shared memory


def accumulators(n: int, prefix: str = "%f") -> list[str]:
    return [f"{prefix}{k}" for k in range(n // 2)]


def product(n: int, a: str = "%da", adds: int = 0, flags: str = "0, 0", prefix: str = "%f", kind: str = "bf16") -> str:
    sums = ", ".join(accumulators(n, prefix))
    steps = 32 if kind.startswith("e") else 16
    tail = "1, 1" if steps == 32 else f"1, 1, {flags}"
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{steps}.f32.{kind}.{kind}"
    return f"setp.ne.u32 %adds, {adds}, 0; {name} {{{sums}}}, {a}, %db, %adds, {tail};"


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"


def wait(pending: int) -> str:
    return f"wgmma.wait_group.sync.aligned {pending};"


def store(n: int, prefix: str = "%f") -> str:
    """Every thread's accumulators, one after another."""
    lines = [f"mul.wide.u32 %row, %tid, {2 * n};", "add.s64 %row, %row, %out;"]
    return "\n".join([*lines, *(f"st.global.f32 [%row+{4 * k}], {r};" for k, r in enumerate(accumulators(n, prefix)))])


def run(body: str, image: np.ndarray, n: int = 8, a: int = 0, b: int = 0, order=None, fenced: bool = True):
    """The product's rows [64, n], as the accumulators of the threads say."""
    image = np.ascontiguousarray(image.view(np.uint8))
    out = np.full((128, n // 2), np.nan, np.float32)
    text = HEAD.replace("FENCE", "fence.proxy.async;" if fenced else "") + body + "\n  ret;\n}\n"
    values = [image.ctypes.data, out.ctypes.data, image.size // 4, a, b]
    ptx.launch(text, "product", (1, 1, 1), (128, 1, 1), values, [image, out], 65536, order)
    found = np.empty((64, n), np.float32)
    thread = np.arange(128)
    for k in range(n // 2):
        found[thread // 32 * 16 + thread % 32 // 4 + k // 2 % 2 * 8, k // 4 * 8 + thread % 4 * 2 + k % 2] = out[:, k]
    return found


# --- layouts: by rows and 16-byte chunks, as the PTX manual draws them -------------------------------


def k_major(x: np.ndarray, swizzle: int) -> tuple[np.ndarray, int]:
    """An image of [row, step] and its descriptor at 0: eight rows of ``swizzle`` bytes (0: 16) are an atom."""
    rows, steps = x.shape
    size = x.itemsize
    wide = swizzle or 16
    image = np.zeros((-(-rows // 8), -(-steps * size // wide) if not swizzle else 1, 8, wide), np.uint8)
    for r in range(rows):
        for chunk in range(steps * size // 16):
            data = x[r, chunk * 16 // size : (chunk + 1) * 16 // size].view(np.uint8)
            if swizzle:
                at = chunk ^ (r % 8 * swizzle // 128)
                image[r // 8, 0, r % 8, 16 * at : 16 * at + 16] = data
            else:
                image[r // 8, chunk, r % 8] = data
    stride, leading = image[0].nbytes, 128 if not swizzle else 0
    return image.ravel(), descriptor(leading, stride, swizzle)


def mn_major(x: np.ndarray, swizzle: int) -> tuple[np.ndarray, int]:
    """As ``k_major``, with the rows side by side: atoms of eight steps of ``swizzle`` bytes of rows."""
    rows, steps = x.shape
    each = (swizzle or 16) // 2
    image = np.zeros((-(-rows // each), steps // 8, 8, each * 2), np.uint8)
    for k in range(steps):
        for r in range(0, rows, 8):
            chunk = r % each // 8 ^ (k % 8 * swizzle // 128)
            image[r // each, k // 8, k % 8, 16 * chunk : 16 * chunk + 16] = np.ascontiguousarray(x[r : r + 8, k]).view(
                np.uint8
            )
    along_rows, along_steps = image[0].nbytes, image[0, 0].nbytes
    offsets = (along_rows, along_steps) if swizzle else (along_steps, along_rows)
    return image.ravel(), descriptor(*offsets, swizzle)


def descriptor(leading: int, stride: int, swizzle: int) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62


def operands(n: int, swizzle=(128, 128), trans=(False, False), dtype=ml_dtypes.bfloat16):
    """A and B as floats, the image of both, and the two descriptors."""
    steps = 32 // np.dtype(dtype).itemsize
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-4, 5, (rows, steps)).astype(np.float32) for rows in (64, n))
    image = np.zeros(65536, np.uint8)
    found = []
    for x, place, s, t in zip((a, b), (A_PLACE, B_PLACE), swizzle, trans, strict=True):
        bytes, described = (mn_major if t else k_major)(x.astype(dtype), s)
        image[place : place + bytes.size] = bytes
        found.append(described | place >> 4)
    return a, b, image[: B_PLACE + bytes.size], *found


A, B, IMAGE, DA, DB = operands(8)


def check(body: str, **options) -> None:
    np.testing.assert_array_equal(run(body, IMAGE, a=DA, b=DB, **options), A @ B.T)


def refuse(body: str, message: str, **options) -> None:
    with pytest.raises(ptx.EmulationError, match=message):
        run(body, IMAGE, a=DA, b=DB, **options)


# --- what is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("n", [8, 24, 256])
def test_a_product_reads_every_layout_of_shared_memory(n, swizzle, trans):
    a, b, image, da, db = operands(n, (swizzle, swizzle), trans)
    body = [FENCE, product(n, flags=f"{int(trans[0])}, {int(trans[1])}"), COMMIT, wait(0), store(n)]
    np.testing.assert_array_equal(run("\n".join(body), image, n, da, db), a @ b.T)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_a_product_of_bytes_has_32_steps(kind):
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    a, b, image, da, db = operands(16, (32, 128), dtype=dtype)
    body = [FENCE, product(16, kind=kind), COMMIT, wait(0), store(16)]
    np.testing.assert_array_equal(run("\n".join(body), image, 16, da, db), a @ b.T)


SPLIT = f"{FENCE}\n{product(8)}\n{COMMIT}\nWHILE\n{wait(0)}\n{store(8)}"
OTHER = product(8, prefix="%g")


@pytest.mark.parametrize("order", [*ptx.ORDERS, *ptx.RANDOM], ids=str)
def test_a_product_may_be_under_way_while_others_are(order):
    body = [
        FENCE, product(8), COMMIT, OTHER, COMMIT, wait(1), store(8),
        *(f"add.f32 %f{k}, %f{k}, 0f3F800000;" for k in range(4)), wait(0), store(8, "%g"),
    ]  # fmt: skip
    check("\n".join(body), order=order)


def test_products_follow_on_each_other_without_a_wait():
    body = f"{FENCE}\n{product(8)}\n{product(8, adds=1)}\n{COMMIT}\n{wait(0)}\n{store(8)}"
    np.testing.assert_array_equal(run(body, IMAGE, a=DA, b=DB), 2 * A @ B.T)


def test_accumulators_under_way_may_be_renamed():
    """LLVM copies what an asm statement takes and gives back; an assembler makes one register of both."""
    moves = "\n".join(f"mov.b32 %g{k}, %f{k};" for k in range(4))
    back = "\n".join(f"mov.b32 %f{k}, %g{k};" for k in range(4))
    check(SPLIT.replace("WHILE", f"{moves}\n{back}"))
    follows = product(8, adds=1, prefix="%g")
    body = f"{FENCE}\n{product(8)}\n{COMMIT}\n{moves}\n{follows}\n{COMMIT}\n{wait(0)}\n{store(8, '%g')}"
    np.testing.assert_array_equal(run(body, IMAGE, a=DA, b=DB), 2 * A @ B.T)


WORDS = "\n".join(f"mov.b32 %a{k}, 0x3F803F80;" for k in range(4))  # ones


def test_a_may_be_in_registers():
    body = f"{WORDS}\n{FENCE}\n{product(8, '{%a0, %a1, %a2, %a3}', flags='0')}\n{COMMIT}\n{wait(0)}\n{store(8)}"
    np.testing.assert_array_equal(run(body, IMAGE, a=DA, b=DB), np.ones((64, 16)) @ B.T)


# --- what must not be touched ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [*ptx.ORDERS, *ptx.RANDOM], ids=str)
def test_reading_an_accumulator_under_way_is_an_error(order):
    message = r"add.f32 .*: reads %f1, an accumulator of a product under way .*: wgmma.mma_async.*PTX line \d+"
    refuse(SPLIT.replace("WHILE", "add.f32 %x, %f1, %f1;"), message, order=order)


def test_a_wait_that_covers_older_groups_only_is_no_wait_for_the_newest():
    refuse(f"{FENCE}\n{product(8)}\n{COMMIT}\n{OTHER}\n{COMMIT}\n{wait(1)}\n{store(8, '%g')}", "reads %g0")
    refuse(f"{FENCE}\n{product(8)}\n{wait(0)}\n{store(8)}", "reads %f0")  # in no group


def test_writing_an_accumulator_under_way_is_an_error():
    refuse(SPLIT.replace("WHILE", "mov.b32 %f2, 0;"), "overwrites %f2, an accumulator of a product under way")


def test_writing_a_register_of_a_under_way_is_an_error():
    body = f"{WORDS}\n{FENCE}\n{product(8, '{%a0, %a1, %a2, %a3}', flags='0')}\n{COMMIT}\nmov.b32 %a3, 0;\n{wait(0)}"
    refuse(body, "overwrites %a3, which a product under way reads as A")
    check(body.replace("mov.b32 %a3, 0;", "").replace(WORDS, "") + "\n" + SPLIT.replace("WHILE", ""))


@pytest.mark.parametrize("place", [A_PLACE, B_PLACE])
@pytest.mark.parametrize("order", [*ptx.ORDERS, *ptx.RANDOM], ids=str)
def test_shared_memory_overwritten_under_a_product_is_an_error(order, place):
    late = f"bar.sync 0;\nshl.b32 %to, %tid, 2;\nst.shared.b32 [%to+{place}], 0x41234123;\n"
    message = r"wgmma.wait_group.*: shared memory at memory.* was overwritten while a product under way read it"
    refuse(SPLIT.replace("WHILE", late), message, order=order)
    check(SPLIT.replace("WHILE", "") + late, order=order)


# --- fences and whole warpgroups -------------------------------------------------------------------


def test_a_written_accumulator_needs_a_fence():
    body = f"{SPLIT.replace('WHILE', '')}\nadd.f32 %f3, %f3, %f3;\nHERE\n{product(8, adds=1)}\n{COMMIT}\n{wait(0)}"
    message = "%f3 was written by an ordinary instruction, and no wgmma.fence came after that"
    refuse(body.replace("HERE", ""), message)
    check(body.replace("HERE", FENCE))
    moved = "mul.f32 %h3, %f3, %f3;\nHERE\nmov.b32 %f3, %h3;"  # the move is where it was computed
    body = body.replace("add.f32 %f3, %f3, %f3;\nHERE", moved)
    check(body.replace("HERE", FENCE))
    refuse(body.replace("HERE", ""), "%f3 was written by an ordinary instruction")


def test_a_register_of_a_needs_a_fence_after_it_was_written():
    body = f"{FENCE}\n{WORDS}\n{product(8, '{%a0, %a1, %a2, %a3}', flags='0')}\n{COMMIT}\n{wait(0)}\n{store(8)}"
    refuse(body, "%a0 was written by an ordinary instruction")
    refuse(SPLIT.replace(FENCE, "").replace("WHILE", ""), "a wgmma.fence must come before the first product")


def test_what_ordinary_stores_wrote_needs_a_proxy_fence_of_the_writer():
    for order in (ptx.ORDERS[0], *ptx.RANDOM):
        message = "reads memory.*, which thread .* wrote by an ordinary store without a fence.proxy.async"
        refuse(SPLIT.replace("WHILE", ""), message, fenced=False, order=order)
    check(SPLIT.replace("WHILE", ""))


def test_a_product_that_nothing_waits_for_is_an_error():
    refuse(f"{FENCE}\n{product(8)}\n{COMMIT}", "ends with a product without a wait: wgmma.mma_async")


def test_a_warpgroup_must_run_a_product_together():
    body = f"setp.ge.u32 %three, %tid, 96;\n@%three bra after;\n{FENCE}\n{product(8)}\n{COMMIT}\n{wait(0)}\nafter:"
    refuse(body, "warps 0 to 3 are a warpgroup, but did not run the same wgmma")


def test_another_shape_does_not_follow_on_a_product_under_way():
    half = product(16, prefix="%f").replace("setp.ne.u32 %adds, 0, 0", "setp.ne.u32 %adds, 1, 0")
    refuse(
        f"{FENCE}\n{product(8)}\n{half}\n{COMMIT}\n{wait(0)}",
        "its accumulators overlap a product in flight, and are not the same registers",
    )

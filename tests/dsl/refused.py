# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mistakes in kernels, one a function: its annotations are the specs that it is traced with.

``expected-error {{CLASS: text}}`` stands under the line that is to blame, with a caret under its column where that is
not the first; ``@TARGET`` compiles for a target, where a later pass sees the mistake. test_dsl_errors.py runs them.
"""

import kvarn as kv
from kvarn.dialect.layout import CacheSpec, CollectionSpec

PAGED = CacheSpec("paged", kv.bf16, 8, 128, 16)
F32_PAGED = CacheSpec("paged", kv.f32, 2, 64, 16)
POOL = CollectionSpec(PAGED)
MLA = CollectionSpec(CacheSpec("paged", kv.bf16, 1, 576, 16, is_mla=True))
I32, F32, BF16 = kv.Buffer[kv.i32, 1], kv.Buffer[kv.f32, 1], kv.Buffer[kv.bf16, 2]

# --- types -------------------------------------------------------------------------------------------

def floats_do_not_mix(x: F32, y: BF16):
    x[0] = x[0] * y[0, 0]
#          ^ expected-error {{KernelTypeError: * of f32 and bf16: float types do not mix, write kv.f32(x) around the bf16}}

def int_and_float_do_not_mix(x: I32, y: F32):
    y[0] = x[0] + y[0]
#          ^ expected-error {{KernelTypeError: + of i32 and f32: write kv.f32(x) around the i32}}

def int_times_float_literal(x: I32):
    x[0] = x[0] * 0.5
#          ^ expected-error {{KernelTypeError: * of i32 and the float 0.5: write kv.f32(x) around the i32}}

def true_division_of_ints(x: I32):
    x[0] = x[0] / 2
#          ^ expected-error {{KernelTypeError: / does not take i32: use // for integers, or kv.f32(x)}}

def signs_do_not_mix(x: I32, y: kv.Buffer[kv.u32, 1]):
    if x[0] < y[0]:
#      ^ expected-error {{KernelTypeError: < of i32 and u32: signs do not mix}}
        x[0] = 1

def stored_type_must_match(x: F32):
    x[0] = kv.thread_id.x
#   ^ expected-error {{KernelTypeError: what is stored in a kv.Buffer[kv.f32, 1] must be f32, got i32: write kv.f32(...)}}

def float_index(x: F32):
    x[0] = x[x[0]]
#          ^ expected-error {{KernelTypeError: the index must be an integer, got a value of type f32}}

def wrong_rank(x: F32):
    x[0] = x[0, 1]
#          ^ expected-error {{KernelTypeError: a buffer of rank 1 needs 1 indices, got 2}}

def arithmetic_on_f8(x: kv.Buffer[kv.f8e4m3, 1]):
    x[0] = x[0] + x[1]
#          ^ expected-error {{KernelTypeError: + on f8e4m3: 8-bit floats only convert}}

def literal_out_of_range(x: I32):
    x[0] = x[0] + (1 << 40)
#          ^ expected-error {{KernelError: 1099511627776 does not fit in i32}}

def branches_disagree(x: I32):
    if x[0] > 0:
        v = kv.i64(1)
    else:
        v = kv.f32(1)
    x[0] = v
#          ^ expected-error {{KernelTypeError: 'v' has no one type after a run-time condition}}

def loop_changes_a_type(x: I32, y: F32):
    s = x[0]
    for i in range(3):
#   ^ expected-error {{KernelTypeError: 's' is i32 when an iteration starts and f32 when it ends}}
        s = y[i]
    x[0] = s

def set_in_one_branch(x: I32):
    if x[0] > 0:
        k = 1
    x[0] = k
#          ^ expected-error {{KernelTypeError: 'k' is set in one branch of a run-time condition only}}

def loop_variable_after_the_loop(x: I32):
    for i in range(x[0]):
        x[i] = 0
    x[0] = i
#          ^ expected-error {{KernelTypeError: 'i' is the variable of a run-time loop}}

def list_with_a_run_time_index(x: I32):
    acc = [0, 0, 0]
    for i in range(3):
        x[i] = acc[i]
#              ^ expected-error {{KernelTypeError: an index of a list must be known at compile time}}

def list_grows_in_a_loop(x: I32):
    acc = [0]
    for i in range(3):
#   ^ expected-error {{KernelTypeError: changes its length in a run-time loop}}
        acc.append(x[i])
    x[0] = acc[0]

def lanes_must_match(x: I32):
    v = kv.vector(kv.f32, 4) + kv.vector(kv.f32, 8)
#       ^ expected-error {{KernelTypeError: vectors of 4 and 8 lanes}}
    x[0] = kv.i32(v[0])

def lane_out_of_range(x: I32):
    v = kv.vector(kv.i32, 4)
    x[0] = v[4]
#          ^ expected-error {{KernelError: lane must be in [0, 4), got 4}}

def used_before_assignment(x: I32):
    x[0] = later
#          ^ expected-error {{KernelError: variable 'later' has no value yet}}
    later = 1

def undefined_name(x: I32):
    x[0] = missing
#          ^ expected-error {{KernelError: name 'missing' is not defined}}

def math_of_an_int(x: I32):
    kv.math.exp(x[0])
#   ^ expected-error {{KernelTypeError: kv.math.exp needs f32, f64, f16 or bf16, got i32}}

def range_of_a_float(x: F32):
    for i in range(x[0]):
#            ^ expected-error {{KernelTypeError: range takes integers, got a f32 value}}
        x[i] = 0.0

# --- constructs ----------------------------------------------------------------------------------------

def try_statement(x: I32):
    try:
#   ^ expected-error {{UnsupportedError: kernels do not support try}}
        x[0] = 1
    except ValueError:
        pass

def global_statement(x: I32):
    global POOL
#   ^ expected-error {{UnsupportedError: kernels do not support global}}
    x[0] = 1

def class_statement(x: I32):
    class C:
#   ^ expected-error {{UnsupportedError: kernels do not support class}}
        pass

    x[0] = 1

def import_statement(x: I32):
    import os
#   ^ expected-error {{UnsupportedError: kernels do not support import}}

    x[0] = 1

def print_call(x: I32):
    print(x[0])
#   ^ expected-error {{UnsupportedError: print(): use kv.printf}}

def generator(x: I32):
    x[0] = yield x[0]
#          ^ expected-error {{UnsupportedError: yield}}

def with_statement(x: I32):
    with 3:
#   ^ expected-error {{UnsupportedError: with over 3}}
        x[0] = 1

def for_else(x: I32):
    for i in range(3):
#   ^ expected-error {{UnsupportedError: for ... else}}
        x[i] = 1
    else:
        x[0] = 2

def while_else(x: I32):
    while x[0] > 3:
#   ^ expected-error {{UnsupportedError: while ... else}}
        x[0] = 1
    else:
        x[0] = 2

def run_time_assert(x: I32):
    assert x[0] > 3
#   ^ expected-error {{UnsupportedError: assert on a value of the kernel: use kv.device_assert}}

def compile_time_assert(x: I32):
    assert 1 + 1 == 3
#   ^ expected-error {{KernelError: assertion failed: 1 + 1 == 3}}

def run_time_f_string(x: I32):
    kv.printf(f"{x[0]}")
#             ^ expected-error {{UnsupportedError: values of the kernel in an f-string}}

def run_time_comprehension(x: I32):
    x[0] = sum([x[j] for j in range(4) if x[j] > 0])
#                                         ^ expected-error {{UnsupportedError: a comprehension with a condition on a value of the kernel}}

def static_of_a_run_time_range(x: I32):
    for i in kv.static(range(x[0])):
#            ^ expected-error {{KernelTypeError: kv.static needs values known at compile time}}
        x[i] = 1

def calls_itself(n):
    return calls_itself(n - 1)
#          ^ expected-error {{KernelTypeError: calls_itself() calls itself: kernels do not support recursion}}

def recursion(x: I32):
    x[0] = calls_itself(x[0])

def finds(x):
    for i in range(10):
#   ^ expected-error {{UnsupportedError: return of a value inside a run-time loop: assign it to a variable and break}}
        if x[i] > 3:
            return i
    return -1

def value_returned_from_a_loop(x: I32):
    x[0] = finds(x)

def sometimes(x):
# expected-error {{KernelError: sometimes() returns a value on some paths only}}
    if x[0] > 3:
        return 1

def value_on_some_paths(x: I32):
    x[0] = sometimes(x)

def kernel_with_a_result(x: I32):
# expected-error {{KernelError: a kernel returns nothing: write results to a buffer}}
    return x[0]

# --- calls ---------------------------------------------------------------------------------------------

def helper(a, b=2, *, c):
    return a + b + c

def missing_argument(x: I32):
    x[0] = helper(x[0])
#          ^ expected-error {{KernelTypeError: helper() needs c, which the call does not give}}

def too_many_arguments(x: I32):
    x[0] = helper(1, 2, 3, c=4)
#          ^ expected-error {{KernelTypeError: helper() takes 2 arguments, got 3}}

def unknown_keyword(x: I32):
    x[0] = helper(1, c=1, d=2)
#          ^ expected-error {{KernelTypeError: helper() has no parameter 'd'}}

def printf_arity(x: I32):
    kv.printf("a %d %d", x[0])
#   ^ expected-error {{KernelTypeError: the format 'a %d %d' of kv.printf takes 2 values, got 1}}

def printf_type(x: I32):
    kv.printf("%f", x[0])
#   ^ expected-error {{KernelTypeError: %f of kv.printf does not print i32}}

def misspelt_name(x: I32):
    x[0] = kv.thread_idx.x
#          ^ expected-error {{KernelError: module 'kvarn' has no attribute 'thread_idx'}}

def unpacking(x: I32):
    a, b = x[0], x[1], x[2]
#   ^ expected-error {{KernelError: cannot unpack 3 values into 2 variables}}

def fragments(x: I32):
    f = [x[0], x[1]]
    kv.mma_m16n8k16(f, f, [0.0] * 4)
#   ^ expected-error {{KernelError: mma_m16n8k16 takes fragments of 4, 2 and 4, got 2, 2 and 4}}

# --- names ----------------------------------------------------------------------------------------------

def misspelt_function(x: F32):
    v = kv.barier()
#       ^ expected-error {{KernelError: module 'kvarn' has no attribute 'barier'; did you mean 'barrier'?}}

def misspelt_function_of_a_module(x: F32):
    v = kv.math.exq(x[0])
#       ^ expected-error {{KernelError: did you mean 'exp'?}}

def misspelt_attribute(x: F32):
    v = x.shap[0]
#       ^ expected-error {{KernelError: did you mean 'shape'?}}

def attribute_of_no_like(x: F32):
    v = kv.block_id.xx
#       ^ expected-error {{KernelError: attribute 'xx'}}

def element_of_a_read_only_buffer(x: kv.ReadOnlyBuffer[kv.f32, 1]):
    x[0] = 1.0
#   ^ expected-error {{KernelTypeError: what is declared kv.ReadOnlyBuffer[kv.f32, 1] is not written}}

def store_to_a_read_only_buffer(x: kv.ReadOnlyBuffer[kv.f32, 1]):
    x.store(0, value=1.0)
#   ^ expected-error {{KernelTypeError: what is declared kv.ReadOnlyBuffer[kv.f32, 1] is not written}}

def atomic_on_a_read_only_buffer(x: kv.ReadOnlyBuffer[kv.f32, 1]):
    kv.atomic_add(x, 0, 1.0)
#   ^ expected-error {{KernelTypeError: what is declared kv.ReadOnlyBuffer[kv.f32, 1] is not written}}

# --- caches ----------------------------------------------------------------------------------------------

def stored_element(cache: PAGED):
    cache.store(0, 0, 0, 0, kv.f32(1))
#   ^ expected-error {{KernelTypeError: what is stored in a cache must be bf16, got f32: write kv.bf16(...)}}

def scale_of_a_plain_cache(cache: PAGED):
    cache.load_scale(0, 0, 0, 0)
#   ^ expected-error {{KernelTypeError: load_scale needs a quantized cache}}

def values_of_mla(collection: MLA):
    collection.get_value_cache(0)
#   ^ expected-error {{KernelTypeError: get_value_cache needs a collection with values}}

def populate_tile(cache: PAGED):
    cache.populate(0, 0, 24)
#   ^ expected-error {{KernelError: populate: tile rows and page size must divide one another, got 24 and 16}}

def unknown_method(cache: PAGED):
    cache.lookup(0)
#   ^ expected-error {{KernelError: 'Cache' object has no attribute 'lookup'}}

def method_arity(cache: PAGED):
    cache.load(0, 0)
#   ^ expected-error {{KernelTypeError: missing 2 required positional arguments}}

def cache_chosen_at_run_time(a: PAGED, b: PAGED):
    if kv.thread_id.x > 3:
        c = a
    else:
        c = b
    c.cache_length(0)
#   ^ expected-error {{KernelTypeError: 'c' differs between the branches of a run-time condition}}

def cache_carried_by_a_loop(collection: POOL):
    c = collection.get_key_cache(0)
    for i in range(4):
#   ^ expected-error {{KernelTypeError: a run-time loop carries numbers, vectors, pointers}}
        c.cache_length(0)
        c = collection.get_key_cache(i)

# --- tiles -----------------------------------------------------------------------------------------------

def tile_as_a_condition(out: F32):
    if kv.full(64, 1.0) > 0.0:
#      ^ expected-error {{KernelTypeError: a condition must be a scalar, got a bool tile of shape}}
        out[0] = 1.0

def tile_of_another_shape_in_a_loop(out: F32):
    m = kv.full(64, 0.0)
    for _j in range(0, out.shape[0]):
#   ^ expected-error {{KernelTypeError: 'm' is a f32 tile of shape (64,) when an iteration starts}}
        m = kv.full(32, 0.0)
    out.scatter(kv.tile_index(32), value=m)

def tile_into_what_is_read_only(out: kv.ReadOnlyBuffer[kv.f32, 1]):
    out.scatter(kv.tile_index(64), value=1.0)
#   ^ expected-error {{KernelTypeError: is not written: declare it kv.Buffer}}

# --- generators ------------------------------------------------------------------------------------------

def running(n):
    total = 0
    for i in range(n):
        total = total + i
#               ^ expected-error {{KernelTypeError: keeps no variable from one iteration to the next}}
        yield total

def generator_that_carries_a_variable(out: I32, n: kv.i32):
    for total in running(n):
        out[0] = total

def twice(n):
    for i in range(n):
        yield i
        yield i

def generator_that_yields_twice(out: I32, n: kv.i32):
    for i in twice(n):
#            ^ expected-error {{KernelTypeError: twice() yields: a generator of a kernel ends with a for statement}}
        out[0] = i

def late(n):
    for i in range(n):
        yield i + 1
    _ = n + 1

def generator_that_goes_on(out: I32, n: kv.i32):
    for i in late(n):
#            ^ expected-error {{KernelTypeError: late() yields: a generator of a kernel ends with a for statement}}
        out[0] = i

def guarded(n):
    for i in range(n):
        if i > 2:
            yield i

def generator_that_yields_sometimes(out: I32, n: kv.i32):
    for i in guarded(n):
#            ^ expected-error {{KernelTypeError: guarded() yields: a generator of a kernel ends with a for statement}}
        out[0] = i

def leaving(n):
    for i in range(n):
        if i > 2:
            break
        yield i

def generator_that_leaves_its_loop(out: I32, n: kv.i32):
    for i in leaving(n):
#            ^ expected-error {{KernelTypeError: leaving() yields: a generator of a kernel ends with a for statement}}
        out[0] = i

def nothing(n):
    for _ in range(n):
        yield

def generator_of_nothing(out: I32, n: kv.i32):
    for i in nothing(n):
#            ^ expected-error {{KernelTypeError: nothing() yields: a generator of a kernel ends with a for statement}}
        out[0] = i

# --- what later passes see -------------------------------------------------------------------------------

def barrier(x: F32):
    x[0] = 1.0
    kv.barrier()
#   ^ expected-error@host {{KernelError: 'gpu.barrier' op needs the threads of a block to run together: the host target runs them one after another; run it on a GPU, or in the emulator (kv.emulated)}}

def total(x):
    return kv.warp_reduce(x[0], "add")
#          ^ expected-error@host {{KernelError: 'gpu.shuffle' op needs the threads of a block to run together}}

def reduced(x: F32):
    x[1] = total(x)

def shared_in_a_loop(x: F32):
    for i in range(x.shape[0]):
        s = kv.shared(32, kv.f32)
#           ^ expected-error@host {{KernelError: 'kv.alloc_shared' op must be outside loops and}}
#           ^ expected-error@sm_90a {{KernelError: 'kv.alloc_shared' op must be outside loops and}}
        s[0] = x[i]

def too_much_shared(x: F32):
# expected-error@sm_90a {{KernelError: 'gpu.func' op must use at most 232448 bytes of shared memory on sm_90a, got 400000}}
    s = kv.shared(100_000, kv.f32)
    s[0] = x[0]
    x[1] = s[0]

def trapping(cache: F32_PAGED):
    cache.store(0, 0, 0, 0, kv.f32(0), oob="trap")
#   ^ expected-error@host {{KernelError: 'llvm.intr.trap' op would end the process on the host target}}

def machine_function(x: F32):
    x[0] = kv.ex2(x[0])
#          ^ expected-error@host {{KernelError: 'llvm.inline_asm' op is an instruction of NVIDIA GPUs}}

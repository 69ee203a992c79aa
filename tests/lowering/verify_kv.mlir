// RUN: kv-opt %s --verify-kv --split-input-file --verify-diagnostics | FileCheck %s
// It verifies: there is no answer that it could change.

// Handles are arguments of functions or results of kv ops. A module that holds to this comes out as it was.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

// CHECK-LABEL: gpu.func @handles_from_kv_ops
// CHECK:         scf.for
// CHECK-NEXT:      "kv.key_cache"
// CHECK-NEXT:      "kv.load"
gpu.module @kernels {
  gpu.func @handles_from_kv_ops(%pool: !pool, %i: i32, %n: index) kernel {
    %zero = arith.constant 0 : index
    %one = arith.constant 1 : index
    scf.for %k = %zero to %n step %one {
      %c = "kv.key_cache"(%pool, %i) : (!pool, i32) -> !cache
      %x = "kv.load"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
    }
    gpu.return
  }
}

// A pass that changes types may leave casts behind.
// CHECK-LABEL: func.func @casts
// CHECK:         builtin.unrealized_conversion_cast
func.func @casts(%p: !llvm.ptr<1>, %i: i32) -> i32 {
  %c = builtin.unrealized_conversion_cast %p : !llvm.ptr<1> to !cache
  %page = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
  return %page : i32
}

// -----

// Every problem is reported, not the first one only.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!bad = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

func.func @chosen(%c: !cache, %d: !cache, %p: i1) {
  // expected-error @below {{'scf.if' op cannot give a cache (result #0): it must be a function argument or the result of a kv op}}
  %e = scf.if %p -> !cache {
    scf.yield %c : !cache
  } else {
    scf.yield %d : !cache
  }
  return
}

func.func @selected(%c: !cache, %d: !cache, %p: i1) {
  // expected-error @below {{'arith.select' op cannot give a cache (result #0): it must be a function argument or the result of a kv op}}
  %e = arith.select %p, %c, %d : !cache
  return
}

func.func @carried(%c: !cache, %n: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  // expected-error @below {{'scf.for' op cannot give a cache (result #0): it must be a function argument or the result of a kv op}}
  // expected-error @below {{'scf.for' op cannot carry a cache (region argument #1): it must be a function argument or the result of a kv op}}
  %e = scf.for %k = %zero to %n step %one iter_args(%d = %c) -> (!cache) {
    scf.yield %d : !cache
  }
  return
}

// expected-error @below {{'func.func' op cannot carry a collection (block argument #0): it must be a function argument or the result of a kv op}}
func.func @branched(%c: !pool) {
  cf.br ^next(%c : !pool)
^next(%d: !pool):
  return
}

// expected-error @below {{'func.func' op cannot return an operand (result #0): it must be a function argument or the result of a kv op}}
func.func private @returned(!view) -> !view

// A type is checked where a function declares it, once a module.
// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a paged cache must be positive, got 0; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
func.func private @first(!bad)
func.func private @second(!bad)

// A buffer of a kernel has dimensions.
gpu.module @buffers {
  // expected-error @below {{'gpu.func' op argument #0 of a kernel must be a memref of rank 1 or more, got memref<f32>}}
  gpu.func @scalar_buffer(%b: memref<f32>) kernel {
    gpu.return
  }
}

// Operations on whole caches are not for use in kernels.
gpu.module @operations {
  gpu.func @operation_in_kernel(%c: !cache, %x: memref<?x8x128xbf16>, %offsets: memref<?xi32>) kernel {
    // expected-error @below {{'kv.store_ragged' op must be outside kernels (gpu.func): it becomes kernels of its own}}
    "kv.store_ragged"(%c, %x, %offsets) : (!cache, memref<?x8x128xbf16>, memref<?xi32>) -> ()
    gpu.return
  }
}

func.func @all(%c: !cache, %i: i32) {
  // expected-error @below {{width must be a positive integer}}
  %x = "kv.load"(%c, %i, %i, %i, %i) {width = 0 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  // expected-error @below {{tile must divide the page size 16, got 3}}
  %p = "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 3 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// What one pass leaves for another is of the kind that the other reads.
gpu.module @annotations {
  // expected-error @below {{'gpu.func' op attribute 'kv.block' must be an array<i32> of three positive extents, got array<i32: 0, 1, 1>}}
  gpu.func @block() kernel attributes {kv.block = array<i32: 0, 1, 1>} { gpu.return }
  // expected-error @below {{'gpu.func' op attribute 'kv.args' must be an array of dictionaries, each with a name and of a known dtype, if any, got [{dtype = "bf12", name = "x"}]}}
  gpu.func @args() kernel attributes {kv.args = [{name = "x", dtype = "bf12"}]} { gpu.return }
  // expected-error @below {{'gpu.func' op attribute 'kv.schedule' must be a dictionary of numbers and booleans, and strings for kind and instruction, got {rows = "64"}}}
  gpu.func @schedule() kernel attributes {kv.schedule = {rows = "64"}} { gpu.return }
  // expected-error @below {{'gpu.func' op attribute 'kv.written' must have numbers below 1, the number of arguments, got 1}}
  gpu.func @written(%c: !cache) kernel attributes {kv.arg_types = [!cache], kv.written = array<i64: 1>} { gpu.return }
  gpu.func @loads(%c: !cache, %i: i32) kernel {
    // expected-error @below {{'kv.load' op attribute 'kv.alignment' must be a power of two, in bytes, got "zork"}}
    %x = "kv.load"(%c, %i, %i, %i, %i) {width = 8 : i64, kv.alignment = "zork"} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    gpu.return
  }
}

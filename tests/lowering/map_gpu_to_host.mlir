// RUN: kv-opt %s --map-gpu-to-host --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ sed 's/, schedule = {.*}}/}/' %S/Inputs/attention.mlir | kv-opt - --kv-pipeline --target=host --stop-after=map-gpu-to-host --check-semantics-of=map-gpu-to-host --lengths=edges:16 --new=3 --model=%S/Inputs/models.py:attention -o /dev/null %}

gpu.module @kernels {
  // Blocks in one loop over linear ids, threads in three; ids are answered from the loops.
  // CHECK-LABEL: func.func @grid
  // CHECK-SAME:    (%[[STATUS:.*]]: !llvm.ptr, %[[GX:.*]]: i32, %{{.*}}: i32, %{{.*}}: i32, %[[BX:.*]]: i32, %{{.*}}: i32, %{{.*}}: i32, %[[FIRST:.*]]: i64, %[[LAST:.*]]: i64, %[[P:.*]]: !llvm.ptr<1>)
  // CHECK-SAME:    kv.host_kernel
  // CHECK:         scf.for %{{.*}} = %[[FIRST]] to %[[LAST]]
  // CHECK:           arith.remui
  // CHECK-COUNT-3:   scf.for
  // CHECK:               llvm.store
  // CHECK-NOT:     gpu.
  gpu.func @grid(%p: !llvm.ptr<1>) kernel {
    %i = gpu.thread_id x
    %j = gpu.block_id y
    %k = arith.addi %i, %j : index
    %w = arith.index_cast %k : index to i32
    llvm.store %w, %p : i32, !llvm.ptr<1>
    gpu.return
  }

  // Shared memory is one array on the stack; a failed assertion is a number in the status.
  // CHECK-LABEL: func.func @shared_and_assert
  // CHECK-SAME:    kv.assertions = ["{{.*}}:39:5: t is small"]
  // CHECK:         llvm.alloca %{{.*}} x i8 {alignment = 16 : i64}
  // CHECK:         scf.for
  // CHECK:           arith.xori %arg9
  // CHECK:           scf.if
  // The first failure is kept.
  // CHECK:             %[[BEFORE:.*]] = llvm.load %arg0
  // CHECK:             %[[NONE:.*]] = arith.cmpi eq, %[[BEFORE]]
  // CHECK:             %[[KEPT:.*]] = arith.select %[[NONE]], %{{.*}}, %[[BEFORE]]
  // CHECK:             llvm.store %[[KEPT]], %arg0
  gpu.func @shared_and_assert(%ok: i1) kernel {
    %a = "kv.alloc_shared"() {bytes = 64 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
    %v = llvm.load %a : !llvm.ptr<3> -> i32
    llvm.store %v, %a : i32, !llvm.ptr<3>
    cf.assert %ok, "t is small"
    gpu.return
  }

  // Half-precision fma is computed in f32, vectors too; bf16 is left to LLVM.
  // CHECK-LABEL: func.func @half_fma
  // CHECK-COUNT-3: arith.extf %{{.*}} : f16 to f32
  // CHECK:         %[[F:.*]] = math.fma %{{.*}} : f32
  // CHECK:         arith.truncf %[[F]] : f32 to f16
  // CHECK:         math.fma %{{.*}} : vector<2xf32>
  // CHECK:         math.fma %{{.*}} : bf16
  gpu.func @half_fma(%h: f16, %v: vector<2xf16>, %b: bf16, %p: !llvm.ptr<1>) kernel {
    %x = math.fma %h, %h, %h : f16
    llvm.store %x, %p : f16, !llvm.ptr<1>
    %y = math.fma %v, %v, %v : vector<2xf16>
    llvm.store %y, %p : vector<2xf16>, !llvm.ptr<1>
    %z = math.fma %b, %b, %b : bf16
    llvm.store %z, %p : bf16, !llvm.ptr<1>
    gpu.return
  }

  // CHECK-LABEL: func.func @print
  // CHECK:         llvm.call @printf
  gpu.func @print(%x: f32) kernel {
    gpu.printf "x = %f\n", %x : f32
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @barrier() kernel {
    // expected-error @below {{'gpu.barrier' op needs the threads of a block to run together}}
    gpu.barrier
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @shuffle(%x: f32) kernel {
    %one = arith.constant 1 : i32
    %width = arith.constant 32 : i32
    // expected-error @below {{'gpu.shuffle' op needs the threads of a block to run together}}
    %y, %ok = gpu.shuffle xor %x, %one, %width : f32
    gpu.return
  }
}

// -----

gpu.module @tiled {
  // A kernel over tiles has one thread: there are loops over blocks only.
  // CHECK-LABEL: func.func @tiled
  // CHECK-COUNT-1: scf.for
  // CHECK-NOT:     scf.for
  // CHECK:         return
  gpu.func @tiled(%out: !llvm.ptr<1>) kernel attributes {kv.tiled} {
    %i = gpu.thread_id x
    %n = arith.index_cast %i : index to i32
    llvm.store %n, %out : i32, !llvm.ptr<1>
    gpu.return
  }
}
